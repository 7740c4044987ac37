"""What stands before the first layer of a step and after its sampling, in as few launches as there can be.

The references are the methods of :class:`minisgl.engine.model_runner.DeviceState` in torch.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs

import torch
import triton
import triton.language as tl

from .launch import Launcher, wait_for_previous

BLOCK = 128


@triton.jit(
    do_not_specialize=["num_tokens"],
    do_not_specialize_on_alignment=["input_ids_ptr", "rows_ptr", "positions_ptr"],
)
def _place_kernel(
    input_ids_ptr,
    rows_ptr,
    positions_ptr,
    table_ptr,
    last_token_ptr,
    ids_ptr,
    slots_ptr,
    num_tokens,
    TABLE_STRIDE: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = token < num_tokens
    wait_for_previous(PDL)
    row = tl.load(rows_ptr + token, mask=mask, other=0).to(tl.int64)
    position = tl.load(positions_ptr + token, mask=mask, other=0)
    known = tl.load(input_ids_ptr + token, mask=mask, other=0)
    last = tl.load(last_token_ptr + row, mask=mask, other=0)
    page = tl.load(table_ptr + row * TABLE_STRIDE + position // PAGE, mask=mask, other=0)
    tl.store(ids_ptr + token, tl.where(known < 0, last, known), mask=mask)
    tl.store(slots_ptr + token, page.to(tl.int64) * PAGE + position % PAGE, mask=mask)


_launch_place = Launcher(_place_kernel)


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["index_ptr", "values_ptr"])
def _scatter_kernel(dest_ptr, index_ptr, values_ptr, count, BLOCK: tl.constexpr, PDL: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < count
    wait_for_previous(PDL)
    index = tl.load(index_ptr + i, mask=mask, other=0)
    value = tl.load(values_ptr + i, mask=mask, other=0)
    tl.store(dest_ptr + index, tl.maximum(value, 0), mask=mask)


_launch_scatter = Launcher(_scatter_kernel)


def scatter(dest: torch.Tensor, index: torch.Tensor, values: torch.Tensor) -> None:
    """``dest[index] = values``, with 0 for negative ones. ``dest`` (N) and ``values`` (T) are int32."""
    if len(index):
        grid = (triton.cdiv(len(index), BLOCK),)
        _launch_scatter(grid, dest, index, values, len(index), types=(index.dtype,), BLOCK=BLOCK, num_warps=4)


def place_tokens(
    input_ids: torch.Tensor,
    token_rows: torch.Tensor,
    positions: torch.Tensor,
    page_table: torch.Tensor,
    last_token: torch.Tensor,
    page_size: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids (T) int32, with the last token of the row in place of negative ones, and slots (T) int64 of T tokens.

    ``input_ids``, ``token_rows`` and ``positions`` are (T), ``page_table`` (rows, pages) and ``last_token`` (rows), all
    int32.
    """
    ids = torch.empty_like(input_ids)
    slots = torch.empty(input_ids.shape, dtype=torch.int64, device=input_ids.device)
    if len(ids):
        _launch_place(
            (triton.cdiv(len(ids), BLOCK),),
            input_ids,
            token_rows,
            positions,
            page_table,
            last_token,
            ids,
            slots,
            len(ids),
            TABLE_STRIDE=page_table.stride(0),
            PAGE=page_size,
            BLOCK=BLOCK,
            num_warps=4,
        )
    return ids, slots
