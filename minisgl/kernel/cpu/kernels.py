"""The kernels as Python calls on torch tensors, bound through ctypes (which releases the GIL while they run)."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path

import torch

_POINTER, _INT, _INT64 = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64


@dataclass(frozen=True, slots=True, eq=False)
class PackedWeight:
    """A matrix (rows, cols) float32 in the kernels' panel format (gemm.h), made by :meth:`CpuKernels.pack`."""

    panels: torch.Tensor
    rows: int
    cols: int


class CpuKernels:
    """One compiled library. All tensors are float32 on the CPU unless it says otherwise.

    Every result row is a function of its own input row alone, bit for bit, whatever the number of threads, which is
    torch's (``torch.set_num_threads``). Wrong dtypes or strides raise ValueError.
    """

    def __init__(self, library: Path) -> None:
        _share_openmp_runtime()
        self._library = ctypes.CDLL(str(library))
        self.panel_width: int = self._library.minisgl_panel_width()
        self._pack = self._bind("pack", _POINTER, _INT64, _POINTER, _INT64, _INT64, _INT)
        self._gemm = self._bind(
            "gemm", _POINTER, _INT64, _POINTER, _POINTER, _POINTER, _INT64, _INT64, _INT64, _INT64, _INT
        )
        self._lookup = self._bind("lookup", _POINTER, _POINTER, _POINTER, _INT64, _INT64, _INT)

    def _bind(self, name: str, *argtypes: type) -> ctypes._NamedFuncPointer:
        function = self._library[f"minisgl_{name}"]
        function.argtypes, function.restype = argtypes, None
        return function

    def pack(self, weight: torch.Tensor) -> PackedWeight:
        """A copy of ``weight`` (rows, cols) in the panel format; drop the original afterwards."""
        _check_rows(weight)
        rows, cols = weight.shape
        width = self.panel_width
        panels = torch.empty(-(-rows // width) * width * cols)
        self._pack(weight.data_ptr(), weight.stride(0), panels.data_ptr(), rows, cols, torch.get_num_threads())
        return PackedWeight(panels, rows, cols)

    def linear(self, x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
        """``x @ weight.T + bias`` for ``x`` (M, cols), whose rows may be strided. Returns (M, rows)."""
        _check_rows(x)
        if x.shape[1] != weight.cols:
            raise ValueError(f"The input has {x.shape[1]} columns, the weight {weight.cols}.")
        out = torch.empty(x.shape[0], weight.rows)
        self._gemm(
            x.data_ptr(),
            x.stride(0),
            weight.panels.data_ptr(),
            None if bias is None else bias.data_ptr(),
            out.data_ptr(),
            weight.rows,
            x.shape[0],
            weight.rows,
            weight.cols,
            torch.get_num_threads(),
        )
        return out

    def lookup(self, weight: PackedWeight, ids: torch.Tensor) -> torch.Tensor:
        """Rows ``ids`` (T) int32 of the matrix. Returns (T, cols)."""
        out = torch.empty(ids.shape[0], weight.cols)
        threads = torch.get_num_threads()
        self._lookup(weight.panels.data_ptr(), ids.data_ptr(), out.data_ptr(), ids.shape[0], weight.cols, threads)
        return out


def _check_rows(x: torch.Tensor) -> None:
    if x.dtype is not torch.float32 or x.dim() != 2 or x.stride(1) != 1:
        raise ValueError(
            f"A float32 matrix with contiguous rows is needed, not {x.dtype} {tuple(x.shape)} {x.stride()}."
        )


def _share_openmp_runtime() -> None:
    """Makes the symbols of the OpenMP runtime that torch has loaded visible to the library loaded next.

    torch's wheel brings its own libgomp. A second one would mean a second pool of threads on the same cores, the idle
    one spinning against the busy one after every call.
    """
    with open("/proc/self/maps") as maps:
        paths = {line.split(maxsplit=5)[5].strip() for line in maps if "/libgomp" in line or "/libiomp" in line}
    for path in sorted(paths) or ["libgomp.so.1"]:
        ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
