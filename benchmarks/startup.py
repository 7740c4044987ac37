"""Start and size of an idle server: seconds until /v1/models answers, and resident memory of all its processes.

    python benchmarks/startup.py --repeat 5

Other flags are handed to the server. The first start of all pays for the model's download and the kernels' compilation.
"""

from __future__ import annotations

import argparse
import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

import psutil

SETTLE_SECONDS = 3.0
PATIENCE = 600.0  # seconds for one start


def measure(flags: list[str]) -> tuple[float, float]:
    """Seconds to the first answer, and MiB resident once the server has been idle for a moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    start = time.perf_counter()
    command = [sys.executable, "-m", "minisgl", "--port", str(port), "--silent-output", *flags]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models").close()
                break
            except urllib.error.URLError:
                if server.poll() is not None:
                    raise SystemExit(f"The server ended with exit code {server.returncode}.") from None
                if time.perf_counter() - start > PATIENCE:
                    raise SystemExit(f"The server did not answer within {PATIENCE:g} s.") from None
                time.sleep(0.02)
        seconds = time.perf_counter() - start
        time.sleep(SETTLE_SECONDS)
        launcher = psutil.Process(server.pid)
        resident = sum(p.memory_info().rss for p in [launcher, *launcher.children(recursive=True)])
        return seconds, resident / 2**20
    finally:
        server.terminate()
        server.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=5)
    args, flags = parser.parse_known_args()
    if any(flag.partition("=")[0] in ("--host", "--port") for flag in flags):
        parser.error("--host and --port are chosen here.")
    runs = [measure(flags) for _ in range(args.repeat)]
    seconds, mebibytes = (sorted(values) for values in zip(*runs, strict=True))
    report = {
        "start_seconds": [round(s, 2) for s in seconds],
        "start_median": round(seconds[len(seconds) // 2], 2),
        "resident_mib": [round(m) for m in mebibytes],
        "resident_median": round(mebibytes[len(mebibytes) // 2]),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
