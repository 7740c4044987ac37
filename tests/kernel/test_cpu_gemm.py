from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

SHAPES = [(1, 1), (7, 5), (32, 16), (33, 100), (64, 576), (960, 64), (100, 2049), (31, 4100)]


def check(kernels, rows, cols, tokens):
    matrix, bias, x = torch.randn(rows, cols), torch.randn(rows), torch.randn(tokens, cols)
    exact = x.double() @ matrix.double().T
    size = x.abs() @ matrix.abs().T
    assert ((kernels.pack(matrix).matmul(x) - exact).abs() < 1e-6 * size).all()
    assert ((kernels.pack(matrix, bias).matmul(x) - exact - bias).abs() < 1e-6 * (size + bias.abs())).all()


@pytest.mark.parametrize(("rows", "cols"), SHAPES)
def test_product(kernels, rows, cols):
    for tokens in (1, 2, 5, 6, 7, 12, 13, 14, 25, 33, 70):
        check(kernels, rows, cols, tokens)


def test_many_rows_take_several_blocks(kernels):
    check(kernels, 75, 2500, 300)


@pytest.mark.parametrize(("rows", "cols"), [(100, 77), (75, 2500)])
def test_a_row_does_not_depend_on_the_others(kernels, threads, rows, cols):
    weight = kernels.pack(torch.randn(rows, cols), torch.randn(rows))
    x = torch.randn(70, cols)
    alone = torch.cat([weight.matmul(row[None]) for row in x])
    for tokens in (2, 11, 33, 70):
        for count in (1, 2, 3):
            assert torch.equal(threads(count, lambda n=tokens: weight.matmul(x[-n:])), alone[-tokens:])


def test_calls_from_several_threads_at_once(kernels, threads):
    weight, x = kernels.pack(torch.randn(500, 300)), torch.randn(20, 300)
    alone = weight.matmul(x)
    with ThreadPoolExecutor(3) as pool:
        outs = threads(2, lambda: list(pool.map(lambda _: weight.matmul(x), range(60))))
    assert all(torch.equal(out, alone) for out in outs)


def test_strided_rows(kernels):
    matrix, x = torch.randn(40, 30), torch.randn(9, 90)
    for tokens in (1, 9):
        part = x[:tokens, 30:60]
        assert torch.equal(kernels.pack(matrix).matmul(part), kernels.pack(matrix).matmul(part.contiguous()))


def test_no_rows(kernels):
    assert kernels.pack(torch.randn(5, 4)).matmul(torch.randn(0, 4)).shape == (0, 5)


def test_lookup_returns_the_rows_that_were_packed(kernels):
    matrix = torch.randn(77, 50)
    ids = torch.randint(77, (40,), dtype=torch.int32)
    ids[:2] = torch.tensor([0, 76])
    assert torch.equal(kernels.pack(matrix).lookup(ids), matrix[ids])


def test_an_id_that_is_no_row_gets_nan_alone(kernels):
    matrix = torch.randn(77, 50)
    out = kernels.pack(matrix).lookup(torch.tensor([-1, 76, 77, 2**31 - 1, 5], dtype=torch.int32))
    assert out.isnan().all(dim=1).tolist() == [True, False, True, True, False]
    assert torch.equal(out[[1, 4]], matrix[[76, 5]])


def test_pack_reads_a_strided_matrix(kernels):
    wide = torch.randn(20, 64)
    x = torch.randn(3, 30)
    assert torch.equal(kernels.pack(wide[:, 10:40]).matmul(x), kernels.pack(wide[:, 10:40].contiguous()).matmul(x))


def test_what_the_kernels_cannot_read_is_an_error(kernels):
    weight = kernels.pack(torch.randn(8, 6))
    with pytest.raises(ValueError, match="float64"):
        weight.matmul(torch.randn(2, 6, dtype=torch.float64))
    with pytest.raises(ValueError, match="7 columns"):
        weight.matmul(torch.randn(2, 7))
    with pytest.raises(ValueError, match="strides"):
        weight.matmul(torch.randn(6, 2).T)
    with pytest.raises(ValueError, match="int32"):
        weight.lookup(torch.tensor([1]))
