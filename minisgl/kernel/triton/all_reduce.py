"""The sum of a small tensor over the GPUs of one host, in one kernel: each rank writes its part to all the others.

What an all-reduce of a few rows costs is latency, and a ring has several of them. Here every rank has memory that the
others can write to, with an inbox for each of them and, behind it, a flag for each of their programs:

    rank 0          x0 ── to the inbox "from 0" of rank 1, then the flag of this turn ──> rank 1
                    x0 + what came into "from 1", once its flag shows this turn         <── rank 1

Every rank adds in rank order, in float32, so all get the same bits, and an element does not depend on its neighbours.

There are two sets of inboxes, for even and for odd turns. A rank that writes in turn t + 1 has seen flags of turn t
from all others; so they had ended turn t - 1, the last one to read what is now overwritten.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs

import torch
import triton
import triton.language as tl

from .launch import Launcher, wait_for_previous

PROGRAMS = 128
BLOCK = 1024
_PATIENCE = 4096  # looks at a flag between two looks at the word that ends the waiting


@triton.jit
def _to(peers_ptr, peer, start, dtype: tl.constexpr):
    """Byte ``start`` of the memory of ``peer``, as a pointer to ``dtype``."""
    return (tl.load(peers_ptr + peer) + start).to(tl.pointer_type(dtype))


@triton.jit(do_not_specialize=["numel"])
def _all_reduce_kernel(
    x_ptr,
    peers_ptr,  # (WORLD) int64
    turns_ptr,  # (PROGRAMS) int32: how often each program has run
    abort_ptr,  # int32, not 0 to end all waiting
    numel,
    RANK: tl.constexpr,
    WORLD: tl.constexpr,
    INBOX: tl.constexpr,  # bytes
    PROGRAMS: tl.constexpr,
    BLOCK: tl.constexpr,
    PATIENCE: tl.constexpr,
    PDL: tl.constexpr,
):
    program = tl.program_id(0)
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    wait_for_previous(PDL)
    turn = tl.load(turns_ptr + program) + 1
    # Every program counts every turn, those without work too.
    tl.store(turns_ptr + program, turn)
    first = program * BLOCK
    if first < numel:
        inboxes = (turn & 1).to(tl.int64) * (WORLD * INBOX)
        flags = 2 * WORLD * INBOX
        for start in range(first, numel, PROGRAMS * BLOCK):
            place = start + tl.arange(0, BLOCK)
            x = tl.load(x_ptr + place, mask=place < numel, other=0.0)
            for peer in tl.static_range(WORLD):
                if peer != RANK:
                    tl.store(_to(peers_ptr, peer, inboxes + RANK * INBOX, dtype) + place, x, mask=place < numel)
        # All threads have written before one of them raises the flag.
        tl.debug_barrier()
        for peer in tl.static_range(WORLD):
            if peer != RANK:
                flag = _to(peers_ptr, peer, flags, tl.int32) + RANK * PROGRAMS + program
                tl.atomic_xchg(flag, turn, sem="release", scope="sys")
        for peer in tl.static_range(WORLD):
            if peer != RANK:
                flag = _to(peers_ptr, RANK, flags, tl.int32) + peer * PROGRAMS + program
                seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
                looks = 0
                while seen != turn:
                    seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
                    looks += 1
                    # Nested, for `and` would read the host's memory at every look.
                    if looks % PATIENCE == 0:  # noqa: SIM102
                        if tl.load(abort_ptr, volatile=True) != 0:
                            seen = turn
        tl.debug_barrier()
        for start in range(first, numel, PROGRAMS * BLOCK):
            place = start + tl.arange(0, BLOCK)
            mask = place < numel
            total = tl.zeros((BLOCK,), tl.float32)
            for peer in tl.static_range(WORLD):
                if peer == RANK:
                    part = tl.load(x_ptr + place, mask=mask, other=0.0)
                else:
                    inbox = _to(peers_ptr, RANK, inboxes + peer * INBOX, dtype)
                    part = tl.load(inbox + place, mask=mask, other=0.0, volatile=True)
                total += part.to(tl.float32)
            tl.store(x_ptr + place, total.to(dtype), mask=mask)


_launch_all_reduce = Launcher(_all_reduce_kernel)


def memory_bytes(world_size: int, inbox: int) -> int:
    """What each rank's memory must hold: two sets of inboxes of ``inbox`` bytes, and the flags. It begins as zero."""
    return 2 * world_size * inbox + world_size * PROGRAMS * 4


def all_reduce(
    x: torch.Tensor,
    peers: torch.Tensor,
    turns: torch.Tensor,
    abort: torch.Tensor,
    rank: int,
    inbox: int,
    *,
    pdl: bool = False,
) -> torch.Tensor:
    """Overwrites ``x`` (contiguous, at most ``inbox`` bytes) with the sum over all ranks and returns it.

    ``peers`` (W) int64: the addresses of all ranks' memories (:func:`memory_bytes`), as this one sees them; ``inbox``
    is a multiple of 16. ``turns`` (PROGRAMS) int32 begin as zero. All ranks make the same calls in the same order, each
    on one stream. ``abort`` (1) int32 may lie in pinned host memory; once it is not 0, nobody waits any more and the
    sums are garbage.
    """
    _launch_all_reduce(
        (PROGRAMS,),
        x,
        peers,
        turns,
        abort,
        x.numel(),
        RANK=rank,
        WORLD=len(peers),
        INBOX=inbox,
        PROGRAMS=PROGRAMS,
        BLOCK=BLOCK,
        PATIENCE=_PATIENCE,
        num_warps=4,
        pdl=pdl,
    )
    return x
