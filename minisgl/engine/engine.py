"""The engine of one rank: the data plane behind the seam of :mod:`minisgl.core`. Loads torch when one is made."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from minisgl.core import Batch, EngineInfo, InFlight
from minisgl.utils.progress import Progress, silent

from .config import EngineConfig

if TYPE_CHECKING:
    from minisgl.distributed.communicator import RankWatch

    from .cpu_runner import CpuRunner
    from .cuda_runner import CudaRunner
    from .model_runner import ModelRunner


class TorchEngine:
    """Implements :class:`minisgl.core.Engine` on a CPU or a GPU.

    ``progress`` is told how the start goes on; ``watch`` knows about the other ranks, if somebody does. Raises
    ValueError for what cannot be served, and :class:`~minisgl.engine.memory.OutOfMemoryError` for what does not fit,
    each in one sentence.
    """

    info: EngineInfo

    def __init__(self, config: EngineConfig, progress: Progress = silent, watch: RankWatch | None = None) -> None:
        progress("loading torch", None)
        _limit_spinning()
        from .load import load, pick_device

        device = pick_device(config)

        def build() -> ModelRunner:
            return load(config, device, progress, watch)

        self._runner: CpuRunner | CudaRunner
        if device.type == "cuda":
            from .cuda_runner import CudaRunner

            self._runner = CudaRunner(device, build, config.cuda_graph_max_bs, progress)
        else:
            from .cpu_runner import CpuRunner, physical_cores

            threads = config.num_threads or max(1, physical_cores() // config.tp_size)
            self._runner = CpuRunner(build, threads)
        self.info = self._runner.info

    def launch(self, batch: Batch) -> InFlight:
        return self._runner.launch(batch)

    def close(self) -> None:
        self._runner.close()


def _limit_spinning() -> None:
    """Makes an idle OpenMP thread of torch sleep after some 20 microseconds; it would spin for milliseconds.

    Other processes need the core, and so do the threads of our own kernels. The runtime reads this when torch is
    imported; where that has happened already, nothing changes.
    """
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
