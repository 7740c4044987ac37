"""The examples run as they stand, and say what they promise."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"

pytestmark = [pytest.mark.model, pytest.mark.process]


def run(name: str) -> str:
    result = subprocess.run([sys.executable, EXAMPLES / name], capture_output=True, text=True, timeout=200)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_chat_asks_once_whole_once_streamed_and_eight_at_once(default_model: Path) -> None:
    out = run("chat.py")
    whole = re.search(r"^in one piece: (.+)$", out, re.MULTILINE)
    assert whole
    assert "Paris" in whole[1]
    streamed = re.search(r"^streamed: +(.+)$", out, re.MULTILINE)
    assert streamed
    assert len(streamed[1]) > 10
    ratio = re.search(r"eight at once: [\d.]+ s, ([\d.]+) times as long", out)
    assert ratio
    assert float(ratio[1]) < 8  # batching must help; how much is measured elsewhere


def test_offline_completes_prompts_and_chats(default_model: Path) -> None:
    out = run("offline.py")
    assert re.search(r"capital of France is' -> ' Paris", out)
    assert re.search(r"chat: \S+", out)
