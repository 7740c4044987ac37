"""The processes around the text, over real sockets."""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any

import pytest
import zmq
from tiny_tokenizers import SaveModel, byte_level

from minisgl.addresses import Addresses
from minisgl.core import SamplingParams
from minisgl.message import (
    AbortBackendMsg,
    AbortMsg,
    BackendMsg,
    DetokenizeBatch,
    DetokenizeMsg,
    ErrorInfo,
    FrontendMsg,
    IdsPrompt,
    Pull,
    Push,
    ReplyBatch,
    TextParams,
    TextPrompt,
    TokenizeMsg,
    UserMsg,
    UserReply,
    pack_ids,
    unpack_ids,
)
from minisgl.tokenizer import Tokenizer
from minisgl.tokenizer.loop import TextLoop
from minisgl.tokenizer.worker import run_detokenizer, run_tokenizer

WAIT_MS = 10_000


class Neighbours:
    """The API servers and the scheduler around the text processes."""

    def __init__(self, directory: str, frontends: int = 1, tokenizers: int = 0) -> None:
        self.addresses = Addresses(directory=directory, frontends=frontends, tokenizers=tokenizers)
        self.context: zmq.Context[Any] = zmq.Context()
        self.scheduler: Pull[Any] = Pull(self.context, self.addresses.scheduler, BackendMsg)
        self.frontends: list[Pull[Any]] = [
            Pull(self.context, self.addresses.frontend(i), FrontendMsg) for i in range(frontends)
        ]

        self.pushes: dict[str, Push] = {}

    def to(self, address: str) -> Push:
        if address not in self.pushes:
            self.pushes[address] = Push(self.context, address)
        return self.pushes[address]

    def request(self, message: TokenizeMsg | AbortMsg) -> None:
        self.to(self.addresses.tokenizer(self.addresses.tokenizer_of(message.uid))).send(message)

    def step(self, *items: DetokenizeMsg) -> None:
        self.to(self.addresses.detokenizer).send(DetokenizeBatch(items=list(items)))

    def get(self, pull: Pull[Any]) -> Any:
        assert pull.socket.poll(WAIT_MS), "nothing arrived"
        return pull.receive()

    def close(self) -> None:
        self.context.destroy(linger=0)


@pytest.fixture
def meet() -> Iterator[Callable[..., Neighbours]]:
    with ExitStack() as stack:

        def make(frontends: int = 1, tokenizers: int = 0) -> Neighbours:
            directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="mt-"))
            neighbours = Neighbours(directory, frontends, tokenizers)
            stack.callback(neighbours.close)
            return neighbours

        yield make


def text(uid: int, words: str) -> TokenizeMsg:
    return TokenizeMsg(uid=uid, prompt=TextPrompt(text=words), params=SamplingParams())


