"""The other ranks of an `LLM` with tp > 1: the processes that a server would start too, without the rest of it."""

from __future__ import annotations

import multiprocessing
import os
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import zmq

from minisgl.addresses import Addresses
from minisgl.message import Push
from minisgl.server.args import ServerArgs
from minisgl.server.process import Failed, Ready, exit_words, run_worker
from minisgl.server.rundir import RunDir
from minisgl.server.scheduler_process import RankConfig, run_rank


class FollowerRanks:
    """Starts ranks 1 .. tp - 1. Rank 0 is the caller's: it must load its part before :meth:`wait_ready`."""

    def __init__(self, args: ServerArgs, model_path: Path, seed: int) -> None:
        self._run_dir = RunDir()
        self.addresses = Addresses(directory=str(self._run_dir.path), ranks=args.tp)
        self._zmq: zmq.Context[Any] = zmq.Context()
        context = multiprocessing.get_context("spawn")
        self._links = []
        self._processes = []
        for rank in range(1, args.tp):
            ours, theirs = context.Pipe()
            config = RankConfig(args=args, model_path=model_path, addresses=self.addresses, rank=rank, seed=seed)
            process = context.Process(
                target=run_worker,
                args=(run_rank, (config,), f"rank {rank}", theirs, os.getpid(), args.log_level),
                daemon=True,
            )
            process.start()
            theirs.close()
            self._links.append(ours)
            self._processes.append(process)
        self.inboxes = [Push(self._zmq, self.addresses.rank(rank)) for rank in range(1, args.tp)]

    def wait_ready(self) -> None:
        """Raises RuntimeError with the reason when a rank cannot start."""
        for rank, (link, process) in enumerate(zip(self._links, self._processes, strict=True), 1):
            while True:
                wait([link, process.sentinel])
                try:
                    report = link.recv()
                except EOFError:
                    process.join()
                    raise RuntimeError(
                        f"Rank {rank} died while it was starting ({exit_words(process.exitcode)})."
                    ) from None
                if isinstance(report, Failed):
                    raise RuntimeError(f"Rank {rank}: {report.message}")
                if isinstance(report, Ready):
                    break

    def close(self) -> None:
        for process in self._processes:
            process.kill()  # it holds nothing that must be put in order
        for process in self._processes:
            process.join()
        for inbox in self.inboxes:
            inbox.close()
        for link in self._links:
            link.close()
        self._zmq.term()
        self._run_dir.close()
