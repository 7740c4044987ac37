"""What every layer of a model is built with. An argument of the constructors, so that nothing is global."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from minisgl.distributed.communicator import Communicator
from minisgl.kernel.ops import Ops
from minisgl.kernel.weight import Pack

from .loading import Storage


@dataclass(frozen=True, slots=True)
class BuildContext:
    """``max_positions`` is the length of the rope table: no token has a position at or past it."""

    dtype: torch.dtype
    device: torch.device
    comm: Communicator
    ops: Ops
    pack: Pack
    moe_backend: str
    max_positions: int

    def storage(self, *shape: int) -> Storage:
        """For a weight that is loaded later."""
        return Storage(shape, self.dtype, self.device)
