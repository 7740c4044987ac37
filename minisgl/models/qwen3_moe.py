"""Qwen3-MoE: Qwen3's attention, and a mixture of experts in place of the MLP in most layers."""

from __future__ import annotations

import torch
from torch import nn

from minisgl.layers.mlp import GatedMLP
from minisgl.layers.moe import SparseMoE

from .base import CausalLM, DecoderLayer


class Qwen3MoeForCausalLM(CausalLM):
    def make_layer(self, index: int, cos_sin: torch.Tensor) -> DecoderLayer:
        config, context = self.config, self.context
        bias = config.attention_bias
        attention = self.make_attention(index, cos_sin, qkv_bias=bias, output_bias=bias, qk_norm=True)
        return DecoderLayer(config, attention, self._make_mlp(index), context)

    def _make_mlp(self, index: int) -> nn.Module:
        config, context = self.config, self.context
        moe = config.moe
        assert moe is not None
        if index in moe.layers:
            return SparseMoE(
                config.hidden_size,
                moe.intermediate_size,
                moe.num_experts,
                moe.top_k,
                context,
                norm_topk_prob=moe.norm_topk_prob,
            )
        return GatedMLP(config.hidden_size, config.intermediate_size, False, context)
