"""How the tensor-parallel ranks of one model talk: the few collectives that its layers need."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch


class Communicator(ABC):
    """Every rank calls the same collectives in the same order, with tensors of the same shape and dtype."""

    rank: int
    world_size: int

    @abstractmethod
    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over ranks, identical on all. ``x`` is contiguous, and may be overwritten and returned."""

    @abstractmethod
    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """The ranks' tensors side by side along the last dimension, in rank order."""

    @abstractmethod
    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """Overwrites ``x`` (contiguous) with that of rank 0 and returns it."""

    @abstractmethod
    def close(self) -> None:
        """Leaves the group. The ranks need not do it at the same time."""


class SingleCommunicator(Communicator):
    """One rank: every collective is the identity."""

    rank = 0
    world_size = 1

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def close(self) -> None:
        pass
