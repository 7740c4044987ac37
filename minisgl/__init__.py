"""minisgl: a serving engine for language models, small enough to read in an afternoon."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .version import __version__

if TYPE_CHECKING:
    from .core import SamplingParams
    from .llm import LLM

__all__ = ["LLM", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    # Lazily, so that `import minisgl` costs milliseconds and loads no torch.
    if name == "LLM":
        from .llm import LLM

        return LLM
    if name == "SamplingParams":
        from .core import SamplingParams

        return SamplingParams
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
