"""The fused linear layer for few rows against separate operations in float32."""

from __future__ import annotations

import pytest
import torch
from helpers_triton import assert_close, dtypes, poison, randn

from minisgl.kernel.triton.linear import LinearConfig, fused_linear, fused_linear_reference

PARTS = [
    {},
    {"norm": True},
    {"residual": True, "bias": True},
    {"norm": True, "epilogue": "silu_and_mul"},
    {"norm": True, "epilogue": "silu_and_mul", "bias": True},
]


@pytest.mark.parametrize("rows", [1, 2, 16, 17])
@pytest.mark.parametrize("parts", PARTS, ids=lambda parts: "-".join(parts) or "plain")
def test_matches_separate_operations(rng, device, on_gpu, rows, parts):
    for dtype in dtypes(on_gpu):
        # K and N that are no multiple of a block on purpose
        outputs, inputs = (1040, 3072 + 64) if on_gpu else (20, 3 * 64 + 16)
        config = None if on_gpu else LinearConfig(block_n=16, block_k=64, num_warps=4)
        gated = parts.get("epilogue") == "silu_and_mul"
        w_rows = outputs * 2 if gated else outputs
        x = randn(rng, rows, inputs, dtype=dtype, device=device)
        weight = randn(rng, w_rows, inputs, dtype=dtype, device=device) / inputs**0.5
        arguments = {
            "bias": randn(rng, w_rows, dtype=dtype, device=device) if "bias" in parts else None,
            "norm": 1 + randn(rng, inputs, dtype=dtype, device=device) / 8 if "norm" in parts else None,
            "residual": randn(rng, rows, outputs, dtype=dtype, device=device) if "residual" in parts else None,
        }
        out = torch.empty(rows, outputs, dtype=dtype, device=device)
        poison(out)
        fused_linear(x, weight, eps=1e-6, epilogue=parts.get("epilogue", "none"), out=out, config=config, **arguments)
        wide = {name: None if tensor is None else tensor.float() for name, tensor in arguments.items()}
        reference = fused_linear_reference(
            x.float(), weight.float(), eps=1e-6, epilogue=parts.get("epilogue", "none"), **wide
        )
        assert_close(out, reference)


def test_adds_to_the_residual_in_place(rng, device, on_gpu):
    dtype = torch.bfloat16 if on_gpu else torch.float16
    size = 1024 if on_gpu else 64
    for rows in (1, 3):
        x = randn(rng, rows, 2 * size, dtype=dtype, device=device)
        weight = randn(rng, size, 2 * size, dtype=dtype, device=device) / size**0.5
        stream = randn(rng, rows, size, dtype=dtype, device=device)
        reference = fused_linear_reference(x.float(), weight.float(), residual=stream.float())
        assert fused_linear(x, weight, residual=stream, out=stream) is stream
        assert_close(stream, reference)


def test_row_does_not_depend_on_the_others(rng, device, on_gpu):
    dtype = torch.float32
    size = 1024 if on_gpu else 64
    x = randn(rng, 16, size, dtype=dtype, device=device)
    weight = randn(rng, size, size, dtype=dtype, device=device)
    norm = torch.ones(size, dtype=dtype, device=device)
    full = fused_linear(x, weight, norm=norm, eps=1e-6)
    assert torch.equal(fused_linear(x[3:6], weight, norm=norm, eps=1e-6), full[3:6])


def test_refuses_many_rows(device):
    with pytest.raises(ValueError, match="up to 64 rows"):
        fused_linear(torch.empty(65, 16, device=device), torch.empty(16, 16, device=device))
