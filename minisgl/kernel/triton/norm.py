"""RMS norm, alone or with the addition to the residual stream before it. Memory-bound: one read, one write.

The reference is :class:`minisgl.kernel.ops.Ops`: float32 inside, rounded to the type of ``x`` before the weight.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs

import torch
import triton
import triton.language as tl

from .launch import Launcher, power_of_2, wait_for_previous


@triton.jit(do_not_specialize=["num_rows"])
def _rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    num_rows,
    eps,
    N: tl.constexpr,
    INNER: tl.constexpr,  # rows of x come in groups of so many, INNER_STRIDE apart
    OUTER_STRIDE: tl.constexpr,
    INNER_STRIDE: tl.constexpr,
    RESIDUAL_STRIDE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    ADD: tl.constexpr,
    PARTS: tl.constexpr,  # of x, float32, one after the other; to be added up
    PDL: tl.constexpr,
):
    rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    cols = tl.arange(0, BLOCK_N)
    weight = tl.load(weight_ptr + cols, mask=cols < N, other=0.0)
    wait_for_previous(PDL)
    rows64 = rows.to(tl.int64)
    mask = (rows < num_rows)[:, None] & (cols < N)[None, :]
    offset = (rows64 // INNER) * OUTER_STRIDE + (rows64 % INNER) * INNER_STRIDE
    x = tl.load(x_ptr + offset[:, None] + cols[None, :], mask=mask, other=0.0)
    if PARTS > 1:
        for part in tl.static_range(1, PARTS):
            other = x_ptr + part * num_rows.to(tl.int64) * N
            x += tl.load(other + offset[:, None] + cols[None, :], mask=mask, other=0.0)
        x = x.to(out_ptr.dtype.element_ty)
    if ADD:
        place = residual_ptr + rows64[:, None] * RESIDUAL_STRIDE + cols[None, :]
        x = (tl.load(place, mask=mask, other=0.0).to(tl.float32) + x.to(tl.float32)).to(x.dtype)
        tl.store(place, x, mask=mask)
    wide = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=1) / N + eps)
    normed = (wide * scale[:, None]).to(x.dtype) * weight[None, :]
    tl.store(out_ptr + rows64[:, None] * N + cols[None, :], normed.to(out_ptr.dtype.element_ty), mask=mask)


_launch_rms_norm = Launcher(_rms_norm_kernel)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, *, pdl: bool = False) -> torch.Tensor:
    """RMS norm over the last dimension of ``x``, the contiguous one of its 2 or 3. Returns a contiguous tensor."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    inner = x.shape[1] if x.dim() == 3 else 1
    strides = (x.stride(0), x.stride(1)) if x.dim() == 3 else (x.stride(0), 0)
    _launch(x, None, weight, out, inner, strides, eps, pdl)
    return out


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, *, pdl: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """``residual += x`` in place, and its norm. ``residual`` is (T, N). Returns (norm, residual).

    ``x`` is (T, N), or contiguous parts of it (P, T, N) in float32, which are added up first.
    """
    out = torch.empty(residual.shape, dtype=residual.dtype, device=x.device)
    _launch(x, residual, weight, out, 1, (x.stride(-2), 0), eps, pdl, parts=x.shape[0] if x.dim() == 3 else 1)
    return out, residual


def _launch(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    out: torch.Tensor,
    inner: int,
    strides: tuple[int, int],
    eps: float,
    pdl: bool,
    parts: int = 1,
) -> None:
    size = x.shape[-1]
    rows = out.numel() // size if size else 0
    if rows == 0:
        return
    block = power_of_2(size)
    block_rows = max(1, 2048 // block)
    _launch_rms_norm(
        (triton.cdiv(rows, block_rows),),
        x,
        residual,
        weight,
        out,
        rows,
        eps,
        N=size,
        INNER=inner,
        OUTER_STRIDE=strides[0],
        INNER_STRIDE=strides[1],
        RESIDUAL_STRIDE=0 if residual is None else residual.stride(0),
        BLOCK_N=block,
        BLOCK_ROWS=block_rows,
        ADD=residual is not None,
        PARTS=parts,
        types=(out.dtype,),
        num_warps=8 if block >= 4096 else 4,
        pdl=pdl,
    )
