"""A scheduler on a simulated engine, with a client that keeps the books."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from minisgl.core import Batch, EngineInfo, SamplingParams
from minisgl.engine.simulated import SimulatedEngine, SimulatedModel, SimulatedStep, expected_output
from minisgl.message import AbortBackendMsg, BackendMsg, DetokenizeMsg, UserMsg, pack_ids, unpack_ids
from minisgl.scheduler import Scheduler, SchedulerConfig
from minisgl.uniform import stream_key

EOS = 0


def engine_info(**changes: int) -> EngineInfo:
    info = EngineInfo(num_pages=64, page_size=4, max_running_req=8, max_seq_len=200, vocab_size=1000, token_budget=64)
    return replace(info, **changes)


class RecordingEngine(SimulatedEngine):
    def __init__(self, info: EngineInfo, model: SimulatedModel | None = None) -> None:
        super().__init__(info, model)
        self.batches: list[Batch] = []

    def launch(self, batch: Batch) -> SimulatedStep:
        self.batches.append(batch)
        return super().launch(batch)


class LocalIO:
    def __init__(self) -> None:
        self.inbox: list[BackendMsg] = []
        self.outbox: list[DetokenizeMsg] = []
        self.sends = 0

    def receive(self, block: bool) -> list[BackendMsg]:
        messages, self.inbox = self.inbox, []
        return messages

    def send(self, items: list[DetokenizeMsg]) -> None:
        assert items
        self.sends += 1
        self.outbox += items


class Client:
    """One request and what came back for it."""

    def __init__(self, uid: int, prompt: list[int], params: SamplingParams, arrival: int) -> None:
        self.uid = uid
        self.prompt = prompt
        self.params = params
        self.arrival = arrival
        self.aborted = False
        self.ids: list[int] = []
        self.messages: list[DetokenizeMsg] = []

    @property
    def last(self) -> DetokenizeMsg:
        return self.messages[-1]

    @property
    def finish(self) -> str | None:
        return self.messages[-1].finish if self.messages else None

    @property
    def error(self) -> str | None:
        return self.last.error.message if self.messages and self.last.error else None

    def take(self, message: DetokenizeMsg) -> None:
        assert self.finish is None, "a message after the last one"
        assert (message.text is not None) == (not self.messages), "the first message alone introduces the request"
        assert (message.error is not None) == (message.finish == "error")
        if not self.messages:
            assert message.prompt_tokens == len(self.prompt)
            assert 0 <= message.cached_tokens < max(1, message.prompt_tokens)
        self.messages.append(message)
        self.ids += unpack_ids(message.ids).tolist()
        assert message.completion_tokens == len(self.ids), "a token lost or repeated"


class Harness:
    """Steps the scheduler, checks its books after every step, and answers against the oracle."""

    def __init__(self, info: EngineInfo | None = None, model: SimulatedModel | None = None, **config: Any) -> None:
        self.info = info or engine_info()
        self.model = model or SimulatedModel(vocab_size=self.info.vocab_size, eos=EOS)
        self.engine = RecordingEngine(self.info, self.model)
        self.io = LocalIO()
        self.config = SchedulerConfig(**config)
        self.scheduler = Scheduler(self.engine, self.io, self.config)
        self.clients: list[Client] = []

    def submit(self, prompt: Sequence[int], *, stop: tuple[int, ...] = (EOS,), **params: Any) -> Client:
        """Sends a request; greedy unless ``params`` says otherwise."""
        sampling = SamplingParams(**({"temperature": 0.0} | params))
        client = Client(len(self.clients), list(prompt), sampling, len(self.clients))
        self.clients.append(client)
        self.io.inbox.append(
            UserMsg(uid=client.uid, input_ids=pack_ids(client.prompt), params=sampling, stop_token_ids=stop)
        )
        return client

    def abort(self, client: Client) -> None:
        client.aborted = True
        self.io.inbox.append(AbortBackendMsg(uid=client.uid))

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            self.scheduler.step()
            self.scheduler.check()
            for message in self.io.outbox:
                self.clients[message.uid].take(message)
            self.io.outbox.clear()

    def run(self, limit: int = 5000) -> None:
        """Until everything has ended; then checks every answer."""
        for _ in range(limit):
            self.step()
            if self.scheduler.idle and not self.io.inbox:
                break
        else:
            raise AssertionError("The scheduler does not come to an end.")
        stats = self.scheduler.stats()
        assert (stats.running, stats.waiting, stats.held_pages) == (0, 0, 0)
        for client in self.clients:
            self.verify(client)
        self.engine.close()

    def expected(self, client: Client) -> list[int]:
        params, capacity = client.params, self.info.num_pages * self.info.page_size
        count = params.max_tokens or min(self.info.max_seq_len, capacity + 1) - len(client.prompt)
        if params.seed is None:
            key = stream_key(self.config.seed, 1 + client.arrival)
        else:
            key = stream_key(params.seed)
        return expected_output(self.model, client.prompt, params, count, key, (EOS,))

    def verify(self, client: Client) -> None:
        if client.last.error is not None and client.last.error.status != 500:
            assert client.ids == []
            return
        expected = self.expected(client)
        if client.finish == "abort":
            assert client.aborted
            assert client.ids == expected[: len(client.ids)]
            return
        assert client.ids == expected
        if client.finish == "error":
            assert (set(client.prompt) | set(client.ids[-1:])) & self.model.poison
        else:
            assert client.finish == ("stop" if client.ids[-1] == EOS else "length")
