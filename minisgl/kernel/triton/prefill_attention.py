"""Attention of requests with several new tokens over their pages: bound by the tensor cores.

A program takes a block of query rows of one KV head and walks over the keys that they see (FlashAttention-2, Dao 2023).
Rows are packed: row r of a request and KV head is query head ``r % group`` of new token ``r // group``, so that the
heads that share K and V share their loads, and a block of rows spans few positions:

    keys       0 ........... window ......... first row ... last row
                 not visited | masked | all visible | masked |

Tiles of keys begin at multiples of their size, so a row meets its keys in the same tiles in whatever block it lies, and
tiles that only others of the block see change nothing: its result is, bit for bit, the same for a token alone, in a
chunk of any size and at any place in it.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

from .launch import Launcher, offset_type, power_of_2, wait_for_previous
from .pages import page_slots

if TYPE_CHECKING:
    from ..attention_spec import AttentionSpec


@dataclass(frozen=True, slots=True)
class PrefillConfig:
    """Launch parameters: rows of a block, keys of a tile, warps, pipeline stages, and a bound on registers."""

    rows: int
    tile: int
    num_warps: int
    num_stages: int
    max_registers: int | None = None


def prefill_config(head_dim: int, itemsize: int, *, singles: bool = False) -> PrefillConfig:
    """With ``singles`` there are tokens that are alone as well. Their blocks are all but empty, so they had better be
    small, and several of them run at once on a multiprocessor."""
    wide = power_of_2(head_dim) > 128
    if itemsize == 4:
        return PrefillConfig(rows=16, tile=16 if wide else 32, num_warps=4, num_stages=2)
    if wide:
        return PrefillConfig(rows=64, tile=32, num_warps=4, num_stages=3)
    if singles:
        return PrefillConfig(rows=64, tile=64, num_warps=4, num_stages=2)
    return PrefillConfig(rows=128, tile=64, num_warps=8, num_stages=3)


def plan_prefill(
    cached: npt.NDArray[np.int32], new: npt.NDArray[np.int32], group: int, rows: int
) -> npt.NDArray[np.int32]:
    """Blocks of all requests, (2, blocks) int32: the request of each, and its first row there.

    Those with most keys come first, so that no long one is left over at the end.
    """
    blocks = -(-new * group // rows)
    request = np.repeat(np.arange(len(new), dtype=np.int32), blocks)
    first = (np.arange(len(request)) - np.repeat(np.cumsum(blocks) - blocks, blocks)) * rows
    keys = cached[request] + np.minimum((first + rows) // group, new[request])
    order = np.argsort(-keys, kind="stable")
    return np.stack((request[order], first[order])).astype(np.int32)


@triton.jit
def _attend_tiles(
    q,
    acc,
    top,
    weight_sum,
    low,
    high,
    limit,
    position,
    k_pool_ptr,
    v_pool_ptr,
    table,
    scale,
    KV_STRIDE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    OFFSET: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Goes on with the softmax over the keys from low up to high. Both are multiples of TILE, but high only if not
    MASKED. Where all keys are visible, MASKED or not are the same, bit for bit."""
    d = tl.arange(0, BLOCK_D)
    slot = page_slots(table, low, limit, PAGE, TILE)
    for tile in range(low, high, TILE):
        place = (slot.to(OFFSET) * KV_STRIDE)[:, None] + d[None, :]
        key = tile + tl.arange(0, TILE)
        if MASKED:
            k = tl.load(k_pool_ptr + place, mask=(key < limit)[:, None] & (d < HEAD_DIM)[None, :], other=0.0)
        elif HEAD_DIM == BLOCK_D:
            k = tl.load(k_pool_ptr + place)
        else:
            k = tl.load(k_pool_ptr + place, mask=(d < HEAD_DIM)[None, :], other=0.0)
        score = tl.dot(q, tl.trans(k), input_precision="ieee")
        if MASKED:
            visible = key[None, :] <= position[:, None]
            if WINDOW > 0:
                visible &= key[None, :] > position[:, None] - WINDOW
            score = tl.where(visible, score, float("-inf"))
        new_top = tl.maximum(top, tl.max(score, axis=1))
        origin = new_top
        if MASKED:
            # A row that has seen no key yet must not compute inf - inf.
            origin = tl.where(new_top == float("-inf"), 0.0, origin)
        # Exactly 1 where the maximum stays as it is, so that a tile without visible keys leaves its row alone.
        keep = tl.exp2((top - origin) * scale)
        # The scale comes in here, where it costs nothing. What is one instruction is not left to the compiler, which
        # might choose otherwise in the other loop.
        weight = tl.exp2(tl.fma(score, scale, (-origin * scale)[:, None]))
        weight_sum = tl.fma(weight_sum, keep, tl.sum(weight, axis=1))
        acc = acc * keep[:, None]
        if MASKED:
            v = tl.load(v_pool_ptr + place, mask=(key < limit)[:, None] & (d < HEAD_DIM)[None, :], other=0.0)
        elif HEAD_DIM == BLOCK_D:
            v = tl.load(v_pool_ptr + place)
        else:
            v = tl.load(v_pool_ptr + place, mask=(d < HEAD_DIM)[None, :], other=0.0)
        acc = tl.dot(weight.to(v.dtype), v, acc, input_precision="ieee")
        top = new_top
        slot = page_slots(table, tile + TILE, limit, PAGE, TILE)
    return acc, top, weight_sum


