from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from minisgl.kernel.device import make_ops, make_pack
from minisgl.kernel.ops import Ops
from minisgl.kernel.weight import PlainWeight

CPU = torch.device("cpu")


def both() -> list[Ops]:
    """The plain operations, and those that serve float32 on this machine."""
    return [Ops(), make_ops(CPU, torch.float32)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_norm_equals_transformers_bit_for_bit(dtype: torch.dtype) -> None:
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    norm = LlamaRMSNorm(96, eps=1e-5).to(dtype)
    norm.weight.data.normal_(1, 0.5)
    x = torch.randn(11, 96, dtype=dtype) * 3
    weight = norm.weight.detach()
    assert torch.equal(Ops().rms_norm(x, weight, 1e-5), norm(x))
    added, total = Ops().add_rms_norm(x.clone(), 2 * x, weight, 1e-5)
    assert torch.equal(total, 3 * x) or dtype != torch.float32
    assert torch.equal(added, norm(total))


@pytest.mark.parametrize("ops", both(), ids=["torch", "device"])
def test_against_formulas(ops: Ops) -> None:
    x, residual, weight = torch.randn(5, 40), torch.randn(5, 40), torch.randn(40)
    total = x + residual
    expected = total / (total.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * weight
    normed, stream = ops.add_rms_norm(x.clone(), residual.clone(), weight, 1e-6)
    torch.testing.assert_close(normed, expected)
    torch.testing.assert_close(stream, total)
    torch.testing.assert_close(ops.rms_norm(total, weight, 1e-6), expected)
    torch.testing.assert_close(ops.silu_and_mul(x), F.silu(x[:, :20]) * x[:, 20:])


@pytest.mark.parametrize("ops", both(), ids=["torch", "device"])
@pytest.mark.parametrize("size", [24, 576, 5120])
def test_rows_do_not_see_each_other(ops: Ops, size: int) -> None:
    x, weight = torch.randn(33, size), torch.randn(size)
    table = torch.randn(50, 8)
    positions = torch.arange(33, dtype=torch.int32)
    heads = x.view(33, -1, 8)
    for row in (0, 7, 32):
        one = slice(row, row + 1)
        assert torch.equal(ops.rms_norm(x, weight, 1e-6)[one], ops.rms_norm(x[one], weight, 1e-6))
        assert torch.equal(ops.silu_and_mul(x)[one], ops.silu_and_mul(x[one]))
        assert torch.equal(ops.rope(heads, positions, table)[one], ops.rope(heads[one], positions[one], table))


@pytest.mark.parametrize("pack", [PlainWeight, make_pack(CPU, torch.float32)], ids=["plain", "device"])
def test_weights(pack: type[PlainWeight]) -> None:
    matrix, bias, x = torch.randn(37, 24), torch.randn(37), torch.randn(5, 24)
    torch.testing.assert_close(pack(matrix.clone(), bias).matmul(x), x @ matrix.T + bias)
    torch.testing.assert_close(pack(matrix.clone(), None).matmul(x[:0]), torch.empty(0, 37))
    ids = torch.tensor([36, 0, 5, 5], dtype=torch.int32)
    assert torch.equal(pack(matrix.clone(), None).lookup(ids), matrix[ids])


def test_half_precision_on_a_cpu_is_plain_torch() -> None:
    assert type(make_ops(CPU, torch.bfloat16)) is Ops
    assert make_pack(CPU, torch.bfloat16) is PlainWeight
