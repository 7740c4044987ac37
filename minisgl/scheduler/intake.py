"""Which requests can be served at all. The others are refused, each alone and at once."""

from __future__ import annotations

from minisgl.core import EngineInfo, Int32, SamplingParams
from minisgl.message import ErrorInfo


def length_limit(tokens: Int32, params: SamplingParams, info: EngineInfo) -> int | ErrorInfo:
    """The length, prompt included, at which a request with prompt ``tokens`` ends; or why it cannot be served.

    The last token of an output is never computed, so the KV cache must hold all but one. A request without
    ``max_tokens`` ends where the context or the whole KV cache ends; one with it is served in full or not at all.
    """
    prompt, capacity = len(tokens), info.num_pages * info.page_size
    if prompt == 0:
        return ErrorInfo.invalid_request("The prompt is empty; it must have at least one token.", "prompt")
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high >= info.vocab_size:
        wrong = low if low < 0 else high
        return ErrorInfo.invalid_request(
            f"Token id {wrong} is outside the vocabulary (0 to {info.vocab_size - 1}).", param="prompt"
        )
    if prompt + 1 > info.max_seq_len:
        return ErrorInfo.invalid_request(
            f"The prompt has {prompt} tokens, but the context of this model is {info.max_seq_len} tokens and must "
            "leave room for at least one of output; shorten the prompt.",
            "prompt",
            code="context_length_exceeded",
        )
    pages = f"{info.num_pages} pages of {info.page_size} tokens"
    if prompt > capacity:
        return ErrorInfo.invalid_request(
            f"The prompt has {prompt} tokens, but the KV cache of this server holds {capacity} ({pages}); "
            "shorten the prompt or start the server with more pages.",
            "prompt",
            code="context_length_exceeded",
        )
    if params.max_tokens is None:
        return min(info.max_seq_len, capacity + 1)
    total = prompt + params.max_tokens
    if total > info.max_seq_len:
        return ErrorInfo.invalid_request(
            f"The context of this model is {info.max_seq_len} tokens, but the prompt has {prompt} and max_tokens is "
            f"{params.max_tokens}: {total} in all; lower max_tokens or shorten the prompt.",
            "max_tokens",
            code="context_length_exceeded",
        )
    if total - 1 > capacity:
        return ErrorInfo.invalid_request(
            f"The KV cache of this server holds {capacity} tokens ({pages}), but the prompt has {prompt} and "
            f"max_tokens is {params.max_tokens}: {total} in all; lower max_tokens or start the server with more pages.",
            "max_tokens",
            code="context_length_exceeded",
        )
    return total


def queue_full(waiting: int) -> ErrorInfo:
    return ErrorInfo(
        message=f"The server is busy: {waiting} requests are waiting already; try again later.",
        status=503,
        type="server_error",
        code="queue_full",
    )
