from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from minisgl.engine.config import EngineConfig


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"dtype": "int8"}, "dtype must be one of auto, float32"),
        ({"device": "tpu"}, "device must be one of auto, cpu, cuda"),
        ({"load_format": "pickle"}, "load_format"),
        ({"tp_rank": 2, "tp_size": 2, "rendezvous": Path("x")}, r"tp_rank must be in 0 \.\. 1, not 2"),
        ({"tp_size": 2}, "rendezvous must be set"),
        ({"page_size": 0}, "page_size"),
        ({"memory_ratio": 1.0}, "memory_ratio"),
        ({"memory_ratio": float("nan")}, "memory_ratio"),
        ({"num_pages": 0}, "num_pages must be at least 1"),
        ({"max_running_req": 0}, "max_running_req"),
        ({"token_budget": 0}, "token_budget"),
        ({"cuda_graph_max_bs": -1}, "cuda_graph_max_bs"),
    ],
)
def test_wrong_values_are_named(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        EngineConfig(model_path=Path("model"), **wrong)


def test_the_configuration_imports_no_torch() -> None:
    code = "import sys, minisgl.engine.config, minisgl.engine.memory; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
