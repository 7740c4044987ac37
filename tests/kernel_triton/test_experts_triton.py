"""Routing, grouped products and their sum against the torch experts."""

from __future__ import annotations

import pytest
import torch
from helpers_triton import assert_close, dtypes, randn

from minisgl.kernel.ops import Ops
from minisgl.kernel.triton.grouped_gemm import GroupedConfig, grouped_gemm, most_blocks
from minisgl.kernel.triton.moe_routing import assign, choose
from minisgl.kernel.triton.moe_routing import route as triton_route
from minisgl.kernel.weight import PlainWeight
from minisgl.moe.base import route
from minisgl.moe.torch_experts import TorchExperts
from minisgl.moe.triton_experts import DeterministicTritonExperts, TritonExperts


def shapes(on_gpu):
    """(experts, hidden, inner)"""
    return (128, 2048, 768) if on_gpu else (6, 48, 20)


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("tokens", [1, 5, 130])
def test_routing(rng, device, normalise, tokens):
    num_experts, top_k = 12, 3
    logits = randn(rng, tokens, num_experts, dtype=torch.float32, device=device)
    counts = torch.zeros(num_experts, dtype=torch.int32, device=device)
    weights, members = triton_route(logits, top_k, normalise, counts, torch.float32)
    expected, experts = route(logits, top_k, normalise)
    torch.testing.assert_close(weights, expected)
    assert counts.tolist() == experts.flatten().bincount(minlength=num_experts).tolist()
    for expert in range(num_experts):
        pairs = (experts.flatten() == expert).nonzero()[:, 0]
        assert sorted(members[expert, : counts[expert]].tolist()) == pairs.tolist()


def test_routing_of_nan_stays_in_bounds(device):
    logits = torch.full((2, 6), float("nan"), device=device)
    counts = torch.zeros(6, dtype=torch.int32, device=device)
    triton_route(logits, 2, True, counts, torch.float32)
    assert counts.sum() == 4


@pytest.mark.parametrize("tokens", [1, 3, 40])
def test_experts(rng, device, on_gpu, tokens):
    num_experts, hidden, inner = shapes(on_gpu)
    top_k = 8 if on_gpu else 2
    for dtype in dtypes(on_gpu):
        x = randn(rng, tokens * (16 if on_gpu else 1), hidden, dtype=dtype, device=device)
        gate_up = randn(rng, num_experts, 2 * inner, hidden, dtype=dtype, device=device) / hidden**0.5
        down = randn(rng, num_experts, hidden, inner, dtype=dtype, device=device) / inner**0.5
        logits = randn(rng, x.shape[0], num_experts, dtype=torch.float32, device=device)
        experts = TritonExperts(gate_up, down, Ops(), PlainWeight)
        weights, chosen = route(logits, top_k, True)
        expected = TorchExperts(gate_up.float(), down.float(), Ops(), PlainWeight).forward(x.float(), weights, chosen)
        for _ in range(2):  # the first call leaves its counters ready for the second
            assert_close(experts.forward(x, weights.to(dtype), chosen), expected, factor=1.5)
            assert_close(experts.forward_routed(x, logits, top_k, True), expected, factor=1.5)


@pytest.mark.parametrize("added", [True, False], ids=["residual", "other-rank"])
def test_a_single_token_with_what_stands_around(rng, device, on_gpu, added):
    num_experts, hidden, size = (16, 2048, 768) if on_gpu else shapes(on_gpu)
    # The usual; a number of choices that is no power of two; an inner size beyond one tile
    for top_k, inner in ((8 if on_gpu else 2, size), (3, size), (2, 3072 if on_gpu else 1040)):
        for dtype in dtypes(on_gpu):
            x = randn(rng, 1, hidden, dtype=dtype, device=device)
            norm = 1 + randn(rng, hidden, dtype=dtype, device=device) / 8
            gate_up = randn(rng, num_experts, 2 * inner, hidden, dtype=dtype, device=device) / hidden**0.5
            down = randn(rng, num_experts, hidden, inner, dtype=dtype, device=device) / inner**0.5
            logits = randn(rng, 1, num_experts, dtype=torch.float32, device=device)
            residual = randn(rng, 1, hidden, dtype=dtype, device=device) if added else None
            experts = TritonExperts(gate_up, down, Ops(), PlainWeight)
            assert experts.fuses(1)
            assert not experts.fuses(2)
            out = experts.fused(x, logits, top_k, True, norm=norm, eps=1e-6, residual=residual)
            wide = TorchExperts(gate_up.float(), down.float(), Ops(), PlainWeight)
            normed = Ops().rms_norm(x.float(), norm.float(), 1e-6)
            expected = wide.forward_routed(normed, logits, top_k, True)
            assert_close(out, expected if residual is None else expected + residual.float(), factor=1.5)


