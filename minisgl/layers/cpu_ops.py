"""The small operations on a CPU, one kernel call each."""

from __future__ import annotations

import torch

from ..kernel.cpu import CpuKernels
from .ops import Ops


class CpuOps(Ops):
    """float32 on the CPU. Rope alone stays plain: the CPU attention backend has a kernel for it and all around it."""

    def __init__(self, kernels: CpuKernels) -> None:
        self.kernels = kernels

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return self.kernels.rms_norm(x, weight, eps)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self.kernels.add_rms_norm(x, residual, weight, eps)

    def silu_and_mul(self, x: torch.Tensor) -> torch.Tensor:
        return self.kernels.silu_and_mul(x)
