"""Starting a kernel, and overlapping its start with the end of the one before it.

Programmatic dependent launch (PDL, compute capability 9.0 and up) lets a kernel begin while the kernel before it in the
stream still runs. It may then load what has been in memory for long, weights above all, and must wait before it
touches anything that the kernel before it reads or writes:

    kernel n     | weights | wait | x ... compute ... store |
    kernel n + 1                  | weights .......... wait | x ... compute ... store |

Every kernel here lets its successor go only after its own wait. So what a kernel does before its wait may rely on all
kernels but the one directly before it; and since no kernel ends before its wait, the end of one is the end of all
before it.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl

SIMULATED_SMS = 4
"""How many multiprocessors the interpreter is planned for: few, so that small tests split their work too."""


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, pdl: bool = False, **meta: Any) -> None:
    """Starts ``kernel``, which must call :func:`wait_for_previous` in every program if ``pdl`` is set."""
    kernel[grid](*args, PDL=pdl, launch_pdl=pdl, enable_fp_fusion=True, **meta)


@triton.jit
def wait_for_previous(PDL: tl.constexpr):
    """Waits until the kernels before this one are done and what they wrote is visible, then lets the next one start."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@lru_cache
def num_sms(device: torch.device) -> int:
    """Multiprocessors of ``device``."""
    if device.type != "cuda":
        return SIMULATED_SMS
    return torch.cuda.get_device_properties(device).multi_processor_count


@lru_cache
def supports_pdl(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def power_of_2(n: int) -> int:
    """The smallest power of two that is at least ``n``: the length of a Triton block that holds n elements."""
    return 1 << max(0, n - 1).bit_length()


def offset_type(tensor: torch.Tensor) -> Any:
    """The type for offsets into ``tensor``: int32 where it suffices, since wide ones cost registers."""
    return tl.int32 if tensor.numel() < 2**31 else tl.int64
