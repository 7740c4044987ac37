from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minisgl.core import PENDING, Penalties, Sampling
from minisgl.engine.cutoff import BLOCK, smallest_kept
from minisgl.engine.sampler import sampling_arrays
from minisgl.engine.torch_sampler import TorchSampler, inverse_cdf

CPU = torch.device("cpu")
CASES = {
    "greedy": {"temperature": 0.0},
    "plain": {},
    "hot": {"temperature": 1.7},
    "top_k": {"top_k": 7},
    "top_k above the quick path": {"top_k": 400},
    "top_p": {"top_p": 0.8},
    "top_p of a flat row": {"top_p": 0.9, "temperature": 30.0},
    "min_p": {"min_p": 0.1},
    "all": {"temperature": 0.7, "top_k": 50, "top_p": 0.9, "min_p": 0.02},
}


def sampling(rows: list[dict[str, float]], uniform: np.ndarray | None = None) -> Sampling:
    def column(name: str, default: float, dtype: type = np.float32) -> np.ndarray:
        return np.array([row.get(name, default) for row in rows], dtype)

    if uniform is None:
        uniform = np.random.default_rng(len(rows)).random(len(rows))
    return Sampling(
        index=np.arange(len(rows), dtype=np.int32),
        temperature=column("temperature", 1.0),
        top_k=column("top_k", 0, np.int32),
        top_p=column("top_p", 1.0),
        min_p=column("min_p", 0.0),
        uniform=uniform.astype(np.float32),
    )


def sample(logits: torch.Tensor, params: Sampling) -> list[int]:
    arrays = sampling_arrays(params, np.arange(len(params.index), dtype=np.int32))
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    last_token = torch.zeros(len(logits) + 1, dtype=torch.int32)
    with torch.inference_mode():
        return TorchSampler(logits.shape[1], len(logits), CPU)(logits.clone(), tensors, last_token).tolist()


def filtered(logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """The distribution that is sampled from, straight from the definition, in fp64."""
    scaled = logits.astype(np.float64) / temperature
    prob = np.exp(scaled - scaled.max())
    prob /= prob.sum()
    down = np.sort(prob)[::-1]
    if top_k > 0:
        down = down[:top_k]
    reach = np.searchsorted(np.cumsum(down), top_p * down.sum()) if top_p < 1 else len(down) - 1
    prob[prob < max(down[min(reach, len(down) - 1)], min_p * down[0])] = 0
    return prob / prob.sum()


@pytest.mark.parametrize("case", [c for c in CASES if c != "greedy"])
def test_frequencies_are_the_filtered_distribution(case: str) -> None:
    # One uniform number in the middle of each of n equal intervals: inverse CDF must hit each token n * p times, give
    # or take the two intervals that straddle its ends.
    n, vocab = 4096, 1000
    params = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | CASES[case]
    logits = np.random.default_rng(3).normal(0, 2, vocab).astype(np.float32)
    expected = filtered(logits, **params)
    uniform = (np.arange(n) + 0.5) / n
    ids = sample(torch.from_numpy(logits).repeat(n, 1), sampling([params] * n, uniform))
    counts = np.bincount(ids, minlength=vocab)
    assert np.abs(counts - n * expected).max() < 1.05
    assert not counts[expected == 0].any()


def test_random_uniforms_pass_a_chi_square_test() -> None:
    n, vocab = 20_000, 40
    logits = np.random.default_rng(5).normal(0, 1.5, vocab).astype(np.float32)
    expected = n * filtered(logits, 0.8, 20, 0.95, 0.0)
    uniform = np.random.default_rng(6).random(n)
    row = {"temperature": 0.8, "top_k": 20, "top_p": 0.95}
    ids = sample(torch.from_numpy(logits).repeat(n, 1), sampling([row] * n, uniform))
    counts = np.bincount(ids, minlength=vocab)
    kept = expected > 0
    degrees = kept.sum() - 1
    chi_square = ((counts - expected)[kept] ** 2 / expected[kept]).sum()
    assert counts[~kept].sum() == 0
    assert chi_square < degrees + 4 * np.sqrt(2 * degrees)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    spread=st.sampled_from([0.0, 0.3, 1.0, 4.0, 12.0]),
    grid=st.sampled_from([0.0, 0.5]),
    top_k=st.sampled_from([0, 1, 2, 50, 255, 256, 257, 900, 5000]),
    top_p=st.sampled_from([1.0, 0.999999, 0.95, 0.5, 1e-6]),
    min_p=st.sampled_from([0.0, 0.05, 1.0]),
)
def test_the_cutoff_is_where_the_definition_puts_it(
    seed: int, spread: float, grid: float, top_k: int, top_p: float, min_p: float
) -> None:
    logits = np.random.default_rng(seed).normal(0, spread, 4 * BLOCK).astype(np.float32)
    if grid:  # many ties
        logits = np.round(logits / grid) * np.float32(grid)
    prob = torch.from_numpy(logits).softmax(-1)[None]
    tensors = {
        "top_k": torch.tensor([top_k]),
        "top_p": torch.tensor([top_p], dtype=torch.float32),
        "min_p": torch.tensor([min_p], dtype=torch.float32),
    }
    cutoff = smallest_kept(prob, **tensors).item()
    down = np.sort(prob[0].numpy().astype(np.float64))[::-1]
    allowed = down[:top_k] if top_k else down
    above = allowed[allowed > cutoff].sum()  # what is kept beyond doubt; the last kept value makes it enough
    reach = allowed[allowed >= cutoff].sum()
    total = allowed.sum() if top_k else 1.0
    slack = 1e-5
    if min_p * down[0] > cutoff * (1 + 1e-6):
        pytest.fail("min_p is not respected")
    if cutoff > down[0] * min_p * (1 + 1e-6):
        assert top_k or top_p < 1
        assert reach >= min(top_p, 1 - 1e-5) * total - slack
        if top_p < 1 and cutoff > allowed[-1]:
            assert above <= top_p * total + slack
    if top_k:
        assert cutoff >= allowed[-1]
        if top_p == 1 and not min_p:
            assert cutoff == allowed[-1]


