"""Products of a few rows against torch in float32."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from helpers_triton import assert_close, dtypes, randn

from minisgl.kernel.ops import Ops
from minisgl.kernel.triton.few_rows import FewRowsConfig, few_rows_config, few_rows_linear, fixed_few_rows_config
from minisgl.kernel.triton.launch import power_of_2

OPS = Ops()


def config(on_gpu: bool, rows: int, parts: int = 1) -> FewRowsConfig:
    block_r = min(128, max(16, power_of_2(rows)))
    return FewRowsConfig(block_r, 64, 64, parts, 4, 3) if on_gpu else FewRowsConfig(block_r, 32, 32, parts, 4, 3)


@pytest.mark.parametrize("rows", [1, 2, 16, 17, 130])
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("aligned", [False, True], ids=["ragged", "aligned"])
def test_matches_separate_operations(rng, device, on_gpu, rows, gated, bias, aligned):
    if rows == 130 and not (on_gpu or aligned):
        pytest.skip("slow in the interpreter, and tells nothing that 17 rows do not")
    for dtype in dtypes(on_gpu)[1:]:
        outputs, inputs = (1024, 2048) if on_gpu else (64, 64)
        if not aligned:  # no multiples of a block
            outputs, inputs = outputs - 24, inputs + 16
        w_rows = 2 * outputs if gated else outputs
        x = randn(rng, rows, inputs + 8, dtype=dtype, device=device)[:, :inputs]
        weight = randn(rng, w_rows, inputs, dtype=dtype, device=device) / inputs**0.5
        shift = randn(rng, w_rows, dtype=dtype, device=device) if bias else None
        out = few_rows_linear(x, weight, bias=shift, gated=gated, config=config(on_gpu, rows))
        expected = F.linear(x.float(), weight.float(), None if shift is None else shift.float())
        assert_close(out, OPS.silu_and_mul(expected) if gated else expected)


@pytest.mark.parametrize("parts", [2, 3])
def test_parts_add_up(rng, device, on_gpu, parts):
    dtype = dtypes(on_gpu)[-1]
    outputs, inputs = (1024, 96 * 24) if on_gpu else (64, 96)
    x = randn(rng, 5, inputs, dtype=dtype, device=device)
    weight = randn(rng, outputs, inputs, dtype=dtype, device=device) / inputs**0.5
    out = few_rows_linear(x, weight, config=config(on_gpu, 5, parts))
    assert out.shape == (parts, 5, outputs)
    assert out.dtype == torch.float32
    share = inputs // parts
    for i, part in enumerate(out):
        here = slice(i * share, (i + 1) * share)
        assert_close(part, x[:, here].float() @ weight[:, here].float().T)


@pytest.mark.parametrize("aligned", [False, True], ids=["ragged", "aligned"])
def test_a_row_is_the_same_in_any_number_and_at_any_place(rng, device, on_gpu, aligned):
    """Bit for bit, with the one configuration for all."""
    outputs, inputs = (1024, 2048) if on_gpu else (64, 128)
    if not aligned:
        outputs, inputs = outputs - 24, inputs + 16
    for dtype in dtypes(on_gpu):
        x = randn(rng, 300 if on_gpu else 70, inputs, dtype=dtype, device=device)
        weight = randn(rng, outputs, inputs, dtype=dtype, device=device) / inputs**0.5
        bias = randn(rng, outputs, dtype=dtype, device=device)
        config = fixed_few_rows_config(outputs, dtype.itemsize)
        full = few_rows_linear(x, weight, bias=bias, config=config)
        assert_close(full, F.linear(x.float(), weight.float(), bias.float()))
        for some in (slice(0, 1), slice(3, 4), slice(5, 22), slice(60, None), torch.randperm(len(x))[:40].to(device)):
            assert torch.equal(few_rows_linear(x[some], weight, bias=bias, config=config), full[some])


def test_no_rows_at_all(device):
    x, weight = torch.empty(0, 96, device=device), torch.empty(32, 96, device=device)
    assert few_rows_linear(x, weight, config=fixed_few_rows_config(32, 4)).shape == (0, 32)


def test_refuses_parts_of_what_is_no_sum(device):
    x, weight = torch.empty(2, 96, device=device), torch.empty(32, 96, device=device)
    for arguments in ({"gated": True}, {"bias": torch.empty(32, device=device)}):
        with pytest.raises(ValueError, match="in 2 parts"):
            few_rows_linear(x, weight, config=config(False, 2, 2), **arguments)
    with pytest.raises(ValueError, match="96 inputs in 5 parts"):
        few_rows_linear(x, weight, config=config(False, 2, 5))


def test_serves_what_it_is_faster_for():
    def served(rows: int, outputs: int, inputs: int, **how: bool) -> int:
        """The parts, 0 where the library's product serves."""
        config = few_rows_config(rows, outputs, inputs, **{"gated": False, "in_parts": False} | how)
        return 0 if config is None else config.parts

    # Qwen3-0.6B: qkv, output, gate and up, down
    assert [served(rows, 4096, 1024) for rows in (2, 64, 65)] == [1, 1, 0]
    assert [served(rows, 1024, 2048, in_parts=True) for rows in (2, 128, 129)] == [8, 8, 0]
    assert [served(rows, 3072, 1024, gated=True) for rows in (2, 64, 65)] == [1, 1, 0]
    assert [served(rows, 1024, 3072, in_parts=True) for rows in (2, 128, 129)] == [8, 8, 0]
    # Its head, a router, any of Qwen3-14B, sizes that do not divide
    assert served(2, 151936, 1024) == served(2, 128, 2048) == served(2, 7168, 5120) == 0
    assert served(2, 5120, 5120, in_parts=True) == served(2, 960, 576) == 0
    # Every part is the same whole number of tiles of 64.
    assert served(2, 1024, 4 * 3 * 64, in_parts=True) == 4
