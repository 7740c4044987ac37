"""The launcher: from the flags to a running server, and back to nothing.

bind the port ──> find the model ──> run directory ──> start all processes ──> all ready ──> listen, say so
     │                 │                                      │                                  │
   taken: 1        not there: 2                            one fails: 1                    watch until a signal
"""

from __future__ import annotations

import contextlib
import errno
import random
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minisgl.addresses import Addresses
from minisgl.models.source import ModelNotAvailable, resolve_model
from minisgl.tokenizer.worker import run_detokenizer, run_tokenizer

from .args import ServerArgs
from .http_process import BACKLOG, ApiServerConfig, run_api_server
from .process import Failed, Ready, Reporter, Stage, exit_words
from .progress import StartupProgress
from .rundir import RunDir
from .scheduler_process import RankConfig, run_rank
from .supervisor import Died, Reported, Signalled, Supervisor, Worker, ending_signals

if TYPE_CHECKING:
    import zmq

    from minisgl.message import Push

OPEN_FILES = 65536

API_STOP_SECONDS = 5.0
"""For an API server to drain (http_server.py) and end; everybody else has nothing to finish."""
STOP_SECONDS = 2.0

RankEntry = Callable[[RankConfig, Reporter], None]


class StartError(Exception):
    """The server cannot start: one sentence, and the exit code of the launcher."""

    def __init__(self, message: str, code: int = 1) -> None:
        super().__init__(message)
        self.code = code


def launch(args: ServerArgs, *, rank_entry: RankEntry = run_rank) -> int:
    """Serves until a signal, and returns the exit code: 0 after SIGINT, SIGTERM or SIGHUP; 1 when the start fails or a
    worker has died; 2 when --model names no model.

    ``rank_entry`` is what a rank's process runs.
    """
    raise_file_limit()
    try:
        with contextlib.ExitStack() as stack:
            sock = stack.enter_context(bind(args.host, args.port))
            display = StartupProgress(sys.stderr, enabled=not args.silent_output)
            with interruptible():
                model_path = find_model(args, display)
            # From here on signals are events, and closing goes backwards: processes, directory, and then the signals.
            supervisor = stack.enter_context(contextlib.closing(Supervisor(args.log_level)))
            run_dir = stack.enter_context(contextlib.closing(RunDir()))
            server = stack.enter_context(contextlib.closing(Server(args, supervisor, run_dir.path)))
            if not server.start(model_path, sock, rank_entry, display):
                return 0
            listen(sock)
            server.go()
            print(f"{args.model_name} is served at {url(sock)}", flush=True)
            sock.close()  # it is the API servers' now: the last of them to close it ends the listening
            return server.watch()
    except KeyboardInterrupt:
        return 0
    except StartError as error:
        say(str(error))
        return error.code


