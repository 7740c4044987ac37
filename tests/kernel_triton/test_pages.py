"""The list of all pages against slices of the page table."""

from __future__ import annotations

import pytest
import torch

from minisgl.kernel.triton.pages import BLOCK, gather_pages


@pytest.mark.parametrize("width", [1, 20, 2 * BLOCK + 3])
def test_pages_lie_one_request_after_the_other(rng, device, width):
    table = torch.randint(0, 5000, (7, width), generator=rng).int().to(device)
    rows = torch.randperm(7, generator=rng)[:5].int().to(device)
    counts = torch.randint(0, width + 1, (5,), generator=rng)
    counts[1] = width
    indptr = torch.cat((torch.zeros(1), counts.cumsum(0))).int().to(device)
    pages = torch.full((int(counts.sum()) + 2,), -1, dtype=torch.int32, device=device)
    gather_pages(table, rows, indptr, pages)
    expected = [table[row, :count] for row, count in zip(rows.tolist(), counts.tolist(), strict=True)]
    assert torch.equal(pages[:-2], torch.cat(expected))
    assert (pages[-2:] == -1).all()
