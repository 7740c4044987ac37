from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from engine_driver import tiny_engine, write_tiny

from minisgl.engine.engine import TorchEngine

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before the first import of a kernel


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("engine") / "tiny")


@pytest.fixture(scope="session")
def _engine(tiny_model: Path) -> Iterator[TorchEngine]:
    engine = tiny_engine(tiny_model)
    yield engine
    engine.close()


@pytest.fixture
def engine(_engine: TorchEngine) -> TorchEngine:
    """A CPU engine that all tests share; what they leave in it must not matter."""
    return _engine
