"""The page table in kernels: the slots of a tile of tokens, and the pages of all requests one after the other."""
# mypy: allow-untyped-defs, allow-incomplete-defs

import torch
import triton
import triton.language as tl

from .launch import Launcher, wait_for_previous

BLOCK = 1024


@triton.jit
def page_slots(table, tile, high, PAGE: tl.constexpr, TILE: tl.constexpr):
    """Slots (TILE) int32 of the tokens from ``tile`` on, of page 0 from ``high`` on."""
    if PAGE % TILE == 0:
        page = tl.load(table + tile // PAGE, mask=tile < high, other=0)
        return page * PAGE + tile % PAGE + tl.arange(0, TILE)
    token = tile + tl.arange(0, TILE)
    return tl.load(table + token // PAGE, mask=token < high, other=0) * PAGE + token % PAGE


@triton.jit(do_not_specialize_on_alignment=["rows_ptr", "indptr_ptr"])
def _gather_kernel(
    table_ptr,
    rows_ptr,
    indptr_ptr,
    pages_ptr,
    TABLE_STRIDE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    request = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    wait_for_previous(PDL)
    row = tl.load(rows_ptr + request).to(tl.int64)
    start = tl.load(indptr_ptr + request)
    mask = column < tl.load(indptr_ptr + request + 1) - start
    tl.store(pages_ptr + start + column, tl.load(table_ptr + row * TABLE_STRIDE + column, mask=mask), mask=mask)


_launch_gather = Launcher(_gather_kernel)


def gather_pages(page_table: torch.Tensor, rows: torch.Tensor, indptr: torch.Tensor, pages: torch.Tensor) -> None:
    """Lists pages as FlashInfer wants them: ``pages[indptr[i] : indptr[i + 1]]`` is the beginning of row ``rows[i]``.

    ``page_table`` (rows, pages), ``rows`` (B), ``indptr`` (B + 1) and ``pages`` (indptr[B] at least) are int32. What is
    launched depends on B and the width of the page table alone.
    """
    _launch_gather(
        (len(rows), triton.cdiv(page_table.shape[1], BLOCK)),
        page_table,
        rows,
        indptr,
        pages,
        TABLE_STRIDE=page_table.stride(0),
        BLOCK=BLOCK,
        num_warps=4,
    )
