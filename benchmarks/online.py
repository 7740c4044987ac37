"""Online load against any OpenAI-compatible URL: TTFT, inter-token latency, throughput, with percentiles.

    python benchmarks/online.py --concurrency 8 --num-requests 32 --input-len 104 --output-len 64
    python benchmarks/online.py --request-rate 4 --num-requests 100 --json out.json --plot out.png
    python benchmarks/online.py --shared-prefix 2000 --input-len 20 --output-len 1 --concurrency 1 --num-requests 2

Either CONCURRENCY requests are always under way, or requests arrive at random (Poisson) at RATE a second. Prompts are
streams of short common words, one token each in most vocabularies; the usage that the server reports is what counts.
With --shared-prefix all prompts begin with the same words. The load stops by itself after --num-requests.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import random
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

WORDS = (
    "the of and to in is that for it as was with be by on not he his but at are this have from or had an "
    "they which one you were all her she there would their we him been has when who will no more if out "
    "so up said what its about than into them can only other time new some could these two may first then "
    "do any like my now over such our man me even most made after also did"
).split()
PERCENTILES = (50, 90, 99)


@dataclass
class Record:
    """One request: times in seconds from the start of the load."""

    sent: float
    chunks: list[float] = field(default_factory=list)
    done: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    error: str | None = None


def words(rng: random.Random, n: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(n))


def request_body(args: argparse.Namespace, index: int, warmup: bool) -> dict[str, Any]:
    prefix = words(random.Random(args.seed), args.shared_prefix)
    rng = random.Random(f"{args.seed}/{'warmup' if warmup else index}")
    spread = int(args.input_len * args.spread)
    text = " ".join(filter(None, (prefix, words(rng, args.input_len + rng.randint(-spread, spread)))))
    spread = int(args.output_len * args.spread)
    body = {
        "model": args.model,
        "max_tokens": args.output_len + rng.randint(-spread, spread),
        "temperature": args.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
    }
    if args.endpoint == "chat":
        return body | {"messages": [{"role": "user", "content": text}]}
    return body | {"prompt": text}


async def one_request(http: aiohttp.ClientSession, url: str, body: dict[str, Any], epoch: float) -> Record:
    record = Record(sent=time.time() - epoch)
    try:
        async with http.post(url, json=body) as response:
            if response.status != 200:
                record.error = f"HTTP {response.status}: {(await response.text())[:200]}"
                return record
            async for line in response.content:
                if not line.startswith(b"data: {"):
                    continue
                now = time.time() - epoch
                event = json.loads(line[6:])
                if "error" in event:
                    record.error = str(event["error"])
                    return record
                if event.get("choices"):
                    choice = event["choices"][0]
                    if choice.get("text") or (choice.get("delta") or {}).get("content"):
                        record.chunks.append(now)
                if usage := event.get("usage"):
                    record.prompt_tokens = usage["prompt_tokens"]
                    record.completion_tokens = usage["completion_tokens"]
                    record.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    except (aiohttp.ClientError, TimeoutError, OSError) as e:
        record.error = f"{type(e).__name__}: {e}"
    record.done = time.time() - epoch
    return record


async def load(args: argparse.Namespace, share: int, epoch: float) -> list[Record]:
    """The part of the load that client process number `share` carries."""
    path = "/v1/chat/completions" if args.endpoint == "chat" else "/v1/completions"
    indices = list(range(share, args.num_requests, args.processes))
    timeout = aiohttp.ClientTimeout(total=args.timeout)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as http:
        await asyncio.sleep(max(0.0, epoch - time.time()))
        if args.request_rate:
            rng = random.Random(f"{args.seed}/{share}")
            tasks = []
            for index in indices:
                await asyncio.sleep(rng.expovariate(args.request_rate / args.processes))
                tasks.append(
                    asyncio.create_task(one_request(http, args.url + path, request_body(args, index, False), epoch))
                )
            return list(await asyncio.gather(*tasks))
        queue = iter(indices)

        async def worker() -> list[Record]:
            return [await one_request(http, args.url + path, request_body(args, i, False), epoch) for i in queue]

        mine = len(range(share, args.concurrency, args.processes))
        return sum(await asyncio.gather(*(worker() for _ in range(mine))), [])


def run_share(args: argparse.Namespace, share: int, epoch: float) -> list[Record]:
    return asyncio.run(load(args, share, epoch))


async def prepare(args: argparse.Namespace) -> None:
    """Asks the server for its model and sends the warm-up requests, which are not counted."""
    async with aiohttp.ClientSession() as http:
        if args.model is None:
            try:
                async with http.get(args.url + "/v1/models") as response:
                    args.model = (await response.json())["data"][0]["id"]
            except (aiohttp.ClientError, ValueError, LookupError) as error:
                raise SystemExit(f"There is no server that answers {args.url}/v1/models ({error}).") from None
        path = "/v1/chat/completions" if args.endpoint == "chat" else "/v1/completions"
        for i in range(args.warmup):
            body = request_body(argparse.Namespace(**vars(args) | {"shared_prefix": 0}), i, True)
            record = await one_request(http, args.url + path, body, time.time())
            if record.error:
                raise SystemExit(f"The warm-up request failed: {record.error}")


def percentiles(values: list[float]) -> dict[str, float]:
    """Mean and percentiles (nearest rank) in milliseconds."""
    if not values:
        return {}
    ordered = sorted(values)
    out = {"mean": round(sum(ordered) / len(ordered) * 1e3, 2)}
    for p in PERCENTILES:
        out[f"p{p}"] = round(ordered[min(len(ordered) - 1, int(len(ordered) * p / 100))] * 1e3, 2)
    return out


def summarise(args: argparse.Namespace, records: list[Record]) -> dict[str, Any]:
    good = [r for r in records if r.error is None]
    wall = max((r.done for r in good), default=0.0) - min((r.sent for r in good), default=0.0)
    tokens = sum(r.completion_tokens for r in good)
    return {
        "url": args.url,
        "model": args.model,
        "endpoint": args.endpoint,
        "load": f"rate {args.request_rate}/s" if args.request_rate else f"concurrency {args.concurrency}",
        "requests": len(good),
        "failed": len(records) - len(good),
        "first_error": next((r.error for r in records if r.error), None),
        "seconds": round(wall, 3),
        "prompt_tokens": sum(r.prompt_tokens for r in good),
        "cached_tokens": sum(r.cached_tokens for r in good),
        "completion_tokens": tokens,
        "output_tok_per_s": round(tokens / wall, 1) if wall else 0.0,
        "requests_per_s": round(len(good) / wall, 3) if wall else 0.0,
        "ttft_ms": percentiles([r.chunks[0] - r.sent for r in good if r.chunks]),
        "inter_token_ms": percentiles([b - a for r in good for a, b in zip(r.chunks, r.chunks[1:], strict=False)]),
        "latency_ms": percentiles([r.done - r.sent for r in good]),
        "ttft_each_ms": [
            round((r.chunks[0] - r.sent) * 1e3, 1) for r in sorted(good, key=lambda r: r.sent) if r.chunks
        ][:16],
    }


def plot(path: Path, records: list[Record], title: str) -> None:
    """Requests over time (waiting, then streaming), TTFT and inter-token latency as cumulative shares."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    good = sorted((r for r in records if r.chunks), key=lambda r: r.sent)
    figure, axes = plt.subplots(1, 3, figsize=(15, 4))
    for row, r in enumerate(good):
        axes[0].plot([r.sent, r.chunks[0]], [row, row], color="tab:orange", linewidth=1)
        axes[0].plot([r.chunks[0], r.done], [row, row], color="tab:blue", linewidth=1)
    axes[0].set(xlabel="s", ylabel="request", title="waiting (orange), streaming (blue)")
    gaps = [b - a for r in good for a, b in zip(r.chunks, r.chunks[1:], strict=False)]
    for axis, values, name in (
        (axes[1], [r.chunks[0] - r.sent for r in good], "TTFT"),
        (axes[2], gaps, "between tokens"),
    ):
        axis.plot(sorted(v * 1e3 for v in values), [(i + 1) / len(values) for i in range(len(values))])
        axis.set(xlabel="ms", ylabel="share", title=name, ylim=(0, 1))
        axis.grid(alpha=0.3)
    figure.suptitle(title)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:1919", help="with /v1 at its end or without")
    parser.add_argument("--model", default=None, help="default: the first that the server lists")
    parser.add_argument("--endpoint", default="chat", choices=["chat", "completions"])
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--request-rate", type=float, default=0.0, help="requests a second; replaces --concurrency")
    parser.add_argument("--num-requests", type=int, default=32)
    parser.add_argument("--input-len", type=int, default=80, help="words of each prompt beside the shared prefix")
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--spread", type=float, default=0.0, help="lengths vary by this share, uniformly")
    parser.add_argument("--shared-prefix", type=int, default=0, metavar="WORDS")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--warmup", type=int, default=1)
    parser.add_argument(
        "--processes", type=int, default=1, help="client processes, for tens of thousands of chunks a second"
    )
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for one request")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, default=None, help="write the summary and every request's times here")
    parser.add_argument("--plot", type=Path, default=None, help="write a picture here")
    args = parser.parse_args()
    args.url = args.url.removesuffix("/").removesuffix("/v1")

    asyncio.run(prepare(args))
    epoch = time.time() + (0.1 if args.processes == 1 else 2.0)
    if args.processes == 1:
        records = run_share(args, 0, epoch)
    else:
        with ProcessPoolExecutor(args.processes, multiprocessing.get_context("spawn")) as pool:
            shares = [pool.submit(run_share, args, i, epoch) for i in range(args.processes)]
            records = sum((s.result() for s in shares), [])
    summary = summarise(args, records)
    print(json.dumps(summary, indent=1))
    if args.json:
        args.json.write_text(json.dumps({"summary": summary, "records": [asdict(r) for r in records]}))
    if args.plot:
        plot(args.plot, records, f"{summary['model']}, {summary['load']}: {summary['output_tok_per_s']} tok/s")


if __name__ == "__main__":
    main()