def turns(loop: TextLoop, done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_MS / 1000
    while not done():
        assert time.monotonic() < deadline
        loop.turn()


def test_requests_reach_the_scheduler_and_aborts_follow_them(
    meet: Callable[..., Neighbours], byte_tokenizer: Tokenizer
) -> None:
    others = meet()
    with TextLoop(byte_tokenizer, others.addresses, 0, True) as loop:
        others.request(text(3, "Hello"))
        turns(loop, lambda: bool(others.scheduler.socket.poll(1)))
        message = others.get(others.scheduler)
        assert isinstance(message, UserMsg)
        assert (message.uid, unpack_ids(message.input_ids).tolist()) == (3, byte_tokenizer.encode("Hello"))
        others.request(AbortMsg(uid=3))
        turns(loop, lambda: bool(others.scheduler.socket.poll(1)))
        assert others.get(others.scheduler) == AbortBackendMsg(uid=3)


def test_a_refused_prompt_is_answered_to_the_api_server_that_owns_it(
    meet: Callable[..., Neighbours], byte_tokenizer: Tokenizer
) -> None:
    """There are several of them here."""
    others = meet(frontends=3)
    with TextLoop(byte_tokenizer, others.addresses, 0, True) as loop:
        others.request(TokenizeMsg(uid=5, prompt=IdsPrompt(ids=b""), params=SamplingParams()))
        turns(loop, lambda: bool(others.frontends[2].socket.poll(1)))
        (reply,) = others.get(others.frontends[2]).items
        assert (reply.uid, reply.finish, reply.error.status) == (5, "error", 400)
        assert not others.scheduler.socket.poll(0)


def test_a_step_makes_one_message_for_each_api_server_concerned(
    meet: Callable[..., Neighbours], byte_tokenizer: Tokenizer
) -> None:
    others = meet(frontends=3)
    ids = {letter: pack_ids(byte_tokenizer.encode(letter)) for letter in "abc"}
    with TextLoop(byte_tokenizer, others.addresses, 0, True) as loop:
        others.step(
            DetokenizeMsg(uid=0, ids=ids["a"], text=TextParams()),
            DetokenizeMsg(uid=1, ids=ids["b"], text=TextParams()),
            DetokenizeMsg(uid=3, ids=ids["c"], text=TextParams()),
        )
        turns(loop, lambda: bool(others.frontends[1].socket.poll(1)))
        assert [(r.uid, r.text) for r in others.get(others.frontends[0]).items] == [(0, "a"), (3, "c")]
        assert [(r.uid, r.text) for r in others.get(others.frontends[1]).items] == [(1, "b")]
        assert not others.frontends[2].socket.poll(0)


def test_a_stop_string_aborts_the_request_at_the_scheduler(
    meet: Callable[..., Neighbours], byte_tokenizer: Tokenizer
) -> None:
    others = meet()
    with TextLoop(byte_tokenizer, others.addresses, 0, True) as loop:
        ids = pack_ids(byte_tokenizer.encode("a"))
        others.step(DetokenizeMsg(uid=9, ids=ids, completion_tokens=1, text=TextParams(stop=("a",))))
        turns(loop, lambda: bool(others.scheduler.socket.poll(1)))
        assert others.get(others.scheduler) == AbortBackendMsg(uid=9)
        (reply,) = others.get(others.frontends[0]).items
        assert (reply.text, reply.finish) == ("", "stop")


def test_running_streams_are_answered_between_two_requests(
    meet: Callable[..., Neighbours], byte_tokenizer: Tokenizer
) -> None:
    others = meet()
    with TextLoop(byte_tokenizer, others.addresses, 0, True) as loop:
        for uid in range(1, 6):
            others.request(text(uid, "Hello"))
        others.step(DetokenizeMsg(uid=0, ids=pack_ids(byte_tokenizer.encode("a")), text=TextParams()))
        for pull in (*loop._requests, *loop._steps):
            assert pull.socket.poll(WAIT_MS)
        loop.turn()
        assert [reply.text for reply in others.get(others.frontends[0]).items] == ["a"]
        assert others.get(others.scheduler).uid == 1
        assert not others.scheduler.socket.poll(20)  # the second request waits for the next turn


def test_frames_that_cannot_be_read_are_dropped(
    meet: Callable[..., Neighbours], byte_tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    others = meet()
    with TextLoop(byte_tokenizer, others.addresses, 0, True) as loop:
        for address in (others.addresses.tokenizer(0), others.addresses.detokenizer):
            push = others.to(address)
            for frame in (b"", b"\xc1garbage", b"\x91\xa1x"):
                push._socket.send(frame)
            push.send(UserReply(uid=1))  # well-formed, but nothing that is sent here
        # Behind them on the same sockets, so they have been read when these are answered.
        others.request(text(3, "Hello"))
        others.step(DetokenizeMsg(uid=3, finish="error", error=ErrorInfo(message="x"), text=TextParams()))
        turns(loop, lambda: bool(others.scheduler.socket.poll(1) and others.frontends[0].socket.poll(1)))
        assert others.get(others.scheduler).uid == 3
    assert sum("cannot be read" in record.message for record in caplog.records) == 8


class _Reporter:
    """A launcher that is satisfied with anything; what it hears goes into a queue."""

    def __init__(self, reports: Any, facts: Mapping[str, Any]) -> None:
        self.reports = reports
        self.facts = facts

    def progress(self, what: str, fraction: float | None = None) -> None:
        self.reports.put(("progress", what))

    def ready(self, summary: str = "", **facts: Any) -> None:
        self.reports.put(("ready", facts))

    def wait_go(self) -> Mapping[str, Any]:
        return self.facts


@pytest.mark.process
@pytest.mark.parametrize("tokenizers", [0, 2])
def test_the_processes_do_their_work_and_end_at_sigterm(
    meet: Callable[..., Neighbours], save_model: SaveModel, tokenizers: int
) -> None:
    path = save_model(byte_level(), generation_config={"temperature": 0.5})
    others = meet(frontends=2, tokenizers=tokenizers)
    spawn = multiprocessing.get_context("spawn")
    reports = spawn.Queue()
    reporter = _Reporter(reports, {"max_seq_len": 64})
    processes = [spawn.Process(target=run_detokenizer, args=(path, others.addresses, reporter), daemon=True)]
    for index in range(tokenizers):
        args = (path, others.addresses, index, reporter)
        processes.append(spawn.Process(target=run_tokenizer, args=args, daemon=True))
    for process in processes:
        process.start()
    try:
        facts = _facts(reports, len(processes))
        assert {"sampling_defaults": {"temperature": 0.5}} in facts
        for uid in range(4):
            others.request(text(uid, f"Hello {uid}"))
        others.request(text(4, "a" * 100_000))
        users = [others.get(others.scheduler) for _ in range(4)]
        assert sorted(user.uid for user in users) == [0, 1, 2, 3]
        (refused,) = others.get(others.frontends[0]).items
        assert (refused.uid, refused.error.code) == (4, "context_length_exceeded")
        for user in users:
            others.step(DetokenizeMsg(uid=user.uid, ids=user.input_ids, finish="length", text=TextParams()))
        replies: list[UserReply] = []
        while len(replies) < 4:
            for frontend in others.frontends:
                if frontend.socket.poll(50):
                    batch = frontend.receive()
                    assert isinstance(batch, ReplyBatch)
                    replies += batch.items
        assert sorted((r.uid, r.text) for r in replies) == [(uid, f"Hello {uid}") for uid in range(4)]
    finally:
        for process in processes:
            process.terminate()
            process.join(10)
    assert [process.exitcode for process in processes] == [0] * len(processes)


def _facts(reports: Any, count: int) -> list[Mapping[str, Any]]:
    found = []
    while len(found) < count:
        kind, what = reports.get(timeout=60)
        if kind == "ready":
            found.append(what)
    return found
