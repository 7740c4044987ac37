"""`python -m minisgl` and the console script `minisgl`."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Reads the flags and serves, or chats. Returns the exit code; wrong flags end in SystemExit(2)."""
    # While there is nothing to clean up, Ctrl-C just ends the process. A KeyboardInterrupt in the middle of an import
    # would print its traceback, or be swallowed.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    from minisgl.env import EnvError, check_environment
    from minisgl.server.args import parse_args

    args = parse_args(sys.argv[1:] if argv is None else argv)
    try:
        check_environment()
    except EnvError as error:
        print(f"minisgl: {error}", file=sys.stderr)
        return 2
    if args.shell:
        from minisgl.shell import chat

        signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            return chat(args)
        except KeyboardInterrupt:
            return 0
    from minisgl.server.launch import launch

    return launch(args)


# Spawned workers import this module again, under another name.
if __name__ == "__main__":
    sys.exit(main())
