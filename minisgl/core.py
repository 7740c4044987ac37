"""What the planes share: sampling parameters and the batch that crosses the seam between host and device.

Nothing here imports torch. The control plane fills a :class:`Batch` with numpy arrays, the data plane
runs it and answers with a :class:`BatchResult`:

    scheduler --- Batch ---> engine.launch() ---> InFlight.wait() --- BatchResult ---> scheduler
                  (numpy)    (returns at once)    (blocks)            (numpy)
"""

from __future__ import annotations

from dataclasses import dataclass, field
from reprlib import repr as brief
from typing import Literal, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

Int32 = npt.NDArray[np.int32]
Float32 = npt.NDArray[np.float32]
Bool = npt.NDArray[np.bool_]

FinishReason = Literal["stop", "length", "abort", "error"]

PENDING = -1
"""In place of a token id: the token that the row sampled last, which the host has not seen yet."""

MAX_STOP_STRINGS = 4
MAX_STOP_CHARS = 1024
MAX_STOP_TOKEN_IDS = 1024
"""What a stop string or a list of stop ids costs is paid for by everybody who is served beside it."""

MIN_REPETITION_PENALTY = 0.01
"""Logits are divided by it, and must stay finite."""


class ParameterError(ValueError):
    """A request parameter that cannot be served; ``field`` names it as the client wrote it."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How one request is sampled and when it ends.

    ``temperature`` 0 is greedy. ``top_k`` 0 or -1 is off, ``top_p`` 1 is off, ``min_p`` 0 is off. Presence and
    frequency penalties look at the output, the repetition penalty at prompt and output. With ``seed`` the
    output is a pure function of prompt, parameters and seed. ``max_tokens`` None means up to the end of the context.
    """

    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True

    def validate(self) -> None:
        """Raises :class:`ParameterError` for the first value out of its range."""

        def need(ok: bool, name: str, allowed: str) -> None:
            if not ok:
                raise ParameterError(name, f"{name} must be {allowed}, not {brief(_as_sent(getattr(self, name)))}.")

        # Comparisons are written so that NaN fails them.
        need(self.max_tokens is None or 1 <= self.max_tokens < 2**31, "max_tokens", "at least 1, and below 2**31")
        need(0 <= self.temperature <= 100, "temperature", "between 0 and 100")
        need(0 < self.top_p <= 1, "top_p", "in (0, 1]")
        need(-1 <= self.top_k < 2**31, "top_k", "-1 or 0 (off) or a positive number")
        need(0 <= self.min_p <= 1, "min_p", "between 0 and 1")
        need(-2 <= self.presence_penalty <= 2, "presence_penalty", "between -2 and 2")
        need(-2 <= self.frequency_penalty <= 2, "frequency_penalty", "between -2 and 2")
        low = MIN_REPETITION_PENALTY
        need(low <= self.repetition_penalty <= 100, "repetition_penalty", f"between {low} and 100")
        need(self.seed is None or -(2**63) <= self.seed < 2**64, "seed", "a 64-bit integer")
        need(len(self.stop) <= MAX_STOP_STRINGS, "stop", f"at most {MAX_STOP_STRINGS} strings")
        need(all(self.stop), "stop", "free of empty strings")
        short = all(len(s) <= MAX_STOP_CHARS for s in self.stop)
        need(short, "stop", f"strings of at most {MAX_STOP_CHARS} characters")
        few = len(self.stop_token_ids) <= MAX_STOP_TOKEN_IDS
        need(few, "stop_token_ids", f"at most {MAX_STOP_TOKEN_IDS} token ids")
        need(all(0 <= t < 2**31 for t in self.stop_token_ids), "stop_token_ids", "token ids")

    @property
    def has_penalty(self) -> bool:
        return self.presence_penalty != 0 or self.frequency_penalty != 0 or self.repetition_penalty != 1


