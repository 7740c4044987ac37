"""The sum of a small tensor over the GPUs of one host, in one kernel: each rank writes its part to all the others.

What an all-reduce of a few rows costs is latency. Here every rank has memory that the others can write to, with an
inbox for each of them, and every word that they write there brings its own flag, the number of the turn, in one store
of 8 bytes (the low-latency protocol of NCCL). So nothing is sent after the data, and no fence has to wait for it:

    rank 0          x0 ── words (data, turn) to the inbox "from 0" of rank 1 ──> rank 1
                    x0 + what is in "from 1", as soon as all words show this turn  <── rank 1

Every rank adds in rank order, in float32, so all get the same bits, and an element does not depend on its neighbours.

There are two sets of inboxes, for even and for odd turns. A rank that writes in turn t + 1 has seen words of turn t
from all others; so they had ended turn t - 1, the last one to read what is now overwritten. An empty turn would not
show that.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs

import torch
import triton
import triton.language as tl

from .launch import Launcher, wait_for_previous

PROGRAMS = 128
BLOCK = 256  # words of 4 bytes
_PATIENCE = 4096  # looks at the inbox between two looks at the word that ends the waiting


@triton.jit
def _inbox(peers_ptr, rank, source, turn, WORLD: tl.constexpr, INBOX: tl.constexpr):
    """That of ``rank`` for what comes from ``source``, as pointer to (data, turn) pairs."""
    start = ((turn & 1) * WORLD + source).to(tl.int64) * (8 * INBOX)
    return (tl.load(peers_ptr + rank) + start).to(tl.pointer_type(tl.int64))


@triton.jit
def _halves(word, dtype: tl.constexpr):
    """The two numbers of 16 bits in each word of 32, in float32; of float32 numbers, the word itself and nothing."""
    if dtype == tl.float32:
        low = word.to(tl.float32, bitcast=True)
        high = tl.zeros(word.shape, tl.float32)
    else:
        low = (word & 0xFFFF).to(tl.int16).to(dtype, bitcast=True).to(tl.float32)
        high = (word >> 16).to(tl.int16).to(dtype, bitcast=True).to(tl.float32)
    return low, high


@triton.jit
def _word(low, high, dtype: tl.constexpr):
    """The inverse of :func:`_halves`, rounding."""
    if dtype == tl.float32:
        word = low.to(tl.int32, bitcast=True)
    else:
        word = low.to(dtype).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        word |= high.to(dtype).to(tl.int16, bitcast=True).to(tl.int32) << 16
    return word


@triton.jit(do_not_specialize=["num_words"])
def _all_reduce_kernel(
    x_ptr,
    peers_ptr,  # (WORLD) int64
    turns_ptr,  # (PROGRAMS) int32: how often each program has run
    abort_ptr,  # int32, not 0 to end all waiting
    num_words,
    RANK: tl.constexpr,
    WORLD: tl.constexpr,
    INBOX: tl.constexpr,  # words
    PROGRAMS: tl.constexpr,
    BLOCK: tl.constexpr,
    PATIENCE: tl.constexpr,
    PDL: tl.constexpr,
):
    program = tl.program_id(0)
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    words_ptr = x_ptr.to(tl.pointer_type(tl.int32))
    wait_for_previous(PDL)
    turn = tl.load(turns_ptr + program) + 1
    # Every program counts every turn, those without work too.
    tl.store(turns_ptr + program, turn)
    flag = turn.to(tl.int64) << 32
    for start in range(program * BLOCK, num_words, PROGRAMS * BLOCK):
        place = start + tl.arange(0, BLOCK)
        x = tl.load(words_ptr + place, mask=place < num_words, other=0)
        pair = (x.to(tl.int64) & 0xFFFFFFFF) | flag
        for peer in tl.static_range(WORLD):
            if peer != RANK:
                tl.store(_inbox(peers_ptr, peer, RANK, turn, WORLD, INBOX) + place, pair, mask=place < num_words)
    for start in range(program * BLOCK, num_words, PROGRAMS * BLOCK):
        place = start + tl.arange(0, BLOCK)
        mask = place < num_words
        x = tl.load(words_ptr + place, mask=mask, other=0)
        low = tl.zeros((BLOCK,), tl.float32)
        high = tl.zeros((BLOCK,), tl.float32)
        for peer in tl.static_range(WORLD):
            if peer == RANK:
                word = x
            else:
                inbox = _inbox(peers_ptr, RANK, peer, turn, WORLD, INBOX) + place
                pair = tl.load(inbox, mask=mask, other=flag, volatile=True)
                missing = tl.sum(((pair >> 32) != turn).to(tl.int32), 0)
                looks = 0
                while missing > 0:
                    pair = tl.load(inbox, mask=mask, other=flag, volatile=True)
                    missing = tl.sum(((pair >> 32) != turn).to(tl.int32), 0)
                    looks += 1
                    # Nested, for `and` would read the host's memory at every look.
                    if looks % PATIENCE == 0:  # noqa: SIM102
                        if tl.load(abort_ptr, volatile=True) != 0:
                            missing = 0
                word = pair.to(tl.int32)
            part_low, part_high = _halves(word, dtype)
            low += part_low
            high += part_high
        tl.store(words_ptr + place, _word(low, high, dtype), mask=mask)


_launch_all_reduce = Launcher(_all_reduce_kernel)


def memory_bytes(world_size: int, inbox: int) -> int:
    """What each rank's memory must hold: two sets of inboxes for tensors of ``inbox`` bytes. It begins as zero."""
    return 2 * world_size * 2 * inbox


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
    """Overwrites ``x`` (contiguous, 4 to ``inbox`` bytes, a multiple of 4) with the sum over all ranks, returns it.

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
        x.nbytes // 4,
        RANK=rank,
        WORLD=len(peers),
        INBOX=inbox // 4,
        PROGRAMS=PROGRAMS,
        BLOCK=BLOCK,
        PATIENCE=_PATIENCE,
        num_warps=4,
        pdl=pdl,
    )
    return x
