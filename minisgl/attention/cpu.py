"""Attention on a CPU: two kernel calls a layer, bitwise independent of batch, chunking and page size."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from minisgl.kernel.attention_spec import AttentionSpec
from minisgl.kernel.cpu import load

from .base import AttentionBackend, BackendConfig

if TYPE_CHECKING:
    from minisgl.kernel.ops import Ops
    from minisgl.kvcache.device_pool import KVPool

    from .forward_batch import ForwardBatch


class CpuAttention(AttentionBackend):
    """float32 only. Raises RuntimeError where the kernels cannot be had, ValueError for another dtype."""

    def __init__(self, config: BackendConfig, ops: Ops) -> None:
        super().__init__(config, ops)
        kernels = load()
        if kernels is None:
            raise RuntimeError("The attention backend 'cpu' needs the CPU kernels, and those need g++; use 'torch'.")
        if config.dtype != torch.float32 or config.device.type != "cpu":
            raise ValueError(
                f"The attention backend 'cpu' serves float32 on a CPU, not {config.dtype} on {config.device}."
            )
        self.kernels = kernels

    def prepare(self, batch: ForwardBatch) -> None:
        """Nothing: each call cuts its work by itself, in microseconds."""

    def forward_qkv(self, qkv: torch.Tensor, spec: AttentionSpec, kv: KVPool, batch: ForwardBatch) -> torch.Tensor:
        norms = None
        if spec.q_norm is not None and spec.k_norm is not None:
            norms = spec.q_norm, spec.k_norm, spec.norm_eps
        keys, values = kv.k[spec.layer].flatten(0, 1), kv.v[spec.layer].flatten(0, 1)
        self.kernels.rope_store(qkv, spec.num_heads, spec.cos_sin, batch.positions, batch.slots, keys, values, norms)
        q = qkv.view(qkv.shape[0], -1, spec.head_dim)[:, : spec.num_heads]
        return self._attend(q, spec, kv, batch)

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        spec: AttentionSpec,
        kv: KVPool,
        batch: ForwardBatch,
    ) -> torch.Tensor:
        kv.store(spec.layer, k, v, batch.slots)
        return self._attend(q, spec, kv, batch)

    def _attend(self, q: torch.Tensor, spec: AttentionSpec, kv: KVPool, batch: ForwardBatch) -> torch.Tensor:
        return self.kernels.attention(
            q,
            kv.k[spec.layer],
            kv.v[spec.layer],
            batch.page_table,
            batch.rows,
            batch.cached,
            batch.cu_new,
            spec.scale,
            spec.sliding_window,
        )
