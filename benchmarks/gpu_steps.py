"""Steps of the engine on a GPU, driven by the scheduler: steady decode, and streams beside arriving prompts.

    python benchmarks/gpu_steps.py --model benchmarks/configs/qwen3-0.6b [--only decode,mixed,offline,profile]

Prints one JSON object per line:

    decode      R requests of C tokens, one new token each: milliseconds a step, how long the GPU is idle between steps,
                and how long the host is busy with a step (all of the scheduler's and the engine's Python)
    mixed       R running streams, and a new prompt of P tokens every T milliseconds: the gap between two tokens of a
                stream, over that of pure decode (the mean of before and after, since the streams grow)
    offline     where the GPU's time goes in the offline benchmark (offline.py), by the number of requests in a step
    profile     where the GPU's time goes in a window of steady decode, kernel by kernel

Weights are dummies. Idle time is between the end of a step's work on the stream and the beginning of the next one's.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from offline import lengths_and_prompts

from minisgl.core import Batch, BatchResult, InFlight, SamplingParams
from minisgl.engine.config import EngineConfig
from minisgl.engine.engine import TorchEngine
from minisgl.message import AbortBackendMsg, BackendMsg, DetokenizeMsg, UserMsg, pack_ids
from minisgl.scheduler import Scheduler, SchedulerConfig


@dataclass
class Measured:
    """An engine that keeps time. ``spans`` are pairs of events around each step's work on the stream."""

    engine: TorchEngine
    spans: list[tuple[torch.cuda.Event, torch.cuda.Event]] = field(default_factory=list)
    shapes: list[tuple[int, int, int]] = field(default_factory=list)
    """Requests, new tokens, and tokens attended to of each step."""
    waited: float = 0.0

    def __post_init__(self) -> None:
        self.info = self.engine.info
        self.stream = self.engine._runner._stream  # type: ignore[union-attr]

    def launch(self, batch: Batch) -> InFlight:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record(self.stream)
        flight = self.engine.launch(batch)
        end.record(self.stream)
        self.spans.append((start, end))
        self.shapes.append((batch.size, batch.num_tokens, int(batch.cached.sum()) + batch.num_tokens))
        return _Waiting(self, flight)

    def close(self) -> None:
        self.engine.close()

    def reset(self) -> None:
        self.spans.clear()
        self.shapes.clear()
        self.waited = 0.0


@dataclass
class _Waiting:
    measured: Measured
    flight: InFlight

    def wait(self) -> BatchResult:
        begin = time.perf_counter()
        result = self.flight.wait()
        self.measured.waited += time.perf_counter() - begin
        return result


class Inbox:
    """The scheduler's messages of a benchmark. ``seen`` tells when each request got its tokens."""

    def __init__(self) -> None:
        self.arrived: list[BackendMsg] = []
        self.seen: dict[int, list[float]] = {}

    def receive(self, block: bool) -> list[BackendMsg]:
        arrived, self.arrived = self.arrived, []
        return arrived

    def send(self, items: list[DetokenizeMsg]) -> None:
        now = time.perf_counter()
        for item in items:
            if item.ids:
                self.seen.setdefault(item.uid, []).append(now)


