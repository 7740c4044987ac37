"""From logits to token ids without a sort: temperature, top-k, top-p, min-p and the inverse of the distribution.

Two launches serve all rows, whatever each of them asks for:

    1   (row, chunk)   of each chunk of the vocabulary: largest logit, where it is, sum of exponentials
    2   (row)          greedy: the best chunk's best
                       plain: the chunk under u * total, then the token in it
                       filtered: the cut-off, the sums of what it keeps in each chunk, then as plain

What top-k and top-p keep is found by :mod:`.cutoff`.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs

import torch
import triton
import triton.language as tl

from .cutoff import find_cutoff, scaled_logits
from .launch import Launcher, power_of_2, wait_for_previous

CHUNK = 4096
"""Tokens of a chunk: small enough for many programs to share one row."""

COLLECT = 2048
"""How many tokens are collected for the search in registers."""

GREEDY_BELOW = 1e-5
"""Temperatures under this are greedy, as in the torch sampler."""


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
    x = scaled_logits(logits_ptr + row.to(tl.int64) * LOGITS_STRIDE, token, token < V, scale)
    # Infinity stands for "not a number": the row fails either way.
    x = tl.where(x == x, x, float("inf"))
    top = tl.max(x, axis=0)
    origin = tl.where((top == float("inf")) | (top == float("-inf")), 0.0, top)
    place = row * NUM_CHUNKS + chunk
    tl.store(top_ptr + place, top)
    tl.store(sum_ptr + place, tl.sum(tl.exp(x - origin), axis=0))
    tl.store(argmax_ptr + place, tl.min(tl.where(x == top, token, V - 1), axis=0))


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
                limit, before, mass, kept = find_cutoff(
                    logits_ptr, scale, top, top_k.to(tl.float32), limit, kept, collected_ptr, counter_ptr,
                    V, BLOCK, COLLECT, True,
                )  # fmt: skip
                # Of several equal tokens at the end, as many count as fit into k.
                total = mass + (top_k - before).to(tl.float32) * tl.exp(-limit)
            if top_p < 1.0:
                limit, before, mass, kept = find_cutoff(
                    logits_ptr, scale, top, top_p * total, limit, kept, collected_ptr, counter_ptr,
                    V, BLOCK, COLLECT, False,
                )  # fmt: skip
            token = tl.arange(0, BLOCK)
            for c in tl.range(0, NUM_CHUNKS, num_stages=3):
                d = top - scaled_logits(logits_ptr, c * BLOCK + token, c * BLOCK + token < V, scale)
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
        d = top - scaled_logits(logits_ptr, token, token < V, scale)
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
