"""What an H200 would run, compiled here: registers, shared memory, and the matrix instructions that were meant."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SHARED_MEMORY_LIMIT = 232448


def compile_cases(*names: str) -> list[dict]:
    """A process of its own: in this one kernels may be interpreted."""
    script = HERE / "compile_for_hopper.py"
    path = [str(HERE.parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path)}
    done = subprocess.run([sys.executable, script, *names], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def check(usage: dict) -> None:
    assert usage["shared"] <= SHARED_MEMORY_LIMIT, usage
    # A few words outside of the loops do no harm. Triton 3.9 spills some in a kernel that runs once a step.
    assert usage["spill_bytes"] <= (80 if usage["name"] == "_pick_kernel" else 32), usage


def test_attention() -> None:
    kernels = {usage["name"]: usage for usage in compile_cases("decode-qwen3-0.6b", "prefill-qwen3-0.6b")}
    for usage in kernels.values():
        check(usage)
    decode, prefill = kernels["_decode_kernel"], kernels["_prefill_kernel"]
    assert decode["mma"]
    assert prefill["wgmma"]
    assert not prefill["serialized"]
    # Two stages of K and V in flight in each of several programs per multiprocessor.
    assert 4 * 64 * 128 * 2 <= decode["shared"] <= SHARED_MEMORY_LIMIT // 3


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_everything() -> None:
    for usage in compile_cases():
        check(usage)
