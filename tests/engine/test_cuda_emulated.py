"""The GPU's code path on a CPU: graphs replay by calling what was recorded. Tests the bookkeeping, not the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar
from weakref import WeakSet

import numpy as np
import pytest
import torch
from determinism import Answer, TracingDriver, alone, assert_same, cached, crowd, make_prompts, pre_empted
from engine_driver import Driver, Request
from serving import requests, serve, serve_and_count, staggered
from tiny_models import COMMON, make_reference

from minisgl.attention.cpu import CpuAttention
from minisgl.attention.forward_batch import ForwardBatch
from minisgl.attention.registry import BACKENDS
from minisgl.core import SamplingParams
from minisgl.distributed.communicator import SingleCommunicator
from minisgl.engine import cuda_graph, cuda_runner, graph_inputs, mixed_graph, staging
from minisgl.engine.config import EngineConfig
from minisgl.engine.cuda_graph import ladder
from minisgl.engine.cuda_runner import CudaRunner
from minisgl.engine.engine import TorchEngine
from minisgl.engine.graph_inputs import GraphInputs
from minisgl.engine.load import load
from minisgl.engine.mixed_graph import buckets
from minisgl.engine.staging import Staging
from minisgl.models import build
from minisgl.utils.progress import Progress, silent

CPU = torch.device("cpu")


class FakeGraph:
    alive: ClassVar[WeakSet[FakeGraph]] = WeakSet()

    def __init__(self, function: Callable[[], Any], result: Any) -> None:
        self.function, self.result, self.replays = function, result, 0
        self.alive.add(self)

    def replay(self) -> None:
        self.replays += 1
        again = self.function()
        if self.result is not None:
            self.result.copy_(again)


class FakeEvent:
    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        pass


@pytest.fixture
def no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces what only a GPU has."""

    def record(function: Callable[[], Any], pool: Any) -> tuple[FakeGraph, Any]:
        result = function()
        return FakeGraph(function, result), result

    for graphs in (cuda_graph, mixed_graph):
        monkeypatch.setattr(graphs, "record", record)
    # It reads all lengths from the tensors, as a backend of graphs must.
    monkeypatch.setattr(CpuAttention, "serves_graphs", frozenset({"single", "mixed"}))
    for module in (graph_inputs, cuda_runner, staging):
        monkeypatch.setattr(module, "pinned", lambda size, dtype: torch.zeros(size, dtype=dtype))
    fakes: dict[str, Any] = {
        "Stream": lambda device: None,
        "stream": lambda stream: nullcontext(),
        "set_device": lambda device: None,
        "Event": FakeEvent,
        "synchronize": lambda device: None,
        "empty_cache": lambda: None,
        "mem_get_info": lambda device: (0, 0),
        "graph_pool_handle": lambda: None,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)


class EmulatedEngine:
    """As TorchEngine on a GPU."""

    def __init__(self, model: Path, max_bs: int, progress: Progress = silent, **changes: Any) -> None:
        defaults = {"device": "cpu", "num_pages": 120, "page_size": 4, "max_running_req": 6}
        config = EngineConfig(model_path=model, **defaults | changes)
        self.told: list[str] = []

        def tell(what: str, fraction: float | None) -> None:
            self.told.append(what)
            progress(what, fraction)

        self._runner = CudaRunner(CPU, lambda: load(config, CPU, silent, None), max_bs, tell)
        self.info = self._runner.info
        self.launch = self._runner.launch
        self.close = self._runner.close

    def replays(self) -> int:
        graphs = self._runner._graphs
        assert graphs is not None
        assert graphs.decode is not None
        return sum(graph.forward.replays for graph in graphs.decode._graphs.values())

    def mixed_replays(self) -> int:
        graphs = self._runner._graphs
        assert graphs is not None
        assert graphs.mixed is not None
        return sum(graph.replays for _, graph, _ in graphs.mixed._graphs.values())


@pytest.fixture(params=[0, 4, 6])
def emulated(request: pytest.FixtureRequest, no_cuda: None, tiny_model: Path) -> Iterator[EmulatedEngine]:
    engine = EmulatedEngine(tiny_model, request.param)
    yield engine
    engine.close()


