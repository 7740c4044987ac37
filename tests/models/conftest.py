"""Tiny checkpoints, made once, and their oracles."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from one_thread import one_thread
from tiny_models import Tiny, make_tiny

__all__ = ["one_thread", "tiny"]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Tiny]:
    made: dict[str, Tiny] = {}

    def make(variant: str) -> Tiny:
        if variant not in made:
            made[variant] = make_tiny(variant, tmp_path_factory.mktemp(variant))
        return made[variant]

    return make
