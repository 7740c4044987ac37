"""What several packages share: a fixture, and the rule that tests of a GPU are skipped where there is none."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from minisgl.models.source import ModelNotAvailable, resolve_model


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not on_gpu:
        return
    # Only now: tests of the control plane alone do without torch.
    import torch

    if not torch.cuda.is_available():
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="session", autouse=True)
def ctrl_c() -> None:
    """Works in tests, also where they run in the background of a script, which ignores it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def default_model() -> Path:
    """The embedded default model, from the model cache or downloaded into it. Mark users with ``model``."""
    try:
        return resolve_model(None)
    except ModelNotAvailable as error:
        pytest.fail(str(error))