def test_choices_of_nan_exist(device):
    weights, experts = choose(torch.full((1, 6), float("nan"), device=device), 2, True, torch.float32)
    assert sorted(experts.flatten().tolist()) == [0, 1]
    assert weights.shape == (1, 2)


def test_a_token_is_the_same_in_whatever_company(rng, device, on_gpu):
    """Bit for bit, although its place among the tokens of an expert is another every time."""
    num_experts, hidden, inner = shapes(on_gpu)
    top_k = 8 if on_gpu else 2
    for dtype in dtypes(on_gpu):
        x = randn(rng, 2000 if on_gpu else 150, hidden, dtype=dtype, device=device)
        gate_up = randn(rng, num_experts, 2 * inner, hidden, dtype=dtype, device=device) / hidden**0.5
        down = randn(rng, num_experts, hidden, inner, dtype=dtype, device=device) / inner**0.5
        logits = randn(rng, x.shape[0], num_experts, dtype=torch.float32, device=device)
        experts = DeterministicTritonExperts(gate_up, down, Ops(), PlainWeight)
        whole = experts.forward_routed(x, logits, top_k, True)
        weights, chosen = route(logits, top_k, True)
        expected = TorchExperts(gate_up.float(), down.float(), Ops(), PlainWeight).forward(x.float(), weights, chosen)
        assert_close(whole, expected, factor=1.5)
        for some in (slice(0, 1), slice(7, 8), slice(3, 20), torch.randperm(len(x))[:100].to(device)):
            assert torch.equal(experts.forward_routed(x[some], logits[some], top_k, True), whole[some])


@pytest.mark.parametrize("block_m", [16, 64, 128])
def test_blocks_of_every_size(rng, device, on_gpu, block_m):
    """All tokens on one expert, and some experts without any."""
    num_experts, hidden, inner = shapes(on_gpu)
    dtype = torch.bfloat16 if on_gpu else torch.float16
    tokens = 300 if on_gpu else 33
    x = randn(rng, tokens, hidden, dtype=dtype, device=device)
    gate_up = randn(rng, num_experts, 2 * inner, hidden, dtype=dtype, device=device) / hidden**0.5
    experts = torch.full((tokens, 1), 3, device=device)
    experts[:2] = 1
    counts = torch.zeros(num_experts, dtype=torch.int32, device=device)
    members = assign(experts, counts)
    config = GroupedConfig(block_m, 64 if on_gpu else 16, 64 if on_gpu else 16, num_warps=4, num_stages=2)
    out = grouped_gemm(x, gate_up, members, counts, tokens, gated=True, config=config)
    expected = torch.cat(
        [Ops().silu_and_mul(x[i : i + 1].float() @ gate_up[experts[i, 0]].float().T) for i in range(tokens)]
    )
    assert_close(out, expected)


def test_most_blocks_is_reached_and_never_passed():
    assert most_blocks(pairs=8, num_experts=128, block_m=16) == 8
    generator = torch.Generator()
    for _ in range(200):
        pairs, experts, block = (int(torch.randint(1, high, (1,), generator=generator)) for high in (400, 20, 64))
        counts = torch.randint(0, experts, (pairs,), generator=generator).bincount(minlength=experts)
        assert int((-(-counts // block)).sum()) <= most_blocks(pairs, experts, block)
