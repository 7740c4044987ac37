"""CUDA graphs of steps in which every request has one new token: a few launches instead of hundreds.

A graph is a recording for one number of requests, so a ladder of sizes is captured at start, the largest first (all
share one memory pool, which the largest shapes). A step of B requests replays the next size up; the requests that are
missing point to the scratch row and write to the scratch page:

    B = 3, replayed as 4     rows      7   2   9   R        R = max_running_req, the scratch row
                             cached   30   5  11   0

A step is three recordings, with the attention backend's own preparation between the first two:

    enter       page table, pending ids, slots
    forward     the model, up to the logits
    sample      all parameters but penalties

A step with penalties is sampled eagerly from the logits.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from minisgl.attention.base import AttentionBackend

from .config import Progress
from .forward_batch import ForwardBatch, HostPlan, token_slots
from .model_runner import ModelRunner
from .staging import IN_FLIGHT, Staging, pinned
from .step_plan import StepPlan

T = TypeVar("T")

logger = logging.getLogger(__name__)

_WARMUPS = 2  # eager runs before a capture: kernels are compiled and libraries make their workspaces


def ladder(max_bs: int) -> list[int]:
    """The sizes to capture up to ``max_bs``, ascending: close together where a step is short, else 16 apart."""
    sizes = {1, 2, 4, *range(8, 65, 8), *range(80, max_bs + 1, 16), max_bs}
    return sorted(size for size in sizes if 1 <= size <= max_bs)


class GraphInputs:
    """The tensors that the graphs read, at fixed addresses, and their pinned twins.

    The fields of a step lie one after the other, ``size`` words each, so that they arrive in one copy; where they begin
    depends on the size of the graph. Floats travel as their bits.
    """

    INTS = ("rows", "cached", "seq_lens", "input_ids", "table_index", "table_pages", "top_k")
    FLOATS = ("temperature", "top_p", "min_p", "uniform")
    FIELDS = INTS + FLOATS

    def __init__(self, max_bs: int, device: torch.device) -> None:
        words = len(self.FIELDS) * max_bs
        self._memory = torch.zeros(words, dtype=torch.int32, device=device)
        self._pinned = [pinned(words, torch.int32) for _ in range(IN_FLIGHT)]
        self._turn = 0

    def views(self, size: int) -> dict[str, Tensor]:
        """The fields (size) of a graph of ``size`` requests."""
        block = self._memory[: len(self.FIELDS) * size].view(len(self.FIELDS), size)
        fields = dict(zip(self.FIELDS, block.unbind(), strict=True))
        for name in self.FLOATS:
            fields[name] = fields[name].view(torch.float32)
        return fields

    def fill(self, size: int, values: dict[str, np.ndarray], padding: dict[str, float]) -> None:
        """Copies ``values`` (each at most ``size`` long) in, followed by ``padding``."""
        words = len(self.FIELDS) * size
        source = self._pinned[self._turn]
        self._turn = (self._turn + 1) % len(self._pinned)
        block = source[:words].numpy().reshape(len(self.FIELDS), size)
        for field, name in zip(block, self.FIELDS, strict=True):
            if name in self.FLOATS:
                field = field.view(np.float32)
            array = values.get(name)
            used = 0 if array is None else len(array)
            if array is not None:
                field[:used] = array
            field[used:] = padding[name]
        self._memory[:words].copy_(source[:words], non_blocking=True)


class DecodeGraphs:
    """The ladder of one rank."""

    def __init__(self, runner: ModelRunner, max_bs: int, progress: Progress) -> None:
        state = runner.state
        device = state.page_table.device
        self._runner = runner
        self._sizes = ladder(max_bs)
        self._inputs = GraphInputs(max_bs, device)
        self._cu_new = torch.arange(max_bs + 1, dtype=torch.int32, device=device)
        self._logits = torch.empty(
            (max_bs, runner.model.config.vocab_size), dtype=runner.model.context.dtype, device=device
        )
        scratch = state.page_table.shape[0] - 1
        self._padding = {
            "rows": scratch,
            "cached": 0,
            "seq_lens": 1,
            "input_ids": 0,
            "table_index": scratch * state.page_table.shape[1],
            "table_pages": state.kv.num_pages,
            "top_k": 0,
            "temperature": 0.0,
            "top_p": 1.0,
            "min_p": 0.0,
            "uniform": 0.0,
        }
        gc.collect()
        torch.cuda.empty_cache()
        before = torch.cuda.mem_get_info(device)[0]
        pool = torch.cuda.graph_pool_handle()
        self._graphs: dict[int, _Graph] = {}
        for done, size in enumerate(reversed(self._sizes)):
            progress("capturing CUDA graphs", done / len(self._sizes))
            self._inputs.fill(size, {}, self._padding)
            self._graphs[size] = _Graph(self, runner.backends.decode, size, pool)
        torch.cuda.synchronize(device)
        used = before - torch.cuda.mem_get_info(device)[0]
        logger.info(
            "Captured CUDA graphs for %d batch sizes up to %d: %.2f GiB.", len(self._sizes), max_bs, used / 2**30
        )

    def fits(self, plan: StepPlan) -> bool:
        return plan.host.num_single == plan.size <= self._sizes[-1]

    def step(self, plan: StepPlan, staging: Staging) -> Tensor:
        """As :meth:`ModelRunner.step`; ``plan`` fits."""
        arrays = plan.arrays
        size = next(size for size in self._sizes if size >= plan.size)
        graph = self._graphs[size]
        values = {name: arrays[name] for name in GraphInputs.FIELDS if name in arrays}
        sampled_as_recorded = len(plan.sampled) == plan.size and "penalty_row" not in arrays
        # A request that starts on many cached pages at once has more entries than there is room for.
        table_fits = len(values.get("table_index", ())) <= size
        tensors = {} if sampled_as_recorded and table_fits else staging.upload(arrays)
        if not table_fits:
            self._runner.state.write_table(tensors["table_index"], tensors["table_pages"])
            del values["table_index"], values["table_pages"]
        self._inputs.fill(size, values, self._padding)
        graph.enter()
        graph.forward(plan.host)
        if sampled_as_recorded:
            return graph.sample()[: plan.size]
        if not len(plan.sampled):
            return self._cu_new[:0]
        logits = self._logits[: plan.size]
        if "logit_index" in tensors:
            logits = logits[tensors["logit_index"]]
        return self._runner.sample(logits, tensors)

    # What is recorded

    def forward_batch(self, size: int) -> ForwardBatch:
        """The batch of a graph. ``input_ids`` and ``slots`` are filled by :meth:`enter`."""
        inputs, state = self._inputs.views(size), self._runner.state
        return ForwardBatch(
            input_ids=torch.zeros_like(inputs["rows"]),
            positions=inputs["cached"],
            slots=torch.zeros(size, dtype=torch.int64, device=self._logits.device),
            rows=inputs["rows"],
            cached=inputs["cached"],
            seq_lens=inputs["seq_lens"],
            cu_new=self._cu_new[: size + 1],
            page_table=state.page_table,
            page_size=state.kv.page_size,
            host=HostPlan.of(np.zeros(size, np.int32), np.ones(size, np.int32)),
            graph=True,
        )

    def enter(self, batch: ForwardBatch) -> None:
        inputs, state = self._inputs.views(batch.size), self._runner.state
        state.write_table(inputs["table_index"].long(), inputs["table_pages"])
        batch.input_ids.copy_(state.resolve(inputs["input_ids"], batch.rows))
        batch.slots.copy_(token_slots(state.page_table, batch.rows, batch.positions, batch.page_size))

    def forward(self, batch: ForwardBatch) -> None:
        runner = self._runner
        hidden = runner.model(batch, runner.state.kv, runner.backends.decode)
        self._logits[: batch.size].copy_(runner.model.logits(hidden))

    def sample(self, size: int) -> Tensor:
        inputs = self._inputs.views(size)
        return self._runner.sample(self._logits[:size], inputs | {"sampled_table_rows": inputs["rows"].long()})


class _Graph:
    """The recordings for one number of requests."""

    def __init__(self, graphs: DecodeGraphs, backend: AttentionBackend, size: int, pool: Any) -> None:
        self._backend = backend
        self._batch = batch = graphs.forward_batch(size)
        self._enter, _ = _record(lambda: graphs.enter(batch), pool)
        self._enter.replay()
        backend.prepare(batch)
        self._forward, _ = _record(lambda: graphs.forward(batch), pool)
        self._sample, self._ids = _record(lambda: graphs.sample(size), pool)

    def enter(self) -> None:
        self._enter.replay()

    def forward(self, host: HostPlan) -> None:
        """``host`` is that of the step, without padding."""
        batch, missing = self._batch, self._batch.size - len(host.new)
        cached = np.concatenate((host.cached, np.zeros(missing, np.int32)))
        batch.host = HostPlan(cached, batch.host.new, batch.size, 1, host.max_seq_len)
        self._backend.prepare(batch)
        self._forward.replay()

    def sample(self) -> Tensor:
        """The ids (size, int32), overwritten by the next replay."""
        self._sample.replay()
        return self._ids


def _record(function: Callable[[], T], pool: Any) -> tuple[torch.cuda.CUDAGraph, T]:
    """A graph of what ``function`` launches on the current stream, and what it returned."""
    for _ in range(_WARMUPS):
        function()
    torch.cuda.current_stream().synchronize()
    # Not the torch.cuda.graph context, which collects garbage and empties the allocator's cache before each capture.
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin(pool=pool, capture_error_mode="thread_local")
    try:
        result = function()
    finally:
        graph.capture_end()
    return graph, result
