"""Filling a model from a checkpoint: a walk over the names of its tensors, whatever file format they lie in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

import torch
from torch import nn

from ..layers.loading import LoadPlan, Target

Progress = Callable[[int, int], None]
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
    def read(self, index: tuple[slice, ...]) -> torch.Tensor:
        """``tensor[index]`` on the CPU. Reads no more of the file than the format allows. Any thread may call it."""
        ...


@dataclass(frozen=True, slots=True)
class _Job:
    tensor: StoredTensor
    target: Target

    def run(self) -> None:
        self.target.dest.copy_(self.tensor.read(self.target.index))


def load_weights(
    model: nn.Module,
    tensors: Sequence[StoredTensor],
    *,
    ignore: Callable[[str], bool] = lambda name: False,
    progress: Progress | None = None,
    threads: int = 2,
) -> None:
    """Streams every tensor to its place, this rank's shard of it, and finalizes each module as soon as it is complete.

    ``threads`` tensors are in memory at a time beside the model. Tensors whose name ``ignore`` accepts are skipped.
    Raises :class:`WeightError` before anything is read if a tensor is missing, unexpected, or of another shape.
    """
    plan = LoadPlan.of(model)
    jobs = _match(plan, [t for t in tensors if t.name in plan.targets or not ignore(t.name)])
    waiting = Counter(id(plan.owners[job.tensor.name]) for job in jobs)
    total = sum(job.tensor.nbytes for job in jobs)
    loaded = 0
    with ThreadPoolExecutor(threads, thread_name_prefix="load") as pool:
        for job in _run_ahead(pool, jobs, threads):
            owner = plan.owners[job.tensor.name]
            waiting[id(owner)] -= 1
            if not waiting[id(owner)]:
                owner.finalize()
            loaded += job.tensor.nbytes
            if progress is not None:
                progress(loaded, total)


def _run_ahead(pool: ThreadPoolExecutor, jobs: list[_Job], ahead: int) -> Iterator[_Job]:
    """The jobs in order, each when it is done, with at most ``ahead`` more of them started."""
    rest = iter(jobs)
    started: list[tuple[_Job, Future[None]]] = [(job, pool.submit(job.run)) for job in islice(rest, ahead)]
    while started:
        job, future = started.pop(0)
        future.result()
        started.extend((job, pool.submit(job.run)) for job in islice(rest, 1))
        yield job


def _match(plan: LoadPlan, tensors: Iterable[StoredTensor]) -> list[_Job]:
    found = {tensor.name: tensor for tensor in tensors}
    for names, what in (
        (plan.targets.keys() - found.keys(), "lacks"),
        (found.keys() - plan.targets.keys(), "has tensors that the model does not know:"),
    ):
        if names:
            raise WeightError(f"The checkpoint {what} {_list(names)}.")
    jobs = [_Job(tensor, plan.targets[name]) for name, tensor in found.items()]
    for job in jobs:
        if job.tensor.shape != job.target.shape:
            raise WeightError(
                f"{job.tensor.name} has shape {job.tensor.shape} in the checkpoint, "
                f"but the config makes it {job.target.shape}."
            )
    return jobs


def _list(names: Iterable[str]) -> str:
    ordered = sorted(names)
    more = len(ordered) - _NAMES_SHOWN
    return ", ".join(ordered[:_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")
