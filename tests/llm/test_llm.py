"""The offline class on a tiny random checkpoint with a tokenizer, and on the default model."""

from __future__ import annotations

import gc
import itertools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from minisgl import LLM, SamplingParams
from minisgl.core import ParameterError
from minisgl.llm.llm import RequestError

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def test_one_prompt_gives_one_completion(llm: LLM) -> None:
    result = llm.generate("hello", GREEDY)
    assert result.finish_reason == "length"
    assert result.completion_tokens == len(result.token_ids) == 12
    assert result.prompt_tokens == 5


def test_many_prompts_come_back_in_order_and_equal_to_each_alone(llm: LLM) -> None:
    prompts = [f"prompt {i} " + "x" * (i * 7 % 11) for i in range(20)]  # more than there are rows
    params = [SamplingParams(temperature=0, max_tokens=3 + i % 9, ignore_eos=True) for i in range(20)]
    together = llm.generate(prompts, params, progress=False)
    alone = [llm.generate(p, s) for p, s in zip(prompts, params, strict=True)]
    assert [r.token_ids for r in together] == [r.token_ids for r in alone]
    assert [r.completion_tokens for r in together] == [s.max_tokens for s in params]


def test_ids_and_text_are_the_same_prompt(llm: LLM) -> None:
    ids = llm._tokenizer.encode("same")
    assert llm.generate(ids, GREEDY).token_ids == llm.generate("same", GREEDY).token_ids
    assert llm.generate([ids, ids[:2]], GREEDY, progress=False)[0].token_ids == llm.generate("same", GREEDY).token_ids


def test_chat_applies_the_template(llm: LLM) -> None:
    chat = llm.chat([{"role": "user", "content": "hi"}], GREEDY)
    assert chat.token_ids == llm.generate("<user>hi<assistant>", GREEDY).token_ids
    several = llm.chat(
        [[{"role": "user", "content": "hi"}], [{"role": "user", "content": "yo"}]], GREEDY, progress=False
    )
    assert several[0].token_ids == chat.token_ids


def test_seeded_sampling_repeats_whatever_runs_beside(llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, seed=7, max_tokens=12, ignore_eos=True)
    alone = llm.generate("seeded", params)
    crowd = llm.generate(["seeded", *(f"other {i}" for i in range(9))], params, progress=False)
    assert crowd[0].token_ids == alone.token_ids
    other = SamplingParams(temperature=1.0, seed=8, max_tokens=12, ignore_eos=True)
    assert llm.generate("seeded", other).token_ids != alone.token_ids


def test_a_repeated_prompt_is_found_in_the_cache(llm: LLM) -> None:
    prompt = "a prompt that is long enough to fill a few pages"
    first, second = llm.generate(prompt, GREEDY), llm.generate(prompt, GREEDY)
    assert second.cached_tokens >= len(prompt) - 4
    assert first.token_ids == second.token_ids


def test_stop_string_ends_the_answer_and_leaves_nothing_running(llm: LLM) -> None:
    full = llm.generate("stop here", GREEDY).text
    stop = full[4:6]
    for given in ((stop,), [stop], stop):
        params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, stop=given)  # type: ignore[arg-type]
        result = llm.generate("stop here", params)
        assert result.finish_reason == "stop"
        assert result.text == full[: full.index(stop)]
    assert llm._scheduler.idle


def test_a_bad_prompt_says_why_and_the_next_call_works(llm: LLM) -> None:
    with pytest.raises(RequestError, match="128 tokens"):
        llm.generate(["fine", "x" * 500], GREEDY, progress=False)
    with pytest.raises(RequestError, match="empty"):
        llm.generate("", GREEDY)
    with pytest.raises(RequestError, match="vocabulary"):
        llm.generate([5, 10_000], GREEDY)
    with pytest.raises(ParameterError, match="top_p"):
        llm.generate("x", SamplingParams(top_p=0))
    for name, value in {"stop": 5, "max_tokens": 1.5, "seed": 0.5, "temperature": "0"}.items():
        with pytest.raises(ParameterError, match=f"{name}: Expected") as error:
            llm.generate("x", SamplingParams(**{name: value}))
        assert error.value.field == name
    with pytest.raises(ValueError, match="2 prompts but 1"):
        llm.generate(["a", "b"], [GREEDY])
    assert llm._scheduler.idle
    assert llm.generate("fine", GREEDY).completion_tokens == 12


