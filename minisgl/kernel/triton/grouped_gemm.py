"""The matrix products of a mixture of experts, all experts in one launch.

    hidden (T * top_k, I) = silu(x[token] @ gate.T) * (x[token] @ up.T)       one row for each pair of token and choice
    each   (T * top_k, H) = hidden[pair] @ down.T
    out    (T, H)         = sum over choices of weight * each

A program multiplies a block of one expert's pairs with some of its outputs. How many blocks each expert has is known on
the device only, so there are programs for the most there can be, and each finds its own block in the counts; that needs
no word from the host and fits a CUDA graph. With few tokens an expert's weight is read once, by whom needs it: memory-
bound.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from .activation import silu_mul
from .launch import Launcher, power_of_2, wait_for_previous


@dataclass(frozen=True, slots=True)
class GroupedConfig:
    """Launch parameters: pairs of a block, outputs (or gate and up pairs) of a program, elements of K at a time."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


def grouped_config(
    pairs: int, num_experts: int, outputs: int, inputs: int, gated: bool, itemsize: int
) -> GroupedConfig:
    """By the pairs that an expert gets on average: under some 100 the weights are the cost, beyond the tensor cores."""
    each = pairs / num_experts
    if itemsize == 4:
        return fixed_grouped_config(gated, itemsize)
    if pairs < num_experts:
        return GroupedConfig(16, 16 if gated else 32, 128, num_warps=4, num_stages=4)
    if each <= 24:
        return GroupedConfig(16, 32 if gated else 64, 128, num_warps=4, num_stages=4)
    if each <= 100:
        return GroupedConfig(64, 64 if gated else 128, 64, num_warps=4, num_stages=3)
    return GroupedConfig(128, 64 if gated else 128, 64, num_warps=8, num_stages=3)


def fixed_grouped_config(gated: bool, itemsize: int) -> GroupedConfig:
    """One for any number of pairs: the same launch parameters add up a row in the same order."""
    if itemsize == 4:
        return GroupedConfig(32, 32, 32, num_warps=4, num_stages=2)
    return GroupedConfig(64, 64 if gated else 128, 64, num_warps=4, num_stages=3)


