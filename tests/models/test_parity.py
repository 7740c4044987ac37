"""Every architecture against transformers, in fp32, with pages, chunks, mixed batches and shared prefixes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from model_driver import Driver
from tiny_models import VARIANTS, Tiny

from minisgl.kernel.cpu import load

CLOSE = {"rtol": 1e-4, "atol": 1e-4}
PROMPT = torch.randint(3, 199, (45,), generator=torch.Generator().manual_seed(1)).tolist()
OTHER = torch.randint(3, 199, (18,), generator=torch.Generator().manual_seed(2)).tolist()


needs_kernels = pytest.mark.skipif(load() is None, reason="no compiler for the CPU kernels")
both_backends = pytest.mark.parametrize("backend", ["torch", pytest.param("cpu", marks=needs_kernels)])


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_of_every_token(tiny: Callable[[str], Tiny], variant: str) -> None:
    case = tiny(variant)
    logits = Driver(case.model).step({0: PROMPT}, every_token=True)
    torch.testing.assert_close(logits, case.reference_logits(PROMPT), **CLOSE)


@needs_kernels
@pytest.mark.parametrize("variant", VARIANTS)
def test_greedy_ids(tiny: Callable[[str], Tiny], variant: str) -> None:
    """Each of 32 ids is transformers' choice after the ids before it, which makes the whole its greedy output."""
    case = tiny(variant)
    prompts = {0: PROMPT, 1: OTHER, 2: [77]}
    out = Driver(case.model, backend="cpu").greedy(prompts, steps=32)
    for row, prompt in prompts.items():
        expected = case.reference_logits(prompt + out[row]).argmax(-1).tolist()
        assert out[row] == expected[len(prompt) - 1 : -1]


@pytest.mark.parametrize("variant", VARIANTS)
def test_chunks_beside_a_decoding_request(tiny: Callable[[str], Tiny], variant: str) -> None:
    case = tiny(variant)
    driver = Driver(case.model)
    stream = [int(driver.step({1: OTHER}).argmax())]
    done = 0
    for size in (5, 1, 17, 9, 13):
        step = {1: stream[-1:], 0: PROMPT[done : done + size]}
        order = sorted(step, key=lambda row: len(step[row]) != 1)
        logits = driver.step(step)
        done += size
        stream.append(int(logits[order.index(1)].argmax()))
        torch.testing.assert_close(logits[order.index(0)], case.reference_logits(PROMPT[:done])[-1], **CLOSE)
    assert done == len(PROMPT)
    expected = case.reference_logits(OTHER + stream).argmax(-1).tolist()
    assert stream == expected[len(OTHER) - 1 : -1]


@both_backends
@pytest.mark.parametrize("variant", VARIANTS)
def test_cached_prefix(tiny: Callable[[str], Tiny], variant: str, backend: str) -> None:
    case = tiny(variant)
    driver = Driver(case.model, backend=backend)
    driver.step({0: PROMPT})
    driver.share(1, 0, 24)
    tail = OTHER[:7]
    logits = driver.step({1: tail})
    torch.testing.assert_close(logits[0], case.reference_logits(PROMPT[:24] + tail)[-1], **CLOSE)


@both_backends
@pytest.mark.parametrize("page_size", [1, 3, 16, 64])
@pytest.mark.parametrize("variant", ["llama", "mistral-window"])
def test_page_sizes(tiny: Callable[[str], Tiny], variant: str, page_size: int, backend: str) -> None:
    case = tiny(variant)
    driver = Driver(case.model, backend=backend, page_size=page_size, num_pages=256 // page_size)
    driver.step({0: PROMPT[:20], 1: OTHER})
    logits = driver.step({1: [5], 0: PROMPT[20:]})
    torch.testing.assert_close(logits[0], case.reference_logits([*OTHER, 5])[-1], **CLOSE)
    torch.testing.assert_close(logits[1], case.reference_logits(PROMPT)[-1], **CLOSE)


@needs_kernels
@pytest.mark.parametrize("variant", ["llama", "llama-yarn", "qwen2-window", "qwen3", "qwen3-moe"])
def test_bits_do_not_depend_on_the_batch(tiny: Callable[[str], Tiny], variant: str) -> None:
    """With the CPU kernels a row is the same, bit for bit, alone or beside others, in one chunk or in several."""
    case = tiny(variant)
    alone = Driver(case.model, backend="cpu").step({0: PROMPT})[0]
    crowd = Driver(case.model, backend="cpu", page_size=7, seed=5)
    crowd.step({0: PROMPT[:13], 1: OTHER, 2: [3, 4]})
    crowd.step({1: [9], 0: PROMPT[13:30], 3: [8] * 11})
    together = crowd.step({1: [9], 2: [5], 0: PROMPT[30:]})[2]
    assert torch.equal(alone, together)


def test_only_asked_for_logits(tiny: Callable[[str], Tiny]) -> None:
    """A chunk in mid-prompt yields no logits, and its neighbours' are unmoved."""
    case = tiny("llama")
    driver = Driver(case.model)
    assert driver.step({0: PROMPT[:10]}, sampled=[]).shape == (0, 199)
    logits = driver.step({1: OTHER, 0: PROMPT[10:20]}, sampled=[0])
    torch.testing.assert_close(logits, case.reference_logits(OTHER)[-1:], **CLOSE)
    logits = driver.step({0: PROMPT[20:]})
    torch.testing.assert_close(logits, case.reference_logits(PROMPT)[-1:], **CLOSE)


@pytest.mark.parametrize("variant", ["mistral-window", "qwen2-window", "qwen3-tied-window"])
def test_windows_matter_here(tiny: Callable[[str], Tiny], variant: str) -> None:
    """The tests above would notice if the window were ignored, or were in the wrong layers."""
    case = tiny(variant)
    windows = case.config.sliding_windows
    assert len(set(windows)) == (1 if variant.startswith("mistral") else 2)
    whole = case.reference.config.sliding_window
    assert windows == tuple(getattr(layer.self_attn, "sliding_window", whole) for layer in case.reference.model.layers)
    blind = {layer.self_attn: layer.self_attn.spec for layer in case.model.model.layers}
    try:
        for attention, spec in blind.items():
            attention.spec = type(spec)(**{**{n: getattr(spec, n) for n in spec.__slots__}, "sliding_window": None})
        logits = Driver(case.model).step({0: PROMPT})
    finally:
        for attention, spec in blind.items():
            attention.spec = spec
    assert (logits - case.reference_logits(PROMPT)[-1]).abs().max() > 0.05
