"""What the API refuses, and how it says so, on a fake backend."""

from __future__ import annotations

import socket
import time
from typing import Any

import httpx
import openai
import pytest
from api_harness import CHAT, COMPLETION, MODEL, Api, error_of, events
from fake_backend import fail, prompt_of, say


def test_error_before_the_stream_has_its_status(api: Api) -> None:
    text = "This model's maximum context length is 100 tokens, but the prompt has 120."
    api.backend.script = fail(
        text, status=400, type="invalid_request_error", code="context_length_exceeded", param="messages"
    )
    for stream in (False, True):
        response = api.http.post("/v1/chat/completions", json={**CHAT, "stream": stream})
        assert response.status_code == 400
        error = error_of(response)
        assert error == {
            "message": text,
            "type": "invalid_request_error",
            "param": "messages",
            "code": "context_length_exceeded",
        }
        with pytest.raises(openai.BadRequestError, match="maximum context length is 100"):
            api.client.chat.completions.create(**CHAT, stream=stream)


def test_full_queue(api: Api) -> None:
    api.backend.script = fail("500 requests wait already.", status=429, type="rate_limit_error", code="queue_full")
    with pytest.raises(openai.RateLimitError, match="500 requests wait"):
        api.client.chat.completions.create(**CHAT, stream=True)


def test_error_in_mid_stream(api: Api) -> None:
    api.backend.pause = 0.02
    api.backend.script = lambda m: [*say("Hel", "lo", finish=None)(m), *fail("The engine broke.")(m)]
    text = api.http.post("/v1/completions", json={**COMPLETION, "stream": True}).text
    *chunks, last = events(text)
    assert last == {"error": {"message": "The engine broke.", "type": "server_error", "param": None, "code": None}}
    assert "".join(c["choices"][0]["text"] for c in chunks) == "Hello"
    with pytest.raises(openai.APIError, match="The engine broke"):
        list(api.client.completions.create(**COMPLETION, stream=True))


def test_one_of_many_fails(api: Api) -> None:
    """The request as a whole gets the error of the one, and the others are aborted."""
    api.backend.script = lambda m: fail("Poison.", status=400)(m) if prompt_of(m) == "bad" else say("x", finish=None)(m)
    response = api.http.post("/v1/completions", json={"prompt": ["good", "bad", "fine"]})
    assert (response.status_code, error_of(response)["message"]) == (400, "Poison.")
    api.backend.wait(lambda: len(api.backend.requests) == 3 and len(api.backend.aborted) == 2)
    assert sorted(api.backend.aborted) == [m.uid for m in api.backend.requests if prompt_of(m) != "bad"]


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"content": "hi"}]}, "messages[0].role"),
        ({"messages": [{"role": "robot", "content": "hi"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "assistant", "content": None}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "user", "content": ["hi"]}]}, "messages[0].content[0]"),
        ({"temperature": "warm"}, "temperature"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": 1.5}, "top_k"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 5, "max_completion_tokens": 0}, "max_completion_tokens"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"seed": 2**64}, "seed"),
        ({"stop": ["a", "b", "c", "d", "e"]}, "stop"),
        ({"stop": [1]}, "stop"),
        ({"stop": ""}, "stop"),
        ({"stop": "x" * 1025}, "stop"),
        ({"stop_token_ids": [1] * 1025}, "stop_token_ids"),
        ({"stop_token_ids": ["x"]}, "stop_token_ids[0]"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"repetition_penalty": 1e-38}, "repetition_penalty"),
        ({"stream": "yes"}, "stream"),
        ({"logprobs": True}, "logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"guided_regex": "a+"}, "guided_regex"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs"),
    ],
)
def test_wrong_chat_field_is_named(api: Api, change: dict[str, Any], param: str) -> None:
    response = api.http.post("/v1/chat/completions", json={**CHAT, **change})
    error = error_of(response)
    assert (response.status_code, error["param"], error["type"]) == (400, param, "invalid_request_error")
    assert param.split("[")[0].split(".")[0] in error["message"]
    assert not api.backend.requests


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [""]}, "prompt[0]"),
        ({"prompt": [[]]}, "prompt[0]"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [1, -1]}, "prompt"),
        ({"prompt": [2**31]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": ["a"] * 2049}, "prompt"),
        ({"prompt": ["a"] * 100, "n": 100}, "prompt"),
        ({"echo": True}, "echo"),
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 2}, "best_of"),
        ({"logprobs": 0}, "logprobs"),
    ],
)
def test_wrong_completion_field_is_named(api: Api, change: dict[str, Any], param: str) -> None:
    response = api.http.post("/v1/completions", json={**COMPLETION, **change})
    assert (response.status_code, error_of(response)["param"]) == (400, param)
    assert not api.backend.requests


