"""Memory on the GPU of each rank of a host that all the others can write to, by CUDA's sharing between processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class PeerMemory:
    """``size`` bytes of each rank, all zero. Every rank makes an offer, then takes those of all.

    Both raise RuntimeError where the machine cannot do it. What a rank has offered may be freed only when no other has
    it open any more: :meth:`close` ends this rank's use of the others' memory, :meth:`free` is for the end of theirs.
    """

    def __init__(self, device: torch.device, size: int) -> None:
        self._device = device
        self._size = size
        self._own: int | None = None
        self._others: list[int] = []
        self.addresses: list[int] = []
        """Of all ranks' memories, as this process sees them, in rank order; empty before :meth:`take`."""

    def offer(self) -> bytes:
        """Allocates this rank's part. What comes back opens it in another process, on this host."""
        driver = _driver()
        with torch.cuda.device(self._device):
            torch.cuda.synchronize()  # the driver's functions want a context, which torch makes when it needs one
            # Not by torch: a handle opens a whole allocation, and torch would cut several tensors from one.
            self._own = int(_call(driver.cuMemAlloc, self._size))
            _call(driver.cuMemsetD8, self._own, 0, self._size)
            torch.cuda.synchronize()
            return bytes(_call(driver.cuIpcGetMemHandle, self._own).reserved)

    def take(self, offers: list[bytes], rank: int) -> None:
        """Opens the ``offers`` of all ranks, of which this one is ``rank``."""
        driver = _driver()
        assert self._own is not None
        with torch.cuda.device(self._device):
            for other, offer in enumerate(offers):
                if other != rank:
                    handle = driver.CUipcMemHandle()
                    handle.reserved = offer
                    flags = driver.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS.value
                    self._others.append(int(_call(driver.cuIpcOpenMemHandle, handle, flags)))
        self.addresses = [*self._others[:rank], self._own, *self._others[rank:]]

    def close(self) -> None:
        """Nothing may be running here that uses it. Safe to call twice."""
        while self._others:
            with torch.cuda.device(self._device):
                _call(_driver().cuIpcCloseMemHandle, self._others.pop())

    def free(self) -> None:
        """Frees this rank's part, which no other process may have open any more. Safe to call twice."""
        own, self._own = self._own, None
        if own is not None:
            with torch.cuda.device(self._device):
                _call(_driver().cuMemFree, own)


def _driver() -> Any:
    # It comes with torch for NVIDIA GPUs, and is loaded where there is one.
    try:
        from cuda.bindings import driver
    except ImportError:
        raise RuntimeError("cuda-bindings is missing: pip install 'minisgl[cuda]' brings it") from None
    return driver


def _call(function: Callable[..., Any], *arguments: Any) -> Any:
    """What ``function`` of the driver gives beside its error code."""
    error, *results = function(*arguments)
    if error.value:
        raise RuntimeError(f"{function.__name__} failed with {error.name}")
    return results[0] if results else None
