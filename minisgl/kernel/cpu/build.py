"""Compiles the kernels once per machine kind and keeps the library in the user's cache.

The file name holds a hash of everything that goes into it (sources, flags, compiler), so an update of any of them is a
new file and nothing is ever stale. Each instruction set has a library of its own, built from the same source.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

logger = logging.getLogger(__name__)

SOURCES = Path(__file__).parent
ISA_FLAGS = {
    "avx512": ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx2", "-mfma"),
    "avx2": ("-mavx2", "-mfma"),
    "portable": (),
}
# No contraction: see simd.h. No -march=native: a cache may be shared by different machines.
FLAGS = ("-O3", "-std=c++17", "-fPIC", "-pthread", "-ffp-contract=off", "-fno-math-errno", "-fvisibility=hidden")


class BuildError(RuntimeError):
    """The kernels could not be compiled; the message says why in one sentence."""


def build_library(isa: str, cache: Path) -> Path:
    """The compiled library for ``isa`` (a key of ``ISA_FLAGS``) in the directory ``cache``, made now if need be.

    Several processes may ask at once: one compiles, the others wait. Raises :class:`BuildError`.
    """
    compiler = shutil.which("g++")
    if compiler is None:
        raise BuildError("there is no g++ on the PATH")
    library = cache / f"cpu-{isa}-{_fingerprint(compiler, isa)}.so"
    if library.exists():
        return library
    try:
        cache.mkdir(mode=0o700, parents=True, exist_ok=True)
        with open(library.with_suffix(".lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not library.exists():
                logger.info("Compiling the CPU kernels for %s, once: a few seconds.", isa)
                _compile(compiler, isa, library)
    except OSError as error:
        raise BuildError(f"the cache directory cannot be written ({error})") from error
    return library


def _fingerprint(compiler: str, isa: str) -> str:
    version = subprocess.run([compiler, "--version"], capture_output=True, check=False).stdout
    digest = hashlib.sha256()
    for part in (platform.machine().encode(), version, " ".join(FLAGS + ISA_FLAGS[isa]).encode()):
        digest.update(part + b"\0")
    for source in sorted([*SOURCES.glob("*.h"), *SOURCES.glob("*.cpp")]):
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def _compile(compiler: str, isa: str, library: Path) -> None:
    with tempfile.TemporaryDirectory(dir=library.parent, prefix=".build-") as scratch:
        objects, linked = Path(scratch, "kernels.o"), Path(scratch, "kernels.so")
        _run(compiler, *FLAGS, *ISA_FLAGS[isa], "-c", str(SOURCES / "kernels.cpp"), "-o", str(objects))
        _run(compiler, "-shared", "-pthread", str(objects), "-o", str(linked))
        with open(linked, "rb") as file:
            os.fsync(file.fileno())
        os.replace(linked, library)


def _run(*command: str) -> None:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        lines = [line for line in result.stderr.splitlines() if "error" in line] or result.stderr.splitlines()[-1:]
        raise BuildError(f"{command[0]} failed: {' / '.join(lines[:3]) or f'exit status {result.returncode}'}")
