"""Small sums over the GPUs of one host through memory that all of them can write to."""

from __future__ import annotations

import logging

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _SymmetricMemory

from minisgl.kernel.triton.all_reduce import PROGRAMS, all_reduce, memory_bytes
from minisgl.kernel.triton.launch import supports_pdl

logger = logging.getLogger(__name__)

_LARGEST = 3 << 20  # bytes for two ranks, and fewer for more, to whom all is sent; beyond it NCCL is faster


class OneShot:
    """The all-reduce of :mod:`minisgl.kernel.triton.all_reduce`, for one stream of each rank.

    torch knows groups with shared memory by ``name`` for the life of a process: it must never have been used before.
    """

    def __init__(self, rank: int, world_size: int, device: torch.device, store: dist.Store, name: str) -> None:
        self._rank = rank
        self._inbox = _LARGEST // (world_size - 1) // 16 * 16
        size = memory_bytes(world_size, self._inbox)
        _SymmetricMemory.set_group_info(name, rank, world_size, dist.PrefixStore("one-shot", store))
        self._memory = _SymmetricMemory.empty_strided_p2p((size,), (1,), torch.uint8, device)
        self._memory.zero_()
        torch.cuda.synchronize(device)
        # It holds the memories of the others.
        self._handle = _SymmetricMemory.rendezvous(self._memory, name)
        self._handle.barrier()  # all memories are zero before anybody writes
        torch.cuda.synchronize(device)
        self._peers = torch.tensor(self._handle.buffer_ptrs, dtype=torch.int64, device=device)
        self._turns = torch.zeros(PROGRAMS, dtype=torch.int32, device=device)
        # The host must reach it while a kernel waits and everything behind that kernel waits too.
        self._abort = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        self._pdl = supports_pdl(device)

    def serves(self, x: torch.Tensor) -> bool:
        return x.nbytes <= self._inbox and x.nbytes % 4 == 0

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return all_reduce(x, self._peers, self._turns, self._abort, self._rank, self._inbox, pdl=self._pdl)

    def abort(self) -> None:
        """Ends all waiting, from any thread; what it waited for is garbage."""
        self._abort.numpy()[0] = 1  # torch would not let another thread write to what inference mode has made


def make_one_shot(rank: int, world_size: int, device: torch.device, store: dist.Store, name: str) -> OneShot | None:
    """None, on all ranks, where one of them cannot reach another's memory; the log says so once."""
    one_shot, reason = None, ""
    try:
        one_shot = OneShot(rank, world_size, device, store, name)
    except Exception as error:
        reason = f" (rank {rank}: {error})"
    there = torch.tensor([one_shot is not None], dtype=torch.int32, device=device)
    dist.all_reduce(there, op=dist.ReduceOp.MIN)
    if there.item():
        return one_shot
    if rank == 0 or reason:
        logger.warning("The GPUs cannot write to each other's memory, so small sums go through NCCL%s.", reason)
    return None
