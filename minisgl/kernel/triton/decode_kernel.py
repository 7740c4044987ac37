"""The kernel of :mod:`.decode_attention`.

The query heads of one KV head are the rows of a matrix product on the tensor cores. The work is shared as
:mod:`.decode_plan` says; a softmax over a part of the tokens is kept as (maximum, sum, weighted values), and parts are
merged as in flash decoding (Dao et al., 2023). Exponentials are to the base 2: ``scale`` has log2(e) in it.

Fused, the kernel starts from the qkv projection: every program normalises and rotates the query heads it needs, and the
one with the end of the request puts the new K and V into the pool before it reads them back.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs

import triton
import triton.language as tl

from .decode_plan import window_start
from .launch import Launcher, wait_for_previous
from .pages import page_slots
from .rope import norm_rope


@triton.jit
def _request(plan_ptr, seq_lens_ptr, rows_ptr, request, num_requests):
    """Where a request's tiles end, its length and its table row; any numbers past the last request."""
    real = request < num_requests
    end = tl.load(plan_ptr + 3 + request, mask=real, other=0)
    length = tl.load(seq_lens_ptr + request, mask=real, other=0)
    row = tl.load(rows_ptr + request, mask=real, other=0)
    return end, length, row


@triton.jit
def _slot(lowest, part):
    """Where a part lies, of a request that the program ``lowest`` begins.

    A program has two slots: one for a request that began before it, one for a request that begins in it.
    """
    return lowest * 2 + 1 + part * 2 - tl.where(part > 0, 1, 0)


