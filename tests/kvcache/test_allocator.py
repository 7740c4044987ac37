import numpy as np
import pytest

from minisgl.kvcache import PageAllocator


def test_hands_out_low_pages_first_and_the_last_freed_again():
    allocator = PageAllocator(8)
    assert allocator.alloc(3).tolist() == [0, 1, 2]
    assert allocator.alloc(1).tolist() == [3]
    allocator.free(np.array([1], dtype=np.int32))
    assert allocator.alloc(2).tolist() == [1, 4]
    assert allocator.num_free == 3


def test_refuses_what_it_does_not_have():
    allocator = PageAllocator(4)
    allocator.alloc(3)
    with pytest.raises(RuntimeError, match="2 KV pages wanted, 1 of 4 are free"):
        allocator.alloc(2)
    with pytest.raises(ValueError, match="at least one page"):
        PageAllocator(0)


def test_a_page_is_freed_once():
    allocator = PageAllocator(4)
    pages = allocator.alloc(2)
    allocator.free(pages)
    with pytest.raises(RuntimeError, match="freed twice"):
        allocator.free(pages[:1])


def test_check_finds_lost_and_doubly_owned_pages():
    allocator = PageAllocator(6)
    pages = allocator.alloc(3)
    allocator.check(pages)
    with pytest.raises(RuntimeError, match=r"\[2\]"):
        allocator.check(pages[:2])
    with pytest.raises(RuntimeError, match=r"\[0\]"):
        allocator.check(np.append(pages, pages[0]))
    with pytest.raises(RuntimeError, match=r"\[4\]"):
        allocator.check(np.append(pages, np.int32(4)))
