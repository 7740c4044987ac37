"""The attention layer: projections around whatever backend does the attending."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from minisgl.attention.base import AttentionBackend
from minisgl.distributed.sharding import HeadShards
from minisgl.kernel.attention_spec import AttentionSpec

from .context import BuildContext
from .linear import QKVLinear, RowLinear
from .norm import RMSNorm

if TYPE_CHECKING:
    from minisgl.attention.forward_batch import ForwardBatch
    from minisgl.kvcache.device_pool import KVPool


class Attention(nn.Module):
    """Works on the residual stream (T, hidden_size), after ``norm``. ``heads`` are those of this rank.

    ``layer`` is its index in the KV pool; ``cos_sin`` the rope table, one tensor that all layers share; with
    ``sliding_window`` W a token sees the last W, itself included. ``qk_norm``: each head of q and k is normed, with
    ``norm_eps``.
    """

    def __init__(
        self,
        layer: int,
        hidden_size: int,
        heads: HeadShards,
        head_dim: int,
        cos_sin: torch.Tensor,
        context: BuildContext,
        *,
        sliding_window: int | None,
        norm_eps: float,
        qkv_bias: bool,
        output_bias: bool,
        qk_norm: bool,
    ) -> None:
        super().__init__()
        self.qkv_proj = QKVLinear(hidden_size, heads, head_dim, qkv_bias, context)
        self.o_proj = RowLinear(heads.query.times(head_dim), hidden_size, output_bias, context)
        self.q_norm = RMSNorm(head_dim, norm_eps, context) if qk_norm else None
        self.k_norm = RMSNorm(head_dim, norm_eps, context) if qk_norm else None
        self.spec = AttentionSpec(
            layer=layer,
            num_heads=heads.query.size,
            num_kv_heads=heads.kv.size,
            head_dim=head_dim,
            scale=head_dim**-0.5,
            cos_sin=cos_sin,
            sliding_window=sliding_window,
            q_norm=self.q_norm.weight if self.q_norm else None,
            k_norm=self.k_norm.weight if self.k_norm else None,
            norm_eps=norm_eps,
        )

    def forward(
        self,
        norm: RMSNorm,
        x: torch.Tensor | None,
        residual: torch.Tensor,
        batch: ForwardBatch,
        kv: KVPool,
        backend: AttentionBackend,
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        qkv, residual = self.qkv_proj.of_normed(norm, x, residual)
        return self.o_proj.onto(backend.forward_qkv(qkv, self.spec, kv, batch), residual)
