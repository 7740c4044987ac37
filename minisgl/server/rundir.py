"""The private run directory of one server instance: its sockets live there, and nothing else does.

The owner holds a lock (flock) on the directory itself for as long as it lives, so a directory whose lock can be taken
is the leftover of an instance that was killed: no process ids to guess from, and the kernel drops the lock whatever
way the owner dies.

    create:  mkdtemp -> lock -> is it still there? (a sweeper may have been faster: again) -> sweep the stale ones
    sweep:   for each directory of ours -> try the lock -> got it: remove
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import stat
import tempfile
from pathlib import Path

logger = logging.getLogger(__name__)

PREFIX = "minisgl-"
SOCKET_PATH_LIMIT = 107
"""Bytes in the path of a Unix socket (Linux; ``sun_path`` less its final zero)."""

_LONGEST_NAME = len("/" + PREFIX + "12345678" + "/tokenizer-1234")


class RunDir:
    """A new run directory, mode 0700, below ``base`` (the system's temporary directory). ``close`` removes it."""

    def __init__(self, base: Path | None = None) -> None:
        base = base or _default_base()
        self.path, self._fd = _create(base)
        for stale in sweep(base):
            logger.info("Removed %s, left behind by an instance that was killed.", stale)

    def close(self) -> None:
        """Removes the directory. Safe to call twice."""
        if self._fd >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._fd)
            self._fd = -1


def sweep(base: Path) -> list[Path]:
    """Removes this user's run directories that no living instance holds, and returns them."""
    removed = []
    for path in base.glob(PREFIX + "*"):
        try:
            status = path.lstat()
            if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
                continue
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:
            continue  # gone in the meantime, or not ours to look at
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
            removed.append(path)
        except BlockingIOError:
            pass  # alive
        finally:
            os.close(fd)
    return removed


def _create(base: Path) -> tuple[Path, int]:
    while True:
        path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=base))
        try:
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            continue
        fcntl.flock(fd, fcntl.LOCK_EX)  # waits for a sweeper that has just found it unlocked
        if path.exists():
            return path, fd
        os.close(fd)


def _default_base() -> Path:
    base = Path(tempfile.gettempdir())
    # A long TMPDIR (macOS, batch systems) leaves no room for a socket's name.
    return base if len(os.fsencode(base)) + _LONGEST_NAME <= SOCKET_PATH_LIMIT else Path("/tmp")
