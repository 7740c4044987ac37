"""Everything behind the API server, played by a thread: takes the requests off the wire and answers by script."""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import zmq

from minisgl.addresses import Addresses
from minisgl.message import (
    AbortMsg,
    ChatPrompt,
    ErrorInfo,
    IdsPrompt,
    Pull,
    Push,
    ReplyBatch,
    TextPrompt,
    TokenizeMsg,
    TokenizerMsg,
    UserReply,
    WorkerDied,
    pack_ids,
    unpack_ids,
)

Script = Callable[[TokenizeMsg], Iterable[UserReply]]
WAIT = 10.0


def say(
    *texts: str, finish: str | None = "stop", prompt_tokens: int = 7, cached_tokens: int = 4
) -> Callable[[TokenizeMsg], list[UserReply]]:
    """A script that answers with ``texts``, one token each; without ``finish`` the rest never comes."""

    def script(message: TokenizeMsg) -> list[UserReply]:
        return [
            UserReply(
                uid=message.uid,
                text=text,
                ids=pack_ids([i]),
                prompt_tokens=prompt_tokens,
                cached_tokens=cached_tokens,
                completion_tokens=i + 1,
                finish=finish if i + 1 == len(texts) else None,
            )
            for i, text in enumerate(texts)
        ]

    return script


def fail(message: str, **info: Any) -> Script:
    """A script that answers with an error."""
    return lambda request: [UserReply(uid=request.uid, finish="error", error=ErrorInfo(message=message, **info))]


def prompt_of(message: TokenizeMsg) -> Any:
    match message.prompt:
        case TextPrompt(text=text):
            return text
        case IdsPrompt(ids=ids):
            return unpack_ids(ids).tolist()
        case ChatPrompt(messages=messages):
            return messages


class FakeBackend:
    """``script`` says what a request gets; ``pause`` seconds lie between two replies."""

    def __init__(self, frontends: int = 1) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="fake-")
        self.addresses = Addresses(self._directory.name, frontends=frontends)
        self.script: Script = say("Hello", " world")
        self.pause = 0.0
        self.requests: list[TokenizeMsg] = []
        self.aborted: list[int] = []
        self._context: zmq.Context[Any] = zmq.Context()
        self._pull: Pull[TokenizerMsg] = Pull(self._context, self.addresses.tokenizer(0), TokenizerMsg)
        self._push = [Push(self._context, self.addresses.frontend(i)) for i in range(frontends)]
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._stopping = False
        self._thread.start()

    def reset(self) -> None:
        self.script, self.pause = say("Hello", " world"), 0.0
        self.requests.clear()
        self.aborted.clear()

    def wait(self, condition: Callable[[], bool]) -> None:
        """Until a message makes ``condition`` true."""
        with self._changed:
            assert self._changed.wait_for(condition, WAIT), "it never happened"

    def kill(self, name: str, exitcode: int = -9) -> None:
        """What the launcher does when a worker has died."""
        for push in self._push:
            push.send(WorkerDied(name=name, exitcode=exitcode))

    def close(self) -> None:
        self._stopping = True
        self._thread.join()
        self._pull.close()
        for push in self._push:
            push.close()
        self._context.term()
        self._directory.cleanup()

    def _run(self) -> None:
        while not self._stopping:
            if not self._pull.socket.poll(20):
                continue
            for message in self._pull.drain():
                with self._changed:
                    if isinstance(message, AbortMsg):
                        self.aborted.append(message.uid)
                    else:
                        self.requests.append(message)
                    self._changed.notify_all()
                if isinstance(message, TokenizeMsg):
                    self._answer(message)

    def _answer(self, message: TokenizeMsg) -> None:
        push = self._push[message.uid % len(self._push)]
        for reply in self.script(message):
            push.send(ReplyBatch(items=[reply]))
            if self.pause:
                time.sleep(self.pause)
