"""The typed messages of the request path, one tagged union per receiver.

    API server --TokenizeMsg/AbortMsg--> tokenizer --UserMsg/AbortBackendMsg--> scheduler
    API server <-------ReplyBatch------- detokenizer <-----DetokenizeBatch----- scheduler

Token ids travel as packed little-endian int32 (:func:`pack_ids`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from minisgl.core import FinishReason, Int32, SamplingParams


def pack_ids(ids: Sequence[int] | Int32) -> bytes:
    """Token ids as packed little-endian int32."""
    return np.asarray(ids, dtype="<i4").tobytes()


def unpack_ids(data: bytes) -> Int32:
    """The inverse of :func:`pack_ids`: a read-only view, int32."""
    return np.frombuffer(data, dtype="<i4")


class Message(msgspec.Struct, tag=True, tag_field="kind", array_like=True, kw_only=True, gc=False):
    """Base of all messages: tagged with the class name, encoded as a msgpack array."""


class TextPrompt(Message):
    text: str


class IdsPrompt(Message):
    ids: bytes


class ChatPrompt(Message):
    """Messages for the chat template, in OpenAI's shape; content parts are already joined to strings."""

    messages: list[dict[str, Any]]
    template_kwargs: dict[str, Any] = {}


Prompt = TextPrompt | IdsPrompt | ChatPrompt


class TokenizeMsg(Message):
    """A request on its way in. ``uid`` says which API server owns it: ``uid % frontend_count``."""

    uid: int
    prompt: Prompt
    params: SamplingParams


class AbortMsg(Message):
    """The client has gone. Goes to the same tokenizer worker as the request, so it can never overtake it."""

    uid: int


class UserMsg(Message):
    """A tokenised request. ``stop_token_ids`` already holds the end tokens of the model unless they are ignored."""

    uid: int
    input_ids: bytes
    params: SamplingParams
    stop_token_ids: tuple[int, ...] = ()


class AbortBackendMsg(Message):
    """Drop this request. Unknown uids (it has just finished) are ignored."""

    uid: int


class TextParams(Message):
    """What the detokenizer must know of a request; rides on the request's first DetokenizeMsg."""

    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True


class ErrorInfo(Message):
    """A request that failed alone. ``code`` and ``param`` as in OpenAI's error object, ``status`` the HTTP status."""

    message: str
    status: int = 500
    type: str = "server_error"
    code: str | None = None
    param: str | None = None

    @classmethod
    def invalid_request(
        cls, message: str, param: str | None = None, *, code: str | None = None, status: int = 400
    ) -> ErrorInfo:
        """The client's mistake; ``param`` is the field as the client wrote it."""
        return cls(message=message, status=status, type="invalid_request_error", code=code, param=param)


class DetokenizeMsg(Message):
    """New tokens of one request.

    ``text`` is set on the request's first message. ``finish`` is set on its last one: "stop" means that the last of
    ``ids`` is an end token (counted, not shown); "abort" means nobody waits for an answer, forget the uid; "error"
    comes with ``error``. ``completion_tokens`` counts all tokens so far, these included.
    """

    uid: int
    ids: bytes = b""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    finish: FinishReason | None = None
    text: TextParams | None = None
    error: ErrorInfo | None = None


class DetokenizeBatch(Message):
    """All that one step produced."""

    items: list[DetokenizeMsg]


class UserReply(Message):
    """New text of one request; the last one has ``finish``. ``ids`` are the tokens behind the text, as they arrived."""

    uid: int
    text: str = ""
    ids: bytes = b""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    finish: FinishReason | None = None
    error: ErrorInfo | None = None


class ReplyBatch(Message):
    """All replies of one step for one API server."""

    items: list[UserReply]


class WorkerDied(Message):
    """The launcher's word to the API servers that a worker process is gone: fail what is in flight."""

    name: str
    exitcode: int


TokenizerMsg = TokenizeMsg | AbortMsg
BackendMsg = UserMsg | AbortBackendMsg
FrontendMsg = ReplyBatch | WorkerDied
