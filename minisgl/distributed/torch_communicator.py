"""The collectives over torch.distributed: gloo between CPU processes, NCCL between GPUs."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from .communicator import Communicator, RankWatch, SingleCommunicator

if TYPE_CHECKING:
    from .one_shot import OneShot

_POLL = 0.02  # seconds


def make_communicator(
    rank: int,
    world_size: int,
    device: torch.device,
    rendezvous: Path | None = None,
    *,
    watch: RankWatch | None = None,
    timeout: float = 600,
) -> Communicator:
    """The communicator of one rank. Blocks until all ranks are there, ``timeout`` seconds at most.

    The ranks find each other through the file ``rendezvous``, which must not exist before and lies on their common host
    (in the run directory of the server instance), so that no port has to be found free. A collective that waits longer
    than ``timeout`` for a rank raises RuntimeError. With ``watch`` nobody waits for a rank that is gone; without it
    whoever started the processes has to end them.
    """
    if world_size == 1:
        return SingleCommunicator()
    if rendezvous is None:
        raise ValueError("Several ranks need a rendezvous file.")
    return TorchCommunicator(rank, world_size, device, rendezvous, watch, timeout)


def _meet(rank: int, world_size: int, rendezvous: Path, watch: RankWatch | None, timeout: float) -> dist.FileStore:
    """Waits until every rank has left its name in the store, so that what comes next blocks for moments only."""
    store = dist.FileStore(str(rendezvous), world_size)
    store.set_timeout(timedelta(seconds=timeout))
    store.set(f"rank {rank}", "is here")
    deadline = time.monotonic() + timeout
    while missing := [other for other in range(world_size) if not store.check([f"rank {other}"])]:
        if watch is not None:
            watch.check()
        if time.monotonic() > deadline:
            raise RuntimeError(f"Rank {', '.join(map(str, missing))} did not come within {timeout:g} s.")
        time.sleep(_POLL)
    return store


def _ignore(act: Callable[[], None]) -> None:
    pass


# torch 2.13 renames it, and warns on every call of the old name.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class TorchCommunicator(Communicator):
    """A process belongs to one group at a time, since torch.distributed keeps its default group per process."""

    def __init__(
        self,
        rank: int,
        world_size: int,
        device: torch.device,
        rendezvous: Path,
        watch: RankWatch | None,
        timeout: float,
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.device = device
        self._one_shot: OneShot | None = None
        self._aborted = False
        if device.type == "cuda":
            # NVLink multicast (NVLS) is not available to every container that sees the GPUs.
            os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
        else:
            # All ranks are on this host: stay on the loopback, whatever the host's name resolves to.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
        if dist.is_initialized():
            raise RuntimeError(
                "This process belongs to a group of ranks already; only one LLM with tp above 1 can be open at a time."
            )
        store = _meet(rank, world_size, rendezvous, watch, timeout)
        try:
            dist.init_process_group(
                "nccl" if device.type == "cuda" else "gloo",
                store=store,
                rank=rank,
                world_size=world_size,
                timeout=timedelta(seconds=timeout),
                device_id=device if device.type == "cuda" else None,
            )
        except BaseException:
            # torch numbers the groups of a process, and ranks only meet under the same number. A group that failed
            # keeps its number, unlike one that was destroyed, and the next one here would wait for ever.
            dist.distributed_c10d._world.group_count = 0
            raise
        if watch is not None:
            watch.on_loss(self.abort)
        if device.type == "cuda":
            # Loads Triton.
            from .one_shot import make_one_shot

            assert dist.group.WORLD is not None
            # Without a watch this is a process of its own, whose end frees all.
            on_end = _ignore if watch is None else watch.on_end
            try:
                self._one_shot = make_one_shot(dist.group.WORLD, device, on_end)
                if self._aborted:
                    raise RuntimeError("Another rank has gone while the ranks met.")
            except BaseException:
                # Nobody else could, and a process with a group cannot make another one.
                self.close()
                raise

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        if self.device.type == "cpu" and self.world_size > 2:
            # A ring adds each element in an order that depends on its place in the buffer, and so on the neighbours of
            # a row. Two summands commute; more are added in rank order, to keep rows independent of their batch.
            return self._gather(x).sum(dim=0)
        if self._one_shot is not None and self._one_shot.serves(x):
            return self._one_shot.all_reduce(x)
        dist.all_reduce(x)
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat(self._gather(x).unbind(), dim=-1)

    def _gather(self, x: torch.Tensor) -> torch.Tensor:
        """(world_size, the shape of x)"""
        parts = torch.empty((self.world_size * x.shape[0], *x.shape[1:]), dtype=x.dtype, device=x.device)
        _all_gather(parts, x.contiguous())
        return parts.view(self.world_size, *x.shape)

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        dist.broadcast(x, src=0)
        return x

    def abort(self) -> None:
        self._aborted = True
        if self._one_shot is not None:
            self._one_shot.abort()
        # gloo notices by itself that a rank is gone.
        if self.device.type == "cuda" and dist.group.WORLD is not None:
            dist.group.WORLD._get_backend(self.device).abort()

    def close(self) -> None:
        # Leaving an NCCL group properly waits for all others to leave it too.
        self.abort()
        try:
            if self._one_shot is not None:
                torch.cuda.synchronize(self.device)  # until no kernel reads what goes now
                self._one_shot.close()
                self._one_shot = None
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
