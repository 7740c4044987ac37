from __future__ import annotations

import logging
from pathlib import Path

import pytest

from minisgl.engine import memory
from minisgl.engine.memory import KVRoom, OutOfMemoryError, available_host_memory, context_that_fits

KIB = 1024


def room(free: int, share: int, max_running_req: int = 4) -> KVRoom:
    """Pages of 16 tokens and 16 KiB; requests of up to 2,000 tokens, which are 125 pages."""
    return KVRoom(free, share, 16 * KIB, 16, 2000, max_running_req)


def alone(pages: int) -> int:
    return pages


def test_the_share_decides_and_one_page_is_kept_for_padding() -> None:
    assert room(1000 * 16 * KIB, 301 * 16 * KIB).num_pages(None, alone) == 300
    assert room(1000 * 16 * KIB, 301 * 16 * KIB - 1).num_pages(None, alone) == 299
    assert room(201 * 16 * KIB, 10**9).num_pages(None, alone) == 200


def test_no_more_pages_than_can_be_in_use_at_once() -> None:
    assert room(10**12, 10**12).num_pages(None, alone) == 4 * 125


def test_the_rank_with_the_least_decides() -> None:
    assert room(10**12, 10**12).num_pages(None, lambda pages: min(pages, 77)) == 77
    assert room(10**12, 10**12).num_pages(70, lambda pages: min(pages, 77)) == 70
    with pytest.raises(OutOfMemoryError, match="--num-pages 77 would fit"):
        room(10**12, 10**12).num_pages(80, lambda pages: min(pages, 77))


def test_pages_that_are_asked_for_may_be_few_or_many_but_must_fit() -> None:
    assert room(1000 * 16 * KIB, 0).num_pages(1, alone) == 1
    assert room(1000 * 16 * KIB, 0).num_pages(999, alone) == 999
    with pytest.raises(OutOfMemoryError, match=r"1000 KV pages take 0.02 GiB, .*--num-pages 999 would fit"):
        room(1000 * 16 * KIB, 0).num_pages(1000, alone)


@pytest.mark.parametrize("share", [-5, 0, 32 * 16 * KIB])
def test_too_little_memory_is_an_error_that_says_what_to_change(share: int) -> None:
    with pytest.raises(OutOfMemoryError, match=r"not hold even 512 tokens of 1,024 bytes; a higher --memory-ratio"):
        room(10**9, share).num_pages(None, alone)
    assert room(10**9, 33 * 16 * KIB).num_pages(None, alone) == 32


def test_the_context_is_what_can_be_served_to_its_end(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert context_that_fits(2000, 125, 16) == 2000
        assert not caplog.records
        assert context_that_fits(2001, 125, 16) == 2000
    assert "2000 tokens" in caplog.text


def test_a_container_with_less_memory_than_the_host_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)
    host = available_host_memory()
    assert host > 0
    (tmp_path / "memory.current").write_text("3000000\n")
    (tmp_path / "memory.stat").write_text("anon 1\ninactive_file 500000\n")
    (tmp_path / "memory.max").write_text("4000000\n")
    assert available_host_memory() == 1_500_000
    (tmp_path / "memory.max").write_text("2000000\n")
    assert available_host_memory() == 0
    (tmp_path / "memory.max").write_text("max\n")
    assert available_host_memory() > 4_000_000
