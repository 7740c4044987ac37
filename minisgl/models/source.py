"""Where a model comes from: ``--model`` to a local path. Imports no torch.

None                the embedded default (default_model.py)
a directory         with config.json, or with exactly one .gguf file
a .gguf file
org/name            from Hugging Face or ModelScope; what is in the local cache is used without asking the network
org/name/x.gguf     one file of a Hugging Face repository
"""

from __future__ import annotations

import contextlib
import json
import re
from pathlib import Path
from typing import Literal

from minisgl.env import cache_dir
from minisgl.utils.progress import Progress, silent

from .default_model import DEFAULT_MODEL, ModelNotAvailable, fetch

__all__ = ["ModelNotAvailable", "ModelSource", "resolve_model"]

ModelSource = Literal["huggingface", "modelscope"]

_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
_FILE_ID = re.compile(r"([\w.-]+/[\w.-]+)/(.+\.gguf)")
_TOKENIZER_FILES = ("tokenizer.model", "vocab.txt", "merges.txt")
_CONFIG_PATTERNS = ("*.json", "*.jinja", "*.tiktoken", *_TOKENIZER_FILES)
# Repositories of Mistral carry the same weights a second time under this name.
SECOND_COPY = "consolidated"


def resolve_model(
    name: str | None,
    source: ModelSource = "huggingface",
    *,
    weights: bool = True,
    progress: Progress = silent,
) -> Path:
    """The directory or .gguf file of ``name`` (None is the embedded default), downloaded where it has to be.

    Without ``weights`` (random ones will do) a model id need not have any, and none are downloaded. ``progress`` is
    told what is being fetched. Raises :class:`ModelNotAvailable` with one sentence that says what to do.
    """
    if name is None:
        return fetch(DEFAULT_MODEL, cache_dir() / "models", progress)
    path = Path(name).expanduser()
    try:
        is_directory, is_there = path.is_dir(), path.exists()
    except OSError as error:
        raise ModelNotAvailable(f"--model cannot be looked up: {error.strerror}.") from None
    if is_directory:
        return _directory(path)
    if is_there:
        if path.suffix != ".gguf":
            raise ModelNotAvailable(f"{name} is a file, but not a .gguf file; --model takes the directory it lies in.")
        return path
    if name.startswith(("/", ".", "~")):
        raise ModelNotAvailable(f"There is no file or directory {name}.")
    if match := _FILE_ID.fullmatch(name):
        if source != "huggingface":
            raise ModelNotAvailable(
                f"{name}: single files are fetched from Hugging Face only; download it and pass its path."
            )
        return _huggingface_file(match[1], match[2], progress)
    if not _ID.fullmatch(name):
        raise ModelNotAvailable(f"{name!r} is neither a local path nor a model id such as Qwen/Qwen3-0.6B.")
    fetch_id = _huggingface if source == "huggingface" else _modelscope
    return fetch_id(name, weights, progress)


def _directory(path: Path) -> Path:
    if (path / "config.json").is_file():
        return path
    files = sorted(path.glob("*.gguf"))
    if len(files) == 1:
        return files[0]
    if files:
        raise ModelNotAvailable(
            f"{path} holds several .gguf files; pass one of them: {_some([f.name for f in files])}."
        )
    raise ModelNotAvailable(f"{path} holds neither a config.json nor a .gguf file, so it is no model directory.")


def _some(names: list[str], limit: int = 8) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def _is_whole(path: Path, weights: bool) -> bool:
    """Whether a cached snapshot has what serving it takes: an interrupted download leaves some of the files."""
    if not (path / "config.json").is_file():
        return False
    if not weights:
        return True
    index = path / "model.safetensors.index.json"
    if index.is_file():
        shards = set(json.loads(index.read_text(encoding="utf-8")).get("weight_map", {}).values())
        return bool(shards) and all((path / shard).is_file() for shard in shards)
    return any(path.glob("*.safetensors"))


def _wanted(file: str, weights: bool) -> bool:
    """Whether a file of a repository is needed. Sub-directories hold other formats, except for more chat templates."""
    folder, _, base = file.rpartition("/")
    if folder:
        return folder == "additional_chat_templates"
    if base.endswith(".safetensors"):
        return weights and not base.startswith(SECOND_COPY)
    return base.endswith((".json", ".jinja", ".tiktoken")) or base in _TOKENIZER_FILES


