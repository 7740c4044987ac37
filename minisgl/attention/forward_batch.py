"""One step as the data plane sees it: the tensors that every layer and kernel of a forward pass reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from ..core import Int32

GraphKind = Literal["single", "mixed"]
"""Of a step in a CUDA graph: all requests with one new token, or any."""


@dataclass(slots=True)
class HostPlan:
    """What a backend may look at while it plans a step, without asking the device. All of it is known to the host.

    ``cached`` and ``new`` are int32 arrays (B). ``num_single`` requests, the leading ones, have exactly one new token.
    """

    cached: Int32
    new: Int32
    num_single: int

    @classmethod
    def of(cls, cached: Int32, new: Int32) -> HostPlan:
        return cls(cached, new, int(np.count_nonzero(new == 1)))


@dataclass(slots=True)
class ForwardBatch:
    """A step of B requests and T new tokens. It is handed down as an argument; there is no global context.

        request            0   1   2               requests with one new token come first
        cached             7  31   0
        seq_lens           8  32   4               cached + new
        cu_new          0   1   2       6          new tokens of request i: cu_new[i] .. cu_new[i + 1]
        input_ids          a   b   c d e f         flat (T)
        positions          7  31   0 1 2 3         of each token in its request (T)
        slots              .   .   . . . .         where each token's K and V go in the pool (T)

    The slot of a token is ``page_table[row, position // page_size] * page_size + position % page_size``. Lengths, ids,
    positions and tables are int32, ``slots`` and ``logit_index`` int64 (they index). All tensors are on the
    device. ``page_table`` is the engine's whole table, (max_running_req + 1, max_pages_per_req): request i owns row
    ``rows[i]``. Entries past the end of a request are stale and must not be followed.

    ``logit_index`` (S) names the tokens whose hidden state is wanted, ascending; None means all T of them in order.

    With ``graph`` the step is captured into, or replayed from, a CUDA graph: the tensors have fixed addresses, and what
    a backend launches may depend on B and T but on no length and not on ``host``. "single": every request has one new
    token; those that fill it up at its end have seq_lens 0. "mixed": any step, filled up by one request at least:

        request            0   1   2   R   R       R = the scratch row; no length, no new tokens
        seq_lens           8  32   4   0   0
        cu_new          0   1   2   6   6   6
        input_ids          a   b   c d e f 0 0     the surplus tokens are nobody's and go to the scratch page

    What attention returns for tokens that are nobody's is of no interest, but must be finite.
    ``host`` is that of the step without what fills it up. ``plan`` is the backend's own note from ``prepare`` to
    ``forward``.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    rows: torch.Tensor
    cached: torch.Tensor
    seq_lens: torch.Tensor
    cu_new: torch.Tensor
    page_table: torch.Tensor
    page_size: int
    host: HostPlan
    logit_index: torch.Tensor | None = None
    graph: GraphKind | None = None
    plan: Any = None

    @property
    def size(self) -> int:
        return self.rows.shape[0]

    @property
    def num_tokens(self) -> int:
        return self.input_ids.shape[0]


def token_slots(
    page_table: torch.Tensor, token_rows: torch.Tensor, positions: torch.Tensor, page_size: int
) -> torch.Tensor:
    """Slots (T) int64 of tokens, given the table row (T) and the position (T) of each."""
    pages = page_table[token_rows, positions // page_size].long()
    return pages * page_size + positions % page_size
