"""What the scheduler asks of a prefix cache."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, TypeAlias

from minisgl.core import Int32

Handle: TypeAlias = Any
"""A place in the cache, opaque to the caller; what :meth:`PrefixCache.lock` keeps from eviction."""


@dataclass(slots=True)
class Match:
    """The cached ``pages`` (int32) of the leading tokens, and the place where they end."""

    handle: Handle
    pages: Int32


class PrefixCache(ABC):
    """Pages of computed tokens, kept for the next request that starts with the same tokens.

    Works on whole pages. A page has one owner: the allocator (free), the cache, or one request. A request reads pages
    of the cache as long as it holds a lock on them; it never writes into them.

                      alloc                insert
        allocator  --------->  request  ------------>  cache
            ^                     |                      |
            +------- free --------+                      |
            +----------------- evict --------------------+
    """

    reuses: bool
    """Whether a later match can find what was inserted."""

    num_pages: int
    """Pages the cache owns."""

    num_evictable: int
    """Those of them that no lock protects."""

    @abstractmethod
    def match(self, tokens: Int32) -> Match:
        """The longest cached prefix. At least the last token stays out of it: something must be left to compute."""

    @abstractmethod
    def lock(self, handle: Handle) -> None:
        """Keeps everything from the root to ``handle`` from eviction. Counts."""

    @abstractmethod
    def unlock(self, handle: Handle) -> None:
        """Takes one lock back."""

    @abstractmethod
    def insert(self, tokens: Int32, pages: Int32) -> Match:
        """Offers ``pages``, which hold the computed ``tokens`` (``len(pages) * page_size`` of them).

        The answer holds, in order, the pages under which the cache keeps these tokens. Those it took over are the
        caller's own; where it answers with another page, it had these tokens already, and the caller still
        owns its duplicate. Pages past the end of the answer were not taken.
        """

    @abstractmethod
    def evict(self, count: int) -> int:
        """Gives at least ``count`` pages back to the allocator, least recently used first; fewer if there are no more.
        Returns how many."""

    @abstractmethod
    def pages(self) -> list[Int32]:
        """All pages the cache owns, in runs."""

    @abstractmethod
    def check(self) -> None:
        """Raises :class:`RuntimeError` when the inner books are wrong."""
