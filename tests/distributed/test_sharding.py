from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minisgl.distributed.sharding import HeadShards, Shard


@given(total=st.integers(0, 300), world_size=st.integers(1, 16))
def test_shards_cover_a_dimension_once(total: int, world_size: int) -> None:
    shards = [Shard.of(total, rank, world_size) for rank in range(world_size)]
    assert [i for shard in shards for i in range(total)[shard.slice]] == list(range(total))
    sizes = {shard.size for shard in shards}
    assert max(sizes) - min(sizes) <= 1


@given(num_kv_heads=st.integers(1, 12), group=st.integers(1, 8), data=st.data())
def test_heads_go_where_their_group_is(num_kv_heads: int, group: int, data: st.DataObject) -> None:
    fewer = st.integers(1, num_kv_heads)
    more = st.integers(1, group).map(lambda sharing: sharing * num_kv_heads)
    world_size = data.draw(st.one_of(fewer, more))
    num_heads = num_kv_heads * group
    ranks = [HeadShards.of(num_heads, num_kv_heads, rank, world_size) for rank in range(world_size)]
    assert [h for rank in ranks for h in range(num_heads)[rank.query.slice]] == list(range(num_heads))
    assert sorted({h for rank in ranks for h in range(num_kv_heads)[rank.kv.slice]}) == list(range(num_kv_heads))
    for rank in ranks:
        assert rank.query.size % rank.kv.size == 0
        local_group = rank.query.size // rank.kv.size
        for local, head in enumerate(range(num_heads)[rank.query.slice]):
            assert head // group == rank.kv.start + local // local_group


@pytest.mark.parametrize(("heads", "kv_heads", "world_size"), [(9, 3, 4), (4, 2, 8), (6, 2, 3)])
def test_heads_that_cannot_be_cut(heads: int, kv_heads: int, world_size: int) -> None:
    with pytest.raises(ValueError, match="possible are 1, 2"):
        HeadShards.of(heads, kv_heads, 0, world_size)
