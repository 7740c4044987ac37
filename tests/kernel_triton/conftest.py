"""Kernels run on the GPU where there is one, else in Triton's interpreter on small CPU tensors."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before the first import of a kernel


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        for item in items:
            if Path(__file__).parent in item.path.parents:
                item.add_marker(pytest.mark.gpu)


@pytest.fixture(autouse=True)
def poison() -> Iterator[None]:
    """Fills every tensor that is made without a value with NaN, so that what a kernel does not write shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def on_gpu(device: torch.device) -> bool:
    return device.type == "cuda"


@pytest.fixture
def rng() -> torch.Generator:
    """Fresh inputs in every run: what holds for one seed only does not hold. The seed is shown when a test fails."""
    generator = torch.Generator()
    print("seed", generator.seed())
    return generator