@triton.jit(do_not_specialize=["num_tokens", "num_blocks"])
def _grouped_gemm_kernel(
    x_ptr,
    w_ptr,
    out_ptr,
    members_ptr,
    counts_ptr,
    num_tokens,
    num_blocks,
    X_STRIDE: tl.constexpr,
    E: tl.constexpr,
    N: tl.constexpr,  # outputs; with GATED an expert's rows of W are N of gate and then N of up
    K: tl.constexpr,
    ROWS_PER_X: tl.constexpr,  # pairs that share a row of x
    GATED: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    block = tl.program_id(0) % num_blocks
    first = tl.program_id(0) // num_blocks * BLOCK_N
    experts = tl.arange(0, BLOCK_E)
    wait_for_previous(PDL)
    counts = tl.load(counts_ptr + experts, mask=experts < E, other=0)
    blocks = tl.cdiv(counts, BLOCK_M)
    ends = tl.cumsum(blocks, 0)
    expert = tl.sum((ends <= block).to(tl.int32), axis=0)
    if expert < E:
        mine = experts == expert
        start = (block - tl.sum(tl.where(mine, ends - blocks, 0), axis=0)) * BLOCK_M
        count = tl.sum(tl.where(mine, counts, 0), axis=0)
        m = start + tl.arange(0, BLOCK_M)
        real = m < count
        pair = tl.load(members_ptr + expert.to(tl.int64) * num_tokens + m, mask=real, other=0).to(tl.int64)

        n = first + tl.arange(0, BLOCK_N)
        k = tl.arange(0, BLOCK_K)
        rows: tl.constexpr = 2 * N if GATED else N
        x_row = x_ptr + (pair // ROWS_PER_X * X_STRIDE)[:, None] + k[None, :]
        w_row = w_ptr + expert.to(tl.int64) * (rows * K) + n[:, None] * K + k[None, :]
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        up = acc
        for offset in range(0, K, BLOCK_K):
            x_mask = real[:, None]
            w_mask = (n < N)[:, None]
            if K % BLOCK_K != 0:
                x_mask &= (offset + k < K)[None, :]
                w_mask &= (offset + k < K)[None, :]
            x = tl.load(x_row + offset, mask=x_mask, other=0.0)
            w = tl.load(w_row + offset, mask=w_mask, other=0.0)
            acc = tl.dot(x, tl.trans(w), acc, input_precision="ieee")
            if GATED:
                w_up = tl.load(w_row + N * K + offset, mask=w_mask, other=0.0)
                up = tl.dot(x, tl.trans(w_up), up, input_precision="ieee")
        if GATED:
            acc = silu_mul(acc, up, x_ptr.dtype.element_ty)
        place = out_ptr + (pair * N)[:, None] + n[None, :]
        tl.store(place, acc.to(out_ptr.dtype.element_ty), mask=real[:, None] & (n < N)[None, :])


@triton.jit
def _combine_kernel(
    each_ptr,
    weights_ptr,
    out_ptr,
    counts_ptr,
    N: tl.constexpr,
    E: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_E: tl.constexpr,
    PDL: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    n = part * BLOCK_N + tl.arange(0, BLOCK_N)
    wait_for_previous(PDL)
    acc = tl.zeros((BLOCK_N,), tl.float32)
    for j in tl.static_range(TOP_K):
        pair = token * TOP_K + j
        each = tl.load(each_ptr + pair * N + n, mask=n < N, other=0.0).to(tl.float32)
        acc += each * tl.load(weights_ptr + pair).to(tl.float32)
    tl.store(out_ptr + token * N + n, acc.to(out_ptr.dtype.element_ty), mask=n < N)
    if (token == 0) & (part == 0):
        # Nobody reads the counts any more; the next routing finds them zero.
        experts = tl.arange(0, BLOCK_E)
        tl.store(counts_ptr + experts, experts * 0, mask=experts < E)


_launch_grouped_gemm = Launcher(_grouped_gemm_kernel)
_launch_combine = Launcher(_combine_kernel)


def most_blocks(pairs: int, num_experts: int, block_m: int) -> int:
    """No distribution of ``pairs`` over experts makes more blocks than this."""
    some = min(pairs, num_experts)
    return some + (pairs - some) // block_m


def grouped_gemm(
    x: torch.Tensor,
    weight: torch.Tensor,
    members: torch.Tensor,
    counts: torch.Tensor,
    pairs: int,
    *,
    gated: bool,
    config: GroupedConfig | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """``x`` times each expert's ``weight`` (E, N, K), with ``gated`` (E, 2 * N, K) and silu(gate) * up: (pairs, N).

    ``x`` is (rows, K) where ``pairs // rows`` consecutive pairs share a row. ``members`` and ``counts`` come from
    :mod:`.moe_routing`.
    """
    num_experts, rows, inputs = weight.shape
    outputs = rows // 2 if gated else rows
    out = torch.empty((pairs, outputs), dtype=x.dtype, device=x.device)
    if pairs == 0:
        return out
    config = config or grouped_config(pairs, num_experts, outputs, inputs, gated, x.dtype.itemsize)
    blocks = most_blocks(pairs, num_experts, config.block_m)
    _launch_grouped_gemm(
        (blocks * triton.cdiv(outputs, config.block_n),),
        x,
        weight,
        out,
        members,
        counts,
        members.shape[1],
        blocks,
        X_STRIDE=x.stride(0),
        E=num_experts,
        N=outputs,
        K=inputs,
        ROWS_PER_X=pairs // x.shape[0],
        GATED=gated,
        BLOCK_E=power_of_2(num_experts),
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        pdl=pdl,
    )
    return out


def combine(each: torch.Tensor, weights: torch.Tensor, counts: torch.Tensor, *, pdl: bool = False) -> torch.Tensor:
    """Sums ``weights`` (T, top_k) times ``each`` (T * top_k, N) over the choices: (T, N).

    Sets ``counts`` (E) to zero.
    """
    tokens, top_k = weights.shape
    size = each.shape[1]
    out = torch.empty((tokens, size), dtype=each.dtype, device=each.device)
    if tokens:
        block = min(1024, power_of_2(size))
        _launch_combine(
            (tokens, triton.cdiv(size, block)),
            each,
            weights,
            out,
            counts,
            N=size,
            E=counts.shape[0],
            TOP_K=top_k,
            BLOCK_N=block,
            BLOCK_E=power_of_2(counts.shape[0]),
            num_warps=4,
            pdl=pdl,
        )
    return out
