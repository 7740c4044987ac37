"""The other ranks of an `LLM` with tp > 1: the processes that a server would start too, without the rest of it."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Generator
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import Any

import zmq

from minisgl.addresses import Addresses
from minisgl.message import Push
from minisgl.server.args import ServerArgs
from minisgl.server.process import Failed, Ready, exit_words, run_worker
from minisgl.server.rundir import RunDir
from minisgl.server.scheduler_process import RankConfig, run_rank


@contextlib.contextmanager
def interrupts_held_back() -> Generator[Callable[[], None]]:
    """Ctrl-C in here is heard at the end, for ranks of which one has left a step halfway can never agree again.

    Calling what the block gets hears it earlier, from any thread.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None  # no signal reaches this thread
        return
    heard: list[tuple[int, FrameType | None]] = []
    handler = signal.signal(signal.SIGINT, lambda number, frame: heard.append((number, frame)))

    def hear() -> None:
        if heard and handler is signal.default_int_handler:
            heard.clear()
            raise KeyboardInterrupt

    try:
        yield hear
    finally:
        signal.signal(signal.SIGINT, handler)
    if heard and callable(handler):
        handler(*heard[-1])


class FollowerRanks:
    """Starts ranks 1 .. tp - 1. Rank 0 is the caller's: it must load its part before :meth:`wait_ready`.

    A thread listens to them from their start to :meth:`close`: a report that nobody takes would fill the pipe and stop
    its sender, and a death must be known while rank 0 waits for the dead. It serves as the watch of rank 0's engine.
    """

    def __init__(self, args: ServerArgs, model_path: Path, seed: int) -> None:
        self._run_dir = RunDir()
        self.addresses = Addresses(directory=str(self._run_dir.path), ranks=args.tp)
        self._zmq: zmq.Context[Any] = zmq.Context()
        self._changed = threading.Condition()
        self._ready: set[int] = set()
        self._loss: str | None = None
        self._acts: list[Callable[[], None]] = []
        self._links: dict[Connection, int] = {}
        self._processes: dict[int, BaseProcess] = {}
        self.inboxes: list[Push] = []
        self._listener = threading.Thread(target=self._listen, name="follower ranks", daemon=True)
        try:
            for rank in range(1, args.tp):
                config = RankConfig(args=args, model_path=model_path, addresses=self.addresses, rank=rank, seed=seed)
                self._start(config)
            self._listener.start()
        except BaseException:
            self.close()
            raise

    def _start(self, config: RankConfig) -> None:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        self._links[ours] = config.rank
        process = context.Process(
            target=run_worker,
            args=(run_rank, (config,), f"rank {config.rank}", theirs, os.getpid(), config.args.log_level),
            daemon=True,
        )
        with theirs:
            process.start()
        self._processes[config.rank] = process
        self.inboxes.append(Push(self._zmq, self.addresses.rank(config.rank)))

    def wait_ready(self) -> None:
        """Raises RuntimeError with the reason when a rank cannot start."""
        with self._changed:
            self._changed.wait_for(lambda: self._loss is not None or len(self._ready) == len(self._processes))
        self.check()

    def check(self, patience: float = 0.0) -> None:
        """Raises RuntimeError when a rank is gone, or proves to be within ``patience`` seconds."""
        with self._changed:
            self._changed.wait_for(lambda: self._loss is not None, patience)
            if self._loss is not None:
                raise RuntimeError(f"{self._loss} This LLM cannot go on; close it and make a new one.")

    def on_loss(self, act: Callable[[], None]) -> None:
        with self._changed:
            self._acts.append(act)
            lost = self._loss is not None
        if lost:
            act()

    def _listen(self) -> None:
        """Until the first rank is gone: then there is nothing more to hear."""
        while True:
            for link in wait(self._links):
                assert isinstance(link, Connection)
                rank = self._links[link]
                try:
                    report = link.recv()
                except (EOFError, OSError):
                    self._processes[rank].join()
                    self._lose(f"Rank {rank} died ({exit_words(self._processes[rank].exitcode)}).")
                    return
                if isinstance(report, Failed):
                    self._lose(f"Rank {rank}: {report.message}")
                    return
                if isinstance(report, Ready):
                    with self._changed:
                        self._ready.add(rank)
                        self._changed.notify_all()

    def _lose(self, loss: str) -> None:
        with self._changed:
            self._loss = loss
            acts = list(self._acts)
            self._changed.notify_all()
        for act in acts:
            act()

    def close(self) -> None:
        with self._changed:
            self._acts.clear()  # these deaths are no loss
        for process in self._processes.values():
            process.kill()  # it holds nothing that must be put in order
        for process in self._processes.values():
            process.join()
        if self._listener.ident is not None:
            self._listener.join()
        for inbox in self.inboxes:
            inbox.close()
        for link in self._links:
            link.close()
        self._zmq.term()
        self._run_dir.close()
