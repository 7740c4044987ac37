"""One request, as the scheduler sees it."""

from __future__ import annotations

from collections.abc import Iterable

from minisgl.core import Int32, SamplingParams
from minisgl.message import TextParams

NO_ROW = -1


class Req:
    """What is asked once per request. What is asked in every step lies in :class:`~minisgl.scheduler.rows.Rows`.

    ``tokens`` (int32) are the prompt and the output so far, up to date while the request waits; while it runs, they are
    in its row. ``limit`` is the length at which it ends, prompt included.
    """

    __slots__ = (
        "arrival",
        "cached_tokens",
        "followers",
        "key",
        "leader",
        "limit",
        "params",
        "prompt_len",
        "row",
        "stop",
        "text",
        "tokens",
        "uid",
    )

    def __init__(
        self, uid: int, arrival: int, tokens: Int32, limit: int, params: SamplingParams, stop: Iterable[int], key: int
    ) -> None:
        self.uid = uid
        self.arrival = arrival
        self.tokens = tokens
        self.prompt_len = len(tokens)
        self.limit = limit
        self.params = params
        self.stop = frozenset(stop)
        self.key = key  # of its random numbers
        self.text: TextParams | None = text_params(params)  # until its first message took it along
        self.cached_tokens: int | None = None  # of the prompt, as found when it first ran
        self.row = NO_ROW
        self.leader: Req | None = None  # computes the prefix that this one waits for
        self.followers: list[Req] = []


def text_params(params: SamplingParams) -> TextParams:
    """The detokenizer's share of the parameters."""
    return TextParams(
        stop=params.stop,
        include_stop_str_in_output=params.include_stop_str_in_output,
        skip_special_tokens=params.skip_special_tokens,
    )
