"""The HTTP API on a fake backend, through the official client where it can speak, in raw HTTP where bytes matter."""

from __future__ import annotations

import json
import socket
import threading
import time
from typing import Any

import httpx
import openai
import pytest
from api_harness import MODEL, Api
from fake_backend import fail, prompt_of, say

from minisgl.message import UserReply, pack_ids

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
COMPLETION = {"model": MODEL, "prompt": "hi"}


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


# Whole answers


def test_chat(api: Api) -> None:
    answer = api.client.chat.completions.create(**CHAT)
    assert answer.id.startswith("chatcmpl-")
    assert answer.object == "chat.completion"
    assert answer.model == MODEL
    assert [c.message.content for c in answer.choices] == ["Hello world"]
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "stop"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (7, 2, 9)
    assert answer.usage.prompt_tokens_details.cached_tokens == 4
    assert prompt_of(api.backend.requests[0]) == [{"role": "user", "content": "hi"}]


def test_completion(api: Api) -> None:
    api.backend.script = say("a", "b", finish="length")
    answer = api.client.completions.create(**COMPLETION)
    assert answer.id.startswith("cmpl-")
    assert answer.object == "text_completion"
    assert [(c.index, c.text, c.finish_reason) for c in answer.choices] == [(0, "ab", "length")]
    assert prompt_of(api.backend.requests[0]) == "hi"


def test_many_prompts_answer_in_order(api: Api) -> None:
    api.backend.script = lambda m: say(prompt_of(m) + "!", prompt_tokens=len(prompt_of(m)))(m)
    answer = api.client.completions.create(model=MODEL, prompt=["one", "three", "x"], n=2)
    assert [(c.index, c.text) for c in answer.choices] == [
        (0, "one!"),
        (1, "one!"),
        (2, "three!"),
        (3, "three!"),
        (4, "x!"),
        (5, "x!"),
    ]
    # A prompt counts once however many answers it gets.
    assert answer.usage.prompt_tokens == 3 + 5 + 1
    assert answer.usage.completion_tokens == 6


