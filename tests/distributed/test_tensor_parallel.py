"""Two and four ranks over gloo: the collectives, and models that give what one rank gives.

Every process imports torch, so all that needs a number of ranks is done by one set of them.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from model_driver import Driver
from ranks import run_ranks
from tiny_models import make_reference

from minisgl.distributed.communicator import Communicator, SingleCommunicator
from minisgl.models import build
from minisgl.models.build import build_model
from minisgl.models.config import ModelConfig

PROMPTS = {0: [5, 17, 40, 9, 120, 66, 3], 1: [77], 2: list(range(20, 45))}
VARIANTS = {
    2: [
        "llama",  # 2 KV heads; vocabulary 199, so the last shard is padded
        "llama-one-kv-head",  # replicated
        "llama-odd-heads",  # 9 heads in 3 groups
        "llama-mha-biased",
        "llama-tied",
        "qwen2",
        "qwen3-moe",
    ],
    4: ["llama"],  # 2 KV heads, each on two ranks; sums of four
}


def run_models(comm: Communicator, directory: Path, variants: list[str]) -> dict[str, Any]:
    """The logits of every prompt token, and 8 greedy ids of a batch of 3, for each checkpoint."""
    results = {}
    for variant in variants:
        path = directory / variant
        config = ModelConfig.from_path(path)
        model = build_model(config, dtype=torch.float32, device=torch.device("cpu"), path=path, comm=comm)
        logits = Driver(model).step(PROMPTS, every_token=True)
        results[variant] = logits, Driver(model).greedy(PROMPTS, steps=8)
    return results


def tensors(rank: int) -> torch.Tensor:
    return torch.randn(5, 33, generator=torch.Generator().manual_seed(rank))


def run_rank(comm: Communicator, directory: Path, variants: list[str]) -> dict[str, Any]:
    mine = tensors(comm.rank)
    whole = comm.all_reduce(mine.clone())
    return {
        "sum": whole,
        "sum of a row": comm.all_reduce(mine[3:4].clone()),  # The same row in a batch of another size.
        "gathered": comm.all_gather(mine[:, :2]),
        "broadcast": comm.broadcast(mine.clone()),
        "ids": comm.broadcast(torch.tensor([comm.rank, 7], dtype=torch.int32)),
        "models": run_models(comm, directory, variants),
    }


@pytest.fixture(scope="module", params=VARIANTS)
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict]]:
    """The checkpoints, and what each rank answered."""
    directory = tmp_path_factory.mktemp("ranks")
    variants = VARIANTS[request.param]
    for variant in variants:
        make_reference(variant).save_pretrained(directory / variant)
    return directory, run_ranks(request.param, directory, run_rank, directory, variants)


def test_collectives(world: tuple[Path, list[dict]]) -> None:
    _, results = world
    parts = [tensors(rank) for rank in range(len(results))]
    for result in results:
        torch.testing.assert_close(result["sum"], torch.stack(parts).sum(0))
        assert torch.equal(result["sum"], results[0]["sum"])
        assert torch.equal(result["sum of a row"], result["sum"][3:4])
        assert torch.equal(result["gathered"], torch.cat([part[:, :2] for part in parts], dim=1))
        assert torch.equal(result["broadcast"], parts[0])
        assert result["ids"].tolist() == [0, 7]


def test_models_equal_those_of_one_rank(world: tuple[Path, list[dict]]) -> None:
    directory, results = world
    expected = run_models(SingleCommunicator(), directory, list(results[0]["models"]))
    for result in results:
        for variant, (expected_logits, expected_ids) in expected.items():
            logits, ids = result["models"][variant]
            torch.testing.assert_close(logits, expected_logits, rtol=1e-4, atol=1e-4)
            assert ids == expected_ids


def run_single_tokens(comm: Communicator, path: Path) -> tuple[torch.Tensor, list[int]]:
    """The logits of one token alone, and 5 greedy ids after it."""
    config = ModelConfig.from_path(path)
    model = build.build_model(config, dtype=torch.float32, device=torch.device("cpu"), path=path, comm=comm)
    return Driver(model).step({0: [77]}, every_token=True), Driver(model).greedy({0: [77]}, steps=5)[0]


def run_gpu_path(comm: Communicator, path: Path) -> tuple[torch.Tensor, list[int]]:
    """The same by what computes on a GPU, in Triton's interpreter."""
    os.environ["TRITON_INTERPRET"] = "1"
    for name in ("make_pack", "default_experts"):
        choose = getattr(build, name)
        setattr(build, name, lambda _, *rest, choose=choose: choose(torch.device("cuda"), *rest))
    calls = []
    from minisgl.moe.triton_experts import TritonExperts

    fused = TritonExperts.fused
    TritonExperts.fused = lambda *args, **how: (calls.append(True), fused(*args, **how))[1]  # type: ignore[method-assign]
    found = run_single_tokens(comm, path)
    assert len(calls) == 6 * ModelConfig.from_path(path).num_layers
    return found


def test_a_single_token_fused_on_two_ranks(tmp_path: Path) -> None:
    """The residual stream goes into the sum over the ranks once."""
    path = tmp_path / "experts"
    make_reference("qwen3-moe").save_pretrained(path)
    logits, ids = run_single_tokens(SingleCommunicator(), path)
    for found, its_ids in run_ranks(2, tmp_path, run_gpu_path, path):
        torch.testing.assert_close(found, logits, rtol=1e-4, atol=1e-4)
        assert its_ids == ids


def test_too_many_ranks_for_the_heads() -> None:
    class Third(SingleCommunicator):
        rank, world_size = 2, 3

    config = ModelConfig.from_dict(
        {
            "architectures": ["LlamaForCausalLM"],
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 1,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "vocab_size": 50,
            "max_position_embeddings": 64,
        },
        "config.json",
    )
    with pytest.raises(ValueError, match="cannot be cut for 3 ranks"):
        build_model(config, dtype=torch.float32, device=torch.device("cpu"), comm=Third(), load="dummy")
