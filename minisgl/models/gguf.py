"""Checkpoints in a GGUF file: its tensors under the names of the model, dequantised one at a time.

GGUF files of the llama architecture keep the rows of q and k in the order of interleaved rope, where element 2 i turns
with 2 i + 1; here i turns with i + D / 2:

    in the file     0  D/2  1  D/2+1  2  ...        of each head; reading turns it back to  0 1 2 .. D-1
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np
import torch
from gguf import GGMLQuantizationType as GGMLType
from gguf.constants import GGML_QUANT_SIZES

from .gguf_dequantize import dequantize
from .gguf_file import TensorInfo, read_gguf
from .weights import WeightError

SUPPORTED_TYPES = tuple(
    GGMLType[name] for name in "F32 F16 BF16 Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q2_K Q3_K Q4_K Q5_K Q6_K".split()
)

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_CHUNK = 1 << 18  # Elements dequantised at a time.
ROPE_DIVISORS = "rope_freqs.weight"
"""Not a weight: the config has it."""


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """A StoredTensor. ``heads`` is set where the rows must be brought back from the interleaved order."""

    name: str
    shape: tuple[int, ...]
    nbytes: int
    path: Path
    info: TensorInfo
    heads: int | None

    def read_into(self, dest: torch.Tensor, index: tuple[slice, ...]) -> None:
        if len(self.shape) == 1:
            dest.copy_(self._rows(0, 1)[0][index])
            return
        rows, columns = index
        head_rows = self.shape[0] // self.heads if self.heads else 1
        # Chunks that stay in the cache on their way, of whole heads where their rows change places.
        step = -(-_CHUNK // self.shape[1] // head_rows) * head_rows
        for start in range(rows.start, rows.stop, step):
            stop = min(start + step, rows.stop)
            values = self._rows(start, stop)
            if self.heads:
                pairs = values.view(-1, head_rows // 2, 2, self.shape[1])
                values = pairs.transpose(1, 2).reshape(stop - start, -1)
            dest[start - rows.start : stop - rows.start].copy_(values[:, columns])

    def _rows(self, start: int, stop: int) -> torch.Tensor:
        """Rows of the stored matrix, float32. They are read, not mapped: what is mapped counts as resident."""
        kind = GGMLType(self.info.type)
        block, block_bytes = GGML_QUANT_SIZES[kind]
        row_bytes = self.shape[-1] // block * block_bytes
        data = np.fromfile(self.path, np.uint8, (stop - start) * row_bytes, offset=self.info.offset + start * row_bytes)
        return dequantize(data.reshape(stop - start, row_bytes), kind)


def tensors_in_gguf(path: Path, num_heads: int, num_kv_heads: int) -> list[GGUFTensor]:
    """All tensors of the file. Raises :class:`WeightError` for an unknown quantisation, or a file cut off."""
    file = read_gguf(path)
    interleaved = {"q_proj": num_heads, "k_proj": num_kv_heads} if file.architecture == "llama" else {}
    tensors, size = [], path.stat().st_size
    for info in file.tensors.values():
        if info.name == ROPE_DIVISORS:
            continue
        if info.type not in SUPPORTED_TYPES:
            known = {int(t): t.name for t in GGMLType}
            raise WeightError(
                f"{path}: {info.name} has the unsupported quantisation {known.get(info.type, info.type)}; "
                f"supported are {', '.join(t.name for t in SUPPORTED_TYPES)}."
            )
        name = checkpoint_name(info.name)
        block, block_bytes = GGML_QUANT_SIZES[GGMLType(info.type)]
        nbytes = prod(info.shape) // block * block_bytes
        if info.offset + nbytes > size:
            raise WeightError(f"{path} is damaged or incomplete (it ends within {info.name}); download it again.")
        heads = interleaved.get(name.split(".")[-2]) if "." in name else None
        tensors.append(GGUFTensor(name, info.shape, nbytes, path, info, heads))
    return tensors


def checkpoint_name(name: str) -> str:
    """``blk.3.attn_q.weight`` -> ``model.layers.3.self_attn.q_proj.weight``; an unknown name stays as it is."""
    if found := re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name):
        layer, part, kind = found.groups()
        return f"model.layers.{layer}.{_LAYER[part]}.{kind}" if part in _LAYER else name
    part, _, kind = name.rpartition(".")
    return f"{_TOP[part]}.{kind}" if part in _TOP else name
