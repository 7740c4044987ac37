"""A server in processes of its own, for tests that do to it what happens to servers."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

import httpx
import psutil

ROOT = Path(__file__).parents[2]
SIMULATED = Path(__file__).parent / "simulated_server.py"
START_SECONDS = 60.0


def until(condition: Callable[[], Any], seconds: float = 10.0) -> None:
    """Waits for something that no event tells of."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.01)


class ServerProcess:
    """A launcher and its workers. Leaving the ``with`` block kills the launcher; that nothing is left is checked."""

    def __init__(self, *flags: str, tmp: Path, command: Sequence[str] = (str(SIMULATED),), **environ: str) -> None:
        path = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path), "TMPDIR": str(tmp), **environ}
        self._popen = subprocess.Popen(
            [sys.executable, *command, *flags],
            env=environment,
            cwd=tmp,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # a process group of its own, for Ctrl-C to reach like a terminal's would
        )
        self.pid = self._popen.pid
        self.url = ""
        self.http = httpx.Client(timeout=30)
        self.stderr = ""
        self._tree: dict[int, psutil.Process] = {}
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.http.close()
        self.remember()
        if self._popen.poll() is None:
            self._popen.kill()
        self._popen.wait()
        self.check_gone()

    def wait_ready(self) -> Self:
        assert self._popen.stdout is not None
        line = self._popen.stdout.readline()
        match = re.fullmatch(r".+ is served at (http://\S+)\n", line)
        assert match, f"{line!r} on stdout; on stderr: {self.stderr}"
        self.url = match[1]
        self.remember()
        return self

    def remember(self) -> None:
        """Takes down who is there now, for :meth:`check_gone`."""
        try:
            launcher = psutil.Process(self.pid)
            self._tree.update({p.pid: p for p in [launcher, *launcher.children(recursive=True)]})
        except psutil.NoSuchProcess:
            pass

    def check_gone(self, seconds: float = 5.0) -> None:
        """Nobody who was there is left: no worker, no resource tracker."""
        _, alive = psutil.wait_procs(self._tree.values(), timeout=seconds)
        alive = [p for p in alive if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
        for process in alive:
            process.kill()
        assert not alive

    def worker(self, name: str) -> psutil.Process:
        """The process called so, as "api server 1" or "scheduler"."""
        self.remember()
        (process,) = [p for p in self._tree.values() if p.is_running() and p.name() == name]
        return process

    @property
    def ended(self) -> bool:
        return self._popen.poll() is not None

    def interrupt(self) -> None:
        """Ctrl-C in a terminal: SIGINT to every process of the group."""
        os.killpg(self.pid, signal.SIGINT)

    def terminate(self) -> None:
        self._popen.terminate()

    def kill(self) -> None:
        self._popen.kill()

    def wait(self, seconds: float = 15.0) -> int:
        """The exit code of the launcher."""
        code = self._popen.wait(seconds)
        self._reader.join(seconds)
        return code

    def ask(self, prompt: str | list[int] = "hello", max_tokens: int = 8, **body: Any) -> httpx.Response:
        body = {"prompt": prompt, "max_tokens": max_tokens, **body}
        return self.http.post(self.url + "/v1/completions", json=body)

    def health(self) -> httpx.Response:
        return self.http.get(self.url + "/health")

    def _read(self) -> None:
        assert self._popen.stderr is not None
        for line in self._popen.stderr:
            self.stderr += line
