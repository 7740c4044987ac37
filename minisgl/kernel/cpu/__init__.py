"""Kernels for CPUs in C++: fp32, bitwise independent of batch, chunking and thread count.

kernels = load()                            # None without a compiler: the plain torch path serves, slower
weight = kernels.pack(matrix, bias)         # once, after loading; then drop the matrix
y = weight.matmul(x)                        # (M, K) -> (M, N)
"""

from __future__ import annotations

import functools
import logging

import torch

from minisgl.env import cache_dir

from .build import BuildError, build_library
from .kernels import CpuKernels, PackedWeight

__all__ = ["CpuKernels", "PackedWeight", "load"]

logger = logging.getLogger(__name__)


def detect_isa() -> str:
    """The best instruction set that this machine and the kernels have in common."""
    return {"AVX512": "avx512", "AVX2": "avx2"}.get(torch.backends.cpu.get_cpu_capability(), "portable")


@functools.cache
def load(isa: str | None = None) -> CpuKernels | None:
    """The kernels for ``isa`` (default: the best of this machine), compiled on the first use ever (a few seconds).

    None where they cannot be had; one log line says why and what it costs.
    """
    try:
        return CpuKernels(build_library(isa or detect_isa(), cache_dir() / "kernels"))
    except (BuildError, OSError) as error:
        logger.warning("Plain torch instead of the CPU kernels, several times slower: %s.", error)
        return None
