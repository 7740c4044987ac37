"""The reference itself, against scaled_dot_product_attention over tensors that were never paged."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from model_driver import make_batch, make_forward_batch

from minisgl.attention.base import BackendConfig
from minisgl.attention.registry import BACKENDS, make_backend
from minisgl.attention.torch_reference import TorchAttention
from minisgl.kernel.attention_spec import AttentionSpec
from minisgl.kernel.ops import Ops
from minisgl.kvcache.device_pool import KVPool

CPU = torch.device("cpu")
DIM, PAGES, ROWS = 16, 64, 5


def config(page_size: int, heads: int = 4, kv_heads: int = 2) -> BackendConfig:
    return BackendConfig(heads, kv_heads, DIM, page_size, ROWS, 256, torch.float32, CPU)


def make_pool(page_size: int, kv_heads: int) -> KVPool:
    """Full of NaN: what was not written must not be read."""
    pool = KVPool(2, PAGES, page_size, kv_heads, DIM, dtype=torch.float32, device=CPU)
    pool.k.fill_(float("nan"))
    pool.v.fill_(float("nan"))
    return pool


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: int | None) -> torch.Tensor:
    """q (n, Hq, D) are the last of k and v (L, Hkv, D)."""
    new, length = len(q), len(k)
    i, j = torch.arange(length - new, length)[:, None], torch.arange(length)[None]
    mask = (j <= i) & ((i - j < window) if window else True)
    heads = [x.transpose(0, 1) for x in (q, k, v)]
    return F.scaled_dot_product_attention(*heads, attn_mask=mask, scale=scale, enable_gqa=True).transpose(0, 1)


@pytest.mark.parametrize("window", [None, 1, 5])
@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_mixed_batches_over_pages(page_size: int, window: int | None, kv_heads: int) -> None:
    torch.manual_seed(0)
    pool = make_pool(page_size, kv_heads)
    backend = TorchAttention(config(page_size, 4, kv_heads), Ops())
    spec = AttentionSpec(1, 4, kv_heads, DIM, 0.3, torch.zeros(64, DIM), window)
    table = torch.full((ROWS + 1, 32), PAGES, dtype=torch.int32)
    free = np.random.default_rng(1).permutation(PAGES).tolist()
    k, v = torch.randn(ROWS, 30, kv_heads, DIM), torch.randn(ROWS, 30, kv_heads, DIM)
    lengths = [0] * ROWS
    for step in ({0: 7, 3: 1}, {3: 1, 0: 9, 4: 12}, {0: 1, 3: 1, 4: 1}, {4: 1, 0: 5, 1: 2}):
        requests = [(row, lengths[row], [0] * new) for row, new in sorted(step.items(), key=lambda r: r[1] != 1)]
        for row, cached, ids in requests:
            while (table[row] < PAGES).sum() * page_size < cached + len(ids):
                table[row, (table[row] < PAGES).sum()] = free.pop()
        batch = make_forward_batch(make_batch(requests), table, page_size)
        q = torch.randn(batch.num_tokens, 4, DIM)
        spans = [slice(cached, cached + len(ids)) for _, cached, ids in requests]
        new_k = torch.cat([k[row, span] for (row, _, _), span in zip(requests, spans, strict=True)])
        new_v = torch.cat([v[row, span] for (row, _, _), span in zip(requests, spans, strict=True)])
        backend.prepare(batch)
        out = backend.forward(q, new_k, new_v, spec, pool, batch)
        expected = []
        for (row, cached, ids), part in zip(requests, q.split([len(r[2]) for r in requests]), strict=True):
            lengths[row] = cached + len(ids)
            expected.append(dense(part, k[row, : lengths[row]], v[row, : lengths[row]], 0.3, window))
        torch.testing.assert_close(out, torch.cat(expected).flatten(1))
    assert pool.k[0].isnan().all(), "the other layer was touched"


def test_norm_and_rope_come_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """forward_qkv splits heads of q, k and v in turn, norms and turns q and k, and leaves v alone."""
    torch.manual_seed(0)
    seen = {}
    backend = TorchAttention(config(4), Ops())
    monkeypatch.setattr(backend, "forward", lambda q, k, v, *rest: seen.update(q=q, k=k, v=v))
    q_norm, k_norm, table = torch.randn(DIM), torch.randn(DIM), torch.randn(64, DIM)
    spec = AttentionSpec(0, 4, 2, DIM, 1.0, table, None, q_norm, k_norm, 1e-6)
    page_table = torch.zeros(ROWS + 1, 16, dtype=torch.int32)
    batch = make_forward_batch(make_batch([(0, 9, [1]), (1, 3, [1, 1])]), page_table, 4)
    assert batch.positions.tolist() == [9, 3, 4]
    qkv = torch.randn(3, 8 * DIM)
    backend.forward_qkv(qkv.clone(), spec, make_pool(4, 2), batch)
    heads = qkv.view(3, 8, DIM)
    ops = Ops()
    assert torch.equal(seen["q"], ops.rope(ops.rms_norm(heads[:, :4], q_norm, 1e-6), batch.positions, table))
    assert torch.equal(seen["k"], ops.rope(ops.rms_norm(heads[:, 4:6], k_norm, 1e-6), batch.positions, table))
    assert torch.equal(seen["v"], heads[:, 6:])


def test_registry() -> None:
    assert type(make_backend("torch", config(4), Ops())) is TorchAttention
    with pytest.raises(ValueError, match=", ".join(BACKENDS)):
        make_backend("flash", config(4), Ops())