@pytest.mark.parametrize(
    ("prompt", "wanted"),
    [("text", ["text"]), (["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]), ([[1], [2, 3]], [[1], [2, 3]])],
)
def test_shapes_of_prompts(api: Api, prompt: Any, wanted: Any) -> None:
    api.client.completions.create(model=MODEL, prompt=prompt)
    assert [prompt_of(m) for m in api.backend.requests] == wanted


def test_generate(api: Api) -> None:
    for body in (
        {"text": "hi", "max_new_tokens": 3, "temperature": 0},
        {"prompt": "hi", "sampling_params": {"max_tokens": 3, "temperature": 0}},
    ):
        answer = api.http.post("/generate", json=body).json()
        assert (answer["text"], answer["token_ids"], answer["finish_reason"]) == ("Hello world", [0, 1], "stop")
        assert answer["usage"]["total_tokens"] == 9
    assert [(m.params.max_tokens, m.params.temperature) for m in api.backend.requests] == [(3, 0), (3, 0)]
    api.http.post("/generate", json={"input_ids": [5, 6]})
    assert prompt_of(api.backend.requests[-1]) == [5, 6]
    assert error_of(api.http.post("/generate", json={"input_ids": [5], "text": "hi"}))["param"] == "prompt"
    assert error_of(api.http.post("/generate", json={}))["param"] == "prompt"
    assert error_of(api.http.post("/generate", json={"text": "hi", "n": 2}))["param"] == "n"
    # Nothing is passed over in silence.
    for name, value in {"regex": "a", "temperature": 0.5, "max_new_tokens": 5}.items():
        body = {"text": "hi", "sampling_params": {"max_tokens": 3}, name: value}
        assert error_of(api.http.post("/generate", json=body))["param"] == name.replace("_new", "")


def test_models_and_health(api: Api) -> None:
    assert [m.id for m in api.client.models.list()] == [MODEL]
    assert api.client.models.retrieve(MODEL).owned_by == "minisgl"
    assert api.http.get("/v1/models").json()["data"][0]["max_model_len"] == 100
    assert error_of(api.http.get("/v1/models/other/one"))["code"] == "model_not_found"
    health = api.http.get("/health")
    assert (health.status_code, health.json()["status"]) == (200, "ok")


# Streams


def test_chat_stream_bytes(api: Api) -> None:
    api.backend.pause = 0.02
    with api.http.stream("POST", "/v1/chat/completions", json={**CHAT, "stream": True}) as response:
        assert response.status_code == 200
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert response.headers["cache-control"] == "no-cache"
        text = response.read().decode()
    *chunks, done = events(text)
    assert done == "data: [DONE]"
    head = {key: chunks[0][key] for key in ("id", "object", "created", "model")}
    assert head["object"] == "chat.completion.chunk"

    def chunk(delta: dict[str, str], finish: str | None = None) -> dict[str, Any]:
        return {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": finish, "logprobs": None}]}

    assert chunks == [
        chunk({"role": "assistant"}),
        chunk({"content": "Hello"}),
        chunk({"content": " world"}),
        chunk({}, "stop"),
    ]


def test_completion_stream_bytes(api: Api) -> None:
    api.backend.pause = 0.02
    body = {**COMPLETION, "stream": True, "stream_options": {"include_usage": True}}
    *chunks, done = events(api.http.post("/v1/completions", json=body).text)
    assert done == "data: [DONE]"
    assert len({(c["id"], c["created"], c["model"], c["object"]) for c in chunks}) == 1
    assert [[(c["text"], c["finish_reason"]) for c in chunk["choices"]] for chunk in chunks] == [
        [("Hello", None)],
        [(" world", None)],
        [("", "stop")],
        [],
    ]
    assert [c["usage"] for c in chunks[:-1]] == [None] * 3
    assert chunks[-1]["usage"] == {
        "prompt_tokens": 7,
        "completion_tokens": 2,
        "total_tokens": 9,
        "prompt_tokens_details": {"cached_tokens": 4},
    }


def test_usage_is_absent_unless_asked_for(api: Api) -> None:
    for options in ({}, {"stream_options": {}}, {"stream_options": {"include_usage": False}}):
        text = api.http.post("/v1/chat/completions", json={**CHAT, "stream": True, **options}).text
        assert "usage" not in text
    error = error_of(api.http.post("/v1/chat/completions", json={**CHAT, "stream_options": {"include_usage": True}}))
    assert error["param"] == "stream_options"


def test_stream_through_the_client(api: Api) -> None:
    api.backend.pause = 0.01
    stream = api.client.chat.completions.create(**CHAT, stream=True, stream_options={"include_usage": True}, n=2)
    texts, roles, finishes, usage = ["", ""], [[], []], ["", ""], None
    for chunk in stream:
        assert usage is None, "nothing comes after the usage"
        for choice in chunk.choices:
            assert not finishes[choice.index], "nothing comes after the finish reason"
            assert choice.delta.content != ""
            roles[choice.index].append(choice.delta.role)
            texts[choice.index] += choice.delta.content or ""
            finishes[choice.index] = choice.finish_reason or ""
        usage = chunk.usage
    assert texts == ["Hello world"] * 2
    assert finishes == ["stop"] * 2
    assert all(r[0] == "assistant" and not any(r[1:]) for r in roles)
    assert (usage.prompt_tokens, usage.completion_tokens) == (7, 4)


def test_what_arrives_together_leaves_together(api: Api) -> None:
    """A slow reader gets few big chunks, not a backlog of small ones; an answer without text gets no text chunk."""

    def script(m: Any) -> list[UserReply]:
        replies = say(*"abcdefgh")(m)
        return [replies[0], *replies[1:]]

    api.backend.script = script
    *chunks, _ = events(api.http.post("/v1/completions", json={**COMPLETION, "stream": True}).text)
    assert "".join(c["choices"][0]["text"] for c in chunks) == "abcdefgh"
    api.backend.script = say("", finish="stop")
    *chunks, _ = events(api.http.post("/v1/chat/completions", json={**CHAT, "stream": True}).text)
    assert [c["choices"][0]["delta"] for c in chunks] == [{"role": "assistant"}, {}]


def test_generate_stream(api: Api) -> None:
    api.backend.pause = 0.02
    api.backend.script = lambda m: [
        UserReply(uid=m.uid, text="a", ids=pack_ids([1]), prompt_tokens=2, completion_tokens=1),
        UserReply(uid=m.uid, text="", ids=pack_ids([2]), prompt_tokens=2, completion_tokens=2),
        UserReply(uid=m.uid, text="é", ids=pack_ids([3]), prompt_tokens=2, completion_tokens=3),
        UserReply(uid=m.uid, ids=pack_ids([0]), prompt_tokens=2, completion_tokens=4, finish="stop"),
    ]
    *chunks, done = events(api.http.post("/generate", json={"text": "hi", "stream": True}).text)
    assert done == "data: [DONE]"
    assert [(c["text"], c["token_ids"], c["finish_reason"]) for c in chunks] == [
        ("a", [1], None),
        ("é", [2, 3], None),
        ("", [0], "stop"),
    ]
    assert "usage" not in chunks[0]
    assert chunks[-1]["usage"]["completion_tokens"] == 4


# Errors


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


# Parameters


def test_parameters_and_their_defaults(api: Api) -> None:
    api.client.chat.completions.create(**CHAT)
    api.client.completions.create(**COMPLETION, temperature=0, stop="\n", extra_body={"top_k": -1, "min_p": 0.1})
    api.client.chat.completions.create(
        **CHAT, max_tokens=5, max_completion_tokens=9, stop=["a", "b"], extra_body={"stop_token_ids": [3]}
    )
    first, second, third = (m.params for m in api.backend.requests)
    # The model's own recommendations, unless the client says otherwise.
    assert (first.temperature, first.top_k, first.top_p, first.max_tokens) == (0.25, 9, 1.0, None)
    assert (second.temperature, second.top_k, second.min_p, second.max_tokens) == (0, -1, 0.1, 16)
    assert second.stop == ("\n",)
    assert (third.max_tokens, third.stop, third.stop_token_ids) == (9, ("a", "b"), (3,))


def test_choices_of_a_seeded_request_differ(api: Api) -> None:
    api.client.chat.completions.create(**CHAT, n=3, seed=2**63 - 1)
    api.client.chat.completions.create(**CHAT, n=2, seed=2**64 - 1)
    seeds = [m.params.seed for m in api.backend.requests]
    assert seeds == [2**63 - 1, 2**63, 2**63 + 1, 2**64 - 1, 0]


def test_messages_reach_the_template(api: Api) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]},
        {"role": "user", "content": "hi", "name": "Ann"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "content": "42", "tool_call_id": "1"},
    ]
    body = {"messages": messages, "chat_template_kwargs": {"enable_thinking": False}}
    assert api.http.post("/v1/chat/completions", json=body).status_code == 200
    prompt = api.backend.requests[0].prompt
    assert prompt.messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "hi", "name": "Ann"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "42", "tool_call_id": "1"},
    ]
    assert prompt.template_kwargs == {"enable_thinking": False}


def test_uids_are_ours(api: Api) -> None:
    """Whatever ids clients send along, requests at the same time do not meet."""
    api.backend.script = lambda m: say(prompt_of(m))(m)
    body = {"request_id": "same", "id": "same", "uid": 1, "rid": "same"}
    answers: list[str] = [""] * 8

    def ask(i: int) -> None:
        answers[i] = httpx.post(api.url + "/v1/completions", json={**body, "prompt": f"p{i}"}).json()["choices"][0][
            "text"
        ]

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [f"p{i}" for i in range(8)]
    assert len({m.uid for m in api.backend.requests}) == 8


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
