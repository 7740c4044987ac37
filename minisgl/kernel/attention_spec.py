"""What an attention kernel has to know of its layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, eq=False)
class AttentionSpec:
    """One attention layer of this rank. It never changes after the model is built.

    ``num_heads`` is a multiple of ``num_kv_heads``; query head h reads KV head ``h // (num_heads // num_kv_heads)``.
    With ``sliding_window`` W a token at position p sees positions ``p - W + 1 .. p``, without it ``0 .. p``.

    ``cos_sin`` (max positions, rotary_dim) float32 holds, for each position, cos of every angle and then sin of every
    angle. It rotates the first ``rotary_dim`` elements of each head, pairing element i with ``i + rotary_dim // 2``.
    ``q_norm`` and ``k_norm`` (head_dim), if any, weight an RMS norm over each head with ``norm_eps``, before rope.
    """

    layer: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    cos_sin: torch.Tensor
    sliding_window: int | None = None
    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None
    norm_eps: float = 0.0

    @property
    def rotary_dim(self) -> int:
        return self.cos_sin.shape[1]
