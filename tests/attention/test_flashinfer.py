"""The FlashInfer backend against the plain torch one in float32, over steps of all kinds on one pool.

Without a GPU a stand-in for the package, which computes in torch what FlashInfer documents, shows that it is asked the
right things.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from model_driver import int32, make_batch, make_forward_batch

from minisgl.attention.base import BackendConfig
from minisgl.attention.forward_batch import ForwardBatch, HostPlan
from minisgl.attention.registry import make_backend
from minisgl.attention.torch_reference import TorchAttention, attend
from minisgl.kernel.attention_spec import AttentionSpec
from minisgl.kernel.ops import Ops
from minisgl.kvcache.device_pool import KVPool

CPU, GPU = torch.device("cpu"), torch.device("cuda")
ROWS, KV_HEADS = 5, 2
TOLERANCE = {torch.float16: 4e-3, torch.bfloat16: 3e-2}

Step = list[tuple[int, int, int]]
"""(row, cached, new) of each request, those with one new token first."""


def config(
    device: torch.device, dtype: torch.dtype, *, group: int = 2, head_dim: int = 128, page_size: int = 16
) -> BackendConfig:
    return BackendConfig(group * KV_HEADS, KV_HEADS, head_dim, page_size, ROWS, 1024, dtype, device)


class World:
    """The backend and the reference, each with a pool that begins as NaN, and layers of several kinds."""

    def __init__(self, config: BackendConfig, windows: list[int | None], tokens: int) -> None:
        from minisgl.attention.flashinfer import FlashInferAttention

        self.config = config
        self.backend = FlashInferAttention(config, Ops())
        self.reference = TorchAttention(replace(config, dtype=torch.float32), Ops())
        width = -(-tokens // config.page_size)
        self.pages = ROWS * width
        self.table = torch.full((ROWS + 1, width), self.pages, dtype=torch.int32, device=config.device)
        self.table[:ROWS] = torch.randperm(self.pages).view(ROWS, width).int()
        self.pool, self.exact = (self._pool(dtype) for dtype in (config.dtype, torch.float32))
        self.specs = [self._spec(window, scale) for window, scale in zip(windows, (0.1, 0.07, 0.1), strict=False)]

    def _pool(self, dtype: torch.dtype) -> KVPool:
        c = self.config
        pool = KVPool(1, self.pages, c.page_size, KV_HEADS, c.head_dim, dtype=dtype, device=c.device)
        pool.k.fill_(torch.nan)
        pool.v.fill_(torch.nan)
        return pool

    def _spec(self, window: int | None, scale: float) -> AttentionSpec:
        c = self.config
        angles = torch.rand(4096, c.head_dim // 2, device=c.device) * 6
        norms = [1 + torch.randn(c.head_dim, device=c.device).to(c.dtype) / 8 for _ in range(2)]
        cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1)
        return AttentionSpec(0, c.num_heads, KV_HEADS, c.head_dim, scale, cos_sin, window, *norms, 1e-6)

    def batch(self, step: Step) -> ForwardBatch:
        requests = [(row, cached, [0] * new) for row, cached, new in step]
        return make_forward_batch(make_batch(requests), self.table, self.config.page_size)

    def qkv(self, tokens: int) -> torch.Tensor:
        c = self.config
        width = (c.num_heads + 2 * KV_HEADS) * c.head_dim
        return torch.randn(tokens, width, device=c.device).to(c.dtype)

    def exactly(self, step: Step, qkv: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
        batch = self.batch(step)
        self.reference.prepare(batch)
        wide = replace(spec, q_norm=spec.q_norm.float(), k_norm=spec.k_norm.float())
        return self.reference.forward_qkv(qkv.float(), wide, self.exact, batch)

    def check(self, step: Step, fused: bool = True) -> None:
        """One step in which every layer sees other inputs."""
        batch = self.batch(step)
        self.backend.prepare(batch)
        self.backend.begin(batch)
        c = self.config
        for spec in self.specs:
            qkv = self.qkv(batch.num_tokens)
            expected = self.exactly(step, qkv, spec)
            if fused:
                out = self.backend.forward_qkv(qkv, spec, self.pool, batch)
            else:
                heads = qkv.view(len(qkv), -1, c.head_dim).split([c.num_heads, KV_HEADS, KV_HEADS], 1)
                q, k = (
                    Ops().rope(Ops().rms_norm(x, norm, spec.norm_eps), batch.positions, spec.cos_sin)
                    for x, norm in zip(heads[:2], (spec.q_norm, spec.k_norm), strict=True)
                )
                out = self.backend.forward(q, k, heads[2], spec, self.pool, batch)
            self.compare(out, expected)

    def compare(self, out: torch.Tensor, expected: torch.Tensor) -> None:
        assert out.dtype == self.config.dtype
        assert torch.isfinite(out).all()
        error = (out.float() - expected).norm() / expected.norm()
        assert error < TOLERANCE[out.dtype], f"relative error {error:.1e}"


def story(scale: int) -> list[Step]:
    """Prompts, chunks on a cached prefix, single tokens, and mixtures of them."""
    return [
        [(0, 0, 7 * scale), (2, 0, 3)],
        [(2, 3, 1), (0, 7 * scale, 12 * scale), (1, 0, 18 * scale)],
        [(0, 19 * scale, 1), (2, 4, 1), (1, 18 * scale, 1)],
        [(0, 19 * scale + 1, 1), (1, 18 * scale + 1, 2), (3, 0, scale + 1)],
        [(4, 0, 1)],
    ]


def tell(world: World, scale: int, fused: bool = True) -> None:
    for step in story(scale):
        world.check(step, fused)


class Graph:
    """A graph of single tokens for ``size`` requests: what the engine does around a recording."""

    def __init__(self, world: World, size: int) -> None:
        self.world, self.size, device = world, size, world.config.device
        self.rows = torch.zeros(size, dtype=torch.int32, device=device)
        self.positions, self.seq_lens = torch.zeros_like(self.rows), torch.zeros_like(self.rows)
        self.slots = torch.zeros(size, dtype=torch.int64, device=device)
        self.qkvs = [world.qkv(size) for _ in world.specs]
        self.batch = ForwardBatch(
            input_ids=torch.zeros_like(self.rows),
            positions=self.positions,
            slots=self.slots,
            rows=self.rows,
            cached=self.positions,
            seq_lens=self.seq_lens,
            cu_new=torch.arange(size + 1, dtype=torch.int32, device=device),
            page_table=world.table,
            page_size=world.config.page_size,
            host=HostPlan.of(int32([]), int32([])),
            graph="single",
        )
        self.fill([])
        world.backend.prepare(self.batch)
        self.replay = self.forward
        if device.type == "cuda":
            for _ in range(2):
                self.forward()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self.outs = self.forward()
            self.replay = lambda: (graph.replay(), self.outs)[1]

    def forward(self) -> list[torch.Tensor]:
        backend, batch, pool = self.world.backend, self.batch, self.world.pool
        backend.begin(batch)
        pairs = zip(self.qkvs, self.world.specs, strict=True)
        return [backend.forward_qkv(qkv.clone(), spec, pool, batch) for qkv, spec in pairs]

    def fill(self, step: Step) -> None:
        """Those that are missing point to the scratch row, and have no length."""
        padded = step + [(ROWS, 0, 0)] * (self.size - len(step))
        rows, cached, new = (int32(column) for column in zip(*padded, strict=True))
        self.rows.copy_(torch.from_numpy(rows))
        self.positions.copy_(torch.from_numpy(cached))
        self.seq_lens.copy_(torch.from_numpy(cached + new))
        page = self.world.table[self.rows.long(), self.positions.long() // self.world.config.page_size].long()
        self.slots.copy_(page * self.world.config.page_size + self.positions % self.world.config.page_size)
        self.batch.host = HostPlan.of(cached[: len(step)], new[: len(step)])

    def check(self, step: Step) -> None:
        world = self.world
        self.fill(step)
        for qkv in self.qkvs:
            qkv.copy_(world.qkv(self.size))
        expected = [
            world.exactly(step, qkv[: len(step)], spec) for qkv, spec in zip(self.qkvs, world.specs, strict=True)
        ]
        world.backend.prepare(self.batch)
        for out, exact in zip(self.replay(), expected, strict=True):
            assert torch.isfinite(out).all()
            world.compare(out[: len(step)], exact)


def tell_graphs(world: World, scale: int) -> None:
    """Graphs recorded before there is any request, then replayed for others each time, with eager steps between."""
    graphs = {size: Graph(world, size) for size in (4, 2)}
    lengths = dict(enumerate((7 * scale, 18 * scale, 3, 1)))
    world.check([(row, 0, length) for row, length in sorted(lengths.items(), key=lambda item: item[1] != 1)])
    for rows in ((0, 1, 2, 3), (3, 1), (2,), (0, 2, 1), (1, 0, 3)):
        step = [(row, lengths[row], 1) for row in rows]
        graphs[4 if len(rows) > 2 else 2].check(step)
        lengths |= {row: lengths[row] + 1 for row in rows}
        world.check([(4, lengths.setdefault(4, 0), 1)])
        lengths[4] += 1


# Without a GPU


class StandIn:
    """What both of FlashInfer's wrappers have in common, in torch."""

    def __init__(self, workspace: torch.Tensor, layout: str, **options: Any) -> None:
        assert workspace.dtype == torch.uint8
        assert layout == "NHD"
        self.options = options

    def reset_workspace_buffer(self, floats: torch.Tensor, ints: torch.Tensor) -> None:
        assert len(ints) >= 1 << 20

    def place(self, indptr: torch.Tensor, pages: torch.Tensor, last: torch.Tensor) -> None:
        assert {indptr.dtype, pages.dtype, last.dtype} == {torch.int32}
        assert len(last) == len(indptr) - 1
        assert int(last.min()) >= 1
        if not self.options.get("use_cuda_graph"):
            assert len(pages) >= int(indptr[-1])
            self.indptr, self.pages, self.last = indptr, pages, last
            return
        self.indptr, self.pages, self.last = (
            self.options[f"paged_kv_{name}_buffer"] for name in ("indptr", "indices", "last_page_len")
        )
        assert len(self.last) == len(last)
        self.indptr.copy_(indptr)
        self.last.copy_(last)
        self.pages[: len(pages)].copy_(pages)

    def attend(self, q: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor], ends: list[int]) -> torch.Tensor:
        left, outs, start = self.kind["window_left"], [], 0
        for i, end in enumerate(ends):
            pages = self.pages[self.indptr[i] : self.indptr[i + 1]].long()
            length = (len(pages) - 1) * kv[0].shape[1] + int(self.last[i])
            k, v = (x[pages].flatten(0, 1)[:length] for x in kv)
            outs.append(attend(q[start:end], k, v, self.kind["sm_scale"], None if left < 0 else left + 1))
            start = end
        return torch.cat(outs)


