"""How fast a checkpoint of several shards is loaded, and the host memory that it takes meanwhile.

    python benchmarks/gpu_load.py --model benchmarks/configs/qwen3-0.6b [--shard-mib 256] [--device cuda]

Writes random weights in bf16 to a temporary directory and loads them in a process of its own, from the operating
system's cache. Prints one JSON object; the peak is what resident memory, mapped files included, rises to above what it
was before the load, without the model itself on a CPU, and is held against the size of a shard.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

from minisgl.distributed.communicator import SingleCommunicator
from minisgl.kernel.device import make_ops, make_pack
from minisgl.kernel.ops import Ops
from minisgl.kernel.weight import PlainWeight
from minisgl.layers.context import BuildContext
from minisgl.layers.loading import LoadPlan
from minisgl.models.build import build_model, model_class
from minisgl.models.config import ModelConfig
from minisgl.models.safetensors import INDEX

DTYPE = torch.bfloat16


def shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Of all tensors of a checkpoint, by name."""
    context = BuildContext(
        dtype=DTYPE,
        device=torch.device("cpu"),
        comm=SingleCommunicator(),
        ops=Ops(),
        pack=PlainWeight,
        moe_backend="torch",
        max_positions=16,
    )
    plan = LoadPlan.of(model_class(config.architecture)(config, context))
    return {name: target.shape for name, target in plan.targets.items()}


def write(source: Path, directory: Path, shard_bytes: int) -> int:
    """A checkpoint of ``source``'s config in shards of about that size. Returns the size of the largest."""
    shutil.copy(source / "config.json", directory)
    shards: list[dict[str, torch.Tensor]] = [{}]
    size, largest, weight_map = 0, 0, {}
    for name, shape in shapes(ModelConfig.from_path(source)).items():
        tensor = torch.empty(shape, dtype=DTYPE).normal_(std=0.02)
        if shards[-1] and size + tensor.nbytes > shard_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor.nbytes
        largest = max(largest, size)
        weight_map[name] = f"model-{len(shards):05d}.safetensors"
    for number, shard in enumerate(shards, 1):
        save_file(shard, directory / f"model-{number:05d}.safetensors")
    (directory / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return largest


def status(field: str) -> int:
    """Bytes of a line of /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))


def load(directory: Path, device: torch.device) -> dict[str, float]:
    """To be called in a fresh process. What libraries take at their first use is there before the load begins."""
    weight = torch.zeros(64, 64, dtype=DTYPE).to(device)
    make_ops(device, DTYPE).silu_and_mul(make_pack(device, DTYPE)(weight, None).matmul(weight))
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = status("VmRSS")
    config = ModelConfig.from_path(directory)
    loaded = 0

    def count(done: int, total: int) -> None:
        nonlocal loaded
        loaded = done

    begin = time.perf_counter()
    model = build_model(config, dtype=DTYPE, device=device, path=directory, max_positions=16, progress=count)
    if device.type == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - begin
    peak = status("VmHWM") - before
    del model
    return {"bytes": loaded, "seconds": seconds, "peak": peak - (loaded if device.type == "cpu" else 0)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("benchmarks/configs/qwen3-0.6b"))
    parser.add_argument("--shard-mib", type=int, default=256)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--load", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.load is not None:
        print(json.dumps(load(args.load, torch.device(args.device))))
        return
    with tempfile.TemporaryDirectory() as directory:
        largest = write(args.model, Path(directory), args.shard_mib << 20)
        command = [sys.executable, __file__, "--device", args.device, "--load", directory]
        found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    print(
        json.dumps(
            {
                "gib": round(found["bytes"] / 2**30, 2),
                "seconds": round(found["seconds"], 2),
                "gib_per_s": round(found["bytes"] / 2**30 / found["seconds"], 2),
                "peak_mib": found["peak"] >> 20,
                "largest_shard_mib": largest >> 20,
                "shards": round(found["peak"] / largest, 2),
            }
        )
    )


if __name__ == "__main__":
    main()
