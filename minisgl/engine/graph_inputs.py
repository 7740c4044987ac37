"""The tensors that CUDA graphs read, and how a graph is recorded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .staging import IN_FLIGHT, pinned

T = TypeVar("T")

Layout = Mapping[str, int]
"""The fields of a step in their order, by name with the number of words in each."""

FLOATS = frozenset({"temperature", "top_p", "min_p", "uniform"})
"""Fields of float32; all others are int32."""

_WARMUPS = 2  # eager runs before a capture: kernels are compiled and libraries make their workspaces


class GraphInputs:
    """Memory at fixed addresses, and its pinned twins.

    The fields of a step lie one after the other, so that they arrive in one copy; where they begin depends on their
    :data:`Layout`, of which all graphs that share the memory may have their own. Floats travel as their bits.
    """

    def __init__(self, words: int, device: torch.device) -> None:
        """``words`` bounds every layout."""
        self._memory = torch.zeros(words, dtype=torch.int32, device=device)
        self._pinned = [pinned(words, torch.int32) for _ in range(IN_FLIGHT)]
        self._turn = 0

    def views(self, layout: Layout) -> dict[str, Tensor]:
        fields, start = {}, 0
        for name, size in layout.items():
            field = self._memory[start : start + size]
            fields[name] = field.view(torch.float32) if name in FLOATS else field
            start += size
        return fields

    def fill(
        self, layout: Layout, values: Mapping[str, npt.NDArray[Any]], padding: Mapping[str, float | np.integer[Any]]
    ) -> None:
        """Copies ``values`` (each at most as long as its field) in, followed by ``padding``."""
        source = self._pinned[self._turn]
        self._turn = (self._turn + 1) % len(self._pinned)
        host, start = source.numpy(), 0
        for name, size in layout.items():
            field = host[start : start + size]
            if name in FLOATS:
                field = field.view(np.float32)
            array = values.get(name)
            if array is None:
                field[:] = padding[name]
            else:
                used = len(array)
                field[:used] = array
                if used < size:
                    field[used:] = padding[name]
            start += size
        self._memory[:start].copy_(source[:start], non_blocking=True)


def record(function: Callable[[], T], pool: Any) -> tuple[torch.cuda.CUDAGraph, T]:
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
