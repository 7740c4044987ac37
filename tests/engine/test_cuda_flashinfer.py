"""The engine with FlashInfer, graphs and eager steps, against the engine with the Triton backend.

Both round in half precision, each in its own order, so near ties may fall otherwise and all after them with them. A
fault would leave hardly any request alike: so of short answers most must agree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from engine_driver import tiny_engine, write_tiny
from serving import requests, serve, staggered, user

from minisgl.core import SamplingParams
from minisgl.engine.engine import TorchEngine
from minisgl.message import UserMsg, unpack_ids

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(find_spec("flashinfer") is None, reason="needs FlashInfer")]

Make = Callable[..., TorchEngine]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 128, "vocab_size": 1000}
    return write_tiny(tmp_path_factory.mktemp("fi") / "tiny", **sizes)


@pytest.fixture
def make(model: Path) -> Iterator[Make]:
    made: list[TorchEngine] = []

    def make(**changes: Any) -> TorchEngine:
        made.append(tiny_engine(model, **{"device": "cuda", "dtype": "bfloat16", "token_budget": 64} | changes))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


def greedy() -> list[UserMsg]:
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    return [user(m.uid, unpack_ids(m.input_ids).tolist(), params) for m in requests(30)]


@pytest.mark.parametrize("attention", ["fi", "fi,triton", "triton,fi"])
def test_graphs_and_eager_steps_agree(make: Make, attention: str) -> None:
    arrivals = staggered(greedy(), 1)
    expected = serve(make(attention="triton"), arrivals)
    outs = [serve(make(attention=attention, cuda_graph_max_bs=graphs), arrivals) for graphs in (0, 4)]
    for one, other in ((outs[0], expected), (outs[1], expected), (outs[0], outs[1])):
        assert one.keys() == other.keys()
        assert sum(one[uid] == other[uid] for uid in one) > 20
