"""Tokenizers for these tests: the tiny ones of every family, and that of the default model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tiny_tokenizers import FAMILIES, SaveModel

from minisgl.tokenizer import Tokenizer, load_tokenizer


@pytest.fixture
def save_model(tmp_path: Path) -> SaveModel:
    """Writes a model directory: a tokenizer.json and the given JSON files (``.jinja`` ones as they are)."""

    def save(backend: tokenizers.Tokenizer, **files: Any) -> Path:
        backend.save(str(tmp_path / "tokenizer.json"))
        for name, content in files.items():
            if isinstance(content, str):
                (tmp_path / f"{name}.jinja").write_text(content)
            else:
                (tmp_path / f"{name}.json").write_text(json.dumps(content))
        return tmp_path

    return save


@pytest.fixture(scope="session")
def families() -> dict[str, Tokenizer]:
    return {name: Tokenizer(make(), {"eos_token": "</s>"}, {}, frozenset()) for name, make in FAMILIES.items()}


@pytest.fixture(scope="session")
def byte_tokenizer(families: dict[str, Tokenizer]) -> Tokenizer:
    return families["byte_level"]


@pytest.fixture(scope="session")
def default_tokenizer(default_model: Path) -> Tokenizer:
    return load_tokenizer(default_model)


@pytest.fixture(scope="session")
def transformers_default(default_model: Path) -> Any:
    """What transformers makes of the default model's tokenizer. Takes seconds."""
    transformers = pytest.importorskip("transformers")
    return transformers.AutoTokenizer.from_pretrained(str(default_model.parent), gguf_file=default_model.name)
