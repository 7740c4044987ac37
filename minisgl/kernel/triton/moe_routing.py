"""Who goes to which expert: the step before grouped matrix products.

No sort is needed. Every (token, choice) pair takes the next free place in its expert's list:

    pairs      0>e2  1>e0  2>e2  3>e1  ...            pair = token * top_k + choice
    members    e0: [1 ...]   e1: [3 ...]   e2: [0 2 ...]        (E, T): an expert gets a token once at most
    counts     1             1             2

Which place a pair gets depends on chance, but nothing else does: each row of a product is computed on its own.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs

import torch
import triton
import triton.language as tl

from .launch import Launcher, power_of_2, wait_for_previous


@triton.jit
def _choose(logits, expert, choice, E: tl.constexpr, TOP_K: tl.constexpr, NORMALISE: tl.constexpr):
    """Weights and experts (T, BLOCK_K) by ``logits`` (T, BLOCK_E), which are minus infinity past the end."""
    prob = tl.exp(logits - tl.max(logits, axis=1)[:, None])
    prob = prob / tl.sum(prob, axis=1)[:, None]
    # A row of NaN (padding, say) still has to choose experts that exist.
    prob = tl.where(prob == prob, prob, 0.0)
    prob = tl.where(expert < E, prob, -1.0)
    weights = tl.zeros((logits.shape[0], choice.shape[1]), tl.float32)
    chosen = tl.zeros((logits.shape[0], choice.shape[1]), tl.int32)
    for j in tl.static_range(TOP_K):
        best = tl.max(prob, axis=1)[:, None]
        index = tl.min(tl.where(prob == best, expert, logits.shape[1]), axis=1)[:, None]
        weights = tl.where(choice == j, best, weights)
        chosen = tl.where(choice == j, index, chosen)
        prob = tl.where(expert == index, -1.0, prob)
    if NORMALISE:
        weights = weights / tl.sum(weights, axis=1)[:, None]
    return weights, chosen


@triton.jit(do_not_specialize=["num_tokens"])
def _route_kernel(
    logits_ptr,
    weights_ptr,
    members_ptr,
    counts_ptr,
    num_tokens,
    LOGITS_STRIDE: tl.constexpr,
    E: tl.constexpr,
    TOP_K: tl.constexpr,
    NORMALISE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    expert = tl.arange(0, BLOCK_E)[None, :]
    choice = tl.arange(0, BLOCK_K)[None, :]
    valid = (token < num_tokens)[:, None]
    wait_for_previous(PDL)
    place = logits_ptr + token.to(tl.int64)[:, None] * LOGITS_STRIDE + expert
    logits = tl.load(place, mask=valid & (expert < E), other=float("-inf")).to(tl.float32)
    weights, chosen = _choose(logits, expert, choice, E, TOP_K, NORMALISE)
    pair = token[:, None] * TOP_K + choice
    real = valid & (choice < TOP_K)
    tl.store(weights_ptr + pair, weights.to(weights_ptr.dtype.element_ty), mask=real)
    position = tl.atomic_add(counts_ptr + chosen, 1, mask=real, sem="relaxed")
    tl.store(members_ptr + chosen.to(tl.int64) * num_tokens + position, pair, mask=real)


@triton.jit
def _choose_kernel(
    logits_ptr,
    weights_ptr,
    experts_ptr,
    E: tl.constexpr,
    TOP_K: tl.constexpr,
    NORMALISE: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    expert = tl.arange(0, BLOCK_E)[None, :]
    choice = tl.arange(0, BLOCK_K)[None, :]
    wait_for_previous(PDL)
    logits = tl.load(logits_ptr + expert, mask=expert < E, other=float("-inf")).to(tl.float32)
    weights, chosen = _choose(logits, expert, choice, E, TOP_K, NORMALISE)
    tl.store(weights_ptr + choice, weights.to(weights_ptr.dtype.element_ty), mask=choice < TOP_K)
    tl.store(experts_ptr + choice, chosen, mask=choice < TOP_K)


@triton.jit(do_not_specialize=["num_pairs"])
def _assign_kernel(
    experts_ptr, members_ptr, counts_ptr, num_pairs, TOP_K: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    valid = pair < num_pairs
    wait_for_previous(PDL)
    expert = tl.load(experts_ptr + pair, mask=valid, other=0).to(tl.int64)
    position = tl.atomic_add(counts_ptr + expert, 1, mask=valid, sem="relaxed")
    tl.store(members_ptr + expert * (num_pairs // TOP_K) + position, pair, mask=valid)


_launch_route = Launcher(_route_kernel)
_launch_choose = Launcher(_choose_kernel)
_launch_assign = Launcher(_assign_kernel)


def route(
    logits: torch.Tensor,
    top_k: int,
    normalise: bool,
    counts: torch.Tensor,
    dtype: torch.dtype,
    *,
    fixed: bool = False,
    pdl: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax, top-k and assignment in one: returns weights (T, top_k) of ``dtype`` and members (E, T) int32.

    ``logits`` (T, E). Weights are probabilities over all experts; with ``normalise`` the chosen ones sum to 1.
    ``counts`` (E) int32 must be zero, and counts the members of each expert afterwards. ``fixed``: sums over experts
    run in the same order for any number of tokens. Reference: :func:`minisgl.moe.base.route`.
    """
    tokens, num_experts = logits.shape
    weights = torch.empty((tokens, top_k), dtype=dtype, device=logits.device)
    members = torch.empty((num_experts, tokens), dtype=torch.int32, device=logits.device)
    if tokens:
        block_t = 1 if fixed or tokens <= 128 else 4
        _launch_route(
            (triton.cdiv(tokens, block_t),),
            logits,
            weights,
            members,
            counts,
            tokens,
            types=(dtype,),
            LOGITS_STRIDE=logits.stride(0),
            E=num_experts,
            TOP_K=top_k,
            NORMALISE=normalise,
            BLOCK_T=block_t,
            BLOCK_E=power_of_2(num_experts),
            BLOCK_K=power_of_2(top_k),
            num_warps=block_t,
            pdl=pdl,
        )
    return weights, members


