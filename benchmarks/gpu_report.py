"""What the GPU benchmarks share: models, inputs, times of graph replays, and the limits of the machine."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton

from minisgl.kernel.attention_spec import AttentionSpec

BF16 = torch.bfloat16
if not torch.cuda.is_available():
    raise SystemExit("There is no CUDA device that torch can use; this measures one.")
DEVICE = torch.device("cuda")
COLD_BYTES = 256 << 20  # what takes turns is at least this large together
BEST = 4  # configurations shown


@dataclass(frozen=True)
class Model:
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    vocab: int

    @property
    def qkv(self) -> int:
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    def spec(self, norm: bool = True) -> AttentionSpec:
        weight = 1 + randn(self.head_dim) / 8 if norm else None
        angles = torch.outer(torch.arange(40960.0), 1e6 ** -(torch.arange(0, self.head_dim, 2) / self.head_dim))
        table = torch.cat((angles.cos(), angles.sin()), -1).to(DEVICE)
        scale = self.head_dim**-0.5
        return AttentionSpec(0, self.heads, self.kv_heads, self.head_dim, scale, table, None, weight, weight, 1e-6)


MODELS = {
    "qwen3-0.6b": Model(28, 1024, 16, 8, 128, 3072, 151936),
    "qwen3-14b": Model(40, 5120, 40, 8, 128, 17408, 151936),
    "llama-3.1-8b": Model(32, 4096, 32, 8, 128, 14336, 128256),
}


def randn(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE, dtype=torch.float32).to(dtype)


def ints(values: Iterable[int]) -> torch.Tensor:
    return torch.tensor(list(values), dtype=torch.int32, device=DEVICE)


def measure(functions: Sequence[Callable[[], object]]) -> float:
    """Seconds of one call, in a graph in which ``functions`` take turns."""
    for function in functions:
        function()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for function in functions:
        function()
    end.record()
    torch.cuda.synchronize()
    rounds = max(1, min(20, int(4 / max(start.elapsed_time(end), 1e-3))))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for function in functions:
                function()
    graph.replay()
    times = []
    for _ in range(7):
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times) / (rounds * len(functions))


def capture(function: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
    """The replay of a graph of ``function``, and the tensor that it writes."""
    function()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = function()
    return graph.replay, out


def error(out: torch.Tensor, reference: torch.Tensor) -> float:
    """Relative to the norm of the reference; NaN if some of the output is."""
    return float((out.double() - reference.double()).norm() / reference.double().norm())


@dataclass
class Limits:
    """Bytes and operations per second."""

    copy: float
    matmul: float

    @classmethod
    def of_machine(cls) -> Limits:
        pair = torch.randn(2, 1 << 30, device=DEVICE)
        # Not in a graph, where a copy is left to the copy engine, which is slower than the multiprocessors.
        copy = pair.nbytes / (triton.testing.do_bench(lambda: pair[0].copy_(pair[1]), return_mode="median") / 1e3)
        a, b = randn(8192, 8192), randn(8192, 8192)
        return cls(copy, 2 * 8192**3 / measure([lambda: a @ b]))

    @staticmethod
    def sustained_matmul(seconds: float = 1.5) -> float:
        """Operations per second of the same product when it has run for so long: by then the power limits the clock."""
        a, b = randn(8192, 8192), randn(8192, 8192)
        flops, count = 2 * 8192**3, 40
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        rate, end = 0.0, time.perf_counter() + seconds
        while time.perf_counter() < end:
            events[0].record()
            for _ in range(count):
                a @ b
            events[1].record()
            torch.cuda.synchronize()
            rate = count * flops / (events[0].elapsed_time(events[1]) / 1e3)
        return rate

    def share(self, seconds: float, nbytes: float = 0, flops: float = 0) -> str:
        floor = max(nbytes / self.copy, flops / self.matmul)
        bound = "copy" if nbytes / self.copy >= flops / self.matmul else "matmul"
        return f"{floor / seconds:6.1%} of {bound}"


@dataclass
class Report:
    limits: Limits
    tune: bool

    def row(self, name: str, seconds: float, wrong: float, nbytes: float = 0, flops: float = 0, note: str = "") -> None:
        rate = f"{nbytes / seconds / 1e9:7.0f} GB/s" if nbytes else " " * 12
        rate += f" {flops / seconds / 1e12:6.1f} TFLOP/s" if flops else " " * 15
        share = self.limits.share(seconds, nbytes, flops)
        print(f"{name:44s} {seconds * 1e6:9.2f} us {rate} {share:18s} error {wrong:.1e} {note}", flush=True)

    def tuned(self, configs: Iterable[Any], time: Callable[[Any], float], nbytes: float = 0, flops: float = 0) -> None:
        """Times each configuration and shows the best.

        One that does not fit the device is left out, with the reason.
        """
        if not self.tune:
            return
        found = []
        for config in configs:
            try:
                found.append((time(config), config))
            except (triton.runtime.errors.OutOfResources, triton.compiler.errors.CompilationError) as exception:
                print(f"    {config}: {type(exception).__name__}")
        for seconds, config in sorted(found, key=lambda pair: pair[0])[:BEST]:
            print(f"    {seconds * 1e6:9.2f} us {self.limits.share(seconds, nbytes, flops)}  {config}", flush=True)
