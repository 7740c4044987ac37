"""RMS norm, with the residual stream that runs beside it."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from minisgl.distributed.sharding import Shard

from .context import BuildContext
from .loading import LoadedModule, Target


class RMSNorm(LoadedModule, nn.Module):
    """(T, size) -> (T, size), with one weight for each element, whole on every rank."""

    def __init__(self, size: int, eps: float, context: BuildContext) -> None:
        super().__init__()
        self.eps = eps
        self.ops = context.ops
        self.storage = context.storage(size)
        self.weight = self.storage.tensor  # Attention backends hold on to those of q and k.

    def targets(self, prefix: str) -> Iterator[tuple[str, Target]]:
        whole = Shard.whole(self.weight.shape[0])
        yield f"{prefix}.weight", Target.of(self.storage, whole.slice, whole)

    def finalize(self) -> None:
        self.weight = self.storage.take()

    def forward(self, x: torch.Tensor | None, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Adds ``x``, if there is something to add, to the residual stream: returns (its norm, the stream)."""
        if x is None:
            return self.ops.rms_norm(residual, self.weight, self.eps), residual
        return self.ops.add_rms_norm(x, residual, self.weight, self.eps)
