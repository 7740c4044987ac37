"""Ids and slots of a step's tokens against torch."""

from __future__ import annotations

import pytest
import torch

from minisgl.attention.forward_batch import token_slots
from minisgl.kernel.triton.tokens import place_tokens


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
