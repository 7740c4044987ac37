"""The offline class on a tiny random checkpoint with a tokenizer, and on the default model."""

from __future__ import annotations

import asyncio
import gc
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from tiny_models import make_reference

from minisgl import LLM, SamplingParams
from minisgl.core import ParameterError
from minisgl.llm.llm import RequestError
from minisgl.llm.ranks import FollowerRanks, interrupts_held_back
from minisgl.server.args import ServerArgs
from minisgl.server.process import Reporter
from minisgl.server.scheduler_process import RankConfig

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory as a user would have it: config, weights, tokenizer, chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    path = tmp_path_factory.mktemp("llm") / "tiny"
    make_reference("llama").save_pretrained(path)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    printable = [c for c in alphabet if c.isascii()] + ["Ġ", "Ċ"]
    vocab = {token: i + 3 for i, token in enumerate(printable)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "chat_template.jinja").write_text(TEMPLATE)
    return path


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    with LLM(str(model), page_size=4, num_pages=200, max_running_req=8) as llm:
        yield llm


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


@pytest.mark.process
def test_two_ranks_give_the_output_of_one(model: Path, llm: LLM) -> None:
    prompts = ["first prompt", "second", "and the third one"]
    expected = [r.token_ids for r in llm.generate(prompts, GREEDY, progress=False)]
    with LLM(str(model), tp=2, page_size=4, num_pages=64) as two:
        assert [r.token_ids for r in two.generate(prompts, GREEDY, progress=False)] == expected
        with pytest.raises(RuntimeError, match="only one LLM with tp above 1"):
            LLM(str(model), tp=2, page_size=4, num_pages=64)
        stream = two.stream_chat([{"role": "user", "content": "hi"}], GREEDY)
        next(stream)
        children = psutil.Process().children()
        assert children
    with pytest.raises(RuntimeError, match="has been closed"):
        list(stream)
    deadline = time.monotonic() + 5
    while (
        any(c.is_running() and "spawn_main" in " ".join(c.cmdline()) for c in children) and time.monotonic() < deadline
    ):
        time.sleep(0.05)
    assert not [c for c in children if c.is_running() and "spawn_main" in " ".join(c.cmdline())]


@pytest.mark.process
def test_the_death_of_a_rank_is_an_error_at_once_and_from_then_on(model: Path) -> None:
    with LLM(str(model), tp=2, page_size=4, num_pages=64, max_running_req=8) as two:
        child = next(c for c in psutil.Process().children() if "spawn_main" in " ".join(c.cmdline()))
        stream = two.stream_chat([{"role": "user", "content": "hi"}], SamplingParams(max_tokens=100, ignore_eos=True))
        next(stream)
        child.kill()
        begin = time.monotonic()
        with pytest.raises(RuntimeError, match=r"Rank 1 died \(killed by SIGKILL\)\. .*make a new one"):
            list(stream)
        with pytest.raises(RuntimeError, match="Rank 1 died"):
            two.generate("again", GREEDY)
        assert time.monotonic() - begin < 5
    with LLM(str(model), tp=2, page_size=4, num_pages=64) as two:
        assert two.generate("again", GREEDY).completion_tokens == 12


@pytest.mark.process
@pytest.mark.parametrize("seconds", [0.0, 0.5])
def test_the_death_of_a_rank_during_the_start_is_an_error(model: Path, seconds: float) -> None:
    """Before the ranks have met, and (most often) while they load."""

    def kill() -> None:
        while not (found := [c for c in psutil.Process().children() if "spawn_main" in " ".join(c.cmdline())]):
            time.sleep(0.01)
        time.sleep(seconds)
        found[0].kill()

    killer = threading.Thread(target=kill)
    killer.start()
    begin = time.monotonic()
    with pytest.raises(RuntimeError, match=r"Rank 1 died \(killed by SIGKILL\)"):
        LLM(str(model), tp=2, page_size=4, num_pages=64, max_running_req=8)
    killer.join()
    assert time.monotonic() - begin < 20


