"""How the scheduler behaves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """``token_budget`` bounds the new tokens of a step (None: what the engine allows; never more than that).

    ``cache`` names the prefix cache. With ``overlap`` the next step is launched before the results of the one under way
    are read; outputs are the same without. ``seed`` seeds the requests that bring no seed of their own.
    ``max_queue`` bounds the requests that wait beyond the free rows (None: no bound); one more is refused with 503.
    """

    token_budget: int | None = None
    cache: Literal["radix", "naive"] = "radix"
    overlap: bool = True
    seed: int = 0
    max_queue: int | None = None

    def __post_init__(self) -> None:
        if self.token_budget is not None and self.token_budget < 1:
            raise ValueError(f"token_budget must be at least 1, not {self.token_budget}.")
        if self.max_queue is not None and self.max_queue < 0:
            raise ValueError(f"max_queue must be at least 0, not {self.max_queue}.")
