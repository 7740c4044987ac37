"""The GPU kernels alone, as fractions of what the machine can do, measured in the same run.

    python benchmarks/gpu_kernels.py [--only decode,prefill,linear,experts,sampling,rows,chain] [--tune]

Memory-bound kernels are held against the bandwidth of a large copy (bytes read and written), matrix-bound ones against
the rate of an 8192^3 product in bf16. Times are medians of replayed CUDA graphs, so launches from the host do not
count; inputs take turns with copies of themselves, more than the L2 cache holds. Every result is checked against torch
first. ``--tune`` tries launch parameters as well, and prints the best few for each shape.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import numpy as np
import torch
import triton
from gpu_products import chain, experts, linear
from gpu_report import BF16, COLD_BYTES, DEVICE, MODELS, Limits, Report, error, ints, measure, randn

from minisgl.attention.torch_reference import attend
from minisgl.kernel.triton.activation import silu_and_mul
from minisgl.kernel.triton.decode_attention import (
    DecodeConfig,
    DecodeWorkspace,
    FusedQKV,
    decode_attention,
    decode_config,
)
from minisgl.kernel.triton.norm import add_rms_norm
from minisgl.kernel.triton.prefill_attention import PrefillConfig, plan_prefill, prefill_attention, prefill_config
from minisgl.kernel.triton.rope import norm_rope_store
from minisgl.kernel.triton.sampling import sample

# Decode attention


def _decode_option(tile: int, programs: int, warps: int, stages: int, min_tiles: int = 1) -> DecodeConfig:
    """With as many registers as so many programs on one multiprocessor leave."""
    registers = min(255, 65536 // (programs * warps * 32) // 8 * 8)
    return DecodeConfig(tile, programs, warps, stages, min_tiles, registers)


DECODE_OPTIONS = [
    *(_decode_option(64, programs, 4, stages) for programs, stages in ((2, 3), (3, 3), (2, 4), (4, 2))),
    *(_decode_option(32, programs, 4, stages) for programs, stages in ((3, 4), (4, 4), (4, 3))),
    *(_decode_option(32, programs, 2, stages) for programs, stages in ((4, 4), (6, 3), (8, 2))),
    *(_decode_option(128, programs, warps, stages) for programs, stages in ((1, 3), (2, 2)) for warps in (4, 8)),
    _decode_option(64, 3, 4, 3, min_tiles=2),
    _decode_option(64, 3, 4, 3, min_tiles=4),
]


def decode(report: Report) -> None:
    mixed = np.random.default_rng(0).integers(100, 2048, 256).tolist()
    for name, lengths, page in (
        ("qwen3-0.6b", [1000], 16),
        ("qwen3-0.6b", [8000], 16),
        ("qwen3-0.6b", [1000] * 16, 16),
        ("qwen3-0.6b", [1000] * 128, 16),
        ("qwen3-0.6b", mixed, 16),
        ("qwen3-14b", [1000], 16),
        ("qwen3-14b", [1000] * 128, 1),
        ("qwen3-14b", [1000] * 128, 16),
        ("qwen3-14b", [1000] * 128, 64),
        ("llama-3.1-8b", mixed, 16),
    ):
        _decode(report, name, lengths, page)


def _decode(report: Report, name: str, lengths: list[int], page: int) -> None:
    model = MODELS[name]
    spec = model.spec()
    batch, tokens = len(lengths), sum(lengths)
    nbytes = tokens * 2 * model.kv_heads * model.head_dim * 2
    pages = [-(-length // page) for length in lengths]
    copies = max(1, -(-COLD_BYTES // nbytes))
    pools = [
        (
            randn(sum(pages), page, model.kv_heads, model.head_dim),
            randn(sum(pages), page, model.kv_heads, model.head_dim),
        )
        for _ in range(copies)
    ]
    table = torch.zeros(batch, max(pages), dtype=torch.int32, device=DEVICE)
    order = torch.randperm(sum(pages), device=DEVICE).int().split(pages)
    for row, part in enumerate(order):
        table[row, : len(part)] = part
    rows, seq_lens = ints(range(batch)), ints(lengths)
    last = seq_lens.long() - 1
    slots = table.gather(1, (last // page)[:, None])[:, 0].long() * page + last % page
    qkv = randn(batch, model.qkv)
    q = qkv.view(batch, -1, model.head_dim)[:, : model.heads]
    out = torch.full((batch, model.heads * model.head_dim), float("nan"), dtype=BF16, device=DEVICE)

    def calls(config: DecodeConfig, fused: bool) -> list[Callable[[], None]]:
        workspace = DecodeWorkspace(batch, model.heads, model.kv_heads, model.head_dim, BF16, DEVICE, config)
        workspace.plan(None, seq_lens)
        source = FusedQKV(qkv, slots) if fused else q

        def one(k: torch.Tensor, v: torch.Tensor) -> Callable[[], None]:
            return lambda: decode_attention(source, k, v, table, rows, seq_lens, spec, workspace, out)

        return [one(k, v) for k, v in pools]

    config = decode_config(model.head_dim, 2, model.heads // model.kv_heads)
    calls(config, fused=False)[0]()
    keys, values = (pool.flatten(0, 1) for pool in pools[0])
    some = sorted({0, batch // 2, batch - 1})
    expected = []
    for row in some:
        position = torch.arange(lengths[row], device=DEVICE)
        where = table[row, position // page].long() * page + position % page
        expected.append(attend(q[row : row + 1].float(), keys[where].float(), values[where].float(), spec.scale))
    wrong = error(out[some], torch.cat(expected).flatten(1))
    what = f"{batch} x {lengths[0]}" if len(set(lengths)) == 1 else f"{batch} mixed"
    label = f"decode {name} {what} page {page}"
    report.row(label, measure(calls(config, fused=False)), wrong, nbytes)
    report.row("  with norm, rope and store", measure(calls(config, fused=True)), wrong, nbytes)
    report.tuned(DECODE_OPTIONS, lambda config: measure(calls(config, fused=True)), nbytes)


# Prefill attention

PREFILL_OPTIONS = [
    *(PrefillConfig(128, 64, 8, stages) for stages in (2, 3, 4)),
    *(PrefillConfig(128, 128, 8, stages) for stages in (2, 3)),
    *(PrefillConfig(128, 32, 8, stages) for stages in (3, 4)),
    *(PrefillConfig(128, 32, 8, stages, max_registers=128) for stages in (2, 3)),
    *(PrefillConfig(64, 64, 4, stages) for stages in (2, 3)),
    PrefillConfig(64, 128, 4, 2),
    PrefillConfig(64, 32, 4, 3),
    PrefillConfig(256, 64, 16, 2),
]


def prefill(report: Report) -> None:
    for name, requests, page in (
        ("qwen3-14b", [(0, 8192)], 16),
        ("qwen3-14b", [(0, 8192)], 64),
        ("qwen3-0.6b", [(0, 8192)], 16),
        ("llama-3.1-8b", [(0, 1024)] * 8, 16),
        ("qwen3-14b", [(6144, 2048)], 16),
        ("qwen3-14b", [(500 * i, 100 + 30 * i) for i in range(16)], 16),
    ):
        _prefill(report, name, requests, page)


def _prefill(report: Report, name: str, requests: list[tuple[int, int]], page: int) -> None:
    model = MODELS[name]
    spec = model.spec()
    cached, new = (np.array(column, np.int32) for column in zip(*requests, strict=True))
    lengths = cached + new
    pages = -(-lengths // page)
    pool = (int(pages.sum()), page, model.kv_heads, model.head_dim)
    k, v = randn(*pool), randn(*pool)
    table = torch.zeros(len(new), int(pages.max()), dtype=torch.int32, device=DEVICE)
    for row, part in enumerate(torch.randperm(pool[0], device=DEVICE).int().split(pages.tolist())):
        table[row, : len(part)] = part
    rows, seq_lens, cu_new = ints(range(len(new))), ints(lengths.tolist()), ints(np.cumsum([0, *new]).tolist())
    q = randn(int(new.sum()), model.heads, model.head_dim)
    out = torch.full((q.shape[0], model.heads * model.head_dim), float("nan"), dtype=BF16, device=DEVICE)
    pairs = float((new * (cached + (new + 1) / 2)).sum())
    flops = 4 * pairs * model.heads * model.head_dim

    def call(config: PrefillConfig) -> Callable[[], None]:
        blocks = torch.from_numpy(plan_prefill(cached, new, model.heads // model.kv_heads, config.rows)).to(DEVICE)
        return lambda: prefill_attention(q, k, v, table, rows, seq_lens, cu_new, blocks, spec, out, config)

    config = prefill_config(model.head_dim, 2)
    call(config)()
    position = torch.arange(int(lengths[0]), device=DEVICE)
    where = table[0, position // page].long() * page + position % page
    tail = slice(max(0, int(new[0]) - 256), int(new[0]))
    keys, values = k.flatten(0, 1)[where].float(), v.flatten(0, 1)[where].float()
    wrong = error(out[tail], attend(q[tail].float(), keys, values, spec.scale).flatten(1))
    label = f"prefill {name} {len(new)} requests, {new.sum()} new, page {page}"
    report.row(label, measure([call(config)]), wrong, flops=flops)
    report.tuned(PREFILL_OPTIONS, lambda config: measure([call(config)]), flops=flops)


# Sampling and the small kernels


def sampling(report: Report) -> None:
    for rows in (1, 32, 256):
        _sampling(report, f"{rows} rows, greedy", rows, 3.0, 1, 1.0)
        _sampling(report, f"{rows} rows, temperature", rows, 3.0, 0, 1.0)
        _sampling(report, f"{rows} rows, top-p 0.9", rows, 3.0, 0, 0.9)
        _sampling(report, f"{rows} rows, top-k 50 and top-p 0.9", rows, 3.0, 50, 0.9)
        _sampling(report, f"{rows} rows, top-p 0.9 of flat logits", rows, 0.3, 0, 0.9)


def _sampling(report: Report, label: str, rows: int, spread: float, top_k: int, top_p: float) -> None:
    vocab = MODELS["qwen3-0.6b"].vocab
    inputs = [spread * randn(rows, vocab, dtype=torch.float32) for _ in range(2)]
    ones = torch.ones(rows, device=DEVICE)
    parameters = 0.8 * ones, ints([top_k] * rows), top_p * ones, 0 * ones, torch.rand(rows, device=DEVICE)
    ids = sample(inputs[0], *parameters)
    missed = float((ids != inputs[0].argmax(-1)).float().mean()) if top_k == 1 else 0.0

    def one(logits: torch.Tensor) -> Callable[[], object]:
        return lambda: sample(logits, *parameters)

    report.row(f"sample {label}", measure([one(logits) for logits in inputs]), missed, inputs[0].nbytes)


def rows(report: Report) -> None:
    for tokens in (1, 256, 4096):
        _rows(report, tokens)


def _rows(report: Report, tokens: int) -> None:
    model = MODELS["qwen3-0.6b"]
    x, residual, weight = randn(tokens, model.hidden), randn(tokens, model.hidden), randn(model.hidden)
    seconds = measure([lambda: add_rms_norm(x, residual, weight, 1e-6)])
    report.row(f"add and norm, {tokens} tokens", seconds, 0, 4 * x.nbytes)
    gate_up = randn(tokens, 2 * model.inner)
    report.row(f"silu and mul, {tokens} tokens", measure([lambda: silu_and_mul(gate_up)]), 0, 1.5 * gate_up.nbytes)
    qkv = randn(tokens, model.qkv)
    pools = randn(2, tokens, 1, model.kv_heads, model.head_dim)
    spec, positions = model.spec(), ints(range(tokens))
    slots = positions.long()
    seconds = measure([lambda: norm_rope_store(qkv, spec, pools[0], pools[1], positions, slots)])
    report.row(f"norm, rope and store, {tokens} tokens", seconds, 0, 2 * qkv.nbytes)


SECTIONS = {
    "decode": decode,
    "prefill": prefill,
    "linear": linear,
    "experts": experts,
    "sampling": sampling,
    "rows": rows,
    "chain": chain,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(SECTIONS), help="sections, separated by commas")
    parser.add_argument("--tune", action="store_true", help="try launch parameters as well")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    limits = Limits.of_machine()
    name = torch.cuda.get_device_name()
    print(f"{name}, torch {torch.__version__}, triton {triton.__version__}")
    print(f"copy {limits.copy / 1e12:.2f} TB/s, matmul {limits.matmul / 1e12:.0f} TFLOP/s", flush=True)
    report = Report(limits, arguments.tune)
    with torch.inference_mode():
        for section in arguments.only.split(","):
            SECTIONS[section](report)


if __name__ == "__main__":
    main()
