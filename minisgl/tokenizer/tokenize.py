"""Requests on their way in: text and chats become token ids."""

from __future__ import annotations

import logging

from minisgl.message import (
    ChatPrompt,
    ErrorInfo,
    Prompt,
    TextPrompt,
    TokenizeMsg,
    UserMsg,
    UserReply,
    pack_ids,
    unpack_ids,
)

from .chat_template import ChatTemplateError
from .load import Tokenizer

logger = logging.getLogger(__name__)


def tokenize_request(tokenizer: Tokenizer, message: TokenizeMsg, max_seq_len: int | None = None) -> UserMsg | UserReply:
    """The request for the scheduler, or the reply (finish "error") to one that has no prompt. Never raises.

    Ids that the client sends are passed on as they are; whether the model has them is the scheduler's to check, as is
    the length of the prompt. ``max_seq_len`` spares the work for texts that are too long by their length alone.
    """
    try:
        ids = _prompt_ids(tokenizer, message.prompt, max_seq_len)
        packed = pack_ids(ids)
    except _PromptError as error:
        return UserReply(uid=message.uid, finish="error", error=error.info)
    except Exception as error:
        logger.exception("Tokenizing the prompt of request %d failed.", message.uid)
        info = ErrorInfo(message=f"The prompt could not be tokenized ({type(error).__name__}).")
        return UserReply(uid=message.uid, finish="error", error=info)
    ends = set(message.params.stop_token_ids)
    if not message.params.ignore_eos:
        ends |= tokenizer.end_token_ids
    return UserMsg(uid=message.uid, input_ids=packed, params=message.params, stop_token_ids=tuple(sorted(ends)))


class _PromptError(Exception):
    def __init__(self, message: str, param: str, code: str | None = None) -> None:
        super().__init__(message)
        self.info = ErrorInfo.invalid_request(message, param, code=code)


def _prompt_ids(tokenizer: Tokenizer, prompt: Prompt, max_seq_len: int | None) -> list[int]:
    if isinstance(prompt, ChatPrompt):
        try:
            text = tokenizer.render_chat(prompt.messages, **prompt.template_kwargs)
        except ChatTemplateError as error:
            raise _PromptError(str(error), "messages") from error
        _check_length(tokenizer, text, max_seq_len, "messages")
        _check_characters(text, "messages")
        ids, param = tokenizer.encode(text, add_special_tokens=False), "messages"
    elif isinstance(prompt, TextPrompt):
        _check_length(tokenizer, prompt.text, max_seq_len, "prompt")
        _check_characters(prompt.text, "prompt")
        ids, param = tokenizer.encode(prompt.text), "prompt"
        # The client may have applied the chat template itself, and that has written BOS already.
        if tokenizer.adds_bos and ids[1:2] == [tokenizer.bos_token_id]:
            del ids[0]
    else:
        ids, param = unpack_ids(prompt.ids).tolist(), "prompt"
    if not ids:
        raise _PromptError("The prompt is empty: it has no tokens, and this model starts with none of its own.", param)
    return ids


def _check_length(tokenizer: Tokenizer, text: str, max_seq_len: int | None, param: str) -> None:
    if max_seq_len is None or len(text) <= max_seq_len:
        return
    least = tokenizer.min_tokens(text)
    if least > max_seq_len:
        raise _PromptError(
            f"This model's maximum context length is {max_seq_len} tokens, but the prompt has at least {least} tokens.",
            param,
            code="context_length_exceeded",
        )


def _check_characters(text: str, param: str) -> None:
    """Half a surrogate pair is a character for Python and for JSON, but not for UTF-8 nor for any tokenizer."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"U+{ord(text[error.start]):04X}"
        raise _PromptError(f"The prompt cannot be tokenized: it has a lone surrogate ({half}).", param) from None