@triton.jit(
    do_not_specialize=["table_stride", "num_blocks"],
    do_not_specialize_on_alignment=["rows_ptr", "seq_lens_ptr", "cu_new_ptr"],
)
def _prefill_kernel(
    q_ptr,
    k_pool_ptr,
    v_pool_ptr,
    table_ptr,
    table_stride,
    rows_ptr,
    seq_lens_ptr,
    cu_new_ptr,
    blocks_ptr,
    num_blocks,
    out_ptr,
    scale,
    Q_STRIDE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PAGE: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    OFFSET: tl.constexpr,
    PDL: tl.constexpr,
):
    kv_head = tl.program_id(0)
    block = tl.program_id(1)
    heads: tl.constexpr = NUM_KV_HEADS * GROUP
    kv_stride: tl.constexpr = NUM_KV_HEADS * HEAD_DIM
    # Not written by the kernel right before this one, so it need not be waited for.
    request = tl.load(blocks_ptr + block)
    first_row = tl.load(blocks_ptr + num_blocks + block)
    begin = tl.load(cu_new_ptr + request)
    length = tl.load(seq_lens_ptr + request)
    new = tl.minimum(tl.load(cu_new_ptr + request + 1) - begin, length)
    begin -= tl.load(cu_new_ptr)
    table = table_ptr + tl.load(rows_ptr + request).to(tl.int64) * table_stride
    wait_for_previous(PDL)

    row = first_row + tl.arange(0, ROWS)
    token = row // GROUP
    head = kv_head * GROUP + row % GROUP
    d = tl.arange(0, BLOCK_D)
    mask = (token < new)[:, None] & (d < HEAD_DIM)[None, :]
    token64 = (begin + token).to(tl.int64)
    q = tl.load(q_ptr + (token64 * Q_STRIDE + head * HEAD_DIM)[:, None] + d[None, :], mask=mask, other=0.0)

    cached = length - new
    position = cached + token
    first = cached + first_row // GROUP
    last = cached + tl.minimum((first_row + ROWS - 1) // GROUP, new - 1)
    high = last + 1
    low = 0
    inner_low = 0
    if WINDOW > 0:
        low = tl.maximum(first - WINDOW + 1, 0) // TILE * TILE
        inner_low = tl.maximum(tl.cdiv(last - WINDOW + 1, TILE) * TILE, low)
        inner_low = tl.minimum(inner_low, tl.cdiv(high, TILE) * TILE)
    inner_high = tl.maximum((first + 1) // TILE * TILE, inner_low)

    top = tl.full((ROWS,), float("-inf"), tl.float32)
    weight_sum = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, BLOCK_D), tl.float32)
    k_head = k_pool_ptr + kv_head * HEAD_DIM
    v_head = v_pool_ptr + kv_head * HEAD_DIM
    if WINDOW > 0:
        acc, top, weight_sum = _attend_tiles(
            q, acc, top, weight_sum, low, inner_low, length, position, k_head, v_head, table, scale,
            kv_stride, HEAD_DIM, BLOCK_D, PAGE, TILE, WINDOW, OFFSET, True,
        )  # fmt: skip
    acc, top, weight_sum = _attend_tiles(
        q, acc, top, weight_sum, inner_low, inner_high, length, position, k_head, v_head, table, scale,
        kv_stride, HEAD_DIM, BLOCK_D, PAGE, TILE, WINDOW, OFFSET, False,
    )  # fmt: skip
    acc, top, weight_sum = _attend_tiles(
        q, acc, top, weight_sum, inner_high, high, length, position, k_head, v_head, table, scale,
        kv_stride, HEAD_DIM, BLOCK_D, PAGE, TILE, WINDOW, OFFSET, True,
    )  # fmt: skip
    acc = acc / weight_sum[:, None]
    place = (token64 * heads + head)[:, None] * HEAD_DIM + d[None, :]
    tl.store(out_ptr + place, acc.to(out_ptr.dtype.element_ty), mask=mask)


_launch_prefill = Launcher(_prefill_kernel)


def prefill_attention(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    page_table: torch.Tensor,
    rows: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_new: torch.Tensor,
    blocks: torch.Tensor,
    spec: "AttentionSpec",
    out: torch.Tensor,
    config: PrefillConfig,
    *,
    pdl: bool = False,
) -> None:
    """Causal attention of the last ``cu_new[i + 1] - cu_new[i]`` tokens of each request over all its tokens.

    ``q`` (T, Hq, D) has contiguous heads; request i begins at its token ``cu_new[i] - cu_new[0]``. K and V of all
    tokens are in the pools (pages, page_size, Hkv, D) already. ``rows``, ``seq_lens`` (B) and ``cu_new`` (B + 1) are
    int32; ``blocks`` is :func:`plan_prefill` of them on the device. Writes ``out`` (T, Hq * D), contiguous, but for
    tokens of requests of length 0.
    """
    _launch_prefill(
        (spec.num_kv_heads, blocks.shape[1]),
        q,
        k_pool,
        v_pool,
        page_table,
        page_table.stride(0),
        rows,
        seq_lens,
        cu_new,
        blocks,
        blocks.shape[1],
        out,
        spec.scale * math.log2(math.e),  # the kernel's exponentials are to the base 2
        Q_STRIDE=q.stride(0),
        NUM_KV_HEADS=spec.num_kv_heads,
        GROUP=spec.num_heads // spec.num_kv_heads,
        HEAD_DIM=spec.head_dim,
        BLOCK_D=power_of_2(spec.head_dim),
        PAGE=k_pool.shape[1],
        ROWS=config.rows,
        TILE=config.tile,
        WINDOW=spec.sliding_window or 0,
        OFFSET=offset_type(k_pool),
        maxnreg=config.max_registers,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        pdl=pdl,
    )
