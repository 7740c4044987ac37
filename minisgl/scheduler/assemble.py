"""Turns the planner's choice into the arrays of a :class:`~minisgl.core.Batch`."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from minisgl.core import PENDING, Batch, Bool, Int32, Penalties, Sampling, TableUpdate
from minisgl.uniform import uniforms

from .rows import Rows


@dataclass(slots=True)
class Step:
    """What must be remembered of a batch until its results come: B requests, int32 unless said otherwise.

    ``epoch`` (B) is that of the rows at launch: a row that has changed hands since then has another. ``end`` (B)
    counts the tokens whose KV is there after the step. ``samples`` (B, bool) says who samples a token.
    """

    rows: Int32
    epoch: Int32
    end: Int32
    samples: Bool


def assemble(r: Rows, rows: Int32, new: Int32) -> tuple[Batch, Step]:
    """The batch in which ``rows[i]`` computes its next ``new[i]`` tokens; moves the rows on as if it were launched."""
    several = new > 1
    if several.any():  # single tokens first, otherwise in the given order
        order = np.argsort(several, kind="stable")
        rows, new = rows[order], new[order]
    cached = r.computed[rows]
    end = cached + new
    samples = end == r.length[rows]
    batch = Batch(
        rows=rows,
        cached=cached,
        new=new,
        input_ids=_input_ids(r, rows, cached, new),
        table=_table_update(r, rows),
        sampling=_sampling(r, rows, end, samples),
    )
    step = Step(rows=rows, epoch=r.epoch[rows], end=end, samples=samples)
    r.computed[rows] = end
    sampling_rows = rows[samples]
    r.tokens[sampling_rows, r.length[sampling_rows]] = PENDING
    r.length[sampling_rows] += 1
    return batch, step


def _input_ids(r: Rows, rows: Int32, cached: Int32, new: Int32) -> Int32:
    single = int(np.count_nonzero(new == 1))
    ids = r.tokens[rows[:single], cached[:single]]
    if single == len(rows):
        return ids
    chunks = zip(rows[single:].tolist(), cached[single:].tolist(), new[single:].tolist(), strict=True)
    return np.concatenate([ids, *(r.tokens[row, start : start + count] for row, start, count in chunks)])


def _table_update(r: Rows, rows: Int32) -> TableUpdate:
    """The entries that the device does not have yet."""
    synced = r.synced[rows]
    lacking = r.num_pages[rows] - synced
    which = np.repeat(np.arange(len(rows)), lacking)
    at = rows[which]
    first = np.cumsum(lacking) - lacking
    cols = (np.arange(len(which)) + (synced - first)[which]).astype(np.int32)
    r.synced[rows] += lacking
    return TableUpdate(rows=at, cols=cols, pages=r.table[at, cols])


def _sampling(r: Rows, rows: Int32, end: Int32, samples: Bool) -> Sampling:
    index = np.flatnonzero(samples).astype(np.int32)
    at = rows[index]
    return Sampling(
        index=index,
        temperature=r.temperature[at],
        top_k=r.top_k[at],
        top_p=r.top_p[at],
        min_p=r.min_p[at],
        uniform=uniforms(r.key[at], end[index]),
        penalties=_penalties(r, at, end[index]),
    )


def _penalties(r: Rows, rows: Int32, end: Int32) -> Penalties | None:
    index = np.flatnonzero(r.penalised[rows]).astype(np.int32)
    if len(index) == 0:
        return None
    at, counts = rows[index], end[index]
    params = [r.req(row).params for row in at.tolist()]
    return Penalties(
        index=index,
        history=np.concatenate([r.tokens[row, :n] for row, n in zip(at.tolist(), counts.tolist(), strict=True)]),
        offsets=np.concatenate([[0], np.cumsum(counts)]).astype(np.int32),
        prompt_lens=r.prompt_len[at],
        presence=np.array([p.presence_penalty for p in params], dtype=np.float32),
        frequency=np.array([p.frequency_penalty for p in params], dtype=np.float32),
        repetition=np.array([p.repetition_penalty for p in params], dtype=np.float32),
    )
