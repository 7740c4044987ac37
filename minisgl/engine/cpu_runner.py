"""Steps on a CPU: one worker thread computes them in order, so that the scheduler plans while torch works."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import psutil
import torch

from minisgl.core import Batch, BatchResult

from .model_runner import ModelRunner
from .step_plan import plan_step


class CpuInFlight:
    """A step in the worker's queue. What goes wrong in it is raised by :meth:`wait`."""

    __slots__ = ("_future",)

    def __init__(self, future: Future[BatchResult]) -> None:
        self._future = future

    def wait(self) -> BatchResult:
        return self._future.result()


class CpuRunner:
    """Owns the worker thread. ``build`` runs there too: every thread that computes brings a thread pool of its own."""

    def __init__(self, build: Callable[[], ModelRunner], num_threads: int) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="engine")
        try:
            self._runner = self._pool.submit(_in_worker, build, num_threads).result()
        except BaseException:
            self._pool.shutdown()
            raise
        self.info = self._runner.info
        self._max_pages = self._runner.state.page_table.shape[1]

    def launch(self, batch: Batch) -> CpuInFlight:
        return CpuInFlight(self._pool.submit(self._step, batch))

    def _step(self, batch: Batch) -> BatchResult:
        with torch.inference_mode():
            plan = plan_step(batch, self._max_pages)
            tensors = {name: torch.from_numpy(array) for name, array in plan.arrays.items()}
            return plan.result(self._runner.step(plan, tensors).numpy())

    def close(self) -> None:
        self._pool.shutdown()
        comm = self._runner.comm
        del self._runner  # and with it the model
        comm.close()


def _in_worker(build: Callable[[], ModelRunner], num_threads: int) -> ModelRunner:
    torch.set_num_threads(num_threads)
    with torch.inference_mode():
        return build()


def physical_cores() -> int:
    """Cores that this process may run on, hyperthreads not counted."""
    process = psutil.Process()
    allowed = len(process.cpu_affinity()) if hasattr(process, "cpu_affinity") else psutil.cpu_count() or 1
    per_core = max(1, (psutil.cpu_count() or 1) // (psutil.cpu_count(logical=False) or 1))
    return max(1, allowed // per_core)
