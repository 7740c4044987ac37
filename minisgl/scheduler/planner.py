"""The policy: which requests take part in a step, and with how many tokens."""

from __future__ import annotations

import numpy as np

from minisgl.core import Int32

from .memory import Memory
from .queue import WaitingQueue
from .request import Req
from .rows import Rows

_GROWTH = 16
"""A request is admitted only if every running one can still grow by so many tokens: without that, a full cache admits
a request in one step and pre-empts it in the next."""


class Planner:
    """Shares the token budget of a step.

    1. Running requests with one token to compute, all of them: a stream never waits for a prompt. There are never more
       rows than the budget has tokens.
    2. Running requests in mid-prompt, the oldest first, each with as large a chunk as is left.
    3. Waiting requests in their order, while budget, rows and pages last. They get pages for all their known tokens;
       what they will generate is not reserved.

    When the pages run out, the prefix cache evicts; then the youngest running request is pre-empted. It goes back to
    the front of the queue with its output, and will compute prompt and output again. It cannot come back in the same
    step: it would need more than the pages it has just given. The oldest one is never pre-empted, so something always
    gets done.
    """

    def __init__(self, rows: Rows, memory: Memory, queue: WaitingQueue, budget: int) -> None:
        self._rows = rows
        self._memory = memory
        self._queue = queue
        self._budget = budget
        self.preemptions = 0
        """Since the start."""

    def pick(self, in_flight: bool) -> tuple[Int32, Int32]:
        """The rows of the next step and their numbers of new tokens, int32; empty if there is nothing to do now.

        With a step ``in_flight`` nobody is pre-empted: its results may end requests, and a pre-empted request must know
        all its tokens. The answer is empty then, and the question is asked again after the results.
        """
        rows, new = self._running()
        missing = self._memory.missing(rows, self._rows.computed[rows] + new)
        while missing.sum() > self._memory.available:
            if in_flight:
                return rows[:0], new[:0]
            self._preempt()
            rows, new = self._running()
            missing = self._memory.missing(rows, self._rows.computed[rows] + new)
        self._memory.grow(rows, missing)
        if len(self._queue):
            joined = self._admit(self._budget - int(new.sum()))
            if joined:
                more = np.array(joined, dtype=np.int32)
                rows, new = np.concatenate([rows, more[:, 0]]), np.concatenate([new, more[:, 1]])
            elif len(rows) == 0 and not in_flight:
                raise RuntimeError(f"{len(self._queue)} requests wait, nothing runs, and none of them can start.")
        return rows, new

    def _running(self) -> tuple[Int32, Int32]:
        r, rows = self._rows, self._rows.order
        length = r.length[rows]
        todo = np.where(length < r.limit[rows], length - r.computed[rows], 0)
        rows, todo = rows[todo > 0], todo[todo > 0]
        chunks = np.flatnonzero(todo > 1)
        if len(chunks) == 0:
            return rows, todo
        left = self._budget - (len(rows) - len(chunks))
        for i in chunks.tolist():
            todo[i] = min(todo[i], left)
            left -= int(todo[i])
        return rows[todo > 0], todo[todo > 0]

    def _admit(self, budget: int) -> list[tuple[int, int]]:
        """Takes requests from the queue; the rows they got and their first chunks."""
        r, queue, cache = self._rows, self._queue, self._memory.cache
        joined: list[tuple[int, int]] = []
        headroom = self._headroom()
        while budget > 0 and r.num_free and (req := queue.first()) is not None:
            match = cache.match(req.tokens)
            cached = len(match.pages) * r.page_size
            leader = self._leader(req, cached) if cache.reuses else None
            if leader is not None:
                queue.follow(req, leader)
                continue
            if not self._memory.admit(req, match, headroom):
                break
            queue.remove(req)
            if req.cached_tokens is None:
                req.cached_tokens = cached
            chunk = min(len(req.tokens) - cached, budget)
            budget -= chunk
            joined.append((req.row, chunk))
            headroom += self._memory.pages_of(_GROWTH)
        return joined

    def _headroom(self) -> int:
        """Pages to leave to the running requests, each for its next tokens."""
        r, rows = self._rows, self._rows.order
        return int(self._memory.missing(rows, np.minimum(r.length[rows] + _GROWTH, r.limit[rows])).sum())

    def _leader(self, req: Req, cached: int) -> Req | None:
        """The running request whose prompt, still being computed, spares ``req`` much of its own; or None.

        Nobody waits for long. This is asked when some budget is left, so the last chunk of the leader's prompt is in
        the step being planned, and its result releases the followers to the front of the line. And no new leader X
        overtakes a follower F of L: if it shared enough with F, then, as common prefixes are ultrametric
        (cp(X, L) >= min(cp(X, F), cp(F, L))), it would follow L as well.
        """
        r, tokens = self._rows, req.tokens
        worth = max(r.page_size, self._budget // 8)
        if len(tokens) - 1 - cached < worth:
            return None
        rows = r.order[r.prefilling[r.order]]
        probe = cached + worth - 1  # one token tells nearly all of the others apart
        for row in rows[r.tokens[rows, probe] == tokens[probe]].tolist():
            count = min(len(tokens) - 1, int(r.length[row]))
            differ = tokens[:count] != r.tokens[row, :count]
            first = int(differ.argmax())
            common = first if differ[first] else count
            if common // r.page_size * r.page_size - cached >= worth:
                return r.req(row)
        return None

    def _preempt(self) -> None:
        r = self._rows
        if len(r.order) < 2:
            raise RuntimeError("The only running request lacks KV pages: its length was not limited by what exists.")
        row = int(r.order[-1])
        req = r.req(row)
        req.tokens = r.tokens[row, : r.length[row]].copy()
        assert not req.followers  # they left it when the step with the end of its prompt was done
        self._memory.release(row, keep=True)
        self._queue.push_front(req)
        self.preemptions += 1
