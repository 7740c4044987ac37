"""Throughput through HTTP: starts a server with dummy weights, loads it with streams, and prints what online.py does.

    python benchmarks/gpu_http.py [--model benchmarks/configs/qwen3-0.6b] [--streams 256] [--processes 4]

Prompts and outputs are as long as in the offline benchmark on average. A bare config has no tokenizer; one byte is one
token then, so a word of a prompt is about four of them.
"""

from __future__ import annotations

import argparse
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

HERE = Path(__file__).parent
BYTES_OF_A_WORD = 4.2


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
    return port


def wait_for(url: str, server: subprocess.Popen[bytes], seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if server.poll() is not None:
            raise SystemExit(f"The server ended with {server.returncode}.")
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    raise SystemExit(f"The server was not ready within {seconds:.0f} s.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(HERE / "configs/qwen3-0.6b"))
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--input-len", type=int, default=560, help="tokens")
    parser.add_argument("--output-len", type=int, default=520)
    parser.add_argument("--processes", type=int, default=4, help="of the load")
    parser.add_argument("--num-api-server", type=int, default=2)
    parser.add_argument("--num-tokenizer", type=int, default=1)
    args = parser.parse_args()
    port = free_port()
    command = [sys.executable, "-m", "minisgl", "--model", args.model, "--load-format", "dummy", "--port", port]
    command += ["--num-api-server", args.num_api_server, "--num-tokenizer", args.num_tokenizer, "--silent-output"]
    server = subprocess.Popen(list(map(str, command)))
    try:
        url = f"http://127.0.0.1:{port}"
        wait_for(url, server, 120)
        load = [sys.executable, HERE / "online.py", "--url", url, "--endpoint", "completions"]
        load += ["--concurrency", args.streams, "--num-requests", args.streams, "--processes", args.processes]
        load += ["--input-len", round(args.input_len / BYTES_OF_A_WORD), "--output-len", args.output_len]
        load += ["--spread", 0.8, "--temperature", 0.6]
        subprocess.run(list(map(str, load)), check=True, timeout=120)
    finally:
        server.terminate()
        try:
            server.wait(20)
        except subprocess.TimeoutExpired:
            server.kill()


if __name__ == "__main__":
    main()
