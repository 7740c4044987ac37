"""One tensor-parallel rank as a process: an engine, and the scheduler that drives it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from minisgl.addresses import Addresses

from .args import ServerArgs
from .process import Reporter

if TYPE_CHECKING:
    from minisgl.core import Engine
    from minisgl.engine.config import EngineConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class RankConfig:
    """What one rank is started with. ``seed`` is the same on all ranks: they take the same decisions."""

    args: ServerArgs
    model_path: Path
    addresses: Addresses
    rank: int
    seed: int


def run_rank(config: RankConfig, reporter: Reporter) -> None:
    """Loads the model and serves until the process is killed."""
    reporter.progress("loading torch")
    from minisgl.engine.engine import TorchEngine

    serve(TorchEngine(engine_config(config), progress=reporter.progress), config, reporter)


def engine_config(config: RankConfig) -> EngineConfig:
    """The flags that concern the engine."""
    from minisgl.engine.config import EngineConfig

    args = config.args
    return EngineConfig(
        model_path=config.model_path,
        dtype=args.dtype,
        device=args.device,
        load_format=args.load_format,
        tp_rank=config.rank,
        tp_size=args.tp,
        # In the private directory: no port to probe for, and two instances never meet.
        rendezvous=Path(config.addresses.directory) / "ranks" if args.tp > 1 else None,
        num_pages=args.num_pages,
        page_size=args.page_size,
        memory_ratio=args.memory_ratio,
        max_running_req=args.max_running_req,
        max_seq_len=args.max_seq_len_override,
        token_budget=args.max_prefill_length,
        attention=args.attn,
        cuda_graph_max_bs=args.cuda_graph_max_bs,
        deterministic=args.deterministic,
    )


def serve(engine: Engine, config: RankConfig, reporter: Reporter) -> None:
    """Runs the scheduler of this rank on ``engine``."""
    import zmq

    from minisgl.scheduler import FollowerIO, Scheduler, SchedulerConfig, SchedulerIO, ZmqIO

    args, addresses = config.args, config.addresses
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    io: SchedulerIO
    if config.rank == 0:
        followers = [addresses.rank(rank) for rank in range(1, addresses.ranks)]
        io = ZmqIO(context, addresses.scheduler, addresses.detokenizer, followers)
    else:
        io = FollowerIO(context, addresses.rank(config.rank))
    scheduler = Scheduler(
        engine,
        io,
        SchedulerConfig(cache=args.cache, overlap=not args.disable_overlap, seed=config.seed, max_queue=args.max_queue),
    )
    info = engine.info
    reporter.ready(
        f"{info.num_pages} pages of {info.page_size} tokens, at most {info.max_running_req} requests at once, "
        f"context {info.max_seq_len}",
        max_seq_len=info.max_seq_len,
    )
    scheduler.run_forever()
