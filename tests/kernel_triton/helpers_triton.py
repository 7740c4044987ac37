"""What the kernel tests share: inputs, poison, tolerances, paged caches."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from minisgl.attention.torch_reference import attend
from minisgl.kernel.attention_spec import AttentionSpec

TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""Allowed error, relative to the norm of the reference."""


def dtypes(on_gpu: bool) -> list[torch.dtype]:
    """The interpreter multiplies bf16 matrices wrongly."""
    return [torch.float32, torch.float16] + ([torch.bfloat16] if on_gpu else [])


def assert_close(out: torch.Tensor, reference: torch.Tensor, factor: float = 1.0) -> None:
    assert out.shape == reference.shape
    assert torch.isfinite(out).all(), "Some of the output was not written."
    error = (out.double() - reference.double()).norm() / reference.double().norm().clamp(min=1e-9)
    assert error < TOLERANCE[out.dtype] * factor, f"relative error {error:.2e}"


def poison(*tensors: torch.Tensor) -> None:
    for tensor in tensors:
        tensor.fill_(float("nan"))


def randn(rng: torch.Generator, *shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.randn(shape, generator=rng).to(device, dtype)


@dataclass
class Paged:
    """Requests with random contents in a pool whose unused part is NaN; unused table entries point far outside."""

    k_pool: torch.Tensor
    v_pool: torch.Tensor
    table: torch.Tensor
    rows: torch.Tensor
    seq_lens: torch.Tensor
    page_size: int

    @classmethod
    def make(
        cls,
        rng: torch.Generator,
        lengths: list[int],
        page_size: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> Paged:
        pages = [-(-length // page_size) for length in lengths]
        order = torch.randperm(sum(pages) + 3, generator=rng)
        shape = (len(order), page_size, kv_heads, head_dim)
        k, v = (torch.full(shape, float("nan"), dtype=dtype, device=device) for _ in range(2))
        table = torch.full((len(lengths) + 2, max(pages) + 3), 2**30, dtype=torch.int32, device=device)
        rows = torch.randperm(len(lengths) + 2, generator=rng)[: len(lengths)].to(device, torch.int32)
        start = 0
        for row, count in zip(rows.tolist(), pages, strict=True):
            table[row, :count] = order[start : start + count].to(device, torch.int32)
            start += count
        paged = cls(k, v, table, rows, torch.tensor(lengths, dtype=torch.int32, device=device), page_size)
        for i, length in enumerate(lengths):
            slots = paged.slots(i, length)
            for pool in (k, v):
                pool.view(-1, kv_heads, head_dim)[slots] = randn(
                    rng, length, kv_heads, head_dim, dtype=dtype, device=device
                )
        return paged

    def slots(self, request: int, length: int) -> torch.Tensor:
        """Slots of the first ``length`` tokens."""
        position = torch.arange(length, device=self.table.device)
        pages = self.table[self.rows[request].long(), position // self.page_size].long()
        return pages * self.page_size + position % self.page_size

    def last_slots(self) -> torch.Tensor:
        return torch.stack([self.slots(i, int(n))[-1] for i, n in enumerate(self.seq_lens)])

    def reference(self, q: torch.Tensor, new: list[int], spec: AttentionSpec) -> torch.Tensor:
        """(T, Hq * D) float32 for ``q`` (T, Hq, D)."""
        keys, values = self.k_pool.flatten(0, 1), self.v_pool.flatten(0, 1)
        outs = []
        for i, query in enumerate(q.split(new)):
            slots = self.slots(i, int(self.seq_lens[i]))
            k, v = keys[slots].float(), values[slots].float()
            outs.append(attend(query.float(), k, v, spec.scale, spec.sliding_window))
        return torch.cat(outs).flatten(1)


def make_spec(
    rng: torch.Generator,
    heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    window: int | None = None,
    norm: bool = True,
    rotary_dim: int | None = None,
    positions: int = 4096,
) -> AttentionSpec:
    rotary = rotary_dim or head_dim
    angles = torch.outer(torch.arange(positions), 10000.0 ** -(torch.arange(0, rotary, 2) / rotary))
    weights = [(1 + 0.1 * torch.randn(head_dim, generator=rng)).to(device, dtype) if norm else None for _ in range(2)]
    return AttentionSpec(
        layer=0,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        scale=head_dim**-0.5,
        cos_sin=torch.cat((angles.cos(), angles.sin()), -1).float().to(device),
        sliding_window=window,
        q_norm=weights[0],
        k_norm=weights[1],
        norm_eps=1e-6,
    )
