"""Sampling on a CPU with the compiled kernels: one call for all rows, whatever each of them asks for."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from minisgl.kernel.cpu import CpuKernels

from .sampler import Sampler


class CpuSampler(Sampler):
    """fp32 logits. The token of a request does not depend on what is sampled beside it."""

    def __init__(self, kernels: CpuKernels, vocab_size: int, max_rows: int, device: torch.device) -> None:
        super().__init__(vocab_size, max_rows, device)
        self._kernels = kernels

    def pick(self, logits: Tensor, tensors: Mapping[str, Tensor]) -> Tensor:
        return self._kernels.sample(
            logits,
            tensors["temperature"],
            tensors["top_k"],
            tensors["top_p"],
            tensors["min_p"],
            tensors["uniform"],
        )
