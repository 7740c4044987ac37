"""CUDA graphs of steps in which every request has one new token: a few launches instead of hundreds.

A graph is a recording for one number of requests, so a ladder of sizes is captured at start, the largest first (all
share one memory pool, which the largest shapes). A step of B requests replays the next size up; the requests that are
missing point to the scratch row, and have no length, so that nobody attends for them:

    B = 3, replayed as 4     rows      7   2   9   R        R = max_running_req, the scratch row
                             cached   30   5  11   0
                             seq_lens 31   6  12   0

A step is two recordings:

    forward     page table, pending ids, slots; the model, up to the logits
    sample      all parameters but penalties

A step with penalties is sampled eagerly from the logits. Steps with prompts have graphs of their own
(:mod:`.mixed_graph`).
"""

from __future__ import annotations

import gc
import logging
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from minisgl.attention.base import AttentionBackend
from minisgl.attention.forward_batch import ForwardBatch, GraphKind, HostPlan
from minisgl.utils.progress import Progress

from .graph_inputs import GraphInputs, Layout, record
from .memory import gib
from .mixed_graph import MixedGraphs
from .model_runner import ModelRunner
from .staging import Staging
from .step_plan import StepPlan

logger = logging.getLogger(__name__)

_TABLE = ("table_index", "table_pages")
_INPUTS = ("rows", "cached", "seq_lens", "input_ids", *_TABLE)
FIELDS = (*_INPUTS, "top_k", "temperature", "top_p", "min_p", "uniform")
"""What a step of single tokens brings along, one word of each for each request."""


def ladder(max_bs: int) -> list[int]:
    """The sizes to capture up to ``max_bs``, ascending: close together where a step is short, else 16 apart."""
    sizes = {1, 2, 4, *range(8, 65, 8), *range(80, max_bs + 1, 16), max_bs}
    return sorted(size for size in sizes if 1 <= size <= max_bs)


class DecodeGraphs:
    """The ladder of one rank."""

    def __init__(self, runner: ModelRunner, max_bs: int, pool: Any, progress: Progress) -> None:
        state = runner.state
        device = state.page_table.device
        self._runner = runner
        self._sizes = ladder(max_bs)
        self._inputs = GraphInputs(len(FIELDS) * max_bs, device)
        self._cu_new = torch.arange(max_bs + 1, dtype=torch.int32, device=device)
        self._logits = torch.empty(
            (max_bs, runner.model.config.vocab_size), dtype=runner.model.context.dtype, device=device
        )
        scratch = state.page_table.shape[0] - 1
        self._padding = dict.fromkeys(FIELDS, 0) | {
            "rows": scratch,
            "table_index": scratch * state.page_table.shape[1],
            "table_pages": state.kv.num_pages,
            "top_p": 1,
        }
        self._graphs: dict[int, _Graph] = {}
        for done, size in enumerate(reversed(self._sizes)):
            progress("capturing CUDA graphs", done / len(self._sizes))
            self._graphs[size] = self._record(size, pool)

    def fits(self, plan: StepPlan) -> bool:
        return plan.host.num_single == plan.size <= self._sizes[-1]

    def step(self, plan: StepPlan, staging: Staging) -> Tensor:
        """As :meth:`ModelRunner.step`; ``plan`` fits."""
        arrays = plan.arrays
        size = next(size for size in self._sizes if size >= plan.size)
        graph = self._graphs[size]
        sampled_as_recorded = len(plan.sampled) == plan.size and "penalty_row" not in arrays
        # A request that starts on many cached pages at once has more entries than there is room for.
        table_fits = len(arrays.get("table_index", ())) <= size
        tensors = {} if sampled_as_recorded and table_fits else staging.upload(arrays)
        if not table_fits:
            self._runner.state.write_table(tensors["table_index"], tensors["table_pages"])
            arrays = {name: array for name, array in arrays.items() if name not in _TABLE}
        self._inputs.fill(self._layout(size), arrays, self._padding)
        graph.batch.host = plan.host
        self._runner.backends.decode.prepare(graph.batch)
        graph.forward.replay()
        if sampled_as_recorded:
            graph.sample.replay()
            return graph.ids[: plan.size]
        if not len(plan.sampled):
            return self._cu_new[:0]
        logits = self._logits[: plan.size]
        if "logit_index" in tensors:
            logits = logits[tensors["logit_index"]]
        return self._runner.sample(logits, tensors)

    @staticmethod
    def _layout(size: int) -> Layout:
        return dict.fromkeys(FIELDS, size)

    def _record(self, size: int, pool: Any) -> _Graph:
        runner, state, backend = self._runner, self._runner.state, self._runner.backends.decode
        self._inputs.fill(self._layout(size), {}, self._padding)
        inputs = self._inputs.views(self._layout(size))
        rows, logits, none = inputs["rows"], self._logits[:size], np.zeros(0, np.int32)
        batch = ForwardBatch(
            input_ids=inputs["input_ids"],
            positions=inputs["cached"],
            slots=torch.zeros(size, dtype=torch.int64, device=logits.device),
            rows=rows,
            cached=inputs["cached"],
            seq_lens=inputs["seq_lens"],
            cu_new=self._cu_new[: size + 1],
            page_table=state.page_table,
            page_size=state.kv.page_size,
            host=HostPlan.of(none, none),
            graph="single",
        )

        def forward() -> None:
            state.write_table(inputs["table_index"], inputs["table_pages"])
            batch.input_ids, batch.slots = state.place(inputs["input_ids"], rows, batch.positions)
            runner.model.logits(runner.model(batch, state.kv, backend), out=logits)

        def sample() -> Tensor:
            return runner.sample(logits, inputs | {"sampled_table_rows": rows})

        backend.prepare(batch)
        return _Graph(batch, record(forward, pool)[0], *record(sample, pool))


