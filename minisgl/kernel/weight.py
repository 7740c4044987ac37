"""One matrix, and the product with it, in the format that its device multiplies fastest.

A linear layer loads its weight row-major and then turns it into one of these. Tied embeddings are one object that looks
up rows at the bottom of the model and multiplies at its top, so nothing is stored twice.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

import torch
import torch.nn.functional as F


class Weight(Protocol):
    """A matrix (rows, cols), with a bias (rows) or without."""

    def matmul(self, x: torch.Tensor) -> torch.Tensor:
        """``x @ matrix.T + bias`` for ``x`` (M, cols): (M, rows)."""
        ...

    def lookup(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows ``ids`` (M) of the matrix: (M, cols)."""
        ...


@runtime_checkable
class FusingWeight(Weight, Protocol):
    """One that can do what stands before and after the product in the same go, where that is faster."""

    def gated(self, x: torch.Tensor) -> torch.Tensor:
        """``silu(gate) * up`` of the halves of ``matmul(x)``."""
        ...

    def in_parts(self, x: torch.Tensor) -> torch.Tensor:
        """``matmul(x)``, or contiguous parts of it (P, M, rows) in float32 that the next norm has to add up."""
        ...

    def fuses(self, rows: int) -> bool:
        """Whether it is for so many rows."""
        ...

    def fused(
        self,
        x: torch.Tensor,
        *,
        norm: torch.Tensor | None = None,
        eps: float = 0.0,
        residual: torch.Tensor | None = None,
        gated: bool = False,
    ) -> torch.Tensor:
        """``rms_norm(x) @ matrix.T + bias``, then ``silu(gate) * up`` of its halves if ``gated``, then ``+ residual``.

        ``norm`` is the norm's weight; None means no norm.
        """
        ...


Pack = Callable[[torch.Tensor, torch.Tensor | None], Weight]
"""Makes a Weight of a row-major matrix and a bias; the caller drops the matrix afterwards."""


class PlainWeight:
    """Row-major, multiplied by torch."""

    def __init__(self, matrix: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.matrix = matrix
        self.bias = bias

    def matmul(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.matrix, self.bias)

    def lookup(self, ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(ids, self.matrix)
