from __future__ import annotations

import dataclasses
import gc
import logging
import threading
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_driver import Driver, Request, tiny_engine, write_tiny

from minisgl.core import PENDING, SamplingParams
from minisgl.engine.config import EngineConfig
from minisgl.engine.engine import TorchEngine
from minisgl.engine.load import pick_attention, pick_dtype
from minisgl.engine.memory import OutOfMemoryError
from minisgl.engine.step_plan import NOT_FINITE
from minisgl.models.config import ModelConfig

PROMPT = [5, 90, 17, 33, 150, 61, 8, 8, 120, 44, 71, 3, 19, 188, 2, 77, 101]
SAMPLED = SamplingParams(temperature=1.0, top_p=0.95, seed=11)
PENALISED = SamplingParams(temperature=0.8, presence_penalty=0.7, frequency_penalty=0.3, repetition_penalty=1.2, seed=5)
ALL = [SamplingParams(temperature=0), SAMPLED, SamplingParams(top_k=20, min_p=0.02, seed=3), PENALISED]


def alone(engine: TorchEngine, prompt: list[int], params: SamplingParams, count: int, **how: int) -> list[int]:
    return Driver(engine, how.pop("seed", 0)).generate(Request(how.pop("row", 0), list(prompt), params), count, **how)


@pytest.mark.parametrize("params", ALL, ids=["greedy", "top_p", "top_k", "penalised"])
def test_chunks_rows_and_pages_do_not_change_the_output(engine: TorchEngine, params: SamplingParams) -> None:
    whole = alone(engine, PROMPT, params, 30)
    assert len(set(whole)) > 5
    for chunk in (1, 2, 5, 16):
        assert alone(engine, PROMPT, params, 30, chunk=chunk, row=chunk % 6, seed=chunk) == whole


def test_neighbours_do_not_change_the_output(engine: TorchEngine) -> None:
    prompts = [PROMPT, PROMPT[3:9], [9], PROMPT[::-1] * 2]
    expected = [alone(engine, prompt, params, 12) for prompt, params in zip(prompts, ALL, strict=True)]
    driver = Driver(engine, 4)
    requests = [
        Request(row, list(prompt), params) for row, (prompt, params) in enumerate(zip(prompts, ALL, strict=True))
    ]
    # They start one after the other, with chunks of different sizes, so prompts and single tokens are mixed.
    for step in range(40):
        work = []
        for i, request in enumerate(requests):
            left = len(request.tokens) - request.cached
            if step >= 2 * i and len(request.tokens) - request.prompt_len < 12:
                work.append((request, min(left, 3 + i)))
        if work:
            driver.step(*work)
    assert [request.tokens[request.prompt_len :] for request in requests] == expected


@pytest.mark.parametrize(
    "params", [SamplingParams(temperature=0), SAMPLED, PENALISED], ids=["greedy", "sampled", "penalised"]
)
def test_a_pending_token_is_the_one_that_was_sampled(engine: TorchEngine, params: SamplingParams) -> None:
    expected = alone(engine, PROMPT, params, 10)
    driver, request = Driver(engine, 1), Request(2, list(PROMPT), params)
    flights = [driver.launch((request, len(PROMPT)))]
    for _ in range(9):
        assert request.tokens[-1] == PENDING
        flights.append(driver.launch((request, 1)))  # launched before the step in front of it is read
        driver.fill(flights.pop(0).wait(), request)
    driver.fill(flights.pop(0).wait(), request)
    assert request.tokens[request.prompt_len :] == expected


def test_a_request_that_samples_nothing_counts_zero(engine: TorchEngine) -> None:
    driver = Driver(engine)
    first, second = Request(0, list(PROMPT)), Request(1, list(PROMPT[:4]))
    result = driver.step((first, 6), (second, 4))
    assert result.counts.tolist() == [0, 1]
    assert len(result.ids) == 1
    result = driver.step((first, 3))
    assert result.counts.tolist() == [0]
    assert len(result.ids) == 0
    assert driver.generate(first, 8) == alone(engine, PROMPT, first.params, 8)


def test_pages_are_free_for_the_next_step_as_soon_as_launch_returns(engine: TorchEngine) -> None:
    expected = [alone(engine, prompt, SAMPLED, 1) for prompt in (PROMPT, PROMPT[::-1])]
    driver = Driver(engine, 3)
    first, second = Request(0, list(PROMPT), SAMPLED), Request(1, PROMPT[::-1], SAMPLED)
    one = driver.launch((first, len(PROMPT)))
    driver.release(first)  # the very pages that the second one takes
    two = driver.launch((second, len(PROMPT)))
    assert [one.wait().ids.tolist(), two.wait().ids.tolist()] == expected


