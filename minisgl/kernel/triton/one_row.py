"""A linear layer for a single row, with what stands before and after it: bound by reading the weight once.

    out = epilogue(norm(x) @ W.T + bias)          epilogue: nothing, + residual, or silu(gate) * up

A step of one request is a chain of short kernels, and what it costs beside the bytes are the starts of kernels and the
latency of a load between them. So a layer of a model is five kernels in all (norm + qkv, attention, output + residual,
norm + gate and up + silu, down + residual), and each loads its first weights before it waits for the one before it
(:mod:`.launch`). A program is a single warp, which multiplies and sums on its own: no barrier, no shared memory.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs

from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from ..ops import Ops
from .activation import silu_mul
from .launch import Launcher, power_of_2, wait_for_previous


@dataclass(frozen=True, slots=True)
class OneRowConfig:
    """Launch parameters: outputs (or gate and up pairs) of a program, and elements of K loaded at a time."""

    block_n: int
    block_k: int


def one_row_config(inputs: int, gated: bool) -> OneRowConfig:
    """Enough programs for the whole device, each with all its weights in flight at once where K allows it."""
    if inputs > 8192:
        return OneRowConfig(2 if gated else 4, 512)
    if inputs > 4096:
        return OneRowConfig(2, 1024)
    block_k = power_of_2(inputs)
    return OneRowConfig(max(1, (2048 if gated else 4096) // block_k), block_k)


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
    experts_ptr,
    out_ptr,
    eps,
    N: tl.constexpr,  # outputs; with GATED the rows of W are N of gate and then N of up
    K: tl.constexpr,
    GATED: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_EXPERTS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    first = tl.program_id(0) * BLOCK_N
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    norm = 0.0
    if HAS_NORM:
        norm = tl.load(norm_ptr + tl.arange(0, BLOCK_K), mask=tl.arange(0, BLOCK_K) < K, other=0.0)
    if HAS_EXPERTS:
        # Which weights to load is what the kernel before this one has to say.
        wait_for_previous(PDL)
        choice = tl.program_id(1)
        w_ptr += tl.load(experts_ptr + choice).to(tl.int64) * ((2 if GATED else 1) * N * K)
        out_ptr += choice * N
    w = _load_rows(w_ptr, first, 0, N, K, BLOCK_N, BLOCK_K)
    up_w = w
    if GATED:
        up_w = _load_rows(w_ptr + N * K, first, 0, N, K, BLOCK_N, BLOCK_K)
    if not HAS_EXPERTS:
        wait_for_previous(PDL)

    n = first + tl.arange(0, BLOCK_N)
    residual = 0.0
    if HAS_RESIDUAL:
        residual = tl.load(residual_ptr + n, mask=n < N, other=0.0).to(tl.float32)
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
    # Bias, activation and residual, rounded where the separate operations would.
    out = tl.sum(acc, axis=1)
    if HAS_BIAS:
        out += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)
    if GATED:
        total_up = tl.sum(up, axis=1)
        if HAS_BIAS:
            total_up += tl.load(bias_ptr + N + n, mask=n < N, other=0.0).to(tl.float32)
        out = silu_mul(out, total_up, dtype)
    if HAS_RESIDUAL:
        out = out.to(dtype).to(tl.float32) + residual
    tl.store(out_ptr + n, out.to(out_ptr.dtype.element_ty), mask=n < N)


_launch_one_row = Launcher(_one_row_kernel)


def one_row_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    norm: torch.Tensor | None = None,
    eps: float = 0.0,
    residual: torch.Tensor | None = None,
    gated: bool = False,
    experts: torch.Tensor | None = None,
    config: OneRowConfig | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """``rms_norm(x) @ weight.T + bias``, then ``silu(gate) * up`` of its halves if ``gated``, then ``+ residual``.

    ``x`` is (1, K); ``weight`` (N, K), contiguous, if gated (2 * N, K) with the gate half first; ``norm`` (K) is the
    norm's weight, None for no norm; ``residual`` is (1, N), contiguous. Rounds where the separate operations would.
    Returns (1, N). With ``experts`` (1, top_k) int32, ``weight`` is one such matrix for each expert, (E, ..., K), and
    there is a result for each choice: (top_k, N); they have neither bias nor residual.
    """
    rows, inputs = x.shape
    if rows != 1:
        raise ValueError(f"one_row_linear serves one row, not {rows}.")
    if experts is not None and (bias is not None or residual is not None):
        raise ValueError("Experts have neither bias nor residual here.")
    outputs = weight.shape[-2] // (2 if gated else 1)
    choices = 1 if experts is None else experts.shape[1]
    out = torch.empty((choices, outputs), dtype=x.dtype, device=x.device)
    config = config or one_row_config(inputs, gated)
    _launch_one_row(
        (triton.cdiv(outputs, config.block_n), choices),
        x,
        weight,
        norm,
        bias,
        residual,
        experts,
        out,
        eps,
        types=(out.dtype,),
        N=outputs,
        K=inputs,
        GATED=gated,
        HAS_NORM=norm is not None,
        HAS_BIAS=bias is not None,
        HAS_RESIDUAL=residual is not None,
        HAS_EXPERTS=experts is not None,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        num_warps=1,
        pdl=pdl,
    )
    return out


def one_row_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    norm: torch.Tensor | None = None,
    eps: float = 0.0,
    residual: torch.Tensor | None = None,
    gated: bool = False,
    experts: torch.Tensor | None = None,
) -> torch.Tensor:
    """The same in separate torch operations."""
    if experts is not None:
        each = [one_row_reference(x, weight[i], norm=norm, eps=eps, gated=gated) for i in experts[0].tolist()]
        return torch.cat(each)
    ops = Ops()
    out = F.linear(x if norm is None else ops.rms_norm(x, norm, eps), weight, bias)
    if gated:
        out = ops.silu_and_mul(out)
    return out if residual is None else residual + out
