"""The offline class: the same scheduler and engine, in one process and without a server."""

from .llm import LLM, Completion

__all__ = ["LLM", "Completion"]
