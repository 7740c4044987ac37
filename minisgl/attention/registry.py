"""Attention backends by name. A backend's module is imported when it is made, not before.

Torch-free as long as none is made: the command line checks --attn against these names.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from minisgl.layers.ops import Ops

    from .base import AttentionBackend, BackendConfig

BACKENDS = {
    "torch": ("torch_reference", "TorchAttention"),
    "cpu": ("cpu", "CpuAttention"),
    "triton": ("triton", "TritonAttention"),
}


def make_backend(name: str, config: BackendConfig, ops: Ops) -> AttentionBackend:
    """Raises ValueError for an unknown name, and whatever the backend raises where it cannot run."""
    if name not in BACKENDS:
        raise ValueError(f"Unknown attention backend {name!r}; there are: {', '.join(BACKENDS)}.")
    module, attribute = BACKENDS[name]
    backend: type[AttentionBackend] = getattr(import_module(f"{__package__}.{module}"), attribute)
    return backend(config, ops)
