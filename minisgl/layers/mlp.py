"""The gated MLP: ``down(silu(gate(x)) * up(x))``."""

from __future__ import annotations

import torch
from torch import nn

from minisgl.distributed.sharding import Shard

from .context import BuildContext
from .linear import ColumnLinear, RowLinear
from .norm import RMSNorm


class GatedMLP(nn.Module):
    """Works on the residual stream (T, hidden_size), after ``norm``; ``intermediate_size`` is cut between the ranks."""

    def __init__(self, hidden_size: int, intermediate_size: int, bias: bool, context: BuildContext) -> None:
        super().__init__()
        parts = {"gate_proj": intermediate_size, "up_proj": intermediate_size}
        self.gate_up_proj = ColumnLinear(hidden_size, parts, bias, context)
        shard = Shard.of(intermediate_size, context.comm.rank, context.comm.world_size)
        self.down_proj = RowLinear(shard, hidden_size, bias, context)

    def forward(
        self, norm: RMSNorm, x: torch.Tensor | None, residual: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        inner, residual = self.gate_up_proj.of_normed(norm, x, residual, gated=True)
        return self.down_proj.onto(inner, residual)
