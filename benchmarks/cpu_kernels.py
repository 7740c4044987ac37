"""The CPU kernels alone, at the shapes of SmolLM2-135M, beside torch in the same run.

    python benchmarks/cpu_kernels.py [--threads 2] [--repeat 5] [--isa avx512|avx2|portable]

Matrix products: milliseconds, GB/s of weights and GFLOP/s for 1 to 256 rows, own kernel and ``F.linear``. Attention:
microseconds a layer, GB/s of KV cache. What is read takes turns with copies of it, more than the caches hold, as in a
real step. Each figure is the best of ``--repeat`` runs.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F

from minisgl.kernel.cpu import CpuKernels, detect_isa, load

SHAPES = {"qkv": (960, 576), "o": (576, 576), "gate_up": (3072, 576), "down": (576, 1536), "head": (49152, 576)}
LAYER = ("qkv", "o", "gate_up", "down")
HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE = 9, 3, 64, 16
COLD_BYTES = 128 << 20  # what takes turns is at least this large together


def best(repeat: int, function: Callable[[], object]) -> float:
    """Seconds of the fastest of ``repeat`` calls, after one that does not count."""
    function()
    times = []
    for _ in range(repeat):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return min(times)


def call_each(functions: Sequence[Callable[[torch.Tensor], torch.Tensor]], x: torch.Tensor) -> None:
    for function in functions:
        function(x)


def copies(nbytes: int) -> int:
    return -(-COLD_BYTES // nbytes)


def products(kernels: CpuKernels, repeat: int) -> None:
    print(f"{'matrix':>8} {'M':>4} | {'ms':>8} {'GB/s':>6} {'GFLOP/s':>8} | {'F.linear ms':>11} {'GFLOP/s':>8}")
    totals = {}
    for name, (rows, cols) in SHAPES.items():
        count = copies(4 * rows * cols)
        matrices = [torch.randn(rows, cols) for _ in range(count)]
        packed = [kernels.pack(matrix) for matrix in matrices]
        for tokens in (1, 8, 32, 256):
            x = torch.randn(tokens, cols)
            own = best(repeat, partial(call_each, [weight.matmul for weight in packed], x)) / count
            library = [partial(F.linear, weight=matrix) for matrix in matrices]
            torchs = best(repeat, partial(call_each, library, x)) / count
            totals[name, tokens] = own, torchs
            print_product(name, tokens, rows * cols, own, torchs)
    for tokens in (1, 8, 32, 256):
        own, torchs = (sum(totals[name, tokens][i] for name in LAYER) for i in (0, 1))
        print_product("layer", tokens, sum(SHAPES[name][0] * SHAPES[name][1] for name in LAYER), own, torchs)


def print_product(name: str, tokens: int, size: int, own: float, torchs: float) -> None:
    gflop = 2e-9 * tokens * size
    print(
        f"{name:>8} {tokens:>4} | {1e3 * own:8.3f} {4e-9 * size / own:6.1f} {gflop / own:8.1f} "
        f"| {1e3 * torchs:11.3f} {gflop / torchs:8.1f}",
        flush=True,
    )


def attention(kernels: CpuKernels, repeat: int, requests: int, cached: int, new: int) -> None:
    pages_each = -(-(cached + new) // PAGE_SIZE)
    pages = requests * pages_each
    nbytes = 8 * requests * (cached + new) * KV_HEADS * HEAD_DIM
    layers = copies(nbytes)
    pool = torch.randn(layers, 2, pages, PAGE_SIZE, KV_HEADS, HEAD_DIM)
    table = torch.randperm(pages).int().view(requests, pages_each)
    rows, lengths = torch.arange(requests).int(), torch.full((requests,), cached).int()
    cu_new = (torch.arange(requests + 1) * new).int()
    q = torch.randn(requests * new, HEADS, HEAD_DIM)

    def step() -> None:
        for keys, values in pool:
            kernels.attention(q, keys, values, table, rows, lengths, cu_new, HEAD_DIM**-0.5)

    seconds = best(repeat, step) / layers
    gflop = 4e-9 * requests * HEADS * HEAD_DIM * sum(cached + i + 1 for i in range(new))
    rates = f"{1e6 * seconds:8.0f} {1e-9 * nbytes / seconds:6.1f} {gflop / seconds:8.1f}"
    print(f"{requests:>8} {cached:>6} {new:>4} | {rates}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--isa", choices=("avx512", "avx2", "portable"), default=detect_isa())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    kernels = load(args.isa)
    if kernels is None:
        raise SystemExit(1)
    print(f"{args.isa}, {args.threads} threads")
    products(kernels, args.repeat)
    print(f"\n{'requests':>8} {'cached':>6} {'new':>4} | {'us/layer':>8} {'GB/s':>6} {'GFLOP/s':>8}")
    for requests, cached, new in [(1, 127, 1), (8, 127, 1), (32, 127, 1), (1, 4000, 1), (1, 0, 256), (1, 1792, 256)]:
        attention(kernels, args.repeat, requests, cached, new)


if __name__ == "__main__":
    main()
