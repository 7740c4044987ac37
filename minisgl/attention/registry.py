"""Attention backends by name. A backend's module is imported when it is made, not before.

Torch-free as long as none is made: the command line checks --attn against these names.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from minisgl.kernel.ops import Ops

    from .base import AttentionBackend, BackendConfig

BACKENDS = {
    "torch": ("torch_reference", "TorchAttention", ("cpu", "cuda")),
    "cpu": ("cpu", "CpuAttention", ("cpu",)),
    "triton": ("triton", "TritonAttention", ("cuda",)),
    "fi": ("flashinfer", "FlashInferAttention", ("cuda",)),
}
"""Module, class, and the kinds of device that it runs on."""

DETERMINISTIC = frozenset({"cpu", "triton"})
"""Those that can be made ``deterministic``."""


def check_backend(name: str, device: str) -> None:
    """Raises ValueError for an unknown name, and for a backend that does not run on that kind of device."""
    if name not in BACKENDS:
        raise ValueError(f"Unknown attention backend {name!r}; there are: {', '.join(BACKENDS)}.")
    if device not in BACKENDS[name][2]:
        others = ", ".join(other for other, (_, _, runs_on) in BACKENDS.items() if device in runs_on)
        raise ValueError(f"Attention backend {name!r} does not run on device {device}; choose among: {others}.")


def make_backend(name: str, config: BackendConfig, ops: Ops) -> AttentionBackend:
    """Raises ValueError as :func:`check_backend` does."""
    check_backend(name, config.device.type)
    module, attribute, _ = BACKENDS[name]
    backend: type[AttentionBackend] = getattr(import_module(f"{__package__}.{module}"), attribute)
    return backend(config, ops)
