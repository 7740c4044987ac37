"""The other ranks of an `LLM` with tp > 1: the processes that a server would start too, without the rest of it."""

from __future__ import annotations

import contextlib
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
from minisgl.server.process import Failed, Ready, exit_words
from minisgl.server.rundir import RunDir
from minisgl.server.scheduler_process import RankConfig, run_rank
from minisgl.server.supervisor import start_worker

_HEAR_SECONDS = 0.1


@contextlib.contextmanager
def interrupts_held_back(insist: Callable[[], None] = lambda: None) -> Generator[Callable[[], None]]:
    """Ctrl-C in here is heard at the end: a step, a start or an end that is left halfway is not in order, and ranks of
    which one has left it can never agree again. Calling what the block gets hears it earlier, from any thread.

    The second one also calls ``insist``, which should make an end of what the block waits for.
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or before is None:
        yield lambda: None  # no signal reaches this thread, or it is for other than Python code to handle
        return
    heard: list[FrameType | None] = []

    def note(number: int, frame: FrameType | None) -> None:
        heard.append(frame)
        if len(heard) > 1:
            insist()

    def hear() -> None:
        if heard and before is signal.default_int_handler:
            heard.clear()
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, note)
    try:
        yield hear
    finally:
        signal.signal(signal.SIGINT, before)
        if heard and before == signal.SIG_DFL:
            signal.raise_signal(signal.SIGINT)
        elif heard and callable(before):
            # Not by a signal: asyncio's loop has heard of that one already, by other ways than the handler.
            before(signal.SIGINT, heard[-1])


class FollowerRanks:
    """Starts ranks 1 .. tp - 1. Rank 0 is the caller's: it must load its part before :meth:`wait_ready`.

    A thread listens to them from their start to :meth:`close`: a report that nobody takes would fill the pipe and stop
    its sender, and a death must be known while rank 0 waits for the dead. It serves as the watch of rank 0's engine.
    Whoever waits here calls ``hear_interrupt`` now and then.
    """

    def __init__(
        self, args: ServerArgs, model_path: Path, seed: int, hear_interrupt: Callable[[], None] = lambda: None
    ) -> None:
        self._hear_interrupt = hear_interrupt
        self._changed = threading.Condition()
        self._ready: set[int] = set()
        self._loss: str | None = None
        self._at_loss: list[Callable[[], None]] = []
        self._at_end: list[Callable[[], None]] = []
        self._links: dict[Connection, int] = {}
        self._processes: dict[int, BaseProcess] = {}
        self.inboxes: list[Push] = []
        self._listener = threading.Thread(target=self._listen, name="follower ranks", daemon=True)
        self._zmq: zmq.Context[Any] = zmq.Context()
        self._run_dir = RunDir()
        self.addresses = Addresses(directory=str(self._run_dir.path), ranks=args.tp)
        try:
            for rank in range(1, args.tp):
                config = RankConfig(args=args, model_path=model_path, addresses=self.addresses, rank=rank, seed=seed)
                worker = start_worker(f"rank {rank}", args.log_level, run_rank, config)
                assert worker.link is not None
                self._links[worker.link] = rank
                self._processes[rank] = worker.process
                self.inboxes.append(Push(self._zmq, self.addresses.rank(rank)))
            self._listener.start()
        except BaseException:
            self.close()
            raise

    def wait_ready(self) -> None:
        """Raises RuntimeError with the reason when a rank cannot start."""
        with self._changed:
            while not self._changed.wait_for(self._settled, _HEAR_SECONDS):
                self._hear_interrupt()
        self.check()

    def _settled(self) -> bool:
        return self._loss is not None or len(self._ready) == len(self._processes)

    def check(self, patience: float = 0.0) -> None:
        """Raises RuntimeError when a rank is gone, or proves to be within ``patience`` seconds."""
        self._hear_interrupt()
        with self._changed:
            self._changed.wait_for(lambda: self._loss is not None, patience)
            if self._loss is not None:
                raise RuntimeError(f"{self._loss} This LLM cannot go on; close it and make a new one.")

    @property
    def lost(self) -> bool:
        """Whether :meth:`check` raises."""
        return self._loss is not None

    def kill(self) -> None:
        """Ends them, whatever they do, and with it all that waits for them."""
        for process in self._processes.values():
            process.kill()  # it holds nothing that must be put in order

    def on_end(self, act: Callable[[], None]) -> None:
        self._at_end.append(act)

    def on_loss(self, act: Callable[[], None]) -> None:
        with self._changed:
            self._at_loss.append(act)
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
            acts = list(self._at_loss)
            self._changed.notify_all()
        for act in acts:
            act()

    def close(self) -> None:
        with self._changed:
            self._at_loss.clear()  # these deaths are no loss
        self.kill()
        for process in self._processes.values():
            process.join()
        if self._listener.ident is not None:
            self._listener.join()
        for inbox in self.inboxes:
            inbox.close()
        for link in self._links:
            link.close()
        self._zmq.destroy(linger=0)
        self._run_dir.close()
        while self._at_end:
            self._at_end.pop()()
