"""The backend as a whole against the torch reference: mixed steps, one after the other, over one pool."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers_triton import assert_close, dtypes, make_spec, randn

from minisgl.attention.base import BackendConfig
from minisgl.attention.forward_batch import ForwardBatch, HostPlan, token_slots
from minisgl.attention.torch_reference import TorchAttention
from minisgl.attention.triton import TritonAttention
from minisgl.kernel.ops import Ops
from minisgl.kvcache.device_pool import KVPool

ROWS = 4


def forward_batch(steps, table, page_size, device, surplus=None):
    """``steps``: (row, cached, new) of each request, those with one new token first.

    With ``surplus`` it is a step of a mixed graph, with so many tokens too many.
    """
    rows, cached, new = (np.array(column, np.int32) for column in zip(*steps, strict=True))
    host = HostPlan.of(cached, new)
    if surplus is not None:
        missing = ROWS + 1 - len(rows)
        rows, cached, new = (
            np.pad(a, (0, missing), constant_values=v) for a, v in ((rows, ROWS), (cached, 0), (new, 0))
        )
    cu_new = np.cumsum([0, *new]).astype(np.int32)
    positions = np.concatenate([np.arange(c, c + n) for c, n in zip(cached, new, strict=True)]).astype(np.int32)
    token_rows = np.repeat(rows, new)
    if surplus is not None:
        positions = np.pad(positions, (0, surplus))
        token_rows = np.pad(token_rows, (0, surplus), constant_values=ROWS)

    def put(array):
        return torch.from_numpy(array).to(device)

    positions_on = put(positions)
    return ForwardBatch(
        input_ids=torch.zeros_like(positions_on),
        positions=positions_on,
        slots=token_slots(table, put(token_rows), positions_on, page_size),
        rows=put(rows),
        cached=put(cached),
        seq_lens=put(cached + new),
        cu_new=put(cu_new),
        page_table=table,
        page_size=page_size,
        host=host,
        graph=None if surplus is None else "mixed",
    )


@pytest.mark.parametrize("deterministic", [False, True], ids=["", "deterministic"])
@pytest.mark.parametrize("fused", [False, True])
def test_single_tokens_of_a_graph_that_is_not_full(rng, device, fused, deterministic):
    heads, kv_heads, dim, page_size, pages = 4, 2, 64, 4, 40
    dtype = torch.float32
    config = BackendConfig(heads, kv_heads, dim, page_size, ROWS, 1024, dtype, device, deterministic)
    backends = [kind(config, Ops()) for kind in (TritonAttention, TorchAttention)]
    table = torch.full((ROWS + 1, 20), pages, dtype=torch.int32, device=device)
    table[:ROWS, :10] = torch.randperm(pages, generator=rng).to(device, torch.int32).view(ROWS, -1)
    spec = make_spec(rng, heads, kv_heads, dim, dtype, device)
    start = randn(rng, 2, 1, pages + 1, page_size, kv_heads, dim, dtype=dtype, device=device)
    qkv = randn(rng, 4, (heads + 2 * kv_heads) * dim, dtype=dtype, device=device)
    steps, padding = [(0, 17, 1), (2, 5, 1)], [(ROWS, 0, 1)] * 2
    outs = []
    for backend, batch in zip(
        backends,
        (forward_batch(steps + padding, table, page_size, device), forward_batch(steps, table, page_size, device)),
        strict=True,
    ):
        pool = KVPool(1, pages, page_size, kv_heads, dim, dtype=dtype, device=device)
        pool.k.copy_(start[0])
        pool.v.copy_(start[1])
        if backend is backends[0]:
            batch.graph, batch.host = "single", HostPlan.of(*np.array([[17, 5], [1, 1]], np.int32))
            batch.seq_lens[2:] = 0
            backend.prepare(batch)  # for the capture; a replay finds its own plan
        backend.prepare(batch)
        backend.begin(batch)
        mine = qkv[: batch.num_tokens].clone()
        if fused:
            outs.append(backend.forward_qkv(mine, spec, pool, batch))
        else:
            outs.append(
                backend.forward(*mine.view(len(mine), -1, dim).split([heads, kv_heads, kv_heads], 1), spec, pool, batch)
            )
    assert not outs[0].isnan().any()
    assert_close(outs[0][:2], outs[1])


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(
    ("windows", "deterministic"),
    [((None,), False), ((None, 9), False), ((None, 9), True)],
    ids=["full", "windows", "windows-deterministic"],
)
@pytest.mark.parametrize("surplus", [None, 0, 5])
def test_steps_agree_with_the_reference(rng, device, on_gpu, fused, windows, surplus, deterministic):
    big = 13 if on_gpu else 1
    scenario = [
        [(0, 0, 7 * big), (2, 0, 3)],
        [(2, 3, 1), (0, 7 * big, 12 * big), (1, 0, 18 * big)],
        [(0, 19 * big, 1), (2, 4, 1), (1, 18 * big, 1)],
        [(0, 19 * big + 1, 1), (1, 18 * big + 1, 2), (3, 0, 1 * big + 1)],
    ]
    heads, kv_heads, dim, page_size = 4, 2, 64, 4
    for dtype in dtypes(on_gpu):
        pages = 40 * big
        config = BackendConfig(heads, kv_heads, dim, page_size, ROWS, 1024, dtype, device, deterministic)
        backends = [kind(config, Ops()) for kind in (TritonAttention, TorchAttention)]
        pools = [KVPool(2, pages, page_size, kv_heads, dim, dtype=dtype, device=device) for _ in backends]
        for pool in pools:
            pool.k.fill_(float("nan"))
            pool.v.fill_(float("nan"))
        table = torch.full((ROWS + 1, 20 * big), pages, dtype=torch.int32, device=device)
        order = torch.randperm(pages, generator=rng).to(device, torch.int32)
        table[:ROWS, : pages // ROWS] = order.view(ROWS, -1)
        specs = [make_spec(rng, heads, kv_heads, dim, dtype, device, window=window) for window in windows]
        for steps in scenario:
            outs = []
            batches = [forward_batch(steps, table, page_size, device, extra) for extra in (surplus, None)]
            real, tokens = batches[1].num_tokens, batches[0].num_tokens
            qkvs = [randn(rng, tokens, (heads + 2 * kv_heads) * dim, dtype=dtype, device=device) for _ in specs]
            for backend, pool, batch in zip(backends, pools, batches, strict=True):
                backend.prepare(batch)
                backend.begin(batch)
                for spec, all_qkv in zip(specs, qkvs, strict=True):
                    qkv = all_qkv[: batch.num_tokens].clone()
                    if fused:
                        out = backend.forward_qkv(qkv, spec, pool, batch)
                    else:
                        q, k, v = qkv.view(len(qkv), -1, dim).split([heads, kv_heads, kv_heads], 1)
                        out = backend.forward(q, k, v, spec, pool, batch)
                    assert not out.isnan().any()
                    outs.append(out[:real].clone())
            for out, reference in zip(outs[: len(specs)], outs[len(specs) :], strict=True):
                assert_close(out, reference, factor=2)
        # Padding may write to the last page.
        keys, values = (
            [pool[0, :-1].nan_to_num() for pool in pair] for pair in zip(*((p.k, p.v) for p in pools), strict=False)
        )
        assert_close(*keys)
        assert torch.equal(*values)
