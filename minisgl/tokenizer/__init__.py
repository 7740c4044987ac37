"""Text: tokenizers and chat templates on the way in, incremental detokenization and stop strings on the way out."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .chat_template import ChatTemplateError
    from .detokenize import Detokenizer
    from .errors import TokenizerError
    from .load import Tokenizer, generation_defaults, load_tokenizer
    from .tokenize import tokenize_request

__all__ = [
    "ChatTemplateError",
    "Detokenizer",
    "Tokenizer",
    "TokenizerError",
    "generation_defaults",
    "load_tokenizer",
    "tokenize_request",
]

_HOMES = {
    "ChatTemplateError": "chat_template",
    "Detokenizer": "detokenize",
    "Tokenizer": "load",
    "TokenizerError": "errors",
    "generation_defaults": "load",
    "load_tokenizer": "load",
    "tokenize_request": "tokenize",
}


def __getattr__(name: str) -> Any:
    # Lazily, so that the launcher has worker.py without the libraries that the work takes.
    if name in _HOMES:
        return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
