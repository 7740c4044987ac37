"""Fixtures that several packages share."""

from __future__ import annotations

from pathlib import Path

import pytest

from minisgl.models.source import ModelNotAvailable, resolve_model


@pytest.fixture(scope="session")
def default_model() -> Path:
    """The embedded default model, from the model cache or downloaded into it. Mark users with ``model``."""
    try:
        return resolve_model(None)
    except ModelNotAvailable as error:
        pytest.fail(str(error))
