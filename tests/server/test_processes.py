"""Real servers, really interrupted, killed and broken. The engine is simulated; every process is a real one."""

from __future__ import annotations

import concurrent.futures
import json
import os
import signal
import socket
import time
from pathlib import Path

import httpx
import openai
import psutil
import pytest
from server_process import ServerProcess, until

pytestmark = pytest.mark.process

SLOW = {"SIMULATED_DELAY": "0.02"}
"""Steps that take their time, so that a request is under way for as long as a test needs."""
LONG = 900


@pytest.fixture
def flags(toy_model: Path) -> list[str]:
    return ["--model", str(toy_model), "--served-model-name", "toy", "--port", "0"]


def run_dirs(tmp: Path) -> list[Path]:
    return [p for p in tmp.glob("minisgl-*") if p.is_dir()]


def stream(server: ServerProcess, started: list[float]) -> list[str]:
    """The events of a long stream; ``started`` gets an entry at the first."""
    body = {"prompt": "hello", "max_tokens": LONG, "stream": True}
    lines = []
    with httpx.stream("POST", server.url + "/v1/completions", json=body, timeout=30) as response:
        for line in response.iter_lines():
            started.append(time.monotonic())
            lines.append(line)
    return [line for line in lines if line]


def test_serves(flags: list[str], tmp_path: Path) -> None:
    """From start to Ctrl-C, and what the user sees of it."""
    with ServerProcess(*flags, tmp=tmp_path).wait_ready() as server:
        client = openai.OpenAI(base_url=server.url + "/v1", api_key="-")
        assert [m.id for m in client.models.list()] == ["toy"]
        answer = client.completions.create(model="toy", prompt="hello", max_tokens=5, temperature=0)
        assert len(answer.choices[0].text) == 5
        assert answer.choices[0].finish_reason == "length"
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (5, 5)
        chat = client.chat.completions.create(
            model="toy", messages=[{"role": "user", "content": "hi"}], max_tokens=200, stop=answer.choices[0].text[3]
        )
        assert chat.choices[0].finish_reason == "stop"
        # Over the context, both numbers; the other requests do not care.
        with pytest.raises(openai.BadRequestError, match=r"1100.* 1024") as error:
            client.completions.create(model="toy", prompt="x" * 1100)
        assert error.value.code == "context_length_exceeded"
        (directory,) = run_dirs(tmp_path)
        assert directory.stat().st_mode & 0o777 == 0o700
        soft, hard = server.worker("api server").rlimit(psutil.RLIMIT_NOFILE)
        assert soft >= min(hard, 65536), "the limit of clients is not that of a shell"
        launcher = psutil.Process(server.pid)
        assert launcher.memory_info().rss < 40 * 2**20
        start = time.monotonic()
        server.interrupt()
        assert server.wait() == 0
        assert time.monotonic() - start < 5
        server.check_gone()
        assert run_dirs(tmp_path) == []
        assert "Traceback" not in server.stderr
        assert "scheduler: ready, 512 pages" in server.stderr


def test_end_during_requests(flags: list[str], tmp_path: Path) -> None:
    """What is short is finished; what is long gets an error when its time is up; nobody prints a traceback."""
    with (
        ServerProcess(*flags, "--num-tokenizer", "1", tmp=tmp_path, **SLOW).wait_ready() as server,
        concurrent.futures.ThreadPoolExecutor() as pool,
    ):
        started: list[float] = []
        streamed = pool.submit(stream, server, started)
        whole = pool.submit(server.ask, max_tokens=LONG)
        until(lambda: started)
        short = pool.submit(server.ask, max_tokens=60)
        time.sleep(0.3)
        start = time.monotonic()
        server.terminate()
        time.sleep(0.5)
        with pytest.raises(httpx.ConnectError):
            server.health()
        assert server.wait() == 0
        assert time.monotonic() - start < 10
        assert len(short.result().json()["choices"][0]["text"]) == 60
        assert whole.result().status_code == 503
        error = json.loads(streamed.result()[-1].removeprefix("data: "))["error"]
        assert error["code"] == "shutting_down"
        assert "Traceback" not in server.stderr


