"""Sampling on a CPU in plain torch: the reference of the kernels, and what runs without them.

Every step of it works on one row at a time in a fixed order of operations, so the token of a request is, bit for bit,
the same whatever requests are sampled beside it. Rows are sorted by what they need, so none pays for another's
parameters:

    greedy       argmax
    plain        temperature, inverse CDF
    filtered     temperature, cut-off probability, inverse CDF

The filters only ever keep the most probable tokens, so all of them together are one number per row, the smallest
probability that is kept (:mod:`minisgl.engine.cutoff`). Tokens of equal probability stay or go together, which makes
the outcome independent of how a sort breaks ties.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from .cutoff import BLOCK, smallest_kept
from .sampler import GREEDY_BELOW, Sampler


class TorchSampler(Sampler):
    """fp32 logits. Its workspaces become resident as far as rows are sampled."""

    def __init__(self, vocab_size: int, max_rows: int, device: torch.device) -> None:
        super().__init__(vocab_size, max_rows, device)
        width = -(-vocab_size // BLOCK) * BLOCK
        self._scaled = torch.empty((max_rows, width), device=device)
        self._prob = torch.empty((max_rows, width), device=device)
        # What fills up the last block is impossible, now and ever after.
        self._scaled[:, vocab_size:] = -torch.inf

    def pick(self, logits: Tensor, tensors: Mapping[str, Tensor]) -> Tensor:
        temperature, top_k = tensors["temperature"].numpy(), tensors["top_k"].numpy()
        is_greedy = (temperature < GREEDY_BELOW) | (top_k == 1)
        if is_greedy.all():
            return greedy(logits)
        is_filtered = (top_k > 0) | (tensors["top_p"].numpy() < 1) | (tensors["min_p"].numpy() > 0)
        is_filtered &= ~is_greedy
        plain = np.flatnonzero(~(is_greedy | is_filtered))
        if len(plain) == len(logits):
            return self._sample(logits, tensors, len(plain))
        ids = torch.empty(len(logits), dtype=torch.int32)
        if is_greedy.any():
            rows = torch.from_numpy(np.flatnonzero(is_greedy))
            ids[rows] = greedy(logits[rows])
        rows = torch.from_numpy(np.concatenate((plain, np.flatnonzero(is_filtered))))
        names = ("temperature", "top_k", "top_p", "min_p", "uniform")
        ids[rows] = self._sample(logits[rows], {name: tensors[name][rows] for name in names}, len(plain))
        return ids

    def _sample(self, logits: Tensor, tensors: Mapping[str, Tensor], num_plain: int) -> Tensor:
        """Rows from ``num_plain`` on are filtered."""
        n = len(logits)
        scaled, prob = self._scaled[:n], self._prob[:n]
        torch.div(logits, tensors["temperature"][:, None], out=scaled[:, : self._vocab])
        torch.softmax(scaled, -1, out=prob)
        if num_plain < n:
            filtered, mask = prob[num_plain:], scaled[num_plain:, : self._vocab]
            top_k, top_p, min_p = (tensors[name][num_plain:] for name in ("top_k", "top_p", "min_p"))
            cutoff = smallest_kept(filtered, top_k, top_p, min_p)
            filtered = filtered[:, : self._vocab]
            torch.ge(filtered, cutoff[:, None], out=mask)  # 1.0 or 0.0
            filtered *= mask
        return inverse_cdf(prob.view(n, -1, BLOCK), tensors["uniform"])


def greedy(logits: Tensor) -> Tensor:
    """The lowest id of the largest logit (S, int32); -1 where that is not finite."""
    best, ids = logits.max(-1)
    return ids.int().masked_fill_(~best.isfinite(), -1)


def inverse_cdf(weights: Tensor, uniform: Tensor) -> Tensor:
    """The token (N, int32) under ``uniform`` of the mass of each row, in token id order; -1 where that is not finite.

    ``weights`` (N, blocks, block) are fp32 and not negative, ``uniform`` (N) lies in [0, 1). Two searches, over the
    blocks and within one, stand for one over the whole vocabulary; sums of blocks are added up in fp64. A token of
    weight 0 is never returned.
    """
    n, _, width = weights.shape
    mass = weights.sum(-1).cumsum(-1, dtype=torch.float64)
    total = mass[:, -1:]
    target = uniform.double()[:, None] * total
    block = _first_above(mass, target)
    before = mass.gather(1, (block - 1).clamp_(min=0)).masked_fill_(block == 0, 0.0)
    inner = weights.gather(1, block[:, :, None].expand(n, 1, width))[:, 0].cumsum(-1, dtype=torch.float64)
    token = block * width + _first_above(inner, target - before)
    return token[:, 0].int().masked_fill_(~total[:, 0].isfinite(), -1)


def _first_above(cumulative: Tensor, target: Tensor) -> Tensor:
    """Per row the first index whose cumulative mass exceeds ``target`` (N, 1), else the last index that adds mass."""
    index = torch.searchsorted(cumulative, target, right=True)
    last = torch.searchsorted(cumulative, cumulative[:, -1:].contiguous())
    # The clamp is for rows of NaN, which sort above everything.
    return torch.minimum(index, last).clamp_(max=cumulative.shape[1] - 1)
