"""Attention of one new token per request over its pages: bound by reading the KV cache once.

A step is planned (:mod:`.decode_plan`) and then attended, layer by layer, by one kernel (:mod:`.decode_kernel`).
"""
# mypy: allow-untyped-defs, allow-incomplete-defs

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from .decode_kernel import launch_decode
from .decode_plan import Cut, plan_decode, plan_size
from .launch import num_sms, offset_type, power_of_2

if TYPE_CHECKING:
    from ..attention_spec import AttentionSpec


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """Launch parameters: tokens of a tile, programs per multiprocessor, warps, pipeline stages, the fewest tiles that
    are worth a program, and a bound on registers."""

    tile: int
    programs_per_sm: int
    num_warps: int
    num_stages: int
    min_tiles: int = 1
    max_registers: int | None = None


def decode_config(head_dim: int, itemsize: int, group: int) -> DecodeConfig:
    """Several programs per multiprocessor keep enough loads in flight, of tiles of up to 16 KiB.

    The bound on registers is what lets so many programs run at once, as their shares of the work assume. With many
    query heads for each KV head, smaller programs are faster, and parts are costly to merge: so a program has some
    tiles at least.
    """
    row = power_of_2(head_dim) * itemsize
    tile = max(16, min(64, 16384 // row))
    if row > 256:
        return DecodeConfig(tile, programs_per_sm=2, num_warps=4, num_stages=3, max_registers=255)
    if group <= 2:
        return DecodeConfig(tile, programs_per_sm=3, num_warps=4, num_stages=3, max_registers=168)
    tile = max(16, min(64, 8192 // row))
    return DecodeConfig(tile, programs_per_sm=4, num_warps=2, num_stages=4, min_tiles=3, max_registers=255)


class DecodeWorkspace:
    """Buffers at fixed addresses, shared by all layers and steps of one stream."""

    def __init__(
        self,
        max_requests: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        config: DecodeConfig | None = None,
    ) -> None:
        self.config = config or decode_config(head_dim, dtype.itemsize, num_heads // num_kv_heads)
        self.max_requests = max_requests
        self.num_programs = max(1, num_sms(device) * self.config.programs_per_sm // num_kv_heads)
        self.num_slots = 2 * self.num_programs
        slots = num_kv_heads * self.num_slots * (num_heads // num_kv_heads)
        self.partial = torch.empty((slots, head_dim), dtype=torch.float32, device=device)
        self.stats = torch.empty((slots, 2), dtype=torch.float32, device=device)
        # Zero between launches: the program that merges puts its counter back.
        self.counters = torch.zeros(max_requests * num_kv_heads, dtype=torch.int32, device=device)
        self.plans: dict[int | None, torch.Tensor] = {}
        """The plan of each sliding window that there is."""
        self._device = device

    def plan(self, window: int | None, seq_lens: torch.Tensor) -> None:
        """Plans a step for the layers of that sliding window. Makes its buffer when the window is new."""
        if window not in self.plans:
            size = plan_size(self.max_requests, self.num_programs)
            self.plans[window] = torch.empty(size, dtype=torch.int32, device=self._device)
        cut = Cut(self.config.tile, self.config.min_tiles, window or 0)
        plan_decode(self.plans[window], seq_lens, self.max_requests, self.num_programs, cut)


@dataclass(frozen=True, slots=True)
class FusedQKV:
    """What the fused kernel does before it attends: norm, rope, and storing at ``slots`` (B)."""

    qkv: torch.Tensor
    slots: torch.Tensor


def decode_attention(
    q: torch.Tensor | FusedQKV,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    page_table: torch.Tensor,
    rows: torch.Tensor,
    seq_lens: torch.Tensor,
    spec: "AttentionSpec",
    workspace: DecodeWorkspace,
    out: torch.Tensor,
    *,
    pdl: bool = False,
) -> None:
    """Attends for the last token of each of B requests, planned with :meth:`DecodeWorkspace.plan`.

    ``q`` is (B, Hq, D) with contiguous heads, its K and V being in the pool already, or a :class:`FusedQKV`. ``k_pool``
    and ``v_pool`` are (pages, page_size, Hkv, D), contiguous; ``rows`` and ``seq_lens`` (B) int32; ``out`` (B, Hq * D),
    contiguous. Requests at the end may have length 0: they are left out, and their rows of ``out`` are not written.
    With ``pdl`` the kernel right before this one must not be the one that made the plan.
    """
    fused = q if isinstance(q, FusedQKV) else None
    source = fused.qkv if fused else q
    assert isinstance(source, torch.Tensor)
    config = workspace.config
    group = spec.num_heads // spec.num_kv_heads
    block_d = power_of_2(spec.head_dim)
    group_pow2 = power_of_2(group)
    launch_decode(
        (spec.num_kv_heads, workspace.num_programs),
        source,
        k_pool,
        v_pool,
        page_table,
        page_table.stride(0),
        rows,
        seq_lens,
        fused.slots if fused else None,
        spec.cos_sin if fused else None,
        spec.q_norm if fused else None,
        spec.k_norm if fused else None,
        spec.norm_eps,
        workspace.plans[spec.sliding_window],
        workspace.partial,
        workspace.stats,
        workspace.counters,
        out,
        seq_lens.shape[0],
        workspace.num_programs,
        workspace.num_slots,
        spec.scale * math.log2(math.e),
        Q_STRIDE=source.stride(0),
        NUM_KV_HEADS=spec.num_kv_heads,
        GROUP=group,
        GROUP_POW2=group_pow2,
        BLOCK_G=max(16, power_of_2(group + 1)),
        HEAD_DIM=spec.head_dim,
        BLOCK_D=block_d,
        PAGE=k_pool.shape[1],
        TILE=config.tile,
        WINDOW=spec.sliding_window or 0,
        OFFSET=offset_type(k_pool),
        FUSED=fused is not None,
        ROTARY_DIM=spec.rotary_dim if fused else 0,
        HAS_NORM=fused is not None and spec.q_norm is not None,
        BLOCK_P=max(2, 4096 // (group_pow2 * block_d)),
        maxnreg=config.max_registers,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        pdl=pdl,
    )
