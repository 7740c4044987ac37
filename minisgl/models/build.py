"""From a config and a path to a model that is ready to run."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Literal

import torch

from minisgl.distributed.communicator import Communicator, SingleCommunicator
from minisgl.kernel.device import make_ops, make_pack
from minisgl.layers.context import BuildContext
from minisgl.moe.base import default_experts

from .base import CausalLM
from .config import ModelConfig
from .dummy import fill_dummy
from .registry import ARCHITECTURES
from .weights import LoadProgress, load_weights


def build_model(
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    path: Path | None = None,
    comm: Communicator | None = None,
    load: Literal["auto", "dummy"] = "auto",
    max_positions: int | None = None,
    moe_backend: str | None = None,
    deterministic: bool = False,
    progress: LoadProgress | None = None,
) -> CausalLM:
    """The model of this rank with its weights on ``device``.

    ``path`` is what the config was read from; ``load`` "dummy" needs none. ``max_positions`` is the longest sequence
    that will ever be run, in tokens (by default the model's own context). ``deterministic``: what is computed for a
    token does not depend, to the last bit, on the other tokens of a step. Raises WeightError for a checkpoint that
    does not fit, ValueError for heads that cannot be cut between so many ranks.
    """
    context = BuildContext(
        dtype=dtype,
        device=device,
        comm=comm or SingleCommunicator(),
        ops=make_ops(device, dtype),
        pack=make_pack(device, dtype, deterministic),
        moe_backend=moe_backend or default_experts(device, deterministic),
        max_positions=max_positions or config.max_context,
    )
    model = model_class(config.architecture)(config, context).eval()
    if load == "dummy":
        fill_dummy(model, progress)
        return model
    if path is None:
        raise ValueError("Loading weights needs a path.")
    if path.suffix == ".gguf":
        from .gguf import tensors_in_gguf

        # One reader: its torch operations use all cores by themselves.
        load_weights(model, tensors_in_gguf(path, config.num_heads, config.num_kv_heads), progress=progress, threads=1)
    else:
        from .safetensors import safetensors_in

        load_weights(model, safetensors_in(path), ignore=_is_derived, progress=progress)
    return model


def model_class(architecture: str) -> type[CausalLM]:
    """``architecture`` is a key of :data:`ARCHITECTURES`; ModelConfig has checked it."""
    found: type[CausalLM] = getattr(import_module(f"{__package__}.{ARCHITECTURES[architecture]}"), architecture)
    return found


def _is_derived(name: str) -> bool:
    """Tensors of some checkpoints that say nothing new: a tied head, and the rope frequencies of old Llama files."""
    return name == "lm_head.weight" or name.endswith("rotary_emb.inv_freq")
