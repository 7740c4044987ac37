from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_stop import oracle
from tiny_tokenizers import FAMILIES

from minisgl.core import FinishReason
from minisgl.message import (
    AbortBackendMsg,
    DetokenizeBatch,
    DetokenizeMsg,
    ErrorInfo,
    TextParams,
    UserReply,
    pack_ids,
    unpack_ids,
)
from minisgl.tokenizer import Detokenizer, Tokenizer


class Client:
    """One request as the scheduler tells it: each call of ``say`` is one step."""

    def __init__(self, tokenizer: Tokenizer, text: TextParams | None = None, uid: int = 7) -> None:
        self.detokenizer = Detokenizer(tokenizer)
        self.uid = uid
        self.text: TextParams | None = text or TextParams()
        self.count = 0
        self.replies: list[UserReply] = []
        self.aborts: list[int] = []

    def say(self, ids: Sequence[int] = (), finish: FinishReason | None = None, error: ErrorInfo | None = None) -> None:
        self.count += len(ids)
        first = self.text is not None
        message = DetokenizeMsg(
            uid=self.uid,
            ids=pack_ids(ids),
            completion_tokens=self.count,
            prompt_tokens=11 if first else 0,
            cached_tokens=5 if first else 0,
            finish=finish,
            text=self.text,
            error=error,
        )
        self.text = None
        replies, aborts = self.detokenizer.process(DetokenizeBatch(items=[message]))
        self.replies += replies
        assert all(isinstance(abort, AbortBackendMsg) for abort in aborts)
        self.aborts += [abort.uid for abort in aborts]

    @property
    def shown(self) -> str:
        return "".join(reply.text for reply in self.replies)

    @property
    def ids(self) -> list[int]:
        return [i for reply in self.replies for i in unpack_ids(reply.ids).tolist()]


def ids_for(tokenizer: Tokenizer, *tokens: str) -> list[int]:
    ids = [tokenizer._backend.token_to_id(token) for token in tokens]
    assert None not in ids
    return ids


def test_text_arrives_and_the_last_reply_says_why_it_ended(byte_tokenizer: Tokenizer) -> None:
    client = Client(byte_tokenizer)
    ids = byte_tokenizer.encode("Hello world")
    for token in ids[:-1]:
        client.say([token])
    client.say([ids[-1]], "length")
    assert client.shown == "Hello world"
    assert client.ids == ids
    last = client.replies[-1]
    assert (last.finish, last.completion_tokens, last.prompt_tokens, last.cached_tokens) == ("length", len(ids), 11, 5)
    assert len(client.detokenizer) == 0
    assert client.aborts == []


def test_every_reply_carries_the_prompt_tokens_of_the_first_message(byte_tokenizer: Tokenizer) -> None:
    client = Client(byte_tokenizer)
    for token in byte_tokenizer.encode("abc"):
        client.say([token])
    assert [(r.prompt_tokens, r.cached_tokens) for r in client.replies] == [(11, 5)] * len(client.replies)


def test_no_reply_without_text_and_its_ids_come_with_the_next(byte_tokenizer: Tokenizer) -> None:
    client = Client(byte_tokenizer)
    fire = byte_tokenizer.encode("🎈")
    assert len(fire) > 1
    for token in fire[:-1]:
        client.say([token])
    assert client.replies == []
    client.say([fire[-1]])
    assert (client.shown, client.ids) == ("🎈", fire)


@pytest.mark.parametrize("finish", ["length", "error"])
def test_half_a_character_comes_at_the_end_as_in_the_one_shot_decode(
    byte_tokenizer: Tokenizer, finish: FinishReason
) -> None:
    client = Client(byte_tokenizer)
    ids = byte_tokenizer.encode("a🎈")[:-1]
    client.say(ids)
    client.say([], finish, ErrorInfo(message="broken") if finish == "error" else None)
    assert client.shown == byte_tokenizer.decode(ids)
    assert client.replies[-1].finish == finish


