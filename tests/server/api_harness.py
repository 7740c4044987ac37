"""An API server in this process, before a fake backend."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from typing import Any

import httpx
import openai
from fake_backend import FakeBackend

from minisgl.server.api_server import ModelFacts, create_app
from minisgl.server.frontend import FrontendManager
from minisgl.server.http_process import BACKLOG
from minisgl.server.http_server import HttpServer

MODEL = "toy"
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
COMPLETION = {"model": MODEL, "prompt": "hi"}


class Api:
    """An API server on a port of its own, in a thread."""

    def __init__(self, backend: FakeBackend) -> None:
        self.backend = backend
        self.frontend = FrontendManager(backend.addresses, 0)
        facts = ModelFacts(MODEL, 1, max_seq_len=100, sampling_defaults={"temperature": 0.25, "top_k": 9})
        self._server = HttpServer(create_app(self.frontend, facts), self.frontend, BACKLOG)
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))
        self._thread.start()
        self.http = httpx.Client(base_url=self.url, timeout=20)
        self.client = openai.OpenAI(base_url=self.url + "/v1", api_key="-", max_retries=0, timeout=20)

    async def _serve(self) -> None:
        self.frontend.attach()
        await self._server.serve([self._socket])

    def close(self) -> None:
        self.http.close()
        self.client.close()
        self._server.should_exit = True
        self._thread.join()
        self.frontend.close()


def error_of(response: httpx.Response) -> dict[str, Any]:
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    return body["error"]


def events(text: str) -> list[Any]:
    """The payloads of a stream, whose framing must be exact."""
    assert text.endswith("\n\n")
    frames = text[:-2].split("\n\n")
    assert all(frame.startswith("data: ") and "\n" not in frame for frame in frames)
    return [frame if frame == "data: [DONE]" else json.loads(frame[6:]) for frame in frames]
