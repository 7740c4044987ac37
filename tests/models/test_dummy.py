from __future__ import annotations

import json
from pathlib import Path

import torch
from model_driver import Driver
from tiny_models import COMMON

from minisgl.distributed.communicator import SingleCommunicator
from minisgl.models.base import CausalLM
from minisgl.models.build import build_model
from minisgl.models.config import ModelConfig


def build(directory: Path, comm: SingleCommunicator | None = None) -> CausalLM:
    """From a bare config.json."""
    moe = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 16}
    raw = {"architectures": ["Qwen3MoeForCausalLM"], **COMMON, **moe}
    (directory / "config.json").write_text(json.dumps(raw))
    config = ModelConfig.from_path(directory)
    return build_model(config, dtype=torch.float32, device=torch.device("cpu"), load="dummy", comm=comm)


def test_sane_and_repeatable(tmp_path: Path) -> None:
    prompt = list(range(30))
    logits = [Driver(build(tmp_path)).step({0: prompt}, every_token=True) for _ in range(2)]
    assert torch.equal(*logits)
    assert logits[0].isfinite().all()
    assert 0.01 < logits[0].std() < 5
    assert logits[0].argmax(-1).unique().numel() > 3


def test_a_rank_has_its_shard_of_the_same_model(tmp_path: Path) -> None:
    class Second(SingleCommunicator):
        rank, world_size = 1, 2

    hidden = torch.randn(3, 48)
    whole = build(tmp_path).lm_head.product.matmul(hidden)
    part = build(tmp_path, Second()).lm_head.product.matmul(hidden)
    torch.testing.assert_close(part[:, :99], whole[:, 100:])
