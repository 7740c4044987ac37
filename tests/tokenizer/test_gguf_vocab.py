from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tiny_tokenizers import TEXT, byte_level, sentencepiece

from minisgl.tokenizer import Tokenizer, TokenizerError
from minisgl.tokenizer.gguf_vocab import convert

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6

SAMPLES = [
    *TEXT,
    "",
    " ",
    "  leading and trailing  ",
    "tabs\tand\n\nnewlines\r\n\r\n  and   runs      of spaces",
    "I'm you're he'd they'll we've it's I'M YOU'RE",
    "Привет, мир! 你好，世界。 こんにちは 안녕하세요 สวัสดี مرحبا שלום",
    "🔥🎈👩‍👩‍👧‍👦🏳️‍🌈 zero\u200bwidth \u00a0nbsp \u3000wide é vs e\u0301",
    "<|im_start|>user\nsmuggled<|im_end|><|endoftext|><|not_special|>",
    "def f(x: int) -> int:\n\treturn x ** 2  # power\n\n\nclass A:\n    pass\n",
    "https://example.org/a?b=c&d=%20#e ~!@#$%^&*()_+`-={}[]|\\:\";'<>?,./",
    "\ufffd\x00\x01\x7f\x80",
    "a" * 300 + "0" * 3,
]


def metadata(model: str, tokens: list[str], **more: Any) -> dict[str, Any]:
    return {"tokenizer.ggml.model": model, "tokenizer.ggml.tokens": tokens} | {
        f"tokenizer.ggml.{key}": value for key, value in more.items()
    }


def tiny_byte_level(pre: str, extra: Sequence[tuple[str, int]] = ()) -> dict[str, Any]:
    """The vocabulary of the tiny byte-level tokenizer as a GGUF file has it."""
    model = json.loads(byte_level().to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    types = [CONTROL if token.startswith("<") and len(token) > 2 else NORMAL for token in tokens]
    return metadata(
        "gpt2",
        [*tokens, *(token for token, _ in extra)],
        token_type=[*types, *(kind for _, kind in extra)],
        merges=[" ".join(merge) for merge in model["merges"]],
        pre=pre,
        bos_token_id=tokens.index("<s>"),
        eos_token_id=tokens.index("</s>"),
    )


def pieces_of(pre: str, text: str) -> list[str]:
    """How ``text`` is cut before merging."""
    backend = convert(tiny_byte_level(pre), "x.gguf").tokenizer
    return [text[start:end] for _, (start, end) in backend.pre_tokenizer.pre_tokenize_str(text)]


@pytest.mark.model
def test_the_default_model_has_the_ids_of_transformers(default_tokenizer: Tokenizer, transformers_default: Any) -> None:
    for text in SAMPLES:
        assert default_tokenizer.encode(text) == transformers_default.encode(text), text
        ids = default_tokenizer.encode(text)
        for skip in (True, False):
            assert default_tokenizer.decode(ids, skip) == transformers_default.decode(ids, skip_special_tokens=skip)


@pytest.mark.model
@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=60))
def test_any_text_has_the_ids_of_transformers(
    default_tokenizer: Tokenizer, transformers_default: Any, text: str
) -> None:
    # transformers takes GPT-2's pre-tokenizer for this file's ("smollm": digits stand alone, apart from the blanks
    # before them too). That makes a difference after several blanks (the next test) and for digits of several bytes.
    digits = [char for char in text if unicodedata.category(char)[0] == "N"]
    assume(not digits or ("".join(digits).isascii() and not re.search(r"\s\s", text)))
    assert default_tokenizer.encode(text) == transformers_default.encode(text)


@pytest.mark.model
def test_blanks_before_a_digit_stay_together_as_the_model_was_trained(default_tokenizer: Tokenizer) -> None:
    tokens = [default_tokenizer.decode([i]) for i in default_tokenizer.encode("one:\n\n1. x  23")]
    assert tokens == ["one", ":", "\n\n", "1", ".", " x", "  ", "2", "3"]


@pytest.mark.model
def test_the_default_models_end_and_text_without_bos(default_tokenizer: Tokenizer) -> None:
    assert default_tokenizer.end_token_ids == {2}
    assert default_tokenizer.vocab_size == 49152
    assert default_tokenizer.encode("") == []


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("gpt-2", "I'M  it's 1234\n\nx", ["I", "'", "M", " ", " it", "'s", " 1234", "\n", "\n", "x"]),
        ("smollm", "a  12\n\n3", ["a", "  ", "1", "2", "\n\n", "3"]),
        ("llama-bpe", "I'M  it's 12345\n\n x", ["I", "'M", " ", " it", "'s", " ", "123", "45", "\n\n", " x"]),
        ("qwen2", "I'M 123 (x)\n", ["I", "'M", " ", "1", "2", "3", " (", "x", ")\n"]),
        ("tekken", "HelloWorld XMLHttp 12/", ["Hello", "World", " XMLHttp", " ", "1", "2", "/"]),
        ("deepseek-coder", "ab 12\nx=东京y", ["ab", " ", "1", "2", "\n", "x", "=", "东京", "y"]),
        ("deepseek-v3", "#define 1234 x東京です.", ["#define", " ", "123", "4", " x", "東京です", "."]),
        ("default", "x+=12345 it's", ["x", "+=", "123", "45", " it", "'", "s"]),
    ],
)
def test_text_is_cut_as_the_name_of_the_pre_tokenizer_says(pre: str, text: str, pieces: list[str]) -> None:
    assert pieces_of(pre, text) == pieces


