"""What a model is made of, read from config.json or from a GGUF file. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from minisgl.distributed.sharding import HeadShards

from .gguf_config import gguf_config
from .gguf_file import GGUFError
from .registry import ARCHITECTURES
from .rope_config import RopeConfig


class ConfigError(ValueError):
    """A model that cannot be served, in one sentence that says what can."""


@dataclass(frozen=True, slots=True)
class MoEConfig:
    """Each token goes to ``top_k`` of ``num_experts`` experts, which are gated MLPs of ``intermediate_size``."""

    num_experts: int
    top_k: int
    intermediate_size: int
    norm_topk_prob: bool
    layers: frozenset[int]
    """The decoder layers that have experts; the others have a plain MLP."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The numbers of one model. Per-layer values have one entry for each decoder layer."""

    architecture: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    rope: RopeConfig
    sliding_windows: tuple[int | None, ...]
    torch_dtype: str | None
    """The dtype that the checkpoint names ("bfloat16"), None where it names none, as in GGUF files."""
    moe: MoEConfig | None = None

    def check_ranks(self, ranks: int) -> None:
        """Raises ValueError where the heads cannot be cut for so many ranks."""
        HeadShards.of(self.num_heads, self.num_kv_heads, 0, ranks)

    @property
    def max_context(self) -> int:
        """The longest sequence, in tokens, that the model is made for: yarn stretches it by its factor."""
        if self.rope.kind == "yarn":
            return max(self.max_position_embeddings, int(self.rope.original_max_position * self.rope.factor))
        return self.max_position_embeddings

    @classmethod
    def from_path(cls, path: Path) -> ModelConfig:
        """``path`` is a directory with a config.json, or a .gguf file. Raises :class:`ConfigError`."""
        if path.suffix == ".gguf":
            try:
                return cls.from_dict(gguf_config(path), str(path))
            except GGUFError as error:
                raise ConfigError(str(error)) from None
        return cls.from_dict(_read_json(path / "config.json"), str(path / "config.json"))

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], where: str) -> ModelConfig:
        """From the fields of a config.json, either generation of its names; ``where`` names it in errors."""
        if isinstance(raw.get("text_config"), dict):
            raw = {**raw, **raw["text_config"]}
        try:
            return _Reader(raw, where).read()
        except ConfigError:
            raise
        except (ValueError, TypeError, AttributeError) as error:
            # Only the fields that tend to be wrong are looked at one by one.
            raise ConfigError(f"{where}: a field has a value of the wrong kind ({error}).") from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(
            f"There is no {path.name} in {path.parent}; --model takes a directory that has one."
        ) from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid JSON: {error}.") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{path} does not hold a JSON object.")
    return raw


