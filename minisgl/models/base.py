"""What all decoder-only models have in common. The file of an architecture says what one of its layers is made of."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING

import torch
from torch import nn

from minisgl.distributed.sharding import HeadShards
from minisgl.layers.attention import Attention
from minisgl.layers.context import BuildContext
from minisgl.layers.embedding import Embedding, Head, TiedHead
from minisgl.layers.norm import RMSNorm

from .rope import rope_table

if TYPE_CHECKING:
    from minisgl.attention.base import AttentionBackend
    from minisgl.attention.forward_batch import ForwardBatch
    from minisgl.kvcache.device_pool import KVPool

    from .config import ModelConfig


Stream = tuple[torch.Tensor | None, torch.Tensor]
"""The residual stream: what has still to be added to it (None: nothing), and the stream, both (T, hidden_size)."""


class DecoderLayer(nn.Module):
    """Attention and an MLP, each after a norm and added to the residual stream.

    ``x`` is what the previous half has not added to ``residual`` yet, if anything: a norm adds it on its way.
    """

    def __init__(self, config: ModelConfig, attention: Attention, mlp: nn.Module, context: BuildContext) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, context)
        self.self_attn = attention
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, context)
        self.mlp = mlp

    def attend(
        self,
        x: torch.Tensor | None,
        residual: torch.Tensor,
        batch: ForwardBatch,
        kv: KVPool,
        backend: AttentionBackend,
    ) -> Stream:
        """The first half of the layer: the only place where tokens see each other."""
        stream: Stream = self.self_attn(self.input_layernorm, x, residual, batch, kv, backend)
        return stream

    def feed(self, x: torch.Tensor | None, residual: torch.Tensor) -> Stream:
        """The second half, token by token."""
        stream: Stream = self.mlp(self.post_attention_layernorm, x, residual)
        return stream


class Decoder(nn.Module):
    def __init__(self, config: ModelConfig, layers: list[DecoderLayer], context: BuildContext) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, context)
        self.layers = nn.ModuleList(layers)
        self._in_order = tuple(layers)  # The same ones, typed and quick to walk.
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, context)

    def forward(self, batch: ForwardBatch, kv: KVPool, backend: AttentionBackend) -> torch.Tensor:
        x, residual = None, self.embed_tokens(batch.input_ids)
        *others, last = self._in_order
        for layer in others:
            x, residual = layer.feed(*layer.attend(x, residual, batch, kv, backend))
        x, residual = last.attend(x, residual, batch, kv, backend)
        if batch.logit_index is not None:
            # The last layer's KV is stored by now: what follows is only for the tokens that somebody asked for.
            x, residual = None if x is None else x[..., batch.logit_index, :], residual[batch.logit_index]
            if not len(residual):
                return residual
        hidden, _ = self.norm(*last.feed(x, residual))
        return hidden


class CausalLM(nn.Module):
    """A model of this rank. Its modules are named as in the checkpoint.

    ``model(batch, kv, backend)`` computes the KV of all new tokens and returns the last hidden states
    (S, hidden_size) of those in ``batch.logit_index``. It never waits for the device.
    """

    def __init__(self, config: ModelConfig, context: BuildContext) -> None:
        super().__init__()
        self.config = config
        self.context = context
        self.heads = HeadShards.of(config.num_heads, config.num_kv_heads, context.comm.rank, context.comm.world_size)
        cos_sin = rope_table(config.rope, context.max_positions, context.device)
        layers = [self.make_layer(index, cos_sin) for index in range(config.num_layers)]
        self.model = Decoder(config, layers, context)
        if config.tie_word_embeddings:
            self.lm_head: Head | TiedHead = TiedHead(self.model.embed_tokens)
        else:
            self.lm_head = Head(config.vocab_size, config.hidden_size, context)

    @abstractmethod
    def make_layer(self, index: int, cos_sin: torch.Tensor) -> DecoderLayer:
        """Layer ``index`` of the architecture."""

    def make_attention(
        self,
        index: int,
        cos_sin: torch.Tensor,
        *,
        qkv_bias: bool = False,
        output_bias: bool = False,
        qk_norm: bool = False,
    ) -> Attention:
        """That of layer ``index``, as the config says, and with what only the architecture knows."""
        config = self.config
        return Attention(
            index,
            config.hidden_size,
            self.heads,
            config.head_dim,
            cos_sin,
            self.context,
            sliding_window=config.sliding_windows[index],
            norm_eps=config.rms_norm_eps,
            qkv_bias=qkv_bias,
            output_bias=output_bias,
            qk_norm=qk_norm,
        )

    @property
    def num_heads(self) -> int:
        """Query heads of this rank."""
        return self.heads.query.size

    @property
    def num_kv_heads(self) -> int:
        """KV heads of this rank: those of its KV pool."""
        return self.heads.kv.size

    def forward(self, batch: ForwardBatch, kv: KVPool, backend: AttentionBackend) -> torch.Tensor:
        backend.begin(batch)
        return self.model(batch, kv, backend)

    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Hidden states (S, hidden_size) -> logits (S, vocab_size) in the model's dtype, the same on all ranks.

        They are written to ``out`` if it is given.
        """
        return self.lm_head(hidden, out)
