"""What the layers ask of a checkpoint, rank by rank."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from minisgl.distributed.communicator import SingleCommunicator
from minisgl.distributed.sharding import HeadShards, Shard
from minisgl.kernel.ops import Ops
from minisgl.kernel.weight import PlainWeight
from minisgl.layers.context import BuildContext
from minisgl.layers.embedding import Embedding, TiedHead
from minisgl.layers.linear import ColumnLinear, QKVLinear, RowLinear
from minisgl.layers.loading import LoadPlan

Checkpoint = dict[str, torch.Tensor]


class FakeRank(SingleCommunicator):
    """Its collectives do nothing, so a test sees what one rank contributes."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size


def context(rank: int = 0, world_size: int = 1) -> BuildContext:
    return BuildContext(
        dtype=torch.float32,
        device=torch.device("cpu"),
        comm=FakeRank(rank, world_size),
        ops=Ops(),
        pack=PlainWeight,
        moe_backend="torch",
        max_positions=64,
    )


def load(module: nn.Module, checkpoint: Checkpoint) -> None:
    root = nn.Module()
    root.block = nn.Module()
    root.block.layer = module
    targets = {name.removeprefix("block."): target for name, target in LoadPlan.of(root).targets.items()}
    assert targets.keys() == checkpoint.keys()
    for name, target in targets.items():
        assert target.shape == tuple(checkpoint[name].shape)
        target.dest.copy_(checkpoint[name][target.index])
    module.finalize()


def test_merged_columns_of_two_ranks() -> None:
    checkpoint = {"gate_proj.weight": torch.randn(7, 6), "up_proj.weight": torch.randn(7, 6)}
    checkpoint |= {"gate_proj.bias": torch.randn(7), "up_proj.bias": torch.randn(7)}
    x = torch.randn(3, 6)
    gates, ups = [], []
    for rank in range(2):
        layer = ColumnLinear(6, {"gate_proj": 7, "up_proj": 7}, True, context(rank, 2))
        load(layer, checkpoint)
        gate, up = layer(x).chunk(2, dim=1)
        gates.append(gate)
        ups.append(up)
    torch.testing.assert_close(torch.cat(gates, 1), x @ checkpoint["gate_proj.weight"].T + checkpoint["gate_proj.bias"])
    torch.testing.assert_close(torch.cat(ups, 1), x @ checkpoint["up_proj.weight"].T + checkpoint["up_proj.bias"])


def test_qkv_of_replicated_heads() -> None:
    """4 query heads of 2 dims, 2 KV heads, 4 ranks: ranks 2 and 3 hold KV head 1."""
    checkpoint = {
        "q_proj.weight": torch.randn(8, 5),
        "k_proj.weight": torch.randn(4, 5),
        "v_proj.weight": torch.randn(4, 5),
    }
    layer = QKVLinear(5, HeadShards.of(4, 2, 3, 4), 2, False, context(3, 4))
    load(layer, checkpoint)
    x = torch.randn(2, 5)
    rows = [checkpoint["q_proj.weight"][6:8], checkpoint["k_proj.weight"][2:4], checkpoint["v_proj.weight"][2:4]]
    torch.testing.assert_close(layer(x), x @ torch.cat(rows).T)


def test_row_parallel_adds_the_bias_once() -> None:
    weight, bias, x = torch.randn(4, 9), torch.randn(4), torch.randn(3, 9)
    total = torch.zeros(3, 4)
    for rank in range(2):
        shard = Shard.of(9, rank, 2)
        layer = RowLinear(shard, 4, True, context(rank, 2))
        load(layer, {"layer.weight": weight, "layer.bias": bias})
        total += layer(x[:, shard.slice])
    torch.testing.assert_close(total, x @ weight.T + bias)


def test_vocabulary_over_three_ranks() -> None:
    weight, ids = torch.randn(10, 6), torch.tensor([0, 9, 4, 3, 8], dtype=torch.int32)
    hidden = torch.randn(2, 6)
    total, logits = torch.zeros(5, 6), []
    for rank in range(3):
        layer = Embedding(10, 6, context(rank, 3))
        load(layer, {"layer.weight": weight})
        total += layer(ids)
        logits.append(layer.product.matmul(hidden))
    assert torch.equal(total, weight[ids])
    torch.testing.assert_close(torch.cat(logits, 1), torch.cat((hidden @ weight.T, torch.zeros(2, 2)), 1))


def test_a_tied_head_stores_nothing() -> None:
    embedding = Embedding(10, 6, context())
    model = nn.Module()
    model.embed_tokens, model.lm_head = embedding, TiedHead(embedding)
    assert list(LoadPlan.of(model).targets) == ["embed_tokens.weight"]


@pytest.mark.parametrize("rank", [0, 1])
def test_storage_is_taken_late_and_given_away(rank: int) -> None:
    layer = ColumnLinear(6, {"gate_proj": 8}, False, context(rank, 2))
    assert layer.weight._tensor is None
    load(layer, {"gate_proj.weight": torch.randn(8, 6)})
    assert layer.weight._tensor is None
    assert layer.product.matrix.shape == (4, 6)
