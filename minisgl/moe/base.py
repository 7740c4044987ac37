"""The experts of one layer: what a backend of them must do."""

from __future__ import annotations

from abc import ABC, abstractmethod
from importlib import import_module

import torch

from ..kernel.ops import Ops
from ..kernel.weight import Pack

BACKENDS = {
    "torch": ("torch_experts", "TorchExperts"),
    "triton": ("triton_experts", "TritonExperts"),
    "triton-deterministic": ("triton_experts", "DeterministicTritonExperts"),
}


class Experts(ABC):
    """Gated MLPs: ``gate_up`` (E, 2 * I, H), gate rows first, and ``down`` (E, H, I), of this rank's part I of each.

    Made once when the weights are loaded; it may repack them and keep no reference.
    """

    @abstractmethod
    def __init__(self, gate_up: torch.Tensor, down: torch.Tensor, ops: Ops, pack: Pack) -> None: ...

    @abstractmethod
    def forward(self, x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        """The weighted sum over each token's experts.

        ``x`` is (T, H), ``weights`` (T, top_k) of its dtype and ``experts`` (T, top_k) int64, distinct within a token.
        Returns (T, H). The result of a token does not depend on the other tokens.
        """

    def forward_routed(self, x: torch.Tensor, logits: torch.Tensor, top_k: int, normalise: bool) -> torch.Tensor:
        """:meth:`forward` from the router's ``logits`` (T, E). Override it to choose in a kernel as well."""
        weights, experts = route(logits, top_k, normalise)
        return self.forward(x, weights.to(x.dtype), experts)


class FusingExperts(Experts):
    """Those that can do what stands before and after them in the same go, where that is faster."""

    @abstractmethod
    def fuses(self, rows: int) -> bool:
        """Whether :meth:`fused` serves so many rows, and is faster."""

    @abstractmethod
    def fused(
        self,
        x: torch.Tensor,
        logits: torch.Tensor,
        top_k: int,
        normalise: bool,
        *,
        norm: torch.Tensor,
        eps: float,
        residual: torch.Tensor | None,
    ) -> torch.Tensor:
        """:meth:`forward_routed` of ``rms_norm(x)``, whose weight is ``norm``, then ``+ residual``.

        ``x`` and ``residual`` are (T, H), ``logits`` (T, E). Returns (T, H).
        """


def route(logits: torch.Tensor, top_k: int, normalise: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Router logits (T, E) -> weights (T, top_k) float32 and experts (T, top_k) int64, the likeliest first.

    Weights are probabilities over all experts; with ``normalise`` those of the chosen ones sum to 1.
    """
    weights, experts = logits.softmax(dim=-1, dtype=torch.float32).topk(top_k, dim=-1)
    if normalise:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return weights, experts


def default_experts(device: torch.device, deterministic: bool = False) -> str:
    """The backend that serves a device."""
    if device.type == "cuda":
        return "triton-deterministic" if deterministic else "triton"
    return "torch"


def experts_class(name: str) -> type[Experts]:
    """Raises ValueError for an unknown name."""
    if name not in BACKENDS:
        raise ValueError(f"Unknown MoE backend {name!r}; there are: {', '.join(BACKENDS)}.")
    module, attribute = BACKENDS[name]
    found: type[Experts] = getattr(import_module(f"{__package__}.{module}"), attribute)
    return found
