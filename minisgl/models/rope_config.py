"""The parameters of rotary position embeddings, from either generation of transformers' configs. Imports no torch.

Old configs have ``rope_theta`` beside a ``rope_scaling`` dictionary, those of transformers 5 one dictionary
``rope_parameters``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """See models/rope.py for what each kind makes of these. Lengths are in tokens."""

    kind: str
    theta: float
    rotary_dim: int
    max_position: int
    original_max_position: int
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    freq_divisors: tuple[float, ...] | None = None
    """GGUF files of Llama 3 carry the result of its scaling as a table: what to divide each frequency by."""

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], head_dim: int, max_position: int) -> RopeConfig:
        """From the fields of a config.json. Raises ValueError for an unknown type or a value that makes no sense."""
        params = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
        if any(isinstance(value, dict) for value in params.values()):
            raise ValueError("rope parameters that differ between layers are not supported.")
        kind = params.get("rope_type") or params.get("type") or "default"
        if kind not in ROPE_TYPES:
            raise ValueError(f"unsupported rope type {kind!r}; supported are {', '.join(ROPE_TYPES)}.")

        def number(key: str, default: float | None = None) -> float:
            value = params.get(key, default)
            if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
                raise ValueError(f"rope type {kind!r} needs a positive number as {key}, not {value!r}.")
            return float(value)

        def optional(key: str) -> float | None:
            return None if params.get(key) is None else number(key)

        partial = params.get("partial_rotary_factor") or raw.get("partial_rotary_factor") or 1.0
        rotary_dim = int(head_dim * partial)
        if not 0 < rotary_dim <= head_dim or rotary_dim % 2:
            raise ValueError(f"rope must rotate an even part of head_dim {head_dim}, not {rotary_dim} elements of it.")
        theta = params.get("rope_theta") or raw.get("rope_theta") or 10000.0
        original = raw.get("original_max_position_embeddings") or number(
            "original_max_position_embeddings", max_position
        )
        factor = 1.0
        if kind == "yarn" and params.get("factor") is None:
            factor = max_position / original
        elif kind != "default":
            factor = number("factor")
        config = cls(
            kind=kind,
            theta=float(theta),
            rotary_dim=rotary_dim,
            max_position=max_position,
            original_max_position=int(original),
            factor=factor,
            low_freq_factor=number("low_freq_factor") if kind == "llama3" else 1.0,
            high_freq_factor=number("high_freq_factor") if kind == "llama3" else 1.0,
            beta_fast=optional("beta_fast") or 32.0,
            beta_slow=optional("beta_slow") or 1.0,
            attention_factor=optional("attention_factor"),
            mscale=params.get("mscale"),
            mscale_all_dim=params.get("mscale_all_dim"),
            truncate=bool(params.get("truncate", True)),
            freq_divisors=tuple(params["freq_divisors"]) if "freq_divisors" in params else None,
        )
        if kind == "llama3" and config.low_freq_factor == config.high_freq_factor:
            raise ValueError("rope type 'llama3' needs low_freq_factor and high_freq_factor that differ.")
        return config
