"""Whatever arrives, ends, is aborted or fails, and however little memory there is: every answer is the right one."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_harness import EOS, Harness, engine_info

from minisgl.engine.simulated import SimulatedModel

VOCAB = 40
POISON = 39

infos = st.builds(
    engine_info,
    num_pages=st.integers(3, 40),
    page_size=st.integers(1, 8),
    max_running_req=st.integers(1, 8),
    max_seq_len=st.integers(8, 80),
    vocab_size=st.just(VOCAB),
    token_budget=st.integers(1, 48),
)
models = st.builds(
    SimulatedModel,
    vocab_size=st.just(VOCAB),
    eos=st.just(EOS),
    eos_probability=st.sampled_from([0.0, 0.05, 0.3]),
    poison=st.sampled_from([frozenset(), frozenset(), frozenset({POISON})]),
)
arrivals = st.tuples(
    st.just("arrive"),
    st.integers(0, 2),  # which family of prompts: those of a family share prefixes
    st.integers(0, 50),  # how much of the family's text
    st.lists(st.integers(0, VOCAB - 1), max_size=4),  # the request's own end
    st.fixed_dictionaries(
        {
            "max_tokens": st.sampled_from([None, 1, 1, 2, 3, 8, 30]),
            "temperature": st.sampled_from([0.0, 1.0]),
            "seed": st.sampled_from([None, 5]),
            "frequency_penalty": st.sampled_from([0.0, 0.0, 0.5]),
        }
    ),
)
operations = st.one_of(
    arrivals,
    arrivals,
    st.tuples(st.just("abort"), st.integers(0, 30)),
    st.tuples(st.just("step"), st.integers(1, 6)),
)


def text(family: int, length: int) -> list[int]:
    return [(family * 17 + i * i + i // 3) % (VOCAB - 1) for i in range(length)]


@settings(max_examples=250, deadline=None)
@given(
    info=infos,
    model=models,
    cache=st.sampled_from(["radix", "radix", "naive"]),
    overlap=st.sampled_from([True, True, False]),
    max_queue=st.sampled_from([None, None, None, 1]),
    steps=st.lists(operations, min_size=1, max_size=40),
)
def test_every_request_gets_what_its_prompt_alone_would_get(info, model, cache, overlap, max_queue, steps):
    harness = Harness(info, model, cache=cache, overlap=overlap, max_queue=max_queue)
    for kind, *args in steps:
        if kind == "arrive":
            family, length, end, params = args
            harness.submit([*text(family, length), *end], **params)
        elif kind == "step":
            harness.step(args[0])
        elif harness.clients:  # running, waiting, refused, finished, or not yet seen
            harness.abort(harness.clients[args[0] % len(harness.clients)])
    harness.run()


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_a_crowd_that_does_not_fit(seed):
    """Long outputs on few pages: requests are pre-empted, some of them many times, and lose nothing."""
    rng = random.Random(seed)
    page_size = rng.randint(1, 6)
    info = engine_info(
        num_pages=rng.randint(95, 160) // page_size,
        page_size=page_size,
        max_running_req=rng.randint(2, 12),
        max_seq_len=90,
        vocab_size=VOCAB,
        token_budget=rng.randint(2, 60),
    )
    model = SimulatedModel(vocab_size=VOCAB, eos=EOS, eos_probability=rng.choice([0.0, 0.01]))
    harness = Harness(info, model, cache=rng.choice(["radix", "radix", "naive"]), overlap=rng.random() < 0.7)
    for _ in range(rng.randint(5, 30)):
        harness.submit(
            [*text(rng.randint(0, 2), rng.randint(0, 30)), rng.randrange(VOCAB)],
            max_tokens=rng.choice([2, 30, 59]),
            temperature=rng.choice([0.0, 1.0]),
            presence_penalty=rng.choice([0.0, 0.0, 1.0]),
        )
        if rng.random() < 0.1:
            harness.abort(rng.choice(harness.clients))
        harness.step(rng.choice([0, 0, 1, 5]))
    harness.run()
    assert info.token_budget >= max(batch.num_tokens for batch in harness.engine.batches)
