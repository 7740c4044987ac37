"""The JSON that clients get, as structs that msgspec encodes in a microsecond: one is made for every streamed token."""

from __future__ import annotations

import msgspec
from msgspec import UNSET, UnsetType

from minisgl.core import FinishReason


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int


class Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class ChatMessage(msgspec.Struct):
    content: str
    role: str = "assistant"
    refusal: None = None


class ChatChoice(msgspec.Struct):
    index: int
    message: ChatMessage
    finish_reason: FinishReason
    logprobs: None = None


class ChatCompletion(msgspec.Struct, kw_only=True):
    id: str
    object: str = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class ChatDelta(msgspec.Struct):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct):
    index: int
    delta: ChatDelta
    finish_reason: FinishReason | None = None
    logprobs: None = None


class ChatChunk(msgspec.Struct, kw_only=True):
    """``usage`` is absent unless the client asked for it, then null in all chunks but the last."""

    id: str
    object: str = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET


class CompletionChoice(msgspec.Struct):
    index: int
    text: str
    finish_reason: FinishReason | None = None
    logprobs: None = None


class Completion(msgspec.Struct, kw_only=True):
    """Both the whole answer and a chunk of a streamed one; ``usage`` as in :class:`ChatChunk`."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET


class Generated(msgspec.Struct):
    """The answer of /generate. In a stream ``text`` and ``token_ids`` are what is new, ``usage`` is in the last one."""

    id: str
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    usage: Usage | UnsetType | None = UNSET


class Model(msgspec.Struct):
    """``max_model_len`` is no field of OpenAI's, but what other servers call the longest prompt and output together."""

    id: str
    created: int
    max_model_len: int
    object: str = "model"
    owned_by: str = "minisgl"


class ModelList(msgspec.Struct):
    data: list[Model]
    object: str = "list"


class Health(msgspec.Struct):
    """``requests`` are those under way in the API server that was asked."""

    requests: int
    status: str = "ok"
