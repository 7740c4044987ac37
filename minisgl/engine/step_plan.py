"""A batch made ready for the device: everything numpy can work out, as named arrays that travel together."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from minisgl.attention.forward_batch import HostPlan
from minisgl.core import Batch, BatchResult, Int32

from .sampler import Arrays, sampling_arrays

NOT_FINITE = (
    "The model's logits for this request are not finite (NaN or infinity), so no token can be sampled from them."
)


@dataclass(slots=True)
class StepPlan:
    """One step of B requests, T new tokens and S sampled ones, before it goes to the device.

    ``sampled`` (S) are the requests that sample. ``arrays`` holds the :func:`sampling_arrays` of these and, int32
    unless said otherwise:

        rows, cached, seq_lens (B), cu_new (B + 1), input_ids, positions (T)    as in ForwardBatch
        token_rows (T)                    the table row of each token
        logit_index (S, int64)            the tokens to sample after; absent when that is all of them
        sampled_table_rows (S, int64)     where to remember the sampled ids
        table_index (int64), table_pages  entries of the flat page table to write first; absent when there are none
    """

    host: HostPlan
    sampled: Int32
    arrays: Arrays

    @property
    def size(self) -> int:
        return len(self.host.new)

    @property
    def num_tokens(self) -> int:
        return len(self.arrays["input_ids"])

    def result(self, ids: Int32) -> BatchResult:
        """What to tell the scheduler of the sampled ``ids`` (S), where -1 is a failure."""
        counts = np.zeros(self.size, np.int32)
        counts[self.sampled] = 1
        bad = ids < 0
        if not bad.any():
            return BatchResult(ids=ids, counts=counts)
        counts[self.sampled[bad]] = 0
        return BatchResult(ids[~bad], counts, dict.fromkeys(self.sampled[bad].tolist(), NOT_FINITE))


def plan_step(batch: Batch, max_pages_per_req: int) -> StepPlan:
    """``max_pages_per_req`` is the width of the page table."""
    host = HostPlan.of(batch.cached, batch.new)
    cu_new = np.zeros(batch.size + 1, np.int32)
    np.cumsum(batch.new, out=cu_new[1:])
    if host.num_single == batch.size:
        token_rows, positions = batch.rows, batch.cached
    else:
        token_rows = np.repeat(batch.rows, batch.new)
        positions = np.arange(batch.num_tokens, dtype=np.int32) + np.repeat(batch.cached - cu_new[:-1], batch.new)
    sampled = batch.sampling.index
    sampled_rows = batch.rows[sampled]
    arrays = sampling_arrays(batch.sampling, sampled_rows) | {
        "rows": batch.rows,
        "cached": batch.cached,
        "seq_lens": batch.cached + batch.new,
        "cu_new": cu_new,
        "input_ids": batch.input_ids,
        "positions": positions,
        "token_rows": token_rows,
        "sampled_table_rows": sampled_rows.astype(np.int64),
    }
    if len(sampled) != batch.num_tokens:
        arrays["logit_index"] = cu_new[1:][sampled].astype(np.int64) - 1
    table = batch.table
    if len(table.rows):
        arrays["table_index"] = table.rows.astype(np.int64) * max_pages_per_req + table.cols
        arrays["table_pages"] = table.pages
    return StepPlan(host, sampled, arrays)
