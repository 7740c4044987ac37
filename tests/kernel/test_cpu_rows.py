import pytest
import torch

from minisgl.kernel.ops import Ops

WIDTHS = [1, 7, 16, 64, 100, 576, 1031]


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("tokens", [1, 3, 70])
def test_rms_norm(kernels, tokens, width):
    x, weight = 3 * torch.randn(tokens, width), torch.randn(width)
    expected = Ops().rms_norm(x.double(), weight.double(), 1e-5).float()
    torch.testing.assert_close(kernels.rms_norm(x, weight, 1e-5), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("width", WIDTHS)
def test_add_rms_norm(kernels, width):
    x, residual, weight = torch.randn(40, width), torch.randn(40, width), torch.randn(width)
    norm, total = Ops().add_rms_norm(x, residual, weight, 1e-6)
    mine, stream = kernels.add_rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(stream, total)
    torch.testing.assert_close(mine, norm, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("width", WIDTHS)
def test_silu_and_mul(kernels, width):
    x = 20 * torch.randn(30, 2 * width)
    torch.testing.assert_close(kernels.silu_and_mul(x), Ops().silu_and_mul(x.double()).float(), rtol=1e-5, atol=1e-30)


def test_silu_at_the_ends_of_the_range(kernels):
    gate = torch.tensor(
        [[-1e38, -1000.0, -88.5, -87.0, -0.0, 0.0, 87.0, 88.5, 1000.0, 1e38, float("nan"), float("inf")]]
    )
    mine = kernels.silu_and_mul(torch.cat((gate, torch.ones_like(gate)), dim=1))
    torch.testing.assert_close(mine, torch.nn.functional.silu(gate), rtol=1e-5, atol=1e-30, equal_nan=True)


def test_rows_do_not_depend_on_each_other_or_on_threads(kernels, threads):
    x, residual, weight = torch.randn(70, 600), torch.randn(70, 600), torch.randn(600)

    def all_of(rows):
        a, b = kernels.add_rms_norm(x[rows].clone(), residual[rows].clone(), weight, 1e-5)
        return torch.cat((kernels.rms_norm(x[rows], weight, 1e-5), kernels.silu_and_mul(x[rows]), a, b), dim=1)

    whole = threads(2, lambda: all_of(slice(0, 70)))
    for i in (0, 33, 69):
        assert torch.equal(threads(1, lambda i=i: all_of(slice(i, i + 1))), whole[i : i + 1])


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "rotary"), [(9, 3, 64, 64), (4, 1, 80, 32), (2, 2, 10, 6)])
def test_rope_store(kernels, heads, kv_heads, dim, rotary, norm):
    ops, tokens = Ops(), 50
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * dim)
    angles = torch.rand(100, rotary // 2) * 6
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1)
    positions = torch.randint(100, (tokens,), dtype=torch.int32)
    slots = torch.randperm(80)[:tokens]
    keys, values = torch.full((80, kv_heads, dim), 7.0), torch.full((80, kv_heads, dim), 8.0)
    norms = (torch.randn(dim), torch.randn(dim), 1e-6) if norm else None

    q, k, v = qkv.view(tokens, -1, dim).split([heads, kv_heads, kv_heads], dim=1)
    if norms:
        q, k = ops.rms_norm(q, norms[0], norms[2]), ops.rms_norm(k, norms[1], norms[2])
    q, k = ops.rope(q, positions, cos_sin), ops.rope(k, positions, cos_sin)
    expected_keys, expected_values = keys.clone(), values.clone()
    expected_keys[slots], expected_values[slots] = k, v

    kernels.rope_store(qkv, heads, cos_sin, positions, slots, keys, values, norms)
    torch.testing.assert_close(qkv.view(tokens, -1, dim)[:, :heads], q, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(keys, expected_keys, rtol=1e-5, atol=1e-5)
    assert torch.equal(values, expected_values)
