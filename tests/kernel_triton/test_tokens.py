"""Ids and slots of a step's tokens against torch."""

from __future__ import annotations

import pytest
import torch

from minisgl.attention.forward_batch import token_slots
from minisgl.kernel.triton.tokens import place_tokens, scatter


@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize("tokens", [0, 1, 128, 301])
def test_ids_and_slots(rng, device, page_size, tokens):
    def draw(low, high, *shape):
        return torch.randint(low, high, shape, generator=rng).to(device, torch.int32)

    table, last = draw(0, 5000, 9, 20), draw(0, 900, 9)
    ids, rows, positions = draw(-1, 4, tokens), draw(0, 9, tokens), draw(0, 20 * page_size, tokens)
    found, slots = place_tokens(ids, rows, positions, table, last, page_size)
    assert torch.equal(found, torch.where(ids < 0, last[rows], ids))
    assert torch.equal(slots, token_slots(table, rows, positions, page_size))
    assert slots.dtype == torch.int64


@pytest.mark.parametrize("count", [0, 1, 128, 301])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_scatter(rng, device, count, dtype):
    dest = torch.full((500,), 7, dtype=torch.int32, device=device)
    index = torch.randperm(500, generator=rng)[:count].to(device, dtype)
    values = torch.randint(-3, 900, (count,), generator=rng).to(device, torch.int32)
    expected = dest.clone()
    expected[index.long()] = values.clamp(min=0)
    scatter(dest, index, values)
    assert torch.equal(dest, expected)
