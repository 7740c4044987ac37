"""The loop: messages in, a step launched, the results of the one before it out."""

from __future__ import annotations

import numpy as np

from minisgl.core import PENDING, BatchResult, Bool, Engine, FinishReason, InFlight, Int32
from minisgl.message import AbortBackendMsg, BackendMsg, DetokenizeMsg, ErrorInfo, UserMsg, pack_ids, unpack_ids
from minisgl.uniform import stream_key

from .assemble import Step, assemble
from .config import SchedulerConfig
from .intake import length_limit, queue_full
from .io import SchedulerIO
from .memory import Memory
from .planner import Planner
from .queue import WaitingQueue
from .request import NO_ROW, Req, text_params
from .rows import Rows
from .stats import Stats


class Scheduler:
    """Serves the requests that ``io`` brings on ``engine``.

        step     k                 k+1                   k+2
        host     plan, launch k |  plan, launch k+1   |  plan, launch k+2
                                |  results of k       |  results of k+1       <- waits here while the device works
        device                  [      k     ][     k+1     ][    k+2 ...

    So a step is planned before the tokens of the one before it are known: a decode of k+1 feeds on a ``PENDING`` token.
    That a request has ended by a stop token shows one step late; its surplus token is dropped here, by the epoch of
    its row. An end by length is known in advance.

    No decision looks at a clock or at anything else that differs between ranks: schedulers that see the same messages
    in the same steps launch the same batches. An exception out of the engine is fatal and passes through.
    """

    def __init__(self, engine: Engine, io: SchedulerIO, config: SchedulerConfig) -> None:
        info = engine.info
        budget = min(config.token_budget or info.token_budget, info.token_budget)
        self._engine = engine
        self._io = io
        self._config = config
        # With more rows than tokens in the budget, some streams would stand still.
        self._rows = Rows(info, min(info.max_running_req, budget))
        self._memory = Memory(info, self._rows, config.cache)
        self._queue = WaitingQueue()
        self._planner = Planner(self._rows, self._memory, self._queue, budget)
        self._reqs: dict[int, Req] = {}
        self._arrivals = 0
        self._steps = 0
        self._flight: tuple[InFlight, Step] | None = None
        self._out: list[DetokenizeMsg] = []

    @property
    def idle(self) -> bool:
        """Nothing to do until a message arrives."""
        return not self._reqs and self._flight is None

    def run_forever(self) -> None:
        while True:
            self.step()

    def step(self) -> bool:
        """One turn of the loop; waits for a message if idle. True while there is more to do."""
        for message in self._io.receive(block=self.idle):
            self._handle(message)
        before, self._flight = self._flight, self._launch()
        if before is not None:
            self._collect(*before)
        if self._flight is not None and not self._config.overlap:
            self._collect(*self._flight)
            self._flight = None
        if self._out:
            self._io.send(self._out)
            self._out = []
        if self.idle:
            self._memory.check_idle()
            return False
        return True

    def stats(self) -> Stats:
        """What no message tells, for tests."""
        allocator, cache = self._memory.allocator, self._memory.cache
        return Stats(
            running=len(self._rows.order),
            waiting=len(self._queue),
            free_pages=allocator.num_free,
            cached_pages=cache.num_pages,
            held_pages=allocator.num_pages - allocator.num_free - cache.num_pages,
            steps=self._steps,
            preemptions=self._planner.preemptions,
        )

    def check(self) -> None:
        """Raises :class:`RuntimeError` when the books are wrong: pages lost or owned twice, requests forgotten."""
        self._memory.check()
        if len(self._reqs) != len(self._rows.order) + len(self._queue):
            raise RuntimeError("A request is neither running nor waiting.")

    # Messages

    def _handle(self, message: BackendMsg) -> None:
        if isinstance(message, AbortBackendMsg):
            self._abort(message.uid)
        else:
            self._arrive(message)

    def _arrive(self, message: UserMsg) -> None:
        if message.uid in self._reqs:
            raise ValueError(f"Request id {message.uid} is in use.")
        arrival, self._arrivals = self._arrivals, self._arrivals + 1
        tokens, params, config = unpack_ids(message.input_ids), message.params, self._config
        limit = length_limit(tokens, params, self._engine.info)
        # The free rows count too: those who will get one in this very step are still in the queue.
        room = None if config.max_queue is None else config.max_queue + self._rows.num_free
        if isinstance(limit, int) and room is not None and len(self._queue) >= room:
            limit = queue_full(len(self._queue))
        if isinstance(limit, ErrorInfo):
            refusal = DetokenizeMsg(
                uid=message.uid, prompt_tokens=len(tokens), finish="error", text=text_params(params), error=limit
            )
            self._out.append(refusal)
            return
        key = stream_key(config.seed, 1 + arrival) if params.seed is None else stream_key(params.seed)
        stop = (*message.stop_token_ids, *params.stop_token_ids)
        req = Req(message.uid, arrival, tokens, limit, params, stop, key)
        self._reqs[req.uid] = req
        self._queue.push(req)

    def _abort(self, uid: int) -> None:
        req = self._reqs.get(uid)
        if req is None:
            return
        if req.row == NO_ROW:
            completed = len(req.tokens) - req.prompt_len
            self._queue.remove(req)
            del self._reqs[uid]
        else:
            completed = self._completed(req)
            self._end(req, keep=True)
        self._say(req, b"", completed, "abort")

    def _completed(self, req: Req) -> int:
        """How many tokens of output are known, of a running request."""
        r, row = self._rows, req.row
        length = int(r.length[row])
        # Two may be pending: a step fails while the one after it is under way.
        pending = np.count_nonzero(r.tokens[row, max(length - 2, 0) : length] == PENDING)
        return length - req.prompt_len - int(pending)

    # Steps

    def _launch(self) -> tuple[InFlight, Step] | None:
        rows, new = self._planner.pick(in_flight=self._flight is not None)
        if len(rows) == 0:
            return None
        batch, step = assemble(self._rows, rows, new)
        self._steps += 1
        return self._engine.launch(batch), step

    def _collect(self, handle: InFlight, step: Step) -> None:
        """Waits for a step and hands its tokens out."""
        result = handle.wait()
        r, rows, end = self._rows, step.rows, step.end
        valid = r.epoch[rows] == step.epoch
        for index, reason in result.failed.items():
            if valid[index]:
                valid[index] = False
                self._fail(int(rows[index]), reason)
        r.confirmed[rows[valid]] = end[valid]
        got = valid & step.samples
        if (result.counts[got] == 0).any():
            raise RuntimeError("The engine sampled no token for a request that reached the end of its known ones.")
        # A prompt that is through is shared before any request ends, so that all of this step's duplicates meet.
        for row in rows[got & r.prefilling[rows]].tolist():
            r.prefilling[row] = False
            self._memory.share(row)
            self._queue.release(r.req(row))
        if (result.counts > 1).any():
            self._deliver_runs(rows, end, got, result)
        else:
            self._deliver(rows[got], end[got], result.ids[got[result.counts == 1]])

    def _deliver(self, rows: Int32, end: Int32, ids: Int32) -> None:
        """One new token ``ids[i]`` for the request in ``rows[i]``, at position ``end[i]`` of its sequence."""
        r, reqs, out = self._rows, self._rows.reqs, self._out
        r.tokens[rows, end] = ids
        packed = pack_ids(ids)
        last = (end + 1 == r.limit[rows]).tolist()
        completed = (end + 1 - r.prompt_len[rows]).tolist()
        ended: list[Req] = []
        for i, (row, token) in enumerate(zip(rows.tolist(), ids.tolist(), strict=True)):
            req = reqs[row]
            assert req is not None
            finish: FinishReason | None = "stop" if token in req.stop else "length" if last[i] else None
            if finish is not None:
                ended.append(req)
            if req.text is None:
                out.append(
                    DetokenizeMsg(
                        uid=req.uid, ids=packed[4 * i : 4 * i + 4], completion_tokens=completed[i], finish=finish
                    )
                )
            else:
                self._say(req, packed[4 * i : 4 * i + 4], completed[i], finish)
        for req in ended:
            self._end(req, keep=True)

    def _deliver_runs(self, rows: Int32, end: Int32, got: Bool, result: BatchResult) -> None:
        """As :meth:`_deliver`, for a step that has found several tokens at once for some request.

        The extra ones are known tokens whose KV is not there: the next step computes them like a chunk of prompt. That
        next step must not be under way yet.
        """
        r = self._rows
        bounds = np.cumsum(result.counts)
        for i in np.flatnonzero(got).tolist():
            row, start = int(rows[i]), int(end[i])
            req = r.req(row)
            ids = result.ids[bounds[i] - result.counts[i] : bounds[i]][: req.limit - start]
            stops = [k for k, token in enumerate(ids.tolist()) if token in req.stop]
            if stops:
                ids = ids[: stops[0] + 1]
            length = start + len(ids)
            r.tokens[row, start:length] = ids
            r.length[row] = length
            finish: FinishReason | None = "stop" if stops else "length" if length == req.limit else None
            self._say(req, pack_ids(ids), length - req.prompt_len, finish)
            if finish is not None:
                self._end(req, keep=True)

    # Ends

    def _fail(self, row: int, reason: str) -> None:
        req = self._rows.req(row)
        completed = self._completed(req)
        self._end(req, keep=False)
        self._say(req, b"", completed, "error", ErrorInfo(message=reason))

    def _end(self, req: Req, *, keep: bool) -> None:
        """Frees all that a running request has. What a step under way still does for it is stale from here on."""
        self._memory.release(req.row, keep=keep)
        self._queue.release(req)
        del self._reqs[req.uid]

    def _say(
        self,
        req: Req,
        ids: bytes,
        completed: int,
        finish: FinishReason | None,
        error: ErrorInfo | None = None,
    ) -> None:
        """A message about ``req``; its first one introduces it."""
        message = DetokenizeMsg(uid=req.uid, ids=ids, completion_tokens=completed, finish=finish, error=error)
        if req.text is not None:
            message.text, req.text = req.text, None
            message.prompt_tokens, message.cached_tokens = req.prompt_len, req.cached_tokens or 0
        self._out.append(message)