@pytest.mark.parametrize("overlap", [True, False])
def test_graphs_answer_like_the_cpu(engine: TorchEngine, emulated: EmulatedEngine, overlap: bool) -> None:
    expected = serve(engine, staggered(requests(), 2))
    out, stats = serve_and_count(emulated, staggered(requests(), 2), overlap=overlap)
    assert out == expected
    if emulated._runner._graphs is not None:
        assert 0 < emulated.replays() < stats.steps
        assert emulated.replays() + emulated.mixed_replays() == stats.steps
        assert "capturing CUDA graphs" in emulated.told


def test_no_graph_outlives_a_start_that_fails(no_cuda: None, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The group of ranks is left then, and NCCL waits for the graphs that hold its collectives."""
    seen: list[int] = []

    def close(comm: SingleCommunicator) -> None:
        seen.append(len(FakeGraph.alive))

    def fail(what: str, fraction: float | None) -> None:
        if what == "capturing CUDA graphs" and fraction:
            seen.append(len(FakeGraph.alive))
            raise KeyboardInterrupt

    FakeGraph.alive.clear()
    monkeypatch.setattr(SingleCommunicator, "close", close)
    with pytest.raises(KeyboardInterrupt):
        EmulatedEngine(tiny_model, 4, fail)
    assert seen[0] > 0
    assert seen[1:] == [0]


@pytest.mark.parametrize("presence", [0.0, 1.0])
def test_steps_of_single_tokens_are_replayed(
    engine: TorchEngine, no_cuda: None, tiny_model: Path, presence: float
) -> None:
    emulated = EmulatedEngine(tiny_model, 4)
    params = SamplingParams(temperature=0.9, top_k=50, seed=3, presence_penalty=presence)
    outputs = []
    for each in (engine, emulated):
        driver = Driver(each)
        work = [Request(row, [row + 1, 7, 9 * row + 2], params) for row in range(3)]
        driver.step(*((request, 3) for request in work))
        for _ in range(20):
            driver.step(*((request, 1) for request in work))
        outputs.append([request.tokens for request in work])
    assert outputs[0] == outputs[1]
    assert emulated.replays() == 20
    # Only penalties are sampled outside of the graph.
    assert emulated._runner._graphs.decode._graphs[4].sample.replays == (0 if presence else 20)
    # Padding must write nowhere but to the scratch row and page.
    state = emulated._runner._runner.state
    assert (state.page_table[3:] == state.kv.num_pages).all()
    emulated.close()


def test_a_backend_hears_of_every_step_before_its_replay(
    no_cuda: None, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[tuple[str | None, int, list[int]]] = []

    def prepare(self: CpuAttention, batch: ForwardBatch) -> None:
        heard.append((batch.graph, batch.size, batch.host.cached.tolist()))

    monkeypatch.setattr(CpuAttention, "prepare", prepare)
    emulated = EmulatedEngine(tiny_model, 4)
    driver = Driver(emulated)
    work = [Request(row, list(range(1, 4 + row))) for row in range(3)]
    driver.step(*((request, len(request.tokens)) for request in work))
    heard.clear()
    for _ in range(2):
        driver.step(*((request, 1) for request in work))
    driver.step((work[1], 1))
    assert heard == [("single", 4, [3, 4, 5]), ("single", 4, [4, 5, 6]), ("single", 1, [6])]
    emulated.close()


@pytest.mark.parametrize("kind", ["single", "mixed"])
def test_steps_that_a_backend_serves_in_no_graph_run_eagerly(
    engine: TorchEngine,
    no_cuda: None,
    tiny_model: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    kind: str,
) -> None:
    monkeypatch.setattr(CpuAttention, "serves_graphs", frozenset({kind}))
    caplog.set_level("INFO", logger="minisgl")
    emulated = EmulatedEngine(tiny_model, 4)
    graphs = emulated._runner._graphs
    assert ((graphs.decode is None), (graphs.mixed is None)) == ((kind != "single"), (kind != "mixed"))
    other = "steps with prompts" if kind == "single" else "steps of single tokens"
    assert caplog.messages.count(f"CpuAttention serves no CUDA graphs of {other}: these run eagerly.") == 1
    assert serve(emulated, staggered(requests(), 2)) == serve(engine, staggered(requests(), 2))
    emulated.close()


def test_a_request_that_resumes_on_many_pages_at_once(engine: TorchEngine, no_cuda: None, tiny_model: Path) -> None:
    emulated = EmulatedEngine(tiny_model, 2)
    driver, prompt = Driver(emulated), list(range(1, 60))
    first = Request(0, list(prompt))
    expected = driver.generate(first, 5)
    # Row 1 takes over all that row 0 has computed and needs one more token: 15 new table entries for one request.
    second = Request(1, list(prompt), cached=len(prompt) - 1)
    batch = driver.batch((Request(1, list(prompt), cached=0), len(prompt)))
    update = batch.table
    update.pages[:] = first.pages[: len(update.pages)]
    second.pages = update.pages.tolist()
    single = driver.batch((second, 1))
    single.table = update
    before = emulated.replays()
    assert emulated.launch(single).wait().ids.tolist() == expected[:1]
    assert emulated.replays() == before + 1
    emulated.close()


@pytest.fixture
def triton_on_cpu(no_cuda: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """What computes on a GPU, in Triton's interpreter."""
    monkeypatch.setitem(BACKENDS, "triton", ("triton", "TritonAttention", ("cpu",)))
    for name in ("make_pack", "default_experts"):
        choose = getattr(build, name)
        monkeypatch.setattr(build, name, lambda _, *rest, choose=choose: choose(torch.device("cuda"), *rest))


@pytest.fixture(scope="module")
def experts_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("experts")
    make_reference("qwen3-moe", num_hidden_layers=2).save_pretrained(path)
    return path


def test_deterministic(experts_model: Path, triton_on_cpu: None) -> None:
    """Every way of serving a request gives the same bits."""
    prompts = make_prompts((11, 1, 6), COMMON["vocab_size"])
    expected: list[Answer] = []
    for graphs, page_size in ((0, 16), (2, 4)):
        engine = EmulatedEngine(
            experts_model, graphs, attention="triton", deterministic=True, page_size=page_size, token_budget=12
        )
        driver = TracingDriver(engine, tokens=3)
        if graphs:
            assert_same(alone(driver, prompts, chunk=4), expected)
            assert_same(crowd(driver, prompts[:2], budget=12), expected[:2])
            assert_same(cached(driver, prompts[:1], beginning=8), expected[:1])
            assert_same(pre_empted(driver, prompts[:1]), expected[:1])
            assert engine.replays()
            assert engine.mixed_replays()
        else:
            expected = alone(driver, prompts)
            assert_same(crowd(driver, prompts, budget=7), expected)
        engine.close()


def test_the_ladder() -> None:
    assert ladder(1) == [1]
    assert ladder(6) == [1, 2, 4, 6]
    assert ladder(100)[-3:] == [80, 96, 100]
    sizes = ladder(256)
    assert sizes[-1] == 256
    assert len(sizes) == len(set(sizes)) < 25


def test_the_buckets() -> None:
    assert buckets(10) == [10]
    assert buckets(100) == [64, 96, 100]
    sizes = buckets(8192)
    assert (sizes[0], sizes[-1]) == (64, 8192)
    assert all(b <= 1.5 * a for a, b in pairwise(sizes))
    assert all(b <= 1.25 * a for a, b in pairwise(sizes) if a >= 512)


def test_graph_inputs_arrive_padded(no_cuda: None) -> None:
    inputs = GraphInputs(12, CPU)
    padding = {"rows": 9, "uniform": 9, "cached": 9}
    for size in (4, 2):
        layout = {"rows": size, "uniform": size, "cached": 1}
        inputs.fill(layout, {"rows": np.arange(2), "uniform": np.array([0.25], np.float32)}, padding)
        views = inputs.views(layout)
        assert views["rows"].tolist() == [0, 1, 9, 9][:size]
        assert views["uniform"].tolist() == [0.25, 9, 9, 9][:size]
        assert views["cached"].tolist() == [9]


def test_staging_keeps_values_dtypes_and_alignment(no_cuda: None) -> None:
    stage = Staging(CPU)
    for length in (3, 0, 50_000):
        arrays = {
            "a": np.arange(length, dtype=np.int32),
            "b": np.arange(length, dtype=np.int64) * 2**40,
            "c": np.arange(length, dtype=np.float32) / 3,
            "d": np.arange(1, dtype=np.int64),
        }
        tensors = stage.upload(arrays)
        assert tensors.keys() == arrays.keys()
        for name, array in arrays.items():
            assert np.array_equal(tensors[name].numpy(), array)
            assert tensors[name].data_ptr() % 8 == 0
