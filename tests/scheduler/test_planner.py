"""Who computes when: budget, chunks, pages, pre-emption, and waiting for a shared prefix."""

from __future__ import annotations

import pytest
from scheduler_harness import Harness, engine_info

from minisgl.engine.simulated import SimulatedModel


def prompt(length: int, start: int = 1) -> list[int]:
    return [1 + (start * 131 + i * 7) % 997 for i in range(length)]


def test_a_prompt_longer_than_the_budget_goes_in_chunks():
    harness = Harness(engine_info(token_budget=16))
    client = harness.submit(prompt(50), max_tokens=2)
    harness.run()
    assert client.finish == "length"
    assert [batch.new.tolist() for batch in harness.engine.batches] == [[16], [16], [16], [2], [1]]


def test_a_stream_does_not_wait_for_a_long_prompt():
    harness = Harness(engine_info(token_budget=16))
    stream = harness.submit([1, 2], max_tokens=60)
    harness.step(3)
    long = harness.submit(prompt(150), max_tokens=2)
    while not long.ids:
        before = len(stream.ids)
        harness.step()
        assert len(stream.ids) == before + 1
    assert max(batch.num_tokens for batch in harness.engine.batches) == 16
    harness.run()


def test_single_tokens_come_first_in_a_mixed_batch():
    harness = Harness(engine_info(token_budget=64))
    harness.submit([1, 2], max_tokens=30)
    harness.submit([3, 4], max_tokens=30)
    harness.step(3)
    harness.submit(prompt(20), max_tokens=3)
    harness.submit([7], max_tokens=3)
    harness.step()
    batch = harness.engine.batches[-1]
    assert batch.new.tolist() == [1, 1, 1, 20]
    assert batch.num_single == 3
    assert batch.rows.tolist() == [0, 1, 3, 2]
    harness.run()


def test_there_are_never_more_rows_than_tokens_in_a_step():
    harness = Harness(engine_info(token_budget=3, max_running_req=8))
    for i in range(6):
        harness.submit([i + 1], max_tokens=10)
    harness.step(2)
    assert harness.scheduler.stats().running == 3
    harness.run()


def test_the_config_can_lower_the_budget_but_not_raise_it():
    for wanted, got in ((8, 8), (None, 64), (1000, 64)):
        harness = Harness(engine_info(token_budget=64), token_budget=wanted)
        harness.submit(prompt(100), max_tokens=1)
        harness.step()
        assert harness.engine.batches[0].num_tokens == got
        harness.run()


def test_the_end_by_length_is_known_in_advance():
    """Neither the last token is fed, nor is a step launched for nothing."""
    harness = Harness(engine_info())
    harness.submit(prompt(10), max_tokens=5)
    harness.run()
    assert harness.engine.tokens == 10 + 4
    assert harness.engine.steps == 5


def test_admission_reserves_the_prompt_and_not_the_output():
    # Two requests of 21 + 60 tokens on 30 pages of 4: only their prompts fit together for good.
    harness = Harness(engine_info(num_pages=30, max_seq_len=120), cache="naive")
    first = harness.submit(prompt(21), max_tokens=60)
    second = harness.submit(prompt(21, 2), max_tokens=60)
    harness.step(3)
    assert harness.scheduler.stats().running == 2
    harness.run()
    assert harness.scheduler.stats().preemptions == 1
    assert [len(first.ids), len(second.ids)] == [60, 60]


def test_the_youngest_is_preempted_and_comes_back_first_with_its_output():
    harness = Harness(engine_info(num_pages=30, max_seq_len=120), cache="naive")
    first = harness.submit(prompt(21), max_tokens=60)
    second = harness.submit(prompt(21, 2), max_tokens=60)
    harness.submit(prompt(70, 3), max_tokens=4)  # waits for lack of pages
    while not harness.scheduler.stats().preemptions:
        harness.step()
    held, launched = len(second.ids), len(harness.engine.batches)
    assert 0 < held < 60
    assert harness.scheduler.stats().running == 1
    while first.finish is None:
        assert len(second.ids) == held
        harness.step()
    harness.run()
    # Prompt and output are computed again, from the start without a cache; the third one is behind it.
    back = next(batch for batch in harness.engine.batches[launched:] if batch.new.max() > 1)
    assert back.cached[0] == 0
    assert back.new[0] == 21 + held


def test_the_youngest_is_the_last_to_arrive_and_not_the_last_to_start():
    harness = Harness(engine_info(num_pages=30, token_budget=64))
    harness.submit(prompt(33), max_tokens=40)
    older = harness.submit(prompt(33), max_tokens=40)  # follows the first
    younger = harness.submit(prompt(4, 2), max_tokens=40)  # starts before it
    while not harness.scheduler.stats().preemptions:
        harness.step()
        assert not older.ids or len(older.ids) < len(younger.ids)
    held = len(younger.ids)
    before = len(older.ids)
    harness.step(3)
    assert len(younger.ids) == held
    assert len(older.ids) > before
    harness.run()


