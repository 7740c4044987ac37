"""Where the scheduler's messages come from and go to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import zmq

from minisgl.message import BackendMsg, DetokenizeBatch, DetokenizeMsg, Poller, Pull, Push


class SchedulerIO(Protocol):
    """The two ends of the scheduler."""

    def receive(self, block: bool) -> list[BackendMsg]:
        """What has arrived, in order. ``block``: wait for something first (an empty answer is allowed all the same)."""
        ...

    def send(self, items: list[DetokenizeMsg]) -> None:
        """Hands on all that one step produced, at least one item."""
        ...


class ZmqIO:
    """Rank 0 of a server.

        tokenizers --BackendMsg--> ZmqIO --DetokenizeBatch--> detokenizer
                                     |
                                     +--list[BackendMsg], one per step--> FollowerIO of every other rank

    All ranks take the same decisions because they see the same messages in the same steps; so the list of every step is
    forwarded, an empty one too.
    """

    def __init__(
        self, context: zmq.Context[Any], address: str, detokenizer: str, followers: Sequence[str] = ()
    ) -> None:
        self._pull: Pull[BackendMsg] = Pull(context, address, BackendMsg)
        self._poller = Poller([self._pull])
        self._detokenizer = Push(context, detokenizer)
        self._followers = [Push(context, follower) for follower in followers]

    def receive(self, block: bool) -> list[BackendMsg]:
        if block:
            self._poller.wait()
        messages = self._pull.drain()
        for follower in self._followers:
            follower.send(messages)
        return messages

    def send(self, items: list[DetokenizeMsg]) -> None:
        self._detokenizer.send(DetokenizeBatch(items=items))

    def close(self) -> None:
        _close(self._pull, self._detokenizer, *self._followers)


class FollowerIO:
    """Any other rank: sees what rank 0 saw, step by step, and says nothing."""

    def __init__(self, context: zmq.Context[Any], address: str) -> None:
        self._pull: Pull[list[BackendMsg]] = Pull(context, address, list[BackendMsg])

    def receive(self, block: bool) -> list[BackendMsg]:
        """Always blocks: the step begins when rank 0 has begun it."""
        return self._pull.receive()

    def send(self, items: list[DetokenizeMsg]) -> None:
        pass

    def close(self) -> None:
        _close(self._pull)


def _close(*sockets: Push | Pull[Any]) -> None:
    for socket in sockets:
        socket.close()
