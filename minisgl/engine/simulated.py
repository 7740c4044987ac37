"""An engine without a model, in numpy: drives the control plane in tests and benchmarks, and knows when it is wrong.

The next token is a hash of the whole context, so what a request must answer can be told from its prompt alone
(:func:`expected_output`). The simulated KV cache holds, in each slot, the token and a hash of all tokens up to it;
reading a context through the page table shows at once whether the table leads to the right pages.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from minisgl.core import PENDING, Batch, BatchResult, Bool, EngineInfo, Float32, Int32, SamplingParams
from minisgl.uniform import UInt64, mix, uniforms

Int64 = npt.NDArray[np.int64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


class SimulationError(AssertionError):
    """The scheduler has broken the contract of :mod:`minisgl.core`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedModel:
    """What the simulated model answers: token ``eos`` with probability ``eos_probability``, else any other.

    A request fails in the step that feeds one of the ``poison`` tokens.
    """

    vocab_size: int = 1000
    eos: int = 0
    eos_probability: float = 0.0
    poison: frozenset[int] = frozenset()

    def next_tokens(self, contexts: UInt64, temperature: Float32, uniform: Float32) -> Int32:
        """One token for each context hash; greedy ones (temperature 0) do not look at ``uniform``."""
        drawn = np.where(temperature > 0, uniform, np.float32(0)).view(np.uint32).astype(np.uint64)
        bits = mix(contexts ^ mix(drawn + _GOLDEN))
        tokens = (bits % np.uint64(self.vocab_size - 1)).astype(np.int32)
        tokens += tokens >= self.eos
        ends = (mix(bits) >> np.uint64(11)) * 2.0**-53 < self.eos_probability
        return np.where(ends, np.int32(self.eos), tokens)


def token_hashes(tokens: Int32, positions: npt.NDArray[np.integer]) -> UInt64:
    """The share of each (token, position) in the hash of a context, which is their sum."""
    return mix((tokens.astype(np.uint64) << np.uint64(32)) + positions.astype(np.uint64) + _GOLDEN)


def expected_output(
    model: SimulatedModel,
    prompt: Sequence[int],
    params: SamplingParams,
    count: int,
    key: int,
    stop: Collection[int] = (),
) -> list[int]:
    """What a request must get: up to ``count`` tokens, up to the first one of ``stop``, up to a failure.

    ``key`` is that of its random numbers (see :func:`minisgl.uniform.stream_key`).
    """
    tokens = np.array(prompt, dtype=np.int32)
    context = token_hashes(tokens, np.arange(len(tokens))).sum(keepdims=True)
    temperature = np.array([params.temperature], dtype=np.float32)
    out: list[int] = []
    last = set(prompt)
    while len(out) < count and not last & model.poison:
        position = np.array([len(prompt) + len(out)])
        token = model.next_tokens(context, temperature, uniforms(np.array([key], dtype=np.uint64), position))
        out.append(int(token[0]))
        if out[-1] in stop:
            break
        last = {out[-1]}
        context = context + token_hashes(token, position)
    return out


