"""The scheduler on the real engine: whatever goes on around a request, its tokens stay the same."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_driver import tiny_engine
from serving import serve, user

from minisgl.core import SamplingParams
from minisgl.engine.engine import TorchEngine
from minisgl.message import AbortBackendMsg, BackendMsg, UserMsg


def requests(count: int = 14) -> list[UserMsg]:
    """Prompts of all lengths, some with a common beginning, with every kind of sampling."""
    generator = np.random.default_rng(21)
    shared = generator.integers(1, 190, 24).tolist()
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 0.7, "top_p": 0.9, "top_k": 40},
        {"temperature": 0.9, "min_p": 0.05, "frequency_penalty": 0.5, "repetition_penalty": 1.1},
        {"temperature": 0.0, "presence_penalty": 1.0},
    ]
    made = []
    for uid in range(count):
        prompt = generator.integers(1, 190, int(generator.integers(1, 60))).tolist()
        if uid % 3 == 0:
            prompt = shared[: int(generator.integers(5, 25))] + prompt[:20]
        params = SamplingParams(max_tokens=int(generator.integers(3, 24)), seed=uid, **kinds[uid % len(kinds)])
        made.append(user(uid, prompt, params))
    return made


@pytest.fixture(scope="module")
def undisturbed(_engine: TorchEngine) -> dict[int, list[int]]:
    """Each request served alone."""
    out: dict[int, list[int]] = {}
    for message in requests():
        out |= serve(_engine, {0: [message]}, cache="naive", overlap=False)
    return out


def staggered(messages: list[UserMsg], every: int = 2) -> dict[int, list[BackendMsg]]:
    return {every * i: [message] for i, message in enumerate(messages)}


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
    assert serve(engine, staggered(requests()), overlap=overlap, cache=cache, token_budget=17) == undisturbed


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
    arrivals = staggered(requests(), every) if every else {0: list[BackendMsg](requests())}
    assert serve(small_engine, arrivals, overlap=overlap) == undisturbed


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