class DecodeStandIn(StandIn):
    def plan(self, indptr, pages, last, heads, kv_heads, head_dim, page_size, **kind):
        assert self.options["use_tensor_cores"] == (heads // kv_heads not in (1, 2, 3))
        self.place(indptr, pages, last)
        self.kind = kind

    def run(self, q, kv, *, out):
        out.copy_(self.attend(q, kv, list(range(1, len(q) + 1))))


class PrefillStandIn(StandIn):
    def plan(self, cu_new, indptr, pages, last, heads, kv_heads, head_dim, page_size, *, causal, seq_lens, **kind):
        assert causal
        assert torch.equal(seq_lens, (indptr.diff() - 1) * page_size + last)
        self.place(indptr, pages, last)
        self.kind, self.ends = kind, cu_new[1:].tolist()

    def run(self, q, kv, *, out):
        assert len(q) == self.ends[-1]
        out.copy_(self.attend(q, kv, self.ends))


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.is_available():
        pytest.skip("the kernels before attention are not interpreted here")
    package = SimpleNamespace(
        BatchDecodeWithPagedKVCacheWrapper=DecodeStandIn, BatchPrefillWithPagedKVCacheWrapper=PrefillStandIn
    )
    monkeypatch.setitem(sys.modules, "flashinfer", package)
    event = SimpleNamespace(record=lambda: None, synchronize=lambda: None)
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("page_size", [1, 16])
def test_flashinfer_is_asked_the_right_things(stand_in: None, page_size: int, fused: bool) -> None:
    tell(World(config(CPU, torch.float16, page_size=page_size), [None, 5, 1], 64), 2, fused)


@pytest.mark.parametrize("group", [2, 5])
def test_flashinfer_is_asked_the_right_things_in_graphs(stand_in: None, group: int) -> None:
    tell_graphs(World(config(CPU, torch.float16, group=group, page_size=4), [None, 5], 64), 2)


def test_a_missing_package_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with pytest.raises(ValueError, match=r"^Attention backend 'fi' needs .* pip install 'minisgl\[cuda\]'\.$"):
        make_backend("fi", config(GPU, torch.bfloat16), Ops())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": torch.float32}, "serves bfloat16 and float16, not float32"),
        ({"head_dim": 80}, "heads of 64, 128, 256 elements, not 80"),
        ({"device": CPU}, "does not run on device cpu"),
    ],
)
def test_what_it_cannot_serve_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_backend("fi", replace(config(GPU, torch.bfloat16), **changes), Ops())


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_the_plan_of_pages(page_size: int) -> None:
    from minisgl.attention.flashinfer import plan_pages

    lengths = np.random.default_rng().integers(1, 300, 40).astype(np.int32)
    lengths[:4] = 1, page_size, page_size + 1, 2 * page_size
    indptr, last = plan_pages(lengths, page_size)
    assert indptr.dtype == last.dtype == np.int32
    assert indptr[0] == 0
    assert ((np.diff(indptr) - 1) * page_size + last == lengths).all()
    assert last.min() >= 1
    assert last.max() <= page_size