@pytest.mark.parametrize("prompt", [5, None, [1, "a"], [True], [None], {"a": 1}])
def test_what_is_no_prompt_is_a_type_error(llm: LLM, prompt: Any) -> None:
    with pytest.raises(TypeError, match="A prompt must be a string or a list of token ids, not"):
        llm.generate(prompt)


@pytest.mark.parametrize("messages", ["hello", {"role": "user"}, [{}], [[{"role": 1}]], None, [["x"]]])
def test_what_is_no_conversation_is_a_type_error(llm: LLM, messages: Any) -> None:
    with pytest.raises(TypeError, match="A conversation must be a list of dicts, each with a "):
        llm.chat(messages)
    with pytest.raises(TypeError, match="A conversation must be"):
        next(llm.stream_chat(messages))


def test_numbers_of_numpy(llm: LLM) -> None:
    expected = llm.generate([5, 6, 7], GREEDY).token_ids
    params = SamplingParams(temperature=np.float32(0), max_tokens=np.int64(12), ignore_eos=True)  # type: ignore[arg-type]
    assert llm.generate([np.int64(5), 6, 7], params).token_ids == expected  # type: ignore[list-item]


@pytest.mark.parametrize("token", [-1, 2**31])
def test_a_number_that_can_be_no_token(llm: LLM, token: int) -> None:
    with pytest.raises(RequestError, match="Token ids must be"):
        llm.generate([5, token], GREEDY)


def test_parameters_that_are_none(llm: LLM) -> None:
    with pytest.raises(TypeError, match=r"must be SamplingParams, not \{'max_tokens': 2\}"):
        llm.generate("a", {"max_tokens": 2})  # type: ignore[call-overload]


def test_an_unknown_option_is_a_type_error(model: Path) -> None:
    with pytest.raises(TypeError, match="pagesize"):
        LLM(str(model), pagesize=4)


@pytest.mark.parametrize("value", ["two", 0, 2.5])
def test_an_option_that_the_command_line_would_refuse_is_a_value_error(model: Path, value: object) -> None:
    with pytest.raises(ValueError, match=f"^tp must be an integer from 1 to 64, not '{value}'"):
        LLM(str(model), tp=value)


def test_stream_chat_can_be_left_early(llm: LLM) -> None:
    stream = llm.stream_chat([{"role": "user", "content": "hi"}], GREEDY)
    first = next(stream)
    stream.close()
    assert first.completion_tokens >= 1
    assert llm._scheduler.idle
    whole = "".join(r.text for r in llm.stream_chat([{"role": "user", "content": "hi"}], GREEDY))
    assert whole == llm.chat([{"role": "user", "content": "hi"}], GREEDY).text


def test_several_generators_at_once(llm: LLM) -> None:
    """Each gets its own replies, and closing one ends nobody else's."""
    questions = [[{"role": "user", "content": text}] for text in ("hi", "yo", "hey")]
    expected = [llm.chat(question, GREEDY).text for question in questions]
    first, second, third = (llm.stream_chat(question, GREEDY) for question in questions)
    texts = [next(first).text, next(second).text]
    next(third)
    third.close()
    assert llm.generate("same", GREEDY).completion_tokens == 12
    for replies in itertools.zip_longest(first, second):
        texts = [text + (reply.text if reply else "") for text, reply in zip(texts, replies, strict=True)]
    assert texts == expected[:2]
    assert llm._scheduler.idle
    assert not llm._arrived


def test_a_generator_that_outlives_its_llm_says_so(model: Path) -> None:
    llm = LLM(str(model), num_pages=64)
    stream = llm.stream_chat([{"role": "user", "content": "hi"}], GREEDY)
    next(stream)
    llm.close()
    with pytest.raises(RuntimeError, match="has been closed"):
        list(stream)


def test_closing_frees_and_a_second_one_can_be_made(model: Path) -> None:
    process = psutil.Process()
    ids = []
    for _ in range(2):
        llm = LLM(str(model), num_pages=64)
        ids.append(llm.generate("again", GREEDY).token_ids)
        threads = process.num_threads()
        llm.close()
        llm.close()
        gc.collect()
        assert process.num_threads() < threads
        with pytest.raises(RuntimeError, match="has been closed"):
            llm.generate("again", GREEDY)
    assert ids[0] == ids[1]


def test_importing_the_package_loads_no_torch() -> None:
    code = "import sys, minisgl; minisgl.SamplingParams; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ, timeout=30)