def choose(
    logits: torch.Tensor, top_k: int, normalise: bool, dtype: torch.dtype, *, pdl: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax and top-k of one token, whose ``logits`` are (1, E), as in :func:`route`.

    Returns weights (1, top_k) of ``dtype`` and experts (1, top_k) int32.
    """
    weights = torch.empty((1, top_k), dtype=dtype, device=logits.device)
    experts = torch.empty((1, top_k), dtype=torch.int32, device=logits.device)
    num_experts = logits.shape[1]
    _launch_choose(
        (1,),
        logits,
        weights,
        experts,
        types=(dtype,),
        E=num_experts,
        TOP_K=top_k,
        NORMALISE=normalise,
        BLOCK_E=power_of_2(num_experts),
        BLOCK_K=power_of_2(top_k),
        num_warps=1,
        pdl=pdl,
    )
    return weights, experts


def assign(experts: torch.Tensor, counts: torch.Tensor, *, pdl: bool = False) -> torch.Tensor:
    """Members (E, T) int32 for choices made elsewhere: ``experts`` (T, top_k), contiguous, distinct within a token.

    ``counts`` as for :func:`route`.
    """
    tokens, top_k = experts.shape
    members = torch.empty((counts.shape[0], tokens), dtype=torch.int32, device=experts.device)
    if tokens:
        block = 256
        grid = (triton.cdiv(experts.numel(), block),)
        _launch_assign(
            grid,
            experts,
            members,
            counts,
            experts.numel(),
            TOP_K=top_k,
            BLOCK=block,
            num_warps=4,
            pdl=pdl,
        )
    return members
