"""Host side of the KV cache: which page holds what. Only the pool itself (:mod:`.device_pool`) touches a device."""

from .allocator import PageAllocator
from .base import Handle, Match, PrefixCache
from .naive import NaiveCache
from .radix import RadixCache
from .registry import make_cache

__all__ = ["Handle", "Match", "NaiveCache", "PageAllocator", "PrefixCache", "RadixCache", "make_cache"]