@pytest.mark.parametrize("error", [None, ValueError("torn")], ids=["", "error"])
def test_ctrl_c_is_heard_at_the_end_of_a_step(error: Exception | None) -> None:
    """A rank that leaves a step halfway has sent messages to the others and does not launch what they launch."""
    done = []

    def step() -> None:
        with interrupts_held_back():
            signal.raise_signal(signal.SIGINT)
            time.sleep(0.01)
            done.append(True)
            if error is not None:
                raise error

    with pytest.raises(KeyboardInterrupt):
        step()
    assert done
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_goes_to_whoever_handles_it() -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: heard.append(number))
    try:
        with interrupts_held_back() as hear:
            signal.raise_signal(signal.SIGINT)
            hear()  # which only knows what the usual handler does
            assert not heard
        assert heard == [signal.SIGINT]
    finally:
        signal.signal(signal.SIGINT, before)


def ranks_alive() -> list[psutil.Process]:
    return [c for c in psutil.Process().children() if "spawn_main" in " ".join(c.cmdline())]


@pytest.mark.process
@pytest.mark.parametrize(("what", "not_reached"), [("loading torch", "loading weights"), ("loading weights", "making")])
def test_ctrl_c_during_the_start_leaves_nothing_behind(model: Path, what: str, not_reached: str) -> None:
    """Ranks that have met are a group, of which a process can have one."""
    reached: list[str] = []

    def interrupt(now: str, fraction: float | None) -> None:
        reached.append(now)
        if now.startswith(what):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.05)  # for the main thread to hear it

    with pytest.raises(KeyboardInterrupt):
        LLM(str(model), tp=2, page_size=4, num_pages=64, max_running_req=8, progress=interrupt)
    assert not any(now.startswith(not_reached) for now in reached)
    assert not ranks_alive()
    with LLM(str(model), tp=2, page_size=4, num_pages=64, max_running_req=8) as two:
        assert two.generate("again", GREEDY).completion_tokens == 12


