"""The embedded default model, greedy, against what transformers 5.24.0 makes of the same file in float32."""

# fmt: off
from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from serving import serve, user

from minisgl.core import SamplingParams
from minisgl.engine.config import EngineConfig
from minisgl.engine.engine import TorchEngine
from minisgl.message import BackendMsg

LENGTH = 48

# (prompt, answer): nine plain prompts and one from the chat template.
GOLDEN = [
    (
        [  # The capital of France is
            504, 3575, 282, 4649, 314,
        ],
        [  # transformers' answer
            7042, 30, 198, 198, 504, 2988, 314, 42, 216, 34, 32, 33, 40, 29, 32, 33, 29, 34, 34, 216, 33, 34, 42, 33,
            34, 42, 37, 35, 30, 2, 198, 1, 520, 9531, 198, 504, 2988, 314, 42, 216, 34, 32, 33, 40, 29, 32, 33, 29,
        ],
    ),
    (
        [  # Once upon a time, in a village by the sea,
            6403, 1980, 253, 655, 28, 281, 253, 6560, 411, 260, 3426, 28,
        ],
        [  # transformers' answer
            665, 436, 253, 4197, 3365, 3261, 3906, 4075, 30, 2306, 436, 253, 915, 284, 3506, 14653, 28, 617, 10832, 874,
            10054, 351, 2606, 284, 11347, 30, 2306, 761, 253, 3953, 7388, 3365, 330, 5484, 28, 617, 436, 253, 12833,
            284, 12833, 22873, 30, 198, 198, 2705, 1194, 28,
        ],
    ),
    (
        [  # def fibonacci(n):\n
            1604, 3987, 46477, 24, 94, 727, 198,
        ],
        [  # transformers' answer
            198, 1604, 3987, 46477, 24, 94, 727, 472, 585, 304, 10204, 216, 33, 42, 448, 1003, 304, 472, 1745, 42, 448,
            1003, 3987, 46477, 24, 94, 731, 216, 33, 25, 1232, 3987, 46477, 24, 94, 731, 216, 34, 25, 198, 198, 3272,
            24, 38572, 46477, 24, 33, 32,
        ],
    ),
    (
        [  # Q: What is 17 + 25?\nA:
            65, 42, 1812, 314, 216, 33, 39, 1232, 216, 34, 37, 47, 198, 49, 42,
        ],
        [  # transformers' answer
            216, 33, 39, 1232, 216, 34, 37, 446, 216, 35, 34, 198, 198, 504, 2988, 314, 42, 216, 35, 34, 2, 198, 2, 1,
            9690, 198, 2, 198, 1, 4093, 198, 57, 5248, 3946, 288, 7198, 253, 725, 1406, 28, 253, 5069, 1478, 3292, 817,
            30, 339, 3543,
        ],
    ),
    (
        [  # The three primary colours are
            504, 1296, 3003, 14797, 359,
        ],
        [  # transformers' answer
            260, 3003, 14797, 282, 260, 1205, 3323, 42, 2382, 28, 4461, 28, 284, 5724, 30, 1216, 359, 260, 805, 1296,
            4683, 338, 1822, 6099, 281, 260, 6128, 30, 198, 198, 504, 1205, 3323, 314, 5181, 282, 45322, 253, 3599,
            1845, 282, 4683, 28, 564, 357, 506, 3435, 288,
        ],
    ),
    (
        [  # Dear Sir or Madam,\n\nI am writing to
            35097, 8957, 355, 7473, 332, 28, 198, 198, 57, 744, 2385, 288,
        ],
        [  # transformers' answer
            346, 1834, 28, 198, 198, 57, 744, 2385, 288, 346, 1834, 28, 198, 198, 57, 744, 2385, 288, 346, 1834, 28,
            198, 198, 57, 744, 2385, 288, 346, 1834, 28, 198, 198, 57, 744, 2385, 288, 346, 1834, 28, 198, 198, 57, 744,
            2385, 288, 346, 1834, 28,
        ],
    ),
    (
        [  # Water boils at 100 degrees
            12615, 36411, 418, 216, 33, 32, 32, 5027,
        ],
        [  # transformers' answer
            20590, 28, 527, 314, 4723, 216, 34, 33, 34, 5027, 21391, 30, 198, 198, 504, 913, 281, 260, 2591, 506, 10959,
            314, 4723, 216, 33, 32, 32, 21, 8168, 282, 913, 30, 669, 314, 1701, 357, 506, 588, 1990, 288, 1042, 253,
            2244, 4047, 338, 314, 441, 1135,
        ],
    ),
    (
        [  # In 1969, the first
            788, 216, 33, 41, 38, 41, 28, 260, 808,
        ],
        [  # transformers' answer
            655, 253, 4263, 436, 9069, 288, 260, 2038, 4699, 282, 21912, 30, 198, 198, 504, 216, 34, 32, 34, 34, 8339,
            3680, 260, 808, 4263, 8991, 9069, 288, 260, 2038, 4699, 282, 21912, 30, 198, 198, 504, 216, 34, 32, 34, 34,
            8339, 3680, 260, 808, 4263, 8991,
        ],
    ),
    (
        [  # 1, 1, 2, 3, 5, 8,
            33, 28, 216, 33, 28, 216, 34, 28, 216, 35, 28, 216, 37, 28, 216, 40, 28,
        ],
        [  # transformers' answer
            216, 33, 35, 28, 216, 33, 38, 28, 216, 34, 32, 28, 216, 34, 41, 28, 216, 35, 38, 28, 216, 36, 41, 28, 216,
            38, 36, 28, 216, 40, 33, 28, 216, 33, 32, 37, 28, 216, 33, 39, 38, 28, 216, 34, 34, 33, 28, 216,
        ],
    ),
    (
        [  # chat
            1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407, 19712, 8182, 2,
            198, 1, 4093, 198, 4898, 314, 260, 6376, 4461, 47, 2, 198, 1, 520, 9531, 198,
        ],
        [  # transformers' answer
            504, 2988, 288, 451, 1962, 5721, 281, 260, 7564, 7180, 282, 1420, 284, 2380, 30, 378, 6376, 4541, 4461, 975,
            282, 253, 7613, 1343, 347, 13739, 43464, 24484, 30, 669, 4149, 645, 1420, 13242, 6756, 282, 1512, 28, 527,
            15802, 260, 9895, 20518, 282, 1420, 28, 2755, 260,
        ],
    ),
]
# fmt: on


