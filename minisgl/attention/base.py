"""What an attention backend is: the one contract of all of them.

A layer hands its projected ``qkv`` to the backend, and the backend does the rest up to the output projection:

    qkv ──> split ──> q/k norm ──> rope ──> store K, V at batch.slots ──> attend over cached + new ──> (T, Hq * D)
            └────────────── forward_qkv ──────────────────────────────┘
                                            └──────────────── forward ────────────────────┘

A backend must implement ``prepare`` and ``forward``. One that has a kernel for everything before it overrides
``forward_qkv`` as well, and then nothing of the plain path runs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from minisgl.core import Int32
from minisgl.kernel.attention_spec import AttentionSpec

if TYPE_CHECKING:
    from minisgl.kernel.ops import Ops
    from minisgl.kvcache.device_pool import KVPool

    from .forward_batch import ForwardBatch, GraphKind


def in_pinned_memory(array: Int32, device: torch.device) -> torch.Tensor:
    """``array`` as a tensor that can be copied to ``device`` while the host goes on; on a CPU, the array itself."""
    tensor = torch.from_numpy(array)
    # torch's cache of pinned memory does not hand it out again before the copy is done.
    return tensor.pin_memory() if device.type == "cuda" else tensor


@dataclass(frozen=True, slots=True)
class BackendConfig:
    """What a backend is made for. Head counts are those of this rank. ``deterministic``: what it returns for a token
    must not depend, to the last bit, on what else is in the step, nor on whether it came in a chunk or alone."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    max_running_req: int
    token_budget: int
    dtype: torch.dtype
    device: torch.device
    deterministic: bool = False


class AttentionBackend(ABC):
    """Paged causal attention over one :class:`KVPool`."""

    serves_graphs: ClassVar[frozenset[GraphKind]] = frozenset()
    """The kinds of steps in which it does what :class:`ForwardBatch` demands of a CUDA graph; others run eagerly."""

    def __init__(self, config: BackendConfig, ops: Ops) -> None:
        self.config = config
        self.ops = ops

    @abstractmethod
    def prepare(self, batch: ForwardBatch) -> None:
        """Plans a step, once for all layers, before its first layer runs. What it finds goes into ``batch.plan``.

        It runs outside of any CUDA graph, before the replay of a captured step too: there it may fill buffers that the
        captured kernels read, at the addresses they had when ``prepare`` ran before the capture.
        """

    def begin(self, batch: ForwardBatch) -> None:  # noqa: B027 - most have nothing to do here
        """Whatever else a step needs before its first layer, launched on the device; part of a captured step."""

    @abstractmethod
    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        spec: AttentionSpec,
        kv: KVPool,
        batch: ForwardBatch,
    ) -> torch.Tensor:
        """Stores the new K and V in the pool, then attends over all tokens of each request up to each query.

        ``q`` is (T, num_heads, head_dim), ``k`` and ``v`` (T, num_kv_heads, head_dim), after norm and rope; they may be
        strided views with a contiguous last dimension. Returns (T, num_heads * head_dim) in the dtype of ``q``. No
        host synchronisation.
        """

    def forward_qkv(self, qkv: torch.Tensor, spec: AttentionSpec, kv: KVPool, batch: ForwardBatch) -> torch.Tensor:
        """The whole of attention from ``qkv`` (T, (num_heads + 2 * num_kv_heads) * head_dim): heads of q, of k, of v.

        ``qkv`` may be overwritten. This plain path applies norm and rope op by op; override it to fuse them.
        """
        heads = qkv.view(qkv.shape[0], -1, spec.head_dim)
        q, k, v = heads.split([spec.num_heads, spec.num_kv_heads, spec.num_kv_heads], dim=1)
        if spec.q_norm is not None and spec.k_norm is not None:
            q = self.ops.rms_norm(q, spec.q_norm, spec.norm_eps)
            k = self.ops.rms_norm(k, spec.k_norm, spec.norm_eps)
        q = self.ops.rope(q, batch.positions, spec.cos_sin)
        k = self.ops.rope(k, batch.positions, spec.cos_sin)
        return self.forward(q, k, v, spec, kv, batch)
