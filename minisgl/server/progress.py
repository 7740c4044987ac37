"""What the start shows: one line that is redrawn on a terminal, plain lines elsewhere."""

from __future__ import annotations

import shutil
import time
from typing import TextIO

from minisgl.utils.logging import CLEAR_LINE

from .process import Stage

REPEAT_SECONDS = 5.0
"""A plain line repeats what is under way this often at most, with how far it is by now."""


class StartupProgress:
    """Shows what several processes are at. ``close`` leaves a terminal's line empty again."""

    def __init__(self, stream: TextIO, enabled: bool) -> None:
        self._stream = stream
        self._enabled = enabled
        self._redraw = enabled and stream.isatty()
        self._stages: dict[str, Stage] = {}
        self._line = ""
        self._printed: dict[str, tuple[str, float]] = {}

    def update(self, name: str, stage: Stage) -> None:
        if not self._enabled:
            return
        self._stages[name] = stage
        if self._redraw:
            self._draw()
            return
        what, at = self._printed.get(name, ("", 0.0))
        if stage.what != what or time.monotonic() - at >= REPEAT_SECONDS:
            self._printed[name] = (stage.what, time.monotonic())
            self._write(f"{name}: {_words(stage)}\n")

    def ready(self, name: str, summary: str) -> None:
        """That ``name`` is ready, and in a line that stays, what there is to say about it."""
        if not self._enabled:
            return
        self._stages.pop(name, None)
        line = f"{name}: ready, {summary}\n" if summary else f"{name}: ready\n"
        if not self._redraw:
            self._write(line)
            return
        if summary:
            self._write(CLEAR_LINE + line)
            self._line = ""
        self._draw()

    def close(self) -> None:
        if self._redraw:
            self._write(CLEAR_LINE)

    def _draw(self) -> None:
        line = "   ".join(f"{name}: {_words(stage)}" for name, stage in self._stages.items())
        line = line[: shutil.get_terminal_size().columns - 1]
        if line != self._line:
            self._line = line
            self._write(CLEAR_LINE + line)

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()


def _words(stage: Stage) -> str:
    return stage.what if stage.fraction is None else f"{stage.what} {stage.fraction:.0%}"
