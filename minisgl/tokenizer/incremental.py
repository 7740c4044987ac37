"""Text from token ids that arrive one at a time: joined, it is exactly the one-shot decode of all of them.

Decoding a window of the last few ids and keeping the difference is the usual way, and wrong at the edges: a broken
character is shown too early or never, and the first token of a text has rules of its own. Here each family of decoders
is taken for what it does, so the work is one table look-up per token.

    byte level     a token is some bytes; the text is their UTF-8, broken sequences replaced (U+FFFD)
    pieces         a token is some text, which depends only on whether it is the first (Metaspace, WordPiece, Strip);
                   tokens like <0xE2> are bytes, and a run of them is text if the whole run is valid, else one U+FFFD
                   for each byte: so a run is shown when it has ended

A decoder of any other kind (one that looks at the last token, say) is refused when the tokenizer is loaded.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import tokenizers

from .errors import TokenizerError

_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_PIECE_DECODERS = ("Replace", "ByteFallback", "Fuse", "Strip", "Metaspace", "WordPiece")
_ANCHOR = "a"


class TextStream(Protocol):
    """The text of one request."""

    def push(self, token_id: int) -> str:
        """The text that is certain now, after one more token; often empty."""
        ...

    def peek(self) -> str:
        """Text that is complete and would be shown if this were the end, but may still turn out broken."""
        ...

    def flush(self) -> str:
        """The rest, at the end: what is incomplete comes as replacement characters."""
        ...


def text_streams(backend: tokenizers.Tokenizer) -> Callable[[bool], TextStream]:
    """What opens a stream: a function of ``skip_special_tokens``. Raises :class:`TokenizerError`."""
    special = {i for i, token in backend.get_added_tokens_decoder().items() if token.special}
    steps = list(_steps(backend))
    kinds = [step["type"] for step in steps]
    if "ByteLevel" in kinds:
        if set(kinds) - {"ByteLevel", "Fuse"} or kinds.count("ByteLevel") > 1:
            raise TokenizerError(_refusal(kinds))
        byte_tables = {skip: _ByteTable(backend, special if skip else set()) for skip in (True, False)}
        return lambda skip: _ByteStream(byte_tables[skip])
    _check_pieces(steps)
    decode = backend.decoder.decode if backend.decoder is not None else " ".join
    if decode([_ANCHOR]) != _ANCHOR:
        raise TokenizerError(_refusal(kinds))
    fallback = "ByteFallback" in kinds
    piece_tables = {skip: _PieceTable(backend, special if skip else set(), decode, fallback) for skip in (True, False)}
    return lambda skip: _PieceStream(piece_tables[skip])


def _steps(backend: tokenizers.Tokenizer) -> Iterator[dict[str, Any]]:
    """The decoder as a flat list of its steps, each as in tokenizer.json."""
    if backend.decoder is None:
        return
    step = json.loads(backend.decoder.__getstate__())
    yield from step["decoders"] if step["type"] == "Sequence" else [step]


def _check_pieces(steps: list[dict[str, Any]]) -> None:
    kinds = [step["type"] for step in steps]
    fused = False
    for step in steps:
        kind = step["type"]
        fused = fused or kind == "Fuse"
        # After Fuse a step sees the whole text, and must not look further than one character of it.
        reaches = kind == "Replace" and fused and len(step["pattern"].get("String", "xx")) != 1
        strips_end = kind == "Strip" and step["stop"] != 0
        if kind not in _PIECE_DECODERS or reaches or strips_end:
            raise TokenizerError(_refusal(kinds))


def _refusal(kinds: list[str]) -> str:
    return (
        f"The tokenizer's decoder ({', '.join(kinds)}) cannot be streamed exactly; supported are ByteLevel and "
        f"sequences of {', '.join(_PIECE_DECODERS)} that do not look ahead."
    )


def byte_alphabet() -> dict[str, int]:
    """Byte-level BPE's letters for the 256 bytes: printable ones are themselves, the others U+0100 and upwards."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    letters = {chr(byte): byte for byte in printable}
    return letters | {chr(256 + n): byte for n, byte in enumerate(others)}


class _ByteTable(dict[int, bytes]):
    """Token id -> its bytes, filled as tokens occur; none for ``hidden`` ids and those that do not exist."""

    _ALPHABET = byte_alphabet()

    def __init__(self, backend: tokenizers.Tokenizer, hidden: set[int]) -> None:
        super().__init__()
        self._backend = backend
        self._hidden = hidden

    def __missing__(self, token_id: int) -> bytes:
        token = None if token_id in self._hidden else self._backend.id_to_token(token_id)
        if token is None:
            piece = b""
        elif all(char in self._ALPHABET for char in token):
            piece = bytes(self._ALPHABET[char] for char in token)
        else:
            piece = token.encode()  # an added token, written as it is
        self[token_id] = piece
        return piece


class _ByteStream:
    __slots__ = ("_decoder", "_table")

    def __init__(self, table: _ByteTable) -> None:
        self._table = table
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        return self._decoder.decode(self._table[token_id])

    def peek(self) -> str:
        return ""  # what is complete has been shown

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class _PieceTable(dict[int, tuple[str, str | None] | None]):
    """Token id -> (token, its text anywhere but at the start; None for a byte), or None for what is never shown."""

    def __init__(
        self, backend: tokenizers.Tokenizer, hidden: set[int], decode: Callable[[list[str]], str], byte_fallback: bool
    ) -> None:
        super().__init__()
        self._backend = backend
        self._hidden = hidden
        self._byte_fallback = byte_fallback
        self.decode = decode

    def __missing__(self, token_id: int) -> tuple[str, str | None] | None:
        token = None if token_id in self._hidden else self._backend.id_to_token(token_id)
        entry: tuple[str, str | None] | None = None
        if token is not None:
            is_byte = self._byte_fallback and _BYTE_TOKEN.fullmatch(token)
            entry = token, None if is_byte else self.continued([token])
        self[token_id] = entry
        return entry

    def continued(self, tokens: list[str]) -> str:
        """The text of ``tokens`` after some other text."""
        return self.decode([_ANCHOR, *tokens])[len(_ANCHOR) :]


class _PieceStream:
    __slots__ = ("_lead", "_run", "_table")

    def __init__(self, table: _PieceTable) -> None:
        self._table = table
        # The tokens so far, for as long as they come to no text: the one that brings the first is still at the start.
        self._lead: list[str] | None = []
        self._run: list[str] = []  # byte tokens since the last other one

    def push(self, token_id: int) -> str:
        entry = self._table[token_id]
        if entry is None:
            return ""
        token, text = entry
        if text is None:
            self._run.append(token)
            return ""
        if self._lead is not None:
            self._lead += [*self._run, token]
            self._run = []
            text = self._table.decode(self._lead)
            if text:
                self._lead = None
            return text
        return self.flush() + text if self._run else text

    def peek(self) -> str:
        if not self._run:
            return ""
        try:
            bytes(int(token[3:5], 16) for token in self._run).decode()
        except UnicodeDecodeError:
            return ""
        return self._rest()

    def flush(self) -> str:
        text = self._rest()
        self._run = []
        return text

    def _rest(self) -> str:
        if not self._run:
            return ""
        return self._table.continued(self._run) if self._lead is None else self._table.decode(self._lead + self._run)
