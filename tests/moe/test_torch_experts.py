from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from minisgl.kernel.cpu import load
from minisgl.kernel.device import make_pack
from minisgl.kernel.ops import Ops
from minisgl.kernel.weight import Pack, PlainWeight
from minisgl.moe.base import experts_class, route
from minisgl.moe.torch_experts import TorchExperts

EXPERTS, HIDDEN, INNER, TOP_K = 7, 24, 10, 3


def make(pack: Pack = PlainWeight) -> tuple[TorchExperts, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    gate_up, down = torch.randn(EXPERTS, 2 * INNER, HIDDEN), torch.randn(EXPERTS, HIDDEN, INNER)
    return TorchExperts(gate_up, down, Ops(), pack), gate_up, down


def choose(tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    logits = torch.randn(tokens, EXPERTS, generator=generator)
    weights, experts = route(logits, TOP_K, normalise=False)
    return torch.randn(tokens, HIDDEN, generator=generator), weights, experts


@pytest.mark.parametrize("tokens", [1, 2, 29])
def test_token_by_token(tokens: int) -> None:
    experts, gate_up, down = make()
    x, weights, chosen = choose(tokens)
    expected = torch.zeros(tokens, HIDDEN)
    for t in range(tokens):
        for weight, e in zip(weights[t], chosen[t], strict=True):
            gate, up = (gate_up[e] @ x[t]).chunk(2)
            expected[t] += weight * (down[e] @ (F.silu(gate) * up))
    torch.testing.assert_close(experts.forward(x, weights, chosen), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(load() is None, reason="no compiler for the CPU kernels")
def test_neighbours_change_no_bit() -> None:
    experts, _, _ = make(make_pack(torch.device("cpu"), torch.float32))
    x, weights, chosen = choose(40)
    whole = experts.forward(x, weights, chosen)
    some = torch.tensor([31, 2, 17])
    assert torch.equal(experts.forward(x[some], weights[some], chosen[some]), whole[some])


def test_route() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0, -1.0]], dtype=torch.bfloat16)
    probabilities = logits.float().softmax(-1)[0]
    weights, experts = route(logits, 2, normalise=False)
    assert weights.dtype == torch.float32
    assert experts.tolist() == [[1, 2]]
    torch.testing.assert_close(weights[0], probabilities[[1, 2]])
    normed, _ = route(logits, 2, normalise=True)
    torch.testing.assert_close(normed[0], probabilities[[1, 2]] / probabilities[[1, 2]].sum())


def test_registry() -> None:
    assert experts_class("torch") is TorchExperts
    with pytest.raises(ValueError, match="torch"):
        experts_class("magic")
