import numpy as np
import pytest
from scheduler_harness import Harness, engine_info

from minisgl.core import SamplingParams
from minisgl.message import ErrorInfo
from minisgl.scheduler.intake import length_limit


def limit(prompt, max_tokens=None, **info):
    tokens = np.array(prompt if isinstance(prompt, list) else range(prompt), dtype=np.int32)
    return length_limit(tokens, SamplingParams(max_tokens=max_tokens), engine_info(**info))


def refusal(*args, **kwargs) -> ErrorInfo:
    error = limit(*args, **kwargs)
    assert isinstance(error, ErrorInfo)
    assert (error.status, error.type) == (400, "invalid_request_error")
    return error


def test_a_prompt_longer_than_the_context_names_both_numbers():
    error = refusal(200, max_seq_len=200)
    assert error.code == "context_length_exceeded"
    assert "prompt has 200 tokens" in error.message
    assert "context of this model is 200 tokens" in error.message
    assert limit(199, max_seq_len=200) == 200


def test_max_tokens_over_the_context_states_all_three_as_they_are():
    error = refusal(150, 51, max_seq_len=200)
    assert error.param == "max_tokens"
    for part in ("context of this model is 200 tokens", "prompt has 150", "max_tokens is 51", "201 in all"):
        assert part in error.message
    assert limit(150, 50, max_seq_len=200) == 200


# 3 pages of 4 tokens; the last token of an output is never stored.
@pytest.mark.parametrize(("prompt", "max_tokens", "fits"), [(12, 1, True), (12, 2, False), (9, 4, True), (9, 5, False)])
def test_what_the_kv_cache_can_hold_to_the_token(prompt, max_tokens, fits):
    outcome = limit(prompt, max_tokens, num_pages=3, page_size=4)
    assert (outcome == prompt + max_tokens) if fits else ("holds 12 tokens (3 pages of 4 tokens)" in outcome.message)


def test_without_max_tokens_the_kv_cache_is_the_limit_too():
    assert limit(5, num_pages=3, page_size=4) == 13
    assert "holds 12" in refusal(13, num_pages=3, page_size=4).message


def test_what_is_no_prompt():
    assert "empty" in refusal([]).message
    assert "Token id -1 is outside the vocabulary (0 to 999)" in refusal([5, -1]).message
    assert "Token id 1000 is outside" in refusal([1000, 5]).message
    assert limit([0, 999]) == 200


def test_each_is_refused_alone_and_at_once():
    harness = Harness(engine_info(num_pages=3, page_size=4, max_running_req=1))
    good = harness.submit([1, 2, 3], max_tokens=5)
    bad = [
        harness.submit(range(1, 14)),
        harness.submit(range(1, 13), max_tokens=2),
        harness.submit(range(1, 300)),
        harness.submit([]),
        harness.submit([4000]),
    ]
    after = harness.submit([3, 4], max_tokens=5)
    harness.step()
    assert [client.finish for client in bad] == ["error"] * 5
    harness.run()
    assert (good.finish, after.finish) == ("length", "length")


def test_the_whole_kv_cache_serves_one_request():
    harness = Harness(engine_info(num_pages=3, page_size=4))
    whole = harness.submit(range(1, 6), max_tokens=8)
    cut = harness.submit(range(1, 6))
    harness.run()
    assert (len(whole.ids), whole.finish) == (8, "length")
    assert (len(cut.ids), cut.finish) == (8, "length")


def test_the_queue_has_a_limit_beyond_the_free_rows():
    harness = Harness(engine_info(max_running_req=2), max_queue=1)
    first = [harness.submit([i + 1, 2], max_tokens=3) for i in range(4)]
    harness.step()
    assert [client.finish for client in first] == [None, None, None, "error"]
    error = first[3].last.error
    assert error is not None
    assert (error.status, error.code) == (503, "queue_full")
    assert "1 requests are waiting" not in error.message  # three were, when it came
    late = harness.submit([9, 9], max_tokens=3)
    harness.step()
    assert late.error is not None
    harness.run()
    fine = harness.submit([9, 9], max_tokens=3)
    harness.run()
    assert fine.finish == "length"