def _choose(name: str, files: list[str], weights: bool) -> list[str]:
    """The files to download, or the error that tells why this repository cannot be served."""
    wanted = [file for file in files if _wanted(file, weights)]
    if "config.json" in wanted and (not weights or any(f.endswith(".safetensors") for f in wanted)):
        return wanted
    if ggufs := [f for f in files if f.endswith(".gguf")]:
        raise ModelNotAvailable(
            f"{name} holds .gguf files only; choose one and pass it as --model {name}/FILE, where FILE is one of "
            f"{_some(ggufs)}."
        )
    missing = "safetensors weights" if "config.json" in wanted else "config.json"
    raise ModelNotAvailable(f"{name} has no {missing}, so it cannot be served; look for a converted copy of the model.")


def _huggingface(name: str, weights: bool, progress: Progress) -> Path:
    from huggingface_hub import HfApi, snapshot_download, try_to_load_from_cache

    try:
        # Not by snapshot_download: for that a snapshot is whole only with all the files we never wanted.
        cached = try_to_load_from_cache(name, "config.json")
        if isinstance(cached, str) and _is_whole(Path(cached).parent, weights):
            return Path(cached).parent
        wanted = _choose(name, HfApi().list_repo_files(name), weights)
        progress(f"fetching {name} from Hugging Face", None)
        return Path(snapshot_download(name, allow_patterns=wanted))
    except ModelNotAvailable:
        raise
    except Exception as error:
        raise _hub_error(name, error) from error


def _huggingface_file(repository: str, file: str, progress: Progress) -> Path:
    from huggingface_hub import hf_hub_download, try_to_load_from_cache

    cached = try_to_load_from_cache(repository, file)
    if isinstance(cached, str):
        return Path(cached)
    try:
        progress(f"fetching {file} of {repository} from Hugging Face", None)
        return Path(hf_hub_download(repository, file))
    except Exception as error:
        raise _hub_error(repository, error, file) from error


def _hub_error(repository: str, error: Exception, file: str = "") -> ModelNotAvailable:
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    name = f"{repository}/{file}" if file else repository
    if isinstance(error, GatedRepoError):
        return ModelNotAvailable(
            f"{name} is gated: accept its terms on its Hugging Face page, log in with `hf auth login` and start again."
        )
    if isinstance(error, RepositoryNotFoundError):
        return ModelNotAvailable(
            f"There is neither a local path nor a Hugging Face model called {name}; for a private one log in with "
            "`hf auth login`."
        )
    if isinstance(error, EntryNotFoundError) and not isinstance(error, LocalEntryNotFoundError):
        return ModelNotAvailable(f"The repository has no such file: {name}.")
    command = f"hf download {repository} {file}".rstrip()
    return ModelNotAvailable(
        f"{name} is neither a local path nor in the local cache, and Hugging Face could not be asked "
        f"({type(error).__name__}); run `{command}` where there is a network, or pass a local path."
    )


def _modelscope(name: str, weights: bool, progress: Progress) -> Path:
    try:
        from modelscope import snapshot_download
    except ImportError:
        raise ModelNotAvailable(
            "--model-source modelscope takes the modelscope package; install it with `pip install modelscope`."
        ) from None

    patterns = [*_CONFIG_PATTERNS, *(["*.safetensors"] if weights else [])]
    with contextlib.suppress(Exception):  # there is no one type for "not in the cache"; asking the network tells more
        path = Path(snapshot_download(name, local_files_only=True))
        if _is_whole(path, weights):
            return path
    try:
        progress(f"fetching {name} from ModelScope", None)
        path = Path(snapshot_download(name, allow_patterns=patterns, ignore_patterns=[SECOND_COPY + "*"]))
    except Exception as error:
        raise ModelNotAvailable(
            f"{name} is neither a local path nor in the local cache, and ModelScope did not deliver it "
            f"({type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'})."
        ) from error
    if not _is_whole(path, weights):
        raise ModelNotAvailable(
            f"{name} on ModelScope has no config.json with safetensors weights, so it cannot be served."
        )
    return path
