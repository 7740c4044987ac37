"""The entry points of the processes that work on text. The launcher imports this, so it imports nothing heavy."""

from __future__ import annotations

import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from minisgl.addresses import Addresses


class Reporter(Protocol):
    """A worker's word to the launcher; ``minisgl.server.process`` has the real one."""

    def progress(self, what: str, fraction: float | None = None) -> None: ...

    def ready(self, summary: str = "", **facts: Any) -> None: ...

    def wait_go(self) -> Mapping[str, Any]: ...


def run_tokenizer(model: Path, addresses: Addresses, index: int, reporter: Reporter) -> None:
    """Tokenizer worker ``index`` of several, until SIGTERM. ``model`` is a model directory or a .gguf file."""
    _run(model, addresses, index, False, reporter)


def run_detokenizer(model: Path, addresses: Addresses, reporter: Reporter) -> None:
    """The detokenizer, until SIGTERM; the only tokenizer worker too where ``addresses.tokenizers`` is 0.

    Reports ``sampling_defaults``, what the model's authors recommend, for the API servers.
    """
    _run(model, addresses, None if addresses.tokenizers else 0, True, reporter)


def _run(model: Path, addresses: Addresses, tokenizer: int | None, detokenizer: bool, reporter: Reporter) -> None:
    signal.signal(signal.SIGTERM, lambda signum, frame: sys.exit(0))
    reporter.progress("loading the tokenizer")

    from .load import generation_defaults, load_tokenizer
    from .loop import TextLoop

    with TextLoop(load_tokenizer(model), addresses, tokenizer, detokenizer) as loop:
        facts: dict[str, Any] = {"sampling_defaults": generation_defaults(model)} if detokenizer else {}
        reporter.ready(**facts)
        loop.max_seq_len = reporter.wait_go().get("max_seq_len")
        loop.run()