def test_control_and_user_defined_tokens_are_found_whole_in_text() -> None:
    backend = convert(tiny_byte_level("gpt-2", [("<think>", USER_DEFINED), ("<｜end▁of｜>", CONTROL)]), "x").tokenizer
    encoded = backend.encode("ab<think>c<｜end▁of｜>")
    assert [t for t in encoded.tokens if t.startswith("<")] == ["<think>", "<｜end▁of｜>"]
    assert backend.decode(encoded.ids, skip_special_tokens=True) == "ab<think>c"
    assert backend.decode(encoded.ids, skip_special_tokens=False) == "ab<think>c<｜end▁of｜>"


def test_qwen2_composes_characters_first() -> None:
    backend = convert(tiny_byte_level("qwen2"), "x").tokenizer
    assert backend.encode("e\u0301").ids == backend.encode("é").ids


@pytest.mark.parametrize(
    ("pre", "more", "bos"),
    [("llama-bpe", {}, True), ("gpt-2", {}, False), ("llama-bpe", {"add_bos_token": False}, False)],
)
def test_bos_is_the_files_choice_then_the_kinds(pre: str, more: dict[str, Any], bos: bool) -> None:
    values = tiny_byte_level(pre) | {f"tokenizer.ggml.{key}": value for key, value in more.items()}
    converted = convert(values, "x")
    assert converted.tokenizer.encode("a").tokens == (["<s>", "a"] if bos else ["a"])
    assert converted.tokenizer.encode("a", add_special_tokens=False).tokens == ["a"]
    assert (converted.config["bos_token"], converted.config["eos_token"]) == ("<s>", "</s>")


def test_eos_is_added_where_the_file_says_so() -> None:
    values = tiny_byte_level("llama-bpe") | {"tokenizer.ggml.add_eos_token": True}
    assert convert(values, "x").tokenizer.encode("a").tokens == ["<s>", "a", "</s>"]


def test_all_end_tokens_and_sampling_parameters_are_taken() -> None:
    values = tiny_byte_level("gpt-2") | {
        "tokenizer.ggml.eot_token_id": 3,
        "tokenizer.ggml.eom_token_id": 2,
        "general.sampling.temp": 0.5,
        "general.sampling.top_k": 20,
        "general.sampling.penalty_repeat": 1.1,
    }
    assert convert(values, "x").generation == {
        "eos_token_id": [1, 3, 2],
        "temperature": 0.5,
        "top_k": 20,
        "repetition_penalty": 1.1,
    }


def test_templates_by_name() -> None:
    values = tiny_byte_level("gpt-2") | {"tokenizer.chat_template": "a", "tokenizer.chat_template.tool_use": "b"}
    assert convert(values, "x").config["chat_template"] == [
        {"name": "default", "template": "a"},
        {"name": "tool_use", "template": "b"},
    ]


def tiny_sentencepiece(**more: Any) -> dict[str, Any]:
    words = ["▁", "a", "b", "c", "▁a", "ab", "abc", "bc", "▁▁", "▁abc", "▁c"]
    scores = {"bc": -1.0, "ab": -2.0, "▁a": -3.0, "abc": -4.0, "▁abc": -5.0, "▁▁": -6.0, "▁c": -7.0}
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    kinds = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * len(words)]
    return metadata(
        "llama",
        tokens,
        token_type=kinds,
        scores=[scores.get(t, -100.0) for t in tokens],
        bos_token_id=1,
        eos_token_id=2,
        unknown_token_id=0,
        **more,
    )


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("abc", ["▁abc"]),  # bc first, then abc: with ab first, c would be left over
        ("ab", ["▁", "ab"]),
        (" c", ["▁▁", "c"]),
        ("c  c", ["▁c", "▁▁", "c"]),
        ("a</s>c", ["▁a", "</s>", "▁c"]),
        ("aé", ["▁a", "<0xC3>", "<0xA9>"]),
    ],
)
def test_sentencepiece_merges_by_score_and_falls_back_to_bytes(text: str, tokens: list[str]) -> None:
    converted = convert(tiny_sentencepiece(), "x")
    encoded = converted.tokenizer.encode(text)
    assert encoded.tokens == ["<s>", *tokens]
    assert converted.tokenizer.decode(encoded.ids[1:], skip_special_tokens=False).replace("</s> ", "</s>") == text


def test_sentencepiece_without_the_space_in_front() -> None:
    backend = convert(tiny_sentencepiece(add_space_prefix=False), "x").tokenizer
    assert backend.encode("a c").tokens == ["<s>", "a", "▁c"]
    assert backend.decode(backend.encode(" c").ids) == " c"


def test_ids_without_a_text_of_their_own_keep_their_numbers() -> None:
    values = tiny_byte_level("gpt-2", [("", NORMAL), ("a", NORMAL), ("last", NORMAL)])
    count = len(values["tokenizer.ggml.tokens"])
    backend = convert(values, "x").tokenizer
    assert backend.get_vocab_size() == count
    assert backend.token_to_id("last") == count - 1
    assert backend.token_to_id("a") < count - 3


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (tiny_byte_level("martian"), "unsupported pre-tokenizer 'martian'; supported are .*llama-bpe.*qwen2.*smollm"),
        (metadata("bert", ["a"]), "unsupported tokenizer 'bert'; supported are gpt2 and llama"),
        ({}, "no vocabulary"),
        (metadata("llama", ["a"]), "no scores"),
    ],
)
def test_what_is_not_supported_is_named(values: dict[str, Any], message: str) -> None:
    with pytest.raises(TokenizerError, match=message):
        convert(values, "x.gguf")


def test_the_tiny_sentencepiece_family_is_like_the_converted_one() -> None:
    """The tests of other files lean on the hand-made one."""
    assert convert(tiny_sentencepiece(), "x").tokenizer.decoder.__getstate__() == sentencepiece().decoder.__getstate__()
