"""Llama 1 to 3.x, and the many models of the same shape (SmolLM2, TinyLlama, Yi, ...)."""

from __future__ import annotations

import torch

from minisgl.layers.mlp import GatedMLP

from .base import CausalLM, DecoderLayer


class LlamaForCausalLM(CausalLM):
    """RMS norms, rotary embeddings, grouped-query attention and a gated MLP; biases where the config says so."""

    def make_layer(self, index: int, cos_sin: torch.Tensor) -> DecoderLayer:
        config, context = self.config, self.context
        bias = config.attention_bias
        attention = self.make_attention(index, cos_sin, qkv_bias=bias, output_bias=bias)
        mlp = GatedMLP(config.hidden_size, config.intermediate_size, config.mlp_bias, context)
        return DecoderLayer(config, attention, mlp, context)
