"""Attention in Triton, for any page size: one kernel a layer for new tokens that are alone, two for several.

    requests with one new token      norm, rope, store and attention in one kernel
    the others, behind them          norm, rope and store in one kernel, attention in the next

Lengths are read on the device, so what is launched for one-token steps depends on the number of requests alone. In a
CUDA graph of any other step it depends on the number of tokens alone: one kernel norms, rotates and stores all of them,
one attends for the leading requests with one new token, and one for the blocks of the others, of which there may be as
many as so many tokens can need. Requests without a length and blocks of them cost next to nothing.

The kernel for single tokens shares out its work by the lengths of all of them, so what it adds up in which order
depends on the neighbours. Made ``deterministic``, the backend does without it and takes single tokens as chunks of one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from ..kernel.attention_spec import AttentionSpec
from ..kernel.triton.decode_attention import DecodeWorkspace, FusedQKV, decode_attention
from ..kernel.triton.launch import supports_pdl
from ..kernel.triton.prefill_attention import plan_prefill, prefill_attention, prefill_config
from ..kernel.triton.rope import norm_rope_store
from .base import AttentionBackend, BackendConfig, in_pinned_memory
from .forward_batch import HostPlan

if TYPE_CHECKING:
    from ..kernel.ops import Ops
    from ..kvcache.device_pool import KVPool
    from .forward_batch import ForwardBatch


@dataclass(frozen=True, slots=True)
class _Plan:
    """How many of the leading requests are attended for as single tokens, and the blocks of query rows of the others,
    if any."""

    single: int
    blocks: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class _MixedPlan:
    """The same at fixed addresses, filled by one copy to ``memory``: ``blocks`` (2, as many as there can be), and
    ``lengths``, those of requests that are attended for as single tokens and 0 for all others."""

    memory: torch.Tensor
    blocks: torch.Tensor
    lengths: torch.Tensor


class TritonAttention(AttentionBackend):
    """bf16, fp16 or fp32, on the GPU (or in Triton's interpreter)."""

    serves_graphs = frozenset({"single", "mixed"})

    def __init__(self, config: BackendConfig, ops: Ops) -> None:
        super().__init__(config, ops)
        self.group = config.num_heads // config.num_kv_heads
        self.pdl = supports_pdl(config.device)
        self.prefill = prefill_config(config.head_dim, config.dtype.itemsize, singles=config.deterministic)
        self.workspace = DecodeWorkspace(
            config.max_running_req,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            config.dtype,
            config.device,
        )
        self._out: torch.Tensor | None = None
        """Of graphs. Their surplus tokens see what an earlier step has left there, so it begins as zero."""

    def prepare(self, batch: ForwardBatch) -> None:
        if batch.graph is not None and self._out is None:
            rows = max(self.config.token_budget, self.config.max_running_req)
            width = self.config.num_heads * self.config.head_dim
            self._out = torch.zeros((rows, width), dtype=self.config.dtype, device=self.config.device)
        if batch.graph == "mixed":
            self._prepare_mixed(batch)
            return
        host = batch.host
        if batch.graph == "single":
            if batch.plan is not None:
                return  # It is the same for every replay.
            ones = np.ones(batch.size, np.int32)
            host = HostPlan.of(0 * ones, ones)
        single = self._num_single(host)
        blocks = None
        if single < batch.size:
            device = self.config.device
            blocks = in_pinned_memory(self._blocks(host), device).to(device, non_blocking=True)
        batch.plan = _Plan(single, blocks)

    def _num_single(self, host: HostPlan) -> int:
        """How many of the leading requests are attended for as single tokens."""
        return 0 if self.config.deterministic else host.num_single

    def _prepare_mixed(self, batch: ForwardBatch) -> None:
        device, host = self.config.device, batch.host
        if batch.plan is None:
            most = batch.num_tokens * self.group // self.prefill.rows + batch.size
            singles = 0 if self.config.deterministic else batch.size - 1
            memory = torch.empty(2 * most + singles, dtype=torch.int32, device=device)
            batch.plan = _MixedPlan(memory, memory[: 2 * most].view(2, most), memory[2 * most :])
        plan = batch.plan
        most, single = plan.blocks.shape[1], self._num_single(host)
        found = self._blocks(host)
        values = np.zeros(len(plan.memory), np.int32)
        blocks = values[: 2 * most].reshape(2, most)
        blocks[0] = batch.size - 1
        blocks[0, : found.shape[1]] = found[0] + single
        blocks[1, : found.shape[1]] = found[1]
        values[2 * most :][:single] = host.cached[:single] + 1
        plan.memory.copy_(in_pinned_memory(values, device), non_blocking=True)

    def _blocks(self, host: HostPlan) -> npt.NDArray[np.int32]:
        single = self._num_single(host)
        return plan_prefill(host.cached[single:], host.new[single:], self.group, self.prefill.rows)

    def begin(self, batch: ForwardBatch) -> None:
        plan = batch.plan
        lengths = plan.lengths if isinstance(plan, _MixedPlan) else batch.seq_lens[: plan.single]
        if len(lengths):
            for window in self.workspace.plans:
                self.workspace.plan(window, lengths)

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
        if isinstance(batch.plan, _MixedPlan):
            return self._mixed(q, spec, kv, batch)
        out = self._output(q, batch)
        single = batch.plan.single
        if single:
            self._decode(q[:single], out[:single], spec, kv, batch)
        if single < batch.size:
            self._prefill(q[single:], out[single:], spec, kv, batch)
        return out

    def forward_qkv(self, qkv: torch.Tensor, spec: AttentionSpec, kv: KVPool, batch: ForwardBatch) -> torch.Tensor:
        if isinstance(batch.plan, _MixedPlan):
            return self._mixed(self._norm_rope_store(qkv, spec, kv, batch, 0), spec, kv, batch)
        out = self._output(qkv, batch)
        single = batch.plan.single
        if single:
            self._decode(FusedQKV(qkv[:single], batch.slots[:single]), out[:single], spec, kv, batch)
        if single < batch.size:
            self._prefill(self._norm_rope_store(qkv, spec, kv, batch, single), out[single:], spec, kv, batch)
        return out

    def _norm_rope_store(
        self, qkv: torch.Tensor, spec: AttentionSpec, kv: KVPool, batch: ForwardBatch, first: int
    ) -> torch.Tensor:
        """Of the tokens from ``first`` on."""
        keys, values = kv.k[spec.layer], kv.v[spec.layer]
        return norm_rope_store(
            qkv[first:], spec, keys, values, batch.positions[first:], batch.slots[first:], pdl=self.pdl
        )

    def _mixed(self, q: torch.Tensor, spec: AttentionSpec, kv: KVPool, batch: ForwardBatch) -> torch.Tensor:
        out, most = self._output(q, batch), len(batch.plan.lengths)
        if most:
            self._decode(q[:most], out[:most], spec, kv, batch)
        self._prefill(q, out, spec, kv, batch)
        return out

    def _output(self, like: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        if batch.graph is not None:
            assert self._out is not None
            return self._out[: batch.num_tokens]
        width = self.config.num_heads * self.config.head_dim
        return torch.empty((batch.num_tokens, width), dtype=like.dtype, device=like.device)

    def _decode(
        self, q: torch.Tensor | FusedQKV, out: torch.Tensor, spec: AttentionSpec, kv: KVPool, batch: ForwardBatch
    ) -> None:
        plan, pdl = batch.plan, self.pdl
        lengths = plan.lengths if isinstance(plan, _MixedPlan) else batch.seq_lens[: plan.single]
        if spec.sliding_window not in self.workspace.plans:
            # The first layer of its kind in the first step. From then on begin plans for it.
            self.workspace.plan(spec.sliding_window, lengths)
            pdl = False
        decode_attention(
            q,
            kv.k[spec.layer],
            kv.v[spec.layer],
            batch.page_table,
            batch.rows[: len(lengths)],
            lengths,
            spec,
            self.workspace,
            out,
            pdl=pdl,
        )

    def _prefill(
        self, q: torch.Tensor, out: torch.Tensor, spec: AttentionSpec, kv: KVPool, batch: ForwardBatch
    ) -> None:
        single = 0 if isinstance(batch.plan, _MixedPlan) else batch.plan.single
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