class _Reader:
    """One walk over the raw fields, with the defaults that transformers has for each architecture."""

    def __init__(self, raw: Mapping[str, Any], where: str) -> None:
        self.raw = raw
        self.where = where
        self.architecture = self._architecture()

    def read(self) -> ModelConfig:
        raw, arch = self.raw, self.architecture
        self._check_supported()
        num_layers = self._positive("num_hidden_layers")
        hidden_size = self._positive("hidden_size")
        num_heads = self._positive("num_attention_heads")
        num_kv_heads = self._positive("num_key_value_heads", num_heads)
        if num_heads % num_kv_heads:
            self._fail(f"num_attention_heads ({num_heads}) is not a multiple of num_key_value_heads ({num_kv_heads})")
        # Qwen3 is the one family whose head_dim is not derived when it is left out.
        head_dim = self._positive("head_dim", 128 if arch == "Qwen3ForCausalLM" else hidden_size // num_heads)
        if raw.get("head_dim") is None and arch != "Qwen3ForCausalLM" and hidden_size % num_heads:
            self._fail(f"hidden_size ({hidden_size}) is not a multiple of num_attention_heads ({num_heads})")
        max_position = self._positive("max_position_embeddings")
        try:
            rope = RopeConfig.from_dict(raw, head_dim, max_position)
        except ValueError as error:
            raise ConfigError(f"{self.where}: {error}") from None
        return ModelConfig(
            architecture=arch,
            num_layers=num_layers,
            hidden_size=hidden_size,
            intermediate_size=self._positive("intermediate_size"),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            vocab_size=self._positive("vocab_size"),
            max_position_embeddings=max_position,
            rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
            tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
            attention_bias=bool(raw.get("attention_bias", False)),
            mlp_bias=bool(raw.get("mlp_bias", False)),
            rope=rope,
            sliding_windows=self._sliding_windows(num_layers),
            torch_dtype=raw.get("dtype") or raw.get("torch_dtype"),
            moe=self._moe(num_layers) if arch == "Qwen3MoeForCausalLM" else None,
        )

    def _fail(self, what: str) -> NoReturn:
        raise ConfigError(f"{self.where}: {what}.")

    def _positive(self, key: str, default: int | None = None) -> int:
        value = self.raw.get(key)
        if value is None:
            value = default
        if value is None:
            self._fail(f"{key} is missing")
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            self._fail(f"{key} must be a positive integer, not {value!r}")
        return value

    def _architecture(self) -> str:
        names = self.raw.get("architectures") or []
        for name in names:
            if name in ARCHITECTURES:
                return str(name)
        have = ", ".join(map(str, names)) if names else "none"
        raise ConfigError(
            f"{self.where}: unsupported architecture ({have}); supported are {', '.join(sorted(ARCHITECTURES))}."
        )

    def _check_supported(self) -> None:
        activation = self.raw.get("hidden_act", "silu")
        if activation not in ("silu", "swish"):
            self._fail(f"unsupported activation hidden_act {activation!r}; supported is silu")
        quantised = self.raw.get("quantization_config")
        if quantised:
            method = quantised.get("quant_method", "unknown") if isinstance(quantised, dict) else quantised
            self._fail(
                f"unsupported quantisation {method!r}; supported are safetensors in float32, float16 or bfloat16, "
                "and GGUF files"
            )

    def _sliding_windows(self, num_layers: int) -> tuple[int | None, ...]:
        raw, arch = self.raw, self.architecture
        if arch == "MistralForCausalLM":
            return (self._window(raw.get("sliding_window", 4096)),) * num_layers
        if arch == "LlamaForCausalLM" or not raw.get("use_sliding_window", False):
            return (None,) * num_layers
        window = self._window(raw.get("sliding_window", 4096))
        if arch == "Qwen3MoeForCausalLM":
            return (window,) * num_layers
        kinds = raw.get("layer_types")
        if kinds is None:
            first = raw.get("max_window_layers", 28)
            kinds = ["sliding_attention" if i >= first else "full_attention" for i in range(num_layers)]
        allowed = ("full_attention", "sliding_attention")
        if len(kinds) != num_layers or any(kind not in allowed for kind in kinds):
            self._fail(f"layer_types must name {' or '.join(allowed)} for each of the {num_layers} layers")
        return tuple(window if kind == "sliding_attention" else None for kind in kinds)

    def _window(self, value: Any) -> int | None:
        if value is None:
            return None
        if not isinstance(value, int) or value < 1:
            self._fail(f"sliding_window must be a positive integer or null, not {value!r}")
        return int(value)

    def _moe(self, num_layers: int) -> MoEConfig:
        raw = self.raw
        # transformers 5 writes num_local_experts.
        num_experts = self._positive("num_experts", raw.get("num_local_experts"))
        top_k = self._positive("num_experts_per_tok")
        if top_k > num_experts:
            self._fail(f"num_experts_per_tok ({top_k}) is more than num_experts ({num_experts})")
        step = self._positive("decoder_sparse_step", 1)
        dense = set(raw.get("mlp_only_layers") or ())
        return MoEConfig(
            num_experts=num_experts,
            top_k=top_k,
            intermediate_size=self._positive("moe_intermediate_size"),
            norm_topk_prob=bool(raw.get("norm_topk_prob", False)),
            layers=frozenset(i for i in range(num_layers) if i not in dense and (i + 1) % step == 0),
        )
