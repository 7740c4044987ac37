"""Pinned host memory, and the one copy by which the arrays of a step reach a GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from .sampler import Arrays

IN_FLIGHT = 2
"""Steps that may be launched and not waited for."""

_ALIGN = 16  # bytes


_TORCH_DTYPES: dict[np.dtype[Any], torch.dtype] = {
    np.dtype(np.int32): torch.int32,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.float32): torch.float32,
}


def pinned(size: int, dtype: torch.dtype) -> Tensor:
    """Host memory that a GPU can copy from and to while the host goes on."""
    return torch.zeros(size, dtype=dtype, pin_memory=True)


class Staging:
    """Moves named arrays to the device in one copy. What it returns is valid until the next upload on the stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._turn = 0
        self._grow(1 << 16)

    def _grow(self, size: int) -> None:
        # Dropped buffers live on in torch's allocators until the copies that use them are done.
        self._pinned = [pinned(size, torch.uint8) for _ in range(IN_FLIGHT)]
        self._memory = torch.empty(size, dtype=torch.uint8, device=self._device)

    def upload(self, arrays: Arrays) -> dict[str, Tensor]:
        """To be called once per step at most."""
        ends = np.cumsum([-(-array.nbytes // _ALIGN) * _ALIGN for array in arrays.values()])
        total = int(ends[-1]) if len(ends) else 0
        if total > len(self._memory):
            self._grow(1 << (total - 1).bit_length())
        source = self._pinned[self._turn]
        self._turn = (self._turn + 1) % IN_FLIGHT
        host = source.numpy()
        tensors = {}
        start = 0
        for (name, array), end in zip(arrays.items(), ends.tolist(), strict=True):
            stop = start + array.nbytes
            host[start:stop].view(array.dtype)[:] = array
            tensors[name] = self._memory[start:stop].view(_TORCH_DTYPES[array.dtype])
            start = end
        self._memory[:total].copy_(source[:total], non_blocking=True)
        return tensors
