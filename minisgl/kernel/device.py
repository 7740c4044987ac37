"""Which implementation of the small operations and of the matrix product serves a device."""

from __future__ import annotations

import torch
import torch.nn.functional as F

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
    """On an NVIDIA GPU. A single row goes through one kernel with what stands before and after the product; a few rows
    through one that streams the weight; many rows through the library's product.
    """

    def __init__(self, matrix: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        super().__init__(matrix, bias)
        from minisgl.kernel.triton import activation, few_rows, launch, one_row

        self._one_row = one_row.one_row_linear
        self._few_rows = few_rows.few_rows_linear
        self._few_rows_config = few_rows.few_rows_config
        self._silu_and_mul = activation.silu_and_mul
        self._pdl = launch.supports_pdl(matrix.device)

    def matmul(self, x: torch.Tensor) -> torch.Tensor:
        out = self._streamed(x)
        return super().matmul(x) if out is None else out

    def gated(self, x: torch.Tensor) -> torch.Tensor:
        out = self._streamed(x, gated=True)
        return self._silu_and_mul(super().matmul(x), pdl=self._pdl) if out is None else out

    def in_parts(self, x: torch.Tensor) -> torch.Tensor:
        out = self._streamed(x, in_parts=self.bias is None)
        return super().matmul(x) if out is None else out

    def _streamed(self, x: torch.Tensor, *, gated: bool = False, in_parts: bool = False) -> torch.Tensor | None:
        """The product for a few rows, None where the library's is faster."""
        if x.dtype.itemsize != 2:
            return None
        outputs, inputs = self.matrix.shape
        config = self._few_rows_config(
            x.shape[0], outputs // 2 if gated else outputs, inputs, gated=gated, in_parts=in_parts
        )
        if config is None:
            return None
        return self._few_rows(x, self.matrix, bias=self.bias, gated=gated, config=config, pdl=self._pdl)

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
        return self._one_row(
            x,
            self.matrix,
            bias=self.bias,
            norm=norm,
            eps=eps,
            residual=residual,
            gated=gated,
            pdl=self._pdl,
        )


class DeterministicTritonWeight:
    """On an NVIDIA GPU, where a row must not depend on its neighbours: any number of rows goes through the one kernel,
    launched with the same parameters.
    """

    def __init__(self, matrix: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        from minisgl.kernel.triton import few_rows, launch

        self.matrix = matrix
        self.bias = bias
        self._product = few_rows.few_rows_linear
        self._config = few_rows.fixed_few_rows_config(matrix.shape[0], matrix.element_size())
        self._pdl = launch.supports_pdl(matrix.device)

    def matmul(self, x: torch.Tensor) -> torch.Tensor:
        return self._product(x, self.matrix, bias=self.bias, config=self._config, pdl=self._pdl)

    def lookup(self, ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(ids, self.matrix)


def make_ops(device: torch.device, dtype: torch.dtype) -> Ops:
    if device.type == "cuda":
        return TritonOps(device)
    kernels = _cpu_kernels(device, dtype)
    return Ops() if kernels is None else CpuOps(kernels)


def make_pack(device: torch.device, dtype: torch.dtype, deterministic: bool = False) -> Pack:
    """What multiplies with a matrix. On a CPU with kernels all of them are ``deterministic``."""
    if device.type == "cuda":
        return DeterministicTritonWeight if deterministic else TritonWeight
    kernels = _cpu_kernels(device, dtype)
    return PlainWeight if kernels is None else kernels.pack


def _cpu_kernels(device: torch.device, dtype: torch.dtype) -> CpuKernels | None:
    return load_cpu_kernels() if device.type == "cpu" and dtype == torch.float32 else None
