"""How a start tells what it is at, whatever shows it."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str, float | None], None]
"""Told what is going on, and how far it is (0 to 1, None where that is not known)."""


def silent(what: str, fraction: float | None) -> None:
    """The :data:`Progress` of a start that nobody watches."""
