"""Experts as grouped Triton products: no word from the host, so they fit a CUDA graph."""

from __future__ import annotations

import torch

from ..kernel.triton.grouped_gemm import combine, grouped_gemm
from ..kernel.triton.launch import supports_pdl
from ..kernel.triton.moe_routing import assign, route
from ..layers.ops import Ops
from ..layers.weight import Pack
from .base import Experts


class TritonExperts(Experts):
    """Four kernels in all: routing, gate and up, down, and the weighted sum."""

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
        weights, members = route(logits, top_k, normalise, self.counts, x.dtype, pdl=self.pdl)
        return self._products(x, weights, members)

    def _products(self, x: torch.Tensor, weights: torch.Tensor, members: torch.Tensor) -> torch.Tensor:
        pairs = weights.numel()
        hidden = grouped_gemm(x, self.gate_up, members, self.counts, pairs, gated=True, pdl=self.pdl)
        each = grouped_gemm(hidden, self.down, members, self.counts, pairs, gated=False, pdl=self.pdl)
        return combine(each, weights, self.counts, pdl=self.pdl)
