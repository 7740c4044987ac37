"""Attention by FlashInfer, an optional package: its kernels attend, after one of ours for norm, rope and store.

    prepare   host      lengths ──> which pages are whose ──> FlashInfer's plans of who computes what, copied over
    begin     device    page table ──> the pages of all requests, one after the other
    forward   device    norm, rope and store; attention of requests with one new token, then of the others

FlashInfer plans on the host, before every step, for layers of one window and one scale: each such kind of layer has an
object of its own, which FlashInfer calls a wrapper. Its kernels are compiled on first use, which takes minutes, and
found in its cache from then on.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from ..core import Int32
from ..kernel.attention_spec import AttentionSpec
from ..kernel.triton.launch import num_sms, supports_pdl
from ..kernel.triton.pages import gather_pages
from ..kernel.triton.rope import norm_rope_store
from .base import AttentionBackend, BackendConfig, in_pinned_memory

if TYPE_CHECKING:
    from ..kernel.ops import Ops
    from ..kvcache.device_pool import KVPool
    from .forward_batch import ForwardBatch

HEAD_DIMS = (64, 128, 256)
DTYPES = (torch.bfloat16, torch.float16)

_LEAST_WORKSPACE = 128 << 20  # bytes, as FlashInfer recommends
_GRAPH_PLAN_BYTES = 1 << 20  # for the plan of a step of single tokens; a wrapper begins with 8 MiB, twice


def plan_pages(lengths: Int32, page_size: int) -> tuple[Int32, Int32]:
    """Whose pages are where in a list of the pages of all requests, and how full the last one of each is.

    ``lengths`` (B) are at least 1. Returns ``indptr`` (B + 1), where request i has pages indptr[i] .. indptr[i + 1],
    and the tokens in each last page (B), 1 .. page_size, both int32.
    """
    indptr = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(-(-lengths // page_size), out=indptr[1:])
    return indptr, (lengths - 1) % page_size + 1


def uses_tensor_cores(group: int) -> bool:
    """Whether steps of single tokens run on them, with ``group`` query heads for each KV head.

    FlashInfer has kernels without them for few of the wider groups, and these are slower.
    """
    return group > 3


def workspace_bytes(config: BackendConfig, sms: int) -> int:
    """What FlashInfer needs at most where it splits the KV of requests: a float32 output for each row of each tile.

    It makes two tiles of up to 128 rows for each of ``sms`` multiprocessors at most, or in a CUDA graph of single
    tokens as many of 16 rows (more in wide groups) as they can ever need.
    """
    group = config.num_heads // config.num_kv_heads
    rows = 16 if group <= 16 else 64 if group <= 64 else 128
    single = -(-config.max_running_req * group // rows) + config.max_running_req - 1
    tiled = max(2 * sms // config.num_kv_heads * 128, single * rows)
    return max(_LEAST_WORKSPACE, config.num_heads * tiled * (config.head_dim + 1) * 4 + (1 << 20))


class FlashInferAttention(AttentionBackend):
    """bf16 or fp16 on a GPU, heads of 64, 128 or 256 elements, any page size. Mixed steps are in no CUDA graph.

    Raises ValueError for anything else, and where FlashInfer is not installed.
    """

    serves_graphs = frozenset({"single"})

    def __init__(self, config: BackendConfig, ops: Ops) -> None:
        super().__init__(config, ops)
        if config.dtype not in DTYPES:
            raise ValueError(
                f"Attention backend 'fi' serves bfloat16 and float16, not {str(config.dtype).removeprefix('torch.')}; "
                "choose another --dtype, or --attn triton."
            )
        if config.head_dim not in HEAD_DIMS:
            raise ValueError(
                f"Attention backend 'fi' serves heads of {', '.join(map(str, HEAD_DIMS))} elements, "
                f"not {config.head_dim}; choose --attn triton."
            )
        flashinfer = _import()
        workspace = torch.zeros(
            workspace_bytes(config, num_sms(config.device)), dtype=torch.uint8, device=config.device
        )
        self._shared = _Shared(config, flashinfer, workspace)
        self._single, self._several = _Single(self._shared), _Several(self._shared)
        self._graph_pages: torch.Tensor | None = None
        self.pdl = supports_pdl(config.device)

    def prepare(self, batch: ForwardBatch) -> None:
        host, size = batch.host, batch.size
        if batch.graph is not None:
            if batch.plan is None:
                batch.plan = [_Part(_GraphSingle(self._shared, size, self._pages_of_graphs(batch)), slice(0, size))]
            # FlashInfer plans for no request without a length: those that fill the step up get their own token.
            new = np.ones(size, np.int32)
            lengths = new.copy()
            lengths[: len(host.cached)] += host.cached
        else:
            single, new, lengths = host.num_single, host.new, host.cached + host.new
            batch.plan = [_Part(self._single, slice(0, single))] if single else []
            if single < size:
                batch.plan.append(_Part(self._several, slice(single, None)))
        for requests, which in batch.plan:
            requests.plan(lengths[which], new[which])

    def _pages_of_graphs(self, batch: ForwardBatch) -> torch.Tensor:
        """Room for the pages of any step, which all graphs share."""
        if self._graph_pages is None:
            self._graph_pages = torch.empty(
                self.config.max_running_req * batch.page_table.shape[1], dtype=torch.int32, device=self.config.device
            )
        return self._graph_pages

    def begin(self, batch: ForwardBatch) -> None:
        for requests, which in batch.plan:
            gather_pages(batch.page_table, batch.rows[which], requests.indptr, requests.pages)

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        spec: AttentionSpec,
        kv: KVPool,
        batch: ForwardBatch,
    ) -> torch.Tensor:
        kv.store(spec.layer, k, v, batch.slots)
        return self._attend(q, spec, kv, batch)

    def forward_qkv(self, qkv: torch.Tensor, spec: AttentionSpec, kv: KVPool, batch: ForwardBatch) -> torch.Tensor:
        keys, values = kv.k[spec.layer], kv.v[spec.layer]
        q = norm_rope_store(qkv, spec, keys, values, batch.positions, batch.slots, pdl=self.pdl)
        return self._attend(q, spec, kv, batch)

    def _attend(self, q: torch.Tensor, spec: AttentionSpec, kv: KVPool, batch: ForwardBatch) -> torch.Tensor:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        for requests, which in batch.plan:
            requests.attend(q[which], spec, kv, out[which])
        return out.flatten(1)


def _import() -> Any:
    try:
        return import_module("flashinfer")
    except ModuleNotFoundError as error:
        if error.name != "flashinfer":
            raise
        raise ValueError(
            "Attention backend 'fi' needs FlashInfer, which is not installed: pip install 'minisgl[cuda]'."
        ) from error


class _Shared(NamedTuple):
    """What all wrappers are made from. ``workspace`` is theirs in turn, since they run one after the other."""

    config: BackendConfig
    flashinfer: Any
    workspace: torch.Tensor


class _Kind(NamedTuple):
    """What layers have in common that share a wrapper."""

    window: int | None
    scale: float


class _Wrapper:
    """One of FlashInfer's. It plans in pinned memory of its own, which must not change before it has been copied."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self._copied = torch.cuda.Event()

    def plan(self, *arguments: Any, **more: Any) -> None:
        # The copy is the first thing on the stream of the step before, and whoever plans this one has waited for the
        # step before that: there is nothing left to wait for.
        self._copied.synchronize()
        self._inner.plan(*arguments, **more)
        self._copied.record()

    def run(self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, out: torch.Tensor) -> None:
        self._inner.run(q, (keys, values), out=out)


