"""Flags: what is accepted, and the one line about what is not."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from minisgl.server.args import DEFAULT_MODEL_NAME, ServerArgs, check_options, parse_args

ROOT = Path(__file__).parents[2]


def test_defaults() -> None:
    args = parse_args([])
    assert args == ServerArgs()
    assert (args.host, args.port, args.model_name) == ("127.0.0.1", 1919, DEFAULT_MODEL_NAME)


def test_all_flags() -> None:
    words = """--model m --dtype bfloat16 --device cpu --host ::1 --port 0 --tp 2 --num-pages 10 --page-size 1
        --memory-ratio 0.5 --max-running-req 3 --max-seq-len-override 4 --max-prefill-length 5 --max-queue 9
        --cache naive --deterministic
        --attn torch,triton --cuda-graph-max-bs 16 --num-tokenizer 6 --num-api-server 7 --model-source modelscope
        --load-format dummy --served-model-name s --disable-overlap --seed 8 --silent-output
        --log-level debug --shell"""
    args = parse_args(words.split())
    assert args == ServerArgs(
        model="m",
        dtype="bfloat16",
        device="cpu",
        host="::1",
        port=0,
        tp=2,
        num_pages=10,
        page_size=1,
        memory_ratio=0.5,
        max_running_req=3,
        max_seq_len_override=4,
        max_prefill_length=5,
        max_queue=9,
        cache="naive",
        attn="torch,triton",
        cuda_graph_max_bs=16,
        deterministic=True,
        num_tokenizer=6,
        num_api_server=7,
        model_source="modelscope",
        load_format="dummy",
        served_model_name="s",
        disable_overlap=True,
        seed=8,
        silent_output=True,
        log_level="debug",
        shell=True,
    )
    assert args.model_name == "s"
    assert all(getattr(args, f.name) != f.default for f in fields(args)), "every flag is in the test"


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ("--port 70000", "--port must be an integer from 0 to 65535, not '70000'."),
        ("--port http", "--port must be an integer from 0 to 65535, not 'http'."),
        ("--page-size 0", "--page-size must be an integer from 1 to 4096, not '0'."),
        ("--num-pages -1", "--num-pages must be an integer of at least 1, not '-1'."),
        ("--memory-ratio nan", "--memory-ratio must be a number between 0 and 1, both excluded, not 'nan'."),
        ("--memory-ratio 1", "--memory-ratio must be a number between 0 and 1, both excluded, not '1'."),
        ("--dtype int8", "--dtype must be one of auto, float32, bfloat16, float16, not 'int8'."),
        ("--cache lru", "--cache must be one of radix, naive, not 'lru'."),
        ("--model=", "--model must not be empty."),
        ("--prot 1", "unknown argument --prot; did you mean --port?"),
        ("--silent", "unknown argument --silent; did you mean --silent-output?"),
        ("serve", "unknown argument serve; --help lists the flags."),
        ("--model", "--model: expected one argument"),
    ],
)
def test_wrong_flag_is_one_line(flags: str, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        parse_args(flags.split())
    assert error.value.code == 2
    assert capsys.readouterr() == ("", f"minisgl: {line}\n")


def test_name_of_the_model() -> None:
    assert parse_args([]).model_name == "SmolLM2-135M-Instruct"
    assert parse_args(["--model", "a/b"]).model_name == "a/b"
    assert parse_args(["--model", "a/b", "--served-model-name", "c"]).model_name == "c"
    assert parse_args(["--model", "caf\udce9"]).model_name == "caf?"  # Latin-1 in the name of a directory


@pytest.mark.parametrize("attn", ["torch", "auto", "cpu", "torch,triton", "fi", "fi,triton", "triton,fi"])
def test_attention_names(attn: str) -> None:
    assert parse_args(["--attn", attn]).attn == attn


@pytest.mark.parametrize("attn", ["flashinfer", "auto,torch", "torch,", "a,b,c"])
def test_unknown_attention(attn: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_args(["--attn", attn])
    assert "PREFILL,DECODE" in capsys.readouterr().err


def test_the_command_is_light(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mistakes are told before anything heavy is imported, and so is --help; the launcher itself stays small too."""
    code = """
import sys
from minisgl.__main__ import main
try:
    main(sys.argv[1:])
except SystemExit:
    import minisgl.server.launch
    print(sorted({"torch", "numpy", "zmq", "msgspec", "fastapi", "pydantic", "tokenizers"} & set(sys.modules)))
"""
    for flags in (["--help"], ["--port", "x"]):
        result = subprocess.run(
            [sys.executable, "-c", code, *flags], cwd=ROOT, capture_output=True, text=True, check=True
        )
        assert result.stdout.splitlines()[-1] == "[]"
    monkeypatch.setenv("MINISGL_CACHEDIR", "/tmp")
    result = subprocess.run([sys.executable, "-m", "minisgl"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert result.stderr == "minisgl: MINISGL_CACHEDIR is no setting of minisgl; did you mean MINISGL_CACHE_DIR?\n"


def test_options_are_checked_like_flags() -> None:
    given = {"model": "a b", "tp": 2, "memory_ratio": 0.5, "deterministic": True, "page_size": 1, "attn": "torch,cpu"}
    assert check_options(**given) == ServerArgs(**given)
    assert check_options(model=Path("/x"), tp="2", num_pages=None) == ServerArgs(model="/x", tp=2)
    with pytest.raises(TypeError, match="There is no option page_sise; did you mean page_size"):
        check_options(page_sise=4)
    for name, value, problem in (
        ("tp", True, "must not be True."),
        ("dtype", None, "must not be None."),
        ("model", b"x", "must not be b'x'."),
        ("model", 5, "must not be 5."),
        ("deterministic", "yes", "must be True or False, not 'yes'."),
        ("dtype", "int3", "must be one of auto, float32, bfloat16, float16, not 'int3'."),
        ("model", "", "must not be empty."),
        ("max_prefill_length", -1, "must be an integer of at least 1, not '-1'."),
    ):
        with pytest.raises(ValueError) as error:  # noqa: PT011
            check_options(**{name: value})
        assert str(error.value) == f"{name} {problem}"
