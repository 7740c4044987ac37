"""Presence, frequency and repetition penalties, from the whole history of a request: nothing is kept between steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from minisgl.core import Penalties


def penalty_arrays(penalties: Penalties, table_rows: npt.NDArray[np.int32]) -> dict[str, npt.NDArray[Any]]:
    """The arrays of :func:`apply_penalties`. ``table_rows`` (S) are the page table's rows of the sampled requests."""
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
