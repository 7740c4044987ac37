"""The API server's side of the message queues: requests out, replies in, and who waits for which.

submit() ──TokenizeMsg──> tokenizer(uid)          one client request is one uid, or several (n, many prompts)
close()  ──AbortMsg─────> tokenizer(uid)          for each uid that has not finished: the client left, or one failed
arrived() <──ReplyBatch── frontend(i)             one reader for all requests; a reply wakes the request of its uid
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

import zmq

from minisgl.addresses import Addresses
from minisgl.core import SamplingParams
from minisgl.message import (
    AbortMsg,
    ErrorInfo,
    FrontendMsg,
    Prompt,
    Pull,
    Push,
    TokenizeMsg,
    UserReply,
    WorkerDied,
)

from .errors import ApiError, invalid, unavailable
from .process import exit_words


class ClientGone(Exception):
    """The client has closed its connection; nobody waits for the answer."""


class Pending:
    """One client request under way. Leaving the ``with`` block aborts whatever of it has not finished."""

    def __init__(self, manager: FrontendManager, uids: Sequence[int]) -> None:
        self.uids = uids
        self.unfinished = len(uids)
        self._manager = manager
        self._event = asyncio.Event()
        self._arrived: list[tuple[int, UserReply]] = []
        self._end: ApiError | ClientGone | None = None

    async def arrived(self) -> list[tuple[int, UserReply]]:
        """Waits for replies, and returns all that have come by now, each with the index of its prompt and choice.

        Raises :class:`ApiError` when one has failed (after the replies before it) and :class:`ClientGone`.
        """
        await self._event.wait()
        self._event.clear()
        if self._arrived and not isinstance(self._end, ClientGone):
            replies, self._arrived = self._arrived, []
            if self._end:
                self._event.set()
            return replies
        assert self._end is not None
        raise self._end

    def deliver(self, index: int, reply: UserReply) -> None:
        if reply.finish:
            self.unfinished -= 1
        if reply.finish == "error":
            self.fail(reply.error or ErrorInfo(message="The request failed."))
        elif reply.finish == "abort":
            self.fail(ErrorInfo(message="The request was aborted."))
        else:
            self._arrived.append((index, reply))
            self._event.set()

    def fail(self, error: ErrorInfo) -> None:
        """Ends the request with an error."""
        self._finish(ApiError(error))

    def leave(self) -> None:
        """The client has gone."""
        self._finish(ClientGone())

    def _finish(self, end: ApiError | ClientGone) -> None:
        self._end = self._end or end
        self._event.set()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._manager.forget(self)


class FrontendManager:
    """The queues of API server ``index``. Everything from ``attach`` on belongs to the event loop."""

    def __init__(self, addresses: Addresses, index: int) -> None:
        self._addresses = addresses
        self._next_uid = index
        self._context: zmq.Context[Any] = zmq.Context()
        self._pull: Pull[FrontendMsg] = Pull(self._context, addresses.frontend(index), FrontendMsg)
        self._tokenizers = [Push(self._context, addresses.tokenizer(j)) for j in range(max(addresses.tokenizers, 1))]
        self._waiting: dict[int, tuple[Pending, int]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self.unhealthy: ErrorInfo | None = None
        """Why no request can be served any more, if so."""

    def __len__(self) -> int:
        """How many uids have not finished."""
        return len(self._waiting)

    def attach(self) -> None:
        """Starts to read replies in the running loop."""
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._pull.socket.getsockopt(zmq.FD), self._read)
        self._read()

    def close(self) -> None:
        """Closes the sockets. Whoever still waits is failed first, by :meth:`shut`."""
        if self._loop is not None:
            self._loop.remove_reader(self._pull.socket.getsockopt(zmq.FD))
        self._pull.close()
        for push in self._tokenizers:
            push.close()
        self._context.term()

    def submit(self, requests: Sequence[tuple[Prompt, SamplingParams]]) -> Pending:
        """Sends requests on their way. Raises :class:`ApiError` when nothing can be served, or they cannot travel."""
        if self.unhealthy is not None:
            raise ApiError(self.unhealthy)
        step = self._addresses.frontends
        uids = range(self._next_uid, self._next_uid + step * len(requests), step)
        self._next_uid += step * len(requests)
        pending = Pending(self, uids)
        self._waiting.update((uid, (pending, index)) for index, uid in enumerate(uids))
        try:
            for uid, (prompt, params) in zip(uids, requests, strict=True):
                self._send(uid, TokenizeMsg(uid=uid, prompt=prompt, params=params))
        except (UnicodeEncodeError, OverflowError, RecursionError) as error:
            # JSON can hold lone surrogates and integers of any size, UTF-8 and msgpack cannot.
            self.forget(pending)
            raise invalid(f"The request cannot be encoded: {error}.") from None
        return pending

    def forget(self, pending: Pending) -> None:
        """Drops all state of a request; what of it has not finished is aborted."""
        for uid in pending.uids:
            if self._waiting.pop(uid, None) is not None:
                self._send(uid, AbortMsg(uid=uid))

    def shut(self, error: ErrorInfo) -> None:
        """Fails everything under way and whatever comes."""
        self.unhealthy = self.unhealthy or error
        for pending in {pending for pending, _ in self._waiting.values()}:
            pending.fail(error)

    def _send(self, uid: int, message: TokenizeMsg | AbortMsg) -> None:
        self._tokenizers[self._addresses.tokenizer_of(uid)].send(message)

    def _read(self) -> None:
        # ZeroMQ's descriptor signals edges: everything must be taken now, or the next edge never comes.
        for message in self._pull.drain():
            if isinstance(message, WorkerDied):
                how = exit_words(message.exitcode)
                self.shut(unavailable(f"The {message.name} process has died ({how}).", "worker_died"))
                continue
            for reply in message.items:
                if (entry := self._waiting.get(reply.uid)) is None:
                    continue  # aborted meanwhile
                if reply.finish:
                    del self._waiting[reply.uid]
                pending, index = entry
                pending.deliver(index, reply)
