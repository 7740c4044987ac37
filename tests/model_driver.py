"""Drives a model without the engine: pages in random order, requests in rows, a step at a time."""

from __future__ import annotations

import numpy as np
import torch

from minisgl.attention.base import BackendConfig
from minisgl.attention.forward_batch import ForwardBatch, HostPlan, token_slots
from minisgl.attention.registry import make_backend
from minisgl.core import Batch, Sampling, TableUpdate
from minisgl.kvcache.device_pool import KVPool
from minisgl.models.base import CausalLM


def int32(values: object) -> np.ndarray:
    return np.array(values, np.int32)


def make_batch(requests: list[tuple[int, int, list[int]]], sampled: list[int] | None = None) -> Batch:
    """``requests`` are (row, cached, new ids), those with one new id first. All sample, or those in ``sampled``."""
    count = len(requests if sampled is None else sampled)
    zeros, index = np.zeros(count, np.float32), int32(range(count) if sampled is None else sampled)
    none = int32([])
    return Batch(
        rows=int32([row for row, _, _ in requests]),
        cached=int32([cached for _, cached, _ in requests]),
        new=int32([len(ids) for _, _, ids in requests]),
        input_ids=int32([token for _, _, ids in requests for token in ids]),
        table=TableUpdate(none, none, none),
        sampling=Sampling(index, zeros, int32([0] * count), zeros + 1, zeros, zeros),
    )


def make_forward_batch(batch: Batch, page_table: torch.Tensor, page_size: int) -> ForwardBatch:
    """The plain way from a batch to its tensors, on the device of ``page_table``."""
    device = page_table.device
    positions = np.concatenate(
        [np.arange(c, c + n, dtype=np.int32) for c, n in zip(batch.cached, batch.new, strict=True)]
    )
    ends = np.cumsum(batch.new, dtype=np.int32)

    def tensor(values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values).to(device)

    return ForwardBatch(
        input_ids=tensor(batch.input_ids),
        positions=tensor(positions),
        slots=token_slots(page_table, tensor(np.repeat(batch.rows, batch.new)), tensor(positions), page_size),
        rows=tensor(batch.rows),
        cached=tensor(batch.cached),
        seq_lens=tensor(batch.cached + batch.new),
        cu_new=tensor(np.concatenate((int32([0]), ends))),
        page_table=page_table,
        page_size=page_size,
        host=HostPlan.of(batch.cached, batch.new),
        logit_index=tensor(ends[batch.sampling.index].astype(np.int64) - 1),
    )


class Driver:
    """Rows are 0 .. ``rows - 1``. ``lengths[row]`` tokens of a row are in the cache."""

    def __init__(
        self,
        model: CausalLM,
        *,
        page_size: int = 4,
        num_pages: int = 64,
        rows: int = 4,
        backend: str = "torch",
        max_seq_len: int = 256,
        seed: int = 0,
    ) -> None:
        context = model.context
        self.model = model
        self.page_size = page_size
        self.kv = KVPool(
            model.config.num_layers,
            num_pages,
            page_size,
            model.num_kv_heads,
            model.config.head_dim,
            dtype=context.dtype,
            device=context.device,
        )
        # What nobody wrote must not be read.
        self.kv.k.fill_(float("nan"))
        self.kv.v.fill_(float("nan"))
        width = -(-max_seq_len // page_size)
        self.table = torch.full((rows + 1, width), num_pages, dtype=torch.int32, device=context.device)
        self.free = np.random.default_rng(seed).permutation(num_pages).tolist()
        self.lengths = [0] * rows
        self.backend = make_backend(
            backend,
            BackendConfig(
                num_heads=model.num_heads,
                num_kv_heads=model.num_kv_heads,
                head_dim=model.config.head_dim,
                page_size=page_size,
                max_running_req=rows,
                token_budget=256,
                dtype=context.dtype,
                device=context.device,
            ),
            context.ops,
        )

    def step(
        self, new: dict[int, list[int]], sampled: list[int] | None = None, every_token: bool = False
    ) -> torch.Tensor:
        """Runs the new ids of each row in one step. Returns the logits (S, V) of the sampled rows in batch order.

        The batch has the rows with one new id first, else they keep their order. ``every_token`` gives all T logits.
        """
        ordered = sorted(new.items(), key=lambda item: len(item[1]) != 1)
        batch = make_batch([(row, self.lengths[row], ids) for row, ids in ordered], sampled)
        for row, ids in ordered:
            have, self.lengths[row] = self.lengths[row], self.lengths[row] + len(ids)
            for page in range(-(-have // self.page_size), -(-self.lengths[row] // self.page_size)):
                self.table[row, page] = self.free.pop()
        forward = make_forward_batch(batch, self.table, self.page_size)
        if every_token:
            forward.logit_index = None
        with torch.inference_mode():
            self.backend.prepare(forward)
            return self.model.logits(self.model(forward, self.kv, self.backend))

    def share(self, row: int, source: int, tokens: int) -> None:
        """Row ``row``, empty, starts with the first ``tokens`` of row ``source``: a hit in the prefix cache."""
        assert tokens % self.page_size == 0
        self.table[row, : tokens // self.page_size] = self.table[source, : tokens // self.page_size]
        self.lengths[row] = tokens

    def greedy(self, prompts: dict[int, list[int]], steps: int) -> dict[int, list[int]]:
        """Prefills all rows at once, then decodes them together. Returns the new ids of each row."""
        order = sorted(prompts, key=lambda row: len(prompts[row]) != 1)
        ids = self.step(prompts).argmax(-1).tolist()
        out = {row: [token] for row, token in zip(order, ids, strict=True)}
        for _ in range(steps - 1):
            ids = self.step({row: out[row][-1:] for row in order}).argmax(-1).tolist()
            for row, token in zip(order, ids, strict=True):
                out[row].append(token)
        return out