@dataclass(frozen=True, slots=True)
class _Graph:
    """The recordings for one number of requests, and the ``batch`` that the backend prepares for a replay.

    ``ids`` (size, int32) are overwritten by the next one.
    """

    batch: ForwardBatch
    forward: torch.cuda.CUDAGraph
    sample: torch.cuda.CUDAGraph
    ids: Tensor


class StepGraphs:
    """All graphs of one rank. Steps that none of them serves run eagerly.

    Mixed graphs are there beside a ladder of more than one size: who asks for a single one wants a quick start.
    """

    def __init__(self, runner: ModelRunner, max_bs: int, progress: Progress) -> None:
        device = runner.state.page_table.device
        backends = runner.backends
        gc.collect()
        torch.cuda.empty_cache()
        before = torch.cuda.mem_get_info(device)[0]
        pool = torch.cuda.graph_pool_handle()
        self._runner = runner
        # The largest come first, so that all others find room in the memory of those.
        mixed = max_bs > 1 and self._serves(backends.prefill, "mixed", "steps with prompts")
        self.mixed = MixedGraphs(runner, pool, progress) if mixed else None
        single = self._serves(backends.decode, "single", "steps of single tokens")
        self.decode = DecodeGraphs(runner, max_bs, pool, progress) if single else None
        torch.cuda.synchronize(device)
        used = before - torch.cuda.mem_get_info(device)[0]
        logger.info("CUDA graphs for up to %d requests take %s.", max_bs, gib(used))

    def _serves(self, backend: AttentionBackend, kind: GraphKind, steps: str) -> bool:
        serves = kind in backend.serves_graphs
        if not serves and self._runner.comm.rank == 0:
            logger.info("%s serves no CUDA graphs of %s: these run eagerly.", type(backend).__name__, steps)
        return serves

    def step(self, plan: StepPlan, staging: Staging) -> Tensor:
        """As :meth:`ModelRunner.step`."""
        if self.decode is not None and self.decode.fits(plan):
            return self.decode.step(plan, staging)
        tensors = staging.upload(plan.arrays)
        return self._runner.step(plan, tensors, None if self.mixed is None else self.mixed.forward)
