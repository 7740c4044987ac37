from __future__ import annotations

from pathlib import Path

import pytest
import torch

from minisgl.distributed.communicator import SingleCommunicator
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


def test_several_ranks_need_a_rendezvous() -> None:
    with pytest.raises(ValueError, match="rendezvous"):
        make_communicator(0, 2, torch.device("cpu"))
