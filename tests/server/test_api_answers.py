"""Answers of the API, whole and streamed, on a fake backend."""

from __future__ import annotations

from typing import Any

import pytest
from api_harness import CHAT, COMPLETION, MODEL, Api, error_of, events
from fake_backend import prompt_of, say

from minisgl.message import UserReply, pack_ids

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