@pytest.mark.process
def test_ctrl_c_during_the_end_leaves_nothing_behind(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    close = FollowerRanks.close

    def interrupted(ranks: FollowerRanks) -> None:
        signal.raise_signal(signal.SIGINT)
        close(ranks)

    monkeypatch.setattr(FollowerRanks, "close", interrupted)
    two = LLM(str(model), tp=2, page_size=4, num_pages=64, max_running_req=8)
    with pytest.raises(KeyboardInterrupt):
        two.close()
    assert not ranks_alive()
    assert not torch.distributed.is_initialized()


def small(model: Path) -> LLM:
    return LLM(str(model), tp=2, page_size=4, num_pages=64, max_running_req=8)


@pytest.mark.process
def test_ctrl_c_at_the_last_moment_of_a_start(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is nothing yet that the caller could close."""

    def interrupted(path: Path) -> dict[str, Any]:
        signal.raise_signal(signal.SIGINT)
        return {}

    monkeypatch.setattr("minisgl.llm.llm.generation_defaults", interrupted)
    with pytest.raises(KeyboardInterrupt):
        small(model)
    assert not ranks_alive()
    assert not torch.distributed.is_initialized()


@pytest.mark.process
def test_ctrl_c_twice_ends_the_wait_for_a_rank_that_stands_still(model: Path) -> None:
    with small(model) as two:
        ranks_alive()[0].suspend()
        for seconds in (0.5, 1.0):
            threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT)).start()
        begin = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            two.generate("again", GREEDY)
        assert time.monotonic() - begin < 10
        with pytest.raises(RuntimeError, match="Rank 1 died"):
            two.generate("again", GREEDY)


@pytest.mark.process
def test_ranks_outlive_the_thread_that_made_them(model: Path) -> None:
    with ThreadPoolExecutor(1) as pool:
        two = pool.submit(small, model).result()
    with two:
        assert two.generate("again", GREEDY).completion_tokens == 12


def test_too_many_ranks_are_refused_before_any_starts(model: Path) -> None:
    begin = time.monotonic()
    with pytest.raises(ValueError, match="cannot be cut for 64 ranks"):
        LLM(str(model), tp=64)
    assert time.monotonic() - begin < 1


@pytest.mark.process
def test_what_nobody_closes_closes_itself(model: Path) -> None:
    two = small(model)
    assert ranks_alive()
    del two
    gc.collect()
    assert not ranks_alive()
    with small(model) as again:
        assert again.generate("again", GREEDY).completion_tokens == 12


def test_asyncio_hears_of_a_ctrl_c_once() -> None:
    heard: list[bool] = []

    async def main() -> None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, heard.append, True)
        with interrupts_held_back():
            signal.raise_signal(signal.SIGINT)
        await asyncio.sleep(0.05)

    asyncio.run(main())
    assert heard == [True]


SLOW_RANK = """
import os, signal, sys, threading, time
if __name__ == "__main__":
    from minisgl import LLM
    def interrupt(what, fraction):
        if what == "loading torch":
            threading.Timer(0.5, os.killpg, (0, signal.SIGINT)).start()
    begin = time.monotonic()
    try:
        LLM(sys.argv[1], tp=2, page_size=4, num_pages=64, max_running_req=8, progress=interrupt)
    except KeyboardInterrupt:
        print("interrupted after", time.monotonic() - begin)
else:
    time.sleep(20)
"""


@pytest.mark.process
def test_the_ctrl_c_of_a_terminal_is_heard_while_a_rank_starts(model: Path, tmp_path: Path) -> None:
    """It reaches every process of the group. Those that are about to become ranks must not die of it."""
    script = tmp_path / "slow_rank.py"
    script.write_text(SLOW_RANK)
    command = [sys.executable, str(script), str(model)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, start_new_session=True)
    assert done.stderr == ""
    assert done.stdout.startswith("interrupted after ")
    assert float(done.stdout.split()[-1]) < 15


@pytest.mark.process
def test_ranks_of_which_one_cannot_be_started_leave_none(monkeypatch: pytest.MonkeyPatch) -> None:
    start = SpawnProcess.start
    started: list[SpawnProcess] = []

    def second_fails(process: SpawnProcess) -> None:
        if started:
            raise OSError("no more processes")
        start(process)
        started.append(process)

    monkeypatch.setattr(SpawnProcess, "start", second_fails)
    with pytest.raises(OSError, match="no more processes"):
        FollowerRanks(ServerArgs(model="none", tp=3), Path("none"), seed=0)
    assert not started[0].is_alive()


def talkative_rank(config: RankConfig, reporter: Reporter) -> None:
    for i in range(5000):
        reporter.progress("loading weights", i / 5000)
    reporter.ready()
    reporter.wait_go()


def rank_that_cannot_start(config: RankConfig, reporter: Reporter) -> None:
    raise ValueError("There is no room.")


@pytest.mark.process
def test_reports_of_a_rank_never_fill_its_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has to load while this process loads, and takes no reports: with some 280 of them it stood still."""
    monkeypatch.setattr("minisgl.llm.ranks.run_rank", talkative_rank)
    ranks = FollowerRanks(ServerArgs(model="none", tp=2), Path("none"), seed=0)
    try:
        ranks.wait_ready()
    finally:
        ranks.close()


@pytest.mark.process
def test_a_rank_that_cannot_start_says_why_to_whoever_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minisgl.llm.ranks.run_rank", rank_that_cannot_start)
    ranks = FollowerRanks(ServerArgs(model="none", tp=2), Path("none"), seed=0)
    acted = threading.Event()
    ranks.on_loss(acted.set)
    try:
        with pytest.raises(RuntimeError, match="Rank 1: There is no room"):
            ranks.wait_ready()
        assert acted.wait(1)
        late = threading.Event()
        ranks.on_loss(late.set)
        assert late.is_set()
    finally:
        ranks.close()


def test_importing_the_package_loads_no_torch() -> None:
    code = "import sys, minisgl; minisgl.SamplingParams; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ, timeout=30)
