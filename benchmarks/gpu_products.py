"""The benchmarks of :mod:`gpu_kernels` that multiply with weights."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from gpu_report import BF16, COLD_BYTES, DEVICE, MODELS, Model, Report, capture, error, ints, measure, randn

from minisgl.kernel.ops import Ops
from minisgl.kernel.triton.activation import silu_and_mul
from minisgl.kernel.triton.decode_attention import DecodeWorkspace, FusedQKV, decode_attention
from minisgl.kernel.triton.few_rows import FewRowsConfig, few_rows_config, few_rows_linear
from minisgl.kernel.triton.grouped_gemm import GroupedConfig, combine, grouped_config, grouped_gemm
from minisgl.kernel.triton.launch import power_of_2
from minisgl.kernel.triton.moe_routing import route
from minisgl.kernel.triton.norm import add_rms_norm, rms_norm
from minisgl.kernel.triton.one_row import OneRowConfig, one_row_linear, one_row_reference

# Linear layers


def linear_shapes(model: Model) -> dict[str, tuple[int, int, frozenset[str]]]:
    """Rows of the weight, inputs, and what stands around the product."""
    return {
        "qkv": (model.qkv, model.hidden, frozenset({"norm"})),
        "o": (model.hidden, model.heads * model.head_dim, frozenset({"residual"})),
        "gate_up": (2 * model.inner, model.hidden, frozenset({"norm", "gated"})),
        "down": (model.hidden, model.inner, frozenset({"residual"})),
        "head": (model.vocab, model.hidden, frozenset({"norm"})),
    }


def linear(report: Report) -> None:
    for name in ("qwen3-0.6b", "qwen3-14b"):
        for part, (outputs, inputs, around) in linear_shapes(MODELS[name]).items():
            weights = [
                randn(outputs, inputs) / inputs**0.5 for _ in range(max(1, -(-COLD_BYTES // (outputs * inputs * 2))))
            ]
            _one_row(report, f"linear {name} {part}, 1 row", weights, around)
            for rows in (8, 16, 32, 64, 128, 256):
                _few_rows(report, f"linear {name} {part}, {rows} rows", rows, weights, around)


def _one_row(report: Report, label: str, weights: list[torch.Tensor], around: frozenset[str]) -> None:
    outputs, inputs = weights[0].shape
    gated = "gated" in around
    x = randn(1, inputs)
    arguments: dict[str, Any] = {
        "norm": 1 + randn(inputs) / 8 if "norm" in around else None,
        "residual": randn(1, outputs) if "residual" in around else None,
        "gated": gated,
        "eps": 1e-6,
    }

    def calls(config: OneRowConfig | None, pdl: bool = False) -> list[Callable[[], object]]:
        def one(weight: torch.Tensor) -> Callable[[], object]:
            return lambda: one_row_linear(x, weight, config=config, pdl=pdl, **arguments)

        return [one(weight) for weight in weights]

    def separate(weight: torch.Tensor) -> Callable[[], object]:
        def run() -> torch.Tensor:
            inner = rms_norm(x, arguments["norm"], 1e-6) if arguments["norm"] is not None else x
            out = F.linear(inner, weight)
            if gated:
                return silu_and_mul(out)
            return out if arguments["residual"] is None else out + arguments["residual"]

        return run

    wide: dict[str, Any] = {
        key: value.float() if isinstance(value, torch.Tensor) else value for key, value in arguments.items()
    }
    wrong = error(one_row_linear(x, weights[0], **arguments), one_row_reference(x.float(), weights[0].float(), **wide))
    note = f"separate {measure([separate(weight) for weight in weights]) * 1e6:.2f} us"
    nbytes = outputs * inputs * 2
    report.row(label, measure(calls(None)), wrong, nbytes, note=note)
    report.row("  with dependent launch", measure(calls(None, pdl=True)), wrong, nbytes)
    sizes = itertools.product((1, 2, 4, 8), (512, 1024, 2048, 4096))
    options = [OneRowConfig(n, k) for n, k in sizes if 2048 <= n * k * (2 if gated else 1) <= 8192]
    report.tuned(options, lambda config: measure(calls(config, pdl=True)), nbytes)


FEW_ROWS_TILES = [  # rows of W, elements of K, warps, stages
    (32, 128, 4, 4),
    (64, 64, 4, 6),
    (64, 128, 4, 3),
    (64, 128, 4, 4),
    (128, 64, 8, 4),
    (128, 128, 8, 3),
]


def _few_rows(report: Report, label: str, rows: int, weights: list[torch.Tensor], around: frozenset[str]) -> None:
    outputs, inputs = weights[0].shape
    gated, in_parts = "gated" in around, "residual" in around
    x = randn(rows, inputs)

    def calls(config: FewRowsConfig) -> list[Callable[[], object]]:
        def one(weight: torch.Tensor) -> Callable[[], object]:
            return lambda: few_rows_linear(x, weight, gated=gated, config=config, pdl=True)

        return [one(weight) for weight in weights]

    def library(weight: torch.Tensor) -> Callable[[], object]:
        return lambda: silu_and_mul(F.linear(x, weight)) if gated else F.linear(x, weight)

    nbytes, flops = outputs * inputs * 2, 2 * rows * outputs * inputs
    plain = measure([library(weight) for weight in weights])
    print(f"{label}: library {plain * 1e6:.2f} us, {report.limits.share(plain, nbytes, flops)}", flush=True)
    config = few_rows_config(rows, outputs // 2 if gated else outputs, inputs, gated=gated, in_parts=in_parts)
    if config is not None:
        expected = x.float() @ weights[0].float().T
        out = few_rows_linear(x, weights[0], gated=gated, config=config)
        wrong = error(out.sum(0) if config.parts > 1 else out, Ops().silu_and_mul(expected) if gated else expected)
        report.row("  streamed, dependent launch", measure(calls(config)), wrong, nbytes, flops, note=str(config))
    counts = (
        [p for p in (1, 2, 4, 8) if inputs % (128 * p) == 0 and 64 <= outputs // 64 * p <= 640] if in_parts else [1]
    )
    block_r = min(128, max(16, power_of_2(rows)))
    options = [FewRowsConfig(block_r, n, k, parts, w, s) for parts in counts for n, k, w, s in FEW_ROWS_TILES]
    report.tuned(options, lambda config: measure(calls(config)), nbytes, flops)


# Experts

NUM_EXPERTS, HIDDEN, INNER, TOP_K = 128, 2048, 768, 8  # Qwen3-30B-A3B
Matrices = tuple[torch.Tensor, torch.Tensor]


def experts(report: Report) -> None:
    sets = [
        (randn(NUM_EXPERTS, 2 * INNER, HIDDEN) / HIDDEN**0.5, randn(NUM_EXPERTS, HIDDEN, INNER) / INNER**0.5)
        for _ in range(2)
    ]
    for tokens in (1, 4, 16, 64, 256, 1024, 8192):
        _experts(report, tokens, sets)


def _experts(report: Report, tokens: int, sets: list[Matrices]) -> None:
    x, logits = randn(tokens, HIDDEN), randn(tokens, NUM_EXPERTS, dtype=torch.float32)
    counts = torch.zeros(NUM_EXPERTS, dtype=torch.int32, device=DEVICE)
    pairs = tokens * TOP_K

    def layer(gate_up: torch.Tensor, down: torch.Tensor) -> Callable[[], torch.Tensor]:
        def run() -> torch.Tensor:
            weights, members = route(logits, TOP_K, True, counts, BF16)
            middle = grouped_gemm(x, gate_up, members, counts, pairs, gated=True)
            return combine(grouped_gemm(middle, down, members, counts, pairs, gated=False), weights, counts)

        return run

    weights, chosen = logits.softmax(-1).topk(TOP_K)
    weights /= weights.sum(-1, keepdim=True)
    expected = torch.zeros(HIDDEN, device=DEVICE)
    for weight, expert in zip(weights[-1], chosen[-1].tolist(), strict=True):
        gate_up, down = (part[expert].float() for part in sets[0])
        expected += weight * (down @ Ops().silu_and_mul((gate_up @ x[-1].float())[None])[0])
    wrong = error(layer(*sets[0])()[-1], expected)
    used = len(chosen.unique())
    nbytes, flops = 3 * used * HIDDEN * INNER * 2, 2 * 3 * pairs * HIDDEN * INNER
    label = f"experts {tokens} tokens ({used} used)"
    report.row(label, measure([layer(*matrices) for matrices in sets]), wrong, nbytes, flops)

    # The two products by themselves. Nothing sets the counts back in between.
    _, members = route(logits, TOP_K, True, counts, BF16)
    middle = grouped_gemm(x, sets[0][0], members, counts, pairs, gated=True)
    for gated, source, index, share in ((True, x, 0, 2 / 3), (False, middle, 1, 1 / 3)):
        run = _Product(source, [matrices[index] for matrices in sets], members, counts, pairs, gated)
        name = "  gate and up" if gated else "  down"
        report.row(name, run.seconds(None), wrong, nbytes * share, flops * share)
        report.tuned(run.options(), run.seconds, nbytes * share, flops * share)


@dataclass
class _Product:
    """One grouped product on several sets of weights."""

    x: torch.Tensor
    weights: list[torch.Tensor]
    members: torch.Tensor
    counts: torch.Tensor
    pairs: int
    gated: bool

    def seconds(self, config: GroupedConfig | None) -> float:
        return measure([self._call(weight, config) for weight in self.weights])

    def _call(self, weight: torch.Tensor, config: GroupedConfig | None) -> Callable[[], object]:
        arguments = (self.x, weight, self.members, self.counts, self.pairs)
        return lambda: grouped_gemm(*arguments, gated=self.gated, config=config)

    def options(self) -> list[GroupedConfig]:
        outputs, inputs = (INNER, HIDDEN) if self.gated else (HIDDEN, INNER)
        few = self.pairs / NUM_EXPERTS <= 32
        sides = 2 if self.gated else 1
        found = [grouped_config(self.pairs, NUM_EXPERTS, outputs, inputs, self.gated, 2)]
        for (m, warps), n, k, stages in itertools.product(
            ((16, 4), (32, 4), (64, 4), (128, 4), (128, 8)), (16, 32, 64, 128), (64, 128, 256), (3, 4, 5)
        ):
            fits = (m + n * sides) * k * 2 * (stages - 1) <= 200_000 and m * n * sides / warps <= 4096
            if fits and (m <= 32) == few and (few or (n >= 64 and k == 64)):
                found.append(GroupedConfig(m, n, k, warps, stages))
        return found


# A whole model of small kernels


def chain(report: Report) -> None:
    """One decode step of Qwen3-0.6B, layer after layer in one graph, without embedding and sampling."""
    model = MODELS["qwen3-0.6b"]
    shapes = linear_shapes(model)
    layers = [
        {part: randn(n, k) / k**0.5 for part, (n, k, _) in shapes.items() if part != "head"}
        for _ in range(model.layers)
    ]
    head = randn(model.vocab, model.hidden) / model.hidden**0.5
    for batch in (1, 2, 4, 8, 16, 32, 64):
        step = _Step(model, layers, head, batch, context=1000)
        expected = step.separate()
        for label, run in (
            ("separate kernels", step.separate),
            ("fused", step.fused),
            ("fused, dependent launches", step.overlapped),
        ):
            report.row(f"step of {batch}: {label}", measure([run]), error(run(), expected), step.nbytes)
        replay, out = capture(step.overlapped)
        expected = step.fused()
        same = 0
        for _ in range(100):
            out.fill_(float("nan"))
            replay()
            same += torch.equal(out, expected)
        print(f"    dependent launches give the same bits in {same} of 100 replays", flush=True)


class _Step:
    """``batch`` requests with ``context`` tokens each, the last of them new."""

    def __init__(
        self, model: Model, layers: list[dict[str, torch.Tensor]], head: torch.Tensor, batch: int, context: int
    ) -> None:
        self.model, self.layers, self.head = model, layers, head
        self.norm = 1 + randn(model.hidden) / 8
        self.x = randn(batch, model.hidden)
        page = 16
        width = -(-context // page)
        self.pools = randn(2, model.layers, batch * width, page, model.kv_heads, model.head_dim)
        self.table = torch.randperm(batch * width, device=DEVICE).int().view(batch, width)
        self.rows, self.seq_lens = ints(range(batch)), ints([context] * batch)
        last = context - 1
        self.slots = self.table[:, last // page].long() * page + last % page
        self.spec = model.spec()
        self.workspace = DecodeWorkspace(batch, model.heads, model.kv_heads, model.head_dim, BF16, DEVICE)
        self.workspace.plan(None, self.seq_lens)
        cache = batch * context * model.layers * 2 * model.kv_heads * model.head_dim * 2
        self.nbytes = sum(weight.nbytes for layer in layers for weight in layer.values()) + head.nbytes + cache

    def attend(self, qkv: torch.Tensor, layer: int, pdl: bool) -> torch.Tensor:
        out = torch.empty(qkv.shape[0], self.model.heads * self.model.head_dim, dtype=BF16, device=DEVICE)
        decode_attention(
            FusedQKV(qkv, self.slots),
            self.pools[0, layer],
            self.pools[1, layer],
            self.table,
            self.rows,
            self.seq_lens,
            self.spec,
            self.workspace,
            out,
            pdl=pdl,
        )
        return out

    def fused(self, pdl: bool = False) -> torch.Tensor:
        return self.one_row(pdl) if len(self.x) == 1 else self.few_rows(pdl)

    def overlapped(self) -> torch.Tensor:
        return self.fused(pdl=True)

    def one_row(self, pdl: bool) -> torch.Tensor:
        stream = self.x
        before: dict[str, Any] = {"norm": self.norm, "eps": 1e-6, "pdl": pdl}
        for index, layer in enumerate(self.layers):
            seen = self.attend(one_row_linear(stream, layer["qkv"], **before), index, pdl)
            stream = one_row_linear(seen, layer["o"], residual=stream, pdl=pdl)
            middle = one_row_linear(stream, layer["gate_up"], gated=True, **before)
            stream = one_row_linear(middle, layer["down"], residual=stream, pdl=pdl)
        return one_row_linear(stream, self.head, **before)

    def few_rows(self, pdl: bool) -> torch.Tensor:
        """With the library's product where a few rows are too many."""
        stream = self.x.clone()
        x = rms_norm(stream, self.norm, 1e-6, pdl=pdl)
        for index, layer in enumerate(self.layers):
            seen = self.attend(self.product(x, layer["qkv"], pdl), index, pdl)
            parts = self.product(seen, layer["o"], pdl, in_parts=True)
            x, stream = add_rms_norm(parts, stream, self.norm, 1e-6, pdl=pdl)
            middle = self.product(x, layer["gate_up"], pdl, gated=True)
            parts = self.product(middle, layer["down"], pdl, in_parts=True)
            x, stream = add_rms_norm(parts, stream, self.norm, 1e-6, pdl=pdl)
        return self.product(x, self.head, pdl)

    def product(
        self, x: torch.Tensor, weight: torch.Tensor, pdl: bool, *, gated: bool = False, in_parts: bool = False
    ) -> torch.Tensor:
        outputs, inputs = weight.shape
        config = few_rows_config(len(x), outputs // 2 if gated else outputs, inputs, gated=gated, in_parts=in_parts)
        if config is not None:
            return few_rows_linear(x, weight, gated=gated, config=config, pdl=pdl)
        out = F.linear(x, weight)
        return silu_and_mul(out, pdl=pdl) if gated else out

    def separate(self) -> torch.Tensor:
        stream = self.x.clone()
        x = rms_norm(stream, self.norm, 1e-6)
        for index, layer in enumerate(self.layers):
            seen = self.attend(F.linear(x, layer["qkv"]), index, False)
            x, stream = add_rms_norm(F.linear(seen, layer["o"]), stream, self.norm, 1e-6)
            middle = silu_and_mul(F.linear(x, layer["gate_up"]))
            x, stream = add_rms_norm(F.linear(middle, layer["down"]), stream, self.norm, 1e-6)
        return F.linear(x, self.head)
