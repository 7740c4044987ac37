"""Which architectures can be served, and the file of each. Imports no torch: the class is looked up in build.py."""

from __future__ import annotations

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
}
"""``architectures`` in config.json -> the module of this package that holds the class of that name."""
