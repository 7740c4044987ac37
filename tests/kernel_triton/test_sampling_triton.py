"""The sampler against its definition, token by token."""

from __future__ import annotations

import pytest
import torch
from helpers_triton import randn

from minisgl.kernel.triton.sampling import CHUNK, COLLECT, sample


def parameters(rows, device, **given):
    """Greedy, unless given otherwise: a number for all rows or a list."""
    out = []
    for name, dtype, default in (
        ("temperature", torch.float32, 0.0),
        ("top_k", torch.int32, 0),
        ("top_p", torch.float32, 1.0),
        ("min_p", torch.float32, 0.0),
        ("uniform", torch.float32, 0.0),
    ):
        value = given.get(name, default)
        values = value if isinstance(value, list) else [value] * rows
        out.append(torch.tensor(values, dtype=dtype, device=device))
    return out


def kept(logits, temperature, top_k, top_p, min_p):
    """Which tokens of one row stay, straight from the definition in minisgl.engine.cutoff, in float64."""
    p = (logits.double() / temperature).softmax(-1)
    ordered = p.sort(descending=True).values
    cutoff = min_p * ordered[0]
    total = torch.ones((), dtype=torch.float64)
    if 0 < top_k < len(p):
        cutoff = torch.maximum(cutoff, ordered[top_k - 1])
        total = ordered[:top_k].sum()
    if top_p < 1:
        enough = ordered.cumsum(0) >= top_p * total.to(p.device) - 1e-12
        cutoff = torch.maximum(cutoff, ordered[enough.int().argmax()])
    return torch.where(p >= cutoff * (1 - 1e-12), p, 0)


def check_sampled(logits, ids, temperature, top_k, top_p, min_p, uniform, slack=3e-6):
    """Each id is where the cumulative mass passes u, as far as float32 can tell."""
    for row in range(len(logits)):
        p = kept(logits[row], float(temperature[row]), int(top_k[row]), float(top_p[row]), float(min_p[row]))
        cdf = p.cumsum(0) / p.sum()
        token = int(ids[row])
        assert p[token] > 0, f"row {row}: token {token} was filtered out"
        before = cdf[token - 1] if token else 0.0
        assert before - slack <= uniform[row] <= cdf[token] + slack, f"row {row}"


def vocab(on_gpu):
    return 151936 if on_gpu else CHUNK + 500


def test_greedy_takes_the_first_of_the_best(rng, device, on_gpu):
    logits = randn(rng, 4, vocab(on_gpu), dtype=torch.float32, device=device)
    logits[0, 7] = logits[0, CHUNK + 3] = logits[0, 4] = 100
    logits[1, -1] = 100
    logits[2, :] = 0.5
    ids = sample(logits, *parameters(4, device, temperature=[0, 0, 0, 1.0], top_k=[0, 0, 0, 1]))
    assert ids.tolist() == [4, logits.shape[1] - 1, 0, int(logits[3].argmax())]
    assert (ids >= 0).all()


def test_plain_rows_are_the_inverse_cdf(rng, device, on_gpu):
    for dtype in (torch.float32, torch.bfloat16):
        logits = 3 * randn(rng, 5, vocab(on_gpu), dtype=torch.float32, device=device).to(dtype)
        uniform = [0.0, 0.25, 0.5, 0.999, 1 - 2**-24]
        given = parameters(5, device, temperature=[0.5, 1.0, 2.0, 1.0, 0.7], uniform=uniform)
        ids = sample(logits, *given)
        assert (ids >= 0).all()
        check_sampled(logits, ids, *given)


