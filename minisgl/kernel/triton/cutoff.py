"""The cut-off of top-k and top-p in a row of logits, without a sort.

What a row keeps is one number, as in :mod:`minisgl.engine.cutoff`, which is also the reference: all filters keep the
most probable tokens. With d = largest logit - logit >= 0 the cut-off is the smallest d that reaches a count (top-k) or
a mass (top-p). It is found by passes over the row that each test a few candidates at once, until few enough tokens are
left between too little and enough; these are collected and searched bit by bit in registers.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs

import triton
import triton.language as tl

NO_LIMIT = tl.constexpr(128.0)
"""exp(-d) is 0 in float32 long before: a cut-off beyond keeps all that can be sampled."""


@triton.jit
def scaled_logits(logits_ptr, place, mask, inverse_temperature):
    return tl.load(logits_ptr + place, mask=mask, other=float("-inf")).to(tl.float32) * inverse_temperature


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
            d = top - scaled_logits(logits_ptr, start + token, start + token < V, scale)
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
        d = top - scaled_logits(logits_ptr, start + token, start + token < V, scale)
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
def find_cutoff(
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
