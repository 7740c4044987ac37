"""The free list of KV pages."""

from __future__ import annotations

import numpy as np

from minisgl.core import Int32


class PageAllocator:
    """Pages ``0 .. num_pages - 1`` on a stack.

    The page freed last is handed out first, and the low ones before the high ones at the start: a server that never
    fills its cache never touches most of it, so the memory stays with the system.
    """

    def __init__(self, num_pages: int) -> None:
        if num_pages < 1:
            raise ValueError(f"A KV cache needs at least one page, not {num_pages}.")
        self.num_pages = num_pages
        self._stack = np.arange(num_pages - 1, -1, -1, dtype=np.int32)
        self._is_free = np.ones(num_pages, dtype=bool)
        self.num_free = num_pages

    def alloc(self, count: int) -> Int32:
        """``count`` pages, int32. The caller makes sure that there are as many: :class:`RuntimeError` otherwise."""
        if count > self.num_free:
            raise RuntimeError(f"{count} KV pages wanted, {self.num_free} of {self.num_pages} are free.")
        self.num_free -= count
        pages = self._stack[self.num_free : self.num_free + count][::-1].copy()
        self._is_free[pages] = False
        return pages

    def free(self, pages: Int32) -> None:
        """Takes ``pages`` back; each must be in use, and appear once."""
        if len(pages) == 0:
            return
        if self._is_free[pages].any():
            raise RuntimeError(f"KV pages freed twice: {pages[self._is_free[pages]].tolist()}.")
        self._is_free[pages] = True
        self._stack[self.num_free : self.num_free + len(pages)] = pages
        self.num_free += len(pages)

    def check(self, used: Int32) -> None:
        """Raises :class:`RuntimeError` unless every page is either free or exactly once in ``used``."""
        pages = np.concatenate([self._stack[: self.num_free], used])
        counts = np.bincount(pages, minlength=self.num_pages)
        if len(counts) != self.num_pages or not (counts == 1).all():
            wrong = np.flatnonzero(counts != 1)
            raise RuntimeError(f"KV pages lost, or owned more than once: {wrong.tolist()}.")
        if not self._is_free[self._stack[: self.num_free]].all() or self._is_free.sum() != self.num_free:
            raise RuntimeError("The free list and its index differ.")
