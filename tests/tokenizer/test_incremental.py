"""The joined stream is the one-shot decode, for every family of tokenizers and any ids."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_tokenizers import FAMILIES
from tokenizers import decoders, models

from minisgl.tokenizer import Tokenizer, TokenizerError
from minisgl.tokenizer.incremental import byte_alphabet, text_streams


def streamed(tokenizer: Tokenizer, ids: Sequence[int], skip: bool) -> str:
    stream = tokenizer.stream(skip)
    return "".join([*(stream.push(i) for i in ids), stream.flush()])


def ids_of(tokenizer: Tokenizer) -> st.SearchStrategy[list[int]]:
    # Beyond the vocabulary too: the one-shot decode leaves such ids out.
    return st.lists(st.integers(0, tokenizer.vocab_size + 2), max_size=40)


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=120, deadline=None)
@given(data=st.data())
def test_any_ids_stream_to_their_one_shot_decode(
    families: dict[str, Tokenizer], family: str, data: st.DataObject
) -> None:
    tokenizer = families[family]
    ids, skip = data.draw(ids_of(tokenizer)), data.draw(st.booleans())
    assert streamed(tokenizer, ids, skip) == tokenizer.decode(ids, skip)


@pytest.mark.parametrize(
    "family", ["byte_level", "sentencepiece", "sentencepiece_without_prefix", "metaspace_with_bytes"]
)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_bytes_stream_to_their_one_shot_decode(
    families: dict[str, Tokenizer], family: str, data: st.DataObject
) -> None:
    """Single bytes only, valid and broken UTF-8 mixed: what random ids hit too rarely."""
    tokenizer = families[family]
    parts = st.one_of(
        st.text(max_size=3).map(str.encode), st.binary(max_size=3), st.sampled_from([b"\xf0\x9f", b"\xe2\x82"])
    )
    raw = b"".join(data.draw(st.lists(parts, max_size=8)))
    letters = {byte: letter for letter, byte in byte_alphabet().items()}
    names = [letters[b] if family == "byte_level" else f"<0x{b:02X}>" for b in raw]
    ids = [i for name in names if (i := tokenizer._backend.token_to_id(name)) is not None]
    assert len(ids) == len(raw)
    assert streamed(tokenizer, ids, True) == tokenizer.decode(ids, True)


@settings(max_examples=150, deadline=None)
@given(text=st.text(max_size=40))
def test_any_text_comes_back_from_byte_level_bpe(byte_tokenizer: Tokenizer, text: str) -> None:
    ids = byte_tokenizer.encode(text)
    assert streamed(byte_tokenizer, ids, False) == byte_tokenizer.decode(ids, False)


def test_a_character_in_two_tokens_comes_whole(byte_tokenizer: Tokenizer) -> None:
    letters = {byte: letter for letter, byte in byte_alphabet().items()}
    fire = [byte_tokenizer._backend.token_to_id(letters[b]) for b in b"\xf0\x9f\x94\xa5"]
    stream = byte_tokenizer.stream()
    assert [stream.push(i) for i in fire] == ["", "", "", "🔥"]


def test_sentencepiece_keeps_the_spaces_between_words(families: dict[str, Tokenizer]) -> None:
    tokenizer = families["sentencepiece"]
    stream = tokenizer.stream()
    ids = [tokenizer._backend.token_to_id(t) for t in ("▁Hello", "▁world")]
    assert [stream.push(i) for i in ids] == ["Hello", " world"]


def test_a_broken_character_is_shown_as_soon_as_it_is_certain(byte_tokenizer: Tokenizer) -> None:
    letters = {byte: letter for letter, byte in byte_alphabet().items()}
    broken, letter = (byte_tokenizer._backend.token_to_id(letters[b]) for b in (0xF0, ord("x")))
    stream = byte_tokenizer.stream()
    assert [stream.push(broken), stream.push(letter), stream.push(broken), stream.flush()] == [
        "",
        "\ufffdx",
        "",
        "\ufffd",
    ]


def test_a_run_of_byte_tokens_is_complete_but_not_certain_before_its_end(families: dict[str, Tokenizer]) -> None:
    tokenizer = families["sentencepiece"]
    euro = [tokenizer._backend.token_to_id(t) for t in ("▁a", "<0xE2>", "<0x82>", "<0xAC>")]
    bad, after = (tokenizer._backend.token_to_id(t) for t in ("<0xFF>", "▁b"))
    stream = tokenizer.stream()
    assert [stream.push(i) for i in euro] == ["a", "", "", ""]
    assert stream.peek() == "€"
    assert stream.push(bad) == ""
    assert stream.peek() == ""
    assert stream.push(after) == "\ufffd" * 4 + " b"


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.BPEDecoder(),
        decoders.CTC(),
        decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 0, 1)]),
        decoders.Sequence([decoders.Fuse(), decoders.Replace("ab", "c")]),
        decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)]),
    ],
)
def test_a_decoder_that_cannot_be_streamed_exactly_is_refused(decoder: decoders.Decoder) -> None:
    backend = tokenizers.Tokenizer(models.BPE(vocab={"a": 0}, merges=[]))
    backend.decoder = decoder
    with pytest.raises(TokenizerError, match="cannot be streamed exactly; supported are ByteLevel"):
        text_streams(backend)


@pytest.mark.model
@settings(max_examples=60, deadline=None)
@given(ids=st.lists(st.integers(0, 49151), max_size=60), skip=st.booleans())
def test_the_default_model_streams_exactly(default_tokenizer: Tokenizer, ids: list[int], skip: bool) -> None:
    assert streamed(default_tokenizer, ids, skip) == default_tokenizer.decode(ids, skip)
