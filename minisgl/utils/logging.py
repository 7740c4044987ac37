"""Log lines: one format for every process, on standard error, with the process's name in it."""

from __future__ import annotations

import logging
import sys

CLEAR_LINE = "\r\x1b[K"
"""What empties the line that a terminal's cursor is in."""

LEVELS = ("debug", "info", "warning", "error")


def setup_logging(level: str, process: str) -> None:
    """Sends this process's log lines to standard error. ``level`` is one of :data:`LEVELS`."""
    handler = logging.StreamHandler(sys.stderr)
    # On a terminal the launcher may be in the middle of its line of progress, which it will draw again.
    clear = CLEAR_LINE if sys.stderr.isatty() else ""
    handler.setFormatter(logging.Formatter(f"{clear}%(asctime)s %(levelname)-7s {process}: %(message)s", "%H:%M:%S"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    # Only our own lines go below warnings: libraries are chatty.
    logging.getLogger("minisgl").setLevel(level.upper())
    if level == "debug":
        root.setLevel(logging.INFO)
