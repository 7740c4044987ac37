"""uvicorn on a socket that the launcher has bound, and an orderly end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Iterator

import uvicorn
import uvloop
from fastapi import FastAPI

from .errors import unavailable
from .frontend import FrontendManager
from .http_protocol import HttpProtocol

KEEP_ALIVE_SECONDS = 75

DRAIN_SECONDS = 3.0
"""What a request under way gets to finish when the server is asked to end; then it gets an error."""

ERROR_SECONDS = 1.0
"""What the client gets to read that error."""


class HttpServer(uvicorn.Server):
    """One API server. SIGTERM ends it: nothing new is accepted, what is under way gets a little time, then an error.

    ``backlog`` is how many connections may wait to be accepted.
    """

    def __init__(self, app: FastAPI, frontend: FrontendManager, backlog: int) -> None:
        self._frontend = frontend
        super().__init__(
            uvicorn.Config(
                app,
                http=HttpProtocol,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                backlog=backlog,
                timeout_keep_alive=KEEP_ALIVE_SECONDS,
            )
        )
        self.config.load()

    def run_on(self, sock: socket.socket) -> None:
        """Serves until SIGTERM. The socket is bound, and may be shared with other API servers."""
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(self._run_on(sock))
        self._frontend.close()

    async def _run_on(self, sock: socket.socket) -> None:
        self._frontend.attach()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self._drain)
        await self.serve([sock])

    def _drain(self) -> None:
        self.should_exit = True
        asyncio.get_running_loop().call_later(DRAIN_SECONDS, self._give_up)

    def _give_up(self) -> None:
        self._frontend.shut(unavailable("The server is shutting down.", "shutting_down"))
        asyncio.get_running_loop().call_later(ERROR_SECONDS, self._leave)

    def _leave(self) -> None:
        # Whoever has not read its error by now never will. uvicorn would log a traceback for each such connection.
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
        self.force_exit = True

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        # uvicorn's own handler would end requests by cancelling them, and with the signal itself.
        yield
