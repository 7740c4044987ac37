"""The token embedding and the language model head, with the vocabulary cut between the ranks."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from minisgl.distributed.sharding import Shard
from minisgl.kernel.weight import PlainWeight, Weight

from .context import BuildContext
from .loading import LoadedModule, Target


class VocabParallel(LoadedModule, nn.Module):
    """A matrix (vocab_size, hidden_size); each rank has equally many rows of it, the last ones padded with zeros."""

    product: Weight

    def __init__(self, vocab_size: int, hidden_size: int, context: BuildContext) -> None:
        super().__init__()
        self.comm = context.comm
        self.pack = context.pack
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        rows = -(-vocab_size // self.comm.world_size)
        start = min(self.comm.rank * rows, vocab_size)
        self.shard = Shard(vocab_size, start, min(rows, vocab_size - start))
        self.weight = context.storage(rows, hidden_size)

    def targets(self, prefix: str) -> Iterator[tuple[str, Target]]:
        rows = slice(0, self.shard.size)
        yield f"{prefix}.weight", Target.of(self.weight, rows, self.shard, Shard.whole(self.hidden_size))

    def finalize(self) -> None:
        weight = self.weight.take()
        weight[self.shard.size :].zero_()
        self.product = self.pack(weight, None)


class Embedding(VocabParallel):
    """Token ids (T) -> (T, hidden_size)."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        if self.comm.world_size == 1:
            return self.product.lookup(ids)
        local = ids - self.shard.start
        elsewhere = (local < 0) | (local >= self.shard.size)
        rows = self.product.lookup(local.masked_fill(elsewhere, 0))
        return self.comm.all_reduce(rows.masked_fill_(elsewhere.unsqueeze(1), 0))


class Head(VocabParallel):
    """Hidden states (S, hidden_size) -> logits (S, vocab_size), on every rank."""

    def forward(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        return gather_logits(self, hidden, out)


class TiedHead(nn.Module):
    """A head that multiplies with the embedding's own matrix."""

    def __init__(self, embedding: Embedding) -> None:
        super().__init__()
        self._tied = [embedding]  # In a list, so that the embedding stays a child of its real parent alone.

    def forward(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        return gather_logits(self._tied[0], hidden, out)


def gather_logits(matrix: VocabParallel, hidden: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    """The product of ``hidden`` (S, hidden_size) with all rows of the vocabulary, those of other ranks included."""
    product = matrix.product
    if out is not None and matrix.comm.world_size == 1 and isinstance(product, PlainWeight):
        # A copy would take as long as half of the product when there are many rows.
        return torch.mm(hidden, product.matrix.t(), out=out)
    logits = matrix.comm.all_gather(product.matmul(hidden))[:, : matrix.vocab_size]
    return logits.contiguous() if out is None else out.copy_(logits)