class _Requests(ABC):
    """Some of the requests of a step, planned together, with all wrappers that their layers have needed so far.

    ``pages`` are those of all of them, and request i has pages ``indptr[i] .. indptr[i + 1]``. Both are int32 tensors
    on the device; ``plan`` fills the second, and the first has to be filled before any layer attends.
    """

    pages: torch.Tensor
    indptr: torch.Tensor
    _host_indptr: torch.Tensor
    _last_page_len: torch.Tensor
    _lengths: torch.Tensor
    _cu_new: torch.Tensor

    def __init__(self, shared: _Shared) -> None:
        self.shared = shared
        self._wrappers: dict[_Kind, _Wrapper] = {}

    def plan(self, lengths: Int32, new: Int32) -> None:
        """``lengths`` (B) of the requests with their ``new`` tokens (B)."""
        device = self.shared.config.device
        indptr, last_page_len = plan_pages(lengths, self.shared.config.page_size)
        cu_new = np.zeros(len(new) + 1, np.int32)
        np.cumsum(new, out=cu_new[1:])
        self._lengths, self._cu_new = in_pinned_memory(lengths, device), in_pinned_memory(cu_new, device)
        self._host_indptr = in_pinned_memory(indptr, device)
        self._last_page_len = in_pinned_memory(last_page_len, device)
        self._place(self._host_indptr)
        for kind, wrapper in self._wrappers.items():
            self._plan(wrapper, kind)

    def attend(self, q: torch.Tensor, spec: AttentionSpec, kv: KVPool, out: torch.Tensor) -> None:
        """From ``q`` to ``out``, both (T, num_heads, head_dim)."""
        kind = _Kind(spec.sliding_window, spec.scale)
        wrapper = self._wrappers.get(kind)
        if wrapper is None:
            # The first layer of its kind in the first step. From then on plan does it.
            wrapper = self._wrappers[kind] = _Wrapper(self._make())
            self._plan(wrapper, kind)
        wrapper.run(q, kv.k[spec.layer], kv.v[spec.layer], out)

    def _place(self, indptr: torch.Tensor) -> None:
        """Moves ``indptr`` to the device, and makes room for that many pages."""
        device = self.shared.config.device
        self.indptr = indptr.to(device, non_blocking=True)
        self.pages = torch.empty(int(indptr[-1]), dtype=torch.int32, device=device)

    @abstractmethod
    def _make(self) -> Any:
        """A wrapper of FlashInfer's."""

    @abstractmethod
    def _plan(self, wrapper: _Wrapper, kind: _Kind) -> None:
        """Plans these requests for layers of one kind."""

    def _shape(self) -> tuple[int, int, int, int]:
        config = self.shared.config
        return config.num_heads, config.num_kv_heads, config.head_dim, config.page_size

    def _options(self, kind: _Kind) -> dict[str, Any]:
        return {
            # FlashInfer counts the tokens before the query's own; -1 means all of them.
            "window_left": -1 if kind.window is None else kind.window - 1,
            "sm_scale": kind.scale,
            "q_data_type": self.shared.config.dtype,
            "kv_data_type": self.shared.config.dtype,
        }