@triton.jit
def _merge_parts(
    partial_ptr,
    stats_ptr,
    base,
    lowest,
    num_parts,
    GROUP: tl.constexpr,
    GROUP_POW2: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """The attention of one request and KV head from its parts, in their order: (GROUP_POW2, BLOCK_D) float32.

    The slots of the KV head begin at ``base``.
    """
    g = tl.arange(0, GROUP_POW2)
    d = tl.arange(0, BLOCK_D)
    top = tl.full((GROUP_POW2,), float("-inf"), tl.float32)
    total = tl.zeros((GROUP_POW2,), tl.float32)
    out = tl.zeros((GROUP_POW2, BLOCK_D), tl.float32)
    for start in range(0, num_parts, BLOCK_P):
        part = start + tl.arange(0, BLOCK_P)
        slot = base + _slot(lowest, part)
        mask = (part < num_parts)[:, None] & (g < GROUP)[None, :]
        place = slot[:, None] * GROUP + g[None, :]
        # Other programs wrote these: past the L1 cache, which may hold what an earlier launch left there.
        part_top = tl.load(stats_ptr + place * 2, mask=mask, other=float("-inf"), cache_modifier=".cg")
        part_total = tl.load(stats_ptr + place * 2 + 1, mask=mask, other=0.0, cache_modifier=".cg")
        values = tl.load(
            partial_ptr + place[:, :, None] * HEAD_DIM + d[None, None, :],
            mask=mask[:, :, None] & (d < HEAD_DIM)[None, None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        new_top = tl.maximum(top, tl.max(part_top, axis=0))
        new_top = tl.where(g < GROUP, new_top, 0.0)
        keep = tl.exp2(top - new_top)
        weight = tl.exp2(part_top - new_top[None, :])
        total = total * keep + tl.sum(part_total * weight, axis=0)
        out = out * keep[:, None] + tl.sum(values * weight[:, :, None], axis=0)
        top = new_top
    return out / tl.where(g < GROUP, total, 1.0)[:, None]


@triton.jit(
    do_not_specialize=["table_stride", "num_requests", "num_programs", "num_slots"],
    do_not_specialize_on_alignment=["rows_ptr", "seq_lens_ptr", "slots_ptr"],
)
def _decode_kernel(
    q_ptr,  # FUSED: qkv (B, (Hq + 2 Hkv) * D), else q (B, Hq, D)
    k_pool_ptr,
    v_pool_ptr,
    table_ptr,
    table_stride,
    rows_ptr,
    seq_lens_ptr,
    slots_ptr,
    cos_sin_ptr,
    q_norm_ptr,
    k_norm_ptr,
    eps,
    plan_ptr,
    partial_ptr,
    stats_ptr,
    counter_ptr,
    out_ptr,
    num_requests,
    num_programs,
    num_slots,
    scale,
    Q_STRIDE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_POW2: tl.constexpr,
    BLOCK_G: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    OFFSET: tl.constexpr,
    FUSED: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    HAS_NORM: tl.constexpr,
    BLOCK_P: tl.constexpr,
    PDL: tl.constexpr,
):
    kv_head = tl.program_id(0)
    program = tl.program_id(1)
    heads: tl.constexpr = NUM_KV_HEADS * GROUP
    g = tl.arange(0, BLOCK_G)  # A matrix product has 16 rows at least; GROUP of them are query heads.
    d = tl.arange(0, BLOCK_D)
    in_head = d < HEAD_DIM
    kv_stride: tl.constexpr = NUM_KV_HEADS * HEAD_DIM

    # Not written by the kernel right before this one, so it need not be waited for.
    total = tl.load(plan_ptr)
    busy = tl.load(plan_ptr + 1)
    request = tl.load(plan_ptr + 3 + num_requests + program)
    current = program * total // busy
    last = tl.where(program < busy, (program + 1) * total // busy, current)
    first = tl.load(plan_ptr + 2 + request, mask=request < num_requests, other=0)
    end, length, row = _request(plan_ptr, seq_lens_ptr, rows_ptr, request, num_requests)
    wait_for_previous(PDL)
    while current < last:
        stop = tl.minimum(last, end)
        start = window_start(length, WINDOW)
        low = start // TILE * TILE + (current - first) * TILE
        high = tl.minimum(start // TILE * TILE + (stop - first) * TILE, length)

        # All loads whose addresses are known come first, so that their latencies overlap. Where a tile lies is looked
        # up one tile ahead, so that its loads never wait for an address.
        table = table_ptr + row.to(tl.int64) * table_stride
        slot = page_slots(table, low, high, PAGE, TILE)
        head_mask = g[:, None] < GROUP
        if FUSED:
            qkv = q_ptr + request.to(tl.int64) * Q_STRIDE
            v_new = tl.load(qkv + (heads + NUM_KV_HEADS + kv_head) * HEAD_DIM + d, mask=in_head, other=0.0)
            new = tl.load(slots_ptr + request).to(tl.int64) * kv_stride + kv_head * HEAD_DIM
            # The row behind the query heads is the new key; as a query it is nobody's.
            is_key = g[:, None] == GROUP
            q = norm_rope(
                qkv + tl.where(is_key, heads + kv_head, kv_head * GROUP + g[:, None]) * HEAD_DIM,
                g[:, None] <= GROUP,
                is_key,
                q_norm_ptr,
                k_norm_ptr,
                cos_sin_ptr + (length - 1) * ROTARY_DIM,
                eps,
                HEAD_DIM,
                BLOCK_D,
                ROTARY_DIM,
                HAS_NORM,
            )
            if stop == end:
                tl.store(k_pool_ptr + new + g[:, None] * 0 + d[None, :], q, mask=is_key & in_head[None, :])
                tl.store(v_pool_ptr + new + d, v_new, mask=in_head)
                tl.debug_barrier()
        else:
            query = request.to(tl.int64) * Q_STRIDE + (kv_head * GROUP + g[:, None]) * HEAD_DIM
            q = tl.load(q_ptr + query + d[None, :], mask=head_mask & in_head[None, :], other=0.0)

        top = tl.full((BLOCK_G,), float("-inf"), tl.float32)
        # Summed over tokens at the end only: a sum over a tile is a barrier among the warps.
        weights = tl.zeros((BLOCK_G, TILE), tl.float32)
        acc = tl.zeros((BLOCK_G, BLOCK_D), tl.float32)
        for tile in range(low, high, TILE):
            token = tile + tl.arange(0, TILE)
            valid = (token < high) & (token >= start)
            place = (slot.to(OFFSET) * kv_stride + kv_head * HEAD_DIM)[:, None] + d[None, :]
            mask = valid[:, None] & in_head[None, :]
            k = tl.load(k_pool_ptr + place, mask=mask, other=0.0)
            score = tl.dot(q, tl.trans(k), input_precision="ieee")
            score = tl.where(valid[None, :], score, float("-inf"))
            new_top = tl.maximum(top, tl.max(score, axis=1))
            # The scale comes in here, where it costs nothing: a multiplication and a subtraction are one instruction.
            keep = tl.exp2(top * scale - new_top * scale)
            weight = tl.exp2(score * scale - (new_top * scale)[:, None])
            weights = weights * keep[:, None] + weight
            v = tl.load(v_pool_ptr + place, mask=mask, other=0.0)
            acc = tl.dot(weight.to(v.dtype), v, acc * keep[:, None], input_precision="ieee")
            top = new_top
            slot = page_slots(table, tile + TILE, high, PAGE, TILE)

        weight_sum = tl.sum(weights, axis=1)
        # The programs that share the request.
        lowest = ((first + 1) * busy - 1) // total
        parts = (end * busy - 1) // total - lowest + 1
        out = out_ptr + (request.to(tl.int64) * heads + kv_head * GROUP) * HEAD_DIM
        if parts == 1:
            result = (acc / weight_sum[:, None]).to(out_ptr.dtype.element_ty)
            tl.store(out + g[:, None] * HEAD_DIM + d[None, :], result, mask=head_mask & in_head[None, :])
        else:
            base = kv_head * num_slots
            own = (base + _slot(lowest, program - lowest)) * GROUP + g
            mine = partial_ptr + own[:, None] * HEAD_DIM + d[None, :]
            tl.store(mine, acc, mask=head_mask & in_head[None, :])
            tl.store(stats_ptr + own * 2, top * scale, mask=g < GROUP)
            tl.store(stats_ptr + own * 2 + 1, weight_sum, mask=g < GROUP)
            # All threads have written before one of them announces it.
            tl.debug_barrier()
            counter = counter_ptr + request * NUM_KV_HEADS + kv_head
            finished = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
            if finished == parts - 1:
                merged = _merge_parts(
                    partial_ptr,
                    stats_ptr,
                    base,
                    lowest,
                    parts,
                    GROUP,
                    GROUP_POW2,
                    HEAD_DIM,
                    BLOCK_D,
                    BLOCK_P,
                )
                gg = tl.arange(0, GROUP_POW2)[:, None]
                real = (gg < GROUP) & in_head[None, :]
                tl.store(out + gg * HEAD_DIM + d[None, :], merged.to(out_ptr.dtype.element_ty), mask=real)
                tl.store(counter, 0)  # for the next layer
        if stop == end:
            request += 1
            first = end
            end, length, row = _request(plan_ptr, seq_lens_ptr, rows_ptr, request, num_requests)
        current = stop


launch_decode = Launcher(_decode_kernel)
