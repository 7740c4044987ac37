"""From logits to token ids: penalties, temperature, top-k, top-p, min-p, and one uniform number per token.

Every step of it works on one row at a time in a fixed order of operations, so on a CPU the token of a request is, bit
for bit, the same whatever requests are sampled beside it. On the host :func:`plan_sampling` sorts the rows by what
they need, so no row pays for another's parameters:

    rows of the step     greedy: argmax
                         sampled: plain      temperature, inverse CDF
                                  filtered   temperature, cut-off probability, inverse CDF

The filters only ever keep the most probable tokens, so all of them together are one number per row, the smallest
probability that is kept (:mod:`minisgl.engine.cutoff`). Tokens of equal probability stay or go together, which makes
the outcome independent of how a sort breaks ties.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from minisgl.core import Int32, Penalties, Sampling

from .cutoff import BLOCK, smallest_kept

Arrays = dict[str, npt.NDArray[Any]]

GREEDY_BELOW = 1e-5
"""Temperatures under this are greedy: dividing by them would overflow."""


@dataclass(slots=True)
class SamplingPlan:
    """Which rows of a step need what (host side), and the numpy arrays that the device needs for it.

    Of S rows, ``num_greedy`` are greedy and ``num_plain + num_filtered`` are sampled, plain ones first. ``arrays``
    holds, where it is not empty: ``greedy_rows`` and ``sampled_rows`` (int64, absent when they would be 0 .. S - 1);
    ``temperature`` and ``uniform`` of the sampled rows (fp32); ``top_k`` (int64), ``top_p`` and ``min_p`` (fp32) of the
    filtered ones; and the ``penalty_`` arrays of :func:`apply_penalties`.
    """

    num_greedy: int
    num_plain: int
    num_filtered: int
    max_top_k: int = 0
    has_top_p: bool = False
    num_penalised: int = 0
    arrays: Arrays = field(default_factory=dict)

    @property
    def size(self) -> int:
        return self.num_greedy + self.num_plain + self.num_filtered


def plan_sampling(sampling: Sampling, batch_rows: Int32) -> SamplingPlan:
    """Sorts the S rows of ``sampling`` by what they need; ``batch_rows`` are the table rows of the batch."""
    greedy = (sampling.temperature < GREEDY_BELOW) | (sampling.top_k == 1)
    filtered = ~greedy & ((sampling.top_k > 0) | (sampling.top_p < 1) | (sampling.min_p > 0))
    plain_rows = np.flatnonzero(~(greedy | filtered))
    filtered_rows = np.flatnonzero(filtered)
    greedy_rows = np.flatnonzero(greedy)
    plan = SamplingPlan(len(greedy_rows), len(plain_rows), len(filtered_rows))
    arrays = plan.arrays
    if plan.num_greedy < plan.size:
        rows = np.concatenate((plain_rows, filtered_rows))
        if plan.num_greedy:
            arrays["greedy_rows"] = greedy_rows
        if plan.num_greedy or (plan.num_plain and plan.num_filtered):
            arrays["sampled_rows"] = rows
        arrays["temperature"] = sampling.temperature[rows]
        arrays["uniform"] = sampling.uniform[rows]
    if plan.num_filtered:
        top_k = sampling.top_k[filtered_rows].astype(np.int64)
        plan.max_top_k = max(0, int(top_k.max()))
        arrays["top_k"] = top_k
        arrays["top_p"] = sampling.top_p[filtered_rows]
        arrays["min_p"] = sampling.min_p[filtered_rows]
        plan.has_top_p = bool((arrays["top_p"] < 1).any())
    if sampling.penalties is not None:
        plan.num_penalised = len(sampling.penalties.index)
        arrays.update(_penalty_arrays(sampling.penalties, batch_rows[sampling.index]))
    return plan


def _penalty_arrays(penalties: Penalties, table_rows: Int32) -> Arrays:
    lengths = np.diff(penalties.offsets)
    segment = np.repeat(np.arange(len(lengths)), lengths)
    position = np.arange(len(segment)) - penalties.offsets[segment]
    return {
        "penalty_row": penalties.index.astype(np.int64),
        "penalty_table_row": table_rows[penalties.index].astype(np.int64),
        "penalty_segment": segment,
        "penalty_history": penalties.history.astype(np.int64),
        "penalty_output": (position >= penalties.prompt_lens[segment]).astype(np.int32),
        "penalty_presence": penalties.presence,
        "penalty_frequency": penalties.frequency,
        "penalty_repetition": penalties.repetition,
    }


class Sampler:
    """Samples one token per row of logits, ``max_rows`` at most.

    Its workspaces have fixed addresses and are used by one step after the other, so it serves one stream of steps.
    """

    def __init__(self, vocab_size: int, max_rows: int, device: torch.device) -> None:
        self._vocab = vocab_size
        self._device = device
        width = -(-vocab_size // BLOCK) * BLOCK
        self._scaled = torch.empty((max_rows, width), device=device)
        self._prob = torch.empty((max_rows, width), device=device)
        # What fills up the last block is impossible, now and ever after.
        self._scaled[:, vocab_size:] = -torch.inf
        self._counts = torch.zeros(0, dtype=torch.int32, device=device)

    def __call__(self, logits: Tensor, plan: SamplingPlan, tensors: Mapping[str, Tensor], last_token: Tensor) -> Tensor:
        """Returns the token ids (S, int32), -1 for a row that failed because its logits are not finite.

        ``logits`` (S, vocab) is overwritten where rows are penalised. ``tensors`` are the plan's arrays on the device.
        ``last_token`` (by table row) stands in for PENDING in the history of penalised rows.
        """
        if logits.dtype != torch.float32:
            logits = logits.float()
        if plan.num_penalised:
            logits = logits.contiguous()
            self._penalise(logits, plan, tensors, last_token)
        if plan.num_greedy == plan.size:
            return _greedy(logits)
        rows = tensors.get("sampled_rows")
        if rows is None:
            return self._sample(logits, plan, tensors)
        ids = torch.empty(plan.size, dtype=torch.int32, device=self._device)
        ids[rows] = self._sample(logits[rows], plan, tensors)
        if plan.num_greedy:
            greedy_rows = tensors["greedy_rows"]
            ids[greedy_rows] = _greedy(logits[greedy_rows])
        return ids

    def _sample(self, logits: Tensor, plan: SamplingPlan, tensors: Mapping[str, Tensor]) -> Tensor:
        n = len(logits)
        scaled, prob = self._scaled[:n], self._prob[:n]
        torch.div(logits, tensors["temperature"][:, None], out=scaled[:, : self._vocab])
        torch.softmax(scaled, -1, out=prob)
        if plan.num_filtered:
            filtered, mask = prob[plan.num_plain :], scaled[plan.num_plain :, : self._vocab]
            cutoff = smallest_kept(filtered, plan.max_top_k, plan.has_top_p, tensors)
            filtered = filtered[:, : self._vocab]
            torch.ge(filtered, cutoff[:, None], out=mask)  # 1.0 or 0.0
            filtered *= mask
        return inverse_cdf(prob.view(n, -1, BLOCK), tensors["uniform"])

    def _penalise(self, logits: Tensor, plan: SamplingPlan, tensors: Mapping[str, Tensor], last_token: Tensor) -> None:
        if plan.num_penalised * self._vocab > len(self._counts):
            self._counts = torch.zeros(plan.num_penalised * self._vocab, dtype=torch.int32, device=self._device)
        apply_penalties(logits, tensors, last_token, self._counts)


def _greedy(logits: Tensor) -> Tensor:
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


def apply_penalties(logits: Tensor, tensors: Mapping[str, Tensor], last_token: Tensor, counts: Tensor) -> None:
    """Penalises in place, in the order of the field: repetition, then frequency and presence.

    ``logits`` (S, vocab) fp32, contiguous. The histories of the P penalised rows lie one after the other in
    ``penalty_history`` (H); ``penalty_segment`` (H) says whose a token is, ``penalty_output`` (H) is 1 where it was
    sampled. ``counts`` (at least P * vocab, int32) is zero before and after.

    Work is proportional to the histories, not to the vocabulary. A token that occurs twice is written twice, with the
    same value, so the order of the writes does not matter.
    """
    vocab = logits.shape[1]
    segment = tensors["penalty_segment"]
    pending = last_token[tensors["penalty_table_row"]][segment].to(torch.int64)
    history = tensors["penalty_history"]
    token = torch.where(history < 0, pending, history)

    slot = segment * vocab + token
    counts.scatter_add_(0, slot, tensors["penalty_output"])
    count = counts[slot]
    counts[slot] = 0

    flat = logits.view(-1)
    place = tensors["penalty_row"][segment] * vocab + token
    logit = flat[place]
    repetition = tensors["penalty_repetition"][segment]
    logit = torch.where(logit > 0, logit / repetition, logit * repetition)
    logit -= tensors["penalty_frequency"][segment] * count
    logit -= tensors["penalty_presence"][segment] * (count > 0)
    flat[place] = logit
