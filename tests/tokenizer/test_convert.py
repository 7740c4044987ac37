from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import gguf
import pytest
from test_gguf_vocab import tiny_byte_level
from tiny_tokenizers import byte_level

from minisgl.tokenizer import TokenizerError, convert, generation_defaults, load_tokenizer


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "cache"
    monkeypatch.setenv("MINISGL_CACHE_DIR", str(path))
    return path / "tokenizers"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model.gguf"
    write_gguf(path, "hi")
    return path


def write_gguf(path: Path, template: str) -> None:
    writer = gguf.GGUFWriter(str(path), "llama")
    for key, value in tiny_byte_level("smollm").items():
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        else:
            writer.add_string(key, value)
    writer.add_uint32("tokenizer.ggml.eot_token_id", 3)
    writer.add_float32("general.sampling.temp", 0.5)
    writer.add_chat_template(template)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_gguf_file_is_converted_once(model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = load_tokenizer(model)
    (entry,) = cache.iterdir()
    assert {f.name for f in entry.iterdir()} == {"tokenizer.json", "tokenizer_config.json", "generation_config.json"}
    assert tokenizer.render_chat([{"role": "user", "content": ""}]) == "hi"
    assert tokenizer.end_token_ids == {1, 3}
    assert tokenizer.encode("Hello 42") == byte_level().encode("Hello 42").ids
    assert generation_defaults(model) == {"temperature": 0.5}

    monkeypatch.setattr(convert, "read_gguf", lambda *args, **kwargs: pytest.fail("converted again"))
    assert load_tokenizer(model).encode("Hello 42") == tokenizer.encode("Hello 42")


def test_a_file_that_has_changed_is_converted_anew_and_the_old_entry_goes(model: Path, cache: Path) -> None:
    load_tokenizer(model)
    (before,) = cache.iterdir()
    write_gguf(model, "changed")
    assert load_tokenizer(model).render_chat([{"role": "user", "content": ""}]) == "changed"
    (after,) = cache.iterdir()
    assert after != before
    os.utime(model, ns=(1, 1))
    load_tokenizer(model)
    (later,) = cache.iterdir()
    assert later != after


def test_a_failed_conversion_leaves_nothing_behind(tmp_path: Path, cache: Path) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(b"GGUFxxxx")
    with pytest.raises(TokenizerError, match="bad"):
        load_tokenizer(path)
    assert list(cache.iterdir()) == []


def test_starts_at_the_same_time_agree(model: Path, cache: Path) -> None:
    code = (
        f"from pathlib import Path; from minisgl.tokenizer import load_tokenizer; load_tokenizer(Path({str(model)!r}))"
    )
    processes = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(3)]
    assert [process.wait() for process in processes] == [0, 0, 0]
    assert len(list(cache.iterdir())) == 1


def test_a_cache_that_cannot_be_written_is_told(model: Path, cache: Path) -> None:
    cache.parent.mkdir()
    cache.write_text("in the way")
    with pytest.raises(TokenizerError, match="set MINISGL_CACHE_DIR"):
        load_tokenizer(model)


def save_slow(path: Path) -> Path:
    """A GPT-2 style directory from before tokenizer.json: vocab.json and merges.txt."""
    path.mkdir()
    model = json.loads(byte_level().to_str())["model"]
    (path / "vocab.json").write_text(json.dumps(model["vocab"]))
    (path / "merges.txt").write_text("#version: 0.2\n" + "\n".join(" ".join(m) for m in model["merges"]) + "\n")
    config = {"tokenizer_class": "GPT2Tokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "</s>"}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    (path / "config.json").write_text(json.dumps({"model_type": "gpt2", "eos_token_id": 3}))
    return path


def test_an_older_form_is_converted_by_transformers_once(tmp_path: Path, cache: Path) -> None:
    pytest.importorskip("transformers")
    path = save_slow(tmp_path / "slow")
    tokenizer = load_tokenizer(path)
    assert tokenizer.encode("Hello world") == byte_level().encode("Hello world").ids
    assert tokenizer.end_token_ids == {1, 3}
    (entry,) = cache.iterdir()
    stamp = (entry / "tokenizer.json").stat().st_mtime_ns
    load_tokenizer(path)
    assert (entry / "tokenizer.json").stat().st_mtime_ns == stamp


@pytest.mark.parametrize(
    ("transformers", "message"),
    [
        ("raise ModuleNotFoundError(\"No module named 'transformers'\")", "pip install transformers sentencepiece"),
        ("raise ValueError('no such form')", r"cannot convert what it has \(ValueError: no such form\)"),
    ],
)
def test_an_older_form_that_cannot_be_converted_says_what_to_do(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, transformers: str, message: str
) -> None:
    package = tmp_path / "packages" / "transformers"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(transformers)
    monkeypatch.setenv("PYTHONPATH", str(package.parent))
    with pytest.raises(TokenizerError, match=message):
        load_tokenizer(save_slow(tmp_path / "slow"))
    assert list(cache.iterdir()) == []