class Server:
    """The processes of one instance."""

    def __init__(self, args: ServerArgs, supervisor: Supervisor, directory: Path) -> None:
        self._args = args
        self._addresses = Addresses(
            directory=str(directory), frontends=args.num_api_server, tokenizers=args.num_tokenizer, ranks=args.tp
        )
        self._supervisor = supervisor
        self._api: list[Worker] = []
        self._facts: dict[str, Any] = {}
        self._context: zmq.Context[Any] | None = None
        self._frontends: list[Push] = []

    def start(self, model: Path, sock: socket.socket, rank_entry: RankEntry, display: StartupProgress) -> bool:
        """Starts all processes at once, the slowest first, and waits until they are ready. False after a signal."""
        args, addresses, start = self._args, self._addresses, self._supervisor.start
        seed = random.getrandbits(63) if args.seed is None else args.seed
        for rank in range(args.tp):
            name = "scheduler" if args.tp == 1 else f"scheduler {rank}"
            config = RankConfig(args=args, model_path=model, addresses=addresses, rank=rank, seed=seed)
            start(name, rank_entry, config)
        start("detokenizer" if args.num_tokenizer else "tokenizer", run_detokenizer, model, addresses)
        for j in range(args.num_tokenizer):
            start(f"tokenizer {j}", run_tokenizer, model, addresses, j)
        created, log_requests = int(time.time()), not args.silent_output
        for i in range(args.num_api_server):
            name = "api server" if args.num_api_server == 1 else f"api server {i}"
            api = ApiServerConfig(addresses, i, args.model_name, created, log_requests)
            self._api.append(start(name, run_api_server, api, sock))
        return self._wait_ready(display)

    def go(self) -> None:
        """Lets the API servers accept."""
        self._supervisor.go(self._facts)

    def watch(self) -> int:
        """Until a signal (0, or 1 if a worker has died by then), or until no API server is left to answer (1)."""
        code = 0
        while True:
            for event in self._supervisor.wait():
                match event:
                    case Signalled():
                        return code
                    case Reported(worker, Failed(message)):
                        say(f"{worker.name}: {message}")
                    case Died(worker):
                        code = 1
                        self._mourn(worker)
                        if not self._api:
                            return code

    def close(self) -> None:
        """Ends all processes: the API servers first, so that requests under way may still finish."""
        others = [w for w in self._supervisor.workers if w not in self._api]
        self._supervisor.stop([(list(self._api), API_STOP_SECONDS), (others, STOP_SECONDS)])

    def _wait_ready(self, display: StartupProgress) -> bool:
        starting = list(self._supervisor.workers)
        with contextlib.closing(display):
            while starting:
                for event in self._supervisor.wait():
                    match event:
                        case Signalled():
                            return False
                        case Reported(worker, Stage() as stage):
                            display.update(worker.name, stage)
                        case Reported(worker, Ready(summary, facts)):
                            starting.remove(worker)
                            self._facts.update(facts)
                            display.ready(worker.name, summary)
                        case Reported(worker, Failed(message)):
                            raise StartError(f"{worker.name}: {message}")
                        case Died(worker):
                            how = exit_words(worker.process.exitcode)
                            raise StartError(f"The {worker.name} process died while it was starting ({how}).")
        return True

    def _mourn(self, worker: Worker) -> None:
        exitcode = worker.process.exitcode
        say(f"The {worker.name} process has died ({exit_words(exitcode)}). Requests are refused until a new start.")
        if worker in self._api:
            self._api.remove(worker)
        # Imported only now: the launcher of a healthy server does without zmq and numpy.
        import zmq

        from minisgl.message import Push, WorkerDied

        if self._context is None:
            self._context = zmq.Context()
            addresses = [self._addresses.frontend(i) for i in range(self._addresses.frontends)]
            self._frontends = [Push(self._context, address) for address in addresses]
        for push in self._frontends:
            push.send(WorkerDied(name=worker.name, exitcode=exitcode or 0))


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Any signal that ends a server is a KeyboardInterrupt in the block, which may have something to clean up."""
    before = {s: signal.signal(s, signal.default_int_handler) for s in ending_signals()}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def bind(host: str, port: int) -> socket.socket:
    """A socket bound to the port, not listening yet. Raises :class:`StartError` when it cannot be had."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError:
        raise StartError(f"--host must be an address of this machine, not {host!r}.", code=2) from None
    # First without SO_REUSEADDR, under which a port that another server has bound, but does not listen on yet, looks
    # free. Only connections in TIME_WAIT, left by the server before us, deserve the second try.
    for reuse in (0, 1):
        sock = socket.socket(family, kind, protocol)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reuse)
            sock.bind(address)
            return sock
        except OSError as error:
            sock.close()
            if error.errno == errno.EADDRNOTAVAIL:
                raise StartError(f"--host must be an address of this machine, not {host!r}.", code=2) from None
            reason = error
    raise StartError(f"Port {port} on {host} cannot be had: {reason.strerror}. Choose another with --port.")


def listen(sock: socket.socket) -> None:
    """Raises :class:`StartError` where another server has come first after all (see :func:`bind`)."""
    # For the connections that it will accept: one that is left in TIME_WAIT must not keep the next start off.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.listen(BACKLOG)
    except OSError as error:
        raise StartError(f"{url(sock)} cannot be had any more: {error.strerror}.") from None


def raise_file_limit() -> None:
    """Lets this process and its children have as many open files as they may, within reason: a connection is one, and
    the usual 1024 would be the limit of concurrent clients.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def url(sock: socket.socket) -> str:
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if sock.family == socket.AF_INET6 else f"http://{host}:{port}"


def find_model(args: ServerArgs, display: StartupProgress) -> Path:
    """The local path of --model. Raises :class:`StartError` when it cannot be had, or cut for --tp ranks."""
    try:
        path = resolve_model(
            args.model,
            args.model_source,
            weights=args.load_format != "dummy",
            progress=lambda what, fraction: display.update("model", Stage(what, fraction)),
        )
        if args.tp > 1:
            from minisgl.models.config import ModelConfig  # loads numpy, which a single rank's launcher does without

            ModelConfig.from_path(path).check_ranks(args.tp)
        return path
    except ModelNotAvailable as error:
        raise StartError(str(error), code=2) from None
    except ValueError as error:
        raise StartError(str(error)) from None


def say(line: str) -> None:
    print(f"minisgl: {line}", file=sys.stderr, flush=True)
