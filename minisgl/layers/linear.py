"""Linear layers over one or several matrices of the checkpoint, cut between the ranks.

    column parallel     each rank has some of the outputs        no communication
    row parallel        each rank has some of the inputs         all-reduce of the outputs

A column layer feeds a row layer, so a pair of them costs one all-reduce. Both know the residual stream: a column layer
begins with its norm, a row layer ends with the addition to it. The stream travels as a pair (x, residual), where ``x``
has still to be added; None says that it has been. Whoever norms adds on the way, and also adds up an ``x`` that comes
in parts, (P, T, hidden_size) in float32.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from minisgl.distributed.sharding import HeadShards, Shard
from minisgl.kernel.weight import FusingWeight, Weight

from .context import BuildContext
from .loading import LoadedModule, Target
from .norm import RMSNorm


class Linear(LoadedModule, nn.Module):
    """``x @ W.T + b``: (T, in) -> (T, sum of the parts' outputs), all of this rank.

    W stacks the matrices named by ``parts``, which lie beside this module in the checkpoint: self_attn.qkv_proj with
    parts q_proj, k_proj, v_proj is filled from ``self_attn.q_proj.weight`` and so on. The part "" is the module itself.
    """

    product: Weight
    fusing: FusingWeight | None
    """The same, if it is one that fuses."""

    def __init__(self, inputs: Shard, parts: dict[str, Shard], bias: bool, context: BuildContext) -> None:
        super().__init__()
        self.inputs = inputs
        self.parts = parts
        self.pack = context.pack
        outputs = sum(part.size for part in parts.values())
        self.weight = context.storage(outputs, inputs.size)
        self.bias = context.storage(outputs) if bias else None

    def targets(self, prefix: str) -> Iterator[tuple[str, Target]]:
        parent = prefix.rpartition(".")[0]
        start = 0
        for part, shard in self.parts.items():
            name = f"{parent}.{part}" if part else prefix
            rows = slice(start, start + shard.size)
            yield f"{name}.weight", Target.of(self.weight, rows, shard, self.inputs)
            if self.bias is not None:
                yield f"{name}.bias", Target.of(self.bias, rows, shard)
            start += shard.size

    def finalize(self) -> None:
        self.product = self.pack(self.weight.take(), self.bias.take() if self.bias else None)
        self.fusing = self.product if isinstance(self.product, FusingWeight) else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.product.matmul(x)

    def of_normed(
        self, norm: RMSNorm, x: torch.Tensor | None, residual: torch.Tensor, *, gated: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The product with the norm of the stream, and the stream; ``gated``: silu(first half) * second half."""
        if x is None and self.fusing is not None and self.fusing.fuses(residual.shape[0]):
            return self.fusing.fused(residual, norm=norm.weight, eps=norm.eps, gated=gated), residual
        x, residual = norm(x, residual)
        if not gated:
            return self.product.matmul(x), residual
        if self.fusing is not None:
            return self.fusing.gated(x), residual
        return norm.ops.silu_and_mul(self.product.matmul(x)), residual


class ReplicatedLinear(Linear):
    """The whole matrix on every rank."""

    def __init__(self, inputs: int, outputs: int, bias: bool, context: BuildContext) -> None:
        super().__init__(Shard.whole(inputs), {"": Shard.whole(outputs)}, bias, context)


class ColumnLinear(Linear):
    """Merged matrices, by name with their outputs: {"gate_proj": 1536, "up_proj": 1536}; each is cut between ranks."""

    def __init__(self, inputs: int, parts: dict[str, int], bias: bool, context: BuildContext) -> None:
        comm = context.comm
        shards = {name: Shard.of(outputs, comm.rank, comm.world_size) for name, outputs in parts.items()}
        super().__init__(Shard.whole(inputs), shards, bias, context)


class QKVLinear(Linear):
    """q_proj, k_proj and v_proj, merged in this order. Heads are cut between the ranks as HeadShards says."""

    def __init__(self, inputs: int, heads: HeadShards, head_dim: int, bias: bool, context: BuildContext) -> None:
        query, kv = heads.query.times(head_dim), heads.kv.times(head_dim)
        super().__init__(Shard.whole(inputs), {"q_proj": query, "k_proj": kv, "v_proj": kv}, bias, context)


class RowLinear(Linear):
    """One matrix whose inputs are cut between the ranks; the outputs are summed over them."""

    def __init__(self, inputs: Shard, outputs: int, bias: bool, context: BuildContext) -> None:
        super().__init__(inputs, {"": Shard.whole(outputs)}, bias, context)
        self.comm = context.comm

    def finalize(self) -> None:
        if self.comm.rank > 0:
            self.bias = None  # Added once to the sum, by rank 0.
        super().finalize()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.comm.all_reduce(self.product.matmul(x))

    def onto(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor]:
        """The stream with the product added to it, or beside it."""
        if self.fusing is not None and self.fusing.fuses(x.shape[0]):
            # Rank 0 adds it to its part of the sum.
            added = residual if self.comm.rank == 0 else None
            return None, self.comm.all_reduce(self.fusing.fused(x, residual=added))
        # An all-reduce of the parts would send each of them.
        if self.fusing is not None and self.comm.world_size == 1:
            return self.fusing.in_parts(x), residual
        return self(x), residual
