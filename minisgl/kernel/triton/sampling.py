"""From logits to token ids without a sort: temperature, top-k, top-p, min-p and the inverse of the distribution.

Two launches serve all rows, whatever each of them asks for:

    1   (row, chunk)   of each chunk of the vocabulary: largest logit, where it is, sum of exponentials
    2   (row)          greedy: the best chunk's best
                       plain: the chunk under u * total, then the token in it
                       filtered: the cut-off, the sums of what it keeps in each chunk, then as plain

What a row keeps is one number, as in :mod:`minisgl.engine.cutoff`, which is also the reference: all filters keep the
most probable tokens. With d = largest logit - logit >= 0 the cut-off is the smallest d that reaches a count (top-k) or
a mass (top-p). It is found by passes over the row that each test a few candidates at once, until few enough tokens are
left between too little and enough; these are collected and searched bit by bit in registers.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs

import torch
import triton
import triton.language as tl

from .launch import Launcher, power_of_2, wait_for_previous

CHUNK = 4096
"""Tokens of a chunk: small enough for many programs to share one row."""

COLLECT = 2048
"""How many tokens are collected for the search in registers."""

GREEDY_BELOW = 1e-5
"""Temperatures under this are greedy, as in the torch sampler."""

NO_LIMIT = tl.constexpr(128.0)
"""exp(-d) is 0 in float32 long before: a cut-off beyond keeps all that can be sampled."""


@triton.jit
def _scaled(logits_ptr, place, mask, inverse_temperature):
    return tl.load(logits_ptr + place, mask=mask, other=float("-inf")).to(tl.float32) * inverse_temperature


@triton.jit
def _inverse_temperature(temperature, top_k, GREEDY: tl.constexpr):
    greedy = (temperature < GREEDY) | (top_k == 1)
    return greedy, 1.0 / tl.where(greedy, 1.0, temperature)


@triton.jit(do_not_specialize_on_alignment=["temperature_ptr", "top_k_ptr"])
def _chunk_kernel(
    logits_ptr,
    temperature_ptr,
    top_k_ptr,
    top_ptr,
    sum_ptr,
    argmax_ptr,
    LOGITS_STRIDE: tl.constexpr,
    V: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
    GREEDY: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0)
    chunk = tl.program_id(1)
    token = chunk * BLOCK + tl.arange(0, BLOCK)
    wait_for_previous(PDL)
    _, scale = _inverse_temperature(tl.load(temperature_ptr + row), tl.load(top_k_ptr + row), GREEDY)
    x = _scaled(logits_ptr + row.to(tl.int64) * LOGITS_STRIDE, token, token < V, scale)
    # Infinity stands for "not a number": the row fails either way.
    x = tl.where(x == x, x, float("inf"))
    top = tl.max(x, axis=0)
    origin = tl.where((top == float("inf")) | (top == float("-inf")), 0.0, top)
    place = row * NUM_CHUNKS + chunk
    tl.store(top_ptr + place, top)
    tl.store(sum_ptr + place, tl.sum(tl.exp(x - origin), axis=0))
    tl.store(argmax_ptr + place, tl.min(tl.where(x == top, token, V - 1), axis=0))


@triton.jit
def _bracket(
    logits_ptr,
    scale,
    top,
    need,
    low,
    count_low,
    mass_low,
    high,
    count_high,
    V: tl.constexpr,
    BLOCK: tl.constexpr,
    ENOUGH: tl.constexpr,
    BY_COUNT: tl.constexpr,
):
    """Narrows low < cut-off <= high until ENOUGH tokens or fewer lie between, or all that do are equal.

    ``count`` and ``mass`` are of the tokens with d up to low (or high).
    """
    token = tl.arange(0, BLOCK)
    going = count_high - count_low > ENOUGH
    while going:
        base = tl.maximum(low, 0.0)
        open_end = high == float("inf")
        step = tl.where(open_end, tl.maximum(base, 16.0) / 4, (high - base) / 5)
        p1 = tl.where(low < 0, 0.0, base + step)  # first of all, the best alone
        p2 = base + step * 2
        p3 = base + step * 3
        p4 = base + step * 4
        n1 = tl.zeros((BLOCK,), tl.int32)
        n2 = n1
        n3 = n1
        n4 = n1
        m1 = tl.zeros((BLOCK,), tl.float32)
        m2 = m1
        m3 = m1
        m4 = m1
        for start in tl.range(0, V, BLOCK, num_stages=3):
            d = top - _scaled(logits_ptr, start + token, start + token < V, scale)
            mass = tl.exp(-d)
            n1 += tl.where(d <= p1, 1, 0)
            n2 += tl.where(d <= p2, 1, 0)
            n3 += tl.where(d <= p3, 1, 0)
            n4 += tl.where(d <= p4, 1, 0)
            m1 += tl.where(d <= p1, mass, 0.0)
            m2 += tl.where(d <= p2, mass, 0.0)
            m3 += tl.where(d <= p3, mass, 0.0)
            m4 += tl.where(d <= p4, mass, 0.0)
        old_low, old_high = low, high
        low, count_low, mass_low, high, count_high = _test(
            p1, tl.sum(n1, 0), tl.sum(m1, 0), need, low, count_low, mass_low, high, count_high, BY_COUNT
        )
        low, count_low, mass_low, high, count_high = _test(
            p2, tl.sum(n2, 0), tl.sum(m2, 0), need, low, count_low, mass_low, high, count_high, BY_COUNT
        )
        low, count_low, mass_low, high, count_high = _test(
            p3, tl.sum(n3, 0), tl.sum(m3, 0), need, low, count_low, mass_low, high, count_high, BY_COUNT
        )
        low, count_low, mass_low, high, count_high = _test(
            p4, tl.sum(n4, 0), tl.sum(m4, 0), need, low, count_low, mass_low, high, count_high, BY_COUNT
        )
        moved = (low != old_low) | (high != old_high)
        going = (count_high - count_low > ENOUGH) & moved & (low < NO_LIMIT)
    return low, count_low, mass_low, high, count_high


@triton.jit
def _test(pivot, count, mass, need, low, count_low, mass_low, high, count_high, BY_COUNT: tl.constexpr):
    """Moves one end of the bracket to ``pivot``, if that lies inside."""
    inside = (pivot > low) & (pivot < high)
    enough = (count.to(tl.float32) if BY_COUNT else mass) >= need
    up = inside & (not enough)
    down = inside & enough
    low = tl.where(up, pivot, low)
    count_low = tl.where(up, count, count_low)
    mass_low = tl.where(up, mass, mass_low)
    high = tl.where(down, pivot, high)
    count_high = tl.where(down, count, count_high)
    return low, count_low, mass_low, high, count_high


@triton.jit
def _collect(
    logits_ptr,
    scale,
    top,
    low,
    high,
    collected_ptr,
    counter_ptr,
    V: tl.constexpr,
    BLOCK: tl.constexpr,
    COLLECT: tl.constexpr,
):
    """The d of all tokens with low < d <= high, in any order, as (COLLECT) with infinity in the rest."""
    tl.store(counter_ptr, 0)
    tl.debug_barrier()
    token = tl.arange(0, BLOCK)
    zero = tl.zeros((BLOCK,), tl.int32)
    for start in tl.range(0, V, BLOCK, num_stages=3):
        d = top - _scaled(logits_ptr, start + token, start + token < V, scale)
        wanted = (d > low) & (d <= high) & (start + token < V)
        position = tl.atomic_add(counter_ptr + zero, 1, mask=wanted, sem="relaxed", scope="cta")
        tl.store(collected_ptr + position, d, mask=wanted & (position < COLLECT))
    tl.debug_barrier()
    place = tl.arange(0, COLLECT)
    count = tl.load(counter_ptr, volatile=True)
    return tl.load(collected_ptr + place, mask=place < count, other=float("inf"), volatile=True)


@triton.jit
def _fixed_point(d):
    """exp(-d) in units of 2 ** -30: sums of integers do not depend on the order."""
    return (tl.exp(-d) * 1073741824.0).to(tl.int64)


@triton.jit
def _fixed_sum(mass):
    return tl.sum(mass, axis=0).to(tl.float32) * (1.0 / 1073741824.0)


@triton.jit
def _search(d, need, low, count_low, mass_low, high, BY_COUNT: tl.constexpr):
    """The smallest of ``d``, all in low < d <= high, that reaches ``need`` together with what lies up to low.

    Returns it with count and mass of the tokens before it, and the count up to it. Floats from 0 on are ordered as
    their bits.
    """
    bits = d.to(tl.int32, bitcast=True)
    mass = _fixed_point(d)
    # -1 is below the bits of 0.
    under = tl.where(low < 0, -1, tl.maximum(low, 0.0).to(tl.int32, bitcast=True))
    over = high.to(tl.int32, bitcast=True)
    while over - under > 1:
        middle = under + (over - under) // 2
        inside = bits <= middle
        if BY_COUNT:
            reached = (count_low + tl.sum(inside.to(tl.int32), axis=0)).to(tl.float32)
        else:
            reached = mass_low + _fixed_sum(tl.where(inside, mass, 0))
        enough = reached >= need
        under = tl.where(enough, under, middle)
        over = tl.where(enough, middle, over)
    before = bits < over
    count_before = count_low + tl.sum(before.to(tl.int32), axis=0)
    mass_before = mass_low + _fixed_sum(tl.where(before, mass, 0))
    count_up_to = count_low + tl.sum((bits <= over).to(tl.int32), axis=0)
    return over.to(tl.float32, bitcast=True), count_before, mass_before, count_up_to


@triton.jit
def _cutoff(
    logits_ptr,
    scale,
    top,
    need,
    high,
    count_high,
    collected_ptr,
    counter_ptr,
    V: tl.constexpr,
    BLOCK: tl.constexpr,
    COLLECT: tl.constexpr,
    BY_COUNT: tl.constexpr,
):
    """The smallest d, at most high, that reaches ``need``, with what :func:`_search` returns beside it."""
    low, count_low, mass_low, high, count_high = _bracket(
        logits_ptr, scale, top, need, top * 0 - 1.0, count_high * 0, top * 0, high, count_high,
        V, BLOCK, COLLECT, BY_COUNT,
    )  # fmt: skip
    limit = high
    count_before = count_low
    mass_before = mass_low
    count_up_to = count_high
    if low >= NO_LIMIT:
        limit = top * 0 + float("inf")
        count_up_to = count_high * 0 + V
    elif count_high - count_low <= COLLECT:
        d = _collect(logits_ptr, scale, top, low, high, collected_ptr, counter_ptr, V, BLOCK, COLLECT)
        limit, count_before, mass_before, count_up_to = _search(d, need, low, count_low, mass_low, high, BY_COUNT)
    return limit, count_before, mass_before, count_up_to


@triton.jit(do_not_specialize_on_alignment=["temperature_ptr", "top_k_ptr", "top_p_ptr", "min_p_ptr", "uniform_ptr"])
def _pick_kernel(
    logits_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    uniform_ptr,
    top_ptr,
    sum_ptr,
    argmax_ptr,
    collected_ptr,
    counter_ptr,
    ids_ptr,
    LOGITS_STRIDE: tl.constexpr,
    V: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    BLOCK_CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
    COLLECT: tl.constexpr,
    GREEDY: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0)
    chunk = tl.arange(0, BLOCK_CHUNKS)
    place = row * NUM_CHUNKS + chunk
    logits_ptr += row.to(tl.int64) * LOGITS_STRIDE
    collected_ptr += row * COLLECT
    counter_ptr += row
    wait_for_previous(PDL)
    temperature = tl.load(temperature_ptr + row)
    top_k = tl.load(top_k_ptr + row).to(tl.int32)
    greedy, scale = _inverse_temperature(temperature, top_k, GREEDY)
    tops = tl.load(top_ptr + place, mask=chunk < NUM_CHUNKS, other=float("-inf"))
    top = tl.max(tops, axis=0)
    failed = (top == float("inf")) | (top == float("-inf"))
    best = tl.min(tl.where(tops == top, chunk, NUM_CHUNKS - 1), axis=0)
    picked = tl.load(argmax_ptr + row * NUM_CHUNKS + best)
    if not (greedy | failed):
        top_p = tl.load(top_p_ptr + row)
        min_p = tl.load(min_p_ptr + row)
        limit = top * 0 + float("inf")
        sums = tl.load(sum_ptr + place, mask=chunk < NUM_CHUNKS, other=0.0) * tl.exp(tops - top)
        by_count = (top_k > 0) & (top_k < V)
        if by_count | (top_p < 1.0) | (min_p > 0.0):
            total = tl.sum(sums, axis=0)
            kept = top_k * 0 + V
            if by_count:
                limit, before, mass, kept = _cutoff(
                    logits_ptr, scale, top, top_k.to(tl.float32), limit, kept, collected_ptr, counter_ptr,
                    V, BLOCK, COLLECT, True,
                )  # fmt: skip
                # Of several equal tokens at the end, as many count as fit into k.
                total = mass + (top_k - before).to(tl.float32) * tl.exp(-limit)
            if top_p < 1.0:
                limit, before, mass, kept = _cutoff(
                    logits_ptr, scale, top, top_p * total, limit, kept, collected_ptr, counter_ptr,
                    V, BLOCK, COLLECT, False,
                )  # fmt: skip
            token = tl.arange(0, BLOCK)
            for c in tl.range(0, NUM_CHUNKS, num_stages=3):
                d = top - _scaled(logits_ptr, c * BLOCK + token, c * BLOCK + token < V, scale)
                weight = tl.exp(-d)
                weight = tl.where((d <= limit) & (weight >= min_p), weight, 0.0)
                tl.store(sum_ptr + row * NUM_CHUNKS + c, tl.sum(weight, axis=0))
            tl.debug_barrier()
            sums = tl.load(sum_ptr + place, mask=chunk < NUM_CHUNKS, other=0.0, volatile=True)
        else:
            min_p = top * 0

        # The chunk, then the token in it: the first whose cumulative mass exceeds the target, else the last with any.
        mass64 = sums.to(tl.float64)
        ends = tl.cumsum(mass64, 0)
        target = tl.load(uniform_ptr + row).to(tl.float64) * tl.sum(mass64, axis=0)
        some = sums > 0.0
        found = tl.min(tl.where((ends > target) & some, chunk, BLOCK_CHUNKS), axis=0)
        found = tl.where(found < BLOCK_CHUNKS, found, tl.max(tl.where(some, chunk, 0), axis=0))
        target -= tl.sum(tl.where(chunk < found, mass64, 0.0), axis=0)
        lane = tl.arange(0, BLOCK)
        token = found * BLOCK + lane
        d = top - _scaled(logits_ptr, token, token < V, scale)
        weight = tl.exp(-d)
        weight = tl.where((d <= limit) & (weight >= min_p), weight, 0.0)
        ends = tl.cumsum(weight, 0)
        some = weight > 0.0
        inner = tl.min(tl.where((ends > target.to(tl.float32)) & some, lane, BLOCK), axis=0)
        inner = tl.where(inner < BLOCK, inner, tl.max(tl.where(some, lane, 0), axis=0))
        picked = found * BLOCK + inner
    tl.store(ids_ptr + row, tl.where(failed, -1, picked))


_launch_chunks = Launcher(_chunk_kernel)
_launch_pick = Launcher(_pick_kernel)


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    uniform: torch.Tensor,
    *,
    pdl: bool = False,
) -> torch.Tensor:
    """Token ids (S) int32 of ``logits`` (S, V), -1 for a row that fails because its logits are not finite.

    Parameters are those of :class:`minisgl.core.Sampling`, each (S) on the device: fp32, but ``top_k`` int32 or int64.
    Temperature 0 and top_k 1 are greedy, the lowest id of equal logits. The token of a sampled row is the inverse of
    its cumulative distribution, in token id order, at ``uniform``. No row depends on another.
    """
    rows, vocab = logits.shape
    device = logits.device
    ids = torch.empty(rows, dtype=torch.int32, device=device)
    if rows == 0:
        return ids
    chunks = triton.cdiv(vocab, CHUNK)
    # Less than there are tokens: Triton 3.6 does not survive finding out that nothing has to be narrowed down.
    collect = min(COLLECT, power_of_2(vocab) // 2)
    top, total = torch.empty((2, rows, chunks), dtype=torch.float32, device=device)
    argmax = torch.empty((rows, chunks), dtype=torch.int32, device=device)
    collected = torch.empty((rows, collect), dtype=torch.float32, device=device)
    counter = torch.empty(rows, dtype=torch.int32, device=device)
    types = (top_k.dtype,)
    shape = {
        "LOGITS_STRIDE": logits.stride(0),
        "V": vocab,
        "NUM_CHUNKS": chunks,
        "BLOCK": CHUNK,
        "GREEDY": GREEDY_BELOW,
    }
    _launch_chunks(
        (rows, chunks),
        logits,
        temperature,
        top_k,
        top,
        total,
        argmax,
        **shape,
        types=types,
        num_warps=8,
        pdl=pdl,
    )
    _launch_pick(
        (rows,),
        logits,
        temperature,
        top_k,
        top_p,
        min_p,
        uniform,
        top,
        total,
        argmax,
        collected,
        counter,
        ids,
        **shape,
        types=types,
        BLOCK_CHUNKS=power_of_2(chunks),
        COLLECT=collect,
        num_warps=16,
        pdl=pdl,
    )
    return ids
