"""Compiles kernels for Hopper without a GPU, and reads registers, spills and shared memory off the result.

Triton needs a driver only to ask for the device and to load what it compiled. :class:`OfflineDriver` answers the first
and keeps the second: a launch on CPU tensors then compiles exactly the variant that the same launch on a GPU would.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase

SHARED_MEMORY_LIMIT = 232448


@dataclass
class Usage:
    """What a compiled kernel takes. ``wgmma`` and ``mma`` count matrix instructions.

    ``serialized`` counts those of the first kind that wait for the one before them, a sign that registers are short.
    """

    name: str
    registers: int
    spill_bytes: int
    shared: int
    warps: int
    wgmma: int
    mma: int
    serialized: int


@dataclass
class OfflineDriver(DriverBase):
    compiled: list[Usage] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.utils = SimpleNamespace(
            load_binary=self._load, get_device_properties=lambda device: {"max_shared_mem": SHARED_MEMORY_LIMIT}
        )
        self.launcher_cls = self._launcher

    def _load(self, name: str, binary: bytes, shared: int, *_: Any) -> tuple[int, int, int, int, int]:
        registers, stack = resources(binary)
        code = disassembly(binary)
        order = re.findall(r"HGMMA|WARPGROUP\.DEPBAR", code)
        usage = Usage(
            name=name,
            registers=registers,
            spill_bytes=stack,
            shared=shared,
            warps=self._metadata.num_warps,
            wgmma=code.count("HGMMA."),
            mma=code.count(" HMMA."),
            serialized="".join(word[0] for word in order).count("HWHWHW"),
        )
        self.compiled.append(usage)
        return 0, 0, registers, stack, 1024

    def _launcher(self, source: Any, metadata: Any) -> Any:
        self._metadata = metadata
        return lambda *args, **kwargs: None

    @classmethod
    def is_active(cls) -> bool:
        return True

    def map_python_to_cpp_type(self, ty: str) -> str:
        return ty

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_benchmarker(self) -> Any:
        raise NotImplementedError


def _tool(name: str, binary: bytes, option: str) -> str:
    path = Path(triton.__file__).parent / "backends/nvidia/bin" / name
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        return subprocess.run([path, option, file.name], capture_output=True, text=True, check=True).stdout


def resources(binary: bytes) -> tuple[int, int]:
    """Registers per thread and stack bytes (spills) of a cubin."""
    text = _tool("cuobjdump", binary, "-res-usage")
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert found, text
    return int(found[1]), int(found[2])


def disassembly(binary: bytes) -> str:
    return _tool("nvdisasm", binary, "-c")


def install() -> OfflineDriver:
    driver = OfflineDriver()
    triton.runtime.driver.set_active(driver)
    return driver
