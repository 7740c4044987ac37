"""Qwen3: each head of q and k is normed before rope, and head_dim need not be hidden_size / num_heads."""

from __future__ import annotations

import torch

from minisgl.layers.mlp import GatedMLP

from .base import CausalLM, DecoderLayer


class Qwen3ForCausalLM(CausalLM):
    def make_layer(self, index: int, cos_sin: torch.Tensor) -> DecoderLayer:
        config, context = self.config, self.context
        bias = config.attention_bias
        attention = self.make_attention(index, cos_sin, qkv_bias=bias, output_bias=bias, qk_norm=True)
        mlp = GatedMLP(config.hidden_size, config.intermediate_size, False, context)
        return DecoderLayer(config, attention, mlp, context)
