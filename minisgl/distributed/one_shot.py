"""Small sums over the GPUs of one host through memory that all of them can write to."""

from __future__ import annotations

import logging

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory

from minisgl.kernel.triton.all_reduce import PROGRAMS, all_reduce, memory_bytes
from minisgl.kernel.triton.launch import supports_pdl

logger = logging.getLogger(__name__)

_LARGEST = 3 << 20  # bytes between two ranks, fewer between more, since each sends to all; beyond it NCCL is faster


class OneShot:
    """The all-reduce of :mod:`minisgl.kernel.triton.all_reduce`, for one stream of each rank of ``group``.

    ``memory`` is :func:`shareable_memory`; all ranks must make theirs.
    """

    def __init__(self, group: dist.ProcessGroup, memory: torch.Tensor) -> None:
        device = memory.device
        self._rank = group.rank()
        self._inbox = _inbox(group)
        self._memory = memory
        # It holds the memories of the others.
        self._handle = symmetric_memory.rendezvous(memory, group)
        self._peers = torch.tensor(self._handle.buffer_ptrs, dtype=torch.int64, device=device)
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


def _inbox(group: dist.ProcessGroup) -> int:
    """Bytes of the largest tensor."""
    return _LARGEST // (group.size() - 1) // 16 * 16


def shareable_memory(group: dist.ProcessGroup, device: torch.device) -> torch.Tensor:
    """What a rank brings along, all zero. Raises RuntimeError where it cannot be shared."""
    # torch numbers the meetings over memory within a process, and ranks with other numbers wait for each other for
    # ever. So only the first group of a process can share memory.
    if symmetric_memory.is_symm_mem_enabled_for_group(group.group_name):
        raise RuntimeError("this process has shared memory in an earlier group")
    memory = symmetric_memory.empty(memory_bytes(group.size(), _inbox(group)), dtype=torch.uint8, device=device)
    memory.zero_()
    torch.cuda.synchronize(device)
    return memory


def make_one_shot(group: dist.ProcessGroup, device: torch.device) -> OneShot | None:
    """None, on all ranks, where one of them cannot share its memory; the log says so once.

    Each step is taken by all or by none, and nobody writes before all have taken the last one.
    """
    memory, one_shot, reason = None, None, ""
    try:
        memory = shareable_memory(group, device)
    except Exception as error:
        reason = str(error)
    if _all(memory is not None, device):
        assert memory is not None
        try:
            one_shot = OneShot(group, memory)
        except Exception as error:
            reason = str(error)
        if _all(one_shot is not None, device):
            return one_shot
    if reason or group.rank() == 0:
        reason = reason or "the reason is another rank's"
        logger.warning("The GPUs share no memory, so small sums go through the library (%s).", reason)
    return None


def _all(yes: bool, device: torch.device) -> bool:
    """Whether it is so on all ranks."""
    votes = torch.tensor([yes], dtype=torch.int32, device=device)
    dist.all_reduce(votes, op=dist.ReduceOp.MIN)
    return bool(votes.item())
