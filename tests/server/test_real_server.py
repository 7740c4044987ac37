"""The command as users run it, with the real default model."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import openai
import pytest
from server_process import ROOT, ServerProcess

pytestmark = [pytest.mark.process, pytest.mark.model]

MODEL = "SmolLM2-135M-Instruct"
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


def answer(server: ServerProcess) -> str:
    client = openai.OpenAI(base_url=server.url + "/v1", api_key="-")
    whole = client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=0, max_tokens=24)
    text = whole.choices[0].message.content
    assert whole.choices[0].finish_reason == "stop"
    stream = client.chat.completions.create(
        model=MODEL,
        messages=QUESTION,
        temperature=0,
        max_tokens=24,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == text
    usage = chunks[-1].usage
    assert usage.prompt_tokens == whole.usage.prompt_tokens
    assert usage.completion_tokens == whole.usage.completion_tokens
    # The same prompt again comes from the cache, all but what must be computed anew.
    assert usage.prompt_tokens_details.cached_tokens >= usage.prompt_tokens - 16
    return text


@pytest.mark.usefixtures("default_model")
def test_default_model(tmp_path: Path) -> None:
    with ServerProcess("--port", "0", command=("-m", "minisgl"), tmp=tmp_path).wait_ready() as server:
        text = answer(server)
        assert "Paris" in text
        server.interrupt()
        assert server.wait() == 0
        assert "Traceback" not in server.stderr
    with ServerProcess("--port", "0", "--tp", "2", command=("-m", "minisgl"), tmp=tmp_path).wait_ready() as server:
        assert answer(server) == text
        server.terminate()
        assert server.wait() == 0
        assert "Traceback" not in server.stderr


@pytest.mark.usefixtures("default_model")
def test_broken_model(tmp_path: Path) -> None:
    """A worker that cannot load says why in one sentence, and nothing is left."""
    (tmp_path / "config.json").write_text('{"architectures": ["NoSuchModel"], "vocab_size": 300}')
    result = subprocess.run(
        [sys.executable, "-m", "minisgl", "--model", str(tmp_path), "--port", "0", "--silent-output"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert result.returncode == 1
    assert result.stdout == ""
    last = result.stderr.splitlines()[-1]
    assert last.startswith("minisgl: scheduler: ")
    assert "NoSuchModel" in last
    assert "LlamaForCausalLM" in last, "it names what is supported"
    assert "Traceback" not in result.stderr
