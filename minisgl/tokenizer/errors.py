"""What can be wrong with a tokenizer."""

from __future__ import annotations


class TokenizerError(ValueError):
    """A tokenizer that cannot be loaded, in one sentence that says what can."""
