"""The simulated engine is only worth something if it notices what is wrong."""

from __future__ import annotations

import time

import numpy as np
import pytest

from minisgl.core import PENDING, Batch, EngineInfo, Penalties, Sampling, SamplingParams, TableUpdate
from minisgl.engine.simulated import SimulatedEngine, SimulatedModel, SimulationError, expected_output

INFO = EngineInfo(num_pages=8, page_size=2, max_running_req=4, max_seq_len=12, vocab_size=100, token_budget=10)


def i32(values) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def f32(values) -> np.ndarray:
    return np.array(values, dtype=np.float32)


def batch(*requests, table=(), penalties=None) -> Batch:
    """Each request: row, cached, its new ids. All sample, greedily. ``table``: (row, col, page)."""
    rows, cached, ids = zip(*requests, strict=True)
    count = len(rows)
    update = i32(table).reshape(-1, 3).T.copy()
    sampling = Sampling(
        index=i32(range(count)),
        temperature=f32([0] * count),
        top_k=i32([0] * count),
        top_p=f32([1] * count),
        min_p=f32([0] * count),
        uniform=f32([0.5] * count),
        penalties=penalties,
    )
    flat = i32([token for chunk in ids for token in chunk])
    return Batch(i32(rows), i32(cached), i32([len(chunk) for chunk in ids]), flat, TableUpdate(*update), sampling)


def run(engine, step) -> list[int]:
    return engine.launch(step).wait().ids.tolist()


def test_answers_the_oracle_in_chunks_and_through_pending_tokens():
    engine = SimulatedEngine(INFO)
    expected = expected_output(engine.model, [5, 6, 7], SamplingParams(temperature=0), 4, key=0)
    first = batch((0, 0, [5, 6]), table=[(0, 0, 3), (0, 1, 1)])
    first.sampling = batch((0, 0, [1])).sampling
    first.sampling.index = i32([])
    for name in ("temperature", "top_p", "min_p", "uniform"):
        setattr(first.sampling, name, f32([]))
    result = engine.launch(first).wait()
    assert (result.ids.tolist(), result.counts.tolist()) == ([], [0])
    a = engine.launch(batch((0, 2, [7])))
    b = engine.launch(batch((0, 3, [PENDING])))
    out = a.wait().ids.tolist() + b.wait().ids.tolist()
    out += run(engine, batch((0, 4, [PENDING]), table=[(0, 2, 7)]))
    out += run(engine, batch((0, 5, [out[-1]])))
    assert out == expected
    engine.close()


def test_sampling_looks_at_the_random_number_and_greedy_does_not():
    model, context = SimulatedModel(), np.array([7, 7], dtype=np.uint64)
    greedy = model.next_tokens(context, f32([0, 0]), f32([0.1, 0.9]))
    sampled = model.next_tokens(context, f32([1, 1]), f32([0.1, 0.9]))
    assert greedy[0] == greedy[1]
    assert sampled[0] != sampled[1]


