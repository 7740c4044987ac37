"""Rotary position embeddings: the table of angles, in the variants that transformers knows.

Position p turns the pair (i, i + rotary_dim / 2) of a head by ``p * frequency[i]``, where by default
``frequency[i] = theta ** (-2 i / rotary_dim)``. The other kinds stretch the context by changing the frequencies:

    linear      all of them slower by ``factor``
    dynamic     a larger theta once the context is longer than the model was trained for ("NTK-aware")
    llama3      slow ones slower by ``factor``, fast ones kept, a ramp between (Llama 3.1)
    yarn        the same idea by the number of turns over the trained context, and the result scaled by an attention
                factor (Peng et al., "YaRN", 2023)
"""

from __future__ import annotations

import math

import torch

from .rope_config import RopeConfig


def rope_table(rope: RopeConfig, num_positions: int, device: torch.device) -> torch.Tensor:
    """(num_positions, rotary_dim) float32: for each position the cos of every angle, then the sin of every angle."""
    frequencies, scale = rope_frequencies(rope, num_positions)
    angles = torch.arange(num_positions, dtype=torch.float32)[:, None] * frequencies
    return torch.cat((angles.cos() * scale, angles.sin() * scale), dim=1).to(device)


def rope_frequencies(rope: RopeConfig, num_positions: int) -> tuple[torch.Tensor, float]:
    """Radians per position (rotary_dim / 2) float32, and the factor that cos and sin are scaled by.

    transformers recomputes "dynamic" frequencies for the current length of a sequence. Keys in a paged cache cannot be
    turned again, so here they depend on ``num_positions`` alone, the longest sequence that may come: the same as
    transformers' while that is at most ``max_position_embeddings``, and beyond it what transformers has at that length.
    """
    if rope.kind == "yarn":
        return _yarn(rope)
    if rope.kind == "dynamic":
        stretch = rope.factor * max(num_positions, rope.max_position) / rope.max_position - (rope.factor - 1)
        return _powers(rope.theta * stretch ** (rope.rotary_dim / (rope.rotary_dim - 2)), rope.rotary_dim), 1.0
    frequencies = _powers(rope.theta, rope.rotary_dim)
    if rope.kind == "linear":
        frequencies = frequencies / rope.factor
    elif rope.kind == "llama3":
        frequencies = _llama3(rope, frequencies)
    if rope.freq_divisors is not None:
        frequencies = frequencies / torch.tensor(rope.freq_divisors)
    return frequencies, 1.0


def _powers(theta: float, rotary_dim: int) -> torch.Tensor:
    return 1.0 / theta ** (torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim)


def _llama3(rope: RopeConfig, frequencies: torch.Tensor) -> torch.Tensor:
    # How often a pair turns over the trained context decides: 1 keeps the frequency, 0 divides it by the factor.
    turns = rope.original_max_position * frequencies / (2 * math.pi)
    keep = ((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0, 1)
    return (1 - keep) * frequencies / rope.factor + keep * frequencies


def _yarn(rope: RopeConfig) -> tuple[torch.Tensor, float]:
    dim = rope.rotary_dim

    def index_of(turns: float) -> float:
        """The (fractional) index of the pair that turns so often over the trained context."""
        return dim * math.log(rope.original_max_position / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = index_of(rope.beta_fast), index_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = high - low if high != low else 0.001
    keep = 1 - ((torch.arange(dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    frequencies = _powers(rope.theta, dim)
    return frequencies / rope.factor * (1 - keep) + frequencies * keep, _yarn_attention_factor(rope)


def _yarn_attention_factor(rope: RopeConfig) -> float:
    def mscale(weight: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * weight * math.log(rope.factor) + 1.0

    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return mscale(rope.mscale) / mscale(rope.mscale_all_dim)
    return mscale(1.0)
