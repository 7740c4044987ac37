"""``--deterministic`` on a real GPU: the same bits in whatever company, chunks, graphs and pages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from determinism import Answer, TracingDriver, alone, assert_same, cached, crowd, make_prompts, pre_empted
from engine_driver import tiny_engine
from serving import requests, serve, serve_and_count, staggered
from tiny_models import COMMON, make_reference

from minisgl.engine.engine import TorchEngine

pytestmark = pytest.mark.gpu

MakeEngine = Callable[..., TorchEngine]

SIZES = {"hidden_size": 256, "intermediate_size": 320, "max_position_embeddings": 512}
VARIANTS: dict[str, dict[str, Any]] = {
    "llama": SIZES,
    "qwen3": SIZES,
    "qwen3-moe": SIZES,
    "mistral-window": SIZES | {"sliding_window": 70},
    "llama-mha-biased": {},  # whose sizes are no multiples of anything
}


@pytest.fixture(scope="module", params=VARIANTS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param)
    make_reference(request.param, **VARIANTS[request.param]).save_pretrained(path)
    return path


@pytest.fixture(params=["bfloat16", "float32"])
def make(checkpoint: Path, request: pytest.FixtureRequest) -> Iterator[MakeEngine]:
    made: list[TorchEngine] = []

    def make(**changes: Any) -> TorchEngine:
        defaults = {"device": "cuda", "dtype": request.param, "deterministic": True, "cuda_graph_max_bs": 4}
        made.append(tiny_engine(checkpoint, **defaults | changes))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


def test_logits(make: MakeEngine) -> None:
    """Of the same tokens in every way of serving them, all to the last bit."""
    prompts = make_prompts((90, 1, 33, 64, 17), COMMON["vocab_size"])
    expected: list[Answer] = []
    for graphs, page_size in ((0, 16), (4, 16), (4, 1), (0, 3)):
        pages = {"page_size": page_size, "num_pages": 600 // page_size, "token_budget": 256}
        driver = TracingDriver(make(cuda_graph_max_bs=graphs, **pages), tokens=12)
        expected = expected or alone(driver, prompts)
        assert_same(alone(driver, prompts), expected)
        assert_same(alone(driver, prompts, chunk=16), expected)
        assert_same(crowd(driver, prompts, budget=256), expected)
        assert_same(crowd(driver, prompts, budget=29), expected)
        assert_same(cached(driver, prompts, beginning=50), expected)
        assert_same(pre_empted(driver, prompts), expected)


def test_served_tokens(make: MakeEngine) -> None:
    """Greedy and seeded ones, with and without penalties."""
    everything = requests()
    engine = make(token_budget=256)
    expected = {message.uid: serve(engine, {0: [message]})[message.uid] for message in everything}
    for cache in ("radix", "naive"):
        for every in (0, 2):
            assert serve(engine, staggered(everything, every), cache=cache) == expected
    assert serve(engine, staggered(everything, 1), overlap=False) == expected
    for changes in ({"token_budget": 16}, {"cuda_graph_max_bs": 0}, {"page_size": 1, "num_pages": 480}):
        assert serve(make(**changes), staggered(everything, 2)) == expected
    out, stats = serve_and_count(make(num_pages=40, token_budget=24), staggered(everything, 1))
    assert out == expected
    assert stats.preemptions > 0
