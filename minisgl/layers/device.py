"""Which implementation of the small operations and of the matrix product serves a device."""

from __future__ import annotations

import torch

from minisgl.kernel.cpu import CpuKernels
from minisgl.kernel.cpu import load as load_cpu_kernels

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

    def __init__(self, device: torch.device) -> None:
        # Triton takes its time to import, and is not there on every machine.
        from minisgl.kernel.triton import activation, launch, norm

        self._norm = norm
        self._activation = activation
        self._pdl = launch.supports_pdl(device)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return self._norm.rms_norm(x, weight, eps, pdl=self._pdl)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self._norm.add_rms_norm(x, residual, weight, eps, pdl=self._pdl)

    def silu_and_mul(self, x: torch.Tensor) -> torch.Tensor:
        return self._activation.silu_and_mul(x, pdl=self._pdl)


class TritonWeight(PlainWeight):
    """On an NVIDIA GPU. A single row goes through one kernel with what stands before and after the product.

    That is a fifth faster than separate kernels for a small model; from two rows on the library's product is faster.
    """

    def __init__(self, matrix: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        super().__init__(matrix, bias)
        from minisgl.kernel.triton import launch, linear

        self._linear = linear.fused_linear
        self._pdl = launch.supports_pdl(matrix.device)

    def fuses(self, rows: int) -> bool:
        return rows == 1

    def fused(
        self,
        x: torch.Tensor,
        *,
        norm: torch.Tensor | None = None,
        eps: float = 0.0,
        residual: torch.Tensor | None = None,
        gated: bool = False,
    ) -> torch.Tensor:
        return self._linear(
            x,
            self.matrix,
            bias=self.bias,
            norm=norm,
            eps=eps,
            residual=residual,
            epilogue="silu_and_mul" if gated else "none",
            pdl=self._pdl,
        )


def make_ops(device: torch.device, dtype: torch.dtype) -> Ops:
    if device.type == "cuda":
        return TritonOps(device)
    kernels = _cpu_kernels(device, dtype)
    return Ops() if kernels is None else CpuOps(kernels)


def make_pack(device: torch.device, dtype: torch.dtype) -> Pack:
    if device.type == "cuda":
        return TritonWeight
    kernels = _cpu_kernels(device, dtype)
    return PlainWeight if kernels is None else kernels.pack


def default_moe(device: torch.device) -> str:
    """The backend of the experts."""
    return "triton" if device.type == "cuda" else "torch"


def _cpu_kernels(device: torch.device, dtype: torch.dtype) -> CpuKernels | None:
    return load_cpu_kernels() if device.type == "cpu" and dtype == torch.float32 else None
