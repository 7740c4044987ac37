from dataclasses import dataclass

import pytest
import torch

from minisgl.attention.torch_reference import attend


@dataclass
class Request:
    """All tokens of one request: q (L, heads, dim), k and v (L, kv_heads, dim)."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


def make_request(length, heads, kv_heads, dim):
    return Request(
        torch.randn(length, heads, dim), torch.randn(length, kv_heads, dim), torch.randn(length, kv_heads, dim)
    )


def run(kernels, parts, page_size, window=None, seed=0):
    """One step over ``parts`` of (request, cached, new), each on random pages of a pool that is NaN elsewhere."""
    generator = torch.Generator().manual_seed(seed)
    lengths = [cached + new for _, cached, new in parts]
    pages_of = [-(-length // page_size) for length in lengths]
    _, kv_heads, dim = parts[0][0].k.shape
    num_pages = sum(pages_of) + 5
    order = torch.randperm(num_pages, generator=generator, dtype=torch.int32)
    keys = torch.full((num_pages, page_size, kv_heads, dim), torch.nan)
    values = keys.clone()
    # Entries past the end of a request are stale.
    table = torch.full((len(parts) + 2, max(pages_of) + 3), 2**30, dtype=torch.int32)
    rows = torch.randperm(len(parts) + 2, generator=generator)[: len(parts)].int()
    for (request, _, _), row, count, length in zip(parts, rows, pages_of, lengths, strict=True):
        pages, order = order[:count], order[count:]
        table[row, :count] = pages
        position = torch.arange(length)
        slot = pages[position // page_size] * page_size + position % page_size
        keys.flatten(0, 1)[slot] = request.k[:length]
        values.flatten(0, 1)[slot] = request.v[:length]
    q = torch.cat([request.q[cached : cached + new] for request, cached, new in parts])
    cached = torch.tensor([cached for _, cached, _ in parts], dtype=torch.int32)
    cu_new = torch.tensor([0] + [new for _, _, new in parts]).cumsum(0).int()
    out = kernels.attention(q, keys, values, table, rows, cached, cu_new, dim**-0.5, window)
    return list(out.split([new for _, _, new in parts]))


def expected(request, cached, new, window=None):
    q, k, v = (t.double() for t in (request.q, request.k, request.v))
    length = cached + new
    scale = q.shape[2] ** -0.5
    return attend(q[cached:length], k[:length], v[:length], scale, window).flatten(1).float()


def check(kernels, shape, page_size, window):
    parts = [
        (make_request(length + new, *shape), length, new)
        for length, new in [(0, 1), (63, 1), (64, 1), (511, 1), (0, 7), (0, 130), (250, 20), (600, 3)]
    ]
    for part, out in zip(parts, run(kernels, parts, page_size, window), strict=True):
        torch.testing.assert_close(out, expected(*part, window), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize("window", [None, 1, 50, 300])
def test_pages_and_windows(kernels, window, page_size):
    check(kernels, (9, 3, 64), page_size, window)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"), [(2, 2, 128), (8, 1, 80), (4, 2, 96), (3, 1, 17), (60, 1, 32), (1, 1, 1)]
)
def test_shapes(kernels, heads, kv_heads, dim):
    for window in (None, 70):
        check(kernels, (heads, kv_heads, dim), 16, window)


@pytest.mark.parametrize("window", [None, 100])
def test_bits_do_not_depend_on_chunks_neighbours_pages_or_threads(kernels, threads, window):
    shape, length = (9, 3, 64), 700
    request, other = make_request(length, *shape), make_request(300, *shape)
    whole = threads(1, lambda: run(kernels, [(request, 0, length)], 16, window)[0])
    for page_size, chunk, count in [(1, 256, 2), (3, 100, 1), (16, 37, 2), (16, 699, 2)]:
        outs = []
        for start in range(0, length, chunk):
            parts = [(other, 299, 1), (request, start, min(chunk, length - start)), (other, 5, 250)]
            outs.append(threads(count, lambda p=parts, s=page_size: run(kernels, p, s, window, seed=1)[1]))
        assert torch.equal(torch.cat(outs), whole)
    for position in (0, 1, 63, 64, 255, 256, 511, 512, 699):
        for count in (1, 2, 3):
            one = threads(count, lambda p=position: run(kernels, [(request, p, 1)], 3, window, seed=2)[0])
            assert torch.equal(one[0], whole[position])


def test_scores_of_any_size(kernels):
    request = make_request(400, 4, 2, 64)
    request.q *= 100
    part = request, 100, 300
    torch.testing.assert_close(run(kernels, [part], 16)[0], expected(*part), rtol=1e-3, atol=1e-3)


def test_strided_queries(kernels):
    request = make_request(40, 4, 2, 64)
    plain = run(kernels, [(request, 0, 40)], 16)[0]
    request.q = torch.cat((request.q, torch.full((40, 3, 64), torch.nan)), dim=1)[:, :4]
    keys, values = request.k.view(10, 4, 2, 64), request.v.view(10, 4, 2, 64)
    table = torch.arange(10, dtype=torch.int32)[None]
    zero = torch.zeros(1, dtype=torch.int32)
    out = kernels.attention(request.q, keys, values, table, zero, zero, torch.tensor([0, 40]).int(), 0.125)
    assert torch.equal(out, plain)


def test_nan_stays_in_its_row(kernels):
    request = make_request(300, 4, 2, 64)
    clean = run(kernels, [(request, 0, 300)], 16)[0]
    request.q[150] = torch.nan
    out = run(kernels, [(request, 0, 300)], 16)[0]
    assert out[150].isnan().all()
    assert torch.equal(torch.cat((out[:150], out[151:])), torch.cat((clean[:150], clean[151:])))


def test_an_empty_step(kernels):
    empty = torch.zeros(0, dtype=torch.int32)
    pool = torch.zeros(2, 4, 1, 8)
    table, zero = torch.zeros(1, 2, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    assert kernels.attention(torch.zeros(0, 2, 8), pool, pool, table, empty, empty, zero, 1.0).shape == (0, 16)
