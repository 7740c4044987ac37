"""Small sums over the GPUs of one host through memory that all of them can write to."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from minisgl.kernel.triton.all_reduce import PROGRAMS, all_reduce, memory_bytes
from minisgl.kernel.triton.launch import supports_pdl

from .peer_memory import PeerMemory

logger = logging.getLogger(__name__)

_LARGEST = 3 << 20  # bytes between two ranks, fewer between more, since each sends to all; beyond it NCCL is faster

T = TypeVar("T")


class OneShot:
    """The all-reduce of :mod:`minisgl.kernel.triton.all_reduce`, for one stream of this rank.

    ``memory`` holds the inboxes, for tensors of ``inbox`` bytes.
    """

    def __init__(self, rank: int, memory: PeerMemory, inbox: int, device: torch.device) -> None:
        self._rank = rank
        self._inbox = inbox
        self._memory = memory
        self._peers = torch.tensor(memory.addresses, dtype=torch.int64, device=device)
        self._turns = torch.zeros(PROGRAMS, dtype=torch.int32, device=device)
        # The host must reach it while a kernel waits and everything behind that kernel waits too.
        self._abort = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        self._pdl = supports_pdl(device)

    def serves(self, x: torch.Tensor) -> bool:
        return 0 < x.nbytes <= self._inbox and x.nbytes % 4 == 0

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return all_reduce(x, self._peers, self._turns, self._abort, self._rank, self._inbox, pdl=self._pdl)

    def abort(self) -> None:
        """Ends all waiting, from any thread; what it waited for is garbage."""
        self._abort.numpy()[0] = 1  # torch would not let another thread write to what inference mode has made

    def close(self) -> None:
        """No kernel may be running any more."""
        self._memory.close()


def make_one_shot(
    group: dist.ProcessGroup, device: torch.device, on_end: Callable[[Callable[[], None]], None]
) -> OneShot | None:
    """None, on all ranks, where one of them cannot share its memory; the log says so once.

    ``on_end`` has something called when the processes of all other ranks have ended. Each step is taken by all ranks or
    by none, and nobody writes before all have taken the last one.
    """
    rank, world_size = group.rank(), group.size()
    inbox = _LARGEST // (world_size - 1) // 16 * 16
    memory = PeerMemory(device, memory_bytes(world_size, inbox))
    on_end(memory.free)
    one_shots: list[OneShot] = []
    try:
        offers = _on_all_ranks(memory.offer, group)
        if offers is not None:

            def take() -> None:
                memory.take(offers, rank)
                one_shots.append(OneShot(rank, memory, inbox, device))

            if _on_all_ranks(take, group) is not None:
                return one_shots[0]
    except BaseException:
        memory.close()
        raise
    memory.close()
    return None


def _on_all_ranks(step: Callable[[], T], group: dist.ProcessGroup) -> list[T] | None:
    """What ``step`` gives on each of them; None, on all, where it raises on one."""
    try:
        mine: tuple[T | None, str | None] = step(), None
    except Exception as error:
        mine = None, str(error)
    everyone: list[Any] = [None] * group.size()
    dist.all_gather_object(everyone, mine, group)
    failures = [f"rank {rank}: {reason}" for rank, (_, reason) in enumerate(everyone) if reason is not None]
    if not failures:
        return [value for value, _ in everyone]
    if group.rank() == 0:
        logger.warning("The GPUs share no memory, so small sums go through the library (%s).", "; ".join(failures))
    return None
