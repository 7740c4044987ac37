"""SmolLM2-135M-Instruct's GGUF file as the loader sees it. tests/engine/test_smollm2.py looks at what it answers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from minisgl.distributed.communicator import SingleCommunicator
from minisgl.kernel.ops import Ops
from minisgl.kernel.weight import PlainWeight
from minisgl.layers.context import BuildContext
from minisgl.layers.loading import LoadPlan
from minisgl.models.build import model_class
from minisgl.models.config import ModelConfig
from minisgl.models.gguf import tensors_in_gguf

pytestmark = pytest.mark.model


def test_config(default_model: Path) -> None:
    config = ModelConfig.from_path(default_model)
    assert (config.num_layers, config.hidden_size, config.vocab_size) == (30, 576, 49152)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (9, 3, 64)
    assert (config.rope.kind, config.rope.theta, config.max_context) == ("default", 100000.0, 8192)
    assert config.tie_word_embeddings


def test_every_tensor_has_its_place(default_model: Path) -> None:
    config = ModelConfig.from_path(default_model)
    context = BuildContext(
        torch.float32, torch.device("cpu"), SingleCommunicator(), Ops(), PlainWeight, "torch", max_positions=8
    )
    targets = LoadPlan.of(model_class(config.architecture)(config, context)).targets
    stored = {tensor.name: tensor.shape for tensor in tensors_in_gguf(default_model, 9, 3)}
    assert stored == {name: target.shape for name, target in targets.items()}
