"""Mistral: Llama's layers without biases; the first version attends over a sliding window in all of them."""

from __future__ import annotations

import torch

from minisgl.layers.mlp import GatedMLP

from .base import CausalLM, DecoderLayer


class MistralForCausalLM(CausalLM):
    def make_layer(self, index: int, cos_sin: torch.Tensor) -> DecoderLayer:
        config, context = self.config, self.context
        attention = self.make_attention(index, cos_sin)
        mlp = GatedMLP(config.hidden_size, config.intermediate_size, False, context)
        return DecoderLayer(config, attention, mlp, context)
