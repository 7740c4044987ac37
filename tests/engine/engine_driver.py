"""Drives an engine by hand: requests with pages in random order, batches built straight from them."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from minisgl.core import PENDING, Batch, BatchResult, Penalties, Sampling, SamplingParams, TableUpdate
from minisgl.engine.config import EngineConfig
from minisgl.engine.engine import TorchEngine
from minisgl.uniform import stream_key, uniforms

TINY: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 16,
    "vocab_size": 211,
    "max_position_embeddings": 160,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "eos_token_id": 0,
    "torch_dtype": "bfloat16",
}


def write_tiny(directory: Path, poison: int | None = None, **changes: Any) -> Path:
    """A random Llama checkpoint whose outputs depend on all of the context. The embedding of ``poison`` is NaN."""
    config = TINY | changes
    hidden, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    query, kv = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    generator = torch.Generator().manual_seed(7)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) / shape[-1] ** 0.5

    tensors = {
        "model.embed_tokens.weight": torch.randn(config["vocab_size"], hidden, generator=generator),
        "model.norm.weight": torch.rand(hidden, generator=generator) + 0.5,
        "lm_head.weight": normal(config["vocab_size"], hidden) * 4,
    }
    if poison is not None:
        tensors["model.embed_tokens.weight"][poison] = torch.nan
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        tensors |= {
            layer + "input_layernorm.weight": torch.rand(hidden, generator=generator) + 0.5,
            layer + "post_attention_layernorm.weight": torch.rand(hidden, generator=generator) + 0.5,
            layer + "self_attn.q_proj.weight": normal(query, hidden) * 3,
            layer + "self_attn.k_proj.weight": normal(kv, hidden) * 3,
            layer + "self_attn.v_proj.weight": normal(kv, hidden) * 3,
            layer + "self_attn.o_proj.weight": normal(hidden, query) * 3,
            layer + "mlp.gate_proj.weight": normal(inner, hidden),
            layer + "mlp.up_proj.weight": normal(inner, hidden),
            layer + "mlp.down_proj.weight": normal(hidden, inner),
        }
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    save_file(tensors, directory / "model.safetensors")
    return directory


def tiny_engine(model: Path, **changes: Any) -> TorchEngine:
    defaults: dict[str, Any] = {
        "device": "cpu",
        "num_pages": 120,
        "page_size": 4,
        "max_running_req": 6,
        "num_threads": 1,
    }
    return TorchEngine(EngineConfig(model_path=model, **defaults | changes))


@dataclass
class Request:
    """``tokens`` are all that are known (the last may be PENDING), ``cached`` of them have their KV on the device."""

    row: int
    tokens: list[int]
    params: SamplingParams = field(default_factory=lambda: SamplingParams(temperature=0))
    cached: int = 0
    pages: list[int] = field(default_factory=list)
    prompt_len: int = 0

    def __post_init__(self) -> None:
        self.prompt_len = len(self.tokens)


class Driver:
    """Builds batches. The pages of requests come in random order from all that the engine has."""

    def __init__(self, engine: TorchEngine, seed: int = 0) -> None:
        self.engine = engine
        self.free = np.random.default_rng(seed).permutation(engine.info.num_pages).tolist()

    def launch(self, *work: tuple[Request, int]) -> Any:
        """Starts a step in which each request computes so many of its tokens. Who reaches the end samples: PENDING."""
        batch = self.batch(*work)
        flight = self.engine.launch(batch)
        for request, new in work:
            request.cached += new
            if request.cached == len(request.tokens):
                request.tokens.append(PENDING)
        return flight

    def step(self, *work: tuple[Request, int]) -> BatchResult:
        """The same, with the results filled in. Failed requests keep their PENDING."""
        flight = self.launch(*work)
        result: BatchResult = flight.wait()
        self.fill(result, *(request for request, _ in sorted(work, key=lambda item: item[1] != 1)))
        return result

    @staticmethod
    def fill(result: BatchResult, *requests: Request) -> None:
        ids = iter(result.ids.tolist())
        for request, count in zip(requests, result.counts.tolist(), strict=True):
            if count:
                request.tokens[request.tokens.index(PENDING)] = next(ids)

    def generate(self, request: Request, count: int, chunk: int = 10**6) -> list[int]:
        """Alone in its batches."""
        while request.cached < len(request.tokens) - 1 or len(request.tokens) - request.prompt_len < count:
            self.step((request, min(chunk, len(request.tokens) - request.cached)))
        return request.tokens[request.prompt_len :]

    def release(self, request: Request) -> None:
        self.free.extend(request.pages)
        request.pages = []

    def batch(self, *work: tuple[Request, int]) -> Batch:
        ordered = sorted(work, key=lambda item: item[1] != 1)
        update: list[tuple[int, int, int]] = []
        for request, new in ordered:
            while len(request.pages) * self.engine.info.page_size < request.cached + new:
                request.pages.append(self.free.pop())
                update.append((request.row, len(request.pages) - 1, request.pages[-1]))
        sampled = [i for i, (r, new) in enumerate(ordered) if r.cached + new == len(r.tokens)]
        return Batch(
            rows=int32([r.row for r, _ in ordered]),
            cached=int32([r.cached for r, _ in ordered]),
            new=int32([new for _, new in ordered]),
            input_ids=int32([token for r, new in ordered for token in r.tokens[r.cached : r.cached + new]]),
            table=TableUpdate(*(int32(column) for column in zip(*update, strict=True)) if update else [int32([])] * 3),
            sampling=self._sampling([ordered[i][0] for i in sampled], int32(sampled)),
        )

    @staticmethod
    def _sampling(requests: list[Request], index: np.ndarray) -> Sampling:
        params = [r.params for r in requests]
        keys = np.array([stream_key(p.seed or 0) for p in params], np.uint64)
        sampling = Sampling(
            index=index,
            temperature=float32([p.temperature for p in params]),
            top_k=int32([p.top_k for p in params]),
            top_p=float32([p.top_p for p in params]),
            min_p=float32([p.min_p for p in params]),
            uniform=uniforms(keys, int32([len(r.tokens) for r in requests])),
        )
        penalised = [i for i, p in enumerate(params) if p.has_penalty]
        if penalised:
            which = [requests[i] for i in penalised]
            sampling.penalties = Penalties(
                index=int32(penalised),
                history=int32([token for r in which for token in r.tokens]),
                offsets=int32(np.cumsum([0, *(len(r.tokens) for r in which)])),
                prompt_lens=int32([r.prompt_len for r in which]),
                presence=float32([r.params.presence_penalty for r in which]),
                frequency=float32([r.params.frequency_penalty for r in which]),
                repetition=float32([r.params.repetition_penalty for r in which]),
            )
        return sampling


def int32(values: Any) -> np.ndarray:
    return np.array(values, np.int32)


def float32(values: Any) -> np.ndarray:
    return np.array(values, np.float32)
