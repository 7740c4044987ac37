"""How decode attention cuts a step into equal shares, planned on the device so that a CUDA graph can hold it.

The tokens that a request attends to are cut into tiles, and the tiles of all requests lie in one line. G programs (for
each KV head) share the line equally, wherever the borders of requests fall:

    requests    |  0  |     1     |        2        | 3 |
    tiles       | . . | . . . . . | . . . . . . . . | . |
    programs    |    0    |    1    |    2    |    3    |

Program 1 here has a part of request 1 and a part of request 2. Parts of the same request are merged by the program
that finishes last. So the work is balanced for any mix of lengths, and one long request fills the device as well as
many short ones do. What is added up in which order depends on the lengths of all, though: a result differs in its last
bits with the neighbours.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from .launch import Launcher, power_of_2, wait_for_previous

HEADER = 2
"""A plan begins with the number of tiles and of programs that have work, then comes the first tile of each request
(B + 1 of them), then the first request of each program (G)."""


@dataclass(frozen=True, slots=True)
class Cut:
    """Tokens of a tile, the fewest tiles worth a program, and the sliding window (0: none)."""

    tile: int
    min_tiles: int
    window: int


@triton.jit
def window_start(length, WINDOW: tl.constexpr):
    """The first token that the last one of ``length`` sees."""
    if WINDOW > 0:
        return tl.maximum(length - WINDOW, 0)
    return length * 0


@triton.jit(do_not_specialize=["num_requests", "num_programs"], do_not_specialize_on_alignment=["seq_lens_ptr"])
def _plan_kernel(
    plan_ptr,
    seq_lens_ptr,
    num_requests,
    num_programs,
    TILE: tl.constexpr,
    MIN_TILES: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_G: tl.constexpr,
    PDL: tl.constexpr,
):
    request = tl.arange(0, BLOCK_B)
    wait_for_previous(PDL)
    length = tl.load(seq_lens_ptr + request, mask=request < num_requests, other=0)
    tiles = tl.cdiv(length, TILE) - window_start(length, WINDOW) // TILE
    ends = tl.cumsum(tiles, 0)
    total = tl.sum(tiles, 0)
    busy = tl.minimum(tl.maximum(total // MIN_TILES, 1), num_programs)
    tl.store(plan_ptr, total)
    tl.store(plan_ptr + 1, busy)
    tl.store(plan_ptr + 2, 0)
    tl.store(plan_ptr + 3 + request, ends, mask=request < num_requests)
    first_ptr = plan_ptr + 3 + num_requests
    for start in range(0, num_programs, BLOCK_G):
        program = start + tl.arange(0, BLOCK_G)
        tile = program * total // busy
        done = tl.sum((ends[None, :] <= tile[:, None]).to(tl.int32), axis=1)
        tl.store(first_ptr + program, done, mask=program < num_programs)


_launch_plan = Launcher(_plan_kernel)


def plan_size(num_requests: int, num_programs: int) -> int:
    """int32 elements of a plan."""
    return HEADER + 1 + num_requests + num_programs


def plan_decode(
    plan: torch.Tensor,
    seq_lens: torch.Tensor,
    max_requests: int,
    num_programs: int,
    cut: Cut,
) -> None:
    """Fills ``plan`` (:func:`plan_size`, int32) for B requests, at most ``max_requests``, of ``seq_lens`` (B) int32."""
    size = seq_lens.shape[0]
    _launch_plan(
        (1,),
        plan,
        seq_lens,
        size,
        num_programs,
        TILE=cut.tile,
        MIN_TILES=cut.min_tiles,
        WINDOW=cut.window,
        BLOCK_B=power_of_2(max_requests),
        BLOCK_G=16,
        num_warps=4,
    )