def test_a_row_changes_its_pages_by_table_updates(engine: TorchEngine) -> None:
    driver, request = Driver(engine, 6), Request(0, list(PROMPT))
    driver.generate(request, 3)
    driver.release(request)
    # The same row, other pages: everything is computed again.
    again = Request(0, list(request.tokens[:-1]))
    assert driver.generate(again, 6) == alone(engine, request.tokens[:-1], request.params, 6)


def test_a_request_whose_logits_are_not_finite_fails_alone(engine: TorchEngine, tmp_path: Path) -> None:
    poison = 200
    expected = alone(engine, PROMPT, SAMPLED, 6)
    assert poison not in expected
    poisoned = tiny_engine(write_tiny(tmp_path, poison))
    driver = Driver(poisoned, 2)
    good, bad = Request(0, list(PROMPT), SAMPLED), Request(1, [4, poison, 7], PENALISED)
    result = driver.step((bad, 3), (good, len(PROMPT)))
    assert result.failed == {0: NOT_FINITE}
    assert result.counts.tolist() == [0, 1]
    # In a server the step after it is under way by then: it must not harm anybody either.
    result = driver.step((good, 1), (bad, 1))
    assert result.failed == {1: NOT_FINITE}
    driver.release(bad)
    # NaN is left in the freed pages; whoever gets them next must not see it.
    heir = Request(1, list(PROMPT), SAMPLED)
    assert driver.generate(heir, 6) == expected
    assert driver.generate(good, 6) == expected
    poisoned.close()


def test_an_exception_surfaces_from_wait_and_the_engine_goes_on(engine: TorchEngine, monkeypatch: Any) -> None:
    model = engine._runner._runner.model
    expected = alone(engine, PROMPT, SAMPLED, 2)

    def broken(*args: Any) -> None:
        raise RuntimeError("the device is on fire")

    with monkeypatch.context() as patch:
        patch.setattr(model, "logits", broken)
        flight = Driver(engine).launch((Request(0, list(PROMPT)), len(PROMPT)))
        with pytest.raises(RuntimeError, match="on fire"):
            flight.wait()
    assert alone(engine, PROMPT, SAMPLED, 2) == expected


def test_launch_returns_while_the_device_works(engine: TorchEngine, monkeypatch: Any) -> None:
    model, go = engine._runner._runner.model, threading.Event()
    logits = model.logits
    monkeypatch.setattr(model, "logits", lambda hidden: go.wait(30) and logits(hidden))
    driver, request = Driver(engine), Request(0, list(PROMPT))
    flights = [driver.launch((request, len(PROMPT))), driver.launch((request, 1))]
    go.set()
    for flight in flights:
        driver.fill(flight.wait(), request)
    assert request.tokens[request.prompt_len :] == alone(engine, PROMPT, request.params, 2)


