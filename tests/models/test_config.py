from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tiny_models import COMMON, VARIANTS

from minisgl.models.config import ConfigError, ModelConfig
from minisgl.models.registry import ARCHITECTURES

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 100,
    "max_position_embeddings": 256,
}


def parse(changes: dict[str, Any], base: dict[str, Any] = LLAMA) -> ModelConfig:
    return ModelConfig.from_dict({**base, **changes}, "config.json")


def test_defaults_of_an_old_llama() -> None:
    config = parse({})
    assert (config.num_kv_heads, config.head_dim, config.rms_norm_eps) == (4, 16, 1e-6)
    assert (config.rope.kind, config.rope.theta, config.rope.rotary_dim) == ("default", 10000.0, 16)
    assert not config.tie_word_embeddings
    assert config.sliding_windows == (None, None)
    assert config.torch_dtype is None


@pytest.mark.parametrize("variant", VARIANTS)
def test_agrees_with_transformers(variant: str, tmp_path: Path) -> None:
    import transformers

    family, changes = VARIANTS[variant]
    theirs = getattr(transformers, f"{family}Config")(
        **{**COMMON, **changes}, architectures=[f"{family}ForCausalLM"], dtype="bfloat16"
    )
    theirs.save_pretrained(tmp_path)
    ours = ModelConfig.from_path(tmp_path)
    assert ours.architecture == f"{family}ForCausalLM"
    assert ours.torch_dtype == "bfloat16"
    assert ours.num_layers == theirs.num_hidden_layers
    for name in ("hidden_size", "intermediate_size", "vocab_size", "rms_norm_eps", "tie_word_embeddings"):
        assert getattr(ours, name) == getattr(theirs, name)
    if ours.moe:
        assert ours.moe.num_experts == theirs.num_experts


def test_both_generations_of_rope() -> None:
    old = {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}}
    new = {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}}
    assert parse(old).rope == parse(new).rope
    assert parse(new).rope.factor == 2.0
    assert parse({"rope_scaling": None, "rope_theta": 7.0}).rope.theta == 7.0


def test_context() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
    assert parse({"rope_scaling": yarn}).max_context == 1024
    assert parse({"rope_scaling": yarn, "max_position_embeddings": 2048}).max_context == 2048
    assert parse({"rope_scaling": {"rope_type": "linear", "factor": 4.0}}).max_context == 256


def test_nested_text_config() -> None:
    config = ModelConfig.from_dict({"architectures": ["Vision"], "text_config": LLAMA}, "config.json")
    assert config.architecture == "LlamaForCausalLM"


def test_windows_of_each_family() -> None:
    def windows(name: str, **changes: Any) -> tuple[int | None, ...]:
        moe = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
        return parse({"architectures": [name], **moe, **changes}).sliding_windows

    assert windows("MistralForCausalLM") == (4096, 4096)
    assert windows("MistralForCausalLM", sliding_window=None) == (None, None)
    assert windows("LlamaForCausalLM", sliding_window=9) == (None, None)
    assert windows("Qwen2ForCausalLM", sliding_window=9) == (None, None)
    on = {"use_sliding_window": True, "sliding_window": 9}
    assert windows("Qwen2ForCausalLM", **on, max_window_layers=1) == (None, 9)
    assert windows("Qwen3ForCausalLM", **on, layer_types=["sliding_attention", "full_attention"]) == (9, None)
    assert windows("Qwen3MoeForCausalLM", **on) == (9, 9)


def test_expert_layers() -> None:
    moe = {"num_experts_per_tok": 2, "moe_intermediate_size": 8, "num_hidden_layers": 6}
    base = {**LLAMA, "architectures": ["Qwen3MoeForCausalLM"], **moe}
    config = parse({"num_experts": 4, "decoder_sparse_step": 2, "mlp_only_layers": [3]}, base)
    assert config.moe
    assert config.moe.layers == {1, 5}
    assert parse({"num_local_experts": 4}, base).moe.layers == set(range(6))  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["FalconForCausalLM"]}, "FalconForCausalLM.*supported are.*Qwen3MoeForCausalLM"),
        ({"architectures": None}, "architecture"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "longrope.*supported are.*yarn"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "low_freq_factor"),
        ({"rope_scaling": {"rope_type": "linear", "factor": float("nan")}}, "factor"),
        ({"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 2.0}}}, "differ between layers"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "attention_factor": "high"}}, "attention_factor"),
        ({"partial_rotary_factor": 0.2}, "even part"),
        ({"quantization_config": {"quant_method": "awq"}}, "awq.*supported are"),
        ({"hidden_act": "gelu"}, "gelu.*silu"),
        ({"num_key_value_heads": 3}, "multiple"),
        ({"num_attention_heads": 5}, "multiple"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"rms_norm_eps": "small"}, r"config\.json: .*wrong kind.*small"),
        ({"rope_parameters": ["linear"]}, r"config\.json: .*wrong kind"),
        ({"architectures": 5}, r"config\.json: .*wrong kind"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"vocab_size": "many"}, "vocab_size"),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 0}, "sliding_window"),
        (
            {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True, "layer_types": ["full_attention"]},
            "layer_types",
        ),
        (
            {
                "architectures": ["Qwen3MoeForCausalLM"],
                "num_experts": 2,
                "num_experts_per_tok": 3,
                "moe_intermediate_size": 8,
            },
            "num_experts_per_tok",
        ),
    ],
)
def test_what_cannot_be_served(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        parse(changes)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("content", [None, "{", "[]"])
def test_bad_directories(content: str | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=r"config\.json"):
        ModelConfig.from_path(tmp_path)


def test_every_architecture_has_a_class() -> None:
    from minisgl.models.build import model_class

    for name in ARCHITECTURES:
        assert model_class(name).__name__ == name


def test_imports_no_torch() -> None:
    code = "import sys; import minisgl.models.config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
