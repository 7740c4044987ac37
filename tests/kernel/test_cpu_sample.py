import pytest
import torch

OFF = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}


def sample(kernels, logits, temperature=0.0, uniform=0.0, **filters):
    """All parameters are a number for all rows, or a list of one for each."""

    def column(value, dtype=torch.float32):
        return torch.tensor(value, dtype=dtype).expand(len(logits)).contiguous()

    filters = OFF | filters
    top_k = column(filters["top_k"], torch.int32)
    top_p, min_p = column(filters["top_p"]), column(filters["min_p"])
    return kernels.sample(logits, column(temperature), top_k, top_p, min_p, column(uniform))


def kept_by_sorting(logits, temperature, top_k, top_p, min_p):
    """The kept probabilities (V), float64, zero elsewhere: the definition word by word."""
    prob = (logits.double() / temperature).softmax(0)
    ordered = prob.sort(descending=True).values
    mass = ordered.cumsum(0)
    cutoff = min_p * ordered[0]
    total = 1.0
    if top_k > 0:
        last = min(top_k, len(prob)) - 1
        cutoff, total = max(cutoff, ordered[last]), mass[last]
    if top_p < 1:
        cutoff = max(cutoff, ordered[(mass >= top_p * total).nonzero()[0, 0]])
    return prob * (prob >= cutoff * (1 - 1e-9))


@pytest.mark.parametrize("width", [1, 5, 16, 1000, 49152])
def test_greedy(kernels, width):
    x = torch.randn(9, width)
    assert torch.equal(sample(kernels, x), x.argmax(dim=1).int())


def test_greedy_takes_the_lowest_of_equals(kernels):
    x = torch.zeros(1, 300)
    for index in (299, 170, 33, 20, 4):
        x[0, index] = 1
        assert sample(kernels, x).item() == index


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_logits_that_are_not_finite_fail_alone(kernels, temperature):
    x = torch.randn(5, 300)
    x[0, 299] = torch.nan
    x[1, 17] = torch.inf
    x[2] = -torch.inf
    x[3] = -torch.inf
    x[3, 123] = -5.0
    ids = sample(kernels, x, temperature, uniform=0.5).tolist()
    assert ids[:4] == [-1, -1, -1, 123]
    assert ids[4] >= 0


@pytest.mark.parametrize("width", [7, 1000, 49152])
@pytest.mark.parametrize(
    "filters",
    [{}, {"top_k": 5}, {"top_p": 0.9}, {"top_p": 0.05}, {"min_p": 0.1}, {"top_k": 50, "top_p": 0.8, "min_p": 0.01}],
)
def test_inverse_of_the_distribution_function(kernels, width, filters):
    torch.manual_seed(width)
    logits = 3 * torch.randn(width)
    kept = kept_by_sorting(logits, 0.8, *(OFF | filters).values())
    ends = kept.cumsum(0) / kept.sum()
    # The middle of every token's share, and a little inside of its two ends.
    tokens = kept.nonzero()[:, 0]
    share = kept[tokens] / kept.sum()
    tokens, share = tokens[share > 1e-4], share[share > 1e-4]
    if len(tokens) > 60:
        pick = torch.randperm(len(tokens))[:60]
        tokens, share = tokens[pick], share[pick]
    for inside in (0.02, 0.5, 0.98):
        uniform = (ends[tokens] - inside * share).tolist()
        ids = sample(kernels, logits.expand(len(tokens), -1).contiguous(), 0.8, uniform, **filters)
        assert ids.tolist() == tokens.tolist()


def test_ends_of_the_distribution(kernels):
    logits = torch.full((2, 1000), -torch.inf)
    logits[:, 300:700] = torch.randn(400)
    assert sample(kernels, logits, 1.0, [0.0, 1 - 2**-24]).tolist() == [300, 699]


def test_equals_stay_together(kernels):
    logits = torch.tensor([0.0, 1.0, 1.0, 1.0, -1.0]).expand(100, -1).contiguous()
    uniform = ((torch.arange(100) + 0.5) / 100).tolist()
    assert set(sample(kernels, logits, 1.0, uniform, top_k=1).tolist()) == {1}
    for filters in ({"top_k": 2}, {"top_p": 0.3}):
        assert set(sample(kernels, logits, 1.0, uniform, **filters).tolist()) == {1, 2, 3}


def test_cold_and_hot(kernels):
    logits = torch.randn(1, 2000)
    assert sample(kernels, logits, 1e-5, 0.3).item() == logits.argmax()
    ids = [sample(kernels, logits, 1e6, (i + 0.5) / 2000).item() for i in range(0, 2000, 97)]
    assert ids == list(range(0, 2000, 97))


def test_rows_do_not_depend_on_each_other_or_on_threads(kernels, threads):
    logits = torch.randn(40, 3000)
    uniform, temperature = torch.rand(40).tolist(), ([0.0, 0.5, 1.0, 2.0] * 10)
    filters = {"top_k": [0, 40] * 20, "top_p": [1.0] * 20 + [0.9] * 20, "min_p": [0.0, 0.0, 0.02, 0.0] * 10}
    whole = threads(2, lambda: sample(kernels, logits, temperature, uniform, **filters))
    for i in range(40):
        mine = {name: values[i] for name, values in filters.items()}
        assert sample(kernels, logits[i : i + 1], temperature[i], uniform[i], **mine).item() == whole[i]
