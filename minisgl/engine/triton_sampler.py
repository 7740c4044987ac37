"""Sampling on a GPU: two launches for all rows, whatever each of them asks for, so a CUDA graph can hold them."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from minisgl.kernel.triton.sampling import sample

from .sampler import Sampler


class TritonSampler(Sampler):
    """Logits of any floating-point type."""

    def pick(self, logits: Tensor, tensors: Mapping[str, Tensor]) -> Tensor:
        return sample(
            logits,
            tensors["temperature"],
            tensors["top_k"],
            tensors["top_p"],
            tensors["min_p"],
            tensors["uniform"],
        )


class DeterministicTritonSampler(TritonSampler):
    """Samples from float32 always. Penalties widen the logits of a whole step, and sums over wide logits run in another
    order: without this a neighbour with penalties might change the token of a request that has none.
    """

    def pick(self, logits: Tensor, tensors: Mapping[str, Tensor]) -> Tensor:
        return super().pick(logits.float(), tensors)
