"""The attention layer: projections around whatever backend does the attending."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from minisgl.attention.base import AttentionBackend, AttentionSpec
from minisgl.distributed.sharding import HeadShards

from .context import BuildContext
from .linear import QKVLinear, RowLinear
from .norm import RMSNorm

if TYPE_CHECKING:
    from minisgl.attention.forward_batch import ForwardBatch
    from minisgl.kvcache.device_pool import KVPool
    from minisgl.models.config import ModelConfig


class Attention(nn.Module):
    """Works on the residual stream (T, hidden_size), after ``norm``. Heads are cut between the ranks.

    ``cos_sin`` is the rope table, one tensor that all layers share.
    """

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        cos_sin: torch.Tensor,
        context: BuildContext,
        *,
        qkv_bias: bool = False,
        output_bias: bool = False,
        qk_norm: bool = False,
    ) -> None:
        super().__init__()
        head_dim = config.head_dim
        heads = HeadShards.of(config.num_heads, config.num_kv_heads, context.comm.rank, context.comm.world_size)
        self.qkv_proj = QKVLinear(config.hidden_size, heads, head_dim, qkv_bias, context)
        self.o_proj = RowLinear(heads.query.times(head_dim), config.hidden_size, output_bias, context)
        self.q_norm = RMSNorm(head_dim, config.rms_norm_eps, context) if qk_norm else None
        self.k_norm = RMSNorm(head_dim, config.rms_norm_eps, context) if qk_norm else None
        self.spec = AttentionSpec(
            layer=layer,
            num_heads=heads.query.size,
            num_kv_heads=heads.kv.size,
            head_dim=head_dim,
            scale=head_dim**-0.5,
            cos_sin=cos_sin,
            sliding_window=config.sliding_windows[layer],
            q_norm=self.q_norm.weight if self.q_norm else None,
            k_norm=self.k_norm.weight if self.k_norm else None,
            norm_eps=config.rms_norm_eps,
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