class _Single(_Requests):
    """Requests with one new token."""

    _graph_options: Mapping[str, Any] = {}

    def _make(self) -> Any:
        config, flashinfer, workspace = self.shared
        return flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            workspace,
            "NHD",
            use_tensor_cores=uses_tensor_cores(config.num_heads // config.num_kv_heads),
            backend="fa2",
            **self._graph_options,
        )

    def _plan(self, wrapper: _Wrapper, kind: _Kind) -> None:
        wrapper.plan(self._host_indptr, self.pages, self._last_page_len, *self._shape(), **self._options(kind))


class _GraphSingle(_Single):
    """The same number of them in each step, at the fixed addresses of a CUDA graph. ``pages`` has room for any step."""

    def __init__(self, shared: _Shared, size: int, pages: torch.Tensor) -> None:
        super().__init__(shared)
        self.pages = pages
        self.indptr = torch.zeros(size + 1, dtype=torch.int32, device=pages.device)
        self._graph_options = {
            "use_cuda_graph": True,
            "paged_kv_indptr_buffer": self.indptr,
            "paged_kv_indices_buffer": pages,
            "paged_kv_last_page_len_buffer": torch.zeros(size, dtype=torch.int32, device=pages.device),
        }

    def _place(self, indptr: torch.Tensor) -> None:
        self.indptr.copy_(indptr, non_blocking=True)

    def _make(self) -> Any:
        wrapper = super()._make()
        workspace = self.shared.workspace
        plan = torch.empty(_GRAPH_PLAN_BYTES, dtype=torch.uint8, device=workspace.device)
        wrapper.reset_workspace_buffer(workspace, plan)
        return wrapper

    def _plan(self, wrapper: _Wrapper, kind: _Kind) -> None:
        # The graph itself lists the pages (FlashInferAttention.begin): there are none to copy.
        wrapper.plan(self._host_indptr, self.pages[:0], self._last_page_len, *self._shape(), **self._options(kind))


class _Several(_Requests):
    """Requests with several new tokens."""

    def _make(self) -> Any:
        return self.shared.flashinfer.BatchPrefillWithPagedKVCacheWrapper(self.shared.workspace, "NHD")

    def _plan(self, wrapper: _Wrapper, kind: _Kind) -> None:
        wrapper.plan(
            self._cu_new,
            self._host_indptr,
            self.pages,
            self._last_page_len,
            *self._shape(),
            causal=True,
            seq_lens=self._lengths,
            **self._options(kind),
        )


class _Part(NamedTuple):
    """What a step has for some requests. Those with one new token come first, so ``which`` slices tokens as well."""

    requests: _Requests
    which: slice
