"""A scheduler on a real engine, in this process, with the requests of a test."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from minisgl.core import Engine, SamplingParams
from minisgl.message import BackendMsg, DetokenizeMsg, UserMsg, pack_ids, unpack_ids
from minisgl.scheduler import Scheduler, SchedulerConfig


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
    io = ScriptedIO(arrivals)
    scheduler = Scheduler(engine, io, SchedulerConfig(**config))
    while scheduler.step() or io.arrivals:
        pass
    scheduler.check()
    out: dict[int, list[int]] = {}
    for message in io.sent:
        assert message.error is None, message.error
        out.setdefault(message.uid, []).extend(unpack_ids(message.ids).tolist())
    return out
