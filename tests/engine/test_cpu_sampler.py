from __future__ import annotations

import numpy as np
import pytest
import torch

from minisgl.core import PENDING, Penalties, Sampling
from minisgl.engine.cpu_sampler import CpuSampler
from minisgl.engine.load import make_sampler
from minisgl.engine.sampler import sampling_arrays
from minisgl.engine.torch_sampler import TorchSampler
from minisgl.kernel.cpu import load

CPU = torch.device("cpu")
ROWS, VOCAB = 60, 2000


@pytest.fixture
def params() -> Sampling:
    """Rows of all kinds: greedy, plain, and with every mix of filters."""
    rng = np.random.default_rng(1)
    return Sampling(
        index=np.arange(ROWS, dtype=np.int32),
        temperature=rng.choice([0.0, 1e-6, 0.5, 1.0, 2.0], ROWS).astype(np.float32),
        top_k=rng.choice([-1, 0, 1, 2, 50, 3000], ROWS).astype(np.int32),
        top_p=rng.choice([0.3, 0.9, 1.0], ROWS).astype(np.float32),
        min_p=rng.choice([0.0, 0.05], ROWS).astype(np.float32),
        uniform=rng.random(ROWS).astype(np.float32),
    )


def test_a_cpu_samples_with_its_kernels() -> None:
    assert isinstance(make_sampler(VOCAB, ROWS, CPU), CpuSampler)


@pytest.mark.parametrize("penalised", [False, True])
def test_same_tokens_as_plain_torch(params: Sampling, penalised: bool) -> None:
    if penalised:
        ones = np.ones(2, np.float32)
        params.penalties = Penalties(
            index=np.array([3, 40], np.int32),
            history=np.array([1, 2, 3, 3, 3, 9, PENDING], np.int32),
            offsets=np.array([0, 5, 7], np.int32),
            prompt_lens=np.array([2, 1], np.int32),
            presence=ones / 2,
            frequency=ones / 4,
            repetition=ones * 2,
        )
    arrays = sampling_arrays(params, np.arange(ROWS, dtype=np.int32))
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    logits = 3 * torch.randn(ROWS, VOCAB, generator=torch.Generator().manual_seed(2))
    last_token = torch.full((ROWS + 1,), 7, dtype=torch.int32)
    kernels = load()
    assert kernels is not None
    mine = CpuSampler(kernels, VOCAB, ROWS, CPU)(logits.clone(), tensors, last_token)
    assert torch.equal(mine, TorchSampler(VOCAB, ROWS, CPU)(logits, tensors, last_token))
