"""The small per-row operations between the matrix products, one implementation per kind of device.

:class:`Ops` itself is the plain torch version: the reference of the others, and what runs where no kernel is at hand.
Every result row depends on its own input row alone.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


class Ops:
    """Plain torch. Norms compute in float32 and round where transformers does, so results agree in half precision."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """RMS norm over the last dimension of ``x`` (..., N), times ``weight`` (N)."""
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        return (wide * scale).to(x.dtype) * weight

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``residual + x``, and its norm: returns (norm, sum). ``x`` and ``residual`` (T, N) may be overwritten.

        ``x`` may also come in contiguous parts (P, T, N) of float32, which are added up first.
        """
        residual = residual + (x.sum(0).to(residual.dtype) if x.dim() == 3 else x)
        return self.rms_norm(residual, weight, eps), residual

    def silu_and_mul(self, x: torch.Tensor) -> torch.Tensor:
        """``silu(gate) * up`` for ``x`` (T, 2 * N), the gate half first. Returns (T, N)."""
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate) * up

    def rope(self, x: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
        """Rotates ``x`` (T, heads, head_dim) by the angles of ``positions`` (T); see AttentionSpec for ``cos_sin``."""
        rotary = cos_sin.shape[1]
        cos, sin = cos_sin[positions].unsqueeze(1).chunk(2, dim=-1)
        low, high = x[..., :rotary].float().chunk(2, dim=-1)
        rotated = torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1).to(x.dtype)
        return rotated if rotary == x.shape[-1] else torch.cat((rotated, x[..., rotary:]), dim=-1)
