"""The MINISGL_* environment variables: all that exist, parsed strictly.

A variable that is set to something it cannot mean, or a MINISGL_ name that nothing reads (a typing error, most likely),
is an :class:`EnvError`, one sentence; the command line turns it into exit code 2.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from pathlib import Path

CACHE_DIR = "MINISGL_CACHE_DIR"

KNOWN = (CACHE_DIR,)


class EnvError(ValueError):
    """An environment variable with a name or value that means nothing."""


def cache_dir(environ: Mapping[str, str] | None = None) -> Path:
    """Where models, converted tokenizers and compiled kernels are kept between starts; made by who writes first.

    ``MINISGL_CACHE_DIR`` (an absolute path, ~ allowed), otherwise ``minisgl`` below the user's cache directory.
    """
    environ = os.environ if environ is None else environ
    if value := environ.get(CACHE_DIR):
        path = Path(value).expanduser()
        if not path.is_absolute():
            raise EnvError(f"{CACHE_DIR} must be an absolute path, not {value!r}.")
        if path.exists() and not path.is_dir():
            raise EnvError(f"{CACHE_DIR} must be a directory; {value} is a file.")
        return path
    # The XDG rule: a relative value is to be ignored.
    xdg = environ.get("XDG_CACHE_HOME", "")
    base = Path(xdg) if xdg.startswith("/") else Path.home() / ".cache"
    return base / "minisgl"


def check_environment(environ: Mapping[str, str] | None = None) -> None:
    """Raises :class:`EnvError` for the first MINISGL_* variable that is unknown or wrong."""
    environ = os.environ if environ is None else environ
    for name in environ:
        if name.startswith("MINISGL_") and name not in KNOWN:
            near = difflib.get_close_matches(name, KNOWN, n=1)
            hint = f"did you mean {near[0]}?" if near else f"there is {', '.join(KNOWN)}."
            raise EnvError(f"{name} is no setting of minisgl; {hint}")
    cache_dir(environ)
