"""Filling a model from a checkpoint: a walk over the names of its tensors, whatever file format they lie in."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import Protocol

import torch
from torch import nn

from minisgl.layers.loading import LoadPlan

LoadProgress = Callable[[int, int], None]
"""Called with the bytes loaded so far and their total."""

_NAMES_SHOWN = 5


class WeightError(ValueError):
    """A checkpoint that does not fit the model; names the tensors."""


class StoredTensor(Protocol):
    """One tensor of a checkpoint, not read yet."""

    @property
    def name(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def nbytes(self) -> int: ...
    def read_into(self, dest: torch.Tensor, index: tuple[slice, ...]) -> None:
        """Copies ``tensor[index]`` to ``dest``, of any dtype and device, and reads no more than the format needs."""
        ...


@torch.inference_mode()  # A mode of the thread: without it, weights made in that mode could not be written to.
def _read(tensor: StoredTensor, dest: torch.Tensor, index: tuple[slice, ...]) -> None:
    tensor.read_into(dest, index)


def load_weights(
    model: nn.Module,
    tensors: Sequence[StoredTensor],
    *,
    ignore: Callable[[str], bool] = lambda name: False,
    progress: LoadProgress | None = None,
    threads: int = 2,
) -> None:
    """Streams every tensor to its place, this rank's shard of it, and finalizes each module as soon as it is complete.

    ``threads`` tensors are read at a time, while this thread finalizes modules. Tensors whose name ``ignore`` accepts
    are skipped.
    Raises :class:`WeightError` before anything is read if a tensor is missing, unexpected, or of another shape.
    """
    plan = LoadPlan.of(model)
    wanted = _match(plan, [t for t in tensors if t.name in plan.targets or not ignore(t.name)])
    waiting = Counter(id(plan.owners[tensor.name]) for tensor in wanted)
    total = sum(tensor.nbytes for tensor in wanted)
    loaded = 0
    with ThreadPoolExecutor(threads, thread_name_prefix="load") as pool:

        def start(tensor: StoredTensor) -> tuple[StoredTensor, Future[None]]:
            target = plan.targets[tensor.name]
            return tensor, pool.submit(_read, tensor, target.dest, target.index)

        rest = iter(wanted)
        started = deque(start(tensor) for tensor in islice(rest, threads + 1))
        while started:
            tensor, done = started.popleft()
            done.result()
            started.extend(start(tensor) for tensor in islice(rest, 1))
            owner = plan.owners[tensor.name]
            waiting[id(owner)] -= 1
            if not waiting[id(owner)]:
                owner.finalize()
            loaded += tensor.nbytes
            if progress is not None:
                progress(loaded, total)


def _match(plan: LoadPlan, tensors: Iterable[StoredTensor]) -> list[StoredTensor]:
    found = {tensor.name: tensor for tensor in tensors}
    for names, what in (
        (plan.targets.keys() - found.keys(), "lacks"),
        (found.keys() - plan.targets.keys(), "has tensors that the model does not know:"),
    ):
        if names:
            raise WeightError(f"The checkpoint {what} {_list(names)}.")
    for name, tensor in found.items():
        expected = plan.targets[name].shape
        if tensor.shape != expected:
            raise WeightError(f"{name} has shape {tensor.shape} in the checkpoint, but the config makes it {expected}.")
    return list(found.values())


def _list(names: Iterable[str]) -> str:
    ordered = sorted(names)
    more = len(ordered) - _NAMES_SHOWN
    return ", ".join(ordered[:_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")
