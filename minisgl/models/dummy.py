"""Random weights from a bare config.json, made where they are used: for measuring, and for tests of big shapes."""

from __future__ import annotations

from zlib import crc32

import torch
from torch import nn

from ..layers.loading import LoadPlan
from .weights import Progress

STD = 0.02
"""Logits stay of the order of 1, since the hidden state before the head is normed."""


def fill_dummy(model: nn.Module, progress: Progress | None = None) -> None:
    """Norms get ones, all else normal numbers of standard deviation :data:`STD`.

    A tensor is a function of its name, shape, dtype and kind of device. Each rank draws the whole tensor and keeps its
    shard, so that any number of ranks has the same model.
    """
    plan = LoadPlan.of(model)
    total = sum(target.dest.nbytes for target in plan.targets.values())
    done = 0
    for name, target in plan.targets.items():
        if len(target.shape) == 1 and name.endswith("weight"):
            target.dest.fill_(1)
        else:
            device, dtype = target.dest.device, target.dest.dtype
            generator = torch.Generator(device).manual_seed(crc32(name.encode()))
            whole = (
                target.dest
                if target.dest.shape == target.shape
                else torch.empty(target.shape, dtype=dtype, device=device)
            )
            whole.normal_(std=STD, generator=generator)
            if whole is not target.dest:
                target.dest.copy_(whole[target.index])
        done += target.dest.nbytes
        if progress is not None:
            progress(done, total)
    for owner in {id(owner): owner for owner in plan.owners.values()}.values():
        owner.finalize()