def test_the_workspace_holds_what_is_split() -> None:
    from minisgl.attention.flashinfer import workspace_bytes

    # Qwen3-14B with 256 requests in a graph: 80 tiles of 16 rows for all of them, and 255 more that are not full.
    made_for = BackendConfig(40, 8, 128, 16, 256, 8192, torch.bfloat16, GPU)
    assert 0 <= workspace_bytes(made_for, 132) - 40 * (80 + 255) * 16 * 129 * 4 <= 32 << 20
    assert workspace_bytes(replace(made_for, num_heads=128), 132) > 128 * 33 * 128 * 129 * 4
    assert workspace_bytes(replace(made_for, num_heads=8), 132) == 128 << 20


# With a GPU

needs_flashinfer = pytest.mark.skipif(find_spec("flashinfer") is None, reason="needs FlashInfer")


@pytest.mark.gpu
@needs_flashinfer
@pytest.mark.parametrize("group", [2, 5])
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize(
    ("dtype", "windows"), [(torch.bfloat16, [None]), (torch.float16, [None]), (torch.bfloat16, [None, 100])]
)
def test_steps(dtype: torch.dtype, windows: list[int | None], page_size: int, group: int) -> None:
    world = World(config(GPU, dtype, group=group, page_size=page_size), windows, 700)
    for scale, fused in ((30, True), (3, False)):
        tell(world, scale, fused)


@pytest.mark.gpu
@needs_flashinfer
@pytest.mark.parametrize("group", [2, 5])
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_graphs(page_size: int, group: int) -> None:
    world = World(config(GPU, torch.bfloat16, group=group, page_size=page_size), [None, 100], 700)
    tell_graphs(world, 30)
