"""The paged KV cache on the device."""

from __future__ import annotations

import torch


class KVPool:
    """Keys and values of every layer, in pages of ``page_size`` tokens.

    ``k`` and ``v`` are (num_layers, num_pages + 1, page_size, num_kv_heads, head_dim): page after page, token after
    token, so that (layer, slot) addresses one token's heads with ``slot = page * page_size + offset``. The page
    ``num_pages`` is scratch: padding writes there. ``num_kv_heads`` are those of this rank.

    The memory is not initialised, so on a CPU only pages in use become resident. What lies beyond a request's length
    may be anything, NaN included: a kernel must mask such loads and not only their scores, for 0 * NaN is NaN.
    """

    def __init__(
        self,
        num_layers: int,
        num_pages: int,
        page_size: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (num_layers, num_pages + 1, page_size, num_kv_heads, head_dim)
        self.num_pages = num_pages
        self.page_size = page_size
        self.k = torch.empty(shape, dtype=dtype, device=device)
        self.v = torch.empty(shape, dtype=dtype, device=device)
        # The same memory as (num_layers, slots, heads, dim).
        self._k_slots = self.k.flatten(1, 2)
        self._v_slots = self.v.flatten(1, 2)

    def store(self, layer: int, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
        """Writes ``k`` and ``v`` (T, num_kv_heads, head_dim) of a layer to ``slots`` (T) int64."""
        self._k_slots[layer].index_copy_(0, slots, k)
        self._v_slots[layer].index_copy_(0, slots, v)

    @staticmethod
    def bytes_per_page(num_layers: int, page_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
        """Bytes that one page takes over all layers, keys and values."""
        return 2 * num_layers * page_size * num_kv_heads * head_dim * dtype.itemsize
