"""Norms, the gated activation, and norm + rope + store, against torch in float32."""

from __future__ import annotations

import pytest
import torch
from helpers_triton import assert_close, dtypes, make_spec, randn

from minisgl.kernel.ops import Ops
from minisgl.kernel.triton.activation import silu_and_mul
from minisgl.kernel.triton.norm import add_rms_norm, rms_norm
from minisgl.kernel.triton.rope import norm_rope_store

OPS = Ops()


@pytest.mark.parametrize("size", [64, 576, 5120])
@pytest.mark.parametrize("rows", [1, 5])
def test_rms_norm(rng, device, on_gpu, rows, size):
    for dtype in dtypes(on_gpu):
        x = randn(rng, rows, size, dtype=dtype, device=device)
        weight = randn(rng, size, dtype=dtype, device=device)
        assert_close(rms_norm(x, weight, 1e-6), OPS.rms_norm(x.float(), weight.float(), 1e-6))


def test_rms_norm_of_strided_heads(rng, device, on_gpu):
    for dtype in dtypes(on_gpu):
        q = randn(rng, 3, 7, 48, dtype=dtype, device=device)[:, 2:5]
        weight = randn(rng, 48, dtype=dtype, device=device)
        assert_close(rms_norm(q, weight, 1e-6), OPS.rms_norm(q.float(), weight.float(), 1e-6))


def test_rounds_where_torch_rounds(rng, device, on_gpu):
    """In half precision the result is torch's, up to the last bit of a few elements."""
    for dtype in dtypes(on_gpu)[1:]:
        x, residual = (randn(rng, 4, 256, dtype=dtype, device=device) for _ in range(2))
        weight = randn(rng, 256, dtype=dtype, device=device)
        expected, expected_sum = OPS.add_rms_norm(x, residual.clone(), weight, 1e-6)
        out, total = add_rms_norm(x, residual, weight, 1e-6)
        assert torch.equal(total, expected_sum)
        assert (out != expected).float().mean() < 0.02
        assert_close(out, expected)


@pytest.mark.parametrize("rows", [1, 6])
def test_add_rms_norm_updates_the_residual(rng, device, on_gpu, rows):
    for dtype in dtypes(on_gpu):
        x, residual = (randn(rng, rows, 576, dtype=dtype, device=device) for _ in range(2))
        weight = randn(rng, 576, dtype=dtype, device=device)
        expected, expected_sum = OPS.add_rms_norm(x.float(), residual.float(), weight.float(), 1e-5)
        out, total = add_rms_norm(x, residual, weight, 1e-5)
        assert total is residual
        assert_close(total, expected_sum)
        assert_close(out, expected)


@pytest.mark.parametrize("rows", [1, 6])
def test_add_rms_norm_adds_up_the_parts_first(rng, device, on_gpu, rows):
    for dtype in dtypes(on_gpu):
        parts = randn(rng, 3, rows, 576, dtype=torch.float32, device=device)
        residual = randn(rng, rows, 576, dtype=dtype, device=device)
        weight = randn(rng, 576, dtype=dtype, device=device)
        expected, expected_sum = OPS.add_rms_norm(parts, residual.float(), weight.float(), 1e-5)
        out, total = add_rms_norm(parts, residual, weight, 1e-5)
        assert out.dtype == total.dtype == dtype
        assert_close(total, expected_sum)
        assert_close(out, expected)


@pytest.mark.parametrize(("rows", "size"), [(1, 1536), (5, 40)])
def test_silu_and_mul(rng, device, on_gpu, rows, size):
    for dtype in dtypes(on_gpu):
        x = randn(rng, rows, 2 * size, dtype=dtype, device=device)
        assert_close(silu_and_mul(x), OPS.silu_and_mul(x.float()))


@pytest.mark.parametrize("tokens", [1, 70])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "norm", "rotary"),
    [(4, 2, 64, True, None), (3, 1, 80, False, 32), (5, 1, 96, True, 96)],
)
def test_norm_rope_store(rng, device, on_gpu, tokens, heads, kv_heads, dim, norm, rotary):
    for dtype in dtypes(on_gpu):
        spec = make_spec(rng, heads, kv_heads, dim, dtype, device, norm=norm, rotary_dim=rotary, positions=200)
        qkv = randn(rng, tokens, (heads + 2 * kv_heads) * dim + 8, dtype=dtype, device=device)[:, :-8]
        positions = torch.randint(0, 200, (tokens,), generator=rng).to(device, torch.int32)
        slots = torch.randperm(3 * tokens, generator=rng)[:tokens].to(device)
        pools = [torch.full((3 * tokens, 1, kv_heads, dim), float("nan"), dtype=dtype, device=device) for _ in range(2)]
        q = norm_rope_store(qkv, spec, *pools, positions, slots)

        q_in, k_in, v_in = qkv.unflatten(1, (-1, dim)).float().split([heads, kv_heads, kv_heads], 1)
        if norm:
            q_in = OPS.rms_norm(q_in, spec.q_norm.float(), spec.norm_eps)
            k_in = OPS.rms_norm(k_in, spec.k_norm.float(), spec.norm_eps)
        assert_close(q, OPS.rope(q_in, positions, spec.cos_sin))
        assert_close(pools[0][slots, 0], OPS.rope(k_in, positions, spec.cos_sin))
        assert torch.equal(pools[1][slots, 0], v_in.to(dtype))
        for pool in pools:
            untouched = torch.ones(3 * tokens, dtype=torch.bool, device=device)
            untouched[slots] = False
            assert pool[untouched].isnan().all()


def test_no_rows_at_all(device):
    x = torch.empty(0, 64, device=device)
    weight = torch.ones(64, device=device)
    assert rms_norm(x, weight, 1e-6).shape == (0, 64)
    assert silu_and_mul(x).shape == (0, 32)
