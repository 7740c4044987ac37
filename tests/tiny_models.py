"""Tiny random checkpoints of every architecture, made by transformers, which is also their oracle."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from minisgl.models.base import CausalLM
from minisgl.models.build import build_model
from minisgl.models.config import ModelConfig

COMMON: dict[str, Any] = {
    "vocab_size": 199,
    "hidden_size": 48,
    "intermediate_size": 88,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.15,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}

BARE_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
    "vocab_size": 512,
    "eos_token_id": 2,
}
"""A config.json for dummy weights, with room for long answers."""

# Name -> (transformers' classes, what differs from COMMON).
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-mha-biased": ("Llama", {"num_key_value_heads": 4, "attention_bias": True, "mlp_bias": True}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True, "head_dim": 20}),
    "llama-linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 1e4}}),
    "llama-dynamic": ("Llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}),
    "llama-llama3": (
        "Llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 5e5,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
    ),
    "llama-yarn": (
        "Llama",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
    ),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral-window": ("Mistral", {"sliding_window": 7, "head_dim": 16}),
    "qwen2": ("Qwen2", {}),
    "qwen2-window": ("Qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "qwen3-tied-window": (
        "Qwen3",
        {
            "head_dim": 16,
            "tie_word_embeddings": True,
            "use_sliding_window": True,
            "sliding_window": 6,
            "max_window_layers": 2,
        },
    ),
    "qwen3-moe": (
        "Qwen3Moe",
        {
            "head_dim": 16,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "norm_topk_prob": True,
        },
    ),
    "qwen3-moe-mixed": (
        "Qwen3Moe",
        {
            "num_hidden_layers": 5,
            "head_dim": 16,
            "num_experts": 5,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 20,
            "norm_topk_prob": False,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [3],
        },
    ),
    "llama-one-kv-head": ("Llama", {"num_key_value_heads": 1}),
    "llama-odd-heads": (
        "Llama",
        {"hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 16},
    ),
}


def make_reference(variant: str, seed: int = 0, **changes: Any) -> Any:
    """transformers' model, fp32, random in all of its weights, norms and biases included."""
    import transformers

    family, different = VARIANTS[variant]
    config = getattr(transformers, f"{family}Config")(**COMMON | different | changes)
    torch.manual_seed(seed)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 1:
                weight.normal_(1.0 if name.endswith("norm.weight") else 0.0, 0.3)
            elif "experts" in name or name.endswith("mlp.gate.weight"):
                weight.normal_(0.0, 0.15)
    return model


@dataclass
class Tiny:
    """transformers' model, the checkpoint it saved, and our model of it."""

    reference: Any
    path: Path
    config: ModelConfig
    model: CausalLM

    def reference_logits(self, ids: list[int]) -> torch.Tensor:
        """(len(ids), V)"""
        with torch.inference_mode():
            return self.reference(torch.tensor([ids])).logits[0]


def make_tiny(variant: str, path: Path) -> Tiny:
    reference = make_reference(variant)
    reference.save_pretrained(path)
    config = ModelConfig.from_path(path)
    model = build_model(config, dtype=torch.float32, device=torch.device("cpu"), path=path)
    return Tiny(reference, path, config, model)
