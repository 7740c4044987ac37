"""The requests that wait for a row."""

from __future__ import annotations

from collections import OrderedDict

from .request import Req


class WaitingQueue:
    """First come, first served, except for those that follow a leader.

    A follower's prompt begins with what its leader, a running request, is computing right now. It stands aside until
    the leader is through with its prompt, and then comes first in line and finds the prefix in the cache.
    """

    def __init__(self) -> None:
        self._line: OrderedDict[int, Req] = OrderedDict()
        self._num_followers = 0

    def __len__(self) -> int:
        return len(self._line) + self._num_followers

    def push(self, req: Req) -> None:
        self._line[req.uid] = req

    def push_front(self, req: Req) -> None:
        self._line[req.uid] = req
        self._line.move_to_end(req.uid, last=False)

    def first(self) -> Req | None:
        """The request whose turn it is."""
        return next(iter(self._line.values()), None)

    def remove(self, req: Req) -> None:
        if req.leader is None:
            del self._line[req.uid]
        else:
            req.leader.followers.remove(req)
            req.leader = None
            self._num_followers -= 1

    def follow(self, req: Req, leader: Req) -> None:
        """Takes ``req`` out of the line until ``leader`` releases it."""
        del self._line[req.uid]
        req.leader = leader
        leader.followers.append(req)
        self._num_followers += 1

    def release(self, leader: Req) -> None:
        """Puts the followers of ``leader`` back, to the front and in their order."""
        for req in reversed(leader.followers):
            req.leader = None
            self.push_front(req)
        self._num_followers -= len(leader.followers)
        leader.followers.clear()
