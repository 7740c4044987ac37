"""Where the tensors of a checkpoint go. Each layer lists its own; the loader only walks over names."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ..distributed.sharding import Shard

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, slots=True, eq=False)
class Target:
    """``dest`` takes ``source[index]`` of a checkpoint tensor of ``shape``: this rank's shard of it."""

    dest: torch.Tensor
    shape: tuple[int, ...]
    index: tuple[slice, ...]

    @classmethod
    def of(cls, dest: torch.Tensor, *shards: Shard) -> Target:
        """One shard for each dimension."""
        return cls(dest, tuple(s.total for s in shards), tuple(s.slice for s in shards))


class LoadedModule:
    """Mixin of a module that has weights of its own."""

    def targets(self, prefix: str) -> Iterator[tuple[str, Target]]:
        """(checkpoint name, target) of each tensor, for the module whose own name is ``prefix``."""
        raise NotImplementedError

    def finalize(self) -> None:
        """Called once when all targets of the module are filled, before its first forward pass."""


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """All targets of a model by name, and the module that each belongs to."""

    targets: dict[str, Target]
    owners: dict[str, LoadedModule]

    @classmethod
    def of(cls, model: nn.Module) -> LoadPlan:
        plan = cls({}, {})
        for prefix, module in model.named_modules():
            if isinstance(module, LoadedModule):
                for name, target in module.targets(prefix):
                    plan.targets[name] = target
                    plan.owners[name] = module
        return plan