def _as_sent(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value


@dataclass(slots=True)
class TableUpdate:
    """New entries of the device's page table: ``table[rows[i], cols[i]] = pages[i]``, applied before the step.

    Column ``c`` of a row holds the page of that request's tokens ``c * page_size .. (c + 1) * page_size - 1``.
    No (row, col) pair occurs twice in one update.
    """

    rows: Int32
    cols: Int32
    pages: Int32


@dataclass(slots=True)
class Penalties:
    """The requests of a step that are penalised, and the tokens they are penalised for.

    ``index[i]`` points into the step's sampled requests (:attr:`Sampling.index`). Its tokens so far are
    ``history[offsets[i]:offsets[i + 1]]``, prompt first (``prompt_lens[i]`` of them); the last one may be ``PENDING``.
    """

    index: Int32
    history: Int32
    offsets: Int32
    prompt_lens: Int32
    presence: Float32
    frequency: Float32
    repetition: Float32


@dataclass(slots=True)
class Sampling:
    """Parameters of the requests that sample a token at the end of the step, S of them.

    ``index`` (S) points into the requests of the batch, ascending. ``uniform`` (S) is the random number in [0, 1) that
    picks the token: the host draws it as a pure function of (seed, position), so what runs beside cannot change it.
    """

    index: Int32
    temperature: Float32
    top_k: Int32
    top_p: Float32
    min_p: Float32
    uniform: Float32
    penalties: Penalties | None = None


@dataclass(slots=True)
class Batch:
    """One step: B requests, each with some tokens in the KV cache already and some new ones to compute.

    There is no "prefill batch" and no "decode batch": decode is one new token, a prompt chunk is n of them.
    Requests with one new token come first, so a backend can split the step in two at :attr:`num_single`.

        request        0     1     2          3
        cached         7    31     0         64        tokens whose KV is there before the step
        new            1     1     5          3        tokens to compute now
        input_ids    [-1] [918] [a b c d e] [x y z]    flat, PENDING (-1) = the row's last sample, still on the device

    ``rows`` (B), ``cached`` (B), ``new`` (B) and ``input_ids`` (sum of new) are int32. A request whose chunk does
    not reach the end of its known tokens is absent from ``sampling``.
    """

    rows: Int32
    cached: Int32
    new: Int32
    input_ids: Int32
    table: TableUpdate
    sampling: Sampling

    @property
    def size(self) -> int:
        return len(self.rows)

    @property
    def num_tokens(self) -> int:
        return len(self.input_ids)

    @property
    def num_single(self) -> int:
        """How many requests, the leading ones, have exactly one new token."""
        return int(np.count_nonzero(self.new == 1))


@dataclass(slots=True)
class BatchResult:
    """What a step sampled: ``counts[i]`` tokens for request i, flat in ``ids``, both int32.

    A request that sampled nothing (a chunk in mid-prompt, or one that failed) counts 0. ``failed`` maps the index of a
    request to one sentence about what went wrong with it alone.
    """

    ids: Int32
    counts: Int32
    failed: dict[int, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What the scheduler must know of the device.

    ``num_pages`` pages of ``page_size`` tokens may be handed out (the device keeps a scratch page beside them); rows
    are 0 .. ``max_running_req - 1``; no request grows past ``max_seq_len`` tokens; ``token_budget`` bounds the new
    tokens of a step.
    """

    num_pages: int
    page_size: int
    max_running_req: int
    max_seq_len: int
    vocab_size: int
    token_budget: int


class InFlight(Protocol):
    """A step under way."""

    def wait(self) -> BatchResult:
        """Blocks until the step is done. Called exactly once, in the order of the launches."""
        ...


class Engine(Protocol):
    """The seam: all the control plane ever asks of a device.

    Steps run strictly in the order of their launches, so a page that was freed after ``launch`` returned may be handed
    to the next step at once: what reads the old content is ahead of what overwrites it.
    """

    info: EngineInfo

    def launch(self, batch: Batch) -> InFlight:
        """Starts a step and returns at once. At most two steps are in flight."""
        ...

    def close(self) -> None:
        """Frees the device. No step is in flight."""
        ...