def test_the_end_token_is_counted_but_not_shown(byte_tokenizer: Tokenizer) -> None:
    client = Client(byte_tokenizer, TextParams(skip_special_tokens=False))
    (end,) = ids_for(byte_tokenizer, "</s>")
    ids = [*byte_tokenizer.encode("ab"), end]
    client.say(ids, "stop")
    assert (client.shown, client.ids, client.replies[-1].completion_tokens) == ("ab", ids, len(ids))


def test_the_end_token_is_shown_when_both_switches_ask_for_it(byte_tokenizer: Tokenizer) -> None:
    client = Client(byte_tokenizer, TextParams(skip_special_tokens=False, include_stop_str_in_output=True))
    client.say([*byte_tokenizer.encode("ab"), *ids_for(byte_tokenizer, "</s>")], "stop")
    assert client.shown == "ab</s>"


def test_special_tokens_within_the_answer(byte_tokenizer: Tokenizer) -> None:
    ids = [*byte_tokenizer.encode("a"), *ids_for(byte_tokenizer, "<|im_start|>"), *byte_tokenizer.encode("b")]
    for skip, text in ((True, "ab"), (False, "a<|im_start|>b")):
        client = Client(byte_tokenizer, TextParams(skip_special_tokens=skip))
        client.say(ids, "length")
        assert client.shown == text


def test_a_stop_string_over_several_tokens_ends_the_request_at_the_token_that_completes_it(
    byte_tokenizer: Tokenizer,
) -> None:
    client = Client(byte_tokenizer, TextParams(stop=("DEFGHIJ",)))
    ids = ids_for(byte_tokenizer, *"DEFGHIJ")
    for token in ids:
        client.say([token])
    (reply,) = client.replies
    assert (reply.text, reply.finish, reply.completion_tokens) == ("", "stop", 7)
    assert unpack_ids(reply.ids).tolist() == ids
    assert client.aborts == [7]
    assert len(client.detokenizer) == 0


def test_tokens_after_the_one_that_completes_a_stop_string_do_not_count(byte_tokenizer: Tokenizer) -> None:
    client = Client(byte_tokenizer, TextParams(stop=("b",)))
    client.say(ids_for(byte_tokenizer, *"abcd"))
    (reply,) = client.replies
    assert (reply.text, reply.completion_tokens, client.ids) == ("a", 2, ids_for(byte_tokenizer, *"ab"))


@pytest.mark.parametrize(("include", "shown"), [(False, "alpha "), (True, "alpha beta gamma")])
def test_stop_text_is_cut_or_kept(byte_tokenizer: Tokenizer, include: bool, shown: str) -> None:
    client = Client(byte_tokenizer, TextParams(stop=("beta gamma",), include_stop_str_in_output=include))
    for token in byte_tokenizer.encode("alpha beta gamma delta"):
        if not client.aborts:
            client.say([token])
    assert client.shown == shown
    assert all(reply.text or reply.finish for reply in client.replies)


def test_what_looked_like_a_stop_string_comes_with_the_end(byte_tokenizer: Tokenizer) -> None:
    client = Client(byte_tokenizer, TextParams(stop=("world!",)))
    client.say(byte_tokenizer.encode("Hello world"))
    assert client.shown == "Hello "
    client.say(ids_for(byte_tokenizer, "</s>"), "stop")
    assert client.shown == "Hello world"


def test_a_stop_string_in_the_last_allowed_token_is_a_stop_without_an_abort(byte_tokenizer: Tokenizer) -> None:
    client = Client(byte_tokenizer, TextParams(stop=("c",)))
    client.say(ids_for(byte_tokenizer, *"abc"), "length")
    assert (client.shown, client.replies[-1].finish, client.aborts) == ("ab", "stop", [])


def test_a_stop_string_in_a_run_of_byte_tokens_ends_at_once(families: dict[str, Tokenizer]) -> None:
    """A newline is a byte token for Llama 2: waiting until it is certain would cost a token more."""
    tokenizer = families["sentencepiece"]
    client = Client(tokenizer, TextParams(stop=("\n",)))
    client.say(ids_for(tokenizer, "▁Hello"))
    client.say(ids_for(tokenizer, "<0x0A>"))
    assert (client.shown, client.replies[-1].finish, client.replies[-1].completion_tokens) == ("Hello", "stop", 2)


