"""The attention backends of a GPU side by side: one layer, from the projected qkv to the heads of the output.

    python benchmarks/gpu_attention.py [--page 16]

As :mod:`gpu_kernels` measures: replayed CUDA graphs, cold caches, shares of the machine's limits, errors against torch.
Decode is planned as for the engine's graphs. The time that a backend plans a step on the host is beside it, since it
is spent once a step and not once a layer. FlashInfer compiles its kernels in its first run, which takes minutes.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec

import numpy as np
import torch
from gpu_report import BF16, COLD_BYTES, DEVICE, MODELS, Limits, Model, Report, error, ints, measure, randn

from minisgl.attention.base import AttentionBackend, BackendConfig
from minisgl.attention.forward_batch import ForwardBatch, HostPlan, token_slots
from minisgl.attention.registry import make_backend
from minisgl.kernel.attention_spec import AttentionSpec
from minisgl.kernel.ops import Ops
from minisgl.kvcache.device_pool import KVPool

Requests = list[tuple[int, int]]
"""Cached and new tokens of each."""

CASES: list[tuple[str, Requests]] = [
    ("qwen3-0.6b", [(999, 1)] * 128),
    ("qwen3-14b", [(999, 1)] * 128),
    ("qwen3-0.6b", [(0, 8192)]),
    ("qwen3-0.6b", [(0, 1024)] * 8),
    ("qwen3-14b", [(0, 8192)]),
    ("qwen3-14b", [(0, 1024)] * 8),
]


def make_batch(requests: Requests, page: int) -> ForwardBatch:
    """With pages in random order, and planned for a graph where all have one new token."""
    cached, new = (np.array(column, np.int32) for column in zip(*requests, strict=True))
    pages = -(-(cached + new) // page)
    table = torch.zeros(len(requests), int(pages.max()), dtype=torch.int32, device=DEVICE)
    for row, part in enumerate(torch.randperm(int(pages.sum()), device=DEVICE).int().split(pages.tolist())):
        table[row, : len(part)] = part
    positions = ints(np.concatenate([np.arange(c, c + n) for c, n in requests]).tolist())
    return ForwardBatch(
        input_ids=torch.zeros_like(positions),
        positions=positions,
        slots=token_slots(table, ints(np.repeat(range(len(new)), new).tolist()), positions, page),
        rows=ints(range(len(requests))),
        cached=ints(cached.tolist()),
        seq_lens=ints((cached + new).tolist()),
        cu_new=ints(np.cumsum([0, *new]).tolist()),
        page_table=table,
        page_size=page,
        host=HostPlan.of(cached, new),
        graph="single" if (new == 1).all() else None,
    )


def host_seconds(backend: AttentionBackend, batch: ForwardBatch, times: int = 20) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(times):
        backend.prepare(batch)
    return (time.perf_counter() - start) / times


def compare(report: Report, backends: list[str], name: str, requests: Requests, page: int) -> None:
    model = MODELS[name]
    batch = make_batch(requests, page)
    decode, lengths = batch.graph is not None, batch.host.cached + batch.host.new
    pages = int((-(-lengths // page)).sum())
    kv_bytes = int(lengths.sum()) * 2 * model.kv_heads * model.head_dim * 2
    layers = -(-COLD_BYTES // kv_bytes) if decode else 1
    pool = KVPool(layers, pages, page, model.kv_heads, model.head_dim, dtype=BF16, device=DEVICE)
    pool.k.normal_()
    pool.v.normal_()
    specs = [replace(model.spec(), layer=layer) for layer in range(layers)]
    qkv = randn(batch.num_tokens, model.qkv)
    pairs = float((batch.host.new * (batch.host.cached + (batch.host.new + 1) / 2)).sum())
    work = {"nbytes": kv_bytes} if decode else {"flops": 4 * pairs * model.heads * model.head_dim}
    expected = once("torch", model, replace(batch, graph=None), qkv, specs[0], pool)[1]
    same = len(set(requests)) == 1
    what = f"{len(requests)} x {lengths[0]}" if same else f"{len(requests)} mixed"
    for which in backends:
        mine = replace(batch, plan=None)
        backend, out = once(which, model, mine, qkv, specs[0], pool)
        wrong = error(out, expected)

        def layer(spec: AttentionSpec, backend: AttentionBackend, batch: ForwardBatch) -> Callable[[], object]:
            return lambda: backend.forward_qkv(qkv, spec, pool, batch)

        seconds = measure([layer(spec, backend, mine) for spec in specs])
        label = f"{'decode' if decode else 'prefill'} {name} {what} page {page}, {which}"
        note = f"planned in {host_seconds(backend, mine) * 1e6:.0f} us"
        report.row(label, seconds, wrong, **work, note=note)


def once(
    which: str, model: Model, batch: ForwardBatch, qkv: torch.Tensor, spec: AttentionSpec, pool: KVPool
) -> tuple[AttentionBackend, torch.Tensor]:
    """A backend after its first layer, and what that returned."""
    config = BackendConfig(
        model.heads, model.kv_heads, model.head_dim, batch.page_size, batch.size, batch.num_tokens, BF16, DEVICE
    )
    backend = make_backend(which, config, Ops())
    backend.prepare(batch)
    backend.begin(batch)
    return backend, backend.forward_qkv(qkv.clone(), spec, pool, batch).clone()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page", type=int, default=16, help="tokens in a page")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    backends = ["triton", "fi"]
    if find_spec("flashinfer") is None:
        print("FlashInfer is not installed, so it is left out: pip install 'minisgl[cuda]'")
        backends.remove("fi")
    limits = Limits.of_machine()
    print(
        f"{torch.cuda.get_device_name()}: copy {limits.copy / 1e12:.2f} TB/s, matmul {limits.matmul / 1e12:.0f} TFLOP/s"
    )
    with torch.inference_mode():
        for name, requests in CASES:
            compare(Report(limits, tune=False), backends, name, requests, arguments.page)


if __name__ == "__main__":
    main()
