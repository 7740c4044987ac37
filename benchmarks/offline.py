"""Offline throughput: the field's usual benchmark, through the `LLM` class.

N sequences with prompt and output lengths uniform in [MIN, MAX], seed 0, temperature 0.6, end tokens ignored. The
defaults are the full size for a GPU (256 sequences, 100..1024); scale it down for a CPU:

    python benchmarks/offline.py --model benchmarks/configs/qwen3-0.6b --load-format dummy      # one GPU
    python benchmarks/offline.py --num-seqs 16 --min-len 32 --max-len 128       # two CPU cores, default model

Prints one JSON object: tokens in and out, seconds, output tokens/s; with --batch-1 also the milliseconds per token of
one sequence alone, measured end to end through the scheduler.
"""

from __future__ import annotations

import argparse
import json
import random
import time

from minisgl import LLM, SamplingParams


def lengths_and_prompts(args: argparse.Namespace, vocab_size: int) -> tuple[list[list[int]], list[int]]:
    rng = random.Random(args.seed)
    prompts = [
        [rng.randint(0, min(10_000, vocab_size - 1)) for _ in range(rng.randint(args.min_len, args.max_len))]
        for _ in range(args.num_seqs)
    ]
    return prompts, [rng.randint(args.min_len, args.max_len) for _ in range(args.num_seqs)]


def batch_one(llm: LLM, vocab_size: int, tokens: int) -> float:
    """Milliseconds per output token of one sequence alone (the first token, which is prefill, is not counted)."""
    prompt = [i % min(10_000, vocab_size) for i in range(1, 101)]
    samples = []
    for n in (1, tokens + 1):
        start = time.perf_counter()
        llm.generate(prompt, SamplingParams(temperature=0, ignore_eos=True, max_tokens=n), progress=False)
        samples.append(time.perf_counter() - start)
    return (samples[1] - samples[0]) / tokens * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", default=None, help="directory, Hugging Face id or .gguf (default: the embedded model)"
    )
    parser.add_argument("--load-format", default="auto", choices=["auto", "dummy"])
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--attn", default="auto")
    parser.add_argument("--deterministic", action="store_true", help="what it costs on a GPU")
    parser.add_argument("--token-budget", type=int, default=None, help="new tokens in a step (default: by device)")
    parser.add_argument("--num-seqs", type=int, default=256)
    parser.add_argument("--min-len", type=int, default=100)
    parser.add_argument("--max-len", type=int, default=1024)
    parser.add_argument("--repeat", type=int, default=1, help="timed runs; the median is reported, all are printed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--batch-1", type=int, default=0, metavar="TOKENS", help="also time one sequence of TOKENS alone"
    )
    args = parser.parse_args()

    start = time.perf_counter()
    with LLM(
        args.model,
        load_format=args.load_format,
        dtype=args.dtype,
        tp=args.tp,
        attn=args.attn,
        deterministic=args.deterministic,
        max_running_req=args.num_seqs,
        max_prefill_length=args.token_budget,
    ) as llm:
        started = time.perf_counter() - start
        vocab_size = llm.engine_info.vocab_size
        llm.generate([1, 2, 3], SamplingParams(max_tokens=4, ignore_eos=True), progress=False)
        seconds = []
        for run in range(args.repeat):
            args.seed += run  # other prompts, so that a run finds nothing of an earlier one in the cache
            prompts, outputs = lengths_and_prompts(args, vocab_size)
            params = [SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=n) for n in outputs]
            start = time.perf_counter()
            results = llm.generate(prompts, params, progress=False)
            seconds.append(time.perf_counter() - start)
        produced = sum(len(r.token_ids) for r in results)
        median = sorted(seconds)[len(seconds) // 2]
        report = {
            "sequences": args.num_seqs,
            "tokens_in": sum(map(len, prompts)),
            "tokens_out": produced,
            "seconds": [round(s, 3) for s in seconds],
            "output_tok_per_s": round(produced / median, 1),
            "start_seconds": round(started, 2),
        }
        if args.batch_1:
            report["batch_1_ms_per_token"] = round(
                sorted(batch_one(llm, vocab_size, args.batch_1) for _ in range(3))[1], 3
            )
    print(json.dumps(report))


if __name__ == "__main__":
    main()
