"""The engine on a real GPU, against the engine on the CPU and against itself run otherwise."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_driver import tiny_engine, write_tiny
from serving import ScriptedIO, requests, serve, serve_and_count, staggered

from minisgl.core import SamplingParams
from minisgl.engine.engine import TorchEngine
from minisgl.message import AbortBackendMsg, BackendMsg, UserMsg, pack_ids
from minisgl.scheduler import Scheduler, SchedulerConfig

pytestmark = pytest.mark.gpu

MakeEngine = Callable[..., TorchEngine]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "vocab_size": 1000}
    return write_tiny(tmp_path_factory.mktemp("gpu") / "tiny", **sizes)


@pytest.fixture
def make(model: Path) -> Iterator[MakeEngine]:
    made: list[TorchEngine] = []

    def make(**changes: Any) -> TorchEngine:
        made.append(tiny_engine(model, **{"device": "cuda", "dtype": "float32"} | changes))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


def greedy() -> list[UserMsg]:
    return [
        UserMsg(uid=m.uid, input_ids=m.input_ids, params=SamplingParams(temperature=0, max_tokens=20))
        for m in requests()
    ]


def test_greedy_in_float32_is_what_the_cpu_says(make: MakeEngine) -> None:
    expected = serve(make(device="cpu"), {0: greedy()})
    for graphs in (0, 4):
        assert serve(make(cuda_graph_max_bs=graphs), {0: greedy()}) == expected


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_page_sizes(make: MakeEngine, page_size: int) -> None:
    expected = serve(make(), {0: greedy()})
    assert serve(make(page_size=page_size, num_pages=960 // page_size), {0: greedy()}) == expected


def test_sampling_with_and_without_graphs_and_overlap(make: MakeEngine) -> None:
    expected = serve(make(cuda_graph_max_bs=0), staggered(requests(), 2), overlap=False)
    for graphs in (0, 2, 4, None):
        for overlap in (True, False):
            assert serve(make(cuda_graph_max_bs=graphs), staggered(requests(), 2), overlap=overlap) == expected


def test_pre_emption(make: MakeEngine) -> None:
    expected = serve(make(), staggered(greedy(), 1))
    out, stats = serve_and_count(make(num_pages=40, token_budget=24), staggered(greedy(), 1))
    assert out == expected
    assert stats.preemptions > 0


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_serves_all_to_the_end(make: MakeEngine, dtype: str) -> None:
    out = serve(make(dtype=dtype), staggered(requests(), 2))
    assert {uid: len(ids) for uid, ids in out.items()} == {m.uid: m.params.max_tokens for m in requests()}


def test_thousands_of_requests_with_aborts_leave_nothing_behind(make: MakeEngine) -> None:
    """Every request is answered to its end or aborted, the books are right, and no memory is lost on the way."""
    engine = make(dtype="bfloat16", num_pages=600, max_running_req=48, token_budget=300)
    generator = np.random.default_rng(11)
    used = []
    for part in range(2):
        arrivals: dict[int, list[BackendMsg]] = {}
        for i in range(2500):
            uid, turn = 10_000 * part + i, int(generator.integers(0, 500))
            prompt = generator.integers(1, 900, int(generator.integers(1, 100))).tolist()
            params = SamplingParams(
                temperature=float(generator.choice([0, 0.8])),
                top_k=int(generator.choice([0, 20])),
                top_p=float(generator.choice([1, 0.9])),
                frequency_penalty=float(generator.choice([0, 0, 0, 0.5])),
                max_tokens=int(generator.integers(1, 40)),
                ignore_eos=True,
            )
            arrivals.setdefault(turn, []).append(UserMsg(uid=uid, input_ids=pack_ids(prompt), params=params))
            if i % 4 == 0:
                arrivals.setdefault(turn + int(generator.integers(0, 60)), []).append(AbortBackendMsg(uid=uid))
        io = ScriptedIO(arrivals)
        scheduler = Scheduler(engine, io, SchedulerConfig())
        while scheduler.step() or io.arrivals:
            pass
        scheduler.check()
        ends = Counter(message.finish for message in io.sent)
        assert ends["length"] + ends["abort"] == 2500
        assert 100 < ends["abort"] <= 625
        torch.cuda.synchronize()
        used.append(torch.cuda.memory_allocated())
    assert used[1] <= used[0] + (1 << 20)


def test_the_cache_is_sized_from_free_memory(make: MakeEngine) -> None:
    info = make(num_pages=None, memory_ratio=0.3).info
    assert info.num_pages == 6 * -(-160 // 4)
