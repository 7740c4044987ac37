from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest
import torch
from ranks import run_ranks

from minisgl.distributed.communicator import Communicator, SingleCommunicator
from minisgl.distributed.torch_communicator import make_communicator


def test_one_rank_needs_no_group() -> None:
    comm = make_communicator(0, 1, torch.device("cpu"))
    assert isinstance(comm, SingleCommunicator)
    x = torch.ones(2)
    assert comm.all_reduce(x) is x
    assert comm.all_gather(x) is x
    assert comm.broadcast(x) is x


def test_a_missing_rank_is_an_error_and_no_hang(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError):
        make_communicator(0, 2, torch.device("cpu"), tmp_path / "rendezvous", timeout=0.5)


def test_a_failed_meeting_does_not_spoil_the_next_one(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError):
        make_communicator(0, 2, torch.device("cpu"), tmp_path / "first", timeout=0.5)
    other = multiprocessing.get_context("spawn").Process(target=second_rank, args=(tmp_path / "second",), daemon=True)
    other.start()
    comm = make_communicator(0, 2, torch.device("cpu"), tmp_path / "second", timeout=60)
    assert comm.all_reduce(torch.ones(3)).tolist() == [3.0, 3.0, 3.0]
    other.join(30)
    comm.close()
    assert other.exitcode == 0


class HalfMemory:
    """Memory that every rank can offer, and that rank 1 cannot open."""

    closed = False

    def __init__(self, device: torch.device, size: int) -> None:
        self.size = size

    def offer(self) -> bytes:
        return b"here"

    def take(self, offers: list[bytes], rank: int) -> None:
        assert offers == [b"here", b"here"]
        if rank == 1:
            raise RuntimeError("no way from here")

    def close(self) -> None:
        HalfMemory.closed = True


def no_shared_memory(comm: Communicator) -> tuple[bool, bool, list[str]]:
    """What becomes of the memory that GPUs share where there is none, as on CPUs, and where one rank cannot open it."""
    import torch.distributed as dist

    from minisgl.distributed import one_shot

    said: list[str] = []
    one_shot.logger.warning = lambda text, reason: said.append(reason)  # type: ignore[method-assign]
    none = one_shot.make_one_shot(dist.group.WORLD, comm.device) is None
    one_shot.PeerMemory = HalfMemory  # type: ignore[misc, assignment]
    half = one_shot.make_one_shot(dist.group.WORLD, comm.device) is None and HalfMemory.closed
    return none, half, said


def test_ranks_that_share_no_memory_agree_on_it(tmp_path: Path) -> None:
    (none, half, said), second = run_ranks(2, tmp_path, no_shared_memory)
    assert none
    assert half
    assert second == (True, True, [])  # one rank speaks for all
    assert "rank 0: " in said[0]
    assert "rank 1: " in said[0]
    assert said[1] == "rank 1: no way from here"


def second_rank(rendezvous: Path) -> None:
    comm = make_communicator(1, 2, torch.device("cpu"), rendezvous, timeout=60)
    comm.all_reduce(torch.full((3,), 2.0))
    comm.close()


def test_several_ranks_need_a_rendezvous() -> None:
    with pytest.raises(ValueError, match="rendezvous"):
        make_communicator(0, 2, torch.device("cpu"))
