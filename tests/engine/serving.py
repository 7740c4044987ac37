"""A scheduler on a real engine, in this process, with the requests of a test."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from minisgl.core import Engine, SamplingParams
from minisgl.message import BackendMsg, DetokenizeMsg, UserMsg, pack_ids, unpack_ids
from minisgl.scheduler import Scheduler, SchedulerConfig
from minisgl.scheduler.stats import Stats


class ScriptedIO:
    """Delivers messages at given steps and collects what is sent."""

    def __init__(self, arrivals: Mapping[int, list[BackendMsg]]) -> None:
        self.arrivals = dict(arrivals)
        self.turn = 0
        self.sent: list[DetokenizeMsg] = []

    def receive(self, block: bool) -> list[BackendMsg]:
        messages = self.arrivals.pop(self.turn, [])
        self.turn += 1
        return messages

    def send(self, items: list[DetokenizeMsg]) -> None:
        self.sent += items


def user(uid: int, prompt: list[int], params: SamplingParams) -> UserMsg:
    return UserMsg(uid=uid, input_ids=pack_ids(prompt), params=params)


def serve(engine: Engine, arrivals: Mapping[int, list[BackendMsg]], **config: Any) -> dict[int, list[int]]:
    """Runs until all is done. Returns the tokens of each uid."""
    return serve_and_count(engine, arrivals, **config)[0]


def serve_and_count(
    engine: Engine, arrivals: Mapping[int, list[BackendMsg]], **config: Any
) -> tuple[dict[int, list[int]], Stats]:
    io = ScriptedIO(arrivals)
    scheduler = Scheduler(engine, io, SchedulerConfig(**config))
    while scheduler.step() or io.arrivals:
        pass
    scheduler.check()
    out: dict[int, list[int]] = {}
    for message in io.sent:
        assert message.error is None, message.error
        out.setdefault(message.uid, []).extend(unpack_ids(message.ids).tolist())
    return out, scheduler.stats()


def requests(count: int = 14) -> list[UserMsg]:
    """Prompts of all lengths, some with a common beginning, with every kind of sampling. Tokens are below 190."""
    generator = np.random.default_rng(21)
    shared = generator.integers(1, 190, 24).tolist()
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 0.7, "top_p": 0.9, "top_k": 40},
        {"temperature": 0.9, "min_p": 0.05, "frequency_penalty": 0.5, "repetition_penalty": 1.1},
        {"temperature": 0.0, "presence_penalty": 1.0},
    ]
    made = []
    for uid in range(count):
        prompt = generator.integers(1, 190, int(generator.integers(1, 60))).tolist()
        if uid % 3 == 0:
            prompt = shared[: int(generator.integers(5, 25))] + prompt[:20]
        params = SamplingParams(max_tokens=int(generator.integers(3, 24)), seed=uid, **kinds[uid % len(kinds)])
        made.append(user(uid, prompt, params))
    return made


def staggered(messages: Sequence[BackendMsg], every: int) -> dict[int, list[BackendMsg]]:
    """One message every so many steps; all at once if that is 0."""
    if every == 0:
        return {0: list(messages)}
    return {every * i: [message] for i, message in enumerate(messages)}
