"""What a client gets: messages, ends, aborts, failures; the same with and without overlap, cache and neighbours."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from scheduler_harness import EOS, Harness, LocalIO, engine_info

from minisgl.core import Batch, BatchResult, SamplingParams
from minisgl.engine.simulated import SimulatedModel
from minisgl.message import AbortBackendMsg, TextParams, UserMsg, pack_ids, unpack_ids
from minisgl.scheduler import Scheduler, SchedulerConfig

STOPPING = SimulatedModel(vocab_size=1000, eos=EOS, eos_probability=0.1)
both = pytest.mark.parametrize("overlap", [True, False])


def test_the_first_message_introduces_the_request():
    harness = Harness()
    client = harness.submit(
        range(1, 11), max_tokens=3, stop=(), include_stop_str_in_output=True, skip_special_tokens=False
    )
    again = harness.submit(range(1, 11), max_tokens=1)
    harness.run()
    first, *rest = client.messages
    assert first.text == TextParams(stop=(), include_stop_str_in_output=True, skip_special_tokens=False)
    assert (first.prompt_tokens, first.cached_tokens, first.completion_tokens) == (10, 0, 1)
    assert [message.text for message in rest] == [None, None]
    assert [message.completion_tokens for message in rest] == [2, 3]
    assert [message.finish for message in client.messages] == [None, None, "length"]
    assert again.last.cached_tokens == 8


def test_all_items_of_a_step_are_sent_at_once():
    harness = Harness(overlap=False)
    for i in range(5):
        harness.submit([i + 1, 7], max_tokens=10)
    harness.step(3)
    assert harness.io.sends == 3
    harness.run()


@both
def test_an_end_token_is_counted_and_ends_the_request(overlap):
    harness = Harness(model=STOPPING, overlap=overlap)
    clients = [harness.submit([i + 1, 5], max_tokens=50) for i in range(6)]
    harness.run()
    stopped = [client for client in clients if client.finish == "stop"]
    assert len(stopped) >= 4
    for client in stopped:
        assert client.ids.index(EOS) == len(client.ids) - 1
        assert client.last.completion_tokens == len(client.ids)


@both
def test_stop_token_ids_of_the_request_end_it_too(overlap):
    free = Harness(overlap=overlap)
    ids = free.submit([3, 4], max_tokens=10)
    free.run()
    harness = Harness(overlap=overlap)
    client = harness.submit([3, 4], max_tokens=10, stop_token_ids=(ids.ids[4],))
    for _ in range(20):
        harness.step()
    assert (client.ids, client.finish) == (ids.ids[:5], "stop")
    assert harness.scheduler.idle


def test_an_ignored_end_token_is_a_token_like_any_other():
    harness = Harness(model=SimulatedModel(vocab_size=1000, eos_probability=0.5), overlap=True)
    client = harness.submit([3, 4], stop=(), max_tokens=20)
    for _ in range(30):
        harness.step()
    assert EOS in client.ids
    assert (len(client.ids), client.finish) == (20, "length")


def test_the_surplus_token_of_a_late_stop_is_neither_shown_nor_counted_nor_cached():
    harness = Harness(engine_info(page_size=1, num_pages=200), model=STOPPING, overlap=True)
    client = harness.submit([1, 2, 3], max_tokens=100)
    harness.run()
    assert client.finish == "stop"
    steps = len(client.ids) + 1  # the last of them for nothing
    assert harness.engine.steps == steps
    assert client.last.completion_tokens == len(client.ids)
    # The cache holds what was computed for the client: all but the last token.
    assert harness.scheduler.stats().cached_pages == 3 + len(client.ids) - 1


def test_an_abort_while_waiting_never_reaches_the_engine():
    harness = Harness(engine_info(max_running_req=1))
    running = harness.submit([1, 2], max_tokens=10)
    waiting = harness.submit([3, 4, 5], max_tokens=10)
    last = harness.submit([6, 7], max_tokens=10)
    harness.step(3)
    harness.abort(waiting)
    harness.step()
    assert waiting.finish == "abort"
    assert waiting.last.completion_tokens == 0
    harness.run()
    assert (running.finish, last.finish) == ("length", "length")
    assert harness.engine.tokens == 2 * (2 + 9)


@both
@pytest.mark.parametrize("after", [1, 2, 3, 6])
def test_an_abort_between_launch_and_result_frees_once(overlap, after):
    harness = Harness(engine_info(token_budget=8, num_pages=20), overlap=overlap)
    client = harness.submit(range(1, 21), max_tokens=50)
    other = harness.submit([5, 6], max_tokens=30)
    harness.step(after)  # with overlap, one step is in flight now
    harness.abort(client)
    harness.step()
    assert client.finish == "abort"
    stats = harness.scheduler.stats()
    assert stats.running == 1
    # Its row and pages go to the next one while results for it are still on their way.
    heir = harness.submit(range(30, 50), max_tokens=20)
    harness.run()
    assert (heir.finish, other.finish) == ("length", "length")


def test_an_abort_in_the_same_breath_as_the_request():
    harness = Harness()
    client = harness.submit([1, 2], max_tokens=5)
    harness.abort(client)
    harness.step()
    assert client.finish == "abort"
    assert (harness.engine.steps, harness.scheduler.idle) == (0, True)


def test_aborts_of_unknown_and_finished_requests_are_ignored():
    harness = Harness()
    client = harness.submit([1, 2], max_tokens=2)
    harness.io.inbox.append(AbortBackendMsg(uid=77))
    harness.run()
    harness.abort(client)
    harness.step(2)
    assert len(client.messages) == 2


def test_a_uid_in_use_is_a_fault_of_the_sender():
    harness = Harness()
    harness.submit([1, 2], max_tokens=20)
    harness.io.inbox.append(UserMsg(uid=0, input_ids=pack_ids([1]), params=SamplingParams()))
    with pytest.raises(ValueError, match="Request id 0 is in use"):
        harness.scheduler.step()


@both
def test_a_failing_request_fails_alone_and_leaves_nothing_in_the_cache(overlap):
    model = SimulatedModel(vocab_size=1000, poison=frozenset({666}))
    harness = Harness(engine_info(token_budget=16), model, overlap=overlap)
    good = harness.submit([1, 2, 3], max_tokens=12)
    harness.step(2)
    bad = harness.submit([*range(10, 40), 666, *range(40, 60)], max_tokens=5)
    harness.run()
    assert (bad.finish, bad.ids) == ("error", [])
    assert bad.last.error is not None
    assert bad.last.error.status == 500
    assert "poisonous" in bad.last.error.message
    assert good.finish == "length"
    stats = harness.scheduler.stats()
    assert stats.cached_pages == (3 + 11) // 4


@pytest.mark.parametrize("call", ["launch", "wait"])
def test_an_exception_of_the_engine_is_fatal(call):
    harness = Harness()
    harness.submit([1, 2], max_tokens=5)

    def broken(*_: object) -> None:
        raise OSError("device lost")

    setattr(harness.engine, "launch" if call == "launch" else "finish", broken)
    with pytest.raises(OSError, match="device lost"):
        harness.step(3)


def test_a_seeded_request_repeats_whatever_runs_beside_it():
    answers = []
    for neighbours, budget, overlap, cache in [(0, 64, True, "radix"), (5, 9, False, "naive"), (3, 20, True, "radix")]:
        harness = Harness(engine_info(token_budget=budget), overlap=overlap, cache=cache)
        for i in range(neighbours):
            harness.submit(range(i + 1, i + 20), max_tokens=30, temperature=1.0)
        harness.step(neighbours)
        client = harness.submit(range(1, 12), max_tokens=20, temperature=1.0, seed=-7)
        harness.run()
        answers.append(client.ids)
    assert answers[0] == answers[1] == answers[2]


def test_unseeded_requests_differ_from_each_other_and_follow_the_servers_seed():
    def answers(seed: int) -> list[list[int]]:
        harness = Harness(seed=seed)
        clients = [harness.submit([1, 2, 3], max_tokens=8, temperature=1.0) for _ in range(2)]
        harness.run()
        return [client.ids for client in clients]

    first = answers(1)
    assert first[0] != first[1]
    assert answers(1) == first
    assert answers(2) != first


def test_the_answer_does_not_depend_on_what_the_cache_held():
    cold = Harness()
    expected = cold.submit(range(1, 40), max_tokens=10)
    cold.run()
    warm = Harness()
    for length in (1, 3, 4, 17, 38, 39):
        warm.submit(range(1, length + 1), max_tokens=12)
        warm.run()
    hit = warm.submit(range(1, 40), max_tokens=10)
    warm.run()
    assert hit.last.error is None
    assert hit.messages[0].cached_tokens == 36
    assert hit.ids == expected.ids


def test_three_tokens_on_pages_of_four_leave_nothing_behind():
    harness = Harness(engine_info(page_size=4))
    for _ in range(2):
        client = harness.submit([1, 2, 3], max_tokens=1)
        harness.run()
        assert client.messages[0].cached_tokens == 0
    assert harness.scheduler.stats().free_pages == harness.info.num_pages


def test_two_equal_prompts_of_one_batch_end_up_on_the_same_pages():
    harness = Harness(engine_info(num_pages=100, token_budget=256), overlap=True)
    pair = [harness.submit(range(1, 21), max_tokens=6) for _ in range(2)]
    harness.step(3)
    assert harness.engine.batches[0].size == 2
    assert harness.scheduler.stats().cached_pages == 5
    assert harness.scheduler.stats().held_pages == 2  # of each only the page it writes
    harness.run()
    assert pair[0].ids == pair[1].ids


def test_penalties_carry_the_tokens_so_far():
    harness = Harness(overlap=True)
    plain = harness.submit([5, 6], max_tokens=4)
    penalised = harness.submit([1, 2, 3], max_tokens=4, presence_penalty=0.5, repetition_penalty=1.5)
    harness.run()
    assert plain.finish == "length"
    first, second = (batch.sampling.penalties for batch in harness.engine.batches[:2])
    assert first is not None
    assert second is not None
    assert first.history.tolist() == [1, 2, 3]
    assert second.history.tolist() == [1, 2, 3, -1]
    assert (second.index.tolist(), second.offsets.tolist(), second.prompt_lens.tolist()) == ([1], [0, 4], [3])
    assert (second.presence[0], second.frequency[0], second.repetition[0]) == (0.5, 0.0, 1.5)
    last = harness.engine.batches[3].sampling.penalties
    assert last is not None
    assert last.history.tolist() == [1, 2, 3, *penalised.ids[:2], -1]


def test_sampling_parameters_reach_the_engine():
    harness = Harness()
    harness.submit([5, 6], max_tokens=2, temperature=0.5, top_p=0.75, top_k=9, min_p=0.25)
    harness.submit([7], max_tokens=2, top_k=-1)
    harness.run()
    sampling = harness.engine.batches[0].sampling
    assert sampling.temperature.tolist() == [0.0, 0.5]  # the single token comes first
    assert sampling.top_p.tolist() == [1.0, 0.75]
    assert sampling.top_k.tolist() == [0, 9]
    assert sampling.min_p.tolist() == [0.0, 0.25]


class SeveralTokens:
    """An engine that answers ``counts`` tokens at once: 100, 101, 102, ..."""

    def __init__(self, count: int) -> None:
        self.info = engine_info()
        self.batches: list[Batch] = []
        self._count = count
        self._next = 100

    def launch(self, batch: Batch) -> SeveralTokens:
        self.batches.append(batch)
        return self

    def wait(self) -> BatchResult:
        ids = np.arange(self._next, self._next + self._count, dtype=np.int32)
        self._next += self._count
        return BatchResult(ids=ids, counts=np.array([self._count], dtype=np.int32))

    def close(self) -> None:
        pass


@pytest.mark.parametrize(
    ("max_tokens", "stop", "expected", "finish"),
    [(7, (), [[100, 101, 102], [103, 104, 105], [106]], "length"), (7, (104,), [[100, 101, 102], [103, 104]], "stop")],
)
def test_several_tokens_of_one_step(max_tokens, stop, expected, finish):
    engine, io = SeveralTokens(3), LocalIO()
    scheduler = Scheduler(engine, io, SchedulerConfig(overlap=False))
    params = SamplingParams(max_tokens=max_tokens, stop_token_ids=stop)
    io.inbox.append(UserMsg(uid=4, input_ids=pack_ids([1, 2, 3, 4, 5]), params=params))
    while scheduler.step():
        scheduler.check()
    assert [unpack_ids(message.ids).tolist() for message in io.outbox] == expected
    assert io.outbox[-1].finish == finish
    assert io.outbox[-1].completion_tokens == sum(map(len, expected))
    assert engine.batches[1].input_ids.tolist() == [100, 101, 102]
    assert engine.batches[1].cached.tolist() == [5]


def test_stats_add_up():
    harness = Harness(engine_info(max_running_req=2))
    for i in range(3):
        harness.submit(range(i + 1, i + 11), max_tokens=5)
    harness.step()
    stats = harness.scheduler.stats()
    assert (stats.running, stats.waiting, stats.steps) == (2, 1, 1)
    assert stats.free_pages + stats.cached_pages + stats.held_pages == 64
    harness.run()
    assert harness.engine.tokens == 30 + 12  # the prompts, and all but the last token of each answer
    assert harness.scheduler.stats().steps == harness.engine.steps


def test_idle_checks_the_books():
    harness = Harness()
    harness.submit(range(1, 11), max_tokens=5)
    harness.run()
    lost = harness.scheduler._memory.allocator.alloc(1)
    assert len(lost) == 1
    with pytest.raises(RuntimeError, match="KV pages leaked"):
        harness.scheduler.step()


def test_a_config_that_makes_no_sense_is_refused():
    with pytest.raises(ValueError, match="token_budget must be at least 1, not 0"):
        SchedulerConfig(token_budget=0)
    with pytest.raises(ValueError, match="max_queue must be at least 0, not -1"):
        SchedulerConfig(max_queue=-1)


def test_the_control_plane_runs_without_torch():
    code = (
        "import sys, minisgl.scheduler, minisgl.kvcache, minisgl.message, minisgl.engine.simulated;"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
