"""Which implementation of the small operations and of the matrix product serves a device."""

from __future__ import annotations

import torch

from ..kernel.cpu import CpuKernels
from ..kernel.cpu import load as load_cpu_kernels
from .ops import Ops
from .weight import Pack, PlainWeight


class CpuOps(Ops):
    """The compiled kernels, float32. Rope is torch's here: the CPU attention backend has it in a kernel of its own."""

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


class TritonOps(Ops):
    """The Triton kernels of an NVIDIA GPU. Rope is torch's here too, and for the same reason."""

    def __init__(self) -> None:
        # Triton takes its time to import, and is not there on every machine.
        from ..kernel.triton import activation, norm

        self._norm = norm
        self._activation = activation

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return self._norm.rms_norm(x, weight, eps)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self._norm.add_rms_norm(x, residual, weight, eps)

    def silu_and_mul(self, x: torch.Tensor) -> torch.Tensor:
        return self._activation.silu_and_mul(x)


def make_ops(device: torch.device, dtype: torch.dtype) -> Ops:
    if device.type == "cuda":
        return TritonOps()
    kernels = _cpu_kernels(device, dtype)
    return Ops() if kernels is None else CpuOps(kernels)


def make_pack(device: torch.device, dtype: torch.dtype) -> Pack:
    kernels = _cpu_kernels(device, dtype)
    return PlainWeight if kernels is None else kernels.pack


def default_moe(device: torch.device) -> str:
    """The backend of the experts."""
    return "triton" if device.type == "cuda" else "torch"


def _cpu_kernels(device: torch.device, dtype: torch.dtype) -> CpuKernels | None:
    return load_cpu_kernels() if device.type == "cpu" and dtype == torch.float32 else None
