"""Random weights from a bare config.json, made where they are used: for measuring, and for tests of big shapes."""

from __future__ import annotations

from collections import Counter
from math import prod
from zlib import crc32

import torch
from torch import nn

from minisgl.layers.loading import LoadPlan, Target

from .weights import LoadProgress

STD = 0.02
"""Logits stay of the order of 1, since the hidden state before the head is normed."""


def fill_dummy(model: nn.Module, progress: LoadProgress | None = None) -> None:
    """Norms get ones, all else normal numbers of standard deviation :data:`STD`.

    A tensor is a function of its name, shape, dtype and kind of device. Each rank draws the whole tensor and keeps its
    shard, so that any number of ranks has the same model. ``progress`` counts elements.
    """
    plan = LoadPlan.of(model)
    waiting = Counter(id(owner) for owner in plan.owners.values())
    total = sum(prod(target.shape) for target in plan.targets.values())
    done = 0
    for name, target in plan.targets.items():
        if len(target.shape) == 1 and name.endswith("weight"):
            target.dest.fill_(1)
        else:
            _fill_normal(name, target)
        owner = plan.owners[name]
        waiting[id(owner)] -= 1
        if not waiting[id(owner)]:
            owner.finalize()
        done += prod(target.shape)
        if progress is not None:
            progress(done, total)


def _fill_normal(name: str, target: Target) -> None:
    dest = target.dest
    generator = torch.Generator(dest.device).manual_seed(crc32(name.encode()))
    if tuple(dest.shape) == target.shape:
        dest.normal_(std=STD, generator=generator)
    else:
        whole = torch.empty(target.shape, dtype=dest.dtype, device=dest.device)
        dest.copy_(whole.normal_(std=STD, generator=generator)[target.index])
