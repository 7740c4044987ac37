from __future__ import annotations

from typing import Any

import numpy as np
from engine_driver import int32

from minisgl.core import Batch, Sampling, TableUpdate
from minisgl.engine.step_plan import NOT_FINITE, plan_step


def batch(
    rows: list[int], cached: list[int], ids: list[list[int]], sampled: list[int], update: Any = ((), (), ())
) -> Batch:
    count = len(sampled)
    zeros = np.zeros(count, np.float32)
    return Batch(
        rows=int32(rows),
        cached=int32(cached),
        new=int32([len(i) for i in ids]),
        input_ids=int32([token for i in ids for token in i]),
        table=TableUpdate(*(int32(column) for column in update)),
        sampling=Sampling(int32(sampled), zeros, int32([0] * count), zeros + 1, zeros, zeros),
    )


def test_a_mixed_step() -> None:
    plan = plan_step(
        batch([4, 2, 0], [7, 31, 64], [[-1], [9], [1, 2, 3]], [0, 2], ([4, 0], [1, 16], [50, 51])), max_pages_per_req=20
    )
    sampling = ("temperature", "top_k", "top_p", "min_p", "uniform")
    assert all(len(plan.arrays[name]) == 2 for name in sampling)
    arrays = {name: array.tolist() for name, array in plan.arrays.items() if name not in sampling}
    assert arrays == {
        "rows": [4, 2, 0],
        "cached": [7, 31, 64],
        "seq_lens": [8, 32, 67],
        "cu_new": [0, 1, 2, 5],
        "input_ids": [-1, 9, 1, 2, 3],
        "positions": [7, 31, 64, 65, 66],
        "token_rows": [4, 2, 0, 0, 0],
        "sampled_table_rows": [4, 0],
        "logit_index": [0, 4],
        "table_index": [4 * 20 + 1, 16],
        "table_pages": [50, 51],
    }
    assert (plan.size, plan.num_tokens, plan.host.num_single) == (3, 5, 2)


def test_single_tokens_need_no_index() -> None:
    plan = plan_step(batch([1, 0], [3, 5], [[8], [7]], [0, 1]), max_pages_per_req=4)
    assert not {"logit_index", "table_index", "table_pages"} & plan.arrays.keys()


def test_what_is_sampled_comes_back_by_request() -> None:
    plan = plan_step(batch([4, 2, 0, 1], [0, 0, 0, 0], [[5], [9], [1, 2, 3], [4, 4]], [0, 2, 3]), max_pages_per_req=4)
    result = plan.result(int32([10, 11, 12]))
    assert (result.ids.tolist(), result.counts.tolist(), result.failed) == ([10, 11, 12], [1, 0, 1, 1], {})
    result = plan.result(int32([10, -1, 12]))
    assert (result.ids.tolist(), result.counts.tolist(), result.failed) == ([10, 12], [1, 0, 0, 1], {2: NOT_FINITE})
