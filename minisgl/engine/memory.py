"""How many KV pages there are: as many as asked for, or as many as the memory gives."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

logger = logging.getLogger(__name__)

MIN_TOKENS = 512
"""A KV cache below this, unless it is asked for, is an error: next to nothing could be served."""

_CGROUP = Path("/sys/fs/cgroup")


class OutOfMemoryError(MemoryError):
    """The model does not fit. One sentence that says what to change."""


@dataclass(frozen=True, slots=True)
class KVRoom:
    """What one rank has for its KV cache: ``free`` bytes in all, of which it may take ``share`` unless told otherwise.

    A page takes ``page_bytes`` and holds ``page_size`` tokens. At most ``max_running_req`` requests of at most
    ``max_seq_len`` tokens run at once.
    """

    free: int
    share: int
    page_bytes: int
    page_size: int
    max_seq_len: int
    max_running_req: int

    def num_pages(self, requested: int | None, smallest_of_ranks: Callable[[int], int]) -> int:
        """``requested``, or as many as the share holds and could ever be in use; the same number on all ranks.

        Raises :class:`OutOfMemoryError`, on all ranks, when that does not fit or is too little to serve anything.
        """
        pages_per_req = -(-self.max_seq_len // self.page_size)
        # One more is there for padding.
        fit = max(0, self.free // self.page_bytes - 1)
        if requested is not None:
            pages = smallest_of_ranks(min(requested, fit))
            if pages < requested:
                raise OutOfMemoryError(
                    f"{requested} KV pages take {gib((requested + 1) * self.page_bytes)}, and {gib(self.free)} are "
                    f"free; --num-pages {pages} would fit."
                )
            return pages
        pages = smallest_of_ranks(min(fit, self.share // self.page_bytes - 1, pages_per_req * self.max_running_req))
        least = min(-(-MIN_TOKENS // self.page_size), pages_per_req)
        if pages < least:
            raise OutOfMemoryError(
                f"The {gib(max(0, self.share))} that the KV cache may take do not hold even {least * self.page_size} "
                f"tokens of {self.page_bytes // self.page_size:,} bytes; a higher --memory-ratio, a shorter "
                "--max-prefill-length, --tp or a smaller model makes room."
            )
        return pages


def context_that_fits(max_seq_len: int, num_pages: int, page_size: int) -> int:
    """The longest request that can be served to its end; says so when that is less than the model could."""
    tokens = num_pages * page_size
    if tokens >= max_seq_len:
        return max_seq_len
    logger.warning(
        "The KV cache holds %d tokens, so that is the context, not %d; more memory or a higher --memory-ratio or "
        "--num-pages makes it longer.",
        tokens,
        max_seq_len,
    )
    return tokens


def available_host_memory() -> int:
    """Bytes that this process may still take without swapping: of the host, or of its container if that has less."""
    available = int(psutil.virtual_memory().available)
    try:
        limit = (_CGROUP / "memory.max").read_text().strip()
        used = int((_CGROUP / "memory.current").read_text())
        stat = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return available
    if limit == "max":
        return available
    # Files that were read once count as used, but give way.
    return max(0, min(available, int(limit) - used + int(stat.get("inactive_file", 0))))


def return_freed_memory() -> None:
    """Gives what loading has freed back to the system; glibc would keep it for later, and there is none.

    A hundred megabytes for the default model.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)


def gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
