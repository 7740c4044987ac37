"""The scheduler behind real sockets, and two ranks in lockstep."""

from __future__ import annotations

from pathlib import Path

import pytest
import zmq
from scheduler_harness import RecordingEngine, engine_info

from minisgl.core import SamplingParams
from minisgl.engine.simulated import SimulatedModel
from minisgl.message import AbortBackendMsg, BackendMsg, DetokenizeBatch, Pull, Push, UserMsg, pack_ids
from minisgl.scheduler import FollowerIO, Scheduler, SchedulerConfig, ZmqIO


class Sockets:
    def __init__(self, directory: Path, ranks: int) -> None:
        def address(name: str) -> str:
            return f"ipc://{directory}/{name}"

        self.context = zmq.Context()
        self.detokenizer: Pull[DetokenizeBatch] = Pull(self.context, address("detokenizer"), DetokenizeBatch)
        self.followers = [FollowerIO(self.context, address(f"rank-{rank}")) for rank in range(1, ranks)]
        self.io = ZmqIO(
            self.context,
            address("scheduler"),
            address("detokenizer"),
            [address(f"rank-{rank}") for rank in range(1, ranks)],
        )
        self.tokenizer = Push(self.context, address("scheduler"))

    def close(self) -> None:
        for socket in (self.tokenizer, self.io, self.detokenizer, *self.followers):
            socket.close()
        self.context.term()


@pytest.fixture
def sockets(tmp_path):
    made = Sockets(tmp_path, ranks=2)
    yield made
    made.close()


def request(uid: int, length: int = 10, **params) -> UserMsg:
    params = {"max_tokens": 6, "temperature": 1.0} | params
    ids = pack_ids([(uid * 31 + i) % 100 for i in range(length)])
    return UserMsg(uid=uid, input_ids=ids, params=SamplingParams(**params), stop_token_ids=(0,))


def test_messages_arrive_in_order_and_reach_the_followers_step_by_step(sockets):
    sent: list[BackendMsg] = [request(1), request(2), AbortBackendMsg(uid=1)]
    for message in sent:
        sockets.tokenizer.send(message)
    got: list[BackendMsg] = []
    steps = 0
    while len(got) < 3:
        got += sockets.io.receive(block=True)
        steps += 1
    assert got == sent
    assert sockets.io.receive(block=False) == []
    followed = [sockets.followers[0].receive(block=False) for _ in range(steps + 1)]
    assert [message for messages in followed for message in messages] == sent
    assert followed[-1] == []


def test_two_ranks_launch_the_same_batches(sockets):
    info = engine_info(num_pages=24, max_running_req=4, vocab_size=100, token_budget=12)
    model = SimulatedModel(vocab_size=100, eos=0, eos_probability=0.05)
    engines = [RecordingEngine(info, model) for _ in range(2)]
    config = SchedulerConfig(seed=3)
    leader = Scheduler(engines[0], sockets.io, config)
    follower = Scheduler(engines[1], sockets.followers[0], config)
    waiting = [request(uid, length=5 + 3 * uid, max_tokens=20) for uid in range(12)]
    finished: set[int] = set()
    steps = 0
    while len(finished) < 12 or not leader.idle:
        if waiting and (leader.idle or steps % 3 == 0):
            sockets.tokenizer.send(message := waiting.pop(0))
            if message.uid % 4 == 3:
                sockets.tokenizer.send(AbortBackendMsg(uid=message.uid - 1))
        leader.step()
        steps += 1
        for batch in sockets.detokenizer.drain():
            finished |= {item.uid for item in batch.items if item.finish}
    for _ in range(steps):  # all that it needs is in its socket
        follower.step()
    first, second = (engine.batches for engine in engines)
    assert len(first) == len(second) > 12
    for a, b in zip(first, second, strict=True):
        assert a.rows.tolist() == b.rows.tolist()
        assert a.input_ids.tolist() == b.input_ids.tolist()
        assert a.table.pages.tolist() == b.table.pages.tolist()
        assert a.sampling.uniform.tolist() == b.sampling.uniform.tolist()
    assert leader.stats() == follower.stats()
