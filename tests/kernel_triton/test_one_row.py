"""The fused linear layer of a single row against separate operations in float32."""

from __future__ import annotations

import pytest
import torch
from helpers_triton import assert_close, dtypes, randn

from minisgl.kernel.triton.one_row import OneRowConfig, one_row_linear, one_row_reference

PARTS = [
    {},
    {"norm"},
    {"residual", "bias"},
    {"norm", "gated"},
    {"norm", "gated", "bias"},
]


@pytest.mark.parametrize("parts", PARTS, ids=lambda parts: "-".join(sorted(parts)) or "plain")
def test_matches_separate_operations(rng, device, on_gpu, parts):
    for dtype in dtypes(on_gpu):
        # K and N that are no multiple of a block on purpose
        outputs, inputs = (1040, 3072 + 64) if on_gpu else (20, 3 * 64 + 16)
        config = None if on_gpu else OneRowConfig(block_n=16, block_k=64)
        gated = "gated" in parts
        w_rows = outputs * 2 if gated else outputs
        x = randn(rng, 1, inputs, dtype=dtype, device=device)
        weight = randn(rng, w_rows, inputs, dtype=dtype, device=device) / inputs**0.5
        arguments = {
            "bias": randn(rng, w_rows, dtype=dtype, device=device) if "bias" in parts else None,
            "norm": 1 + randn(rng, inputs, dtype=dtype, device=device) / 8 if "norm" in parts else None,
            "residual": randn(rng, 1, outputs, dtype=dtype, device=device) if "residual" in parts else None,
        }
        out = one_row_linear(x, weight, eps=1e-6, gated=gated, config=config, **arguments)
        wide = {name: None if tensor is None else tensor.float() for name, tensor in arguments.items()}
        assert_close(out, one_row_reference(x.float(), weight.float(), eps=1e-6, gated=gated, **wide))


@pytest.mark.parametrize("gated", [True, False], ids=["gated", "plain"])
def test_a_matrix_for_each_choice(rng, device, on_gpu, gated):
    for dtype in dtypes(on_gpu):
        outputs, inputs = (776, 2048) if on_gpu else (20, 3 * 64 + 16)
        config = None if on_gpu else OneRowConfig(block_n=16, block_k=64)
        x = randn(rng, 1, inputs, dtype=dtype, device=device)
        norm = 1 + randn(rng, inputs, dtype=dtype, device=device) / 8
        weight = randn(rng, 7, outputs * (2 if gated else 1), inputs, dtype=dtype, device=device) / inputs**0.5
        experts = torch.tensor([[6, 0, 3]], dtype=torch.int32, device=device)
        how = {"eps": 1e-6, "gated": gated, "experts": experts}
        out = one_row_linear(x, weight, norm=norm, config=config, **how)
        assert_close(out, one_row_reference(x.float(), weight.float(), norm=norm.float(), **how))


def test_refuses_experts_with_what_they_have_not(device):
    x, weight = torch.empty(1, 16, device=device), torch.empty(4, 16, 16, device=device)
    with pytest.raises(ValueError, match="neither bias nor residual"):
        one_row_linear(x, weight, residual=x, experts=torch.zeros(1, 2, dtype=torch.int32, device=device))


def test_refuses_more_rows(device):
    with pytest.raises(ValueError, match="one row, not 2"):
        one_row_linear(torch.empty(2, 16, device=device), torch.empty(16, 16, device=device))
