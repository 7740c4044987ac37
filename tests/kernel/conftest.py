import pytest
import torch

from minisgl.kernel.cpu import CpuKernels, detect_isa, load

ISAS = ["portable", "avx2", "avx512"]
RUNNABLE = ISAS[: ISAS.index(detect_isa()) + 1]


@pytest.fixture(params=RUNNABLE)
def kernels(request: pytest.FixtureRequest) -> CpuKernels:
    """The CPU kernels, for every instruction set that this machine has."""
    kernels = load(request.param)
    assert kernels is not None, "the tests need g++"
    return kernels


@pytest.fixture(autouse=True)
def surroundings():
    """One thread, unless a test asks for more. Fresh tensors are full of NaN, so that what a kernel forgets shows."""
    before = torch.get_num_threads(), torch.utils.deterministic.fill_uninitialized_memory
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(before[0])
    torch.utils.deterministic.fill_uninitialized_memory = before[1]


@pytest.fixture
def threads():
    """Runs a function with some number of threads: ``threads(2, function)``."""

    def run(count, function):
        torch.set_num_threads(count)
        return function()

    return run
