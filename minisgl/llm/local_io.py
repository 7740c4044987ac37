"""The scheduler's two ends in this process: requests from a list, results through the detokenizer to a list."""

from __future__ import annotations

from collections.abc import Sequence

from minisgl.message import BackendMsg, DetokenizeBatch, DetokenizeMsg, Push, UserReply
from minisgl.tokenizer import Detokenizer


class LocalIO:
    """Rank 0 without a server. ``followers`` are the other ranks; each gets the messages of every step."""

    def __init__(self, detokenizer: Detokenizer, followers: Sequence[Push] = ()) -> None:
        self._detokenizer = detokenizer
        self._followers = followers
        self._inbox: list[BackendMsg] = []
        self._replies: list[UserReply] = []

    def submit(self, message: BackendMsg) -> None:
        self._inbox.append(message)

    def take_replies(self) -> list[UserReply]:
        """What has come since the last call, in order."""
        replies, self._replies = self._replies, []
        return replies

    def receive(self, block: bool) -> list[BackendMsg]:
        """Never blocks, even where it may: whoever drives the steps is also the one who submits."""
        messages, self._inbox = self._inbox, []
        for follower in self._followers:
            follower.send(messages)
        return messages

    def send(self, items: list[DetokenizeMsg]) -> None:
        replies, stopped = self._detokenizer.process(DetokenizeBatch(items=items))
        self._replies += replies
        self._inbox += stopped
