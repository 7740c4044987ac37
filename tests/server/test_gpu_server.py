"""A server on two GPUs."""

from __future__ import annotations

import concurrent.futures
import json
import time
from pathlib import Path

import httpx
import pytest
import torch
from server_process import ServerProcess, until
from tiny_models import BARE_CONFIG

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.process,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]


def stream(url: str, started: list[float]) -> list[str]:
    body = {"prompt": "hello", "max_tokens": 8000, "stream": True, "ignore_eos": True}
    lines = []
    with httpx.stream("POST", url + "/v1/completions", json=body, timeout=30) as response:
        for line in response.iter_lines():
            started.append(time.monotonic())
            lines.append(line)
    return [line for line in lines if line]


@pytest.mark.parametrize("name", ["scheduler 0", "scheduler 1"])
def test_the_death_of_a_rank_is_an_error_for_all(tmp_path: Path, name: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(BARE_CONFIG))
    flags = ["--model", str(tmp_path), "--load-format", "dummy", "--port", "0", "--tp", "2", "--cuda-graph-max-bs", "4"]
    with (
        ServerProcess(*flags, command=("-m", "minisgl"), tmp=tmp_path).wait_ready() as server,
        concurrent.futures.ThreadPoolExecutor() as pool,
    ):
        started: list[float] = []
        streamed = pool.submit(stream, server.url, started)
        until(lambda: len(started) > 3)
        server.worker(name).kill()
        until(lambda: server.health().status_code == 503, 2)
        text = f"The {name} process has died (killed by SIGKILL)."
        assert json.loads(streamed.result()[-1].removeprefix("data: "))["error"]["message"] == text
        assert server.ask().status_code == 503
        server.terminate()
        # The other rank still waits on its GPU for what never comes.
        assert server.wait() == 1
