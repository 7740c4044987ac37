"""The ways in which a request can be served, all of which a deterministic engine answers with the same bits."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from engine_driver import Driver, Request
from torch import Tensor

from minisgl.core import BatchResult

Answer = tuple[list[int], Tensor]
"""The tokens (N) of a request, and the logits (N, vocab) from which they were taken."""


@dataclass
class TracedRequest(Request):
    logits: list[Tensor] = field(default_factory=list)

    def answer(self, count: int) -> Answer:
        return self.tokens[self.prompt_len :][:count], torch.stack(self.logits[:count])


class TracingDriver(Driver):
    """Generates so many ``tokens`` for a prompt, and keeps their logits. For engines that run steps as on a GPU."""

    def __init__(self, engine: Any, tokens: int) -> None:
        super().__init__(engine)
        self.tokens = tokens
        self._graphs = engine._runner._graphs
        self._eager: Tensor | None = None
        runner = engine._runner._runner
        sampler = runner.sampler

        def record(logits: Tensor, *rest: Any) -> Tensor:
            self._eager = logits.clone()
            return sampler(logits, *rest)

        runner.sampler = record

    def step(self, *work: tuple[Request, int]) -> BatchResult:
        ordered = sorted(work, key=lambda item: item[1] != 1)
        sampled = [i for i, (r, new) in enumerate(ordered) if r.cached + new == len(r.tokens)]
        result = super().step(*work)
        decode = None if self._graphs is None else self._graphs.decode
        if decode is not None and all(new == 1 for _, new in work) and len(work) <= decode._sizes[-1]:
            logits = decode._logits[sampled].clone()  # nothing of a replay goes through Python
        elif sampled:
            assert self._eager is not None
            logits = self._eager
        for i, row in zip(sampled, logits if sampled else (), strict=True):
            request = ordered[i][0]
            assert isinstance(request, TracedRequest)
            request.logits.append(row.cpu())
        return result


def make_prompts(lengths: tuple[int, ...], vocab: int) -> list[list[int]]:
    generator = np.random.default_rng(3)
    return [generator.integers(3, vocab, length).tolist() for length in lengths]


def alone(driver: TracingDriver, prompts: list[list[int]], chunk: int = 10**6) -> list[Answer]:
    """One after the other, in chunks of so many tokens."""
    answers = []
    for prompt in prompts:
        request = TracedRequest(0, list(prompt))
        driver.generate(request, driver.tokens, chunk)
        driver.release(request)
        answers.append(request.answer(driver.tokens))
    return answers


def crowd(driver: TracingDriver, prompts: list[list[int]], budget: int) -> list[Answer]:
    """Together, ``budget`` tokens in a step at most, so that chunks of prompts run beside single tokens."""
    requests = [TracedRequest(row, list(prompt)) for row, prompt in enumerate(prompts)]
    while any(len(r.logits) < driver.tokens for r in requests):
        left, work = budget, []
        # Running ones first, as the scheduler has it.
        for request in sorted(requests, key=lambda r: not r.logits):
            new = min(left, len(request.tokens) - request.cached)
            if new and len(request.logits) < driver.tokens:
                work.append((request, new))
                left -= new
        driver.step(*work)
    for request in requests:
        driver.release(request)
    return [request.answer(driver.tokens) for request in requests]


def cached(driver: TracingDriver, prompts: list[list[int]], beginning: int) -> list[Answer]:
    """On pages that another request has computed, of so many of the prompt's tokens at most."""
    size, answers = driver.engine.info.page_size, []
    for prompt in prompts:
        first = TracedRequest(0, list(prompt))
        driver.generate(first, 2, chunk=9)
        pages = min(beginning, len(prompt) - 1) // size
        # It takes over the row as well: the beginning of its table is what it should be.
        second = TracedRequest(0, list(prompt), cached=pages * size, pages=first.pages[:pages])
        first.pages = first.pages[pages:]
        driver.release(first)
        driver.generate(second, driver.tokens)
        driver.release(second)
        answers.append(second.answer(driver.tokens))
    return answers


def pre_empted(driver: TracingDriver, prompts: list[list[int]]) -> list[Answer]:
    """Their pages are gone after half of their tokens, and all is computed anew, in one go."""
    answers = []
    for prompt in prompts:
        first = TracedRequest(0, list(prompt))
        driver.generate(first, driver.tokens // 2)
        driver.release(first)
        second = TracedRequest(0, list(first.tokens), logits=first.logits)
        second.prompt_len = len(prompt)
        driver.generate(second, driver.tokens)
        driver.release(second)
        answers.append(second.answer(driver.tokens))
    return answers


def assert_same(answers: list[Answer], expected: list[Answer]) -> None:
    for (tokens, logits), (other_tokens, other_logits) in zip(answers, expected, strict=True):
        assert torch.isfinite(logits).all()
        assert torch.equal(logits, other_logits)
        assert tokens == other_tokens
