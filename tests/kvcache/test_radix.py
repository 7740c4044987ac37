from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minisgl.core import Int32
from minisgl.kvcache import Match, PageAllocator, RadixCache


def ids(*tokens: int) -> Int32:
    return np.array(tokens, dtype=np.int32)


def make(num_pages: int = 32, page_size: int = 2) -> tuple[PageAllocator, RadixCache]:
    allocator = PageAllocator(num_pages)
    return allocator, RadixCache(allocator, page_size)


def put(allocator: PageAllocator, cache: RadixCache, tokens: Int32, page_size: int = 2) -> tuple[Int32, Match]:
    """Inserts like a request does: own pages in, duplicates freed."""
    own = allocator.alloc(len(tokens) // page_size)
    match = cache.insert(tokens, own)
    allocator.free(own[own != match.pages])
    return own, match


def test_matches_whole_pages_and_leaves_the_last_token():
    allocator, cache = make()
    own, _ = put(allocator, cache, ids(1, 2, 3, 4, 5, 6))
    assert cache.match(ids(1, 2, 3, 4, 5, 6, 7)).pages.tolist() == own.tolist()
    assert cache.match(ids(1, 2, 3, 4, 5, 6)).pages.tolist() == own[:2].tolist()
    assert cache.match(ids(1, 2, 3, 9, 5, 6)).pages.tolist() == own[:1].tolist()
    assert cache.match(ids(1, 9, 3, 4)).pages.tolist() == []
    assert cache.match(ids(1)).pages.tolist() == []


def test_three_tokens_with_pages_of_four():
    allocator, cache = make(page_size=4)
    assert cache.match(ids(1, 2, 3)).pages.tolist() == []
    assert cache.insert(ids(), ids()).pages.tolist() == []
    assert cache.num_pages == 0
    allocator.check(ids())


def test_the_second_of_two_equal_runs_is_told_to_use_the_first():
    allocator, cache = make()
    first, _ = put(allocator, cache, ids(1, 2, 3, 4))
    second, match = put(allocator, cache, ids(1, 2, 3, 4, 5, 6))
    assert match.pages.tolist() == [*first, second[2]]
    assert cache.num_pages == 3
    allocator.check(np.concatenate(cache.pages()))


def test_splits_where_runs_part():
    allocator, cache = make()
    left, _ = put(allocator, cache, ids(1, 2, 3, 4, 5, 6))
    right, match = put(allocator, cache, ids(1, 2, 3, 4, 7, 8))
    assert match.pages.tolist() == [*left[:2], right[2]]
    assert sorted(len(run) for run in cache.pages()) == [1, 1, 2]
    cache.check()


def test_evicts_the_least_recently_used_leaf_tail_first():
    allocator, cache = make()
    old, _ = put(allocator, cache, ids(1, 1, 2, 2, 3, 3))
    new, _ = put(allocator, cache, ids(5, 5, 6, 6))
    cache.match(ids(1, 1, 0))  # its first page is now the most recent, the rest of it is the oldest
    assert cache.evict(1) == 1
    assert cache.match(ids(1, 1, 2, 2, 3, 3, 0)).pages.tolist() == old[:2].tolist()
    assert cache.evict(3) == 3
    assert cache.match(ids(5, 5, 0)).pages.tolist() == []
    assert cache.match(ids(1, 1, 2, 2, 0)).pages.tolist() == old[:1].tolist()
    assert len(new) == 2
    assert cache.evict(5) == 1
    assert allocator.num_free == 32
    cache.check()


def test_a_match_is_a_use():
    allocator, cache = make()
    put(allocator, cache, ids(1, 1))
    put(allocator, cache, ids(2, 2))
    cache.match(ids(1, 1, 0))
    cache.evict(1)
    assert cache.match(ids(1, 1, 0)).pages.tolist() == [0]
    assert cache.match(ids(2, 2, 0)).pages.tolist() == []


def test_never_evicts_what_is_locked():
    allocator, cache = make()
    put(allocator, cache, ids(1, 1, 2, 2, 3, 3))
    held = cache.match(ids(1, 1, 2, 2, 9))
    cache.lock(held.handle)
    assert cache.num_evictable == 1
    assert cache.evict(10) == 1
    cache.unlock(held.handle)
    assert cache.evict(10) == 2


def test_a_lock_covers_the_same_pages_after_a_split():
    allocator, cache = make()
    put(allocator, cache, ids(1, 1, 2, 2, 3, 3))
    held = cache.match(ids(1, 1, 2, 2, 3, 3, 0))
    cache.lock(held.handle)
    cache.match(ids(1, 1, 9))  # splits the locked node
    assert cache.num_evictable == 0
    cache.check()
    cache.unlock(held.handle)
    assert cache.num_evictable == 3
    cache.check()


def test_check_sees_a_wrong_count():
    allocator, cache = make()
    put(allocator, cache, ids(1, 1, 2, 2))
    cache.num_evictable = 1
    with pytest.raises(RuntimeError, match="evictable pages is off"):
        cache.check()


class Model:
    """The same cache as a set of prefixes, each with its page, its locks and the time of its last use."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.page: dict[tuple[int, ...], int] = {}
        self.used: dict[tuple[int, ...], int] = {}
        self.locks: dict[tuple[int, ...], int] = {}
        self.clock = 0

    def prefixes(self, tokens: list[int]) -> list[tuple[int, ...]]:
        return [tuple(tokens[:n]) for n in range(self.page_size, len(tokens) + 1, self.page_size)]

    def touch(self, path: list[tuple[int, ...]]) -> None:
        self.clock += 1
        for prefix in path:
            self.used[prefix] = self.clock

    def match(self, tokens: list[int]) -> list[tuple[int, ...]]:
        path = []
        for prefix in self.prefixes(tokens[:-1]):
            if prefix not in self.page:
                break
            path.append(prefix)
        self.touch(path)
        return path

    def insert(self, tokens: list[int], pages: list[int]) -> list[int]:
        path = self.prefixes(tokens)
        for prefix, page in zip(path, pages, strict=True):
            self.page.setdefault(prefix, page)
            self.locks.setdefault(prefix, 0)
        self.touch(path)
        return [self.page[prefix] for prefix in path]

    def lock(self, path: list[tuple[int, ...]], count: int) -> None:
        for prefix in path:
            self.locks[prefix] += count
        if count < 0:
            self.touch([prefix for prefix in path if self.locks[prefix] == 0])

    def evict(self, count: int) -> list[int]:
        gone = []
        while len(gone) < count:
            inner = {prefix[: -self.page_size] for prefix in self.page}
            leaves = [prefix for prefix in self.page if prefix not in inner and self.locks[prefix] == 0]
            if not leaves:
                break
            oldest = min(leaves, key=lambda prefix: self.used[prefix])
            gone.append(self.page.pop(oldest))
            del self.locks[oldest]
        return gone


tokens_of = st.lists(st.integers(0, 1), min_size=1, max_size=10)
operations = st.one_of(
    st.tuples(st.just("insert"), tokens_of),
    st.tuples(st.just("match"), tokens_of),
    st.tuples(st.just("lock"), tokens_of),
    st.tuples(st.just("unlock"), st.integers(0, 10)),
    st.tuples(st.just("evict"), st.integers(1, 6)),
)


@settings(max_examples=300, deadline=None)
@given(page_size=st.integers(1, 4), steps=st.lists(operations, max_size=40))
def test_behaves_like_a_set_of_prefixes(page_size: int, steps: list[tuple[str, list[int]] | tuple[str, int]]):
    allocator, cache = make(40, page_size)
    model = Model(page_size)
    held: list[tuple[Match, list[tuple[int, ...]]]] = []
    for kind, value in steps:
        if isinstance(value, int):
            if kind == "unlock" and held:
                match, path = held.pop(value % len(held))
                cache.unlock(match.handle)
                model.lock(path, -1)
            elif kind == "evict":
                free = allocator.num_free
                gone = model.evict(value)
                assert cache.evict(value) == len(gone)
                assert allocator.num_free == free + len(gone)
        elif kind == "insert":
            value = value[: len(value) // page_size * page_size]
            need = len(value) // page_size
            if need > allocator.num_free:
                continue
            own = allocator.alloc(need)
            kept = cache.insert(ids(*value), own).pages
            assert kept.tolist() == model.insert(value, own.tolist())
            allocator.free(own[own != kept])
        else:
            match, path = cache.match(ids(*value)), model.match(value)
            assert match.pages.tolist() == [model.page[prefix] for prefix in path]
            if kind == "lock":
                cache.lock(match.handle)
                model.lock(path, 1)
                held.append((match, path))
        cache.check()
        assert cache.num_pages == len(model.page)
        assert cache.num_evictable == sum(not model.locks[prefix] for prefix in model.page)
        assert sorted(np.concatenate([ids(), *cache.pages()]).tolist()) == sorted(model.page.values())
        allocator.check(np.concatenate([ids(), *cache.pages()]))