def test_late_messages_for_a_request_that_has_ended_are_dropped(byte_tokenizer: Tokenizer) -> None:
    client = Client(byte_tokenizer, TextParams(stop=("b",)))
    client.say(ids_for(byte_tokenizer, *"ab"))
    before = len(client.replies)
    client.say(ids_for(byte_tokenizer, "c"))
    client.say([], "abort")
    assert (len(client.replies), client.aborts, len(client.detokenizer)) == (before, [7], 0)


def test_an_abort_forgets_the_request_silently(byte_tokenizer: Tokenizer) -> None:
    client = Client(byte_tokenizer)
    client.say(byte_tokenizer.encode("ab"))
    client.say([], "abort")
    assert (client.shown, client.aborts, len(client.detokenizer)) == ("ab", [], 0)


@pytest.mark.parametrize("text", [TextParams(), None])
def test_a_refusal_is_passed_on_even_if_it_is_all_that_is_ever_heard(
    byte_tokenizer: Tokenizer, text: TextParams | None
) -> None:
    client = Client(byte_tokenizer)
    client.text = text
    client.say([], "error", ErrorInfo(message="too long", status=400))
    (reply,) = client.replies
    assert (reply.finish, reply.error) == ("error", ErrorInfo(message="too long", status=400))
    assert (client.aborts, len(client.detokenizer)) == ([], 0)


def test_a_message_that_cannot_be_decoded_fails_its_request_alone(byte_tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(byte_tokenizer)
    good = DetokenizeMsg(uid=1, ids=pack_ids(byte_tokenizer.encode("a")), text=TextParams())
    bad = DetokenizeMsg(uid=2, ids=b"\0\0\0", text=TextParams())
    replies, aborts = detokenizer.process(DetokenizeBatch(items=[bad, good]))
    assert [(r.uid, r.finish, r.text) for r in replies] == [(2, "error", ""), (1, None, "a")]
    assert [a.uid for a in aborts] == [2]
    assert len(detokenizer) == 1


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_any_request_in_any_steps_shows_its_one_shot_decode_up_to_the_first_stop_string(
    families: dict[str, Tokenizer], family: str, data: st.DataObject
) -> None:
    tokenizer = families[family]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), min_size=1, max_size=30))
    whole = tokenizer.decode(ids)
    # Pieces of the text itself make good stop strings, those of nothing in it too. U+FFFD is no text of the model's.
    cuts = st.tuples(st.integers(0, max(len(whole) - 1, 0)), st.integers(1, 4)).map(lambda c: whole[c[0] : c[0] + c[1]])
    one = st.one_of(cuts, st.text("abl ", min_size=1, max_size=3)).filter(lambda s: s and "\ufffd" not in s)
    stops = data.draw(st.lists(one, max_size=3))
    include = data.draw(st.booleans())
    client = Client(tokenizer, TextParams(stop=tuple(stops), include_stop_str_in_output=include))
    at = 0
    while at < len(ids) and not client.aborts:
        size = data.draw(st.integers(1, 4))
        step = ids[at : at + size]
        at += len(step)
        client.say(step, "length" if at == len(ids) else None)
    used = client.replies[-1].completion_tokens
    expected, matched = oracle(tokenizer.decode(ids[:used]), stops, include) if stops else (whole, False)
    assert client.shown == expected
    assert client.ids == ids[:used]
    assert client.replies[-1].finish == ("stop" if matched else "length")
    if stops and not matched:
        assert used == len(ids)
    if matched and used > 1:  # and no earlier token had completed one
        assert not oracle(tokenizer.decode(ids[: used - 1]), stops, include)[1]
    assert all(reply.text for reply in client.replies[:-1])
    assert len(client.detokenizer) == 0
