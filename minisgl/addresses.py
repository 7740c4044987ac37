"""Where the processes of one instance meet: the ipc addresses in its private run directory.

Alone in a file because the launcher needs it and imports neither zmq nor numpy.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Addresses:
    """All the sockets of one instance. The one named binds its address and pulls; everybody else pushes to it.

        frontend(i)    API server i: replies
        tokenizer(j)   tokenizer worker j: requests and aborts; a uid goes to worker ``uid % tokenizers``
        scheduler      rank 0: tokenised requests and aborts
        rank(r)        rank r > 0: what rank 0 received, step by step
        detokenizer    what the steps produced

    With ``tokenizers`` 0 requests go to tokenizer(0) all the same; one process binds that and ``detokenizer``.
    """

    directory: str
    frontends: int = 1
    tokenizers: int = 0
    ranks: int = 1

    def frontend(self, index: int) -> str:
        return f"ipc://{self.directory}/frontend-{index}"

    def tokenizer(self, index: int) -> str:
        return f"ipc://{self.directory}/tokenizer-{index}"

    def tokenizer_of(self, uid: int) -> int:
        """Index of the tokenizer worker that sees everything about ``uid``, so that an abort never overtakes it."""
        return uid % max(self.tokenizers, 1)

    @property
    def scheduler(self) -> str:
        return f"ipc://{self.directory}/scheduler"

    def rank(self, rank: int) -> str:
        return f"ipc://{self.directory}/rank-{rank}"

    @property
    def detokenizer(self) -> str:
        return f"ipc://{self.directory}/detokenizer"