class SimulatedEngine:
    """Computes a step at its launch, in the device's order, and gives the results out at ``wait``.

    ``verify`` reads every context through the page table (:class:`SimulationError` if it is not what it should
    be); without it, a token depends on the last token and its position only, and a step costs next to nothing.
    ``delay`` is the time a step takes, in seconds.
    """

    def __init__(
        self, info: EngineInfo, model: SimulatedModel | None = None, *, verify: bool = True, delay: float = 0.0
    ) -> None:
        self.info = info
        self.model = model or SimulatedModel(vocab_size=info.vocab_size)
        self.steps = 0
        self.tokens = 0
        self._verify = verify
        self._delay = delay
        self._table = np.full((info.max_running_req + 1, -(-info.max_seq_len // info.page_size)), -1, dtype=np.int32)
        self._last = np.full(info.max_running_req + 1, PENDING, dtype=np.int32)
        self._kv = _SimulatedKV(info) if verify else None
        self._launched: list[SimulatedStep] = []

    def launch(self, batch: Batch) -> SimulatedStep:
        if len(self._launched) >= 2:
            raise SimulationError("More than two steps are in flight.")
        self.steps += 1
        self.tokens += batch.num_tokens
        if self._verify:
            self._check_shape(batch)
        update = batch.table
        self._table[update.rows, update.cols] = update.pages
        bounds = np.cumsum(batch.new)
        ids = batch.input_ids
        if (ids == PENDING).any():
            owner = np.repeat(batch.rows, batch.new)
            ids = np.where(ids == PENDING, self._last[owner], ids)
        if self._verify and (ids < 0).any():
            raise SimulationError("A pending token is read from a row that has not sampled.")
        bad = np.zeros(batch.size, dtype=bool)
        if self.model.poison:
            bad = np.add.reduceat(np.isin(ids, list(self.model.poison)), bounds - batch.new) > 0
        if self._kv is not None:
            contexts = self._kv.step(self._table, batch, ids, bad)
        else:
            contexts = token_hashes(ids[bounds - 1], batch.cached + batch.new)
        sampling = batch.sampling
        if self._kv is not None and sampling.penalties is not None:
            self._kv.check_history(batch, self._table, self._last)
        tokens = self.model.next_tokens(contexts[sampling.index], sampling.temperature, sampling.uniform)
        counts = np.zeros(batch.size, dtype=np.int32)
        counts[sampling.index] = 1
        counts[bad] = 0
        tokens = tokens[counts[sampling.index] == 1]
        failed = dict.fromkeys(np.flatnonzero(bad).tolist(), "The request holds a poisonous token.")
        self._last[batch.rows[counts == 1]] = tokens
        self._last[batch.rows[bad]] = 0  # the host may have launched its next step before it hears of the failure
        step = SimulatedStep(
            self, BatchResult(ids=tokens, counts=counts, failed=failed), time.monotonic() + self._delay
        )
        self._launched.append(step)
        return step

    def finish(self, step: SimulatedStep) -> None:
        """Called by the step that is waited for."""
        if not self._launched or self._launched[0] is not step:
            raise SimulationError("Steps are waited for out of order, or twice.")
        self._launched.pop(0)
        if self._delay:
            time.sleep(max(0.0, step.ready - time.monotonic()))

    def close(self) -> None:
        if self._launched:
            raise SimulationError("Closed with a step in flight.")

    def _check_shape(self, batch: Batch) -> None:
        def need(ok: bool | np.bool_, what: str) -> None:
            if not ok:
                raise SimulationError(f"{what}.")

        info, sampling, update = self.info, batch.sampling, batch.table
        need(batch.size > 0, "The batch is empty")
        need(batch.num_tokens == batch.new.sum() and (batch.new > 0).all(), "input_ids and new do not fit")
        need(batch.num_tokens <= info.token_budget, "The batch is over the token budget")
        need(len(np.unique(batch.rows)) == batch.size, "A row occurs twice")
        need((batch.rows < info.max_running_req).all() and (batch.rows >= 0).all(), "A row does not exist")
        need((batch.cached + batch.new < info.max_seq_len).all(), "A request grows past max_seq_len")
        need((batch.new[: batch.num_single] == 1).all(), "Single tokens do not come first")
        need((np.diff(sampling.index) > 0).all(), "sampling.index is not ascending")
        need((sampling.uniform >= 0).all() and (sampling.uniform < 1).all(), "A random number is outside [0, 1)")
        cells = update.rows.astype(np.int64) * self._table.shape[1] + update.cols
        need(len(np.unique(cells)) == len(cells), "A table entry is updated twice")
        need((update.pages >= 0).all() and (update.pages < info.num_pages).all(), "A page does not exist")
        arrays = (batch.rows, batch.cached, batch.new, batch.input_ids, update.rows, update.cols, update.pages)
        need(all(a.dtype == np.int32 for a in (*arrays, sampling.index, sampling.top_k)), "An array is not int32")
        floats = (sampling.temperature, sampling.top_p, sampling.min_p, sampling.uniform)
        need(all(a.dtype == np.float32 and len(a) == len(sampling.index) for a in floats), "Sampling does not fit")


class SimulatedStep:
    """A step under way."""

    def __init__(self, engine: SimulatedEngine, result: BatchResult, ready: float) -> None:
        self._engine = engine
        self._result = result
        self.ready = ready

    def wait(self) -> BatchResult:
        self._engine.finish(self)
        return self._result


class _SimulatedKV:
    """Pages whose slots hold the token and the hash of the context up to and including it."""

    def __init__(self, info: EngineInfo) -> None:
        self._page_size = info.page_size
        self._num_pages = info.num_pages
        self._tokens = np.full(info.num_pages * info.page_size, -1, dtype=np.int32)
        self._hashes = np.zeros(info.num_pages * info.page_size, dtype=np.uint64)
        self._writer = np.full(info.num_pages, -1, dtype=np.int32)  # the row that began the page
        self._failed_rows = np.empty(0, dtype=np.int32)  # of the step before: the host may not know yet

    def step(self, table: Int32, batch: Batch, ids: Int32, bad: Bool) -> UInt64:
        """Writes the new tokens, reads all contexts back, and returns their hashes (B).

        What the ``bad`` requests write is good for nothing: who reads it later is in error.
        """
        end = batch.cached + batch.new
        pages_used = -(-end // self._page_size)
        self._check_owners(table, batch.rows, pages_used, batch.cached)
        slots, positions, first = self._slots(table, batch.rows, end)
        is_new = positions >= np.repeat(batch.cached, end)
        self._tokens[slots[is_new]] = ids
        tokens = self._tokens[slots]
        shares = np.cumsum(token_hashes(tokens, positions))
        hashes = shares - np.repeat(np.where(first > 0, shares[first - 1], np.uint64(0)), end)
        excused = np.isin(batch.rows, self._failed_rows)
        wrong = (self._hashes[slots] != hashes) & ~is_new & np.repeat(~excused, end)
        if (tokens < 0).any() or wrong.any():
            at = int(np.flatnonzero((tokens < 0) | wrong)[0])
            i = int(np.searchsorted(first, at, side="right")) - 1
            raise SimulationError(f"Row {batch.rows[i]} does not find its token {positions[at]} in its page.")
        self._failed_rows = batch.rows[bad]
        self._hashes[slots[is_new]] = np.where(np.repeat(bad, end), ~hashes, hashes)[is_new]
        return hashes[first + end - 1]

    def check_history(self, batch: Batch, table: Int32, last: Int32) -> None:
        """The histories of the penalised requests must be their contexts."""
        penalties = batch.sampling.penalties
        assert penalties is not None
        which = batch.sampling.index[penalties.index]
        rows, end = batch.rows[which], (batch.cached + batch.new)[which]
        slots, _, first = self._slots(table, rows, end)
        history = penalties.history.copy()
        ends = penalties.offsets[1:] - 1
        if not np.array_equal(penalties.offsets, [*first, len(slots)]):
            raise SimulationError("A history has not the length of its context.")
        history[ends] = np.where(history[ends] == PENDING, last[rows], history[ends])
        if not np.array_equal(history, self._tokens[slots]):
            raise SimulationError("A history differs from its context.")

    def _slots(self, table: Int32, rows: Int32, end: Int32) -> tuple[Int64, Int64, Int64]:
        """For all tokens of ``rows``, flat: their slots and positions; and where each row begins."""
        first = np.cumsum(end) - end
        positions = np.arange(int(end.sum())) - np.repeat(first, end)
        pages = table[np.repeat(rows, end), positions // self._page_size].astype(np.int64)
        return pages * self._page_size + positions % self._page_size, positions, first

    def _check_owners(self, table: Int32, rows: Int32, used: Int32, begins: Int32) -> None:
        """No page is written that another request of the step reads or writes, or that another one began."""
        cols = np.arange(int(used.max()))
        mine = cols < used[:, None]
        pages = table[rows[:, None], cols]
        if (pages[mine] < 0).any():
            raise SimulationError("A request has tokens without a page.")
        readers = np.bincount(pages[mine], minlength=self._num_pages)
        written_from = begins // self._page_size
        written = mine & (cols >= written_from[:, None])
        if (readers[pages[written]] != 1).any():
            raise SimulationError("A page is written that has another reader.")
        begun = begins % self._page_size > 0
        if (self._writer[pages[np.arange(len(rows)), written_from]] != rows)[begun].any():
            raise SimulationError("A page is continued that another row began.")
        self._writer[pages[written]] = np.broadcast_to(rows[:, None], pages.shape)[written]
