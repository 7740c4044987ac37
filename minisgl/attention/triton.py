"""Attention in Triton, for any page size: one kernel a layer for new tokens that are alone, two for several.

    requests with one new token      norm, rope, store and attention in one kernel
    the others, behind them          norm, rope and store in one kernel, attention in the next

Lengths are read on the device, so what is launched for one-token steps depends on the number of requests alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ..kernel.triton.decode_attention import DecodeWorkspace, FusedQKV, decode_attention
from ..kernel.triton.launch import supports_pdl
from ..kernel.triton.prefill_attention import plan_prefill, prefill_attention, prefill_config
from ..kernel.triton.rope import norm_rope_store
from .base import AttentionBackend, AttentionSpec, BackendConfig

if TYPE_CHECKING:
    from ..engine.forward_batch import ForwardBatch
    from ..engine.kv_pool import KVPool
    from ..layers.ops import Ops


@dataclass(frozen=True, slots=True)
class _Plan:
    """How many of the leading requests have one new token, and the blocks of query rows of the others, if any."""

    single: int
    blocks: torch.Tensor | None


class TritonAttention(AttentionBackend):
    """bf16, fp16 or fp32, on the GPU (or in Triton's interpreter)."""

    def __init__(self, config: BackendConfig, ops: Ops) -> None:
        super().__init__(config, ops)
        self.group = config.num_heads // config.num_kv_heads
        self.pdl = supports_pdl(config.device)
        self.prefill = prefill_config(config.head_dim, config.dtype.itemsize)
        self.workspace = DecodeWorkspace(
            config.max_running_req,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            config.dtype,
            config.device,
        )

    def prepare(self, batch: ForwardBatch) -> None:
        host = batch.host
        blocks = None
        if host.num_single < batch.size:
            plan = plan_prefill(
                host.cached[host.num_single :], host.new[host.num_single :], self.group, self.prefill.rows
            )
            on_host = torch.from_numpy(plan)
            if self.config.device.type == "cuda":
                on_host = on_host.pin_memory()  # from torch's cache of pinned memory, which waits for the copy
            blocks = on_host.to(self.config.device, non_blocking=True)
        batch.plan = _Plan(host.num_single, blocks)
        if host.num_single:
            for window in self.workspace.plans:
                self.workspace.plan(window, batch.seq_lens[: host.num_single], pdl=False)

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
        out = self._empty(q, spec)
        single = batch.plan.single
        if single:
            self._decode(q[:single], out[:single], spec, kv, batch)
        if single < batch.size:
            self._prefill(q[single:], out[single:], spec, kv, batch)
        return out

    def forward_qkv(self, qkv: torch.Tensor, spec: AttentionSpec, kv: KVPool, batch: ForwardBatch) -> torch.Tensor:
        out = self._empty(qkv, spec)
        single = batch.plan.single
        if single:
            self._decode(FusedQKV(qkv[:single], batch.slots[:single]), out[:single], spec, kv, batch)
        if single < batch.size:
            q = norm_rope_store(
                qkv[single:],
                spec,
                kv.k[spec.layer],
                kv.v[spec.layer],
                batch.positions[single:],
                batch.slots[single:],
                pdl=self.pdl,
            )
            self._prefill(q, out[single:], spec, kv, batch)
        return out

    def _empty(self, like: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
        return torch.empty((like.shape[0], spec.num_heads * spec.head_dim), dtype=like.dtype, device=like.device)

    def _decode(
        self, q: torch.Tensor | FusedQKV, out: torch.Tensor, spec: AttentionSpec, kv: KVPool, batch: ForwardBatch
    ) -> None:
        single = batch.plan.single
        pdl = self.pdl
        if spec.sliding_window not in self.workspace.plans:
            # The first layer of its kind in the first step. From then on prepare plans for it.
            self.workspace.plan(spec.sliding_window, batch.seq_lens[:single])
            pdl = False
        decode_attention(
            q,
            kv.k[spec.layer],
            kv.v[spec.layer],
            batch.page_table,
            batch.rows[:single],
            batch.seq_lens[:single],
            spec,
            self.workspace,
            out,
            pdl=pdl,
        )

    def _prefill(
        self, q: torch.Tensor, out: torch.Tensor, spec: AttentionSpec, kv: KVPool, batch: ForwardBatch
    ) -> None:
        single = batch.plan.single
        prefill_attention(
            q,
            kv.k[spec.layer],
            kv.v[spec.layer],
            batch.page_table,
            batch.rows[single:],
            batch.seq_lens[single:],
            batch.cu_new[single:],
            batch.plan.blocks,
            spec,
            out,
            self.prefill,
            pdl=self.pdl,
        )
