"""The launcher: what it remembers, and when it must not use it."""

from __future__ import annotations

import torch

from minisgl.kernel.triton.launch import Launcher


class Compiled:
    def __init__(self, log):
        self.log = log

    def __getitem__(self, grid):
        return lambda *arguments: self.log.append(("fast", grid, arguments[1:]))


class Kernel:
    """Stands in for a Triton function. Its first pointer must be aligned, its second need not be."""

    arg_names = ("x_ptr", "ids_ptr", "n", "A", "B", "PDL")
    do_not_specialize_on_alignment = ("ids_ptr",)

    def __init__(self):
        self.log = []

    def __getitem__(self, grid):
        def run(*arguments, **constants):
            self.log.append(("slow", grid, constants))
            return Compiled(self.log)

        return run


def kinds(kernel):
    return [entry[0] for entry in kernel.log]


def test_second_launch_passes_everything_in_order():
    kernel, x, ids = Kernel(), torch.empty(16), torch.empty(17)[1:]
    launcher = Launcher(kernel)
    launcher((3,), x, ids, 5, B="b", A="a", num_warps=4)
    launcher((7, 2), x, ids, 6, B="b", A="a", num_warps=4)
    assert kinds(kernel) == ["slow", "fast"]
    assert kernel.log[0][2] == {
        "B": "b", "A": "a", "num_warps": 4, "PDL": False, "launch_pdl": False, "enable_fp_fusion": True
    }  # fmt: skip
    _, grid, (same_ids, n, *constants) = kernel.log[1]
    assert grid == (7, 2, 1)
    assert same_ids is ids
    assert (n, constants) == (6, ["a", "b", False])


def test_variants_are_kept_apart():
    kernel, x = Kernel(), torch.empty(16)
    launcher = Launcher(kernel)
    launcher((1,), x, None, 5, A=1, B=2)
    launcher((1,), x, None, 5, A=1, B=3)
    launcher((1,), x, None, 5, A=1, B=2, pdl=True)
    launcher((1,), x.half(), None, 5, A=1, B=2)
    launcher((1,), x, None, 5, A=1, B=2, types=(torch.float16,))
    assert kinds(kernel) == ["slow"] * 5
    launcher((1,), x, None, 5, A=1, B=3)
    assert kernel.log[-1][2][2:] == (1, 3, False)


def test_pointers_off_the_grid_go_the_slow_way():
    kernel, x = Kernel(), torch.empty(16)
    launcher = Launcher(kernel)
    launcher((1,), x[1:], None, 5, A=1, B=2)
    launcher((1,), x, None, 5, A=1, B=2)
    launcher((1,), x[1:], None, 5, A=1, B=2)
    launcher((1,), x[4:], None, 5, A=1, B=2)
    assert kinds(kernel) == ["slow", "slow", "slow", "fast"]
