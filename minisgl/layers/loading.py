"""Where the tensors of a checkpoint go. Each layer lists its own; the loader only walks over names."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from minisgl.distributed.sharding import Shard

if TYPE_CHECKING:
    from torch import nn


class Storage:
    """A weight on its way from the checkpoint to the format it is used in.

    It takes memory when its first part is loaded and gives it away when the last one is, so that a model which repacks
    its weights never holds much of them twice.
    """

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        self.shape = shape
        self.dtype = dtype
        self.device = device
        self._tensor: torch.Tensor | None = None

    @property
    def tensor(self) -> torch.Tensor:
        if self._tensor is None:
            self._tensor = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        return self._tensor

    def take(self) -> torch.Tensor:
        """The tensor, which is the caller's alone from now on."""
        tensor, self._tensor = self.tensor, None
        return tensor


@dataclass(frozen=True, slots=True, eq=False)
class Target:
    """``storage.tensor[region]`` takes ``source[index]`` of a checkpoint tensor of ``shape``: this rank's part."""

    storage: Storage
    region: tuple[slice | int, ...]
    shape: tuple[int, ...]
    index: tuple[slice, ...]

    @classmethod
    def of(cls, storage: Storage, region: slice | tuple[slice | int, ...], *shards: Shard) -> Target:
        """One shard for each dimension of the checkpoint's tensor. ``region`` may leave out trailing dimensions."""
        where = region if isinstance(region, tuple) else (region,)
        return cls(storage, where, tuple(s.total for s in shards), tuple(s.slice for s in shards))

    @property
    def dest(self) -> torch.Tensor:
        return self.storage.tensor[self.region]


class LoadedModule:
    """Mixin of a module that has weights of its own."""

    def targets(self, prefix: str) -> Iterator[tuple[str, Target]]:
        """(checkpoint name, target) of each tensor, for the module whose own name is ``prefix``."""
        raise NotImplementedError

    def finalize(self) -> None:
        """Called once when all targets of the module are filled, before its first forward pass."""
        raise NotImplementedError


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
