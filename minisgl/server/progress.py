"""What the start shows: one line that is redrawn on a terminal, plain lines elsewhere."""

from __future__ import annotations

import shutil
import time
from typing import TextIO

from .process import Progress

REPEAT_SECONDS = 5.0
"""A plain line repeats what is under way this often at most, with how far it is by now."""


class StartupProgress:
    """Shows the stages of several processes. ``close`` leaves a terminal's line empty again."""

    def __init__(self, stream: TextIO, enabled: bool) -> None:
        self._stream = stream
        self._enabled = enabled
        self._redraw = enabled and stream.isatty()
        self._stages: dict[str, Progress] = {}
        self._printed: dict[str, tuple[str, float]] = {}

    def update(self, name: str, stage: Progress) -> None:
        if not self._enabled:
            return
        self._stages[name] = stage
        if self._redraw:
            line = "   ".join(f"{name}: {_words(stage)}" for name, stage in self._stages.items())
            width = shutil.get_terminal_size().columns - 1
            self._write("\r\x1b[K" + line[:width])
            return
        what, at = self._printed.get(name, ("", 0.0))
        if stage.what != what or time.monotonic() - at >= REPEAT_SECONDS:
            self._printed[name] = (stage.what, time.monotonic())
            self._write(f"{name}: {_words(stage)}\n")

    def close(self) -> None:
        if self._redraw:
            self._write("\r\x1b[K")

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()


def _words(stage: Progress) -> str:
    return stage.what if stage.fraction is None else f"{stage.what} {stage.fraction:.0%}"
