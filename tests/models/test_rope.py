"""The tables against transformers, for every rope type."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from minisgl.kernel.ops import Ops
from minisgl.models.rope import rope_frequencies, rope_table
from minisgl.models.rope_config import RopeConfig

HEAD_DIM, MAX_POSITION = 64, 512
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 1e6},
    "linear": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    },
    "yarn": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 128},
    "yarn-no-factor": {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": None,
        "original_max_position_embeddings": 64,
    },
    "yarn-attention-factor": {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 8.0,
        "attention_factor": 0.75,
        "original_max_position_embeddings": 64,
    },
    "yarn-mscale": {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 40.0,
        "mscale": 0.707,
        "mscale_all_dim": 1.2,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "truncate": False,
        "original_max_position_embeddings": 128,
    },
}
PARTIAL = {name: {**ROPES[name], "partial_rotary_factor": 0.5} for name in ("linear", "llama3", "yarn")}


def reference(params: dict[str, Any], positions: int) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin (positions, rotary_dim / 2) of transformers' LlamaRotaryEmbedding."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = LlamaConfig(
        hidden_size=4 * HEAD_DIM,
        num_attention_heads=4,
        head_dim=HEAD_DIM,
        max_position_embeddings=MAX_POSITION,
        rope_parameters=dict(params),
    )
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), torch.arange(positions)[None])
    return cos[0].chunk(2, -1)[0], sin[0].chunk(2, -1)[0]


@pytest.mark.parametrize("params", [*ROPES.values(), *PARTIAL.values()], ids=[*ROPES, *(f"{n}-half" for n in PARTIAL)])
def test_table_equals_transformers(params: dict[str, Any]) -> None:
    rope = RopeConfig.from_dict({"rope_parameters": params}, HEAD_DIM, MAX_POSITION)
    table = rope_table(rope, MAX_POSITION, torch.device("cpu"))
    assert table.shape == (MAX_POSITION, HEAD_DIM * params.get("partial_rotary_factor", 1))
    expected = torch.cat(reference(params, MAX_POSITION), dim=1)
    # An angle of 500 radians has an error of 3e-5 of its own in float32.
    torch.testing.assert_close(table, expected, rtol=0, atol=1e-4)


def test_dynamic_beyond_the_trained_context() -> None:
    """The whole table has the frequencies that transformers has at the longest length."""
    rope = RopeConfig.from_dict({"rope_parameters": ROPES["dynamic"]}, HEAD_DIM, MAX_POSITION)
    table = rope_table(rope, 3 * MAX_POSITION, torch.device("cpu"))
    expected = torch.cat(reference(ROPES["dynamic"], 3 * MAX_POSITION), dim=1)
    torch.testing.assert_close(table, expected, rtol=0, atol=3e-4)


def test_the_types_differ() -> None:
    """So a mix-up among them cannot pass the tests above."""
    tables = {
        name: rope_table(RopeConfig.from_dict({"rope_parameters": p}, HEAD_DIM, MAX_POSITION), 64, torch.device("cpu"))
        for name, p in ROPES.items()
        if name != "dynamic"  # The default, up to the trained context.
    }
    for a in tables:
        for b in tables:
            assert a == b or (tables[a] - tables[b]).abs().max() > 1e-2


def test_divisors_of_gguf_files() -> None:
    plain = RopeConfig.from_dict({"rope_theta": 1e4}, 8, 64)
    divided = RopeConfig.from_dict(
        {"rope_parameters": {"rope_theta": 1e4, "freq_divisors": [1.0, 1.0, 4.0, 8.0]}}, 8, 64
    )
    expected = rope_frequencies(plain, 64)[0] / torch.tensor([1.0, 1.0, 4.0, 8.0])
    assert torch.equal(rope_frequencies(divided, 64)[0], expected)


@pytest.mark.parametrize("rotary_dim", [HEAD_DIM, 32])
def test_rotation_equals_transformers(rotary_dim: int) -> None:
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    rope = RopeConfig.from_dict({"partial_rotary_factor": rotary_dim / HEAD_DIM}, HEAD_DIM, MAX_POSITION)
    table = rope_table(rope, MAX_POSITION, torch.device("cpu"))
    x = torch.randn(7, 3, HEAD_DIM)
    positions = torch.tensor([0, 511, 5, 5, 17, 300, 2], dtype=torch.int32)
    out = Ops().rope(x, positions, table)
    cos, sin = (part.repeat(1, 2) for part in table[positions].chunk(2, dim=1))
    expected, _ = apply_rotary_pos_emb(x[..., :rotary_dim], x[..., :rotary_dim], cos, sin)
    torch.testing.assert_close(out[..., :rotary_dim], expected)
    assert torch.equal(out[..., rotary_dim:], x[..., rotary_dim:])
