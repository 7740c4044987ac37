"""How the tensor-parallel ranks of one model talk: the few collectives that its layers need."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Protocol

import torch


class RankWatch(Protocol):
    """Whoever knows whether the processes of the other ranks are alive, and ends them in the end."""

    def check(self) -> None:
        """Raises RuntimeError, which names the rank and how it ended, when one is gone. For use in loops that wait: it
        may raise KeyboardInterrupt too.
        """
        ...

    def on_end(self, act: Callable[[], None]) -> None:
        """Has ``act`` called when all of them have ended."""
        ...

    def on_loss(self, act: Callable[[], None]) -> None:
        """Has ``act`` called, from a thread of its own, as soon as one is gone."""
        ...


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
    def abort(self) -> None:
        """A rank is gone: ends what waits for it, from any thread. The collectives raise, or return garbage."""

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

    def abort(self) -> None:
        pass

    def close(self) -> None:
        pass
