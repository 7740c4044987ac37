"""What an engine is built from. Torch-free: the command line fills it in, any process may hold one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

DType = Literal["auto", "float32", "bfloat16", "float16"]
Device = Literal["auto", "cpu", "cuda"]
LoadFormat = Literal["auto", "dummy"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """How one rank of an engine is built. None leaves a choice to the device (:class:`DeviceDefaults`).

    ``model_path`` is a directory with a config.json, or a .gguf file. ``dtype`` "auto" is fp32 on a CPU and the
    checkpoint's own type on a GPU. ``num_pages`` None sizes the KV cache from free memory: ``memory_ratio`` is the
    share of the GPU's memory that weights, activations and KV cache may take together, or the share of the host's
    available memory that the KV cache may grow to. ``attention`` is "auto", the name of a backend, or "prefill,decode".
    ``rendezvous`` is a file through which the ranks find each other; it must not exist before, and is needed from two
    ranks on. ``cuda_graph_max_bs`` 0 runs without CUDA graphs. ``deterministic``: what a request answers does not
    depend, to the last bit, on its neighbours, chunks, cache hits or pre-emption; the kernels of a CPU are so anyway.
    ``num_threads`` is for CPUs; None means all physical cores that this process may use, shared among the ranks.
    """

    model_path: Path
    dtype: DType = "auto"
    device: Device = "auto"
    load_format: LoadFormat = "auto"
    tp_rank: int = 0
    tp_size: int = 1
    rendezvous: Path | None = None
    num_pages: int | None = None
    page_size: int = 16
    memory_ratio: float | None = None
    max_running_req: int | None = None
    max_seq_len: int | None = None
    token_budget: int | None = None
    attention: str = "auto"
    cuda_graph_max_bs: int | None = None
    deterministic: bool = False
    num_threads: int | None = None

    def __post_init__(self) -> None:
        def need(ok: bool, name: str, allowed: str) -> None:
            if not ok:
                raise ValueError(f"{name} must be {allowed}, not {getattr(self, name)!r}.")

        need(self.dtype in get_args(DType), "dtype", "one of " + ", ".join(get_args(DType)))
        need(self.device in get_args(Device), "device", "one of " + ", ".join(get_args(Device)))
        need(self.load_format in get_args(LoadFormat), "load_format", "one of " + ", ".join(get_args(LoadFormat)))
        need(self.tp_size >= 1, "tp_size", "at least 1")
        need(0 <= self.tp_rank < self.tp_size, "tp_rank", f"in 0 .. {self.tp_size - 1}")
        need(self.tp_size == 1 or self.rendezvous is not None, "rendezvous", "set when tp_size is above 1")
        need(self.page_size >= 1, "page_size", "at least 1")
        need(self.memory_ratio is None or 0 < self.memory_ratio < 1, "memory_ratio", "between 0 and 1")
        for name in ("num_pages", "max_running_req", "max_seq_len", "token_budget", "num_threads"):
            value = getattr(self, name)
            need(value is None or value >= 1, name, "at least 1")
        need(self.cuda_graph_max_bs is None or self.cuda_graph_max_bs >= 0, "cuda_graph_max_bs", "0 (off) or more")


@dataclass(frozen=True, slots=True)
class DeviceDefaults:
    """What an :class:`EngineConfig` leaves open, by kind of device.

    The CPU's share of memory is small because its pages are touched only as they are used, and other programs live in
    the same memory; its token budget bounds the time of a step, which is the gap between two tokens of a stream.
    """

    max_running_req: int
    token_budget: int
    memory_ratio: float
    cuda_graph_max_bs: int


DEVICE_DEFAULTS = {
    "cpu": DeviceDefaults(max_running_req=64, token_budget=256, memory_ratio=0.3, cuda_graph_max_bs=0),
    "cuda": DeviceDefaults(max_running_req=256, token_budget=8192, memory_ratio=0.9, cuda_graph_max_bs=256),
}
