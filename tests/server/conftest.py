"""Fixtures of the server's tests: an API server in this process before a fake backend, and a toy model."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from api_harness import Api
from fake_backend import FakeBackend
from tokenizers import Tokenizer, decoders, models, pre_tokenizers


@pytest.fixture(autouse=True, scope="session")
def not_under_nohup() -> Iterator[None]:
    """What these tests start reacts to a hang-up, even where the tests themselves were started to outlive one."""
    before = signal.getsignal(signal.SIGHUP)
    if before is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, lambda signum, frame: None)  # a handler is not inherited, other than "ignore"
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.fixture(scope="module")
def shared_api() -> Iterator[Api]:
    backend = FakeBackend()
    api = Api(backend)
    yield api
    api.close()
    backend.close()


@pytest.fixture
def api(shared_api: Api) -> Iterator[Api]:
    """An API server that the test leaves as it was: healthy, and without a trace of any request."""
    shared_api.backend.reset()
    yield shared_api
    assert len(shared_api.frontend) == 0
    assert shared_api.frontend.unhealthy is None


@pytest.fixture
def doomed_api() -> Iterator[Api]:
    """An API server that the test may break."""
    backend = FakeBackend()
    api = Api(backend)
    yield api
    api.close()
    backend.close()


@pytest.fixture(scope="session")
def toy_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model directory without weights. A token is a byte; ids 0 to 25 are the letters a to z."""
    path = tmp_path_factory.mktemp("toy-model")
    letters = [chr(ord("a") + i) for i in range(26)]
    alphabet = letters + sorted(set(pre_tokenizers.ByteLevel.alphabet()) - set(letters))
    tokenizer = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(path / "tokenizer.json"))
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    sizes = {"vocab_size": 256, "hidden_size": 8, "intermediate_size": 8, "max_position_embeddings": 4096}
    heads = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
    (path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]} | sizes | heads))
    (path / "generation_config.json").write_text(json.dumps({"temperature": 0.5}))
    return path
