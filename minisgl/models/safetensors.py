"""Checkpoints in safetensors files, one or several shards."""

from __future__ import annotations

import json
from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from .source import SECOND_COPY
from .weights import WeightError

INDEX = "model.safetensors.index.json"
DTYPE_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
"""The dtypes of unquantised checkpoints, and the bytes of one element."""


class _OpenFiles:
    """The files in use: what was read of a mapped file counts as resident memory until it is closed.

    So a file is closed when the last of its tensors has been read. Some are read by nobody; then the next file but one
    closes it.
    """

    def __init__(self) -> None:
        self._files: OrderedDict[Path, Any] = OrderedDict()
        self._unread: Counter[Path] = Counter()
        self._lock = Lock()

    def expect(self, path: Path) -> None:
        """One tensor more of the file."""
        self._unread[path] += 1

    def get(self, path: Path) -> Any:
        with self._lock:
            if path not in self._files:
                self._files[path] = _open(path)
                if len(self._files) > 2:
                    self._files.popitem(last=False)
            return self._files[path]

    def done(self, path: Path) -> None:
        """One tensor less of it to read."""
        with self._lock:
            self._unread[path] -= 1
            if not self._unread[path]:
                self._files.pop(path, None)


@dataclass(frozen=True, slots=True)
class SafeTensor:
    """A StoredTensor. A slice of it reads only that part of the file."""

    name: str
    shape: tuple[int, ...]
    nbytes: int
    path: Path
    files: _OpenFiles = field(repr=False)

    def read_into(self, dest: torch.Tensor, index: tuple[slice, ...]) -> None:
        dest.copy_(self.files.get(self.path).get_slice(self.name)[index])
        self.files.done(self.path)


def safetensors_in(directory: Path) -> list[SafeTensor]:
    """All tensors of the checkpoint in ``directory``, shard after shard.

    Raises :class:`WeightError` where a file is missing or damaged, two have a tensor of the same name, or a tensor has
    another dtype than float32, float16 or bfloat16.
    """
    files = _OpenFiles()
    tensors: dict[str, SafeTensor] = {}
    for path in _shards(directory):
        file = _open(path)
        for name in file.keys():  # noqa: SIM118 (safe_open is no mapping)
            part = file.get_slice(name)
            shape, dtype = tuple(part.get_shape()), part.get_dtype()
            if dtype not in DTYPE_BYTES:
                raise WeightError(
                    f"{path}: {name} is {dtype}; supported are safetensors in {', '.join(DTYPE_BYTES)}, and GGUF files."
                )
            if name in tensors:
                raise WeightError(
                    f"{tensors[name].path.name} and {path.name} in {directory} both have {name}; "
                    "keep the files of one checkpoint there."
                )
            files.expect(path)
            tensors[name] = SafeTensor(name, shape, prod(shape) * DTYPE_BYTES[dtype], path, files)
    return list(tensors.values())


def _shards(directory: Path) -> list[Path]:
    index = directory / INDEX
    if index.exists():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
            paths = [directory / name for name in names]
        except (ValueError, LookupError, TypeError, AttributeError, OSError) as error:
            raise WeightError(f"{index} is damaged ({error}); download it again.") from None
        missing = [path.name for path in paths if not path.is_file()]
        if missing:
            raise WeightError(f"The checkpoint in {directory} lacks {', '.join(missing)}; download it again.")
        whole = directory / "model.safetensors"
        if whole.is_file() and whole not in paths:
            raise WeightError(f"{index} does not know {whole.name} beside it; keep the files of one checkpoint there.")
        return paths
    paths = [path for path in sorted(directory.glob("[!.]*.safetensors")) if path.is_file()]
    paths = [path for path in paths if not path.name.startswith(SECOND_COPY)] or paths
    if not paths:
        raise WeightError(
            f"There are no weights in {directory}; supported are *.safetensors and .gguf files "
            "(--load-format dummy needs none)."
        )
    return paths


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except SafetensorError as error:
        raise WeightError(f"{path} is damaged or incomplete ({error}); download it again.") from None
