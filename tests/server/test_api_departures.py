"""Clients that leave, and a server that breaks under its clients, on a fake backend."""

from __future__ import annotations

import json
import socket
import threading
import time
from typing import Any

import httpx
import openai
import pytest
from api_harness import CHAT, COMPLETION, Api, error_of, events
from fake_backend import say

# Clients that leave


def leave(api: Api, path: str, body: dict[str, Any], *, after: bytes = b"") -> None:
    """Sends a request and closes the connection, once ``after`` has come."""
    content = json.dumps(body).encode()
    with socket.create_connection(("127.0.0.1", httpx.URL(api.url).port)) as connection:
        head = ["POST " + path + " HTTP/1.1", "host: x", "content-type: application/json"]
        head += [f"content-length: {len(content)}", "", ""]
        connection.sendall("\r\n".join(head).encode() + content)
        received = b""
        while after and after not in received:
            received += connection.recv(4096)
        api.backend.wait(lambda: bool(api.backend.requests))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("started", [False, True])
def test_client_leaves(api: Api, stream: bool, started: bool) -> None:
    """An abort for every uid, at once, whether the request waits or runs."""
    api.backend.script = say("a", "b", finish=None) if started else lambda m: []
    body = {**COMPLETION, "n": 2, "stream": stream}
    leave(api, "/v1/completions", body, after=b"data: " if stream and started else b"")
    api.backend.wait(lambda: len(api.backend.aborted) == 2)
    assert sorted(api.backend.aborted) == sorted(m.uid for m in api.backend.requests)


def test_client_leaves_at_the_end(api: Api) -> None:
    """Nothing is aborted that has finished."""
    leave(api, "/v1/completions", {**COMPLETION, "stream": True}, after=b"[DONE]")
    api.client.completions.create(**COMPLETION)
    assert api.backend.aborted == []


def test_replies_after_an_abort_are_dropped(api: Api) -> None:
    api.backend.script = say("a", finish=None)
    leave(api, "/v1/completions", {**COMPLETION, "stream": True}, after=b"data: ")
    api.backend.wait(lambda: bool(api.backend.aborted))
    late = api.backend.requests[0]
    api.backend.script = lambda m: [*say("late")(late), *say("fresh")(m)]
    assert api.client.completions.create(**COMPLETION).choices[0].text == "fresh"


# A server that breaks


def test_worker_dies(doomed_api: Api) -> None:
    """Requests in flight get a clear error, new ones and /health a 503."""
    api = doomed_api
    api.backend.script = say("a", finish=None)
    results: dict[str, Any] = {}

    def ask(name: str, stream: bool) -> None:
        results[name] = httpx.post(api.url + "/v1/completions", json={**COMPLETION, "stream": stream}, timeout=20)

    threads = [threading.Thread(target=ask, args=("whole", False)), threading.Thread(target=ask, args=("stream", True))]
    for thread in threads:
        thread.start()
    api.backend.wait(lambda: len(api.backend.requests) == 2)
    time.sleep(0.1)
    api.backend.kill("scheduler")
    for thread in threads:
        thread.join()
    text = "The scheduler process has died (killed by SIGKILL)."
    assert (results["whole"].status_code, error_of(results["whole"])["message"]) == (503, text)
    assert results["stream"].status_code == 200
    assert events(results["stream"].text)[-1]["error"]["message"] == text
    health = api.http.get("/health")
    assert (health.status_code, error_of(health)["message"]) == (503, text)
    with pytest.raises(openai.InternalServerError, match="scheduler process has died"):
        api.client.chat.completions.create(**CHAT)
    assert api.http.get("/v1/models").status_code == 200
    assert len(api.frontend) == 0
