"""The second half of the experts of a single token: their down projections, weighted, summed, and added to the stream.

    out = residual + sum over choices of weight * (hidden[choice] @ down[expert].T)

With one token the experts' matrices are read once and by nobody else, as in :mod:`.one_row`, which has the first half.
A program has some outputs and all choices, each of them as rows of one tile, so that all the weights are in flight at
once and the sum never leaves it. Who was chosen is known before the first half runs: the weights are asked for before
the wait. The reference is :class:`minisgl.moe.torch_experts.TorchExperts`.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs

import torch
import triton
import triton.language as tl

from .launch import Launcher, power_of_2, wait_for_previous

_BLOCK_N = 2  # outputs of a program
_NUM_WARPS = 4


@triton.jit
def _weighted_experts_kernel(
    hidden_ptr,
    w_ptr,
    weights_ptr,
    experts_ptr,
    residual_ptr,
    out_ptr,
    N: tl.constexpr,
    K: tl.constexpr,
    TOP_K: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    first = tl.program_id(0) * BLOCK_N
    dtype: tl.constexpr = hidden_ptr.dtype.element_ty
    choice = tl.arange(0, BLOCK_C)
    # Rows of the tile: the outputs of choice 0, those of choice 1, ...
    row = tl.arange(0, BLOCK_C * BLOCK_N)
    its_choice = row // BLOCK_N
    n = first + row % BLOCK_N
    real = (its_choice < TOP_K) & (n < N)
    # The kernel before this one is the first half; the choice was made before that one.
    # Past the L1 cache, which may still have what lay there in the layer before.
    expert = tl.load(experts_ptr + its_choice, mask=real, other=0, cache_modifier=".cg").to(tl.int64)
    weights = tl.load(weights_ptr + choice, mask=choice < TOP_K, other=0.0, cache_modifier=".cg").to(tl.float32)
    k = tl.arange(0, BLOCK_K)
    w_row = w_ptr + (expert * N + n)[:, None] * K
    w = tl.load(w_row + k[None, :], mask=real[:, None] & (k < K)[None, :], other=0.0, eviction_policy="evict_first")
    wait_for_previous(PDL)

    out_n = first + tl.arange(0, BLOCK_N)
    acc = tl.zeros((BLOCK_C * BLOCK_N,), tl.float32)
    for start in range(0, K, BLOCK_K):
        here = start + k
        hidden = tl.load(
            hidden_ptr + its_choice[:, None] * K + here[None, :],
            mask=real[:, None] & (here < K)[None, :],
            other=0.0,
        )
        current = w
        if start + BLOCK_K < K:
            ahead = here + BLOCK_K
            mask = real[:, None] & (ahead < K)[None, :]
            w = tl.load(w_row + ahead[None, :], mask=mask, other=0.0, eviction_policy="evict_first")
        acc += tl.sum(current.to(tl.float32) * hidden.to(tl.float32), axis=1)
    # Rounded where the separate operations would.
    each = tl.reshape(acc.to(dtype).to(tl.float32), (BLOCK_C, BLOCK_N)) * weights[:, None]
    out = tl.sum(each, axis=0).to(dtype).to(tl.float32)
    if HAS_RESIDUAL:
        out += tl.load(residual_ptr + out_n, mask=out_n < N, other=0.0).to(tl.float32)
    tl.store(out_ptr + out_n, out.to(dtype), mask=out_n < N)


_launch_weighted_experts = Launcher(_weighted_experts_kernel)


def weighted_experts(
    hidden: torch.Tensor,
    down: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    *,
    residual: torch.Tensor | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """For one token: ``hidden`` (top_k, K) of its choices, ``down`` (E, N, K), ``weights`` (1, top_k) and ``experts``
    (1, top_k) int32, ``residual`` (1, N) or None; all contiguous. Returns (1, N).

    The kernel before this one in the stream must not be the one that wrote ``weights`` and ``experts``.
    """
    top_k, inputs = hidden.shape
    outputs = down.shape[1]
    out = torch.empty((1, outputs), dtype=hidden.dtype, device=hidden.device)
    _launch_weighted_experts(
        (triton.cdiv(outputs, _BLOCK_N),),
        hidden,
        down,
        weights,
        experts,
        residual,
        out,
        N=outputs,
        K=inputs,
        TOP_K=top_k,
        HAS_RESIDUAL=residual is not None,
        BLOCK_C=power_of_2(top_k),
        BLOCK_N=_BLOCK_N,
        BLOCK_K=min(1024, power_of_2(inputs)),
        num_warps=_NUM_WARPS,
        pdl=pdl,
    )
    return out
