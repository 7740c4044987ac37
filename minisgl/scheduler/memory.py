"""Who owns which KV page: the free list, the prefix cache, or one running request."""

from __future__ import annotations

import numpy as np

from minisgl.core import EngineInfo, Int32
from minisgl.kvcache import Handle, Match, PageAllocator, make_cache

from .request import Req
from .rows import Rows


class Memory:
    """The pages of the running requests. A row of the page table:

        | shared: owned by the cache, locked | held: owned by the row alone |
        0                                 shared                        num_pages

    Only full pages whose results have been received go to the cache.
    """

    def __init__(self, info: EngineInfo, rows: Rows, cache: str) -> None:
        self._rows = rows
        self._page_size = info.page_size
        self.allocator = PageAllocator(info.num_pages)
        self.cache = make_cache(cache, self.allocator, info.page_size)
        self._handles: list[Handle] = [None] * rows.capacity

    @property
    def available(self) -> int:
        """Pages that can be had without taking any from a running request."""
        return self.allocator.num_free + self.cache.num_evictable

    def pages_of(self, tokens: int) -> int:
        return -(-tokens // self._page_size)

    def admit(self, req: Req, match: Match, headroom: int) -> bool:
        """Moves ``req`` into a row, on the cached pages of ``match`` and new ones for all its other tokens.

        Does nothing and answers False unless that leaves ``headroom`` pages available.
        """
        # Locked first, so that making room cannot evict what was just found.
        self.cache.lock(match.handle)
        found, total = len(match.pages), self.pages_of(len(req.tokens))
        if total - found + headroom > self.available:
            self.cache.unlock(match.handle)
            return False
        rows, row = self._rows, self._rows.enter(req)
        self._handles[row] = match.handle
        rows.table[row, :found] = match.pages
        rows.table[row, found:total] = self._take(total - found)
        rows.num_pages[row], rows.shared[row] = total, found
        rows.computed[row] = rows.confirmed[row] = found * self._page_size
        return True

    def missing(self, rows: Int32, tokens: Int32) -> Int32:
        """How many pages each of ``rows`` lacks to hold ``tokens`` tokens."""
        return np.maximum(-(-tokens // self._page_size) - self._rows.num_pages[rows], 0)

    def grow(self, rows: Int32, counts: Int32) -> None:
        """Appends ``counts[i]`` new pages to the table of ``rows[i]``; the caller has looked at :attr:`available`."""
        r = self._rows
        which = np.repeat(np.arange(len(rows)), counts)
        if len(which) == 0:
            return
        first = np.cumsum(counts) - counts
        at = rows[which]
        r.table[at, r.num_pages[at] + np.arange(len(which)) - first[which]] = self._take(len(which))
        r.num_pages[rows] += counts

    def share(self, row: int) -> None:
        """Offers the row's confirmed full pages to the cache; moves the row over to the cache's where it had them."""
        r = self._rows
        full = int(r.confirmed[row]) // self._page_size
        start = int(r.shared[row])
        if full <= start:
            return
        own = r.table[row, :full]
        match = self.cache.insert(r.tokens[row, : full * self._page_size], own)
        self.cache.lock(match.handle)
        self.cache.unlock(self._handles[row])
        self._handles[row] = match.handle
        kept = match.pages
        double = np.flatnonzero(own[: len(kept)] != kept)
        if len(double):
            # Steps under way may still read the duplicates; whatever overwrites them is launched later.
            self.allocator.free(own[double])
            own[double] = kept[double]
            r.synced[row] = min(r.synced[row], double[0])
        r.shared[row] = max(start, len(kept))

    def release(self, row: int, *, keep: bool) -> None:
        """Ends the row. ``keep``: what it has computed goes to the cache for others; otherwise it is only freed."""
        r = self._rows
        if keep:
            self.share(row)
        self.allocator.free(r.table[row, r.shared[row] : r.num_pages[row]])
        self.cache.unlock(self._handles[row])
        self._handles[row] = None
        r.leave(row)

    def held(self) -> Int32:
        """The pages owned by running requests."""
        r = self._rows
        runs = [r.table[row, r.shared[row] : r.num_pages[row]] for row in r.order]
        return np.concatenate([np.empty(0, dtype=np.int32), *runs])

    def check(self) -> None:
        """Raises :class:`RuntimeError` unless free + cached + held == total, with every page exactly once."""
        self.cache.check()
        self.allocator.check(np.concatenate([self.held(), *self.cache.pages()]))

    def check_idle(self) -> None:
        """The same for an idle server, where nothing is held or locked; takes no time."""
        free, cached = self.allocator.num_free, self.cache.num_pages
        if free + cached != self.allocator.num_pages or cached != self.cache.num_evictable:
            raise RuntimeError(
                f"KV pages leaked: {free} free and {cached} cached ({self.cache.num_evictable} of them not in use) "
                f"of {self.allocator.num_pages}, with no request running."
            )

    def _take(self, count: int) -> Int32:
        lacking = count - self.allocator.num_free
        if lacking > 0:
            self.cache.evict(lacking)
        return self.allocator.alloc(count)