class Bench:
    def __init__(self, args: argparse.Namespace) -> None:
        config = EngineConfig(
            model_path=Path(args.model),
            device="cuda",
            load_format="dummy",
            attention=args.attn,
            max_running_req=args.running + 8,
            token_budget=args.token_budget,
            cuda_graph_max_bs=args.running + 8,
        )
        self.engine = Measured(TorchEngine(config))
        self.inbox = Inbox()
        self.scheduler = Scheduler(self.engine, self.inbox, SchedulerConfig())
        self.random = np.random.default_rng(0)
        self.uid = 0

    def submit(self, tokens: int, output: int) -> int:
        self.uid += 1
        prompt = self.random.integers(0, 10_000, tokens).tolist()
        params = SamplingParams(temperature=0.6, max_tokens=output, ignore_eos=True)
        self.inbox.arrived.append(UserMsg(uid=self.uid, input_ids=pack_ids(prompt), params=params))
        return self.uid

    def fill(self, running: int, tokens: int, output: int) -> list[int]:
        """Starts so many requests and runs until all of them decode."""
        uids = [self.submit(tokens, output) for _ in range(running)]
        while not all(len(self.inbox.seen.get(uid, ())) > 2 for uid in uids):
            self.scheduler.step()
        return uids

    def clear(self, uids: list[int]) -> None:
        self.inbox.arrived += [AbortBackendMsg(uid=uid) for uid in uids]
        while self.scheduler.step():
            pass
        self.inbox.seen.clear()

    def steady(self, steps: int) -> tuple[float, float, float]:
        """Seconds a step, the share of time in which the GPU is idle, and the host's seconds a step."""
        self.engine.reset()
        begin = time.perf_counter()
        for _ in range(steps):
            self.scheduler.step()
        wall = time.perf_counter() - begin
        torch.cuda.synchronize()
        spans = self.engine.spans
        whole = spans[0][0].elapsed_time(spans[-1][1])
        idle = sum(a[1].elapsed_time(b[0]) for a, b in itertools.pairwise(spans))
        return wall / steps, idle / whole, (wall - self.engine.waited) / steps

    def decode(self, running: int, context: int, steps: int) -> dict[str, Any]:
        uids = self.fill(running, context, 4 * steps)
        each, idle, host = self.steady(steps)
        self.clear(uids)
        return {
            "bench": "decode",
            "running": running,
            "context": context,
            "ms_per_step": round(each * 1e3, 3),
            "gpu_idle_percent": round(idle * 100, 2),
            "host_ms_per_step": round(host * 1e3, 3),
        }

    def mixed(self, running: int, context: int, prompt: int, every: float, seconds: float) -> dict[str, Any]:
        uids = self.fill(running, context, 20_000)
        self.steady(50)
        before, _, _ = self.steady(200)
        for uid in uids:
            self.inbox.seen[uid].clear()
        begin = time.perf_counter()
        arrivals = 0
        while (now := time.perf_counter() - begin) < seconds:
            if now >= arrivals * every:
                arrivals += 1
                self.submit(prompt, 1)
            self.scheduler.step()
        gaps = np.concatenate([np.diff(self.inbox.seen[uid]) for uid in uids])
        # The streams have grown meanwhile, by a thousand tokens and more: so has a step without any prompt.
        self.steady(50)
        after, _, _ = self.steady(200)
        self.clear(uids)
        pure = (before + after) / 2
        p50, p99 = np.percentile(gaps, (50, 99)) / pure
        return {
            "bench": "mixed",
            "running": running,
            "prompt": prompt,
            "pure_ms_before_and_after": [round(before * 1e3, 3), round(after * 1e3, 3)],
            "p50": round(float(p50), 3),
            "p99": round(float(p99), 3),
            "max": round(float(gaps.max() / pure), 3),
            "prompts_per_s": round(arrivals / seconds, 1),
        }

    def offline(self, sequences: int) -> None:
        """Steps with prompts come first, then those of single tokens by their number, in classes of 32."""
        shape = argparse.Namespace(seed=0, num_seqs=sequences, min_len=100, max_len=1024)
        prompts, outputs = lengths_and_prompts(shape, self.engine.info.vocab_size)
        self.engine.reset()
        begin = time.perf_counter()
        for prompt, output in zip(prompts, outputs, strict=True):
            self.submit(len(prompt), output)
        while self.scheduler.step():
            pass
        wall = time.perf_counter() - begin
        spans, shapes = self.engine.spans, np.array(self.engine.shapes)
        torch.cuda.synchronize()
        times = np.array([a.elapsed_time(b) for a, b in spans])
        idle = sum(a[1].elapsed_time(b[0]) for a, b in itertools.pairwise(spans))
        rate, waits = sum(outputs) / wall, self.engine.waited
        print(f"{rate:.0f} tok/s, {wall:.3f} s: GPU idle {idle / 1e3:.3f} s, host waits {waits:.3f} s")
        kinds = np.where(shapes[:, 1] > shapes[:, 0], -1, (shapes[:, 0] - 1) // 32)
        for kind in np.unique(kinds):
            some = kinds == kind
            name = "with prompts" if kind < 0 else f"{32 * kind + 1} to {32 * kind + 32} requests"
            tokens, seen = shapes[some, 1].sum(), shapes[some, 2].mean()
            print(
                f"  {name:20s} {some.sum():5d} steps {tokens:8d} tokens {times[some].sum() / 1e3:7.3f} s "
                f"{times[some].mean():7.3f} ms each, {seen:9.0f} tokens attended to"
            )

    def profile(self, running: int, context: int, steps: int = 10) -> None:
        uids = self.fill(running, context, 1000)
        for _ in range(5):
            self.scheduler.step()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            for _ in range(steps):
                self.scheduler.step()
            torch.cuda.synchronize()
        self.clear(uids)
        kernels = sorted(profiler.key_averages(), key=lambda e: -e.self_device_time_total)
        total = sum(e.self_device_time_total for e in kernels) / steps
        print(f"decode of {running} at {context}: kernels take {total / 1e3:.3f} ms of a step")
        for e in kernels[:14]:
            each = e.self_device_time_total / e.count
            print(
                f"  {e.self_device_time_total / steps:9.1f} us {e.count / steps:6.1f} x {each:8.2f} us  {e.key[:100]}"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="benchmarks/configs/qwen3-0.6b")
    parser.add_argument("--attn", default="auto")
    parser.add_argument("--only", default="decode,mixed", help="of decode, mixed, offline, profile")
    parser.add_argument("--running", type=int, default=256)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--context", type=int, default=600)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--token-budget", type=int, default=None)
    args = parser.parse_args()
    bench = Bench(args)
    if "profile" in args.only:
        for batch in args.batch:
            bench.profile(batch, args.context)
    if "offline" in args.only:
        bench.offline(args.running)
    if "decode" in args.only:
        for batch in args.batch:
            print(json.dumps(bench.decode(batch, args.context, args.steps)), flush=True)
    if "mixed" in args.only:
        print(json.dumps(bench.mixed(64, args.context, 512, 0.05, 3.0)), flush=True)
    bench.engine.close()


if __name__ == "__main__":
    main()