def test_nohup(flags: list[str], tmp_path: Path) -> None:
    """A server that was started to outlive its terminal does."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # inherited, as nohup does it
    try:
        detached = ServerProcess(*flags, tmp=tmp_path)
    finally:
        signal.signal(signal.SIGHUP, before)
    with detached.wait_ready() as server:
        os.killpg(server.pid, signal.SIGHUP)
        assert server.ask().status_code == 200
        server.terminate()
        assert server.wait() == 0


def test_client_that_does_not_read(flags: list[str], tmp_path: Path) -> None:
    """It cannot keep the server from ending, nor does it cause a traceback."""
    long = ["--max-seq-len-override", "100000", "--num-pages", "6400", "--max-running-req", "64"]
    with ServerProcess(*flags, *long, tmp=tmp_path).wait_ready() as server:
        content = json.dumps({"prompt": "hello", "max_tokens": 50_000, "n": 32, "stream": True}).encode()
        head = ["POST /v1/completions HTTP/1.1", "host: x", "content-type: application/json"]
        head += [f"content-length: {len(content)}", "", ""]
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.connect(("127.0.0.1", httpx.URL(server.url).port))
            connection.sendall("\r\n".join(head).encode() + content)
            time.sleep(1)
            server.interrupt()
            assert server.wait() == 0
        assert "Traceback" not in server.stderr


def test_signal_during_the_start(flags: list[str], tmp_path: Path) -> None:
    """Whenever it comes: from before the first worker to when all of them load."""
    for seconds in (0.1, 0.4, 0.8):
        with ServerProcess(*flags, tmp=tmp_path) as server:
            time.sleep(seconds)
            server.remember()
            server.interrupt()
            server.wait()
            assert "Traceback" not in server.stderr
    until(lambda: run_dirs(tmp_path) == [])


def test_launcher_is_killed(flags: list[str], tmp_path: Path) -> None:
    """No worker outlives it, nor does the resource tracker; the next start sweeps what it left."""
    with ServerProcess(*flags, "--tp", "2", "--num-api-server", "2", tmp=tmp_path).wait_ready() as server:
        server.kill()
        server.wait()
        server.check_gone()
        (left,) = run_dirs(tmp_path)
        other = tmp_path / "minisgl-not-ours"
        other.write_text("a file")
    with ServerProcess(*flags, tmp=tmp_path).wait_ready() as server:
        assert not left.exists()
        assert len(run_dirs(tmp_path)) == 1
        assert other.exists()


def test_launcher_is_killed_during_the_start(flags: list[str], tmp_path: Path) -> None:
    with ServerProcess(*flags, tmp=tmp_path) as server:
        until(lambda: len(psutil.Process(server.pid).children()) >= 4)
        server.remember()
        server.kill()
        server.wait()
        server.check_gone()


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("scheduler", []),
        ("scheduler 1", ["--tp", "2"]),
        ("tokenizer 0", ["--num-tokenizer", "1"]),
        ("detokenizer", ["--num-tokenizer", "1"]),
        ("api server 1", ["--num-api-server", "2"]),
    ],
)
def test_worker_is_killed(flags: list[str], tmp_path: Path, name: str, counts: list[str]) -> None:
    """/health says so within two seconds, requests in flight get an error, and the server can still be ended."""
    with (
        ServerProcess(*flags, *counts, tmp=tmp_path, **SLOW).wait_ready() as server,
        concurrent.futures.ThreadPoolExecutor() as pool,
    ):
        started: list[float] = []
        streamed = pool.submit(stream, server, started)
        until(lambda: started)
        server.worker(name).kill()
        killed = time.monotonic()
        until(lambda: server.health().status_code == 503, 2)
        text = f"The {name} process has died (killed by SIGKILL)."
        assert server.health().json()["error"]["message"] == text
        assert server.ask().status_code == 503
        try:
            error = json.loads(streamed.result()[-1].removeprefix("data: "))["error"]
            assert (error["message"], error["code"]) == (text, "worker_died")
        except httpx.RemoteProtocolError:
            assert name == "api server 1"  # the stream was its own
        assert time.monotonic() - killed < 4
        assert text.removesuffix(".") in server.stderr
        server.terminate()
        assert server.wait() == 1
        assert "Traceback" not in server.stderr


def test_only_api_server_is_killed(flags: list[str], tmp_path: Path) -> None:
    """With nobody left to answer, the launcher ends."""
    with ServerProcess(*flags, tmp=tmp_path).wait_ready() as server:
        server.worker("api server").kill()
        assert server.wait() == 1
        assert "The api server process has died" in server.stderr
        server.check_gone()
        assert run_dirs(tmp_path) == []


def test_worker_fails_to_start(flags: list[str], tmp_path: Path) -> None:
    with ServerProcess(*flags, "--tp", "2", tmp=tmp_path, SIMULATED_FAIL="1") as server:
        assert server.wait() == 1
        last = server.stderr.splitlines()[-1]
        assert last == "minisgl: scheduler 1: The simulated engine has no wish to start."
        assert "Traceback" not in server.stderr
        assert run_dirs(tmp_path) == []


def test_port_in_use(flags: list[str], tmp_path: Path) -> None:
    """One line, at once; by a stranger, and by a server that has not begun to listen yet."""
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        port = str(stranger.getsockname()[1])
        with ServerProcess(*flags, "--port", port, tmp=tmp_path) as server:
            assert server.wait() == 1
            assert server.stderr.count("\n") == 1
            assert f"Port {port} on 127.0.0.1" in server.stderr
    with (
        ServerProcess(*flags, "--port", port, tmp=tmp_path) as first,
        ServerProcess(*flags, "--port", port, tmp=tmp_path) as second,
    ):
        until(lambda: first.ended or second.ended, 20)
        winner, loser = (second, first) if first.ended else (first, second)
        assert loser.wait() == 1
        assert winner.wait_ready().url.endswith(port)


def test_address_of_another_machine(tmp_path: Path) -> None:
    with ServerProcess("--host", "192.0.2.1", tmp=tmp_path) as server:  # reserved for documentation
        assert server.wait() == 2
        assert server.stderr == "minisgl: --host must be an address of this machine, not '192.0.2.1'.\n"


def test_port_is_free_again_at_once(flags: list[str], tmp_path: Path) -> None:
    """After the terminal was closed: connections in TIME_WAIT do not keep the next server off the port."""
    with ServerProcess(*flags, tmp=tmp_path).wait_ready() as server:
        client = httpx.Client()
        client.get(server.url + "/health")
        os.killpg(server.pid, signal.SIGHUP)  # it closes the idle connection itself, which leaves that in TIME_WAIT
        assert server.wait() == 0
        port = server.url.rpartition(":")[2]
    with ServerProcess(*flags, "--port", port, tmp=tmp_path).wait_ready() as server:
        assert server.ask().status_code == 200


def test_two_servers_at_once(flags: list[str], tmp_path: Path) -> None:
    with ServerProcess(*flags, tmp=tmp_path) as first, ServerProcess(*flags, tmp=tmp_path) as second:
        first.wait_ready()
        second.wait_ready()
        assert len(run_dirs(tmp_path)) == 2
        assert first.ask(temperature=0).json()["choices"] == second.ask(temperature=0).json()["choices"]
        first.terminate()
        assert first.wait() == 0
        assert second.ask().status_code == 200


def test_replies_find_their_api_server(flags: list[str], tmp_path: Path) -> None:
    """Three API servers on one port, two tokenizers: every client gets its own answer, refusals included."""
    counts = ["--num-api-server", "3", "--num-tokenizer", "2", "--max-running-req", "8"]
    with ServerProcess(*flags, *counts, tmp=tmp_path).wait_ready() as server:

        def ask(i: int) -> tuple[str, str]:
            if i % 7 == 0:  # refused by the tokenizer
                response = server.ask("x" * (1100 + i))
                assert str(1100 + i) in response.json()["error"]["message"]
                return "", ""
            if i % 7 == 1:  # refused by the scheduler
                response = server.ask([300 + i])
                assert f"Token id {300 + i} is outside" in response.json()["error"]["message"]
                return "", ""
            # With the model greedy, the answer to a prompt is a function of the prompt.
            prompt = f"prompt {i % 20}"
            return prompt, server.ask(prompt, temperature=0, max_tokens=20 + i % 20).json()["choices"][0]["text"]

        with concurrent.futures.ThreadPoolExecutor(24) as pool:
            answers = list(pool.map(ask, range(200)))
        by_prompt: dict[str, set[str]] = {}
        for prompt, text in answers:
            by_prompt.setdefault(prompt, set()).add(text)
        assert all(len(texts) == 1 for texts in by_prompt.values())
        assert len({text for _, text in answers}) == 21
        clients = [len(server.worker(f"api server {i}").net_connections("tcp")) for i in range(3)]
        assert sum(count > 0 for count in clients) >= 2, "the port is shared"


def test_full_queue(flags: list[str], tmp_path: Path) -> None:
    """More than may wait is refused at once, at whichever API server it came in; the others are served."""
    counts = ["--num-api-server", "2", "--max-running-req", "2", "--max-queue", "2"]
    with ServerProcess(*flags, *counts, tmp=tmp_path, SIMULATED_DELAY="0.02").wait_ready() as server:
        with concurrent.futures.ThreadPoolExecutor(12) as pool:
            responses = list(pool.map(lambda i: server.ask(f"prompt {i}", max_tokens=60, ignore_eos=True), range(12)))
        codes = [response.status_code for response in responses]
        assert codes.count(200) >= 4
        assert codes.count(503) == 12 - codes.count(200) > 0
        refused = next(response.json()["error"] for response in responses if response.status_code == 503)
        assert refused["code"] == "queue_full"
        assert server.ask().status_code == 200


def test_client_leaves(flags: list[str], tmp_path: Path) -> None:
    """Its slot is free within a few steps, whether it streamed or not: with one slot, the next request is served."""
    with ServerProcess(*flags, "--max-running-req", "1", tmp=tmp_path, SIMULATED_DELAY="0.05").wait_ready() as server:
        for streaming in (True, False):
            body = {"prompt": "hello", "max_tokens": LONG, "stream": streaming}
            with httpx.Client(timeout=0.5) as client:
                if streaming:
                    with client.stream("POST", server.url + "/v1/completions", json=body) as response:
                        next(response.iter_lines())
                else:
                    with pytest.raises(httpx.ReadTimeout):
                        client.post(server.url + "/v1/completions", json=body)
            start = time.monotonic()
            assert server.ask(max_tokens=2).status_code == 200
            assert time.monotonic() - start < 2
        assert server.health().json()["requests"] == 0
        # Asked to end twice, the server does not wait for the request under way.
        with httpx.stream("POST", server.url + "/v1/completions", json={"prompt": "a", "stream": True}) as response:
            next(response.iter_lines())
            server.interrupt()
            time.sleep(0.3)
            start = time.monotonic()
            server.interrupt()
            assert server.wait() == 0
            assert time.monotonic() - start < 2
        assert "Traceback" not in server.stderr


def test_wrong_model(tmp_path: Path) -> None:
    start = time.monotonic()
    with ServerProcess("--model", str(tmp_path / "none"), "--port", "0", tmp=tmp_path) as server:
        assert server.wait() == 2
        assert server.stderr.count("\n") == 1
        assert "none" in server.stderr
    assert time.monotonic() - start < 10
    assert os.listdir(tmp_path) == []
