"""CUDA graphs of the forward pass of any step, prompts included: one for each bucket of token counts.

A step of T tokens replays the next bucket up. Its surplus tokens belong to nobody and its surplus requests have no
length (:class:`~minisgl.attention.forward_batch.ForwardBatch`), so that one recording serves every mix of requests:

    T = 6 in a bucket of 8     tokens      a | b | c d e f | 0 0       7 requests at most, one of them is padding
                               requests    0   1     2       R R R R

Without it a step with a prompt costs hundreds of launches from the host, which a small model computes faster than they
can be made. What comes after the forward pass, a few launches, stays outside.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from minisgl.attention.forward_batch import ForwardBatch, HostPlan
from minisgl.utils.progress import Progress

from .graph_inputs import GraphInputs, Layout, record
from .model_runner import ModelRunner
from .step_plan import StepPlan

_SMALLEST = 64


def buckets(token_budget: int) -> list[int]:
    """Token counts up to ``token_budget``, ascending: two for each doubling, from 512 on four."""
    sizes = {token_budget}
    size = _SMALLEST
    while size < token_budget:
        sizes |= {size, size * 3 // 2}
        if size >= 512:
            sizes |= {size * 5 // 4, size * 7 // 4}
        size *= 2
    return sorted(size for size in sizes if size <= token_budget)


class MixedGraphs:
    """The buckets of one rank."""

    def __init__(self, runner: ModelRunner, pool: Any, progress: Progress) -> None:
        state, info = runner.state, runner.info
        device = state.page_table.device
        self._runner = runner
        self._scratch = state.page_table.shape[0] - 1
        self._sizes = buckets(info.token_budget)
        self._inputs = GraphInputs(sum(self._layout(self._sizes[-1]).values()), device)
        self._graphs: dict[int, tuple[ForwardBatch, torch.cuda.CUDAGraph, Tensor]] = {}
        for done, size in enumerate(reversed(self._sizes)):
            progress("capturing CUDA graphs of prompts", done / len(self._sizes))
            self._graphs[size] = self._record(size, pool)

    def forward(self, plan: StepPlan, tensors: Mapping[str, Tensor]) -> Tensor:
        """As :meth:`ModelRunner.forward`, from ``plan`` alone. The next step overwrites the result."""
        size = next(size for size in self._sizes if size >= plan.num_tokens)
        self._fill(size, plan)
        batch, graph, hidden = self._graphs[size]
        batch.host = plan.host
        self._runner.backends.prefill.prepare(batch)
        graph.replay()
        return hidden[: len(plan.sampled)]

    def _requests(self, size: int) -> int:
        """Of a graph, with the one that is always padding."""
        return min(self._runner.info.max_running_req, size) + 1

    def _layout(self, size: int) -> Layout:
        requests = self._requests(size)
        tokens = dict.fromkeys(("input_ids", "positions", "token_rows"), size)
        each = dict.fromkeys(("rows", "cached", "seq_lens"), requests)
        return tokens | each | {"logit_index": requests - 1, "cu_new": requests + 1}

    def _fill(self, size: int, plan: StepPlan | None) -> None:
        arrays = {} if plan is None else plan.arrays
        if plan is not None and "logit_index" not in arrays:
            arrays = arrays | {"logit_index": np.arange(plan.num_tokens, dtype=np.int64)}
        padding = {
            "input_ids": 0,
            "positions": 0,
            "token_rows": self._scratch,
            "rows": self._scratch,
            "cached": 0,
            "seq_lens": 0,
            "logit_index": 0,
            "cu_new": 0 if plan is None else plan.num_tokens,
        }
        self._inputs.fill(self._layout(size), arrays, padding)

    def _record(self, size: int, pool: Any) -> tuple[ForwardBatch, torch.cuda.CUDAGraph, Tensor]:
        state, backend = self._runner.state, self._runner.backends.prefill
        inputs = self._inputs.views(self._layout(size))
        none = np.zeros(0, np.int32)
        batch = ForwardBatch(
            input_ids=inputs["input_ids"],
            positions=inputs["positions"],
            slots=torch.zeros(size, dtype=torch.int64, device=state.page_table.device),
            rows=inputs["rows"],
            cached=inputs["cached"],
            seq_lens=inputs["seq_lens"],
            cu_new=inputs["cu_new"],
            page_table=state.page_table,
            page_size=state.kv.page_size,
            host=HostPlan.of(none, none),
            logit_index=inputs["logit_index"],
            graph="mixed",
        )

        def forward() -> Tensor:
            batch.input_ids, batch.slots = state.place(inputs["input_ids"], inputs["token_rows"], batch.positions)
            return self._runner.model(batch, state.kv, backend)

        self._fill(size, None)
        backend.prepare(batch)
        return batch, *record(forward, pool)