def test_what_changes_nothing_is_accepted(api: Api) -> None:
    harmless = {
        "logprobs": False,
        "top_logprobs": None,
        "logit_bias": {},
        "tools": [],
        "tool_choice": "auto",
        "response_format": {"type": "text"},
        "modalities": ["text"],
        "n": 1,
        "user": "somebody",
        "metadata": {"a": "b"},
        "some_field_of_next_year": 1,
        "temperature": None,
        "stop": None,
        "stream": None,
    }
    assert api.http.post("/v1/chat/completions", json={**CHAT, **harmless}).status_code == 200
    assert api.http.post("/v1/completions", json={**COMPLETION, "best_of": 1, "echo": False}).status_code == 200


def test_unknown_model(api: Api) -> None:
    for path, body in (("/v1/chat/completions", CHAT), ("/v1/completions", COMPLETION)):
        response = api.http.post(path, json={**body, "model": "gpt-9"})
        error = error_of(response)
        assert (response.status_code, error["code"]) == (404, "model_not_found")
        assert MODEL in error["message"]
        assert "gpt-9" in error["message"]
    with pytest.raises(openai.NotFoundError):
        api.client.chat.completions.create(**{**CHAT, "model": "gpt-9"})


def test_bodies_that_are_no_bodies(api: Api) -> None:
    def post(content: bytes, kind: str = "application/json") -> httpx.Response:
        return api.http.post("/v1/completions", content=content, headers={"content-type": kind})

    for content in (b"{", b"", b"[1]", b"null", b'"text"', b"\xff\xfe", b"[" * 100_000):
        response = post(content)
        assert response.status_code == 400
        assert error_of(response)["type"] == "invalid_request_error"
    assert post(b'{"prompt": "hi"}', "text/plain").status_code == 415
    assert post(b'{"prompt": "hi"}', "application/json; charset=utf-8").status_code == 200
    # JSON can say what UTF-8 cannot.
    assert post(b'{"prompt": "\\ud800"}').status_code == 400
    response = post(b'{"prompt": "hi", "temperature": NaN}')
    assert (response.status_code, error_of(response)["param"]) == (400, "temperature")


@pytest.mark.parametrize("cut", [0, 1, 40, 150, 400])
def test_offer_to_upgrade_is_declined(api: Api, cut: int) -> None:
    # What Java's own client sends first on each connection.
    body = b'{"prompt": "hi", "padding": "' + b"x" * 300 + b'"}'
    head = (
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n"
        % len(body)
    )
    offer = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAAAAIAAAAB\r\n"
    sent = head + offer + b"\r\n" + body
    with socket.create_connection(("127.0.0.1", httpx.URL(api.url).port)) as connection:
        for part in (sent[:cut], sent[cut:], head + b"\r\n" + body):
            connection.sendall(part)
            time.sleep(0.02)
        received = b""
        while received.count(b"Hello world") < 2:
            received += connection.recv(4096)
    assert received.count(b"HTTP/1.1 200 OK") == 2
    assert [prompt_of(m) for m in api.backend.requests] == ["hi", "hi"]


def test_websockets_and_tunnels_are_declined(api: Api) -> None:
    offer = b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
    for request, status in ((b"GET /health HTTP/1.1\r\n" + offer, b"200"), (b"CONNECT x:1 HTTP/1.1\r\n", b"400")):
        with socket.create_connection(("127.0.0.1", httpx.URL(api.url).port)) as connection:
            connection.sendall(request + b"host: x\r\n\r\n")
            assert connection.recv(4096).startswith(b"HTTP/1.1 " + status)


def test_body_too_big(api: Api) -> None:
    huge = b'{"prompt": "' + b"x" * (33 * 2**20) + b'"}'
    for content in (huge, iter([huge[: 2**24], huge[2**24 :]])):
        try:
            response = api.http.post("/v1/completions", content=content, headers={"content-type": "application/json"})
        except httpx.WriteError:
            continue  # refused before all of it was sent
        assert response.status_code == 413
        assert "33554432" in error_of(response)["message"]


def test_fault_of_the_server(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(requests: Any) -> None:
        raise RuntimeError("a fault that nobody has thought of")

    monkeypatch.setattr(api.frontend, "submit", broken)
    response = api.http.post("/v1/completions", json=COMPLETION)
    assert (response.status_code, error_of(response)["type"]) == (500, "server_error")
    assert "nobody" not in response.text


def test_no_such_route(api: Api) -> None:
    response = api.http.get("/v2/nothing")
    assert (response.status_code, "/v2/nothing" in error_of(response)["message"]) == (404, True)
    response = api.http.get("/v1/completions")
    assert (response.status_code, response.headers["allow"]) == (405, "POST")
    error_of(response)
