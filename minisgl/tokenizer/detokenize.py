"""Answers on their way out: token ids become text, and stop strings end a request."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from minisgl.message import (
    AbortBackendMsg,
    DetokenizeBatch,
    DetokenizeMsg,
    ErrorInfo,
    TextParams,
    UserReply,
    unpack_ids,
)

from .incremental import TextStream
from .load import Tokenizer
from .stop import StopMatcher

logger = logging.getLogger(__name__)


class Detokenizer:
    """The text of all running requests; used by the detokenizer process and by the offline class alike.

    A request is known from its first message (the one with ``text``) to its end, whichever comes first: the scheduler
    ends it, or a stop string does. What arrives later for it is dropped.

    - Text that may still change (half a character, the beginning of a stop string) is held back, and comes at the
      latest with the end. A reply has text or is the last one: never an empty chunk on the way.
    - The end token's text is not shown, nor is a stop string, unless ``include_stop_str_in_output`` asks for both (a
      special end token needs ``skip_special_tokens`` off as well).
    - Where a stop string is complete, the tokens up to and including the one that completed it are counted.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._requests: dict[int, _Request] = {}

    def __len__(self) -> int:
        """How many requests it keeps state of."""
        return len(self._requests)

    def process(self, batch: DetokenizeBatch) -> tuple[list[UserReply], list[AbortBackendMsg]]:
        """What one step produced: the replies, and messages to the scheduler about requests that a stop string ended.

        Never raises: a request that cannot be decoded is answered with an error and aborted, alone.
        """
        replies: list[UserReply] = []
        aborts: list[AbortBackendMsg] = []
        for message in batch.items:
            try:
                reply = self._process(message)
            except Exception as error:
                logger.exception("Decoding the output of request %d failed.", message.uid)
                self._requests.pop(message.uid, None)
                info = ErrorInfo(message=f"The output could not be decoded ({type(error).__name__}).")
                reply = UserReply(uid=message.uid, finish="error", error=info)
            if reply is None:
                continue
            replies.append(reply)
            if reply.finish is not None and message.finish is None:
                aborts.append(AbortBackendMsg(uid=message.uid))
        return replies, aborts

    def _process(self, message: DetokenizeMsg) -> UserReply | None:
        uid = message.uid
        request = self._requests.get(uid)
        if request is None and message.text is not None:
            stream = self._tokenizer.stream(message.text.skip_special_tokens)
            request = self._requests[uid] = _Request(message, message.text, stream)
        if message.finish is not None:
            self._requests.pop(uid, None)
        if message.finish == "abort":
            return None
        if request is None:
            # Late, after a stop string. Only an error is passed on: should it be the first that is heard of a request,
            # dropping it would leave a client waiting, and for one that has ended nobody listens.
            return UserReply(uid=uid, finish="error", error=message.error) if message.finish == "error" else None
        reply = request.advance(message)
        if reply is not None and reply.finish is not None:
            self._requests.pop(uid, None)
        return reply


class _Request:
    __slots__ = ("_cached_tokens", "_ids", "_include_stop", "_matcher", "_prompt_tokens", "_stream")

    def __init__(self, first: DetokenizeMsg, text: TextParams, stream: TextStream) -> None:
        self._stream = stream
        self._matcher = StopMatcher(text.stop, text.include_stop_str_in_output) if text.stop else None
        self._include_stop = text.include_stop_str_in_output
        self._prompt_tokens = first.prompt_tokens
        self._cached_tokens = first.cached_tokens
        self._ids = b""  # of tokens whose text is held back

    def advance(self, message: DetokenizeMsg) -> UserReply | None:
        """The reply to new tokens, None where they bring no text yet."""
        data = message.ids
        # One token is the rule, and numpy takes longer to unpack it than all the rest here.
        ids = [int.from_bytes(data, "little", signed=True)] if len(data) == 4 else unpack_ids(data).tolist()
        hide_last = message.finish == "stop" and not self._include_stop
        text, used = self._push(ids[:-1] if hide_last else ids)
        finish = message.finish
        if self._matched:
            finish = "stop"
        elif finish is not None:
            text += self._end()
            used = len(ids)
            if self._matched and finish == "length":
                finish = "stop"
        else:
            used = len(ids)
        self._ids += data[: 4 * used]
        if not text and finish is None:
            return None
        reply = UserReply(
            uid=message.uid,
            text=text,
            ids=self._ids,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
            completion_tokens=message.completion_tokens - (len(ids) - used),
            finish=finish,
            error=message.error,
        )
        self._ids = b""
        return reply

    @property
    def _matched(self) -> bool:
        return self._matcher is not None and self._matcher.matched

    def _push(self, ids: Iterable[int]) -> tuple[str, int]:
        """The text that may be shown, and after how many ids a stop string was complete (if one was)."""
        stream, matcher = self._stream, self._matcher
        text = ""
        used = 0
        for token_id in ids:
            used += 1
            new = stream.push(token_id)
            if matcher is None:
                text += new
                continue
            text += matcher.feed(new)
            if not matcher.matched and (maybe := stream.peek()):
                text += matcher.feed_if_match(maybe)
            if matcher.matched:
                break
        return text, used

    def _end(self) -> str:
        """All that was held back."""
        rest = self._stream.flush()
        if self._matcher is None:
            return rest
        rest = self._matcher.feed(rest)
        return rest if self._matcher.matched else rest + self._matcher.flush()