def test_end_tokens_come_as_often_as_asked():
    contexts = np.arange(4000, dtype=np.uint64)
    zeros = np.zeros(4000, dtype=np.float32)
    for probability in (0.0, 0.1, 1.0):
        tokens = SimulatedModel(vocab_size=50, eos=7, eos_probability=probability).next_tokens(contexts, zeros, zeros)
        assert abs((tokens == 7).mean() - probability) < 0.02
        assert tokens.min() >= 0
        assert tokens.max() < 50


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (batch((1, 2, [4]), table=[(1, 0, 5)]), "without a page"),
        (batch((1, 2, [4]), table=[(1, 0, 5), (1, 1, 6)]), "does not find its token 0"),
        (batch((1, 2, [4]), table=[(1, 0, 1), (1, 1, 6)]), "does not find its token 0"),
        (batch((1, 3, [4]), table=[(1, 0, 0), (1, 1, 1)]), "another row began"),
        (batch((1, 0, [4]), (0, 3, [9]), table=[(1, 0, 0)]), "another reader"),
        (batch((1, 0, [4, 5, 6]), table=[(1, 0, 4), (1, 1, 4)]), "another reader"),
        (batch((0, 3, [9]), (0, 4, [9])), "A row occurs twice"),
        (batch((0, 3, [9]), table=[(0, 1, 1), (0, 1, 1)]), "updated twice"),
        (batch((0, 3, [9]), table=[(0, 2, 8)]), "page does not exist"),
        (batch((0, 3, [9] * 9)), "past max_seq_len"),
        (batch((0, 0, [9] * 11)), "over the token budget"),
        (batch((1, 0, [4, 5]), (0, 3, [9]), table=[(1, 0, 5)]), "do not come first"),
        (batch((1, 0, [PENDING]), table=[(1, 0, 5)]), "has not sampled"),
        (batch((4, 0, [1])), "row does not exist"),
        (batch((0, 3, [])), "do not fit"),
    ],
)
def test_notices(broken, message):
    engine = SimulatedEngine(INFO)
    run(engine, batch((0, 0, [1, 2, 3]), table=[(0, 0, 0), (0, 1, 1)]))
    with pytest.raises(SimulationError, match=message):
        engine.launch(broken)


def test_notices_a_history_that_is_not_the_context():
    def step(history):
        penalties = Penalties(i32([0]), i32(history), i32([0, 4]), i32([3]), f32([1]), f32([0]), f32([1]))
        return batch((0, 3, [PENDING]), penalties=penalties)

    engine = SimulatedEngine(INFO)
    run(engine, batch((0, 0, [1, 2, 3]), table=[(0, 0, 0), (0, 1, 1)]))
    run(engine, step([1, 2, 3, PENDING]))
    engine.launch(batch((0, 4, [PENDING]), table=[(0, 2, 2)]))
    with pytest.raises(SimulationError, match="history differs"):
        engine.launch(step([1, 2, 4, PENDING]))


def test_notices_pages_of_a_failed_request():
    engine = SimulatedEngine(INFO, SimulatedModel(vocab_size=100, poison=frozenset({9})))
    result = engine.launch(batch((1, 0, [4]), (0, 0, [1, 9]), table=[(0, 0, 0), (1, 0, 3)])).wait()
    assert list(result.failed) == [1]
    assert result.counts.tolist() == [1, 0]
    run(engine, batch((0, 2, [PENDING]), table=[(0, 1, 1)]))  # the host may not have known
    with pytest.raises(SimulationError, match="Row 2 does not find its token 0"):
        engine.launch(batch((2, 2, [5]), table=[(2, 0, 0), (2, 1, 2)]))


def test_steps_are_waited_for_in_order_and_two_are_in_flight_at_most():
    engine = SimulatedEngine(INFO)
    a = engine.launch(batch((0, 0, [1]), table=[(0, 0, 0)]))
    b = engine.launch(batch((0, 1, [PENDING])))
    with pytest.raises(SimulationError, match="More than two"):
        engine.launch(batch((0, 1, [PENDING])))
    with pytest.raises(SimulationError, match="out of order"):
        b.wait()
    with pytest.raises(SimulationError, match="in flight"):
        engine.close()
    a.wait()
    b.wait()
    with pytest.raises(SimulationError, match="twice"):
        b.wait()


def test_a_delay_is_the_time_a_step_takes():
    engine = SimulatedEngine(INFO, delay=0.05)
    start = time.monotonic()
    run(engine, batch((0, 0, [1]), table=[(0, 0, 0)]))
    assert time.monotonic() - start >= 0.05


def test_without_verification_it_needs_no_pages():
    engine = SimulatedEngine(INFO, verify=False)
    one = run(engine, batch((0, 0, [1, 2, 3])))
    other = run(SimulatedEngine(INFO, verify=False), batch((0, 2, [3])))
    assert one == other
