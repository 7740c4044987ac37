"""Which implementation of the small operations and of the matrix product serves a device."""

from __future__ import annotations

import torch

from .ops import Ops
from .weight import Pack, PlainWeight


def make_ops(device: torch.device, dtype: torch.dtype) -> Ops:
    return Ops()


def make_pack(device: torch.device, dtype: torch.dtype) -> Pack:
    return PlainWeight
