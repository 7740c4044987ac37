from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minisgl.tokenizer.stop import StopMatcher


def oracle(text: str, stops: list[str], include: bool) -> tuple[str, bool]:
    """The whole text, cut at the stop string that ends first; of those that end there, the longest."""
    for end in range(len(text) + 1):
        lengths = [len(stop) for stop in stops if text[:end].endswith(stop)]
        if lengths:
            return text[: end if include else end - max(lengths)], True
    return text, False


def run(matcher: StopMatcher, pieces: list[str]) -> tuple[str, bool]:
    shown = ""
    for piece in pieces:
        shown += matcher.feed(piece)
        if matcher.matched:
            return shown, True
    return shown + matcher.flush(), False


@settings(max_examples=600, deadline=None)
@given(
    pieces=st.lists(st.text("abc", max_size=4), max_size=12),
    stops=st.lists(st.text("abc", min_size=1, max_size=5), min_size=1, max_size=4),
    include=st.booleans(),
)
def test_any_pieces_are_cut_where_the_whole_text_is(pieces: list[str], stops: list[str], include: bool) -> None:
    assert run(StopMatcher(stops, include), pieces) == oracle("".join(pieces), stops, include)


@settings(max_examples=300, deadline=None)
@given(
    pieces=st.lists(st.text("ab", max_size=3), max_size=10),
    stops=st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_no_more_is_held_back_than_could_begin_a_stop_string(pieces: list[str], stops: list[str]) -> None:
    matcher = StopMatcher(stops, include=False)
    fed = shown = ""
    for piece in pieces:
        fed, shown = fed + piece, shown + matcher.feed(piece)
        if matcher.matched:
            return
        held = max(n for stop in stops for n in range(len(stop)) if fed.endswith(stop[:n]))
        assert shown == fed[: len(fed) - held]


def test_a_stop_string_over_four_pieces_shows_nothing() -> None:
    matcher = StopMatcher(["DEFGHIJ"], include=False)
    assert [matcher.feed(piece) for piece in ("DEF", "G", "HI", "J")] == ["", "", "", ""]
    assert matcher.matched


def test_the_text_before_a_stop_string_is_kept() -> None:
    assert run(StopMatcher(["beta gamma"], False), ["alpha", " be", "ta", " gam", "ma delta"]) == ("alpha ", True)


def test_the_stop_string_is_kept_when_asked_for() -> None:
    assert run(StopMatcher(["beta gamma"], True), ["alpha be", "ta gamma delta"]) == ("alpha beta gamma", True)


@pytest.mark.parametrize("pieces", [["xabcd"], ["xabc", "d"], ["x", "a", "b", "c", "d"]])
def test_overlapping_stop_strings_cut_at_the_one_that_ends_first(pieces: list[str]) -> None:
    assert run(StopMatcher(["abcd", "bc"], False), pieces) == ("xa", True)


def test_text_that_may_change_is_looked_at_and_forgotten_unless_it_completes_a_match() -> None:
    matcher = StopMatcher(["ab"], include=False)
    assert matcher.feed("xa") == "x"
    assert matcher.feed_if_match("c") == ""
    assert not matcher.matched
    assert matcher.feed_if_match("b") == ""
    assert matcher.matched


def test_a_long_stop_string_that_nearly_matches_costs_time_in_proportion_to_the_text() -> None:
    matcher = StopMatcher(["a" * 20_000 + "b"], include=False)
    start = time.perf_counter()
    shown = "".join(matcher.feed("a" * 4) for _ in range(10_000))
    assert len(shown) == 20_000
    assert time.perf_counter() - start < 2
