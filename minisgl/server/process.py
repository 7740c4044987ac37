"""A worker process, seen from inside: how it starts, reports to the launcher, and never outlives it.

Each worker holds one end of a pipe, its lifeline. Reports go up (:class:`Stage`, :class:`Ready`, :class:`Failed`),
the word to start serving comes down, with the facts that all the workers reported, and its end means that the launcher
is gone, in whatever way. On Linux the kernel kills the worker at the same moment anyway (parent-death signal); the pipe
covers every other system.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import queue
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from minisgl.utils.logging import setup_logging

logger = logging.getLogger(__name__)

PR_SET_PDEATHSIG = 1
PR_SET_NAME = 15
HELD_SIGNALS = (signal.SIGINT, signal.SIGHUP, signal.SIGTERM)
"""Blocked by the launcher while it starts a worker, so that none arrives before the worker has decided about it."""


@dataclass(frozen=True, slots=True)
class Stage:
    """What a worker is doing before it is ready; ``fraction`` (0 to 1) is how far it is, where that is known."""

    what: str
    fraction: float | None = None


@dataclass(frozen=True, slots=True)
class Ready:
    """A worker can work. ``summary`` is for the user to see, if not empty; ``facts`` are for the other processes."""

    summary: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Failed:
    """A worker cannot start; one sentence that says why."""

    message: str


class Reporter:
    """A worker's end of its lifeline. Every entry point gets one as its last argument."""

    def __init__(self, link: Connection) -> None:
        self._link = link
        self._go: queue.SimpleQueue[Mapping[str, Any]] = queue.SimpleQueue()
        self._lock = threading.Lock()

    def progress(self, what: str, fraction: float | None = None) -> None:
        self._send(Stage(what, fraction))

    def ready(self, summary: str = "", **facts: Any) -> None:
        self._send(Ready(summary, facts))

    def failed(self, message: str) -> None:
        self._send(Failed(message))

    def wait_go(self) -> Mapping[str, Any]:
        """Blocks until every process of the instance is ready. Returns the facts that all of them have reported."""
        return self._go.get()

    def _send(self, report: Stage | Ready | Failed) -> None:
        with self._lock, contextlib.suppress(OSError):  # a launcher that is gone ends this process by itself
            self._link.send(report)

    def _listen(self) -> None:
        try:
            while True:
                self._go.put(self._link.recv())
        except (EOFError, OSError):
            os._exit(1)


def run_worker(
    entry: Callable[..., None],
    args: tuple[Any, ...],
    name: str,
    link: Connection,
    parent: int,
    dies_with_parent: bool,
    log_level: str,
) -> None:
    """The main function of every worker: ``entry(*args, reporter)``, to be given to a spawned process.

    An exception of ``entry`` becomes a :class:`Failed` report and exit code 1. ``entry`` is imported before this runs,
    so its module imports what is heavy only when it is called.
    """
    _settle(name, parent, dies_with_parent)
    # Ctrl-C and a closed terminal reach every process of the group; what then happens is for the launcher to decide.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HELD_SIGNALS)
    setup_logging(log_level, name)
    reporter = Reporter(link)
    threading.Thread(target=reporter._listen, name="lifeline", daemon=True).start()
    try:
        entry(*args, reporter)
    except Exception as error:
        # What went wrong with the user's input says so in its own words; anything else is a fault of ours to trace.
        expected = isinstance(error, (ValueError, OSError, MemoryError, ImportError, NotImplementedError))
        logger.log(logging.DEBUG if expected else logging.ERROR, "%s ended by an exception", name, exc_info=True)
        sentence = " ".join(str(error).split())
        reporter.failed(sentence if expected and sentence else f"{type(error).__name__}: {sentence}")
        sys.exit(1)


def exit_words(exitcode: int | None) -> str:
    """How a process has ended."""
    if exitcode is not None and exitcode < 0:
        with contextlib.suppress(ValueError):
            return f"killed by {signal.Signals(-exitcode).name}"
    return f"exit code {exitcode}"


def _settle(name: str, parent: int, dies_with_parent: bool) -> None:
    """Asks the kernel to kill this process when its parent ends, and to call it ``name`` in process lists."""
    if sys.platform == "linux":
        prctl = ctypes.CDLL(None).prctl
        if dies_with_parent:
            prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        prctl(PR_SET_NAME, name.encode(), 0, 0, 0)
    if os.getppid() != parent:  # it has ended before it could be asked
        os._exit(1)
