"""Tokenizers that come in another form than tokenizer.json: converted once, kept in the cache.

    <cache>/tokenizers/<hash of the path>-<hash of sizes and times>/
        tokenizer.json  tokenizer_config.json  generation_config.json (from GGUF files)

An entry is written beside its place and renamed into it, so it is whole or absent; the one of an earlier version of the
same model goes away with it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from minisgl.env import cache_dir
from minisgl.models.gguf_file import GGUFError, read_gguf

from .errors import TokenizerError
from .stand_in import write_stand_in

logger = logging.getLogger(__name__)

TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
GENERATION_CONFIG = "generation_config.json"

_FORMAT = "1"
"""To be raised when the conversion changes, so that what older versions have kept is not used."""

_SLOW_FILES = ("tokenizer.model", "vocab.json", "merges.txt", "vocab.txt", TOKENIZER_CONFIG)
# In a process of its own: transformers imports torch, which this one must not.
_CONVERT_SLOW = """
import sys
from transformers import AutoTokenizer
AutoTokenizer.from_pretrained(sys.argv[1], local_files_only=True).save_pretrained(sys.argv[2])
"""


def tokenizer_directory(path: Path) -> Path:
    """The directory with the tokenizer.json of a model (a directory or a .gguf file), converted if need be.

    Raises :class:`TokenizerError` where there is no tokenizer, or none that can be converted.
    """
    if path.suffix == ".gguf" and path.is_file():
        return _kept(path, [path], lambda target: _convert_gguf(path, target))
    if (path / TOKENIZER).is_file():
        return path
    sources = [path / name for name in _SLOW_FILES if (path / name).is_file()]
    if not any(source.name != TOKENIZER_CONFIG for source in sources):
        if (path / "config.json").is_file() and not any(path.glob("*.safetensors")):
            # A bare config.json, served with random weights: any tokenizer will do.
            logger.warning("%s has no tokenizer; bytes stand in for one.", path)
            return _kept(path, [path / "config.json"], lambda target: write_stand_in(path / "config.json", target))
        raise TokenizerError(f"{path} has no tokenizer: neither {TOKENIZER} nor an older form of it.")
    return _kept(path, sources, lambda target: _convert_slow(path, target))


def _kept(path: Path, sources: list[Path], convert: Callable[[Path], None]) -> Path:
    stamps = [(source.name, source.stat().st_size, source.stat().st_mtime_ns) for source in sources]
    key, version = _digest(str(path.resolve())), _digest(repr((_FORMAT, stamps)))
    root = cache_dir() / "tokenizers"
    entry = root / f"{key}-{version}"
    if (entry / TOKENIZER).is_file():
        return entry
    try:
        root.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f"{key}-new-", dir=root))
    except OSError as error:
        raise TokenizerError(
            f"The converted tokenizer cannot be kept in {root} ({error.strerror}); set MINISGL_CACHE_DIR to a "
            "directory that can be written."
        ) from None
    try:
        convert(scratch)
        try:
            scratch.rename(entry)
        except OSError:
            if not (entry / TOKENIZER).is_file():  # otherwise another process was faster
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    for old in root.glob(f"{key}-*"):
        if old != entry and not old.name.startswith(f"{key}-new-"):
            shutil.rmtree(old, ignore_errors=True)
    return entry


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _convert_gguf(path: Path, target: Path) -> None:
    from .gguf_vocab import convert

    try:
        metadata = read_gguf(path, arrays=True).metadata
    except GGUFError as error:
        raise TokenizerError(str(error)) from None
    converted = convert(metadata, path.name)
    converted.tokenizer.save(str(target / TOKENIZER), pretty=False)
    _write_json(target / TOKENIZER_CONFIG, converted.config)
    _write_json(target / GENERATION_CONFIG, converted.generation)


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False), encoding="utf-8")


def _convert_slow(path: Path, target: Path) -> None:
    logger.info("Converting the tokenizer of %s with transformers; this is done once.", path)
    command = [sys.executable, "-c", _CONVERT_SLOW, str(path.resolve()), str(target)]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode == 0 and (target / TOKENIZER).is_file():
        return
    lines = done.stderr.strip().splitlines()
    if "No module named 'transformers'" in done.stderr:
        raise TokenizerError(
            f"{path} has no {TOKENIZER}, and converting what it has takes transformers: "
            "install it with `pip install transformers sentencepiece`."
        )
    raise TokenizerError(
        f"{path} has no {TOKENIZER}, and transformers cannot convert what it has "
        f"({lines[-1] if lines else 'no message'}); `pip install sentencepiece tiktoken` may help."
    )
