"""The command line: flags and their checks. Imports nothing heavy, so a mistake is told at once."""

from __future__ import annotations

import argparse
import difflib
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from numbers import Real
from typing import Literal, NoReturn, get_args

from minisgl.attention.registry import BACKENDS
from minisgl.engine.config import Device, DType, LoadFormat
from minisgl.models.source import ModelSource
from minisgl.utils.logging import LEVELS
from minisgl.version import __version__

CacheName = Literal["radix", "naive"]

DEFAULT_MODEL_NAME = "SmolLM2-135M-Instruct"
"""What the embedded default model is called in the API."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerArgs:
    """What the command line said. None leaves the choice to the device or the model."""

    model: str | None = None
    dtype: DType = "auto"
    device: Device = "auto"
    host: str = "127.0.0.1"
    port: int = 1919
    tp: int = 1
    num_pages: int | None = None
    page_size: int = 16
    memory_ratio: float | None = None
    max_running_req: int | None = None
    max_seq_len_override: int | None = None
    max_prefill_length: int | None = None
    cache: CacheName = "radix"
    attn: str = "auto"
    cuda_graph_max_bs: int | None = None
    deterministic: bool = False
    num_tokenizer: int = 0
    num_api_server: int = 1
    model_source: ModelSource = "huggingface"
    load_format: LoadFormat = "auto"
    served_model_name: str | None = None
    max_queue: int | None = None
    disable_overlap: bool = False
    seed: int | None = None
    silent_output: bool = False
    log_level: str = "info"
    shell: bool = False

    @property
    def model_name(self) -> str:
        """What clients call the model."""
        name = self.served_model_name or self.model or DEFAULT_MODEL_NAME
        return name.encode(errors="replace").decode()  # JSON has no place for what was not UTF-8 on the command line


def parse_args(argv: Sequence[str]) -> ServerArgs:
    """Reads the flags. For a wrong one: one line on standard error and SystemExit(2)."""
    parser = _build_parser()
    namespace, unknown = parser.parse_known_args(argv)
    if unknown:
        parser.error(_unknown_argument(unknown[0]))
    return ServerArgs(**{f.name: getattr(namespace, f.name) for f in fields(ServerArgs)})


def check_options(**options: object) -> ServerArgs:
    """Keyword arguments as the command line would read them: ``page_size=4`` is ``--page-size 4``.

    Raises TypeError for an unknown option, and ValueError, which names it, for what the command line would refuse.
    """
    names = [f.name for f in fields(ServerArgs)]
    for name in options.keys() - set(names):
        raise TypeError(f"There is no option {name}; {_nearest(name, names)}")
    flags = []
    for f in fields(ServerArgs):
        value = options.get(f.name, f.default)
        if isinstance(f.default, bool):
            if not isinstance(value, bool):
                raise ValueError(f"{f.name} must be True or False, not {value!r}.")
            flags += [_flag(f.name)] if value else []
        elif value is not None or f.default is not None:
            kinds = (str, os.PathLike) if str(f.type).startswith("str") else (str, Real)
            if isinstance(value, bool) or not isinstance(value, kinds):
                raise ValueError(f"{f.name} must not be {value!r}.")
            flags.append(f"{_flag(f.name)}={os.fspath(value) if isinstance(value, os.PathLike) else value}")
    try:
        namespace = _build_parser(exit_on_error=False).parse_args(flags)
    except argparse.ArgumentError as error:
        name = str(error.argument_name).removeprefix("--").replace("-", "_")
        raise ValueError(f"{name} {error.message}") from None
    return ServerArgs(**vars(namespace))


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        # argparse would print the whole usage first, and the one line that matters would drown in it.
        line = message.removeprefix("argument ").replace(": must", " must", 1)
        self.exit(2, f"{self.prog}: {line}\n")


def _unknown_argument(argument: str) -> str:
    flags = [_flag(f.name) for f in fields(ServerArgs)]
    return f"unknown argument {argument}; {_nearest(argument.partition('=')[0], flags)}"


def _nearest(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {near[0]}?" if near else "--help lists the flags."


def _integer(low: int, high: int | None = None) -> Callable[[str], int]:
    allowed = f"an integer from {low} to {high}" if high is not None else f"an integer of at least {low}"

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = low - 1
        if value < low or (high is not None and value > high):
            raise argparse.ArgumentTypeError(f"must be {allowed}, not {text!r}.")
        return value

    return parse


def _ratio(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(f"must be a number between 0 and 1, both excluded, not {text!r}.")
    return value


def _one_of(allowed: Sequence[str]) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in allowed:
            raise argparse.ArgumentTypeError(f"must be one of {', '.join(allowed)}, not {text!r}.")
        return text

    return parse


def _attention(text: str) -> str:
    names = text.split(",")
    if text != "auto" and (len(names) > 2 or any(name not in BACKENDS for name in names)):
        raise argparse.ArgumentTypeError(
            f"must be auto, one of {', '.join(BACKENDS)}, or two of them as PREFILL,DECODE, not {text!r}."
        )
    return text


def _text(text: str) -> str:
    if not text.strip():
        raise argparse.ArgumentTypeError("must not be empty.")
    return text


def _build_parser(*, exit_on_error: bool = True) -> _Parser:
    parser = _Parser(
        prog="minisgl",
        description="Serves a language model through an OpenAI-compatible API.",
        allow_abbrev=False,
        exit_on_error=exit_on_error,
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=34, width=110),
    )
    default = ServerArgs()

    def add(flag: str, kind: Callable[[str], object], metavar: str, text: str) -> None:
        value = getattr(default, flag.removeprefix("--").replace("-", "_"))
        shown = "" if value is None else f" (default: {value})"
        group.add_argument(flag, type=kind, metavar=metavar, default=value, help=text + shown)

    def choice(flag: str, allowed: Sequence[str], text: str) -> None:
        add(flag, _one_of(allowed), "|".join(allowed), text)

    group = parser.add_argument_group("model")
    add("--model", _text, "MODEL", f"directory, Hugging Face id or .gguf file (default: {DEFAULT_MODEL_NAME})")
    choice("--model-source", get_args(ModelSource), "where a model id is looked up")
    choice("--load-format", get_args(LoadFormat), "dummy: random weights, from a bare config.json")
    add("--served-model-name", _text, "NAME", "what clients call the model (default: as given in --model)")
    choice("--dtype", get_args(DType), "type of weights and activations; auto: float32 on a CPU, the model's on a GPU")
    add("--max-seq-len-override", _integer(1), "N", "longest prompt and output together (default: the model's context)")

    group = parser.add_argument_group("engine")
    choice("--device", get_args(Device), "where the model runs; auto: a GPU if there is one")
    add("--tp", _integer(1, 64), "N", "tensor parallelism: ranks that share the model")
    add("--page-size", _integer(1, 4096), "N", "tokens in a page of the KV cache")
    add("--num-pages", _integer(1), "N", "pages in the KV cache (default: as many as fit)")
    add(
        "--memory-ratio",
        _ratio,
        "R",
        "share of the memory to use (default: 0.9 of a GPU, 0.3 of a host)",
    )
    add("--max-running-req", _integer(1, 65536), "N", "requests that run at once (default: 64 on a CPU, 256 on a GPU)")
    add(
        "--max-queue",
        _integer(0),
        "N",
        "requests that may wait for a place; one more is refused with 503 (default: no limit)",
    )
    add("--max-prefill-length", _integer(1), "N", "new tokens in one step, over all requests (default: by device)")
    choice("--cache", get_args(CacheName), "radix: prefixes are shared; naive: nothing is kept")
    add("--attn", _attention, "NAME", f"attention: auto, {', '.join(BACKENDS)}, or PREFILL,DECODE")
    add("--cuda-graph-max-bs", _integer(0), "N", "largest batch in a CUDA graph; 0: no graphs (default: 256)")
    group.add_argument(
        "--deterministic",
        action="store_true",
        help="on one or two GPUs: a request gets the same tokens in whatever company, slower; on a CPU it is so anyway",
    )
    group.add_argument("--disable-overlap", action="store_true", help="plan each step only when the last one is done")
    add("--seed", _integer(0, 2**63 - 1), "N", "makes sampling repeatable for requests without a seed of their own")

    group = parser.add_argument_group("server")
    add("--host", _text, "HOST", "address to listen on")
    add("--port", _integer(0, 65535), "PORT", "port to listen on; 0: any free one")
    add("--num-api-server", _integer(1, 64), "N", "HTTP processes on the one port")
    add("--num-tokenizer", _integer(0, 64), "N", "tokenizer processes; 0: one process tokenizes and detokenizes")
    choice("--log-level", LEVELS, "what is logged")
    group.add_argument("--silent-output", action="store_true", help="no progress and no line per request")
    group.add_argument("--shell", action="store_true", help="chat in this terminal; no server")
    group.add_argument("--version", action="version", version=f"minisgl {__version__}")
    return parser
