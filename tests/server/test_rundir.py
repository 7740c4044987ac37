"""Private run directories, and what is left of those whose owner was killed."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest

from minisgl.addresses import Addresses
from minisgl.server.rundir import SOCKET_PATH_LIMIT, RunDir, sweep


def _own_and_hang(base: Path, made: Event) -> None:
    RunDir(base)
    made.set()
    signal.pause()


def test_private_and_removed(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    assert run_dir.path.parent == tmp_path
    assert run_dir.path.stat().st_mode & 0o777 == 0o700
    (run_dir.path / "socket").touch()
    run_dir.close()
    run_dir.close()
    assert list(tmp_path.iterdir()) == []


def test_only_what_nobody_holds_is_swept(tmp_path: Path) -> None:
    alive = RunDir(tmp_path)
    context = multiprocessing.get_context("spawn")
    made = context.Event()
    owner = context.Process(target=_own_and_hang, args=(tmp_path, made))
    owner.start()
    assert made.wait(30)
    (killed,) = {p for p in tmp_path.iterdir() if p != alive.path}
    assert sweep(tmp_path) == []
    assert owner.pid is not None
    os.kill(owner.pid, signal.SIGKILL)
    owner.join()
    (tmp_path / "minisgl-file").touch()
    (tmp_path / "minisgl-link").symlink_to(alive.path)
    new = RunDir(tmp_path)
    assert not killed.exists()
    assert {p.name for p in tmp_path.iterdir()} == {alive.path.name, new.path.name, "minisgl-file", "minisgl-link"}
    alive.close()
    new.close()


def test_many_starts_at_once(tmp_path: Path) -> None:
    """Nobody sweeps a directory that is just being made."""
    found: list[RunDir] = []

    def make() -> None:
        for _ in range(20):
            found.append(RunDir(tmp_path))

    threads = [threading.Thread(target=make) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 160
    assert all(run_dir.path.is_dir() for run_dir in found)
    for run_dir in found:
        run_dir.close()


def test_sockets_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long the path of the temporary directory is."""
    deep = tmp_path / ("x" * 100)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    run_dir = RunDir()
    try:
        address = Addresses(str(run_dir.path), tokenizers=9999).tokenizer(9998)
        assert len(address.removeprefix("ipc://")) <= SOCKET_PATH_LIMIT
    finally:
        run_dir.close()
