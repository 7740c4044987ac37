"""The prefix cache that keeps nothing."""

from __future__ import annotations

import numpy as np

from minisgl.core import Int32

from .allocator import PageAllocator
from .base import Handle, Match, PrefixCache


class NaiveCache(PrefixCache):
    """Takes no page and finds none: every request computes its whole prompt."""

    reuses = False

    def __init__(self, allocator: PageAllocator, page_size: int) -> None:
        self.num_pages = 0
        self.num_evictable = 0
        self._nothing = Match(None, np.empty(0, dtype=np.int32))

    def match(self, tokens: Int32) -> Match:
        return self._nothing

    def lock(self, handle: Handle) -> None:
        pass

    def unlock(self, handle: Handle) -> None:
        pass

    def insert(self, tokens: Int32, pages: Int32) -> Match:
        return self._nothing

    def evict(self, count: int) -> int:
        return 0

    def pages(self) -> list[Int32]:
        return []

    def check(self) -> None:
        pass
