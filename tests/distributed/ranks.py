"""Runs a function in several processes, one for each rank of a communicator, and returns what each returned."""

from __future__ import annotations

import multiprocessing
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

DEADLINE = 120.0


def run_ranks(world_size: int, directory: Path, function: Callable[..., Any], *args: Any) -> list[Any]:
    """``function(comm, *args)`` must be at the top of a module. An exception in a rank fails the caller."""
    context = multiprocessing.get_context("spawn")
    paths = [directory / f"result-{rank}" for rank in range(world_size)]
    workers = [
        context.Process(
            target=_rank, args=(rank, world_size, directory / "rendezvous", paths[rank], function, args), daemon=True
        )
        for rank in range(world_size)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(DEADLINE)
    stuck = [worker for worker in workers if worker.is_alive()]
    for worker in stuck:
        worker.kill()
        worker.join()
    assert not stuck, f"{len(stuck)} of {world_size} ranks did not finish"
    assert [worker.exitcode for worker in workers] == [0] * world_size
    return [pickle.loads(path.read_bytes()) for path in paths]


def _rank(
    rank: int, world_size: int, rendezvous: Path, result: Path, function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    import torch

    from minisgl.distributed.torch_communicator import make_communicator

    torch.set_num_threads(1)
    comm = make_communicator(rank, world_size, torch.device("cpu"), rendezvous, timeout=60)
    value = function(comm, *args)
    result.write_bytes(pickle.dumps(value))
    comm.close()
