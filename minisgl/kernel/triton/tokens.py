"""What stands before the first layer of a step: ids that only the device knows, and where the tokens' K and V go.

The reference is :meth:`minisgl.engine.model_runner.DeviceState.place` in torch, which takes nine launches for it.
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
