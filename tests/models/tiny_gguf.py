"""GGUF files of tiny models, written by the gguf package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as GGMLType

VOCABULARY = [f"token{i}" for i in range(40)] + ["end"]

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    module, _, kind = name.rpartition(".")
    if module.startswith("model.layers."):
        layer, _, part = module.removeprefix("model.layers.").partition(".")
        return f"blk.{layer}.{_NAMES[part]}.{kind}"
    return f"{_NAMES[module]}.{kind}"


def write_gguf(
    reference: Any, architecture: str, path: Path, kind: GGMLType, extra: dict[str, Any] | None = None
) -> None:
    """Writes transformers' ``reference`` with its matrices as ``kind``, and rounds them in ``reference`` alike."""
    config = reference.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(VOCABULARY)
    writer.add_token_types([1] * len(VOCABULARY))
    writer.add_eos_token_id(2)
    for key, value in (extra or {}).items():
        writer.add_key_value(f"{architecture}.{key}", value, gguf.GGUFValueType.get_type(value))
    tied = config.tie_word_embeddings
    for name, weight in reference.named_parameters():
        if name == "lm_head.weight" and tied:
            continue
        values = weight.detach().numpy().copy()
        if weight.dim() > 1:
            values = gguf.quants.dequantize(gguf.quants.quantize(values, kind), kind)
            weight.data.copy_(torch.from_numpy(values))
        if architecture == "llama" and (".q_proj." in name or ".k_proj." in name):
            values = interleave(values, config.head_dim)
        if weight.dim() > 1 and kind != GGMLType.F32:
            writer.add_tensor(gguf_name(name), gguf.quants.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(gguf_name(name), values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def interleave(weight: np.ndarray, head_dim: int) -> np.ndarray:
    """The rows of every head in the order 0, D/2, 1, D/2 + 1, ..., as llama.cpp's converter puts them."""
    order = np.arange(head_dim).reshape(2, -1).T.ravel()
    return weight.reshape(-1, head_dim, *weight.shape[1:])[:, order].reshape(weight.shape)
