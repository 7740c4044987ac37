"""Which architectures can be served, and the file of each. Imports no torch: a class is looked up when it is built."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .base import CausalLM

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
}
"""``architectures`` in config.json -> the module of this package that holds the class of that name."""


def model_class(architecture: str) -> type[CausalLM]:
    """``architecture`` is a key of :data:`ARCHITECTURES`; ModelConfig has checked it."""
    found: type[CausalLM] = getattr(import_module(f"{__package__}.{ARCHITECTURES[architecture]}"), architecture)
    return found
