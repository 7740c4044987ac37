"""One client request from submission to its last byte, streamed or whole, on bare ASGI.

Bare, because three things must hold that no ready-made response gives: the first reply is awaited before the head is
sent, so that an error has its HTTP status even on a stream; the connection is watched all the time, so that a client
who leaves is an abort at once, whatever the request is waiting for; and what has arrived by one wake-up leaves in one
write.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from minisgl.message import ErrorInfo, UserReply

from .errors import ApiError, error_json
from .formats import Output, count_usage
from .frontend import ClientGone, FrontendManager, Pending
from .responses import Usage
from .translate import Job

logger = logging.getLogger(__name__)

STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would collect the stream otherwise
]
DONE = b"data: [DONE]\n\n"


def event(payload: bytes) -> bytes:
    """One server-sent event."""
    return b"data: %b\n\n" % payload


def error_response(info: ErrorInfo, headers: dict[str, str] | None = None) -> Response:
    return Response(error_json(info), info.status, headers, media_type="application/json")


def json_response(value: msgspec.Struct, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


class Answer(Response):
    """Submits ``job`` when it is called as an ASGI application, and answers it."""

    def __init__(self, frontend: FrontendManager, job: Job, log_requests: bool) -> None:
        super().__init__()
        self._frontend = frontend
        self._job = job
        self._log_requests = log_requests
        self._outputs = [Output() for _ in job.requests]
        self._encode = msgspec.json.Encoder().encode

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start = time.perf_counter()
        try:
            with self._frontend.submit(self._job.requests) as pending:
                watcher = asyncio.create_task(_watch(receive, pending))
                try:
                    ending = await self._run(pending, scope, receive, send)
                finally:
                    watcher.cancel()
        except ApiError as error:
            ending = str(error)
            await error_response(error.info)(scope, receive, send)
        except ClientGone:
            ending = "the client has gone"
        if self._log_requests:
            usage = self._usage()
            logger.info(
                "%s: %d prompt tokens (%d cached), %d output tokens, %.2f s: %s",
                self._job.format.id,
                usage.prompt_tokens,
                usage.prompt_tokens_details.cached_tokens,
                usage.completion_tokens,
                time.perf_counter() - start,
                ending,
            )

    async def _run(self, pending: Pending, scope: Scope, receive: Receive, send: Send) -> str:
        arrived = await pending.arrived()
        if self._job.stream:
            return await self._stream(pending, arrived, send)
        self._add(arrived)
        while pending.unfinished:
            self._add(await pending.arrived())
        await json_response(self._job.format.whole(self._outputs, self._usage()))(scope, receive, send)
        return self._ending()

    async def _stream(self, pending: Pending, arrived: list[tuple[int, UserReply]], send: Send) -> str:
        await send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})
        started: set[int] = set()
        ending = ""
        try:
            while pending.unfinished:
                if body := b"".join(self._events(arrived, started)):
                    await send({"type": "http.response.body", "body": body, "more_body": True})
                arrived = await pending.arrived()
            last = [*self._events(arrived, started), *self._last_events()]
            ending = self._ending()
        except ApiError as error:
            last = [event(error_json(error.info))]
            ending = str(error)
        await send({"type": "http.response.body", "body": b"".join(last), "more_body": False})
        return ending

    def _add(self, arrived: list[tuple[int, UserReply]]) -> set[int]:
        for index, reply in arrived:
            self._outputs[index].add(reply)
        return {index for index, _ in arrived}

    def _events(self, arrived: list[tuple[int, UserReply]], started: set[int]) -> Iterator[bytes]:
        """The events for what has arrived: one with all the new text of a choice, however many replies it came in."""
        shape = self._job.format
        for index in sorted(self._add(arrived)):
            output = self._outputs[index]
            if index not in started:
                started.add(index)
                yield from self._event(shape.start(index))
            yield from self._event(shape.chunk(index, output))
            if output.finish:
                yield from self._event(shape.end(index, output))

    def _last_events(self) -> Iterator[bytes]:
        yield from self._event(self._job.format.usage_chunk(self._usage()))
        yield DONE

    def _event(self, chunk: msgspec.Struct | None) -> Iterator[bytes]:
        if chunk is not None:
            yield event(self._encode(chunk))

    def _usage(self) -> Usage:
        return count_usage(self._outputs, self._job.n)

    def _ending(self) -> str:
        return "/".join(sorted({output.finish or "" for output in self._outputs}))


async def _watch(receive: Receive, pending: Pending) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    pending.leave()
