"""Linear layers for a handful of rows, with what stands before and after them: bound by reading the weight once.

    out = epilogue(norm(x) @ W.T + bias)          epilogue: nothing, + residual, or silu(gate) * up

With few rows a step is a chain of short kernels, and what it costs beside the bytes are the starts of kernels and the
latency of a load between them. So a layer of a model is five kernels in all (norm + qkv, attention, output + residual,
norm + gate and up + silu, down + residual), and each loads its first weights before it waits for the one before it
(:mod:`.launch`).

A program computes BLOCK_N outputs of all rows. There are two kernels:

    one row     programs of a single warp, which multiplies and sums on its own: no barrier, no shared memory
    more        rows padded to 16 on the tensor cores; each warp has all outputs and its own slab of K

The order of additions depends neither on the number of rows, from 2 on, nor on what they hold.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from ...layers.ops import Ops
from .activation import silu_mul
from .launch import Launcher, power_of_2, wait_for_previous

MAX_ROWS = 64
"""Beyond this many rows a general matrix product is faster."""


@dataclass(frozen=True, slots=True)
class LinearConfig:
    """Launch parameters: outputs (or gate and up pairs) of a program, elements of K loaded at a time, warps."""

    block_n: int
    block_k: int
    num_warps: int


def linear_config(rows: int, outputs: int, inputs: int, gated: bool, itemsize: int) -> LinearConfig:
    """Enough programs for the whole device, each with all its weights in flight at once where K allows it."""
    if rows == 1:
        if inputs > 8192:
            return LinearConfig(2 if gated else 4, 512, num_warps=1)
        if inputs > 4096:
            return LinearConfig(2, 1024, num_warps=1)
        block_k = power_of_2(inputs)
        return LinearConfig(max(1, (2048 if gated else 4096) // block_k), block_k, num_warps=1)
    if itemsize == 4:
        return LinearConfig(16, 64, num_warps=4)
    block_k = next(size for size in (512, 256) if inputs % size == 0 or size == 256)
    # What a program holds of x grows with the rows.
    block_k = min(block_k, 512 if rows <= 16 else 256 if rows <= 32 else 128)
    return LinearConfig(16 if gated or outputs <= 4096 else 32, block_k, num_warps=4)


@triton.jit
def _finish(
    acc,  # (BLOCK_M, BLOCK_N) float32
    up,
    m,
    n,
    num_rows,
    bias_ptr,
    residual,  # (BLOCK_M, BLOCK_N)
    out_ptr,
    dtype: tl.constexpr,
    N: tl.constexpr,
    GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
):
    """Bias, activation and residual, rounded where the separate operations would, and the store."""
    mask = (m < num_rows)[:, None] & (n < N)[None, :]
    if HAS_BIAS:
        acc += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
        if GATED:
            up += tl.load(bias_ptr + N + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    if GATED:
        acc = silu_mul(acc, up, dtype)
    if HAS_RESIDUAL:
        acc = acc.to(dtype).to(tl.float32) + residual.to(tl.float32)
    tl.store(out_ptr + m[:, None] * N + n[None, :], acc.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _load_rows(w_ptr, first, start, N: tl.constexpr, K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """W[first :, start :] as (BLOCK_N, BLOCK_K), zero past both ends. Read once: nothing should make room for it."""
    n = first + tl.arange(0, BLOCK_N)[:, None]
    k = start + tl.arange(0, BLOCK_K)[None, :]
    mask = k < K if N % BLOCK_N == 0 else (k < K) & (n < N)
    return tl.load(w_ptr + n.to(tl.int64) * K + k, mask=mask, other=0.0, eviction_policy="evict_first")


@triton.jit
def _one_row_kernel(
    x_ptr,
    w_ptr,
    norm_ptr,
    bias_ptr,
    residual_ptr,
    out_ptr,
    eps,
    N: tl.constexpr,  # outputs; with GATED the rows of W are N of gate and then N of up
    K: tl.constexpr,
    GATED: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    first = tl.program_id(0) * BLOCK_N
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    w = _load_rows(w_ptr, first, 0, N, K, BLOCK_N, BLOCK_K)
    up_w = w
    if GATED:
        up_w = _load_rows(w_ptr + N * K, first, 0, N, K, BLOCK_N, BLOCK_K)
    norm = 0.0
    if HAS_NORM:
        norm = tl.load(norm_ptr + tl.arange(0, BLOCK_K), mask=tl.arange(0, BLOCK_K) < K, other=0.0)
    wait_for_previous(PDL)

    m = tl.arange(0, 1)
    n = first + tl.arange(0, BLOCK_N)
    residual = 0.0
    if HAS_RESIDUAL:
        residual = tl.load(residual_ptr + n, mask=n < N, other=0.0)[None, :]
    scale = 1.0
    if HAS_NORM:
        square = tl.zeros((BLOCK_K,), tl.float32)
        for start in range(0, K, BLOCK_K):
            k = start + tl.arange(0, BLOCK_K)
            x = tl.load(x_ptr + k, mask=k < K, other=0.0).to(tl.float32)
            square += x * x
        scale = tl.rsqrt(tl.sum(square, axis=0) / K + eps)

    # A thread loads 16 bytes of a row at a time; what it multiplies there, it adds up at once, to save registers.
    side: tl.constexpr = 16 // (dtype.primitive_bitwidth // 8)
    acc = tl.zeros((BLOCK_N, BLOCK_K // side), tl.float32)
    up = acc
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        x = tl.load(x_ptr + k, mask=k < K, other=0.0)
        if HAS_NORM:
            x = (x.to(tl.float32) * scale).to(dtype) * norm
        x = x.to(tl.float32)[None, :]
        current, current_up = w, up_w
        if start + BLOCK_K < K:
            w = _load_rows(w_ptr, first, start + BLOCK_K, N, K, BLOCK_N, BLOCK_K)
            if GATED:
                up_w = _load_rows(w_ptr + N * K, first, start + BLOCK_K, N, K, BLOCK_N, BLOCK_K)
            if HAS_NORM:
                norm = tl.load(norm_ptr + k + BLOCK_K, mask=k + BLOCK_K < K, other=0.0)
        acc += tl.sum(tl.reshape(current.to(tl.float32) * x, (BLOCK_N, BLOCK_K // side, side)), axis=2)
        if GATED:
            up += tl.sum(tl.reshape(current_up.to(tl.float32) * x, (BLOCK_N, BLOCK_K // side, side)), axis=2)
    total, total_up = tl.sum(acc, axis=1)[None, :], tl.sum(up, axis=1)[None, :]
    _finish(
        total, total_up, m, n, 1, bias_ptr, residual, out_ptr,
        dtype, N, GATED, HAS_BIAS, HAS_RESIDUAL,
    )  # fmt: skip


@triton.jit
def _slabs(start, BLOCK_K: tl.constexpr, SPLIT_K: tl.constexpr):
    """Elements start .. start + BLOCK_K - 1 of K in slabs: (SPLIT_K, 1, BLOCK_K / SPLIT_K)."""
    size: tl.constexpr = BLOCK_K // SPLIT_K
    return start + tl.arange(0, SPLIT_K)[:, None, None] * size + tl.arange(0, size)[None, None, :]


@triton.jit
def _load_slabs(
    w_ptr,
    first,
    start,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT_K: tl.constexpr,
):
    """W[first :, start :] as (SPLIT_K, BLOCK_N, BLOCK_K / SPLIT_K), zero past both ends."""
    n = first + tl.arange(0, BLOCK_N)[None, :, None]
    k = _slabs(start, BLOCK_K, SPLIT_K)
    mask = k < K if N % BLOCK_N == 0 else (k < K) & (n < N)
    return tl.load(w_ptr + n.to(tl.int64) * K + k, mask=mask, other=0.0, eviction_policy="evict_first")


@triton.jit(do_not_specialize=["num_rows"])
def _few_rows_kernel(
    x_ptr,
    w_ptr,
    norm_ptr,
    bias_ptr,
    residual_ptr,
    out_ptr,
    num_rows,
    eps,
    X_STRIDE: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    GATED: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT_K: tl.constexpr,
    PDL: tl.constexpr,
):
    first = tl.program_id(0) * BLOCK_N
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    w = _load_slabs(w_ptr, first, 0, N, K, BLOCK_N, BLOCK_K, SPLIT_K)
    up_w = w
    if GATED:
        up_w = _load_slabs(w_ptr + N * K, first, 0, N, K, BLOCK_N, BLOCK_K, SPLIT_K)
    wait_for_previous(PDL)

    m = tl.arange(0, BLOCK_M)
    n = first + tl.arange(0, BLOCK_N)
    residual = 0.0
    if HAS_RESIDUAL:
        place = m[:, None] * N + n[None, :]
        residual = tl.load(residual_ptr + place, mask=(m < num_rows)[:, None] & (n < N)[None, :], other=0.0)
    m3 = m[None, :, None]
    if HAS_NORM:
        square = tl.zeros((SPLIT_K, BLOCK_M, BLOCK_K // SPLIT_K), tl.float32)
        for start in range(0, K, BLOCK_K):
            k = _slabs(start, BLOCK_K, SPLIT_K)
            x = tl.load(x_ptr + m3 * X_STRIDE + k, mask=(m3 < num_rows) & (k < K), other=0.0).to(tl.float32)
            square += x * x
        scale = tl.rsqrt(tl.sum(tl.sum(square, axis=2), axis=0) / K + eps)[None, :, None]

    acc = tl.zeros((SPLIT_K, BLOCK_M, BLOCK_N), tl.float32)
    up = acc
    for start in range(0, K, BLOCK_K):
        k = _slabs(start, BLOCK_K, SPLIT_K)
        x = tl.load(x_ptr + m3 * X_STRIDE + k, mask=(m3 < num_rows) & (k < K), other=0.0)
        if HAS_NORM:
            x = (x.to(tl.float32) * scale).to(dtype) * tl.load(norm_ptr + k, mask=k < K, other=0.0)
        current, current_up = w, up_w
        if start + BLOCK_K < K:
            w = _load_slabs(w_ptr, first, start + BLOCK_K, N, K, BLOCK_N, BLOCK_K, SPLIT_K)
            if GATED:
                up_w = _load_slabs(w_ptr + N * K, first, start + BLOCK_K, N, K, BLOCK_N, BLOCK_K, SPLIT_K)
        acc = tl.dot(x, tl.permute(current, (0, 2, 1)), acc, input_precision="ieee")
        if GATED:
            up = tl.dot(x, tl.permute(current_up, (0, 2, 1)), up, input_precision="ieee")
    _finish(
        tl.sum(acc, axis=0), tl.sum(up, axis=0), m, n, num_rows, bias_ptr, residual, out_ptr,
        dtype, N, GATED, HAS_BIAS, HAS_RESIDUAL,
    )  # fmt: skip


_launch_one_row = Launcher(_one_row_kernel)
_launch_few_rows = Launcher(_few_rows_kernel)

Epilogue = Literal["none", "silu_and_mul"]


def fused_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    norm: torch.Tensor | None = None,
    eps: float = 0.0,
    residual: torch.Tensor | None = None,
    epilogue: Epilogue = "none",
    out: torch.Tensor | None = None,
    config: LinearConfig | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """``epilogue(rms_norm(x) @ weight.T + bias) + residual`` for ``x`` (M, K) with M up to :data:`MAX_ROWS`.

    ``weight`` is (N, K), contiguous, with "silu_and_mul" (2 * N, K), the gate half first; ``norm`` (K) is the norm's
    weight, None for no norm. ``residual`` (M, N), contiguous, may be ``out`` itself, but neither of them may be ``x``.
    Rounds where the separate operations would. Returns ``out`` (M, N), made if it is None.
    """
    rows, inputs = x.shape
    gated = epilogue == "silu_and_mul"
    outputs = weight.shape[0] // (2 if gated else 1)
    if rows > MAX_ROWS:
        raise ValueError(f"fused_linear serves up to {MAX_ROWS} rows, not {rows}.")
    if out is None:
        out = torch.empty((rows, outputs), dtype=x.dtype, device=x.device)
    if rows == 0:
        return out
    config = config or linear_config(rows, outputs, inputs, gated, x.dtype.itemsize)
    grid = (triton.cdiv(outputs, config.block_n),)
    pointers = (weight, norm, bias, residual, out)
    parts = {
        "N": outputs,
        "K": inputs,
        "GATED": gated,
        "HAS_NORM": norm is not None,
        "HAS_BIAS": bias is not None,
        "HAS_RESIDUAL": residual is not None,
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
        "num_warps": config.num_warps,
    }
    if rows == 1:
        _launch_one_row(grid, x, *pointers, eps, **parts, types=(out.dtype,), pdl=pdl)
    else:
        block_m = max(16, power_of_2(rows))
        _launch_few_rows(
            grid,
            x,
            *pointers,
            rows,
            eps,
            **parts,
            types=(out.dtype,),
            X_STRIDE=x.stride(0),
            BLOCK_M=block_m,
            SPLIT_K=config.num_warps,
            pdl=pdl,
        )
    return out


def fused_linear_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    norm: torch.Tensor | None = None,
    eps: float = 0.0,
    residual: torch.Tensor | None = None,
    epilogue: Epilogue = "none",
) -> torch.Tensor:
    """The same in separate torch operations."""
    ops = Ops()
    out = F.linear(x if norm is None else ops.rms_norm(x, norm, eps), weight, bias)
    if epilogue == "silu_and_mul":
        out = ops.silu_and_mul(out)
    return out if residual is None else residual + out
