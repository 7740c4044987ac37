from __future__ import annotations

import multiprocessing
from collections.abc import Callable
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

    def __init__(self, device: torch.device, size: int) -> None:
        self.open = True

    def offer(self) -> bytes:
        return b"here"

    def take(self, offers: list[bytes], rank: int) -> None:
        assert offers == [b"here", b"here"]
        if rank == 1:
            raise RuntimeError("no way from here")

    def close(self) -> None:
        self.open = False

    def free(self) -> None:
        assert not self.open


def no_shared_memory(comm: Communicator) -> list[str]:
    """What becomes of the memory that GPUs share where there is none, as on CPUs, and where one rank cannot open it."""
    import torch.distributed as dist

    from minisgl.distributed import one_shot

    said: list[str] = []
    at_end: list[Callable[[], None]] = []
    one_shot.logger.warning = lambda text, reason: said.append(reason)  # type: ignore[method-assign]
    assert one_shot.make_one_shot(dist.group.WORLD, comm.device, at_end.append) is None
    one_shot.PeerMemory = HalfMemory  # type: ignore[misc, assignment]
    one_shot.OneShot = lambda *_: None  # type: ignore[misc, assignment]
    assert one_shot.make_one_shot(dist.group.WORLD, comm.device, at_end.append) is None
    # Rank 0 has opened it all and cannot use it.
    one_shot.OneShot = None  # type: ignore[misc, assignment]
    HalfMemory.take = lambda *_: None  # type: ignore[method-assign, assignment]
    assert one_shot.make_one_shot(dist.group.WORLD, comm.device, at_end.append) is None
    # The others are gone.
    one_shot.dist.all_gather_object = lambda *_: (_ for _ in ()).throw(RuntimeError("gone"))  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="gone"):
        one_shot.make_one_shot(dist.group.WORLD, comm.device, at_end.append)
    assert len(at_end) == 4
    for free in at_end:
        free()
    return said


def test_ranks_that_share_no_memory_agree_on_it(tmp_path: Path) -> None:
    said, by_the_other = run_ranks(2, tmp_path, no_shared_memory)
    assert by_the_other == []  # one rank speaks for all
    assert "rank 0: " in said[0]
    assert "rank 1: " in said[0]
    assert said[1] == "rank 1: no way from here"
    assert "not callable" in said[2]
    assert len(said) == 3


def second_rank(rendezvous: Path) -> None:
    comm = make_communicator(1, 2, torch.device("cpu"), rendezvous, timeout=60)
    comm.all_reduce(torch.full((3,), 2.0))
    comm.close()


def test_several_ranks_need_a_rendezvous() -> None:
    with pytest.raises(ValueError, match="rendezvous"):
        make_communicator(0, 2, torch.device("cpu"))