@pytest.mark.parametrize("vocab", [300, 49152])
def test_a_row_is_bitwise_the_same_beside_any_others(vocab: int) -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(33, vocab, generator=generator) * 3
    params = list(CASES.values())
    prob = (logits / 0.7).softmax(-1)
    width = -(-vocab // BLOCK) * BLOCK
    padded = torch.nn.functional.pad(prob, (0, width - vocab))
    top = {
        "top_k": torch.tensor([0, 40, 300] * 11),
        "top_p": torch.tensor([0.9, 1.0, 0.999] * 11),
        "min_p": torch.zeros(33),
    }
    cutoff = smallest_kept(padded, **top)
    rows = [params[i % len(params)] for i in range(33)]
    uniform = np.random.default_rng(2).random(33)
    together = sample(logits, sampling(rows, uniform))
    for i in range(33):
        assert torch.equal((logits[i : i + 1] / 0.7).softmax(-1)[0], prob[i])
        one = {name: value[i : i + 1] for name, value in top.items()}
        # Alone, and without what only the neighbours ask for.
        alone = smallest_kept(padded[i : i + 1], **one)
        assert torch.equal(alone, cutoff[i : i + 1])
        assert sample(logits[i : i + 1], sampling([rows[i]], uniform[i : i + 1])) == together[i : i + 1]
    for size in (2, 5, 32):
        assert sample(logits[:size], sampling(rows[:size], uniform[:size])) == together[:size]


def test_the_number_of_threads_changes_no_bit() -> None:
    logits = torch.randn(1, 1024 * BLOCK, generator=torch.Generator().manual_seed(4))
    tensors = {"top_k": torch.tensor([0]), "top_p": torch.tensor([0.9]), "min_p": torch.tensor([0.0])}
    before = torch.get_num_threads()
    cutoffs = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            cutoffs.append(smallest_kept(logits.softmax(-1), **tensors))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(cutoffs[0], cutoffs[1])
    assert torch.equal(cutoffs[0], cutoffs[2])


def test_greedy_takes_the_lowest_of_equal_logits_and_the_limits_are_greedy_too() -> None:
    logits = torch.zeros(4, 600)
    logits[:, [77, 400, 599]] = 5.0
    rows = [{"temperature": 0.0}, {"temperature": 1e-9}, {"top_k": 1}, {"temperature": 0.0, "top_p": 0.1}]
    assert sample(logits, sampling(rows, np.full(4, 0.99))) == [77] * 4


def test_ties_at_the_cutoff_are_all_kept() -> None:
    logits = torch.zeros(1, 300)
    logits[0, [5, 10, 20, 30]] = torch.tensor([9.0, 8.0, 8.0, 8.0])
    rows = [{"top_k": 2}] * 400
    ids = sample(logits.repeat(400, 1), sampling(rows, (np.arange(400) + 0.5) / 400))
    assert set(ids) == {5, 10, 20, 30}


@pytest.mark.parametrize("uniform", [0.0, float(np.float32(1) - np.float32(2**-24))])
def test_the_ends_of_the_unit_interval_pick_a_token_that_may_be_picked(uniform: float) -> None:
    weights = torch.zeros(3, 4, BLOCK)
    weights[0, 2, 7] = 1e-30
    weights[1, 1, 3], weights[1, 3, BLOCK - 1] = 0.5, 0.5
    weights[2, 0] = torch.rand(BLOCK) * (torch.rand(BLOCK) < 0.3)
    weights[2, 3, :9] = 1e-12
    ids = inverse_cdf(weights, torch.full((3,), uniform))
    assert (weights.view(3, -1).gather(1, ids.long()[:, None]) > 0).all()
    assert ids[1] == (BLOCK + 3 if uniform == 0 else 4 * BLOCK - 1)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("case", list(CASES))
def test_a_row_that_is_not_finite_fails_alone(case: str, bad: float) -> None:
    logits = torch.randn(3, 700, generator=torch.Generator().manual_seed(8))
    params = sampling([CASES[case]] * 3)
    good = sample(logits, params)
    broken = logits.clone()
    broken[1, 650] = bad
    assert sample(broken, params) == [good[0], -1, good[2]]
    assert min(good) >= 0


def test_tokens_of_minus_infinity_are_never_sampled() -> None:
    logits = torch.full((2, 513), -torch.inf)
    logits[0, 512], logits[1, 3] = -50.0, 0.0
    assert sample(logits, sampling([{}, {"top_k": 300, "top_p": 0.9}])) == [512, 3]


def penalised(logits: np.ndarray, prompt: list[int], output: list[int], p: float, f: float, r: float) -> np.ndarray:
    """Penalties token by token, from their definitions."""
    result = logits.astype(np.float64).copy()
    for token in set(prompt) | set(output):
        result[token] = result[token] / r if result[token] > 0 else result[token] * r
    for token in set(output):
        result[token] -= f * output.count(token) + p
    return result


def test_penalties_follow_their_definitions() -> None:
    vocab, generator = 30, np.random.default_rng(12)
    logits = generator.normal(0, 2, (5, vocab)).astype(np.float32)
    prompts = [[1, 2, 2, 29], [], [4, 5, 4]]
    outputs = [[2, 7, 7, 7], [0, 0], [6, PENDING]]
    penalty = [(0.5, 0.25, 1.0), (0.0, 0.0, 1.3), (1.5, -0.5, 1.1)]
    index, last_token = [0, 2, 3], [11, 12, 13, 6, 15, 16]
    history = [p + o for p, o in zip(prompts, outputs, strict=True)]
    params = sampling([{"temperature": 0.0}] * 5)
    params.penalties = Penalties(
        index=np.array(index, np.int32),
        history=np.concatenate(history).astype(np.int32),
        offsets=np.cumsum([0] + [len(h) for h in history]).astype(np.int32),
        prompt_lens=np.array([len(p) for p in prompts], np.int32),
        presence=np.array([p for p, _, _ in penalty], np.float32),
        frequency=np.array([f for _, f, _ in penalty], np.float32),
        repetition=np.array([r for _, _, r in penalty], np.float32),
    )
    expected = logits.astype(np.float64)
    for i, prompt, output, values in zip(index, prompts, outputs, penalty, strict=True):
        seen = [6 if token == PENDING else token for token in output]
        expected[i] = penalised(logits[i], prompt, seen, *values)

    arrays = sampling_arrays(params, np.arange(5, dtype=np.int32))
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    sampler = TorchSampler(vocab, 5, CPU)
    for _ in range(2):  # the second time finds the counts of the first undone
        result = torch.from_numpy(logits.copy())
        ids = sampler(result, tensors, torch.tensor(last_token, dtype=torch.int32))
        np.testing.assert_allclose(result.numpy(), expected, rtol=1e-5, atol=1e-6)
        assert ids.tolist() == expected.argmax(-1).tolist()
