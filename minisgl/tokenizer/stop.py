"""Finding stop strings in a text that arrives in pieces."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Passes text on until the first of several stop strings is complete, and never passes on a part of one.

    The first match is the one that ends first; of several that end at the same character, the longest. That is a
    property of the whole text alone, however it was cut into pieces.

        stops "DEFGHIJ"   fed  ab | cDE | FG   | HIx
                        passed  ab | c   |      | DEFGHIx       "DEF..." was held back until it could be no match

    One Knuth-Morris-Pratt automaton (SIAM J. Comput. 6, 1977) for each stop string: its state is the length of the
    longest prefix of that string which the text ends with, so the largest state is how much has to be held back.
    """

    __slots__ = ("_automata", "_firsts", "_held", "_include", "_states", "matched")

    def __init__(self, stops: Sequence[str], include: bool) -> None:
        """``stops`` are not empty. With ``include`` the matched string is part of what is passed on."""
        self._automata = [(stop, _borders(stop)) for stop in stops]
        self._firsts = {stop[0] for stop in stops}
        self._states = [0] * len(stops)
        self._held = ""
        self._include = include
        self.matched = False

    def feed(self, text: str) -> str:
        """What may be shown, now that ``text`` has arrived. Once :attr:`matched`, there is no more to feed."""
        if not self._held and self._firsts.isdisjoint(text):
            return text  # nothing has begun and nothing begins: nearly always so
        longest = 0
        for position, char in enumerate(text):
            for i, (stop, borders) in enumerate(self._automata):
                state = self._states[i]
                while state and stop[state] != char:
                    state = borders[state - 1]
                if stop[state] == char:
                    state += 1
                    if state == len(stop):
                        longest = max(longest, state)
                self._states[i] = state
            if longest:
                self.matched = True
                whole = self._held + text[: position + 1]
                return whole if self._include else whole[:-longest]
        whole = self._held + text
        shown = len(whole) - max(self._states)
        self._held = whole[shown:]
        return whole[:shown]

    def feed_if_match(self, text: str) -> str:
        """As :meth:`feed` where ``text`` completes a stop string; otherwise as if it had never arrived."""
        states, held = self._states.copy(), self._held
        shown = self.feed(text)
        if self.matched:
            return shown
        self._states, self._held = states, held
        return ""

    def flush(self) -> str:
        """The text held back, now that no more will come."""
        held, self._held = self._held, ""
        return held


def _borders(text: str) -> list[int]:
    """For each prefix of ``text``, the length of its longest proper prefix that is also its suffix."""
    borders = [0] * len(text)
    length = 0
    for i in range(1, len(text)):
        while length and text[i] != text[length]:
            length = borders[length - 1]
        if text[i] == text[length]:
            length += 1
        borders[i] = length
    return borders
