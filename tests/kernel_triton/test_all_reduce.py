"""One rank at a time: what the others would have written is there before it runs. On GPUs: tests/distributed."""

from __future__ import annotations

import pytest
import torch
from helpers_triton import dtypes

from minisgl.kernel.triton.all_reduce import PROGRAMS, all_reduce, memory_bytes

INBOX = 1 << 20  # bytes


class Ranks:
    """The memories of all ranks, in one process."""

    def __init__(self, world_size: int, device: torch.device) -> None:
        size = memory_bytes(world_size, INBOX)
        self.world_size = world_size
        self.memories = [torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(world_size)]
        self.peers = torch.tensor([m.data_ptr() for m in self.memories], device=device)
        self.turns = torch.zeros(world_size, PROGRAMS, dtype=torch.int32, device=device)
        self.abort = torch.zeros(1, dtype=torch.int32, device=device)

    def inbox(self, rank: int, source: int, turn: int) -> torch.Tensor:
        """(words, 2) int32: data and turn."""
        start = ((turn & 1) * self.world_size + source) * 2 * INBOX
        return self.memories[rank][start : start + 2 * INBOX].view(torch.int32).view(-1, 2)

    def send(self, rank: int, source: int, turn: int, x: torch.Tensor) -> None:
        words = x.flatten().view(torch.int32)
        inbox = self.inbox(rank, source, turn)[: len(words)]
        inbox[:, 0], inbox[:, 1] = words, turn

    def run(self, rank: int, x: torch.Tensor) -> torch.Tensor:
        return all_reduce(x, self.peers, self.turns[rank], self.abort, rank, INBOX)


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("shape", [(1, 5120), (3, 1000), (14, 5120), (1, 2)], ids=str)
def test_sums_in_rank_order(world_size: int, shape: tuple[int, int], device: torch.device, on_gpu: bool) -> None:
    ranks = Ranks(world_size, device)
    for turn, dtype in enumerate(2 * dtypes(on_gpu), 1):
        parts = [torch.randn(shape, device=device).to(dtype) for _ in range(world_size)]
        expected = torch.zeros(shape, device=device)
        for part in parts:
            expected += part.float()
        for rank in range(world_size):
            for source in range(world_size):
                if source != rank:
                    ranks.send(rank, source, turn, parts[source])
            out = ranks.run(rank, parts[rank].clone())
            assert torch.equal(out, expected.to(dtype))
            # And it has told the others, in the inbox of this turn.
            words = parts[rank].flatten().view(torch.int32)
            for peer in range(world_size):
                if peer != rank:
                    inbox = ranks.inbox(peer, rank, turn)[: len(words)]
                    assert torch.equal(inbox[:, 0], words)
                    assert (inbox[:, 1] == turn).all()


def test_every_program_counts_every_turn(device: torch.device) -> None:
    """So a large tensor after a small one finds all ranks in the same turn, in the same set of inboxes."""
    ranks = Ranks(2, device)
    for turn, size in enumerate((8, 130_000, 8, 130_000), 1):
        x = torch.randn(size, device=device)
        ranks.send(0, 1, turn, x)
        assert torch.equal(ranks.run(0, x.clone()), x + x)
        assert (ranks.turns[0] == turn).all()


def test_nothing_is_waited_for_once_aborted(device: torch.device) -> None:
    ranks = Ranks(2, device)
    ranks.abort.fill_(1)
    ranks.run(0, torch.ones(16, device=device))  # the other rank never comes
    assert (ranks.turns[0] == 1).all()
