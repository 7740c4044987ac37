"""The offline class on two GPUs."""

from __future__ import annotations

import json
import signal
import time

import psutil
import pytest
import torch
from tiny_models import BARE_CONFIG

from minisgl import LLM, SamplingParams
from minisgl.utils.progress import Progress, silent

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.process,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

PROMPTS = [[7, 8, 9], [20] * 30, list(range(5, 60))]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("tiny")
    (path / "config.json").write_text(json.dumps(BARE_CONFIG))
    return str(path)


def make(model: str, tp: int, progress: Progress = silent) -> LLM:
    small = {"page_size": 4, "num_pages": 128, "max_running_req": 8, "max_prefill_length": 64}
    return LLM(model, load_format="dummy", tp=tp, dtype="float32", progress=progress, **small)


def follower() -> psutil.Process:
    return next(c for c in psutil.Process().children() if "spawn_main" in " ".join(c.cmdline()))


def test_two_ranks_give_the_output_of_one_again_and_again(model: str, caplog: pytest.LogCaptureFixture) -> None:
    """After a start that Ctrl-C has ended, too."""
    with make(model, 1) as one:
        expected = [r.token_ids for r in one.generate(PROMPTS, GREEDY, progress=False)]

    def interrupt(what: str, fraction: float | None) -> None:
        if what == "capturing CUDA graphs":
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        make(model, 2, interrupt)
    for _ in range(2):
        with make(model, 2) as two:
            assert [r.token_ids for r in two.generate(PROMPTS, GREEDY, progress=False)] == expected
    assert "share no memory" not in caplog.text


def test_the_death_of_a_rank_is_an_error_at_once(model: str) -> None:
    """Whatever rank 0 waits for at that moment: a sum, NCCL, a message."""
    for tokens in (1, 5, 20):
        with make(model, 2) as two:
            endless = SamplingParams(max_tokens=400, ignore_eos=True)
            stream = two.stream_chat([{"role": "user", "content": "hi"}], endless)
            for _ in range(tokens):
                next(stream)
            follower().kill()
            begin = time.monotonic()
            with pytest.raises(RuntimeError, match="Rank 1 died \\(killed by SIGKILL\\)"):
                list(stream)
            assert time.monotonic() - begin < 10
    with make(model, 2) as two:
        assert two.generate(PROMPTS[0], GREEDY).completion_tokens == 12
