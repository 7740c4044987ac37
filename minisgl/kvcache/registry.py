"""Prefix caches by name."""

from __future__ import annotations

from .allocator import PageAllocator
from .base import PrefixCache
from .naive import NaiveCache
from .radix import RadixCache

CACHES: dict[str, type[RadixCache] | type[NaiveCache]] = {"radix": RadixCache, "naive": NaiveCache}


def make_cache(name: str, allocator: PageAllocator, page_size: int) -> PrefixCache:
    """Raises ValueError for an unknown name."""
    if name not in CACHES:
        raise ValueError(f"There is no prefix cache {name!r}; choose one of {', '.join(CACHES)}.")
    return CACHES[name](allocator, page_size)
