"""Paged decode attention against float32 torch, in every way of sharing the work."""

from __future__ import annotations

import pytest
import torch
from helpers_triton import Paged, assert_close, dtypes, make_spec, poison, randn

from minisgl.kernel.ops import Ops
from minisgl.kernel.triton.decode_attention import DecodeConfig, DecodeWorkspace, FusedQKV, decode_attention

LENGTHS = [1, 37, 16, 90, 3]
GPU_LENGTHS = [1, 1000, 16, 4000, 517, 64, 65, 8191]


def run(paged, spec, q, workspace):
    out = torch.empty(
        len(paged.rows), spec.num_heads * spec.head_dim, dtype=paged.k_pool.dtype, device=paged.rows.device
    )
    poison(out, workspace.partial, workspace.stats)
    workspace.plan(spec.sliding_window, paged.seq_lens)
    decode_attention(q, paged.k_pool, paged.v_pool, paged.table, paged.rows, paged.seq_lens, spec, workspace, out)
    assert not workspace.counters.any()
    return out


def make_workspace(spec, lengths, dtype, device, on_gpu):
    small = DecodeConfig(tile=16, programs_per_sm=2, num_warps=4, num_stages=2)
    return DecodeWorkspace(
        len(lengths),
        spec.num_heads,
        spec.num_kv_heads,
        spec.head_dim,
        dtype,
        device,
        None if on_gpu else small,
    )


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 2, 64), (5, 1, 80)])
def test_matches_reference(rng, device, on_gpu, page_size, heads, kv_heads, head_dim):
    lengths = GPU_LENGTHS if on_gpu else LENGTHS
    for dtype in dtypes(on_gpu):
        paged = Paged.make(rng, lengths, page_size, kv_heads, head_dim, dtype, device)
        spec = make_spec(rng, heads, kv_heads, head_dim, dtype, device)
        q = randn(rng, len(lengths), heads, head_dim, dtype=dtype, device=device)
        workspace = make_workspace(spec, lengths, dtype, device, on_gpu)
        expected = paged.reference(q, [1] * len(lengths), spec)
        assert_close(run(paged, spec, q, workspace), expected)


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_head_dims_on_gpu_shapes(rng, device, on_gpu, head_dim):
    if not on_gpu and head_dim in (64, 80):
        pytest.skip("covered above")
    lengths = GPU_LENGTHS if on_gpu else [20]
    dtype = torch.bfloat16 if on_gpu else torch.float16
    paged = Paged.make(rng, lengths, 16, 2, head_dim, dtype, device)
    spec = make_spec(rng, 8, 2, head_dim, dtype, device)
    q = randn(rng, len(lengths), 8, head_dim, dtype=dtype, device=device)
    workspace = make_workspace(spec, lengths, dtype, device, on_gpu)
    assert_close(run(paged, spec, q, workspace), paged.reference(q, [1] * len(lengths), spec))


@pytest.mark.parametrize("window", [1, 16, 40])
def test_sliding_window(rng, device, on_gpu, window):
    paged = Paged.make(rng, LENGTHS, 16, 2, 64, torch.float32, device)
    spec = make_spec(rng, 4, 2, 64, torch.float32, device, window=window)
    q = randn(rng, len(LENGTHS), 4, 64, dtype=torch.float32, device=device)
    workspace = make_workspace(spec, LENGTHS, torch.float32, device, on_gpu)
    assert_close(run(paged, spec, q, workspace), paged.reference(q, [1] * len(LENGTHS), spec))


@pytest.mark.parametrize(("norm", "rotary_dim"), [(True, None), (False, 32)])
def test_fused_with_norm_rope_and_store(rng, device, on_gpu, norm, rotary_dim):
    """Starts from qkv; the new token's K and V are in the pool afterwards, and nothing else has changed."""
    lengths = GPU_LENGTHS if on_gpu else LENGTHS
    ops = Ops()
    for dtype in dtypes(on_gpu):
        paged = Paged.make(rng, lengths, 16, 2, 64, dtype, device)
        spec = make_spec(rng, 6, 2, 64, dtype, device, norm=norm, rotary_dim=rotary_dim, positions=8192)
        qkv = randn(rng, len(lengths), 10 * 64, dtype=dtype, device=device)
        slots = paged.last_slots()
        for pool in (paged.k_pool, paged.v_pool):
            pool.view(-1, 2, 64)[slots] = float("nan")
        before = paged.k_pool.clone(), paged.v_pool.clone()
        workspace = make_workspace(spec, lengths, dtype, device, on_gpu)
        out = run(paged, spec, FusedQKV(qkv, slots), workspace)

        q, k, v = qkv.view(-1, 10, 64).split([6, 2, 2], 1)
        if norm:
            q, k = ops.rms_norm(q, spec.q_norm, spec.norm_eps), ops.rms_norm(k, spec.k_norm, spec.norm_eps)
        positions = paged.seq_lens - 1
        q, k = ops.rope(q, positions, spec.cos_sin), ops.rope(k, positions, spec.cos_sin)
        for pool, old, new in ((paged.k_pool, before[0], k), (paged.v_pool, before[1], v)):
            assert_close(pool.view(-1, 2, 64)[slots], new)
            untouched = torch.ones(old.flatten(0, 1).shape[0], dtype=torch.bool, device=device)
            untouched[slots] = False
            assert torch.equal(pool.flatten(0, 1)[untouched].nan_to_num(), old.flatten(0, 1)[untouched].nan_to_num())
        assert_close(out, paged.reference(q, [1] * len(lengths), spec))


def test_one_long_request_is_shared_by_all_programs(rng, device, on_gpu):
    length = 20000 if on_gpu else 130
    paged = Paged.make(rng, [length], 16, 1, 64, torch.float32, device)
    spec = make_spec(rng, 2, 1, 64, torch.float32, device)
    workspace = make_workspace(spec, [length], torch.float32, device, on_gpu)
    workspace.plan(None, paged.seq_lens)
    assert workspace.plans[None][1] == min(workspace.num_programs, -(-length // workspace.config.tile))
    q = randn(rng, 1, 2, 64, dtype=torch.float32, device=device)
    assert_close(run(paged, spec, q, workspace), paged.reference(q, [1], spec))


def test_requests_without_length_at_the_end_are_left_out(rng, device, on_gpu):
    paged = Paged.make(rng, [40, 9, 1], 16, 1, 64, torch.float32, device)
    spec = make_spec(rng, 2, 1, 64, torch.float32, device)
    q = randn(rng, 3, 2, 64, dtype=torch.float32, device=device)
    workspace = make_workspace(spec, LENGTHS, torch.float32, device, on_gpu)
    expected = paged.reference(q, [1] * 3, spec)
    for left in (2, 0):
        lengths = paged.seq_lens.clone()
        paged.seq_lens = torch.where(torch.arange(3, device=device) < left, lengths, 0).int()
        out = run(paged, spec, q, workspace)
        paged.seq_lens = lengths
        assert torch.allclose(out[:left], expected[:left], atol=1e-5)
        assert out[left:].isnan().all()
