"""The engine of one rank: the data plane behind the seam of :mod:`minisgl.core`."""

from __future__ import annotations

from minisgl.core import Batch, EngineInfo, InFlight

from .config import DEVICE_DEFAULTS, EngineConfig, Progress
from .cpu_runner import CpuRunner, physical_cores
from .cuda_runner import CudaRunner
from .load import load, pick_device


class TorchEngine:
    """Implements :class:`minisgl.core.Engine` on a CPU or a GPU.

    ``progress`` is told how the start goes on. Raises ValueError for what cannot be served, and
    :class:`~minisgl.engine.memory.OutOfMemoryError` for what does not fit, each in one sentence.
    """

    info: EngineInfo

    def __init__(self, config: EngineConfig, progress: Progress | None = None) -> None:
        told = progress or (lambda what, fraction: None)
        device = pick_device(config)
        self._runner: CpuRunner | CudaRunner
        if device.type == "cuda":
            graphs = config.cuda_graph_max_bs
            max_bs = DEVICE_DEFAULTS["cuda"].cuda_graph_max_bs if graphs is None else graphs
            self._runner = CudaRunner(device, lambda: load(config, device, told), max_bs, told)
        else:
            threads = config.num_threads or max(1, physical_cores() // config.tp_size)
            self._runner = CpuRunner(lambda: load(config, device, told), threads)
        self.info = self._runner.info

    def launch(self, batch: Batch) -> InFlight:
        return self._runner.launch(batch)

    def close(self) -> None:
        self._runner.close()
