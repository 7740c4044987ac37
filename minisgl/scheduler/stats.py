"""Numbers about the scheduler, for metrics and logs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Stats:
    """The state now (requests, pages), and totals since the start (tokens, steps, pre-emptions).

    ``prompt_tokens`` counts prompts as they first run, ``cached_tokens`` those of them found in the prefix cache,
    ``computed_tokens`` what the engine was given to compute, and ``output_tokens`` what clients got.
    """

    running: int = 0
    waiting: int = 0
    free_pages: int = 0
    cached_pages: int = 0
    held_pages: int = 0
    steps: int = 0
    preemptions: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    computed_tokens: int = 0
    output_tokens: int = 0
