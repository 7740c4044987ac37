"""How one dimension of a tensor, and the heads of attention, are cut between the ranks. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Shard:
    """The elements ``start .. start + size - 1``, this rank's part of a dimension of ``total``."""

    total: int
    start: int
    size: int

    @classmethod
    def whole(cls, total: int) -> Shard:
        return cls(total, 0, total)

    @classmethod
    def of(cls, total: int, rank: int, world_size: int) -> Shard:
        """Contiguous parts in rank order whose sizes differ by one at most."""
        start = total * rank // world_size
        return cls(total, start, total * (rank + 1) // world_size - start)

    def times(self, unit: int) -> Shard:
        """The same part where each element has become ``unit`` of them."""
        return Shard(self.total * unit, self.start * unit, self.size * unit)

    @property
    def slice(self) -> slice:
        return slice(self.start, self.start + self.size)


@dataclass(frozen=True, slots=True)
class HeadShards:
    """The query and KV heads of one rank. KV heads are cut where there are enough, else several ranks share one.

    9 query heads in 3 groups, 2 ranks      [q0 q1 q2 | k0]                       [q3 .. q8 | k1 k2]
    4 query heads in 1 group, 2 ranks       [q0 q1 | k0]                          [q2 q3 | k0]
    """

    query: Shard
    kv: Shard

    @classmethod
    def of(cls, num_heads: int, num_kv_heads: int, rank: int, world_size: int) -> HeadShards:
        """Raises ValueError where the heads cannot be cut for so many ranks."""
        group = num_heads // num_kv_heads
        if world_size <= num_kv_heads:
            kv = Shard.of(num_kv_heads, rank, world_size)
            return cls(kv.times(group), kv)
        sharing, rest = divmod(world_size, num_kv_heads)
        if rest or sharing > group:
            fit = [
                n
                for n in range(1, num_heads + 1)
                if n <= num_kv_heads or (n % num_kv_heads == 0 and n // num_kv_heads <= group)
            ]
            raise ValueError(
                f"{num_heads} heads with {num_kv_heads} KV heads cannot be cut for {world_size} ranks; "
                f"possible are {', '.join(map(str, fit))}."
            )
        head, place = divmod(rank, sharing)
        part = Shard.of(group, place, sharing)
        return cls(Shard(num_heads, head * group + part.start, part.size), Shard(num_kv_heads, head, 1))
