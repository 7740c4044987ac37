"""Experts in plain torch: one after the other, each over the tokens that chose it."""

from __future__ import annotations

import torch

from ..kernel.ops import Ops
from ..kernel.weight import Pack
from .base import Experts


class TorchExperts(Experts):
    """The reference, and what a CPU runs. It reads on the host which experts were chosen, so it fits no CUDA graph."""

    def __init__(self, gate_up: torch.Tensor, down: torch.Tensor, ops: Ops, pack: Pack) -> None:
        self.ops = ops
        self.gate_up = [pack(matrix, None) for matrix in gate_up]
        self.down = [pack(matrix, None) for matrix in down]

    def forward(self, x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(x)
        # Ascending experts: each token sums its own in the same order whatever the others chose.
        for expert in experts.unique().tolist():
            token, place = torch.where(experts == expert)
            inner = self.ops.silu_and_mul(self.gate_up[expert].matmul(x[token]))
            result = self.down[expert].matmul(inner)
            out.index_add_(0, token, result * weights[token, place, None])
        return out
