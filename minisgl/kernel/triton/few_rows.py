"""Matrix products of a few dozen rows: bound by reading the weight, and by the starts and ends of kernels.

With the same launch parameters for any number of rows (:func:`fixed_few_rows_config`) each row's result is, bit for
bit, the same in whatever company: an output is added up in one order, wherever it lies in a tile.

    out = x @ W.T + bias,   or silu(gate) * up of its halves,   or parts of it that somebody else adds up

The weight is the left side of the product on the tensor cores, so that its rows fill the tiles and the rows of x need
no more padding than to a multiple of 16. A program has some rows of W:

    W (N, K)    program 0  | part 0 | part 1 |          x (R, K) stands on its side: (K, R)
                program 1  | part 0 | part 1 |

Where there are few programs, each row is cut into parts; their sums in float32 go out as they are, and the norm that
follows adds them on its way (:mod:`.norm`), so that nobody waits for anybody.

Before a program waits for the kernel before it, it asks for its part of the weight to be brought into the L2 cache. So
in a chain of kernels that start early (:mod:`.launch`) the memory is busy while one kernel ends and the next begins.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from .activation import silu_mul
from .launch import Launcher, power_of_2, prefetch, wait_for_previous


@dataclass(frozen=True, slots=True)
class FewRowsConfig:
    """Launch parameters: rows of x and of W of a program, elements of K loaded at a time, parts of K, warps, pipeline
    stages."""

    block_r: int
    block_n: int
    block_k: int
    parts: int
    num_warps: int
    num_stages: int


def few_rows_config(rows: int, outputs: int, inputs: int, *, gated: bool, in_parts: bool) -> FewRowsConfig | None:
    """None where the library's product is faster: for large matrices, for tiny ones, and for many rows of any.

    ``in_parts``: the caller adds up several parts, on its way, so that more rows are worth it.
    """
    elements = outputs * inputs * (2 if gated else 1)
    most, largest = (128, 10 << 20) if in_parts else (64, 7 << 20)
    if rows > most or elements > largest or outputs % 64 or inputs % 128:
        return None
    parts = 1
    while in_parts and parts < 8 and outputs // 64 * parts < 128 and inputs // parts % 128 == 0:
        parts *= 2
    if outputs // (32 if gated else 64) * parts < 48:
        return None  # too few programs to draw on the memory
    block_r = max(16, power_of_2(rows))
    if rows <= 32 and not in_parts:
        return FewRowsConfig(block_r, 64, 128, 1, num_warps=4, num_stages=4)
    return FewRowsConfig(block_r, 64, 64, parts, num_warps=4, num_stages=6)


def fixed_few_rows_config(outputs: int, itemsize: int) -> FewRowsConfig:
    """For any number of rows, of inputs of ``itemsize`` bytes."""
    if itemsize == 4:
        return FewRowsConfig(64, 64, 32, 1, num_warps=8, num_stages=3)
    # Wide tiles read x less often, where there are enough of them to draw on the memory all the same.
    return FewRowsConfig(64, 128 if outputs >= 16384 else 64, 64, 1, num_warps=4, num_stages=4)


@triton.jit(do_not_specialize=["num_rows"])
def _few_rows_kernel(
    x_ptr,
    w_ptr,
    bias_ptr,
    out_ptr,  # (R, N), or (PARTS, R, N) float32
    num_rows,
    X_STRIDE: tl.constexpr,
    N: tl.constexpr,  # outputs; with GATED the rows of W are N of gate and then N of up
    K: tl.constexpr,
    GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    share: tl.constexpr = K // PARTS
    # Programs with the same rows of W come one after the other, so that all but the first find them in the L2 cache.
    part = tl.program_id(2)
    # With GATED the first half of the tile is gate, the second up of the same outputs.
    outputs: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    i = tl.arange(0, BLOCK_N)
    n = tl.program_id(1) * outputs + i % outputs
    row = n + i // outputs * N
    rows = w_ptr + row.to(tl.int64) * K + part * share
    in_w = n < N
    whole: tl.constexpr = N % outputs == 0 and share % BLOCK_K == 0
    if PDL and whole and tl.program_id(0) == 0:
        prefetch(rows, share * (dtype.primitive_bitwidth // 8))
    wait_for_previous(PDL)

    r = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    acc = tl.zeros((BLOCK_N, BLOCK_R), tl.float32)
    x_rows = x_ptr + r * X_STRIDE + part * share
    in_x = r < num_rows
    for start in tl.range(0, share, BLOCK_K, num_stages=STAGES):
        k = start + tl.arange(0, BLOCK_K)
        if whole:
            w = tl.load(rows[:, None] + k[None, :])
            x = tl.load(x_rows[None, :] + k[:, None], mask=in_x[None, :], other=0.0)
        else:
            in_k = k < share
            w = tl.load(rows[:, None] + k[None, :], mask=in_w[:, None] & in_k[None, :], other=0.0)
            x = tl.load(x_rows[None, :] + k[:, None], mask=in_x[None, :] & in_k[:, None], other=0.0)
        acc = tl.dot(w, x, acc, input_precision="ieee")

    if HAS_BIAS:
        acc += tl.load(bias_ptr + row, mask=in_w, other=0.0).to(tl.float32)[:, None]
    if GATED:
        gate, up = tl.split(tl.permute(tl.reshape(acc, (2, outputs, BLOCK_R)), (1, 2, 0)))
        acc = silu_mul(gate, up, dtype)
        n = tl.program_id(1) * outputs + tl.arange(0, outputs)
        in_w = n < N
    out_ptr += part.to(tl.int64) * num_rows * N
    place = r[:, None] * N + n[None, :]
    mask = in_x[:, None] & in_w[None, :]
    tl.store(out_ptr + place, tl.trans(acc).to(out_ptr.dtype.element_ty), mask=mask)


_launch_few_rows = Launcher(_few_rows_kernel)


def few_rows_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    gated: bool = False,
    config: FewRowsConfig,
    pdl: bool = False,
) -> torch.Tensor:
    """``x @ weight.T + bias`` for ``x`` (R, K): (R, N), or with several parts (P, R, N) float32, to be added up.

    Each row of ``x`` is contiguous, and so is ``weight`` (N, K). ``gated``: it is (2 * N, K), the gate half first, and
    the result is ``silu(gate) * up``, rounded where the separate operations would. Several parts have neither bias nor
    gate, and K is a multiple of their number.
    """
    rows, inputs = x.shape
    outputs = weight.shape[0] // (2 if gated else 1)
    parts = config.parts
    if parts > 1 and (gated or bias is not None or inputs % parts):
        raise ValueError(f"A product of {inputs} inputs in {parts} parts must be a plain one, of equal parts.")
    shape, dtype = ((parts, rows, outputs), torch.float32) if parts > 1 else ((rows, outputs), x.dtype)
    out = torch.empty(shape, dtype=dtype, device=x.device)
    if rows == 0:
        return out
    each = config.block_n // (2 if gated else 1)
    _launch_few_rows(
        (triton.cdiv(rows, config.block_r), triton.cdiv(outputs, each), parts),
        x,
        weight,
        bias,
        out,
        rows,
        types=(out.dtype,),
        X_STRIDE=x.stride(0),
        N=outputs,
        K=inputs,
        GATED=gated,
        HAS_BIAS=bias is not None,
        PARTS=parts,
        BLOCK_R=config.block_r,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        STAGES=config.num_stages,
        num_warps=config.num_warps,
        pdl=pdl,
    )
    return out
