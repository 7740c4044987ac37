"""The kernels as Python calls on torch tensors, bound through ctypes (which releases the GIL while they run)."""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch

_SIGNATURES = {
    "pack": "pipiii",
    "gemm": "pipppiiiii",
    "lookup": "pppiiii",
    "rms_norm": "pppfpiii",
    "silu_and_mul": "ppiii",
    "rope_store": "piiiippfpippppi",
    "attention": "piipppiiifipiipppii",
    "sample": "pppppppiii",
}
_TYPES: dict[str, type[ctypes._SimpleCData]] = {"p": ctypes.c_void_p, "i": ctypes.c_int64, "f": ctypes.c_float}


class CpuKernels:
    """One compiled library. Floating-point tensors are float32, all tensors are on the CPU.

    Every result row is a function of its own input row alone, bit for bit, whatever the number of threads, which is
    torch's (``torch.set_num_threads``). Wrong dtypes or strides raise ValueError.
    """

    def __init__(self, library: Path) -> None:
        self._library = ctypes.CDLL(str(library))
        self.panel_width: int = self._library.minisgl_panel_width()
        for name, types in _SIGNATURES.items():
            function = getattr(self._library, f"minisgl_{name}")
            function.argtypes, function.restype = [_TYPES[t] for t in types], None
        self._rms_norm = self._library.minisgl_rms_norm
        self._silu_and_mul = self._library.minisgl_silu_and_mul
        self._rope_store = self._library.minisgl_rope_store
        self._attention = self._library.minisgl_attention

    def pack(self, matrix: torch.Tensor, bias: torch.Tensor | None = None) -> PackedWeight:
        """A copy of ``matrix`` (rows, cols) in panels, with its ``bias`` (rows); drop the original afterwards."""
        rows, cols = matrix.shape
        width = self.panel_width
        panels = torch.empty(-(-rows // width) * width * cols)
        threads = torch.get_num_threads()
        self._library.minisgl_pack(_floats(matrix), matrix.stride(0), panels.data_ptr(), rows, cols, threads)
        return PackedWeight(self._library, panels, rows, cols, bias)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """RMS norm over the last dimension of ``x`` (..., N), times ``weight`` (N)."""
        x = x.contiguous()
        out = torch.empty_like(x)
        self._norm(x, None, weight, eps, out)
        return out

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``residual + x`` (T, N), and its norm: returns (norm, sum), in the memory of ``x`` and ``residual``."""
        self._norm(residual, x, weight, eps, x)
        return x, residual

    def _norm(
        self, x: torch.Tensor, added: torch.Tensor | None, weight: torch.Tensor, eps: float, out: torch.Tensor
    ) -> None:
        n = weight.shape[0]
        self._rms_norm(
            _whole(x),
            None if added is None else _whole(added),
            _whole(weight),
            eps,
            out.data_ptr(),
            x.numel() // n,
            n,
            torch.get_num_threads(),
        )

    def silu_and_mul(self, x: torch.Tensor) -> torch.Tensor:
        """``silu(gate) * up`` for ``x`` (T, 2 * N), the gate half first. Returns (T, N)."""
        out = torch.empty(x.shape[0], x.shape[1] // 2)
        self._silu_and_mul(_whole(x), out.data_ptr(), *out.shape, torch.get_num_threads())
        return out

    def sample(
        self,
        logits: torch.Tensor,
        temperature: torch.Tensor,
        top_k: torch.Tensor,
        top_p: torch.Tensor,
        min_p: torch.Tensor,
        uniform: torch.Tensor,
    ) -> torch.Tensor:
        """A token (S) int32 for each row of ``logits`` (S, V); -1 where they hold NaN or their largest is not finite.

        The parameters (S) are those of :class:`minisgl.core.Sampling`, ``top_k`` int32 and the others float32, filters
        as :mod:`minisgl.engine.cutoff` defines them. A temperature below 1e-5 takes the largest, the lowest of equals.
        """
        out = torch.empty(logits.shape[0], dtype=torch.int32)
        self._library.minisgl_sample(
            _whole(logits),
            _whole(temperature),
            _whole(top_k, torch.int32),
            _whole(top_p),
            _whole(min_p),
            _whole(uniform),
            out.data_ptr(),
            *logits.shape,
            torch.get_num_threads(),
        )
        return out

    def rope_store(
        self,
        qkv: torch.Tensor,
        num_heads: int,
        cos_sin: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        norms: tuple[torch.Tensor, torch.Tensor, float] | None = None,
    ) -> None:
        """Norm (if any) and rope of q and k within ``qkv`` (T, (heads + 2 * kv_heads) * dim); k and v to their slots.

        ``norms`` holds the weights (dim) of the heads of q, those of k, and eps. ``positions`` (T) int32 are rows of
        ``cos_sin`` (positions, rotary), ``slots`` (T) int64 those of ``keys`` and ``values`` (slots, kv_heads, dim).
        """
        q_norm, k_norm, eps = norms or (None, None, 0.0)
        self._rope_store(
            _whole(qkv),
            qkv.shape[0],
            num_heads,
            keys.shape[1],
            keys.shape[2],
            None if q_norm is None else _whole(q_norm),
            None if k_norm is None else _whole(k_norm),
            eps,
            _whole(cos_sin),
            cos_sin.shape[1],
            _whole(positions, torch.int32),
            _whole(slots, torch.int64),
            _whole(keys),
            _whole(values),
            torch.get_num_threads(),
        )

    def attention(
        self,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        page_table: torch.Tensor,
        rows: torch.Tensor,
        cached: torch.Tensor,
        cu_new: torch.Tensor,
        scale: float,
        window: int | None = None,
    ) -> torch.Tensor:
        """Causal attention of new tokens ``q`` (T, heads, dim), strided views allowed. Returns (T, heads * dim).

        ``keys`` and ``values`` (pages, page_size, kv_heads, dim) are one layer of the pool and hold the new tokens
        already. Request i (B of them) has row ``rows[i]`` of ``page_table``, ``cached[i]`` tokens before the step, and
        ``cu_new[i] .. cu_new[i + 1]`` of the T tokens; all of these are int32.
        """
        _, page_size, kv_heads, dim = keys.shape
        tokens, heads, _ = q.shape
        out = torch.empty(tokens, heads * dim)
        self._attention(
            _floats(q),
            q.stride(0),
            q.stride(1),
            _whole(keys),
            _whole(values),
            out.data_ptr(),
            heads,
            kv_heads,
            dim,
            scale,
            window or 0,
            _whole(page_table, torch.int32),
            page_table.stride(0),
            page_size,
            _whole(rows, torch.int32),
            _whole(cached, torch.int32),
            _whole(cu_new, torch.int32),
            rows.shape[0],
            torch.get_num_threads(),
        )
        return out


class PackedWeight:
    """A matrix (rows, cols) in the kernels' panel format (gemm.h), with a bias (rows) or without."""

    def __init__(
        self, library: ctypes.CDLL, panels: torch.Tensor, rows: int, cols: int, bias: torch.Tensor | None
    ) -> None:
        self.rows = rows
        self.cols = cols
        self._tensors = panels, bias  # Kept alive for their addresses.
        self._address = panels.data_ptr()
        self._bias_address = None if bias is None else _whole(bias)
        self._gemm = library.minisgl_gemm
        self._lookup = library.minisgl_lookup

    def matmul(self, x: torch.Tensor) -> torch.Tensor:
        """``x @ matrix.T + bias`` for ``x`` (M, cols), whose rows may be strided: (M, rows)."""
        tokens, cols = x.shape
        if cols != self.cols:
            raise ValueError(f"The input has {cols} columns, the weight {self.cols}.")
        rows = self.rows
        out = torch.empty(tokens, rows)
        self._gemm(
            _floats(x),
            x.stride(0),
            self._address,
            self._bias_address,
            out.data_ptr(),
            rows,
            tokens,
            rows,
            cols,
            torch.get_num_threads(),
        )
        return out

    def lookup(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows ``ids`` (M) int32 of the matrix: (M, cols). An id that is no row gets NaN, so it fails alone."""
        out = torch.empty(ids.shape[0], self.cols)
        self._lookup(
            self._address,
            _whole(ids, torch.int32),
            out.data_ptr(),
            ids.shape[0],
            self.rows,
            self.cols,
            torch.get_num_threads(),
        )
        return out


def _floats(x: torch.Tensor) -> int:
    """The address of a float32 tensor whose last dimension is contiguous."""
    if x.dtype is not torch.float32 or x.stride(-1) != 1:
        raise ValueError(f"A float32 tensor with contiguous rows is needed, not {x.dtype} with strides {x.stride()}.")
    return x.data_ptr()


def _whole(x: torch.Tensor, dtype: torch.dtype = torch.float32) -> int:
    """The address of a contiguous tensor of ``dtype``."""
    if x.dtype is not dtype or not x.is_contiguous():
        raise ValueError(f"A contiguous {dtype} tensor is needed, not {x.dtype} with strides {x.stride()}.")
    return x.data_ptr()
