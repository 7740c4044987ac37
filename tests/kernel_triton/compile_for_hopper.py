"""Compiles what real models launch on an H200, without a GPU: ``python compile_for_hopper.py [name ...]``.

Prints a line for each kernel: registers, bytes spilled, shared memory, and how many matrix instructions of which kind.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, dataclass
from functools import partial

os.environ["TRITON_INTERPRET"] = "0"

import torch
from offline_sm90 import OfflineDriver, install

from minisgl.kernel.attention_spec import AttentionSpec
from minisgl.kernel.triton.activation import silu_and_mul
from minisgl.kernel.triton.all_reduce import PROGRAMS, all_reduce
from minisgl.kernel.triton.decode_attention import DecodeWorkspace, FusedQKV, decode_attention
from minisgl.kernel.triton.few_rows import few_rows_config, few_rows_linear, fixed_few_rows_config
from minisgl.kernel.triton.grouped_gemm import combine, fixed_grouped_config, grouped_gemm
from minisgl.kernel.triton.launch import Launcher
from minisgl.kernel.triton.moe_routing import assign, choose, route
from minisgl.kernel.triton.norm import add_rms_norm, rms_norm
from minisgl.kernel.triton.one_row import one_row_linear
from minisgl.kernel.triton.pages import gather_pages
from minisgl.kernel.triton.prefill_attention import prefill_attention, prefill_config
from minisgl.kernel.triton.rope import norm_rope_store
from minisgl.kernel.triton.sampling import sample
from minisgl.kernel.triton.weighted_experts import weighted_experts

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Model:
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    vocab: int
    qk_norm: bool = True

    def spec(self, dtype: torch.dtype, window: int | None = None) -> AttentionSpec:
        weight = torch.empty(self.head_dim, dtype=dtype) if self.qk_norm else None
        table = torch.empty(64, self.head_dim)
        scale = self.head_dim**-0.5
        return AttentionSpec(0, self.heads, self.kv_heads, self.head_dim, scale, table, window, weight, weight, 1e-6)


QWEN3_0_6B = Model(1024, 16, 8, 128, 3072, 151936)
QWEN3_14B = Model(5120, 40, 8, 128, 17408, 151936)
LLAMA3_8B = Model(4096, 32, 8, 128, 14336, 128256, qk_norm=False)
SMOLLM2 = Model(576, 9, 3, 64, 1536, 49152, qk_norm=False)
PHI = Model(2560, 32, 32, 80, 10240, 51200, qk_norm=False)
GEMMA = Model(2048, 8, 1, 256, 16384, 262144, qk_norm=False)


def ints(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.int32)


def rows(model: Model, dtype: torch.dtype) -> None:
    x, weight = torch.empty(64, model.hidden, dtype=dtype), torch.empty(model.hidden, dtype=dtype)
    rms_norm(x, weight, 1e-6)
    add_rms_norm(x, x, weight, 1e-6, pdl=True)
    silu_and_mul(torch.empty(64, 2 * model.inner, dtype=dtype))


def decode(model: Model, dtype: torch.dtype, page: int = 16, window: int | None = None, fused: bool = True) -> None:
    spec = model.spec(dtype, window)
    workspace = DecodeWorkspace(256, model.heads, model.kv_heads, model.head_dim, dtype, CPU)
    workspace.plan(window, ints(8))
    pool = torch.empty(64, page, model.kv_heads, model.head_dim, dtype=dtype)
    qkv = torch.empty(8, (model.heads + 2 * model.kv_heads) * model.head_dim, dtype=dtype)
    out = torch.empty(8, model.heads * model.head_dim, dtype=dtype)
    q = FusedQKV(qkv, torch.empty(8, dtype=torch.int64)) if fused else out.view(8, model.heads, model.head_dim)
    decode_attention(q, pool, pool, ints(257, 128), ints(8), ints(8), spec, workspace, out, pdl=True)


def prefill(model: Model, dtype: torch.dtype, page: int = 16, window: int | None = None, singles: bool = False) -> None:
    spec = model.spec(dtype, window)
    pool = torch.empty(64, page, model.kv_heads, model.head_dim, dtype=dtype)
    qkv = torch.empty(100, (model.heads + 2 * model.kv_heads) * model.head_dim, dtype=dtype)
    q = norm_rope_store(qkv, spec, pool, pool, ints(100), torch.empty(100, dtype=torch.int64), pdl=True)
    config = prefill_config(model.head_dim, dtype.itemsize, singles=singles)
    out = torch.empty(100, model.heads * model.head_dim, dtype=dtype)
    table, blocks = ints(257, 128), ints(2, 16)
    prefill_attention(q, pool, pool, table, ints(3), ints(3), ints(4), blocks, spec, out, config, pdl=True)


def deterministic(model: Model, dtype: torch.dtype) -> None:
    """Products, and experts of Qwen3-30B-A3B."""
    q_dim, kv_dim = model.heads * model.head_dim, model.kv_heads * model.head_dim
    for outputs, inputs in (
        (q_dim + 2 * kv_dim, model.hidden),
        (model.hidden, q_dim),
        (2 * model.inner, model.hidden),
        (model.hidden, model.inner),
        (model.vocab, model.hidden),
    ):
        x, weight = torch.empty(100, inputs, dtype=dtype), torch.empty(outputs, inputs, dtype=dtype)
        few_rows_linear(x, weight, config=fixed_few_rows_config(outputs, dtype.itemsize), pdl=True)
    counts, members = ints(128), ints(128, 100)
    for inputs, rows, gated in ((2048, 2 * 768, True), (768, 2048, False)):
        x, weight = torch.empty(800, inputs, dtype=dtype), torch.empty(128, rows, inputs, dtype=dtype)
        config = fixed_grouped_config(gated, dtype.itemsize)
        grouped_gemm(x, weight, members, counts, 800, gated=gated, config=config, pdl=True)


def linear(model: Model, dtype: torch.dtype, num_rows: int) -> None:
    q_dim, kv_dim = model.heads * model.head_dim, model.kv_heads * model.head_dim
    norm = torch.empty(model.hidden, dtype=dtype)
    residual = torch.empty(1, model.hidden, dtype=dtype)
    for outputs, inputs, gated, around in (
        (q_dim + 2 * kv_dim, model.hidden, False, {"norm": norm}),
        (model.hidden, q_dim, False, {"residual": residual}),
        (model.inner, model.hidden, True, {"norm": norm}),
        (model.hidden, model.inner, False, {"residual": residual}),
        (model.vocab, model.hidden, False, {"norm": norm}),
    ):
        x, weight = torch.empty(num_rows, inputs, dtype=dtype), torch.empty((1 + gated) * outputs, inputs, dtype=dtype)
        if num_rows == 1:
            one_row_linear(x, weight, gated=gated, **around, pdl=True)
            continue
        config = few_rows_config(num_rows, outputs, inputs, gated=gated, in_parts="residual" in around)
        if config is not None:
            few_rows_linear(x, weight, gated=gated, config=config, pdl=True)


def experts(dtype: torch.dtype, tokens: int) -> None:
    """Qwen3-30B-A3B"""
    num, hidden, inner, top_k = 128, 2048, 768, 8
    counts = ints(num)
    x = torch.empty(tokens, hidden, dtype=dtype)
    assign(torch.empty(tokens, top_k, dtype=torch.int64), counts)
    weights, members = route(torch.empty(tokens, num, dtype=dtype), top_k, True, counts, dtype, pdl=True)
    pairs = tokens * top_k
    gate_up = torch.empty(num, 2 * inner, hidden, dtype=dtype)
    middle = grouped_gemm(x, gate_up, members, counts, pairs, gated=True, pdl=True)
    down = torch.empty(num, hidden, inner, dtype=dtype)
    combine(grouped_gemm(middle, down, members, counts, pairs, gated=False, pdl=True), weights, counts, pdl=True)


def single_token(dtype: torch.dtype, inner: int, top_k: int) -> None:
    """Qwen3-30B-A3B, and a model of few large experts"""
    num, hidden = 128 if inner < 1024 else 8, 2048
    x, norm = torch.empty(1, hidden, dtype=dtype), torch.empty(hidden, dtype=dtype)
    weights, experts_ = choose(torch.empty(1, num, dtype=dtype), top_k, True, dtype, pdl=True)
    gate_up, down = torch.empty(num, 2 * inner, hidden, dtype=dtype), torch.empty(num, hidden, inner, dtype=dtype)
    middle = one_row_linear(x, gate_up, norm=norm, eps=1e-6, gated=True, experts=experts_, pdl=True)
    weighted_experts(middle, down, weights, experts_, residual=x, pdl=True)


def sampler(vocab: int, dtype: torch.dtype) -> None:
    floats = torch.empty(8)
    sample(torch.empty(8, vocab, dtype=dtype), floats, ints(8), floats, floats, floats, pdl=True)


def reduce(dtype: torch.dtype, world_size: int) -> None:
    peers = torch.empty(world_size, dtype=torch.int64)
    all_reduce(torch.empty(1, 5120, dtype=dtype), peers, ints(PROGRAMS), ints(1), 0, 1 << 20, pdl=True)


BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
CASES = {
    "rows": partial(rows, QWEN3_14B, BF16),
    "decode-qwen3-0.6b": partial(decode, QWEN3_0_6B, BF16),
    "prefill-qwen3-0.6b": partial(prefill, QWEN3_0_6B, BF16),
    "linear-1-qwen3-0.6b": partial(linear, QWEN3_0_6B, BF16, 1),
    "linear-16-qwen3-0.6b": partial(linear, QWEN3_0_6B, BF16, 16),
    "linear-32-qwen3-0.6b": partial(linear, QWEN3_0_6B, BF16, 32),
    "linear-64-qwen3-0.6b": partial(linear, QWEN3_0_6B, BF16, 64),
    "linear-1-qwen3-14b": partial(linear, QWEN3_14B, BF16, 1),
    "linear-16-qwen3-14b": partial(linear, QWEN3_14B, BF16, 16),
    "linear-64-qwen3-14b": partial(linear, QWEN3_14B, BF16, 64),
    "linear-1-smollm2-fp32": partial(linear, SMOLLM2, FP32, 1),
    "deterministic-qwen3-0.6b": partial(deterministic, QWEN3_0_6B, BF16),
    "deterministic-qwen3-14b": partial(deterministic, QWEN3_14B, BF16),
    "deterministic-smollm2-fp32": partial(deterministic, SMOLLM2, FP32),
    "experts-1": partial(experts, BF16, 1),
    "experts-64": partial(experts, BF16, 64),
    "experts-256": partial(experts, BF16, 256),
    "experts-1024": partial(experts, BF16, 1024),
    "experts-8192": partial(experts, BF16, 8192),
    "single-token": partial(single_token, BF16, 768, 8),
    "single-token-few-large": partial(single_token, BF16, 14336, 2),
    "single-token-fp32": partial(single_token, FP32, 768, 8),
    "experts-64-fp32": partial(experts, FP32, 64),
    "all-reduce-2": partial(reduce, BF16, 2),
    "all-reduce-8": partial(reduce, BF16, 8),
    "all-reduce-fp32": partial(reduce, FP32, 2),
    "pages": partial(gather_pages, ints(257, 2560), ints(8), ints(9), ints(256 * 2560)),
    "sampler": partial(sampler, 151936, FP32),
    "sampler-bf16": partial(sampler, 151936, BF16),
}
for name, model in (("qwen3-14b", QWEN3_14B), ("llama3-8b", LLAMA3_8B), ("phi", PHI), ("gemma", GEMMA)):
    CASES[f"decode-{name}"] = partial(decode, model, BF16)
    CASES[f"prefill-{name}"] = partial(prefill, model, BF16)
for page in (1, 64, 128):
    CASES[f"decode-page-{page}"] = partial(decode, QWEN3_14B, BF16, page)
    CASES[f"prefill-page-{page}"] = partial(prefill, QWEN3_14B, BF16, page)
CASES["prefill-singles"] = partial(prefill, QWEN3_14B, BF16, singles=True)
CASES["prefill-singles-window"] = partial(prefill, LLAMA3_8B, BF16, window=4096, singles=True)
CASES["decode-plain"] = partial(decode, QWEN3_14B, BF16, fused=False)
for name, function in (("decode", decode), ("prefill", prefill)):
    CASES[f"{name}-window"] = partial(function, LLAMA3_8B, BF16, window=4096)
    CASES[f"{name}-smollm2-fp32"] = partial(function, SMOLLM2, FP32)
    CASES[f"{name}-smollm2-fp16"] = partial(function, SMOLLM2, FP16)
    CASES[f"{name}-gemma-fp32"] = partial(function, GEMMA, FP32)


FLOATS = {"eps", "scale"}  # Triton never specialises on the value of a float


def check_launchers() -> None:
    """Every number that is not a constant must be one that Triton does not specialise on, or Launcher is wrong."""
    modules = [module for name, module in sys.modules.items() if name.startswith("minisgl.kernel.triton.")]
    launchers = [thing for module in modules for thing in vars(module).values() if isinstance(thing, Launcher)]
    assert len(launchers) > 10
    for launcher in launchers:
        for param in launcher._kernel.params:
            free = param.is_constexpr or param.name.endswith("_ptr") or param.name in FLOATS or param.do_not_specialize
            assert free, f"{launcher._kernel.__name__}: {param.name}"


def main() -> None:
    check_launchers()
    driver: OfflineDriver = install()
    names = sys.argv[1:] or list(CASES)
    for name in names:
        before = len(driver.compiled)
        CASES[name]()
        for usage in driver.compiled[before:]:
            print(json.dumps({"case": name} | asdict(usage)), flush=True)


if __name__ == "__main__":
    main()
