"""Host time of a scheduler step, with a device that costs nothing.

    python benchmarks/scheduler.py [--running 256] [--steps 400] [--page-size 16] [--prompt 512]

Counts all that happens on the host between two launches: plan, batch, results, messages and their encoding. The time
inside the simulated engine is taken off. Prints the median and the 99th percentile, in microseconds.
"""

from __future__ import annotations

import argparse
import time

import msgspec
import numpy as np

from minisgl.core import Batch, EngineInfo, SamplingParams
from minisgl.engine.simulated import SimulatedEngine, SimulatedStep
from minisgl.message import BackendMsg, DetokenizeBatch, DetokenizeMsg, UserMsg, pack_ids
from minisgl.scheduler import Scheduler, SchedulerConfig

WARM_UP = 20  # steps


class EncodingIO:
    """Encodes like the sockets do, and sends nowhere."""

    def __init__(self) -> None:
        self.inbox: list[BackendMsg] = []
        self._encoder = msgspec.msgpack.Encoder()

    def receive(self, block: bool) -> list[BackendMsg]:
        messages, self.inbox = self.inbox, []
        return messages

    def send(self, items: list[DetokenizeMsg]) -> None:
        self._encoder.encode(DetokenizeBatch(items=items))


class TimedEngine(SimulatedEngine):
    """Knows how long it was busy itself."""

    busy = 0.0

    def launch(self, batch: Batch) -> SimulatedStep:
        start = time.perf_counter()
        step = super().launch(batch)
        self.busy += time.perf_counter() - start
        return step

    def finish(self, step: SimulatedStep) -> None:
        start = time.perf_counter()
        super().finish(step)
        self.busy += time.perf_counter() - start


def measure(running: int, steps: int, page_size: int, prompt: int, params: SamplingParams) -> np.ndarray:
    """Host microseconds of each step with ``running`` requests in decode."""
    length = prompt + WARM_UP + 2 * running + steps  # the first to arrive decode while the last are in prefill
    info = EngineInfo(
        num_pages=running * -(-length // page_size),
        page_size=page_size,
        max_running_req=running,
        max_seq_len=length + 1,
        vocab_size=150_000,
        token_budget=8192,
    )
    engine, io = TimedEngine(info, verify=False), EncodingIO()
    scheduler = Scheduler(engine, io, SchedulerConfig())
    rng = np.random.default_rng(0)
    for uid in range(running):
        ids = rng.integers(0, info.vocab_size, prompt, dtype=np.int32)
        io.inbox.append(UserMsg(uid=uid, input_ids=pack_ids(ids), params=params, stop_token_ids=(150_001,)))
    for _ in range(WARM_UP + running * prompt // info.token_budget):
        scheduler.step()
    times = []
    for _ in range(steps):
        engine.busy, start = 0.0, time.perf_counter()
        scheduler.step()
        times.append(time.perf_counter() - start - engine.busy)
    return np.array(times) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--running", type=int, default=256)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=512)
    args = parser.parse_args()
    for name, params in {
        "greedy": SamplingParams(temperature=0.0),
        "sampled": SamplingParams(temperature=0.8, top_p=0.9),
        "penalised": SamplingParams(temperature=0.8, presence_penalty=0.5),
    }.items():
        times = measure(args.running, args.steps, args.page_size, args.prompt, params)
        print(
            f"{name:10} {args.running} running: median {np.median(times):.0f} us, p99 {np.percentile(times, 99):.0f} us"
        )


if __name__ == "__main__":
    main()
