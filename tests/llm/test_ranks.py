"""The other ranks of an LLM: their start, their death, their end; and Ctrl-C at any moment of these."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from minisgl import LLM, SamplingParams
from minisgl.llm.ranks import FollowerRanks, interrupts_held_back
from minisgl.server.args import ServerArgs
from minisgl.server.process import Reporter
from minisgl.server.scheduler_process import RankConfig

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


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
