"""Ragged paged prefill attention against float32 torch."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from helpers_triton import Paged, assert_close, dtypes, make_spec, poison, randn

from minisgl.kernel.triton.prefill_attention import PrefillConfig, plan_prefill, prefill_attention, prefill_config

SMALL = PrefillConfig(rows=16, tile=16, num_warps=4, num_stages=2)
# (tokens in the cache, new tokens): whole prompts, chunks, one new token, ends on and off the borders of tiles
MIXED = [(0, 19), (13, 7), (32, 16), (40, 1), (0, 1)]
GPU_MIXED = [(0, 700), (513, 300), (1024, 128), (2000, 1), (0, 1), (64, 1024), (5, 3)]


def ints(values, device):
    return torch.tensor(values, dtype=torch.int32, device=device)


def run(paged, spec, q, cached, new, config):
    out = torch.empty(q.shape[0], spec.num_heads * spec.head_dim, dtype=q.dtype, device=q.device)
    poison(out)
    device = q.device
    group = spec.num_heads // spec.num_kv_heads
    blocks = torch.from_numpy(plan_prefill(np.int32(cached), np.int32(new), group, config.rows)).to(device)
    cu_new = torch.from_numpy(np.cumsum([0, *new]).astype(np.int32)).to(device)
    prefill_attention(
        q, paged.k_pool, paged.v_pool, paged.table, paged.rows, paged.seq_lens, cu_new, blocks, spec, out, config
    )
    return out


def check(rng, device, on_gpu, shape, page_size, dtype, window=None, mix=None):
    heads, kv_heads, head_dim = shape
    mix = mix or (GPU_MIXED if on_gpu else MIXED)
    cached, new = [c for c, _ in mix], [n for _, n in mix]
    paged = Paged.make(rng, [c + n for c, n in mix], page_size, kv_heads, head_dim, dtype, device)
    spec = make_spec(rng, heads, kv_heads, head_dim, dtype, device, window=window)
    q = randn(rng, sum(new), heads, head_dim, dtype=dtype, device=device)
    config = prefill_config(head_dim, dtype.itemsize) if on_gpu else SMALL
    assert_close(run(paged, spec, q, cached, new, config), paged.reference(q, new, spec))


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("shape", [(4, 2, 64), (5, 1, 80)])
def test_mixed_requests(rng, device, on_gpu, page_size, shape):
    for dtype in dtypes(on_gpu):
        check(rng, device, on_gpu, shape, page_size, dtype)


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_head_dims(rng, device, on_gpu, head_dim):
    check(rng, device, on_gpu, (8, 2, head_dim), 16, torch.bfloat16 if on_gpu else torch.float16, mix=[(3, 20)])


@pytest.mark.parametrize("window", [1, 5, 16, 33])
def test_sliding_window(rng, device, on_gpu, window):
    check(rng, device, on_gpu, (4, 2, 64), 16, torch.float32, window=window * (16 if on_gpu else 1))


@pytest.mark.parametrize("half", [False, True], ids=["float32", "half"])
@pytest.mark.parametrize(("page_size", "window"), [(1, None), (3, None), (16, None), (1, 9), (3, 40), (16, 1)])
def test_a_token_is_the_same_in_whatever_chunk(rng, device, on_gpu, page_size, window, half):
    """Bit for bit: alone, at the end of a chunk, in the middle of a large one, and in other company."""
    big, heads, kv_heads = 16 if on_gpu else 1, 3, 1
    dtype = dtypes(on_gpu)[-1 if half else 0]
    length, other = 75 * big, 40 * big
    paged = Paged.make(rng, [length, other], page_size, kv_heads, 64, dtype, device)
    spec = make_spec(rng, heads, kv_heads, 64, dtype, device, window=window and window * big)
    q = randn(rng, length, heads, 64, dtype=dtype, device=device)
    neighbour = randn(rng, 5, heads, 64, dtype=dtype, device=device)
    config = prefill_config(64, dtype.itemsize, singles=True) if on_gpu else SMALL

    def chunk(start, end, crowd=False):
        """Of the first request, attended for while its later tokens are still to come."""
        rows, seq_lens = paged.rows.flip(0), ints([other, end], device)
        if not crowd:
            alone = replace(paged, rows=rows[1:], seq_lens=seq_lens[1:])
            return run(alone, spec, q[start:end], [start], [end - start], config)
        queries = torch.cat((neighbour, q[start:end]))
        both = replace(paged, rows=rows, seq_lens=seq_lens)
        return run(both, spec, queries, [other - 5, start], [5, end - start], config)[5:]

    whole = chunk(0, length)
    assert_close(whole, replace(paged, rows=paged.rows[:1]).reference(q, [length], spec))
    borders = [0, 1, 2, 15, 17, 32, 33, 48, 61, 65, 75]
    for start, end in pairwise(border * big for border in borders):
        assert torch.equal(chunk(start, end), whole[start:end])
        assert torch.equal(chunk(end - 1, end, crowd=True), whole[end - 1 : end])
    for start, end in ((3 * big + 1, 70 * big), (40 * big - 1, 64 * big)):
        assert torch.equal(chunk(start, end, crowd=True), whole[start:end])


def test_requests_without_a_length_are_left_alone(rng, device):
    """They fill up a CUDA graph of single tokens."""
    paged = Paged.make(rng, [40, 9, 1], 16, 1, 64, torch.float32, device)
    spec = make_spec(rng, 2, 1, 64, torch.float32, device)
    q = randn(rng, 3, 2, 64, dtype=torch.float32, device=device)
    expected = paged.reference(q, [1] * 3, spec)
    for left in (2, 0):
        lengths = torch.where(torch.arange(3, device=device) < left, paged.seq_lens, 0).int()
        out = run(replace(paged, seq_lens=lengths), spec, q, [0] * 3, [1] * 3, SMALL)
        assert torch.allclose(out[:left], expected[:left], atol=1e-5)
        assert out[left:].isnan().all()


def test_plan_covers_every_row_once_and_starts_with_the_longest():
    random = np.random.default_rng()
    new = random.integers(1, 300, 20).astype(np.int32)
    cached = random.integers(0, 1000, 20).astype(np.int32)
    group, rows = 5, 128
    request, first = plan_prefill(cached, new, group, rows)
    seen = {(r, row) for r, f in zip(request, first, strict=True) for row in range(f, min(f + rows, new[r] * group))}
    assert seen == {(r, row) for r in range(20) for row in range(new[r] * group)}
    assert len(set(zip(request, first, strict=True))) == len(request)
    keys = cached[request] + np.minimum((first + rows) // group, new[request])
    assert (np.diff(keys) <= 0).all()
