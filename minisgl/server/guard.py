"""What is refused before a body is read: bodies that are too big, and bodies that are not JSON."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .answer import error_response
from .errors import ApiError, invalid

MAX_BODY_BYTES = 32 * 2**20


class BodyGuard:
    """ASGI middleware around the application."""

    def __init__(self, app: ASGIApp, max_bytes: int = MAX_BODY_BYTES) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        length = headers.get("content-length", "")
        if kind != "application/json" and not kind.endswith("+json"):
            # Not only pedantry: a browser sends other types to this port from any web page, without asking first.
            error = invalid("The content type must be application/json.", status=415)
            await error_response(error.info)(scope, receive, send)
            return
        if length.isdigit() and int(length) > self._max_bytes:
            await error_response(self._too_big().info)(scope, receive, send)
            return

        left = self._max_bytes

        async def counted() -> Message:
            nonlocal left
            message = await receive()
            left -= len(message.get("body", b""))
            if left < 0:
                # The framework would turn any other exception in the middle of a body into a 400.
                raise HTTPException(413, self._too_big().info.message)
            return message

        await self._app(scope, counted, send)

    def _too_big(self) -> ApiError:
        return invalid(f"The body must not be larger than {self._max_bytes} bytes.", status=413)
