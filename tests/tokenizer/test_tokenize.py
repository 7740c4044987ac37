from __future__ import annotations

from typing import Any

import pytest
from tiny_tokenizers import SaveModel, byte_level
from tokenizers.processors import TemplateProcessing

from minisgl.core import SamplingParams
from minisgl.message import (
    ChatPrompt,
    ErrorInfo,
    IdsPrompt,
    Prompt,
    TextPrompt,
    TokenizeMsg,
    UserMsg,
    UserReply,
    pack_ids,
    unpack_ids,
)
from minisgl.tokenizer import Tokenizer, load_tokenizer, tokenize_request

TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}{{ eos_token if add_generation_prompt }}"
CONFIG = {"bos_token": "<s>", "eos_token": "</s>"}


@pytest.fixture
def chatty(save_model: SaveModel) -> Tokenizer:
    backend = byte_level()
    backend.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return load_tokenizer(
        save_model(backend, tokenizer_config=CONFIG, chat_template=TEMPLATE, generation_config={"eos_token_id": [3, 1]})
    )


def ask(tokenizer: Tokenizer, prompt: Prompt, max_seq_len: int | None = None, **params: Any) -> UserMsg | UserReply:
    return tokenize_request(tokenizer, TokenizeMsg(uid=4, prompt=prompt, params=SamplingParams(**params)), max_seq_len)


def ids_of(tokenizer: Tokenizer, prompt: Prompt) -> list[int]:
    result = ask(tokenizer, prompt)
    assert isinstance(result, UserMsg)
    return unpack_ids(result.input_ids).tolist()


def error_of(result: UserMsg | UserReply) -> ErrorInfo:
    assert isinstance(result, UserReply)
    assert (result.uid, result.finish) == (4, "error")
    assert result.error is not None
    return result.error


def chat(text: Any, **variables: Any) -> ChatPrompt:
    return ChatPrompt(messages=[{"role": "user", "content": text}], template_kwargs=variables)


def test_a_lone_surrogate_is_the_clients_mistake(chatty: Tokenizer) -> None:
    """It travels through UTF-8 as an escape in the arguments of a tool call, say."""
    for prompt, param in ((TextPrompt(text="a\udc80"), "prompt"), (chat("a\udc80"), "messages")):
        error = error_of(ask(chatty, prompt))
        assert (error.status, error.param) == (400, param)
        assert "U+DC80" in error.message


def test_text_chat_and_ids_become_ids(chatty: Tokenizer) -> None:
    plain = chatty.encode("Hello", add_special_tokens=False)
    assert ids_of(chatty, TextPrompt(text="Hello")) == [0, *plain]
    assert ids_of(chatty, chat("Hello")) == [0, *plain, 1]
    assert ids_of(chatty, chat("Hello", add_generation_prompt=False)) == [0, *plain]
    assert ids_of(chatty, IdsPrompt(ids=pack_ids([5, 99999]))) == [5, 99999]


def test_there_is_exactly_one_bos(chatty: Tokenizer) -> None:
    """Also for a client that has applied the chat template itself."""
    applied = chatty.render_chat([{"role": "user", "content": "Hello"}])
    assert ids_of(chatty, TextPrompt(text=applied)) == ids_of(chatty, chat("Hello"))
    assert ids_of(chatty, TextPrompt(text="")) == [0]


def test_where_none_is_added_none_is_taken_away(save_model: SaveModel) -> None:
    """ChatML models call <|im_start|> their BOS and add none."""
    tokenizer = load_tokenizer(save_model(byte_level(), tokenizer_config={"bos_token": "<|im_start|>"}))
    assert ids_of(tokenizer, TextPrompt(text="<|im_start|><|im_start|>")) == [2, 2]


def test_end_tokens_stop_unless_they_are_ignored(chatty: Tokenizer) -> None:
    def stops(**params: Any) -> tuple[int, ...]:
        result = ask(chatty, TextPrompt(text="a"), **params)
        assert isinstance(result, UserMsg)
        return result.stop_token_ids

    assert stops() == (1, 3)
    assert stops(stop_token_ids=(9, 3)) == (1, 3, 9)
    assert stops(ignore_eos=True) == ()
    assert stops(ignore_eos=True, stop_token_ids=(9,)) == (9,)


def test_the_parameters_travel_along(chatty: Tokenizer) -> None:
    result = ask(chatty, TextPrompt(text="a"), stop=("x",), temperature=0.5)
    assert isinstance(result, UserMsg)
    assert (result.uid, result.params.stop, result.params.temperature) == (4, ("x",), 0.5)


@pytest.mark.parametrize("prompt", [TextPrompt(text=""), IdsPrompt(ids=b"")])
def test_an_empty_prompt_without_bos_is_refused_and_the_next_one_works(
    byte_tokenizer: Tokenizer, prompt: Prompt
) -> None:
    error = error_of(ask(byte_tokenizer, prompt))
    assert (error.status, error.param, error.type) == (400, "prompt", "invalid_request_error")
    assert "empty" in error.message
    assert ids_of(byte_tokenizer, TextPrompt(text="a")) == byte_tokenizer.encode("a")


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        (ChatPrompt(messages=[]), "messages is empty"),
        (chat([{"type": "image_url"}]), "'image_url'"),
        (chat("a", messages=[]), "cannot be called messages"),
    ],
)
def test_a_chat_the_template_cannot_take_is_refused(chatty: Tokenizer, prompt: Prompt, words: str) -> None:
    error = error_of(ask(chatty, prompt))
    assert (error.status, error.param) == (400, "messages")
    assert words in error.message


def test_a_model_without_a_template_says_so(byte_tokenizer: Tokenizer) -> None:
    error = error_of(ask(byte_tokenizer, chat("a")))
    assert error.status == 400
    assert "no chat template" in error.message


@pytest.mark.parametrize(
    ("prompt", "param"), [(TextPrompt(text="a" * 50_000), "prompt"), (chat("a" * 50_000), "messages")]
)
def test_a_text_too_long_by_its_length_alone_is_not_even_tokenized(
    chatty: Tokenizer, monkeypatch: pytest.MonkeyPatch, prompt: Prompt, param: str
) -> None:
    """And the error has both numbers."""
    monkeypatch.setattr(Tokenizer, "encode", lambda *args, **kwargs: pytest.fail("tokenized"))
    error = error_of(ask(chatty, prompt, max_seq_len=512))
    assert (error.status, error.code, error.param) == (400, "context_length_exceeded", param)
    least = chatty.min_tokens("a" * 50_000)
    assert f"512 tokens, but the prompt has at least {least} tokens" in error.message


def test_a_text_that_may_fit_is_tokenized(chatty: Tokenizer) -> None:
    assert isinstance(ask(chatty, TextPrompt(text="Hello " * 200), max_seq_len=512), UserMsg)


def test_what_cannot_be_tokenized_is_an_error_and_no_exception(byte_tokenizer: Tokenizer) -> None:
    assert error_of(ask(byte_tokenizer, IdsPrompt(ids=b"abc"))).status == 500
