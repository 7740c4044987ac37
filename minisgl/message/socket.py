"""ZeroMQ PUSH and PULL sockets that carry typed messages.

One side binds (the receiver, always), any number of senders connect. Queues are unbounded: a message is never
dropped and a sender never blocks; back-pressure is the scheduler's business, not the transport's.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Generic, TypeVar

import msgspec
import zmq

T = TypeVar("T")


class Push:
    """The sending end. ``address`` is an ipc:// address; connecting before the receiver has bound is fine."""

    def __init__(self, context: zmq.Context[Any], address: str) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._socket = context.socket(zmq.PUSH)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(address)

    def send(self, message: msgspec.Struct | list[Any]) -> None:
        self._socket.send(self._encoder.encode(message), copy=True)

    def close(self) -> None:
        self._socket.close()


class Pull(Generic[T]):
    """The receiving end; binds ``address``. ``kind`` is the type (or union) that arrives."""

    def __init__(self, context: zmq.Context[Any], address: str, kind: Any) -> None:
        self._decoder = msgspec.msgpack.Decoder(kind)
        self.socket = context.socket(zmq.PULL)
        self.socket.setsockopt(zmq.RCVHWM, 0)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind(address)

    def receive(self) -> T:
        """Blocks for one message."""
        return self._decoder.decode(self.socket.recv())

    def drain(self) -> list[T]:
        """All messages that have arrived; never blocks."""
        out: list[T] = []
        while True:
            try:
                out.append(self._decoder.decode(self.socket.recv(zmq.NOBLOCK)))
            except zmq.Again:
                return out

    def decode(self, frame: bytes) -> T:
        return self._decoder.decode(frame)

    def close(self) -> None:
        self.socket.close()


class Poller:
    """Waits for several receivers at once."""

    def __init__(self, pulls: Iterable[Pull[Any]]) -> None:
        self._poller = zmq.Poller()
        for pull in pulls:
            self._poller.register(pull.socket, zmq.POLLIN)

    def wait(self, timeout_ms: int | None = None) -> bool:
        """Blocks until something has arrived (True) or the time is up (False)."""
        return bool(self._poller.poll(timeout_ms))
