"""How an answer looks on each endpoint, whole and in chunks."""

from __future__ import annotations

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from msgspec import UNSET

from minisgl.core import FinishReason
from minisgl.message import UserReply, unpack_ids

from .responses import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatMessage,
    Completion,
    CompletionChoice,
    Generated,
    PromptTokensDetails,
    Usage,
)


@dataclass(slots=True)
class Output:
    """One choice as far as it has come."""

    texts: list[str] = field(default_factory=list)
    ids: list[bytes] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    finish: FinishReason | None = None

    def add(self, reply: UserReply) -> None:
        self.texts.append(reply.text)
        self.ids.append(reply.ids)
        self.prompt_tokens = reply.prompt_tokens
        self.cached_tokens = reply.cached_tokens
        self.completion_tokens = reply.completion_tokens
        self.finish = reply.finish

    def take(self) -> tuple[str, list[int]]:
        """Text and token ids since the last call."""
        text, ids = "".join(self.texts), unpack_ids(b"".join(self.ids)).tolist()
        self.texts.clear()
        self.ids.clear()
        return text, ids


def count_usage(outputs: Sequence[Output], n: int) -> Usage:
    """Tokens of a whole request with ``n`` choices for each prompt: a prompt counts once, whatever n is."""
    prompt = sum(output.prompt_tokens for output in outputs[::n])
    completion = sum(output.completion_tokens for output in outputs)
    cached = sum(output.cached_tokens for output in outputs[::n])
    return Usage(prompt, completion, prompt + completion, PromptTokensDetails(cached))


class Format(ABC):
    """The shape of one answer: its id and time are fixed when it is made.

    A streamed choice is ``start``, any number of ``chunk``, ``end``; after the last choice comes ``usage_chunk`` if the
    client asked for it. What returns None is left out.
    """

    prefix: str

    def __init__(self, model: str, include_usage: bool = False) -> None:
        self.id = self.prefix + secrets.token_hex(12)
        self._head: dict[str, Any] = {"id": self.id, "created": int(time.time()), "model": model}
        self.include_usage = include_usage
        self._usage = None if include_usage else UNSET

    @abstractmethod
    def whole(self, outputs: Sequence[Output], usage: Usage) -> msgspec.Struct: ...

    def start(self, index: int) -> msgspec.Struct | None:
        return None

    @abstractmethod
    def chunk(self, index: int, output: Output) -> msgspec.Struct | None:
        """What is new in ``output``; None when no text is."""

    @abstractmethod
    def end(self, index: int, output: Output) -> msgspec.Struct: ...

    def usage_chunk(self, usage: Usage) -> msgspec.Struct | None:
        return None


class ChatFormat(Format):
    prefix = "chatcmpl-"

    def whole(self, outputs: Sequence[Output], usage: Usage) -> ChatCompletion:
        choices = [ChatChoice(i, ChatMessage(o.take()[0]), o.finish or "stop") for i, o in enumerate(outputs)]
        return ChatCompletion(**self._head, choices=choices, usage=usage)

    def start(self, index: int) -> ChatChunk:
        return self._make(ChatChunkChoice(index, ChatDelta(role="assistant")))

    def chunk(self, index: int, output: Output) -> ChatChunk | None:
        text, _ = output.take()
        return self._make(ChatChunkChoice(index, ChatDelta(content=text))) if text else None

    def end(self, index: int, output: Output) -> ChatChunk:
        return self._make(ChatChunkChoice(index, ChatDelta(), output.finish))

    def usage_chunk(self, usage: Usage) -> ChatChunk | None:
        return ChatChunk(**self._head, choices=[], usage=usage) if self.include_usage else None

    def _make(self, choice: ChatChunkChoice) -> ChatChunk:
        return ChatChunk(**self._head, choices=[choice], usage=self._usage)


class CompletionFormat(Format):
    prefix = "cmpl-"

    def whole(self, outputs: Sequence[Output], usage: Usage) -> Completion:
        choices = [CompletionChoice(i, o.take()[0], o.finish) for i, o in enumerate(outputs)]
        return Completion(**self._head, choices=choices, usage=usage)

    def chunk(self, index: int, output: Output) -> Completion | None:
        text, _ = output.take()
        return self._make(CompletionChoice(index, text)) if text else None

    def end(self, index: int, output: Output) -> Completion:
        return self._make(CompletionChoice(index, "", output.finish))

    def usage_chunk(self, usage: Usage) -> Completion | None:
        return Completion(**self._head, choices=[], usage=usage) if self.include_usage else None

    def _make(self, choice: CompletionChoice) -> Completion:
        return Completion(**self._head, choices=[choice], usage=self._usage)


class GenerateFormat(Format):
    """One prompt, one choice. Token ids whose text is not complete yet travel with the text that completes it."""

    prefix = "gen-"

    def whole(self, outputs: Sequence[Output], usage: Usage) -> Generated:
        text, ids = outputs[0].take()
        return Generated(self.id, text, ids, outputs[0].finish, usage)

    def chunk(self, index: int, output: Output) -> Generated | None:
        return Generated(self.id, *output.take()) if any(output.texts) else None

    def end(self, index: int, output: Output) -> Generated:
        return Generated(self.id, *output.take(), output.finish, count_usage([output], 1))
