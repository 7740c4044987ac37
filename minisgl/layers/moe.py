"""A mixture of experts in place of the MLP: a router picks a few experts for each token."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from minisgl.distributed.sharding import Shard
from minisgl.moe.base import Experts, FusingExperts, experts_class

from .context import BuildContext
from .linear import ReplicatedLinear
from .loading import LoadedModule, Target
from .norm import RMSNorm


class SparseMoE(nn.Module):
    """Works on the residual stream (T, hidden_size), after ``norm``.

    ``intermediate_size`` is that of an expert; every rank has its part of it, of all experts. With ``norm_topk_prob``
    the weights of a token's choices sum to 1.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        num_experts: int,
        top_k: int,
        context: BuildContext,
        *,
        norm_topk_prob: bool,
    ) -> None:
        super().__init__()
        self.comm = context.comm
        self.top_k = top_k
        self.norm_topk_prob = norm_topk_prob
        self.gate = ReplicatedLinear(hidden_size, num_experts, False, context)
        self.experts = ExpertWeights(hidden_size, intermediate_size, num_experts, context)

    def forward(
        self, norm: RMSNorm, x: torch.Tensor | None, residual: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        if x is None and (mixed := self._fused(norm, residual)) is not None:
            return None, self.comm.all_reduce(mixed)
        x, residual = norm(x, residual)
        mixed = self.experts.product.forward_routed(x, self.gate(x), self.top_k, self.norm_topk_prob)
        return self.comm.all_reduce(mixed), residual

    def _fused(self, norm: RMSNorm, residual: torch.Tensor) -> torch.Tensor | None:
        """This rank's part of the stream with the experts added to it, where that is faster in one go."""
        gate, experts, rows = self.gate.fusing, self.experts.product, residual.shape[0]
        if gate is None or not gate.fuses(rows) or not isinstance(experts, FusingExperts) or not experts.fuses(rows):
            return None
        logits = gate.fused(residual, norm=norm.weight, eps=norm.eps)
        return experts.fused(
            residual,
            logits,
            self.top_k,
            self.norm_topk_prob,
            norm=norm.weight,
            eps=norm.eps,
            residual=residual if self.comm.rank == 0 else None,
        )


class ExpertWeights(LoadedModule, nn.Module):
    """The experts' matrices, one by one in the checkpoint and stacked here, and the backend that multiplies them."""

    product: Experts

    def __init__(self, hidden_size: int, intermediate_size: int, num_experts: int, context: BuildContext) -> None:
        super().__init__()
        self.context = context
        self.hidden = Shard.whole(hidden_size)
        self.inner = Shard.of(intermediate_size, context.comm.rank, context.comm.world_size)
        self.num_experts = num_experts
        self.gate_up = context.storage(num_experts, 2 * self.inner.size, hidden_size)
        self.down = context.storage(num_experts, hidden_size, self.inner.size)

    def targets(self, prefix: str) -> Iterator[tuple[str, Target]]:
        inner, hidden = self.inner, self.hidden
        gate, up = slice(0, inner.size), slice(inner.size, 2 * inner.size)
        for expert in range(self.num_experts):
            name = f"{prefix}.{expert}"
            yield f"{name}.gate_proj.weight", Target.of(self.gate_up, (expert, gate), inner, hidden)
            yield f"{name}.up_proj.weight", Target.of(self.gate_up, (expert, up), inner, hidden)
            yield f"{name}.down_proj.weight", Target.of(self.down, (expert,), hidden, inner)

    def finalize(self) -> None:
        backend = experts_class(self.context.moe_backend)
        self.product = backend(self.gate_up.take(), self.down.take(), self.context.ops, self.context.pack)
