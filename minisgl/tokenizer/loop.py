"""What a text process does all day.

    requests, aborts ───────> tokenizer ──┐                  ┌──> scheduler
                                          ├── this process ──┤
    what a step produced ─> detokenizer ──┘                  └──> frontend(uid % frontends)

Running streams go first: before each request is tokenized, all that the scheduler has sent is answered. So however many
requests arrive at once, they delay a stream by the tokenizing of one of them at most.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Self, TypeVar

import msgspec
import zmq

from minisgl.addresses import Addresses
from minisgl.message import (
    AbortBackendMsg,
    AbortMsg,
    DetokenizeBatch,
    Poller,
    Pull,
    Push,
    ReplyBatch,
    TokenizeMsg,
    TokenizerMsg,
    UserMsg,
    UserReply,
)

from .detokenize import Detokenizer
from .load import Tokenizer
from .tokenize import tokenize_request

logger = logging.getLogger(__name__)

T = TypeVar("T")


class TextLoop:
    """The sockets of one process: as tokenizer worker ``tokenizer`` (None: it is none), as the detokenizer, or both.

    ``max_seq_len`` is the length of the context in tokens; None until it is known.
    """

    def __init__(self, tokenizer: Tokenizer, addresses: Addresses, index: int | None, detokenizer: bool) -> None:
        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer(tokenizer)
        self.max_seq_len: int | None = None
        self._context: zmq.Context[Any] = zmq.Context()
        self._scheduler = Push(self._context, addresses.scheduler)
        self._frontends = [Push(self._context, addresses.frontend(i)) for i in range(addresses.frontends)]
        self._requests: list[Pull[TokenizeMsg | AbortMsg]] = []
        self._steps: list[Pull[DetokenizeBatch]] = []
        if index is not None:
            self._requests.append(Pull(self._context, addresses.tokenizer(index), TokenizerMsg))
        if detokenizer:
            self._steps.append(Pull(self._context, addresses.detokenizer, DetokenizeBatch))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._context.destroy(linger=0)

    def run(self) -> None:
        """Never returns."""
        poller = Poller([*self._requests, *self._steps])
        while True:
            poller.wait()
            self.turn()

    def turn(self) -> None:
        """Answers all that the scheduler has sent, then tokenizes one request. Never blocks."""
        for steps in self._steps:
            for batch in _arrived(steps):
                replies, aborts = self._detokenizer.process(batch)
                self._reply(replies)
                for abort in aborts:
                    self._scheduler.send(abort)
        for requests in self._requests:
            for message in _arrived(requests, limit=1):
                self._handle(message)

    def _handle(self, message: TokenizeMsg | AbortMsg) -> None:
        if isinstance(message, AbortMsg):
            self._scheduler.send(AbortBackendMsg(uid=message.uid))
            return
        result = tokenize_request(self._tokenizer, message, self.max_seq_len)
        if isinstance(result, UserMsg):
            self._scheduler.send(result)
        else:
            self._reply([result])

    def _reply(self, replies: list[UserReply]) -> None:
        """One message to each API server concerned."""
        count = len(self._frontends)
        for i, frontend in enumerate(self._frontends):
            mine = replies if count == 1 else [reply for reply in replies if reply.uid % count == i]
            if mine:
                frontend.send(ReplyBatch(items=mine))


def _arrived(pull: Pull[T], limit: int | None = None) -> Iterator[T]:
    """The messages that are there, ``limit`` at most. One that cannot be read is logged and left out."""
    taken = 0
    while limit is None or taken < limit:
        try:
            frame = pull.socket.recv(zmq.NOBLOCK)
        except zmq.Again:
            return
        taken += 1
        try:
            yield pull.decode(frame)
        except msgspec.MsgspecError as error:
            logger.error("Dropped a message of %d bytes that cannot be read: %s", len(frame), error)
