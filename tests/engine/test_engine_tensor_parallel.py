"""Two ranks over gloo, in real processes, against one."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_driver import tiny_engine, write_tiny
from serving import requests, serve, staggered

from minisgl.engine.engine import TorchEngine


def rank(model: Path, rendezvous: Path, device: str, tp_rank: int, configs: list[dict[str, Any]], answers: Any) -> None:
    changes = {"device": device, "dtype": "float32", "num_pages": 50}
    engine = tiny_engine(model, tp_rank=tp_rank, tp_size=2, rendezvous=rendezvous, **changes)
    # Every rank sees the same messages in the same steps, as the ranks of a server do.
    outputs = [serve(engine, staggered(requests(), 2), **config) for config in configs]
    answers.put((tp_rank, engine.info, outputs))
    engine.close()


def run_two_ranks(model: Path, directory: Path, configs: list[dict[str, Any]], device: str = "cpu") -> list[Any]:
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    meeting = directory / "ranks"
    processes = [context.Process(target=rank, args=(model, meeting, device, i, configs, answers)) for i in range(2)]
    for process in processes:
        process.start()
    try:
        found = sorted((answers.get(timeout=120) for _ in processes), key=lambda answer: answer[0])
    finally:
        for process in processes:
            process.join(20)
            process.kill()
    return found


@pytest.mark.process
@pytest.mark.parametrize("heads", [(6, 3), (4, 1)], ids=["uneven", "replicated"])
def test_two_ranks_answer_like_one(tmp_path: Path, heads: tuple[int, int]) -> None:
    model = write_tiny(tmp_path / "model", num_attention_heads=heads[0], num_key_value_heads=heads[1])
    single: TorchEngine = tiny_engine(model, num_pages=50)
    expected = serve(single, staggered(requests(), 2))
    first, second = run_two_ranks(model, tmp_path, [{"overlap": True}, {"overlap": False}])
    assert first[1] == second[1] == single.info
    single.close()
    # What rank 0 samples is what rank 1 goes on with, so they can never part.
    assert first[2] == second[2] == [expected, expected]


@pytest.mark.gpu
@pytest.mark.process
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_answer_like_one(tmp_path: Path) -> None:
    model = write_tiny(tmp_path / "model", num_attention_heads=4, num_key_value_heads=2)
    single: TorchEngine = tiny_engine(model, device="cuda", dtype="float32", num_pages=50)
    expected = serve(single, staggered(requests(), 2))
    first, second = run_two_ranks(model, tmp_path, [{"overlap": True}, {"overlap": False}], "cuda")
    assert first[1] == second[1] == single.info
    single.close()
    assert first[2] == second[2] == [expected, expected]
