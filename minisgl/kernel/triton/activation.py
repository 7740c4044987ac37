"""The product of a gate and its activation in gated MLPs. Reference: :meth:`minisgl.kernel.ops.Ops.silu_and_mul`."""
# mypy: allow-untyped-defs, allow-incomplete-defs

import torch
import triton
import triton.language as tl

from .launch import Launcher, wait_for_previous


@triton.jit
def silu_mul(gate, up, dtype: tl.constexpr):
    """silu(gate) * up of float32 tiles, rounded where two torch operations of ``dtype`` would."""
    gate = gate.to(dtype).to(tl.float32)
    silu = (gate / (1.0 + tl.exp(-gate))).to(dtype)
    return silu.to(tl.float32) * up.to(dtype).to(tl.float32)


@triton.jit
def _silu_and_mul_kernel(
    x_ptr, out_ptr, X_STRIDE: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < N
    wait_for_previous(PDL)
    gate = tl.load(x_ptr + row * X_STRIDE + cols, mask=mask, other=0.0)
    up = tl.load(x_ptr + row * X_STRIDE + N + cols, mask=mask, other=0.0)
    out = silu_mul(gate.to(tl.float32), up.to(tl.float32), gate.dtype)
    tl.store(out_ptr + row * N + cols, out.to(out_ptr.dtype.element_ty), mask=mask)


_launch_silu_and_mul = Launcher(_silu_and_mul_kernel)


def silu_and_mul(x: torch.Tensor, *, pdl: bool = False) -> torch.Tensor:
    """``silu(gate) * up`` for ``x`` (T, 2 * N), the gate half first. Returns (T, N)."""
    rows, size = x.shape[0], x.shape[1] // 2
    out = torch.empty((rows, size), dtype=x.dtype, device=x.device)
    if rows:
        block = 1024
        grid = (rows, triton.cdiv(size, block))
        _launch_silu_and_mul(grid, x, out, X_STRIDE=x.stride(0), N=size, BLOCK=block, num_warps=4, pdl=pdl)
    return out
