"""What happens to heads between the qkv projection and attention: norm, rotation, and the way into the KV cache.

    qkv (T, Hq + 2 Hkv, D)     q ── norm ── rope ──> out (T, Hq, D)
                               k ── norm ── rope ──> pool, at the token's slot
                               v ──────────────────> pool, at the token's slot

The reference is the plain path of :meth:`minisgl.attention.base.AttentionBackend.forward_qkv`; results are rounded
where it rounds them.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from .launch import Launcher, power_of_2, wait_for_previous

if TYPE_CHECKING:
    from ..attention_spec import AttentionSpec


@triton.jit
def norm_rope(
    x_ptr,  # tile of pointers to element 0 of each head (H, 1)
    head_mask,  # (H, 1)
    is_key,  # (H, 1): which of the two norms
    q_norm_ptr,  # weight (HEAD_DIM)
    k_norm_ptr,
    cos_sin_ptr,  # of the position of all
    eps,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    HAS_NORM: tl.constexpr,
):
    """Loads heads, normalises and rotates them: (H, BLOCK_D) in the type that they are stored in.

    Element i and its partner i +- ROTARY_DIM / 2 are loaded side by side; the second load hits the L1 cache, and no
    data has to move between threads.
    """
    d = tl.arange(0, BLOCK_D)[None, :]
    half: tl.constexpr = ROTARY_DIM // 2
    partner = tl.where(d < half, d + half, tl.where(d < ROTARY_DIM, d - half, d))
    mask = head_mask & (d < HEAD_DIM)
    own = tl.load(x_ptr + d, mask=mask, other=0.0)
    other = tl.load(x_ptr + partner, mask=mask, other=0.0)
    dtype = own.dtype
    if HAS_NORM:
        wide = own.to(tl.float32)
        scale = tl.rsqrt(tl.sum(wide * wide, axis=1) / HEAD_DIM + eps)[:, None]
        q_own = tl.load(q_norm_ptr + d, mask=d < HEAD_DIM, other=0.0)
        q_other = tl.load(q_norm_ptr + partner, mask=d < HEAD_DIM, other=0.0)
        k_own = tl.load(k_norm_ptr + d, mask=d < HEAD_DIM, other=0.0)
        k_other = tl.load(k_norm_ptr + partner, mask=d < HEAD_DIM, other=0.0)
        own = (wide * scale).to(dtype) * tl.where(is_key, k_own, q_own)
        other = (other.to(tl.float32) * scale).to(dtype) * tl.where(is_key, k_other, q_other)
    rotates = d < ROTARY_DIM
    angle = tl.where(d < half, d, d - half)
    cos = tl.load(cos_sin_ptr + angle, mask=rotates, other=1.0)
    sin = tl.load(cos_sin_ptr + half + angle, mask=rotates, other=0.0)
    sin = tl.where(d < half, -sin, sin)
    return (own.to(tl.float32) * cos + other.to(tl.float32) * sin).to(dtype)


@triton.jit
def _rotate_heads(
    source_ptr,  # element 0 of the first head
    dest_ptr,
    norm_ptr,
    cos,  # (1, BLOCK_HALF) float32
    sin,
    eps,
    COUNT: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    REST: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    HAS_NORM: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """Norm and rotation of COUNT heads of one token, all by the same angles, some at a time."""
    i = tl.arange(0, BLOCK_HALF)[None, :]
    j = tl.arange(0, BLOCK_REST)[None, :]
    for first in tl.static_range(0, COUNT, BLOCK_H):
        head = first + tl.arange(0, BLOCK_H)[:, None]
        mask = (head < COUNT) & (i < HALF)
        rest_mask = (head < COUNT) & (j < REST)
        place = head * HEAD_DIM + i
        rest_place = head * HEAD_DIM + 2 * HALF + j
        low = tl.load(source_ptr + place, mask=mask, other=0.0)
        high = tl.load(source_ptr + place + HALF, mask=mask, other=0.0)
        rest = low
        if REST > 0:
            rest = tl.load(source_ptr + rest_place, mask=rest_mask, other=0.0)
        if HAS_NORM:
            wide_low, wide_high = low.to(tl.float32), high.to(tl.float32)
            square = tl.sum(wide_low * wide_low + wide_high * wide_high, axis=1)
            if REST > 0:
                square += tl.sum(rest.to(tl.float32) * rest.to(tl.float32), axis=1)
            scale = tl.rsqrt(square / HEAD_DIM + eps)[:, None]
            low = (wide_low * scale).to(low.dtype) * tl.load(norm_ptr + i, mask=i < HALF, other=0.0)
            high = (wide_high * scale).to(low.dtype) * tl.load(norm_ptr + HALF + i, mask=i < HALF, other=0.0)
            if REST > 0:
                weight = tl.load(norm_ptr + 2 * HALF + j, mask=j < REST, other=0.0)
                rest = (rest.to(tl.float32) * scale).to(low.dtype) * weight
        wide_low, wide_high = low.to(tl.float32), high.to(tl.float32)
        tl.store(dest_ptr + place, (wide_low * cos - wide_high * sin).to(low.dtype), mask=mask)
        tl.store(dest_ptr + place + HALF, (wide_high * cos + wide_low * sin).to(low.dtype), mask=mask)
        if REST > 0:
            tl.store(dest_ptr + rest_place, rest, mask=rest_mask)


@triton.jit(do_not_specialize_on_alignment=["positions_ptr", "slots_ptr"])
def _rope_store_kernel(
    qkv_ptr,
    q_ptr,
    k_pool_ptr,
    v_pool_ptr,
    positions_ptr,
    slots_ptr,
    cos_sin_ptr,
    q_norm_ptr,
    k_norm_ptr,
    eps,
    QKV_STRIDE: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    REST: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    BLOCK_V: tl.constexpr,
    HAS_NORM: tl.constexpr,
    BLOCK_H: tl.constexpr,
    PDL: tl.constexpr,
):
    # A program has one token, so that its angles are loaded once for all heads.
    token = tl.program_id(0).to(tl.int64)
    kv_size: tl.constexpr = NUM_KV_HEADS * HEAD_DIM
    i = tl.arange(0, BLOCK_HALF)[None, :]
    wait_for_previous(PDL)
    qkv_ptr += token * QKV_STRIDE
    angles = cos_sin_ptr + tl.load(positions_ptr + token) * (2 * HALF)
    new = tl.load(slots_ptr + token).to(tl.int64) * kv_size
    v = tl.arange(0, BLOCK_V)
    values = tl.load(qkv_ptr + NUM_HEADS * HEAD_DIM + kv_size + v, mask=v < kv_size, other=0.0)
    cos = tl.load(angles + i, mask=i < HALF, other=0.0)
    sin = tl.load(angles + HALF + i, mask=i < HALF, other=0.0)
    _rotate_heads(
        qkv_ptr + NUM_HEADS * HEAD_DIM, k_pool_ptr + new, k_norm_ptr, cos, sin, eps,
        NUM_KV_HEADS, HEAD_DIM, HALF, BLOCK_HALF, REST, BLOCK_REST, HAS_NORM, BLOCK_H,
    )  # fmt: skip
    tl.store(v_pool_ptr + new + v, values, mask=v < kv_size)
    _rotate_heads(
        qkv_ptr, q_ptr + token * (NUM_HEADS * HEAD_DIM), q_norm_ptr, cos, sin, eps,
        NUM_HEADS, HEAD_DIM, HALF, BLOCK_HALF, REST, BLOCK_REST, HAS_NORM, BLOCK_H,
    )  # fmt: skip


_launch_rope_store = Launcher(_rope_store_kernel)


def norm_rope_store(
    qkv: torch.Tensor,
    spec: "AttentionSpec",
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    *,
    pdl: bool = False,
) -> torch.Tensor:
    """Norm (if any) and rope for q and k, and K and V into the pool of the layer.

    ``qkv`` (T, (Hq + 2 * Hkv) * D) with contiguous rows; ``k_pool`` and ``v_pool`` (pages, page_size, Hkv, D)
    contiguous; ``positions`` (T) int32, ``slots`` (T) int64. Returns q (T, Hq, D).
    """
    tokens = qkv.shape[0]
    q = torch.empty((tokens, spec.num_heads, spec.head_dim), dtype=qkv.dtype, device=qkv.device)
    if tokens == 0:
        return q
    half, rest = spec.rotary_dim // 2, spec.head_dim - spec.rotary_dim
    _launch_rope_store(
        (tokens,),
        qkv,
        q,
        k_pool,
        v_pool,
        positions,
        slots,
        spec.cos_sin,
        spec.q_norm,
        spec.k_norm,
        spec.norm_eps,
        QKV_STRIDE=qkv.stride(0),
        NUM_HEADS=spec.num_heads,
        NUM_KV_HEADS=spec.num_kv_heads,
        HEAD_DIM=spec.head_dim,
        HALF=half,
        BLOCK_HALF=power_of_2(half),
        REST=rest,
        BLOCK_REST=power_of_2(rest),
        BLOCK_V=power_of_2(spec.num_kv_heads * spec.head_dim),
        HAS_NORM=spec.q_norm is not None,
        BLOCK_H=min(16, power_of_2(spec.num_heads)),
        num_warps=4,
        pdl=pdl,
    )
    return q
