"""Qwen2 and Qwen2.5: q, k and v have biases; a sliding window in some layers where the config switches it on."""

from __future__ import annotations

import torch

from minisgl.layers.mlp import GatedMLP

from .base import CausalLM, DecoderLayer


class Qwen2ForCausalLM(CausalLM):
    def make_layer(self, index: int, cos_sin: torch.Tensor) -> DecoderLayer:
        config, context = self.config, self.context
        attention = self.make_attention(index, cos_sin, qkv_bias=True)
        mlp = GatedMLP(config.hidden_size, config.intermediate_size, False, context)
        return DecoderLayer(config, attention, mlp, context)
