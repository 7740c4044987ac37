"""`python -m minisgl.setup`: fetches the default model and compiles the CPU kernels, for a quick first start."""

from __future__ import annotations

import sys

from minisgl.kernel import cpu
from minisgl.models.source import ModelNotAvailable, resolve_model


def main() -> None:
    try:
        print(f"default model: {resolve_model(None)}", flush=True)
    except ModelNotAvailable as e:
        sys.exit(str(e))
    print("CPU kernels: " + ("ready" if cpu.load() else "no compiler, torch serves instead"), flush=True)


if __name__ == "__main__":
    main()
