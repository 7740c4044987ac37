"""Everything about a GPU in one call: the tests that need one, then every figure with its share of the machine's limit.

    python benchmarks/gpu.py --out results [--only tests,offline-0.6b,steps,...] [--list]

Each section is a process of its own with a time limit, and its output goes to a file in --out. With several GPUs the
sections that need one run beside each other, between the tests and the one that needs two. Copy bandwidth and the
rate of matrix products are measured first, in the same run. The limit of an offline run is the time of the bytes that
it must read (the weights once a step, the KV cache of every running request) at the bandwidth, and of the arithmetic of
all prompts at the rate; that of one sequence alone is the time of the weights of one token.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from offline import lengths_and_prompts

from minisgl.models.config import ModelConfig

HERE = Path(__file__).parent
CONFIGS = HERE / "configs"
SEQUENCES = 256
TESTS = tuple(f"tests/{part}" for part in ("attention", "kernel_triton", "engine", "llm", "models", "server"))


@dataclass(frozen=True)
class Limits:
    """Bytes and operations per second, and how many GPUs there are."""

    copy: float
    matmul: float
    gpus: int


@dataclass(frozen=True)
class Model:
    """What a step of a bf16 model must read and compute."""

    config: ModelConfig

    @classmethod
    def named(cls, name: str) -> Model:
        return cls(ModelConfig.from_path(CONFIGS / name))

    def weights(self, running: int) -> tuple[float, float]:
        """Parameters that a step of so many requests reads, and those that one token is multiplied with."""
        c = self.config
        attention = c.hidden_size * c.head_dim * (2 * c.num_heads + 2 * c.num_kv_heads)
        head = c.vocab_size * c.hidden_size
        read = used = 0.0
        for layer in range(c.num_layers):
            if c.moe is not None and layer in c.moe.layers:
                expert = 3 * c.hidden_size * c.moe.intermediate_size
                chosen = c.moe.num_experts * (1 - (1 - c.moe.top_k / c.moe.num_experts) ** running)
                read, used = read + attention + expert * chosen, used + attention + expert * c.moe.top_k
            else:
                dense = attention + 3 * c.hidden_size * c.intermediate_size
                read, used = read + dense, used + dense
        return read + head, used

    @property
    def kv_bytes(self) -> int:
        """Of one token."""
        c = self.config
        return 2 * c.num_layers * c.num_kv_heads * c.head_dim * 2

    def offline_limit(self, limits: Limits) -> float:
        """Tokens per second of the offline benchmark."""
        args = argparse.Namespace(seed=0, num_seqs=SEQUENCES, min_len=100, max_len=1024)
        prompts, outputs = lengths_and_prompts(args, self.config.vocab_size)
        running = [sum(n > step for n in outputs) for step in range(max(outputs))]
        seen = sum(n * len(prompt) + n * (n - 1) / 2 for prompt, n in zip(prompts, outputs, strict=True))
        read = sum(2 * self.weights(count)[0] for count in running) + seen * self.kv_bytes
        compute = 2 * self.weights(1)[1] * sum(map(len, prompts))
        return sum(outputs) / (read / limits.copy + compute / limits.matmul)

    def token_limit(self, limits: Limits) -> float:
        """Seconds of a token of one sequence alone."""
        return 2 * self.weights(1)[0] / limits.copy


Report = Callable[[str, Limits], list[str]]
"""From what a section printed to the lines of the table."""


@dataclass(frozen=True)
class Section:
    command: list[str]
    seconds: float
    report: Report
    alone: bool = False
    """Whether it takes all GPUs that there are."""


def last_json(output: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads([line for line in output.splitlines() if line.startswith("{")][-1])
    return found


def row(what: str, value: float, unit: str, share: float | None = None) -> str:
    return f"{what:52s} {value:10.3f} {unit:10s}" + ("" if share is None else f"{share:7.1%} of the limit")


def offline_report(name: str, flags: str, output: str, limits: Limits) -> list[str]:
    found, model = last_json(output), Model.named(name)
    rate, limit = found["output_tok_per_s"], model.offline_limit(limits)
    name += flags
    lines = [row(f"{name} offline", rate, "tok/s", rate / limit)]
    if "batch_1_ms_per_token" in found:
        each = found["batch_1_ms_per_token"]
        lines.append(row(f"{name} batch 1", each, "ms/token", model.token_limit(limits) * 1e3 / each))
    return [*lines, row(f"{name} start", found["start_seconds"], "s")]


def parallel_report(name: str, output: str, limits: Limits) -> list[str]:
    """Two runs, on one GPU and on two."""
    one, two = (json.loads(line) for line in output.splitlines() if line.startswith("{"))
    speedup = one["batch_1_ms_per_token"] / two["batch_1_ms_per_token"]
    return [row(f"{name} TP 2 over TP 1, batch 1", speedup, "x", speedup / 2)]


def steps_report(output: str, limits: Limits) -> list[str]:
    lines = []
    for found in (json.loads(line) for line in output.splitlines() if line.startswith("{")):
        if found["bench"] == "decode":
            name = f"decode of {found['running']}"
            lines.append(row(f"{name}, step", found["ms_per_step"], "ms"))
            lines.append(row(f"{name}, GPU idle", found["gpu_idle_percent"], "%"))
            lines.append(row(f"{name}, host time a step", found["host_ms_per_step"], "ms"))
        else:
            name = f"{found['running']} streams, a {found['prompt']}-token prompt every 50 ms"
            lines += [row(f"{name}, {key}", found[key], "x pure") for key in ("p50", "p99", "max")]
    return lines


def load_report(output: str, limits: Limits) -> list[str]:
    found = last_json(output)
    what = f"loading {found['gib']} GiB, shards of up to {found['largest_shard_mib']} MiB"
    return [
        row(what, found["gib_per_s"], "GiB/s"),
        row("host memory meanwhile, at its peak", found["shards"], "shards"),
    ]


def plain_report(output: str, limits: Limits) -> list[str]:
    return output.splitlines()


def tests_report(output: str, limits: Limits) -> list[str]:
    return [line for line in output.splitlines() if line.startswith("FAILED") or " passed" in line or " failed" in line]


def http_report(output: str, limits: Limits) -> list[str]:
    found = json.loads(output[output.index("{") :])
    return [f"HTTP, 256 streams: {json.dumps(found)}"]


def run(*command: str | Path) -> list[str]:
    return [sys.executable, *map(str, command)]


def offline(name: str, *more: str) -> list[str]:
    return run(HERE / "offline.py", "--model", CONFIGS / name, "--load-format", "dummy", *more)


def whole_run(name: str, seconds: float, *more: str) -> Section:
    flags = " --deterministic" if "--deterministic" in more else ""
    return Section(offline(name, *more), seconds, partial(offline_report, name, flags))


def sections() -> dict[str, Section]:
    workers = ("-n", str(min(16, os.cpu_count() or 1))) if find_spec("xdist") else ()
    small = ("--num-seqs", "4", "--batch-1", "64")
    both = [offline("qwen3-14b", *small), offline("qwen3-14b", "--tp", "2", *small)]
    parallel = run("-c", f"import subprocess\nfor c in {both!r}: subprocess.run(c, check=True)")
    return {
        "tests": Section(
            run("-m", "pytest", "-q", "-m", "gpu and not slow", "--tb=short", *workers, *TESTS), 300, tests_report, True
        ),
        "offline-0.6b": whole_run("qwen3-0.6b", 120, "--batch-1", "128"),
        "offline-deterministic": whole_run("qwen3-0.6b", 120, "--deterministic"),
        "offline-14b": whole_run("qwen3-14b", 180, "--batch-1", "64"),
        "offline-30b": whole_run("qwen3-30b-a3b", 240, "--batch-1", "64"),
        "steps": Section(run(HERE / "gpu_steps.py"), 120, steps_report),
        "kernels": Section(run(HERE / "gpu_kernels.py", "--only", "decode,prefill"), 180, plain_report),
        "attention": Section(run(HERE / "gpu_attention.py"), 400, plain_report),
        "http": Section(run(HERE / "gpu_http.py"), 180, http_report),
        "load": Section(run(HERE / "gpu_load.py"), 90, load_report),
        "tp": Section(parallel, 240, partial(parallel_report, "qwen3-14b"), True),
    }


def measure_limits() -> Limits:
    code = (
        "import json, torch; from gpu_report import Limits; found = Limits.of_machine(); "
        "print(json.dumps([found.copy, found.matmul, Limits.sustained_matmul(), "
        "torch.cuda.device_count(), torch.cuda.get_device_name()]))"
    )
    printed = subprocess.run(run("-c", code), cwd=HERE, env=environment(), stdout=subprocess.PIPE, text=True)
    if printed.returncode != 0:
        raise SystemExit(printed.returncode)  # it has said why
    copy, matmul, sustained, gpus, name = json.loads(printed.stdout)
    rates = f"matmul {matmul / 1e12:.0f} TFLOP/s at first and {sustained / 1e12:.0f} sustained"
    print(f"{gpus} x {name}: copy {copy / 1e12:.2f} TB/s, {rates}", flush=True)
    return Limits(copy, matmul, gpus)


def environment(gpu: int | None = None) -> dict[str, str]:
    """Of a process that sees one GPU, or all."""
    path = [str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    found = os.environ | {"PYTHONPATH": os.pathsep.join(path), "PYTHONUNBUFFERED": "1"}
    if gpu is not None:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        found["CUDA_VISIBLE_DEVICES"] = visible.split(",")[gpu] if visible else str(gpu)
    return found


def run_beside(names: list[str], known: dict[str, Section], limits: Limits, out: Path) -> None:
    """Each GPU takes the next section as soon as it is free."""
    waiting = deque(names)

    def serve(gpu: int) -> None:
        with contextlib.suppress(IndexError):
            while True:
                name = waiting.popleft()
                print("\n".join(run_section(name, known[name], limits, out, gpu)), flush=True)

    with ThreadPoolExecutor(limits.gpus) as pool:
        list(pool.map(serve, range(limits.gpus)))


def run_section(name: str, section: Section, limits: Limits, out: Path, gpu: int | None = None) -> list[str]:
    log = out / f"{name}.log"
    begin = time.perf_counter()
    with log.open("w") as file:
        process = subprocess.Popen(
            section.command,
            cwd=HERE.parent,
            env=environment(gpu),
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code: int | str = process.wait(section.seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # with whatever it has started
            process.wait()
            code = f"stopped after {section.seconds:.0f} s"
    try:
        lines = section.report(log.read_text(), limits)
    except (ValueError, LookupError):
        lines = []
    if code != 0:
        lines.append(f"{name} ended with {code}; see {log}")
    return [*lines, f"    ({name}: {time.perf_counter() - begin:.0f} s)"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("gpu-results"), help="directory for the logs")
    known = sections()
    parser.add_argument("--only", default=",".join(known), help="sections, separated by commas")
    parser.add_argument("--list", action="store_true", help="print the names of the sections")
    args = parser.parse_args()
    if args.list:
        print("\n".join(known))
        return
    chosen = args.only.split(",")
    if unknown := [name for name in chosen if name not in known]:
        parser.error(f"there is no section {unknown[0]}; --list prints their names")
    args.out.mkdir(parents=True, exist_ok=True)
    limits = measure_limits()
    if limits.gpus < 2 and "tp" in chosen:
        print("tp: left out, there is one GPU")
        chosen.remove("tp")
    for alone, group in itertools.groupby(chosen, lambda name: known[name].alone):
        if alone:
            for name in group:
                print("\n".join(run_section(name, known[name], limits, args.out)), flush=True)
        else:
            run_beside(list(group), known, limits, args.out)


if __name__ == "__main__":
    main()
