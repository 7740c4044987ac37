"""From the blocks of a GGUF tensor to float32.

The gguf package knows every type, in numpy, 16 rows at a time. The three usual types have a few lines of torch here,
which take a third of the time and release the GIL.

    Q8_0    scale f16, 32 x int8                            scale * q
    Q4_0    scale f16, 16 bytes                             scale * (q - 8)     q: the low halves of the 16 bytes,
    Q4_1    scale f16, minimum f16, 16 bytes                scale * q + min        then the high halves
"""

from __future__ import annotations

import numpy as np
import torch
from gguf import GGMLQuantizationType as GGMLType
from gguf.quants import dequantize as dequantize_numpy


def dequantize(data: np.ndarray, kind: GGMLType) -> torch.Tensor:
    """``data`` (rows, bytes of a row) uint8 -> (rows, columns) float32, bit for bit as the gguf package has it."""
    fast = _FAST.get(kind)
    if fast is None:
        return torch.from_numpy(dequantize_numpy(data, kind))
    return fast(torch.from_numpy(data)).view(data.shape[0], -1)


def _q8_0(data: torch.Tensor) -> torch.Tensor:
    blocks = data.view(-1, 34)
    return blocks[:, 2:].view(torch.int8) * _halves(blocks[:, :2])


def _q4_0(data: torch.Tensor) -> torch.Tensor:
    blocks = data.view(-1, 18)
    return _nibbles(blocks[:, 2:]).sub_(8).mul_(_halves(blocks[:, :2]))


def _q4_1(data: torch.Tensor) -> torch.Tensor:
    blocks = data.view(-1, 20)
    scale, minimum = _halves(blocks[:, :4]).split(1, dim=1)
    return _nibbles(blocks[:, 4:]).mul_(scale).add_(minimum)


def _halves(data: torch.Tensor) -> torch.Tensor:
    """(n, 2 k) bytes -> the (n, k) float16 numbers in them, as float32."""
    return data.contiguous().view(torch.float16).float()


def _nibbles(data: torch.Tensor) -> torch.Tensor:
    """(n, k) bytes -> (n, 2 k) float32: their low halves, then their high ones."""
    n, k = data.shape
    out = torch.empty(n, 2 * k)
    out[:, :k] = data & 15
    out[:, k:] = data >> 4
    return out


_FAST = {GGMLType.Q8_0: _q8_0, GGMLType.Q4_0: _q4_0, GGMLType.Q4_1: _q4_1}
