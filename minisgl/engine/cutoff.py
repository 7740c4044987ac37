"""Top-k, top-p and min-p as one number per row: the smallest probability that is kept.

The definition, on the probabilities of a row sorted downwards, p_1 >= p_2 >= ...:

    top-k   t_k = p_k                          Z = p_1 + ... + p_k   (1 without top-k)
    top-p   t_p = p_n, n the first index with  p_1 + ... + p_n >= top_p * Z
    min-p   t_m = min_p * p_1
    kept    p >= max(t_k, t_p, t_m)

It speaks of values only, so equal probabilities stay or go together. It is found without a full sort: among the few
hundred largest probabilities where the row allows it (:func:`_from_largest`), else by bisection (:func:`_bisect`).
Rows are a whole number of blocks wide (:data:`BLOCK`); probability 0 fills them up.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

BLOCK = 256
"""Tokens whose probabilities are summed in one go. Sums of sums keep the order of operations of a row fixed."""

_LARGEST = 256  # how many of the largest probabilities are looked at before bisection


def smallest_kept(prob: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """The cut-off (F, fp32) of each row of ``prob`` (F, width), which sum to 1.

    ``top_k`` (F, int32, below 1 is off), ``top_p`` and ``min_p`` (F, fp32). What no row asks for is not computed.
    """
    any_top_k, any_top_p = bool((top_k > 0).any()), bool((top_p < 1).any())
    if not (any_top_k or any_top_p):
        return prob.amax(-1) * min_p
    top_k = top_k.long()
    cutoff, settled = _from_largest(prob, top_k, top_p, min_p)
    if not settled.all():
        rows = (~settled).nonzero()[:, 0]
        cutoff[rows] = _bisect(prob[rows], top_k[rows], top_p[rows], min_p[rows], any_top_k, any_top_p)
    return cutoff


def _from_largest(prob: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> tuple[Tensor, Tensor]:
    """The cut-off as far as the largest few probabilities tell, and which rows (bool) they settle."""
    size = min(_LARGEST, prob.shape[1])
    largest = prob.topk(size, -1).values
    mass = largest.cumsum(-1, dtype=torch.float64)
    has_k, has_p = top_k > 0, top_p < 1
    last = torch.where(has_k, top_k, size).clamp_(max=size)[:, None] - 1
    need = top_p.double()[:, None] * torch.where(has_k[:, None], mass.gather(1, last), 1.0)
    # The last one that is needed to reach the mass, at most the last of top-k: rounding may leave that short of it.
    nucleus = torch.searchsorted(mass, need)
    settled = torch.where(has_k, top_k <= size, ~has_p | (nucleus[:, 0] < size))
    kept = torch.where(has_p[:, None], torch.minimum(nucleus, last), last)
    cutoff = largest.gather(1, kept)[:, 0].masked_fill_(~(has_k | has_p), 0.0)
    return torch.maximum(cutoff, largest[:, 0] * min_p), settled


def _bisect(prob: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, any_top_k: bool, any_top_p: bool) -> Tensor:
    """The same from whole rows, in a fixed number of passes over them."""
    mask = torch.empty_like(prob)  # 1.0 and 0.0: faster than bool in all that follows
    cutoff = prob.amax(-1) * min_p
    need = top_p
    if any_top_k:
        keep = torch.where(top_k > 0, top_k, prob.shape[1]).clamp_(max=prob.shape[1])
        kth = _largest_cutoff(prob, mask, lambda: _row_sum(mask) >= keep)
        torch.gt(prob, kth[:, None], out=mask)
        above = _row_sum(mask)
        mass = _row_sum(mask.mul_(prob)) + (keep - above) * kth
        need = top_p * torch.where(top_k > 0, mass, 1.0)
        cutoff = torch.maximum(cutoff, kth)
    if any_top_p:
        nucleus = _largest_cutoff(prob, mask, lambda: _row_sum(mask.mul_(prob)) >= need)
        cutoff = torch.maximum(cutoff, torch.where(top_p < 1, nucleus, 0.0))
    return cutoff


def _largest_cutoff(prob: Tensor, mask: Tensor, enough: Callable[[], Tensor]) -> Tensor:
    """Per row the largest number such that ``mask``, the probabilities not below it, is ``enough``; 0 if nothing is.

    The bits of fp32 numbers from 0 on are ordered like integers, so 31 halvings between 0 and the largest probability
    leave a single number.
    """
    low = torch.zeros(len(prob), dtype=torch.int32, device=prob.device)
    high = prob.amax(-1).view(torch.int32) + 1
    for _ in range(31):
        middle = low + (high - low) // 2
        torch.ge(prob, middle.view(torch.float32)[:, None], out=mask)
        ok = enough()
        low, high = torch.where(ok, middle, low), torch.where(ok, high, middle)
    return low.view(torch.float32)


def _row_sum(x: Tensor) -> Tensor:
    """Sums of rows (F), in an order that neither F nor the number of threads changes."""
    return x.view(len(x), -1, BLOCK).sum(-1).sum(-1)
