"""From logits to token ids: penalties, temperature, top-k, top-p, min-p, and one uniform number per token.

What is the same on all devices is here; how a token is picked is the business of :class:`CpuSampler` on a CPU, of
:class:`TorchSampler` where the CPU kernels cannot be had, and of :class:`TritonSampler` on a GPU.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from minisgl.core import Sampling

from .penalties import apply_penalties, penalty_arrays

Arrays = dict[str, npt.NDArray[Any]]

GREEDY_BELOW = 1e-5
"""Temperatures under this are greedy: dividing by them would overflow."""


def sampling_arrays(sampling: Sampling, table_rows: npt.NDArray[np.int32]) -> Arrays:
    """What a sampler needs on the device: the parameters of the S sampled requests, and what penalties take.

    ``table_rows`` (S) are the rows of these requests in the page table.
    """
    arrays: Arrays = {
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "uniform": sampling.uniform,
    }
    if sampling.penalties is not None:
        arrays |= penalty_arrays(sampling.penalties, table_rows)
    return arrays


class Sampler(ABC):
    """Samples one token per row of logits. One instance serves one stream of steps."""

    def __init__(self, vocab_size: int, max_rows: int, device: torch.device) -> None:
        """``max_rows`` bounds the rows of a step."""
        self._vocab = vocab_size
        self._counts = torch.zeros(0, dtype=torch.int32, device=device)

    def __call__(self, logits: Tensor, tensors: Mapping[str, Tensor], last_token: Tensor) -> Tensor:
        """Returns the token ids (S, int32), -1 for a row that failed because its logits are not finite.

        ``logits`` (S, vocab) may be overwritten. ``tensors`` are the :func:`sampling_arrays` on the device.
        ``last_token`` (by table row) stands in for PENDING in the history of penalised rows.
        """
        rows = tensors.get("penalty_row")
        if rows is not None:
            logits = logits.float().contiguous()
            if len(rows) * self._vocab > len(self._counts):
                self._counts = torch.zeros(len(rows) * self._vocab, dtype=torch.int32, device=logits.device)
            apply_penalties(logits, tensors, last_token, self._counts)
        return self.pick(logits, tensors)

    @abstractmethod
    def pick(self, logits: Tensor, tensors: Mapping[str, Tensor]) -> Tensor:
        """The same, without penalties."""
