"""The gated MLP: ``down(silu(gate(x)) * up(x))``."""

from __future__ import annotations

import torch
from torch import nn

from ..distributed.sharding import Shard
from .context import BuildContext
from .linear import ColumnLinear, RowLinear


class GatedMLP(nn.Module):
    """(T, hidden_size) -> (T, hidden_size); ``intermediate_size`` is cut between the ranks."""

    def __init__(self, hidden_size: int, intermediate_size: int, bias: bool, context: BuildContext) -> None:
        super().__init__()
        self.ops = context.ops
        parts = {"gate_proj": intermediate_size, "up_proj": intermediate_size}
        self.gate_up_proj = ColumnLinear(hidden_size, parts, bias, context)
        shard = Shard.of(intermediate_size, context.comm.rank, context.comm.world_size)
        self.down_proj = RowLinear(shard, hidden_size, bias, context)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.ops.silu_and_mul(self.gate_up_proj(x)))
