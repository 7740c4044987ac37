"""The scheduler on the real engine: whatever goes on around a request, its tokens stay the same."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from engine_driver import tiny_engine
from serving import requests, serve, serve_and_count, staggered

from minisgl.engine.engine import TorchEngine
from minisgl.message import AbortBackendMsg, UserMsg


@pytest.fixture(scope="module")
def undisturbed(_engine: TorchEngine) -> dict[int, list[int]]:
    """Each request served alone."""
    out: dict[int, list[int]] = {}
    for message in requests():
        out |= serve(_engine, {0: [message]}, cache="naive", overlap=False)
    return out


@pytest.fixture(scope="module")
def small_engine(tiny_model: Path) -> Iterator[TorchEngine]:
    """40 pages of 4: two of the longer requests fill it, so requests are pre-empted all the time."""
    engine = tiny_engine(tiny_model, num_pages=40, token_budget=24)
    yield engine
    engine.close()


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("cache", ["radix", "naive"])
def test_together_as_alone(engine: TorchEngine, undisturbed: dict[int, list[int]], overlap: bool, cache: str) -> None:
    assert serve(engine, {0: requests()}, overlap=overlap, cache=cache) == undisturbed
    assert serve(engine, staggered(requests(), 2), overlap=overlap, cache=cache, token_budget=17) == undisturbed


def test_a_warm_cache_changes_nothing(engine: TorchEngine, undisturbed: dict[int, list[int]]) -> None:
    # Every prompt comes twice, the second time as a hit.
    again = [UserMsg(uid=100 + m.uid, input_ids=m.input_ids, params=m.params) for m in requests()]
    out = serve(engine, {0: requests(), 60: again})
    assert {uid: out[100 + uid] for uid in undisturbed} == undisturbed


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("every", [0, 1, 4])
def test_pre_emption_changes_nothing(
    small_engine: TorchEngine, undisturbed: dict[int, list[int]], overlap: bool, every: int
) -> None:
    out, stats = serve_and_count(small_engine, staggered(requests(), every), overlap=overlap)
    assert out == undisturbed
    assert stats.preemptions > 0


def test_aborts_of_others_change_nothing(small_engine: TorchEngine, undisturbed: dict[int, list[int]]) -> None:
    arrivals = staggered(requests(), 1)
    for uid in range(0, 14, 3):
        arrivals.setdefault(uid + 3, []).append(AbortBackendMsg(uid=uid))
    out = serve(small_engine, arrivals)
    for uid, ids in undisturbed.items():
        assert out[uid] == (ids if uid % 3 else ids[: len(out[uid])])


@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_page_sizes_change_nothing(tiny_model: Path, undisturbed: dict[int, list[int]], page_size: int) -> None:
    engine = tiny_engine(tiny_model, page_size=page_size, num_pages=-(-200 // page_size))
    try:
        assert serve(engine, staggered(requests(), 1)) == undisturbed
    finally:
        engine.close()
