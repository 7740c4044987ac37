"""Runs one planned step on the device: page table, forward pass, sampling. The same code for all devices."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from minisgl.attention.base import AttentionBackend
from minisgl.attention.forward_batch import ForwardBatch, token_slots
from minisgl.core import EngineInfo
from minisgl.distributed.communicator import Communicator
from minisgl.kvcache.device_pool import KVPool
from minisgl.models.base import CausalLM

from .sampler import Sampler
from .step_plan import StepPlan

Forward = Callable[[StepPlan, Mapping[str, Tensor]], Tensor]
"""From a plan and its arrays on the device to the hidden states (S, hidden_size) of the tokens to sample after."""


@dataclass(frozen=True, slots=True)
class Backends:
    """The attention backend of steps in which every request has one new token, and that of all others."""

    prefill: AttentionBackend
    decode: AttentionBackend

    def of(self, num_single: int, size: int) -> AttentionBackend:
        return self.decode if num_single == size else self.prefill


class DeviceState:
    """What stays on the device between steps.

    ``page_table`` (max_running_req + 1, max_pages_per_req) int32: which page holds which tokens of a row.
    ``last_token`` (max_running_req + 1) int32: the token that each row sampled last, for PENDING. The last row is
    scratch: it points to the scratch page of ``kv`` everywhere, and padding uses it.
    """

    def __init__(self, max_running_req: int, max_pages_per_req: int, kv: KVPool) -> None:
        device = kv.k.device
        self.kv = kv
        self.page_table = torch.full(
            (max_running_req + 1, max_pages_per_req), kv.num_pages, dtype=torch.int32, device=device
        )
        self.last_token = torch.zeros(max_running_req + 1, dtype=torch.int32, device=device)

    def write_table(self, index: Tensor, pages: Tensor) -> None:
        """``index`` points into the flat table."""
        self._scatter(self.page_table.view(-1), index, pages)

    def place(self, input_ids: Tensor, token_rows: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """``input_ids`` with the last sampled token of the row in place of PENDING, and the slots of the tokens."""
        page_size = self.kv.page_size
        if input_ids.device.type == "cuda":
            from minisgl.kernel.triton.tokens import place_tokens

            return place_tokens(input_ids, token_rows, positions, self.page_table, self.last_token, page_size)
        ids = torch.where(input_ids < 0, self.last_token[token_rows], input_ids)
        return ids, token_slots(self.page_table, token_rows, positions, page_size)

    def remember(self, table_rows: Tensor, ids: Tensor) -> None:
        """Keeps what was sampled. A failed request has no token; the step after it, under way already, gets 0."""
        self._scatter(self.last_token, table_rows, ids)

    def _scatter(self, dest: Tensor, index: Tensor, values: Tensor) -> None:
        """``dest[index] = values``, with 0 for negative ones."""
        if dest.device.type == "cuda":
            from minisgl.kernel.triton.tokens import scatter

            scatter(dest, index, values)
        else:
            dest[index.long()] = values.clamp(min=0)


class ModelRunner:
    """Steps of one rank, eagerly. Every rank runs the same steps; the ids that rank 0 sampled count for all."""

    def __init__(
        self,
        model: CausalLM,
        state: DeviceState,
        backends: Backends,
        sampler: Sampler,
        comm: Communicator,
        info: EngineInfo,
    ) -> None:
        self.info = info
        self.model = model
        self.state = state
        self.backends = backends
        self.sampler = sampler
        self.comm = comm

    def step(self, plan: StepPlan, tensors: Mapping[str, Tensor], forward: Forward | None = None) -> Tensor:
        """The sampled ids (S, int32), -1 where a request failed. ``tensors`` are the plan's arrays on the device.

        ``forward`` stands in for :meth:`forward`.
        """
        if "table_index" in tensors:
            self.state.write_table(tensors["table_index"], tensors["table_pages"])
        hidden = (forward or self.forward)(plan, tensors)
        if not len(plan.sampled):
            return torch.empty(0, dtype=torch.int32, device=hidden.device)
        return self.sample(self.model.logits(hidden), tensors)

    def forward(self, plan: StepPlan, tensors: Mapping[str, Tensor]) -> Tensor:
        """The hidden states (S, hidden_size) of the tokens to sample after."""
        state = self.state
        positions = tensors["positions"]
        input_ids, slots = state.place(tensors["input_ids"], tensors["token_rows"], positions)
        batch = ForwardBatch(
            input_ids=input_ids,
            positions=positions,
            slots=slots,
            rows=tensors["rows"],
            cached=tensors["cached"],
            seq_lens=tensors["seq_lens"],
            cu_new=tensors["cu_new"],
            page_table=state.page_table,
            page_size=state.kv.page_size,
            host=plan.host,
            logit_index=tensors.get("logit_index"),
        )
        backend = self.backends.of(plan.host.num_single, plan.size)
        backend.prepare(batch)
        return self.model(batch, state.kv, backend)

    def sample(self, logits: Tensor, tensors: Mapping[str, Tensor]) -> Tensor:
        """Samples from ``logits`` (S, vocab_size) on rank 0, tells the other ranks, and remembers."""
        if self.comm.rank == 0:
            ids = self.sampler(logits, tensors, self.state.last_token)
        else:
            ids = torch.empty(len(logits), dtype=torch.int32, device=logits.device)
        ids = self.comm.broadcast(ids)
        self.state.remember(tensors["sampled_table_rows"], ids)
        return ids
