"""Time of an engine's steps, without scheduler, tokenizer and HTTP.

    python benchmarks/engine_step.py [--model PATH] [--batch 1 8 32] [--context 128] [--steps 40] [--prefill 1024]

Decode: milliseconds of a step in which each of so many requests computes one token after ``--context`` others, sampled
with temperature, two steps in flight as under the scheduler; and where the time of one step goes. Prefill: tokens per
second of a prompt in chunks of the token budget. Medians. ``--device``, ``--dtype``, ``--load-format``, ``--threads``
and ``--num-pages`` are the engine's.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from minisgl.core import PENDING, Batch, Engine, Sampling, TableUpdate
from minisgl.engine.config import EngineConfig
from minisgl.engine.engine import TorchEngine
from minisgl.models.source import resolve_model
from minisgl.utils.progress import silent

if TYPE_CHECKING:
    from minisgl.engine.model_runner import ModelRunner

T = TypeVar("T")

WARM_UP = 5  # steps
_NO_UPDATE = TableUpdate(*(np.zeros(0, np.int32) for _ in range(3)))


def batch(rows: np.ndarray, cached: np.ndarray, new: np.ndarray, ids: np.ndarray, table: TableUpdate) -> Batch:
    """All requests sample, with temperature 0.8."""
    count = len(rows)
    ones = np.ones(count, np.float32)
    sampling = Sampling(
        index=np.arange(count, dtype=np.int32),
        temperature=ones * np.float32(0.8),
        top_k=np.zeros(count, np.int32),
        top_p=ones,
        min_p=ones * 0,
        uniform=np.random.default_rng(len(ids)).random(count, np.float32),
    )
    return Batch(rows, cached, new, ids, table, sampling)


def tables(rows: int, tokens: int, page_size: int) -> TableUpdate:
    """Pages for ``tokens`` tokens of each row."""
    width = -(-tokens // page_size)
    pages = np.arange(rows * width, dtype=np.int32)
    return TableUpdate(pages // width, pages % width, pages)


def decodes(size: int, context: int, steps: int, page_size: int) -> Iterable[Batch]:
    """The first step computes the contexts (its KV does not matter, so one token stands for all of them)."""
    rows, ones = np.arange(size, dtype=np.int32), np.ones(size, np.int32)
    update = tables(size, context + steps, page_size)
    for step in range(steps):
        ids = np.full(size, PENDING, np.int32)
        yield batch(rows, ones * (context + step), ones, ids, update if step == 0 else _NO_UPDATE)


def decode_ms(engine: Engine, size: int, context: int, steps: int) -> float:
    """Median time between the ends of two steps."""
    times, flight = [], None
    for each in decodes(size, context, steps + WARM_UP, engine.info.page_size):
        following = engine.launch(each)
        if flight is not None:
            flight.wait()
            times.append(time.perf_counter())
        flight = following
    assert flight is not None
    flight.wait()
    return float(np.median(np.diff(times[WARM_UP:]))) * 1e3


def prefill_rate(engine: Engine, length: int) -> float:
    """Tokens per second over a prompt of ``length`` tokens."""
    info = engine.info
    ids = np.random.default_rng(0).integers(0, info.vocab_size, length).astype(np.int32)
    row, update = np.zeros(1, np.int32), tables(1, length, info.page_size)
    rates = []
    for _ in range(3):
        begin = time.perf_counter()
        flights = []
        for start in range(0, length, info.token_budget):
            part = ids[start : start + info.token_budget]
            new = np.array([len(part)], np.int32)
            flights.append(engine.launch(batch(row, row + start, new, part, _NO_UPDATE if start else update)))
            if len(flights) == 2:
                flights.pop(0).wait()
        for flight in flights:
            flight.wait()
        rates.append(length / (time.perf_counter() - begin))
    return float(np.median(rates))


def breakdown(runner: ModelRunner, size: int, context: int, steps: int) -> dict[str, float]:
    """Milliseconds of the parts of a decode step, run one after the other in this thread."""
    import torch

    from minisgl.engine.step_plan import plan_step

    device = runner.state.page_table.device
    width = runner.state.page_table.shape[1]
    parts: dict[str, list[float]] = {}

    def timed(name: str, function: Callable[[], T]) -> T:
        begin = time.perf_counter()
        result = function()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        parts.setdefault(name, []).append(time.perf_counter() - begin)
        return result

    for each in decodes(size, context, steps + WARM_UP, runner.info.page_size):
        plan = timed("plan", partial(plan_step, each, width))
        tensors = {name: torch.from_numpy(array).to(device) for name, array in plan.arrays.items()}
        if "table_index" in tensors:
            runner.state.write_table(tensors["table_index"], tensors["table_pages"])
        hidden = timed("layers", partial(runner.forward, plan, tensors))
        logits = timed("logits", partial(runner.model.logits, hidden))
        timed("sample", partial(runner.sample, logits, tensors))
    return {name: float(np.median(times[WARM_UP:])) * 1e3 for name, times in parts.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=None)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--prefill", type=int, default=1024)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--num-pages", type=int, default=None)
    args = parser.parse_args()
    config = EngineConfig(
        model_path=resolve_model(args.model, weights=args.load_format == "auto"),
        device=args.device,
        dtype=args.dtype,
        load_format=args.load_format,
        num_threads=args.threads,
        num_pages=args.num_pages,
    )
    begin = time.perf_counter()
    engine = TorchEngine(config)
    print(f"start {time.perf_counter() - begin:.2f} s; {engine.info}")
    print(f"prefill of {args.prefill} tokens: {prefill_rate(engine, args.prefill):.0f} tok/s")
    decode = {size: decode_ms(engine, size, args.context, args.steps) for size in args.batch}
    engine.close()

    # Only now: the engine sets torch up before it is imported.
    import torch

    from minisgl.engine.load import load, pick_device

    device = pick_device(config)
    if device.type == "cpu" and args.threads is not None:
        torch.set_num_threads(args.threads)
    with torch.inference_mode():
        runner = load(config, device, silent, None)
        print(f"{'batch':>6}{'ms/step':>10}{'tok/s':>9}   of which, one after the other")
        for size, ms in decode.items():
            parts = breakdown(runner, size, args.context, args.steps)
            words = "   ".join(f"{name} {part:.2f}" for name, part in parts.items())
            print(f"{size:>6}{ms:>10.2f}{size / ms * 1e3:>9.0f}   {words}   sum {sum(parts.values()):.2f}")


if __name__ == "__main__":
    main()
