"""Experts as grouped Triton products: no word from the host, so they fit a CUDA graph."""

from __future__ import annotations

from typing import ClassVar

import torch

from ..kernel.ops import Ops
from ..kernel.triton.grouped_gemm import combine, fixed_grouped_config, grouped_gemm
from ..kernel.triton.launch import supports_pdl
from ..kernel.triton.moe_routing import assign, choose, route
from ..kernel.triton.one_row import one_row_linear
from ..kernel.triton.weighted_experts import weighted_experts
from ..kernel.weight import Pack
from .base import FusingExperts


class TritonExperts(FusingExperts):
    """Four kernels in all: routing, gate and up, down, and the weighted sum. For a single token three, with the norm
    before and the residual stream behind: choice, gate and up, weighted down.
    """

    fixed: ClassVar[bool] = False
    """Whether they are launched with the same parameters for any number of tokens."""

    def __init__(self, gate_up: torch.Tensor, down: torch.Tensor, ops: Ops, pack: Pack) -> None:
        self.gate_up = gate_up.detach()
        self.down = down.detach()
        self.pdl = supports_pdl(gate_up.device)
        # Zero between calls: the last kernel of a call puts it back.
        self.counts = torch.zeros(gate_up.shape[0], dtype=torch.int32, device=gate_up.device)

    def forward(self, x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        return self._products(x, weights, assign(experts, self.counts, pdl=self.pdl))

    def forward_routed(self, x: torch.Tensor, logits: torch.Tensor, top_k: int, normalise: bool) -> torch.Tensor:
        """:meth:`forward` from the router's ``logits`` (T, E), with softmax and top-k in the first kernel."""
        weights, members = route(logits, top_k, normalise, self.counts, x.dtype, fixed=self.fixed, pdl=self.pdl)
        return self._products(x, weights, members)

    def fuses(self, rows: int) -> bool:
        return rows == 1 and not self.fixed

    def fused(
        self,
        x: torch.Tensor,
        logits: torch.Tensor,
        top_k: int,
        normalise: bool,
        *,
        norm: torch.Tensor,
        eps: float,
        residual: torch.Tensor | None,
    ) -> torch.Tensor:
        weights, experts = choose(logits, top_k, normalise, x.dtype, pdl=self.pdl)
        hidden = one_row_linear(x, self.gate_up, norm=norm, eps=eps, gated=True, experts=experts, pdl=self.pdl)
        return weighted_experts(hidden, self.down, weights, experts, residual=residual, pdl=self.pdl)

    def _products(self, x: torch.Tensor, weights: torch.Tensor, members: torch.Tensor) -> torch.Tensor:
        hidden = self._product(x, self.gate_up, members, weights.numel(), gated=True)
        each = self._product(hidden, self.down, members, weights.numel(), gated=False)
        return combine(each, weights, self.counts, pdl=self.pdl)

    def _product(
        self, x: torch.Tensor, weight: torch.Tensor, members: torch.Tensor, pairs: int, *, gated: bool
    ) -> torch.Tensor:
        config = fixed_grouped_config(gated, x.dtype.itemsize) if self.fixed else None
        return grouped_gemm(x, weight, members, self.counts, pairs, gated=gated, config=config, pdl=self.pdl)


class DeterministicTritonExperts(TritonExperts):
    """A token's result is, bit for bit, the same in whatever company: each row is added up in one order, wherever it
    lies in its expert's group, and the choices of a token are added up in theirs.
    """

    fixed = True
