"""`python -m minisgl` with a simulated engine in place of the real one: starts in a second, answers nonsense at once.

Run as a script with the server's flags. The environment variable SIMULATED_FAIL names a rank that fails to start,
SIMULATED_DELAY is the time of a step in seconds.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from minisgl.server.process import Reporter
    from minisgl.server.scheduler_process import RankConfig


def run_simulated_rank(config: RankConfig, reporter: Reporter) -> None:
    from minisgl.core import EngineInfo
    from minisgl.engine.simulated import SimulatedEngine, SimulatedModel
    from minisgl.server.scheduler_process import serve

    args = config.args
    if os.environ.get("SIMULATED_FAIL") == str(config.rank):
        raise ValueError("The simulated engine has no wish to start.")
    info = EngineInfo(
        num_pages=args.num_pages or 512,
        page_size=args.page_size,
        max_running_req=args.max_running_req or 16,
        max_seq_len=args.max_seq_len_override or 1024,
        vocab_size=256,
        token_budget=args.max_prefill_length or 256,
    )
    # Letters only: every token is one character of text.
    engine = SimulatedEngine(info, SimulatedModel(vocab_size=26), delay=float(os.environ.get("SIMULATED_DELAY", "0")))
    serve(engine, config, reporter)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    from minisgl.server.args import parse_args
    from minisgl.server.launch import launch

    sys.exit(launch(parse_args(sys.argv[1:]), rank_entry=run_simulated_rank))
