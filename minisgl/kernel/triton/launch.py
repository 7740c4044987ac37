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


class Launcher:
    """Launches one kernel: ``launcher(grid, *arguments, pdl=..., CONSTANT=..., num_warps=...)``.

    Triton looks at every argument of every launch to find the variant that was compiled for it, which costs more than
    the launch itself. Here the constants alone tell variants apart, with the type of the first tensor and of ``types``.
    So a kernel must not be specialised on the values of its other numbers, and its pointers must be aligned to 16
    bytes, unless it says that it does not care; a launch with one that is not goes Triton's own way.
    """

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._compiled: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}
        careless = getattr(kernel, "do_not_specialize_on_alignment", None) or ()
        self._aligned = [i for i, name in enumerate(kernel.arg_names) if name.endswith("_ptr") and name not in careless]

    def __call__(
        self,
        grid: tuple[int, ...],
        *arguments: Any,
        pdl: bool = False,
        types: tuple[torch.dtype, ...] = (),
        **constants: Any,
    ) -> None:
        """With ``pdl`` every program of the kernel must call :func:`wait_for_previous`."""
        key = (arguments[0].dtype, pdl, types, *constants.values())
        found = self._compiled.get(key)
        if found is not None and self._is_aligned(arguments):
            compiled, ordered = found
            compiled[(*grid, 1, 1)[:3]](*arguments, *ordered)
            return
        compiled = self._kernel[grid](*arguments, PDL=pdl, launch_pdl=pdl, enable_fp_fusion=True, **constants)
        # The interpreter compiles nothing.
        if compiled is not None and self._is_aligned(arguments):
            constants["PDL"] = pdl
            names = self._kernel.arg_names[len(arguments) :]
            self._compiled[key] = compiled, tuple(constants[name] for name in names)

    def _is_aligned(self, arguments: tuple[Any, ...]) -> bool:
        for i in self._aligned:
            tensor = arguments[i]
            if tensor is not None and tensor.data_ptr() & 15:
                return False
        return True


@triton.jit
def wait_for_previous(PDL: tl.constexpr):
    """Waits until the kernels before this one are done and what they wrote is visible, then lets the next one start."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def prefetch(pointers, SIZE: tl.constexpr):
    """Asks for SIZE bytes from each pointer on to be brought into the L2 cache; all are multiples of 16. On GPUs only.

    What has been in memory for long may be asked for before the wait.
    """
    tl.inline_asm_elementwise(
        f"mov.u32 $0, 0; cp.async.bulk.prefetch.L2.global [$1], {SIZE};",
        "=r,l",
        [pointers.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


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
