"""Steps on a GPU: launches go to a stream of their own and return at once; events tell when a step is done.

    host      launch k        launch k+1        wait k    launch k+2
    stream    [copy in | forward | sample | copy out] [copy in | ...

A step's metadata travels in one copy from pinned memory, its sampled ids come back in another. At most two steps are in
flight, so with two of each buffer the one that step k uses has been free since step k - 2 was waited for.
"""

from __future__ import annotations

import gc
import traceback
from collections.abc import Callable

import torch
from torch import Tensor

from minisgl.core import Batch, BatchResult
from minisgl.utils.progress import Progress

from .config import DEVICE_DEFAULTS
from .cuda_graph import StepGraphs
from .model_runner import ModelRunner
from .staging import IN_FLIGHT, Staging, pinned
from .step_plan import StepPlan, plan_step


class CudaInFlight:
    """A step on the stream."""

    __slots__ = ("_done", "_ids", "_plan")

    def __init__(self, plan: StepPlan, ids: Tensor, done: torch.cuda.Event) -> None:
        self._plan = plan
        self._ids = ids
        self._done = done

    def wait(self) -> BatchResult:
        self._done.synchronize()
        # A copy: the pinned buffer is written again by the next step but one.
        return self._plan.result(self._ids.numpy().copy())


class CudaRunner:
    """Owns the stream. Everything that touches the device happens in the thread that calls it."""

    def __init__(
        self,
        device: torch.device,
        build: Callable[[], ModelRunner],
        cuda_graph_max_bs: int | None,
        progress: Progress,
    ) -> None:
        self._device = device
        torch.cuda.set_device(device)
        self._stream = torch.cuda.Stream(device)
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            self._runner = build()
            self.info = self._runner.info
            if cuda_graph_max_bs is None:
                cuda_graph_max_bs = DEVICE_DEFAULTS["cuda"].cuda_graph_max_bs
            max_bs = min(cuda_graph_max_bs, self.info.max_running_req)
            try:
                self._graphs = StepGraphs(self._runner, max_bs, progress) if max_bs else None
            except BaseException as error:
                # NCCL would wait for ever for the last graph that holds a collective, and the frames of what has failed
                # hold the graphs that are there already.
                traceback.clear_frames(error.__traceback__)
                gc.collect()
                self._runner.comm.close()
                raise
        table = self._runner.state.page_table
        self._max_pages = table.shape[1]
        self._staging = Staging(device)
        self._ids = [pinned(len(table), torch.int32) for _ in range(IN_FLIGHT)]
        self._done = [torch.cuda.Event() for _ in range(IN_FLIGHT)]
        self._turn = 0

    def launch(self, batch: Batch) -> CudaInFlight:
        plan = plan_step(batch, self._max_pages)
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            if self._graphs is not None:
                ids = self._graphs.step(plan, self._staging)
            else:
                ids = self._runner.step(plan, self._staging.upload(plan.arrays))
            result, done = self._ids[self._turn][: len(ids)], self._done[self._turn]
            result.copy_(ids, non_blocking=True)
            done.record()
        self._turn = (self._turn + 1) % IN_FLIGHT
        return CudaInFlight(plan, result, done)

    def close(self) -> None:
        torch.cuda.synchronize(self._device)
        comm = self._runner.comm
        # The graphs may hold collectives, so they go before the communicator.
        del self._graphs, self._runner, self._staging
        comm.close()
        torch.cuda.empty_cache()
