"""How parameters and messages reach the tokenizer and the scheduler, on a fake backend."""

from __future__ import annotations

import threading

import httpx
from api_harness import CHAT, COMPLETION, Api
from fake_backend import prompt_of, say


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
