"""SmolLM2-135M-Instruct from its GGUF file against transformers reading the same file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from model_driver import Driver

from minisgl.kernel.cpu import load
from minisgl.models.build import build_model
from minisgl.models.config import ModelConfig

pytestmark = pytest.mark.model

PROMPT = [1, 4093, 198, 28120, 702, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198]


def test_greedy_equals_transformers(default_model: Path) -> None:
    from transformers import AutoModelForCausalLM

    config = ModelConfig.from_path(default_model)
    assert (config.num_layers, config.hidden_size, config.num_kv_heads, config.vocab_size) == (30, 576, 3, 49152)
    assert config.tie_word_embeddings
    assert config.end_token_ids == {2}
    model = build_model(config, dtype=torch.float32, device=torch.device("cpu"), path=default_model, max_positions=128)
    driver = Driver(model, backend="torch" if load() is None else "cpu")
    logits = driver.step({0: PROMPT})
    ids = [int(logits.argmax())]
    for _ in range(15):
        ids.append(int(driver.step({0: ids[-1:]}).argmax()))
    reference = AutoModelForCausalLM.from_pretrained(
        default_model.parent, gguf_file=default_model.name, dtype=torch.float32
    )
    with torch.inference_mode():
        expected = reference(torch.tensor([PROMPT + ids])).logits[0]
    torch.testing.assert_close(logits[0], expected[len(PROMPT) - 1], rtol=1e-3, atol=1e-3)
    assert ids == expected.argmax(-1).tolist()[len(PROMPT) - 1 : -1]
