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
    from ...attention.base import AttentionSpec


@triton.jit
def norm_rope(
    x_ptr,  # tile of pointers to element 0 of each head (H, 1)
    head_mask,  # (H, 1)
    norm_ptr,  # weight (HEAD_DIM)
    cos_sin_ptr,  # of the position of each head (H, 1)
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
        own = (wide * scale).to(dtype) * tl.load(norm_ptr + d, mask=d < HEAD_DIM, other=0.0)
        other = (other.to(tl.float32) * scale).to(dtype) * tl.load(norm_ptr + partner, mask=d < HEAD_DIM, other=0.0)
    rotates = d < ROTARY_DIM
    angle = tl.where(d < half, d, d - half)
    cos = tl.load(cos_sin_ptr + angle, mask=head_mask & rotates, other=1.0)
    sin = tl.load(cos_sin_ptr + half + angle, mask=head_mask & rotates, other=0.0)
    sin = tl.where(d < half, -sin, sin)
    return (own.to(tl.float32) * cos + other.to(tl.float32) * sin).to(dtype)


@triton.jit(
    do_not_specialize=["num_tokens"],
    do_not_specialize_on_alignment=["positions_ptr", "slots_ptr"],
)
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
    num_tokens,
    QKV_STRIDE: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    HAS_NORM: tl.constexpr,
    BLOCK_H: tl.constexpr,
    PDL: tl.constexpr,
):
    # A row of the tile is one head of one token. The first programs take q heads, the next k heads, the last v heads.
    q_blocks = tl.cdiv(num_tokens * NUM_HEADS, BLOCK_H)
    kv_blocks = tl.cdiv(num_tokens * NUM_KV_HEADS, BLOCK_H)
    block = tl.program_id(0)
    d = tl.arange(0, BLOCK_D)[None, :]
    lane = tl.arange(0, BLOCK_H)[:, None]
    wait_for_previous(PDL)
    if block < q_blocks:
        row = block * BLOCK_H + lane
        token = row // NUM_HEADS
        valid = token < num_tokens
        position = tl.load(positions_ptr + token, mask=valid, other=0)
        q = norm_rope(
            qkv_ptr + token.to(tl.int64) * QKV_STRIDE + row % NUM_HEADS * HEAD_DIM,
            valid,
            q_norm_ptr,
            cos_sin_ptr + position * ROTARY_DIM,
            eps,
            HEAD_DIM,
            BLOCK_D,
            ROTARY_DIM,
            HAS_NORM,
        )
        tl.store(q_ptr + row.to(tl.int64) * HEAD_DIM + d, q, mask=valid & (d < HEAD_DIM))
    elif block < q_blocks + kv_blocks:
        row = (block - q_blocks) * BLOCK_H + lane
        token = row // NUM_KV_HEADS
        valid = token < num_tokens
        position = tl.load(positions_ptr + token, mask=valid, other=0)
        k = norm_rope(
            qkv_ptr + token.to(tl.int64) * QKV_STRIDE + (NUM_HEADS + row % NUM_KV_HEADS) * HEAD_DIM,
            valid,
            k_norm_ptr,
            cos_sin_ptr + position * ROTARY_DIM,
            eps,
            HEAD_DIM,
            BLOCK_D,
            ROTARY_DIM,
            HAS_NORM,
        )
        slot = tl.load(slots_ptr + token, mask=valid, other=0).to(tl.int64)
        place = slot * (NUM_KV_HEADS * HEAD_DIM) + row % NUM_KV_HEADS * HEAD_DIM
        tl.store(k_pool_ptr + place + d, k, mask=valid & (d < HEAD_DIM))
    else:
        row = (block - q_blocks - kv_blocks) * BLOCK_H + lane
        token = row // NUM_KV_HEADS
        valid = token < num_tokens
        source = token.to(tl.int64) * QKV_STRIDE + (NUM_HEADS + NUM_KV_HEADS + row % NUM_KV_HEADS) * HEAD_DIM
        v = tl.load(qkv_ptr + source + d, mask=valid & (d < HEAD_DIM), other=0.0)
        slot = tl.load(slots_ptr + token, mask=valid, other=0).to(tl.int64)
        place = slot * (NUM_KV_HEADS * HEAD_DIM) + row % NUM_KV_HEADS * HEAD_DIM
        tl.store(v_pool_ptr + place + d, v, mask=valid & (d < HEAD_DIM))


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
    block_d = power_of_2(spec.head_dim)
    # Small steps want many programs, large ones want few; in between it does not matter.
    block_h = max(1, (1024 if tokens <= 64 else 4096) // block_d)
    blocks = triton.cdiv(tokens * spec.num_heads, block_h) + 2 * triton.cdiv(tokens * spec.num_kv_heads, block_h)
    _launch_rope_store(
        (blocks,),
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
        tokens,
        QKV_STRIDE=qkv.stride(0),
        NUM_HEADS=spec.num_heads,
        NUM_KV_HEADS=spec.num_kv_heads,
        HEAD_DIM=spec.head_dim,
        BLOCK_D=block_d,
        ROTARY_DIM=spec.rotary_dim,
        HAS_NORM=spec.q_norm is not None,
        BLOCK_H=block_h,
        num_warps=4,
        pdl=pdl,
    )
    return q