def test_no_request_starts_that_would_be_preempted_at_once():
    # Running ones need room for their next tokens; so do those that start in the same step.
    alone = Harness(engine_info(num_pages=16))
    alone.submit(prompt(21), max_tokens=30)
    alone.step(2)
    alone.submit(prompt(39, 2), max_tokens=8)
    alone.run()
    assert alone.scheduler.stats().preemptions == 0
    together = Harness(engine_info(num_pages=16))
    together.submit(prompt(32), max_tokens=8)
    together.submit(prompt(32, 2), max_tokens=8)
    together.run()
    assert together.scheduler.stats().preemptions == 0


@pytest.mark.parametrize("page_size", [1, 4, 7])
def test_a_preempted_request_that_finds_its_own_prefix_answers_the_same(page_size):
    tokens = 120
    harness = Harness(engine_info(num_pages=tokens // page_size, page_size=page_size, max_seq_len=110))
    first = harness.submit(prompt(21), max_tokens=70)
    second = harness.submit(prompt(21, 2), max_tokens=55, temperature=1.0, seed=3)
    harness.run()
    assert harness.scheduler.stats().preemptions >= 1
    alone = Harness(engine_info(num_pages=200, page_size=page_size))
    again = alone.submit(prompt(21, 2), max_tokens=55, temperature=1.0, seed=3)
    alone.run()
    assert second.ids == again.ids
    assert first.finish == second.finish == "length"
    # The first needed the pages of 30 of its 60 tokens, and only those are computed twice.
    assert 20 < harness.engine.tokens - (21 + 69) - (21 + 54) < 45


def test_nobody_is_preempted_for_pages_that_the_cache_can_give():
    harness = Harness(engine_info(num_pages=30, max_seq_len=100))
    for i in range(12):
        harness.submit(prompt(40, i), max_tokens=20)
        harness.run()
    assert harness.scheduler.stats().preemptions == 0
    assert harness.scheduler.stats().cached_pages > 15


@pytest.mark.parametrize(("cache", "computed"), [("radix", 96 + 7 * 1), ("naive", 8 * 97)])
def test_eight_equal_prompts_compute_their_prefix_once(cache, computed):
    harness = Harness(engine_info(num_pages=400, token_budget=64), cache=cache)
    clients = [harness.submit(prompt(97), max_tokens=1) for _ in range(8)]
    harness.run()
    assert harness.engine.tokens == computed + (1 if cache == "radix" else 0)
    assert [client.messages[0].cached_tokens for client in clients[1:]] == [96 if cache == "radix" else 0] * 7


def test_followers_start_in_their_order_once_the_prefix_is_there():
    harness = Harness(engine_info(num_pages=400, max_running_req=3))
    harness.submit(prompt(60), max_tokens=50)
    second = harness.submit(prompt(60), max_tokens=9)
    third = harness.submit(prompt(60), max_tokens=9)
    fourth = harness.submit(prompt(60), max_tokens=9)
    harness.step()
    assert harness.scheduler.stats().waiting == 3
    harness.step(4)
    assert (len(second.ids), len(third.ids), len(fourth.ids)) == (2, 2, 0)
    harness.run()


def test_followers_do_not_hold_up_those_behind_them():
    harness = Harness(engine_info(num_pages=400))
    harness.submit(prompt(60), max_tokens=2)
    follower = harness.submit(prompt(60), max_tokens=2)
    other = harness.submit([5, 6], max_tokens=2)
    harness.step()
    assert harness.engine.batches[0].new.tolist() == [60, 2]
    harness.step()
    assert len(other.ids) == 1
    assert follower.messages == []
    assert harness.scheduler.stats().waiting == 1
    harness.run()


@pytest.mark.parametrize("end", ["abort", "fail"])
def test_followers_go_on_when_their_leader_ends_early(end):
    model = SimulatedModel(vocab_size=1000, poison=frozenset({998}))
    harness = Harness(engine_info(num_pages=400), model)
    leader = harness.submit([*prompt(60), 998 if end == "fail" else 997], max_tokens=2)
    followers = [harness.submit(prompt(60), max_tokens=2) for _ in range(3)]
    harness.step()
    assert harness.scheduler.stats().waiting == 3
    if end == "abort":
        harness.abort(leader)
    harness.step(2)
    assert harness.scheduler.stats().waiting == 2  # the first of them leads now
    harness.run()
    assert leader.finish == ("abort" if end == "abort" else "error")
    assert [follower.finish for follower in followers] == ["length"] * 3


def test_an_aborted_follower_is_forgotten():
    harness = Harness(engine_info(num_pages=400))
    harness.submit(prompt(60), max_tokens=2)
    follower = harness.submit(prompt(60), max_tokens=2)
    harness.step()
    harness.abort(follower)
    harness.step()
    assert (follower.finish, harness.scheduler.stats().waiting) == ("abort", 0)
    harness.run()


def test_short_shared_prefixes_are_not_worth_a_wait():
    harness = Harness(engine_info(num_pages=400, token_budget=256))
    for i in range(4):
        harness.submit([*prompt(20), 500 + i], max_tokens=1)
    harness.step()
    assert harness.engine.batches[0].size == 4
    harness.run()
