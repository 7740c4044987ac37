"""Attention in plain torch, one request after the other: obviously right, and the oracle of every other backend."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from minisgl.kernel.attention_spec import AttentionSpec

from .base import AttentionBackend
from .forward_batch import token_slots

if TYPE_CHECKING:
    from minisgl.kvcache.device_pool import KVPool

    from .forward_batch import ForwardBatch


class TorchAttention(AttentionBackend):
    """Finds the slots of each request from the host's lengths, gathers them, and computes the softmax in float32."""

    def prepare(self, batch: ForwardBatch) -> None:
        plan = []
        for row, length in zip(batch.rows, (batch.host.cached + batch.host.new).tolist(), strict=True):
            positions = torch.arange(length, device=row.device)
            plan.append(token_slots(batch.page_table, row.expand(length), positions, batch.page_size))
        batch.plan = plan

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
        keys, values = kv.k[spec.layer].flatten(0, 1), kv.v[spec.layer].flatten(0, 1)
        queries = q.split(batch.host.new.tolist())
        outs = [
            attend(query, keys[slots], values[slots], spec.scale, spec.sliding_window)
            for query, slots in zip(queries, batch.plan, strict=True)
        ]
        return torch.cat(outs).flatten(1)


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, sliding_window: int | None = None
) -> torch.Tensor:
    """Causal attention of one request: ``q`` (n, Hq, D) of its last n tokens, ``k`` and ``v`` (L, Hkv, D) of all.

    Returns (n, Hq, D) in the dtype of ``q``.
    """
    new, length = q.shape[0], k.shape[0]
    group = q.shape[1] // k.shape[1]
    keys = k.float().repeat_interleave(group, dim=1)
    values = v.float().repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,khd->hqk", q.float(), keys) * scale
    query = torch.arange(length - new, length, device=q.device)[:, None]
    key = torch.arange(length, device=q.device)[None, :]
    visible = key <= query
    if sliding_window is not None:
        visible &= key > query - sliding_window
    weights = scores.masked_fill(~visible, float("-inf")).softmax(dim=-1)
    return torch.einsum("hqk,khd->qhd", weights, values).to(q.dtype)
