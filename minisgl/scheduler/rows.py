"""The running requests, one row each: the state that every step reads, in arrays so that a step has no loop over it."""

from __future__ import annotations

import numpy as np

from minisgl.core import EngineInfo, Int32

from .request import NO_ROW, Req


class Rows:
    """Row-indexed state, int32 unless said otherwise. Per row, counted in tokens:

        |<-- confirmed -->|             results received: may go to the prefix cache
        |<------- computed ------->|    KV computed by the steps launched so far
        |<----------- length ----------->|    known tokens; PENDING stands for one that a step under way samples
        |<--------------- limit --------------->|    where the request ends

    A row with ``length == limit`` has nothing left to compute: its last token never enters the KV cache.
    """

    def __init__(self, info: EngineInfo, count: int) -> None:
        width = -(-info.max_seq_len // info.page_size)
        self.capacity = count
        self.page_size = info.page_size
        # Large and mostly unused: the system gives memory only to what is touched.
        self.tokens = np.empty((count, info.max_seq_len), dtype=np.int32)
        self.table = np.empty((count, width), dtype=np.int32)

        def zeros() -> Int32:
            return np.zeros(count, dtype=np.int32)

        self.length, self.computed, self.confirmed, self.limit, self.prompt_len = (zeros() for _ in range(5))
        self.num_pages = zeros()  # entries of the page table
        self.shared = zeros()  # the leading ones of them whose pages belong to the prefix cache
        self.synced = zeros()  # the leading ones of them that the device has
        self.epoch = zeros()  # how often the row changed hands: tells a late result from a current one
        self.prefilling = np.zeros(count, dtype=bool)  # the tokens it came in with are not all confirmed yet

        self.temperature, self.top_p, self.min_p = (np.zeros(count, dtype=np.float32) for _ in range(3))
        self.top_k = zeros()
        self.key = np.zeros(count, dtype=np.uint64)
        self.penalised = np.zeros(count, dtype=bool)

        self.reqs: list[Req | None] = [None] * count
        self.order = np.empty(0, dtype=np.int32)  # rows in use, the oldest arrival first
        self._free = list(range(count - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def req(self, row: int) -> Req:
        req = self.reqs[row]
        assert req is not None
        return req

    def enter(self, req: Req) -> int:
        """Gives ``req`` a row, with all its tokens known and nothing computed."""
        row = self._free.pop()
        count, params = len(req.tokens), req.params
        self.tokens[row, :count] = req.tokens
        self.length[row] = count
        self.computed[row] = self.confirmed[row] = 0
        self.limit[row] = req.limit
        self.prompt_len[row] = req.prompt_len
        self.num_pages[row] = self.shared[row] = self.synced[row] = 0
        self.prefilling[row] = True
        self.temperature[row] = params.temperature
        self.top_k[row] = max(params.top_k, 0)
        self.top_p[row] = params.top_p
        self.min_p[row] = params.min_p
        self.key[row] = req.key
        self.penalised[row] = params.has_penalty
        self.reqs[row] = req
        req.row = row
        at = len(self.order)
        while at and self.req(self.order[at - 1]).arrival > req.arrival:
            at -= 1
        self.order = np.insert(self.order, at, row)
        return row

    def leave(self, row: int) -> None:
        """Takes the row back; results that still come for it are stale from here on."""
        req = self.req(row)
        req.row = NO_ROW
        self.reqs[row] = None
        self.epoch[row] += 1
        self.order = self.order[self.order != row]
        self._free.append(row)
