"""The CPU backend against the plain torch one, which has tests of its own."""

from __future__ import annotations

import pytest
import torch
from model_driver import make_batch, make_forward_batch

from minisgl.attention.base import BackendConfig
from minisgl.attention.cpu import CpuAttention
from minisgl.attention.torch_reference import TorchAttention
from minisgl.kernel.attention_spec import AttentionSpec
from minisgl.kernel.ops import Ops
from minisgl.kvcache.device_pool import KVPool

CPU = torch.device("cpu")
HEADS, KV_HEADS, DIM, PAGES, PAGE_SIZE, ROWS = 6, 2, 24, 64, 4, 4


def config(dtype: torch.dtype = torch.float32) -> BackendConfig:
    return BackendConfig(HEADS, KV_HEADS, DIM, PAGE_SIZE, ROWS, 256, dtype, CPU)


def make_spec(window: int | None, norms: bool) -> AttentionSpec:
    angles = torch.rand(64, DIM // 4) * 6
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1)
    q_norm, k_norm = (torch.randn(DIM), torch.randn(DIM)) if norms else (None, None)
    return AttentionSpec(1, HEADS, KV_HEADS, DIM, 0.3, cos_sin, window, q_norm, k_norm, 1e-6)


@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("entry", ["forward", "forward_qkv"])
def test_same_as_plain_torch(entry: str, window: int | None, norms: bool) -> None:
    torch.manual_seed(0)
    spec = make_spec(window, norms)
    table = torch.randperm(PAGES)[: ROWS * 16].view(ROWS, 16).int()
    backends = [TorchAttention(config(), Ops()), CpuAttention(config(), Ops())]
    pools = []
    for _ in backends:
        pool = KVPool(2, PAGES, PAGE_SIZE, KV_HEADS, DIM, dtype=torch.float32, device=CPU)
        pools.append(pool)
        pool.k.fill_(torch.nan)
        pool.v.fill_(torch.nan)
    lengths = [0] * ROWS
    for step in ({0: 7, 3: 1}, {3: 1, 0: 9, 2: 12}, {0: 1, 3: 1, 2: 1}):
        order = sorted(step.items(), key=lambda item: item[1] != 1)
        batch = make_forward_batch(make_batch([(row, lengths[row], [0] * new) for row, new in order]), table, PAGE_SIZE)
        for row, new in order:
            lengths[row] += new
        qkv = torch.randn(batch.num_tokens, (HEADS + 2 * KV_HEADS) * DIM)
        q, k, v = qkv.view(len(qkv), -1, DIM).split([HEADS, KV_HEADS, KV_HEADS], dim=1)
        outs = []
        for backend, pool in zip(backends, pools, strict=True):
            backend.prepare(batch)
            if entry == "forward":
                outs.append(backend.forward(q, k, v, spec, pool, batch))
            else:
                outs.append(backend.forward_qkv(qkv.clone(), spec, pool, batch))
        torch.testing.assert_close(outs[1], outs[0], rtol=1e-5, atol=1e-5)
    for plain, mine in zip((pools[0].k, pools[0].v), (pools[1].k, pools[1].v), strict=True):
        torch.testing.assert_close(mine, plain, equal_nan=True)


def test_half_precision_is_refused() -> None:
    with pytest.raises(ValueError, match="bfloat16"):
        CpuAttention(config(torch.bfloat16), Ops())