@pytest.mark.parametrize("spread", [0.1, 1.0, 6.0], ids=["flat", "normal", "peaked"])
def test_filters(rng, device, on_gpu, spread):
    """Top-k, top-p and min-p, alone and together, some in the same batch as rows without; more kept than is
    collected.
    """
    rows = [
        {"top_k": 40},
        {"top_p": 0.9},
        {"min_p": 0.05},
        {"top_k": 50, "top_p": 0.8},
        {"top_k": 200, "top_p": 0.95, "min_p": 0.01},
        {"top_k": COLLECT + 700},
        {"top_k": COLLECT + 700, "top_p": 0.97},
        {"top_p": 0.01},
        {},
    ]
    if not on_gpu:
        rows = rows[:-3] if spread == 1.0 else rows[3:7]
    n = len(rows)
    logits = spread * randn(rng, n, vocab(on_gpu), dtype=torch.float32, device=device)
    given = parameters(
        n,
        device,
        temperature=[1.0 + 0.1 * i for i in range(n)],
        uniform=torch.rand(n, generator=rng).tolist(),
        top_k=[row.get("top_k", 0) for row in rows],
        top_p=[row.get("top_p", 1.0) for row in rows],
        min_p=[row.get("min_p", 0.0) for row in rows],
    )
    ids = sample(logits, *given)
    assert (ids >= 0).all()
    check_sampled(logits, ids, *given, slack=2e-5)


def test_ends_of_the_kept_set_are_exact(device, on_gpu):
    """With u just under 1 the last kept token is drawn, so a cut-off that keeps one too many or too few shows."""
    size = vocab(on_gpu)
    logits = torch.full((4, size), -50.0, device=device)
    logits[:, 10:20] = torch.arange(10, 0, -1.0, device=device)  # token 10 is the likeliest, 19 the least likely
    logits[3, 10:20] = 1.0  # all equal: they stay together
    given = parameters(4, device, temperature=1.0, uniform=1 - 2**-24, top_k=[3, 0, 5, 3], top_p=[1.0, 0.9, 0.9, 1.0])
    ids = sample(logits, *given)
    # top_p 0.9: the first two of a geometric series with ratio 1/e have 0.865, three have 0.95
    assert ids.tolist() == [12, 12, 12, 19]


def test_many_equal_tokens_end_the_search(device, on_gpu):
    size = vocab(on_gpu)
    logits = torch.zeros(2, size, device=device)
    given = parameters(2, device, temperature=1.0, uniform=0.5, top_k=[7, 0], top_p=[1.0, 0.3])
    ids = sample(logits, *given)
    assert abs(ids - size // 2).max() <= 2


def test_impossible_tokens_are_never_drawn(device, on_gpu):
    size = vocab(on_gpu)
    logits = torch.full((3, size), float("-inf"), device=device)
    logits[:, 5] = 1.0
    logits[:, CHUNK + 9] = 1.0
    given = parameters(3, device, temperature=1.0, uniform=[0.0, 0.75, 0.75], top_k=[0, 0, 100], top_p=[1.0, 1.0, 0.99])
    ids = sample(logits, *given)
    assert ids.tolist() == [5, CHUNK + 9, CHUNK + 9]
    assert (ids >= 0).all()


def test_rows_that_are_not_finite_fail_alone(rng, device, on_gpu):
    size = vocab(on_gpu)
    logits = randn(rng, 6, size, dtype=torch.float32, device=device)
    logits[0, size - 1] = float("nan")
    logits[1, 3] = float("inf")
    logits[2] = float("-inf")
    logits[3] = float("nan")
    temperature = [1.0, 1.0, 1.0, 0.0, 1.0, 0.0]
    ids = sample(logits, *parameters(6, device, temperature=temperature, top_p=0.9, uniform=0.3))
    assert (ids < 0).tolist() == [True, True, True, True, False, False]
    assert (ids[:4] == -1).all()


def test_row_does_not_depend_on_the_others(rng, device, on_gpu):
    logits = randn(rng, 3, vocab(on_gpu), dtype=torch.float32, device=device)
    given = parameters(3, device, temperature=[1.0, 0.0, 0.8], top_k=[20, 0, 0], uniform=[0.1, 0.5, 0.9])
    together = sample(logits, *given)
    alone = [int(sample(logits[i : i + 1], *(t[i : i + 1] for t in given))) for i in range(3)]
    assert together.tolist() == alone