@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize("attention", ["torch", "cpu,torch"])
def test_other_page_sizes_and_backends(engine: TorchEngine, tiny_model: Path, page_size: int, attention: str) -> None:
    other = tiny_engine(tiny_model, page_size=page_size, num_pages=480 // page_size, attention=attention)
    try:
        for params in (SamplingParams(temperature=0), SAMPLED):
            assert alone(other, PROMPT, params, 20, chunk=7) == alone(engine, PROMPT, params, 20)
    finally:
        other.close()


def test_the_number_of_threads_does_not_change_the_output(engine: TorchEngine, tiny_model: Path) -> None:
    other = tiny_engine(tiny_model, num_threads=2)
    assert alone(other, PROMPT, SAMPLED, 5) == alone(engine, PROMPT, SAMPLED, 5)
    other.close()


def test_half_precision_on_a_cpu_runs_in_float32_and_says_so_once(
    engine: TorchEngine, tiny_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        half = tiny_engine(tiny_model, dtype="bfloat16")
    assert [r.message for r in caplog.records if "float32" in r.message] == [
        "Half precision (bfloat16) needs a GPU; on this CPU the model runs in float32."
    ]
    assert alone(half, PROMPT, SAMPLED, 10) == alone(engine, PROMPT, SAMPLED, 10)
    half.close()


def test_what_the_scheduler_is_told(tiny_model: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine = tiny_engine(tiny_model, num_pages=None, max_running_req=3, page_size=16, token_budget=40)
    info = engine.info
    engine.close()
    assert (info.num_pages, info.page_size, info.max_running_req) == (3 * 10, 16, 3)  # no more than ever in use
    assert (info.max_seq_len, info.vocab_size, info.token_budget) == (160, 211, 40)

    engine = tiny_engine(tiny_model, max_seq_len=99)
    assert engine.info.max_seq_len == 99
    engine.close()

    with caplog.at_level(logging.WARNING):
        engine = tiny_engine(tiny_model, num_pages=9)
    assert engine.info.max_seq_len == 36
    assert "holds 36 tokens" in caplog.text
    engine.close()


def test_progress_is_told(tiny_model: Path) -> None:
    told: list[tuple[str, float | None]] = []
    config = EngineConfig(model_path=tiny_model, device="cpu", num_pages=20, num_threads=1)
    TorchEngine(config, lambda what, fraction: told.append((what, fraction))).close()
    fractions = [fraction for what, fraction in told if what == "loading weights"]
    assert fractions[-1] == 1
    assert fractions == sorted(fractions)


def test_what_cannot_be_built_says_why(tiny_model: Path, tmp_path: Path) -> None:
    threads = threading.active_count()
    with pytest.raises(OutOfMemoryError, match=r"--num-pages \d+ would fit"):
        tiny_engine(tiny_model, num_pages=10**12)
    with pytest.raises(ValueError, match="config"):
        tiny_engine(tmp_path / "nothing")
    with pytest.raises(ValueError, match="attention backend"):
        tiny_engine(tiny_model, attention="nonsense")
    with pytest.raises(ValueError, match="does not run on device cpu; choose among: torch, cpu"):
        tiny_engine(tiny_model, attention="torch,triton")
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="no CUDA device"):
            tiny_engine(tiny_model, device="cuda")
    assert threading.active_count() <= threads


@pytest.mark.parametrize(
    ("asked", "checkpoint", "expected"),
    [
        ("auto", None, torch.bfloat16),
        ("auto", "float16", torch.float16),
        ("auto", "float32", torch.float32),
        ("float16", "float64", torch.float16),
        ("auto", "float64", None),
    ],
)
def test_the_type_on_a_gpu_is_what_is_asked_for_or_the_checkpoints(
    tiny_model: Path, asked: Any, checkpoint: str | None, expected: torch.dtype | None
) -> None:
    config = EngineConfig(model_path=tiny_model, dtype=asked)
    model = dataclasses.replace(ModelConfig.from_path(tiny_model), torch_dtype=checkpoint)
    if expected is None:
        with pytest.raises(ValueError, match=r"float64, cannot be computed in; choose --dtype float32"):
            pick_dtype(config, model, torch.device("cuda"))
    else:
        assert pick_dtype(config, model, torch.device("cuda")) == expected


def test_a_cache_of_one_token_can_be_built(tiny_model: Path) -> None:
    engine = tiny_engine(tiny_model, num_pages=1, page_size=1)
    assert (engine.info.num_pages, engine.info.max_seq_len) == (1, 1)
    engine.close()


def test_dummy_weights_need_only_a_config(tmp_path: Path) -> None:
    (write_tiny(tmp_path) / "model.safetensors").unlink()
    engine = tiny_engine(tmp_path, load_format="dummy")
    assert len(alone(engine, PROMPT, SAMPLED, 5)) == 5
    engine.close()


def test_closing_frees_the_model_and_another_engine_can_be_made(engine: TorchEngine, tiny_model: Path) -> None:
    expected = alone(engine, PROMPT, SAMPLED, 3)
    for _ in range(2):
        other = tiny_engine(tiny_model)
        assert alone(other, PROMPT, SAMPLED, 3) == expected
        model, kv = weakref.ref(other._runner._runner.model), weakref.ref(other._runner._runner.state.kv)
        other.close()
        gc.collect()
        assert model() is None
        assert kv() is None


def test_results_are_the_callers_own(engine: TorchEngine) -> None:
    driver, request = Driver(engine), Request(0, list(PROMPT))
    results = [driver.step((request, len(PROMPT)))]
    kept = [results[0].ids.tolist()]
    for _ in range(3):
        results.append(driver.step((request, 1)))
        kept.append(results[-1].ids.tolist())
    assert [r.ids.tolist() for r in results] == kept
    assert all(r.ids.dtype == np.int32 for r in results)


@pytest.mark.parametrize(
    ("changes", "device", "words"),
    [
        ({"attention": "fi"}, "cuda", "--deterministic needs attention by cpu or triton, for all steps; fi cannot"),
        ({"attention": "triton,fi"}, "cuda", "triton,fi cannot"),
        ({"attention": "torch"}, "cpu", "torch cannot"),
        ({"tp_size": 3, "rendezvous": Path("x")}, "cuda", "one GPU or two, not with --tp 3"),
    ],
)
def test_deterministic_is_refused_where_it_would_not_be(changes: dict[str, Any], device: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        pick_attention(EngineConfig(model_path=Path("m"), deterministic=True, **changes), torch.device(device))


def test_deterministic_changes_nothing_on_a_cpu(engine: TorchEngine, tiny_model: Path) -> None:
    other = tiny_engine(tiny_model, deterministic=True)
    assert alone(other, PROMPT, SAMPLED, 12) == alone(engine, PROMPT, SAMPLED, 12)
    other.close()
