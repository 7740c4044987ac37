"""What the start shows."""

from __future__ import annotations

import io

from minisgl.server.process import Stage
from minisgl.server.progress import StartupProgress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def show(stream: io.StringIO, enabled: bool = True) -> str:
    display = StartupProgress(stream, enabled)
    for i in range(101):
        display.update("scheduler", Stage("loading weights", i / 100))
    display.update("tokenizer", Stage("loading"))
    display.ready("tokenizer", "")
    display.ready("scheduler", "7 pages")
    display.close()
    return stream.getvalue()


def test_plain_lines() -> None:
    """One for each stage, not one for each percent."""
    assert show(io.StringIO()) == (
        "scheduler: loading weights 0%\ntokenizer: loading\ntokenizer: ready\nscheduler: ready, 7 pages\n"
    )


def test_terminal() -> None:
    """One line, redrawn in place, and gone at the end; what is worth knowing stays."""
    frames = show(Terminal()).split("\r\x1b[K")
    assert frames[51] == "scheduler: loading weights 50%"
    assert frames[-4:] == [
        "scheduler: loading weights 100%   tokenizer: loading",
        "scheduler: loading weights 100%",
        "scheduler: ready, 7 pages\n",
        "",
    ]


def test_silent() -> None:
    assert show(Terminal(), enabled=False) == ""
