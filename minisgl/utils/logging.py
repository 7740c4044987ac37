"""Log lines: one format for every process, on standard error, with the process's name in it."""

from __future__ import annotations

import logging
import sys

LEVELS = ("debug", "info", "warning", "error")


def setup_logging(level: str, process: str) -> None:
    """Sends this process's log lines to standard error. ``level`` is one of :data:`LEVELS`."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(f"%(asctime)s %(levelname)-7s {process}: %(message)s", "%H:%M:%S"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    # Only our own lines go below warnings: libraries are chatty.
    logging.getLogger("minisgl").setLevel(level.upper())
    if level == "debug":
        root.setLevel(logging.INFO)
