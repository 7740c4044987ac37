"""The metadata of a GGUF file under the names of config.json. Imports no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from .gguf_file import GGUFError, GGUFFile, read_gguf

GGUF_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
"""``general.architecture`` -> class. Files of Mistral models say "llama"."""

_GGML_F32 = 0


def gguf_config(path: Path) -> dict[str, Any]:
    """Raises :class:`GGUFError` for an architecture or rope type that cannot be served, and for a damaged file."""
    file = read_gguf(path)
    architecture = GGUF_ARCHITECTURES.get(file.architecture)
    if architecture is None:
        have = file.architecture or "none"
        raise GGUFError(
            f"{path}: unsupported GGUF architecture ({have}); supported are {', '.join(GGUF_ARCHITECTURES)}."
        )
    if file.metadata.get("split.count", 1) > 1:
        raise GGUFError(f"{path} is one part of several; merge them into one file first (llama-gguf-split --merge).")
    window = file.get("attention.sliding_window")
    if window and architecture == "LlamaForCausalLM":
        architecture = "MistralForCausalLM"
    hidden, heads = file.get("embedding_length"), file.get("attention.head_count")
    head_dim = file.get("attention.key_length")
    if head_dim is None and isinstance(hidden, int) and isinstance(heads, int):
        head_dim = hidden // max(heads, 1)
    embedding = file.tensors.get("token_embd.weight")
    return {
        "architectures": [architecture],
        "num_hidden_layers": file.get("block_count"),
        "hidden_size": hidden,
        "intermediate_size": file.get("feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": file.get("attention.head_count_kv"),
        "head_dim": head_dim,
        "vocab_size": embedding.shape[0] if embedding else file.get("vocab_size"),
        "max_position_embeddings": file.get("context_length"),
        "rms_norm_eps": file.get("attention.layer_norm_rms_epsilon", 1e-6),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "sliding_window": window or None,
        "use_sliding_window": bool(window),
        "attention_bias": "blk.0.attn_output.bias" in file.tensors,
        "rope_parameters": _rope(file, head_dim),
    }


def _rope(file: GGUFFile, head_dim: int | None) -> dict[str, Any]:
    kind = file.get("rope.scaling.type", "none")
    params: dict[str, Any] = {
        "rope_type": "default" if kind == "none" else kind,
        "rope_theta": file.get("rope.freq_base", 10000.0),
    }
    rotary = file.get("rope.dimension_count")
    if rotary and head_dim:
        params["partial_rotary_factor"] = rotary / head_dim
    if kind != "none":
        params["factor"] = file.get("rope.scaling.factor")
        original = file.get("rope.scaling.original_context_length")
        if original:
            params["original_max_position_embeddings"] = original
    divisors = file.tensors.get("rope_freqs.weight")
    if divisors is not None:
        if divisors.type != _GGML_F32:
            raise GGUFError(f"{file.path}: rope_freqs.weight is not F32.")
        values = np.fromfile(file.path, np.float32, divisors.shape[0], offset=divisors.offset)
        params["freq_divisors"] = values.tolist()
    return params