ON_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, ON_GPU])])
def smollm2(default_model: Path, request: pytest.FixtureRequest) -> Iterator[TorchEngine]:
    config = EngineConfig(model_path=default_model, device=request.param, dtype="float32", num_pages=100)
    engine = TorchEngine(config)
    yield engine
    engine.close()


def answers(engine: TorchEngine, every: int) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=LENGTH)
    arrivals: dict[int, list[BackendMsg]] = {}
    for uid, (prompt, _) in enumerate(GOLDEN):
        arrivals.setdefault(uid * every, []).append(user(uid, prompt, params))
    out = serve(engine, arrivals)
    return [out[uid] for uid in range(len(GOLDEN))]


@pytest.mark.model
@pytest.mark.parametrize("every", [0, 3], ids=["at once", "one after the other"])
def test_greedy_answers_are_those_of_transformers(smollm2: TorchEngine, every: int) -> None:
    assert answers(smollm2, every) == [answer for _, answer in GOLDEN]


@pytest.mark.model
@pytest.mark.slow
def test_transformers_still_gives_the_golden_answers(default_model: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    shutil.copy(default_model, tmp_path / "model.gguf")
    model = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf", dtype=torch.float32)
    for prompt, answer in GOLDEN:
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            whole = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=LENGTH, do_sample=False, eos_token_id=None
            )
        assert whole[0, len(prompt) :].tolist() == answer
