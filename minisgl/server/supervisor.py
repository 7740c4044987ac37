"""The launcher's hold on its worker processes: start them, hear from them, notice their death, end them.

Nothing polls: one wait covers the lifelines, the processes' sentinels and the signals.

    lifelines ──┐
    sentinels ──┼──> connection.wait() ──> Reported | Died | Signalled
    signals   ──┘
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import connection, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any

from .process import HELD_SIGNALS, Failed, Ready, Stage, run_worker


@dataclass(eq=False, slots=True)
class Worker:
    """One process. ``link`` is the launcher's end of its lifeline, None once the worker has closed the other end."""

    name: str
    process: SpawnProcess
    link: Connection | None


@dataclass(frozen=True, slots=True)
class Reported:
    worker: Worker
    report: Stage | Ready | Failed


@dataclass(frozen=True, slots=True)
class Died:
    worker: Worker


@dataclass(frozen=True, slots=True)
class Signalled:
    """SIGINT, SIGTERM or SIGHUP has reached the launcher."""

    signum: int


Event = Reported | Died | Signalled


def ending_signals() -> list[signal.Signals]:
    """The signals that end a server. SIGHUP is none of them under nohup."""
    return [s for s in HELD_SIGNALS if s != signal.SIGHUP or signal.getsignal(s) is not signal.SIG_IGN]


def start_worker(name: str, log_level: str, entry: Callable[..., None], *args: Any) -> Worker:
    """Runs ``entry(*args, reporter)`` in a process of its own."""
    context = multiprocessing.get_context("spawn")
    # The kernel takes the end of the thread that starts a process for the end of its parent.
    dies_with_parent = threading.current_thread() is threading.main_thread()
    # Outside of the signal mask, which starting the tracker would undo.
    resource_tracker.ensure_running()
    ours, theirs = context.Pipe()
    process = context.Process(
        target=run_worker,
        args=(entry, args, name, theirs, os.getpid(), dies_with_parent, log_level),
        name=f"minisgl {name}",
        daemon=True,
    )
    with theirs, _signals_held():  # the worker's end is the worker's alone, so that its death closes the pipe
        process.start()
    return Worker(name, process, ours)


class Supervisor:
    """Starts workers and waits for what happens. To be used from the main thread: the parent-death signal of a worker
    is tied to the thread that started it, and only the main thread may set signal handlers.
    """

    def __init__(self, log_level: str) -> None:
        self._log_level = log_level
        self._signal_read, self._signal_write = os.pipe()
        os.set_blocking(self._signal_write, False)
        # Written to by the C handler: a Python one might not run before a wait that begins right now has ended.
        self._wakeup_before = signal.set_wakeup_fd(self._signal_write, warn_on_full_buffer=False)
        for signum in ending_signals():
            signal.signal(signum, _leave_it_to_the_pipe)
        self.workers: list[Worker] = []

    def start(self, name: str, entry: Callable[..., None], *args: Any) -> Worker:
        """Runs ``entry(*args, reporter)`` in a process of its own."""
        worker = start_worker(name, self._log_level, entry, *args)
        self.workers.append(worker)
        return worker

    def go(self, facts: Mapping[str, Any]) -> None:
        """Tells every worker that all are ready, and what they have reported."""
        for worker in self.workers:
            if worker.link is not None:
                with contextlib.suppress(OSError):
                    worker.link.send(facts)

    def wait(self, timeout: float | None = None) -> list[Event]:
        """Blocks until something happens; empty when the time is up. A death comes after the worker's last report."""
        sources: list[Any] = [self._signal_read]
        sources += [w.link for w in self.workers if w.link is not None]
        sources += [w.process.sentinel for w in self.workers]
        ready = set(connection.wait(sources, timeout))
        events: list[Event] = []
        if self._signal_read in ready:
            events += map(Signalled, os.read(self._signal_read, 64))
        for worker in list(self.workers):
            dead = worker.process.sentinel in ready
            if dead or worker.link in ready:
                events += [Reported(worker, report) for report in self._reports(worker)]
            if dead:
                worker.process.join()
                self.workers.remove(worker)
                events.append(Died(worker))
        return events

    def stop(self, groups: Sequence[tuple[Sequence[Worker], float]]) -> None:
        """Ends all workers: SIGTERM to one group after the other, each with so many seconds to end, then SIGKILL to all
        that are left. Another signal to the launcher cuts the waiting short.
        """
        hurry = False
        for group, seconds in groups:
            for worker in group:
                worker.process.terminate()
            deadline = time.monotonic() + seconds
            while not hurry and any(w in self.workers for w in group):
                left = deadline - time.monotonic()
                events = self.wait(max(left, 0))
                hurry = any(isinstance(e, Signalled) for e in events)
                if not events:
                    break
        for worker in self.workers:
            worker.process.kill()
        for worker in self.workers:
            worker.process.join()
        self.workers.clear()

    def close(self) -> None:
        """All workers have been stopped. A signal from here on is ignored: this process is about to end in good order,
        and another Ctrl-C must not turn that into a death by signal.
        """
        for signum in ending_signals():
            signal.signal(signum, signal.SIG_IGN)
        signal.set_wakeup_fd(self._wakeup_before)
        os.close(self._signal_read)
        os.close(self._signal_write)

    def _reports(self, worker: Worker) -> list[Stage | Ready | Failed]:
        reports = []
        while worker.link is not None:
            try:
                if not worker.link.poll():
                    break
                reports.append(worker.link.recv())
            except (EOFError, OSError):
                worker.link.close()
                worker.link = None
        return reports


def _leave_it_to_the_pipe(_signum: int, _frame: object) -> None:
    pass


@contextlib.contextmanager
def _signals_held() -> Iterator[None]:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, HELD_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
