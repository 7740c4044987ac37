"""The scheduler in numbers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Stats:
    """Requests and pages of this moment; steps launched and pre-emptions since the start.

    Of pages, ``free`` hold nothing, ``cached`` are the prefix cache's, and ``held`` are the running requests' own.
    """

    running: int
    waiting: int
    free_pages: int
    cached_pages: int
    held_pages: int
    steps: int
    preemptions: int
