import numpy as np
import pytest

from minisgl.kvcache import NaiveCache, PageAllocator, RadixCache, make_cache


def test_keeps_nothing():
    cache = make_cache("naive", PageAllocator(8), 2)
    assert isinstance(cache, NaiveCache)
    tokens, pages = np.arange(6, dtype=np.int32), np.arange(3, dtype=np.int32)
    assert len(cache.insert(tokens, pages).pages) == 0
    found = cache.match(tokens)
    cache.lock(found.handle)
    cache.unlock(found.handle)
    assert len(found.pages) == 0
    assert (cache.num_pages, cache.num_evictable, cache.evict(3)) == (0, 0, 0)


def test_caches_are_known_by_name():
    assert isinstance(make_cache("radix", PageAllocator(8), 2), RadixCache)
    with pytest.raises(ValueError, match="no prefix cache 'lru'; choose one of radix, naive"):
        make_cache("lru", PageAllocator(8), 2)
