"""The terminal chat: `python -m minisgl --shell`. One conversation, in this process, nothing left behind."""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from types import FrameType
from typing import TYPE_CHECKING

from prompt_toolkit import PromptSession
from prompt_toolkit.history import FileHistory

from minisgl.core import SamplingParams
from minisgl.env import cache_dir
from minisgl.models.source import ModelNotAvailable
from minisgl.server.args import ServerArgs
from minisgl.server.process import Stage
from minisgl.server.progress import StartupProgress
from minisgl.utils.logging import setup_logging

if TYPE_CHECKING:
    from minisgl.llm import LLM

HELP = """/reset  forget the conversation
/exit   leave (also Ctrl-D)
/help   this list
Ctrl-C stops an answer; at the prompt it clears the line."""


@contextlib.contextmanager
def interrupt_flag() -> Iterator[Callable[[], bool]]:
    """Turns Ctrl-C into a flag for as long as the block lasts, so that no step of the engine is torn apart."""
    hit = False

    def on_interrupt(_signum: int, _frame: FrameType | None) -> None:
        nonlocal hit
        hit = True

    before = signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield lambda: hit
    finally:
        signal.signal(signal.SIGINT, before)


class Shell:
    """One conversation. ``read`` gives the user's next line (EOFError at the end), ``write`` shows text."""

    def __init__(self, llm: LLM, params: SamplingParams, read: Callable[[], str], write: Callable[[str], None]) -> None:
        self._llm = llm
        self._params = params
        self._read = read
        self._write = write
        self.messages: list[dict[str, str]] = []

    def run(self) -> None:
        """Until /exit or the end of the input."""
        while True:
            try:
                line = self._read().strip()
            except KeyboardInterrupt:
                continue
            except EOFError:
                return
            match line:
                case "":
                    continue
                case "/exit" | "/quit":
                    return
                case "/reset":
                    self.messages.clear()
                    self._write("The conversation is forgotten.\n")
                case "/help":
                    self._write(HELP + "\n")
                case _ if line.startswith("/"):
                    self._write(f"There is no command {line.split()[0]}; /help lists them.\n")
                case _:
                    self.answer(line)

    def answer(self, question: str) -> None:
        """Streams one answer. It becomes part of the conversation, as far as it came, unless it failed."""
        self.messages.append({"role": "user", "content": question})
        parts: list[str] = []
        tokens, first, start = 0, 0.0, time.perf_counter()
        with interrupt_flag() as interrupted:
            stream = self._llm.stream_chat(self.messages, self._params)
            try:
                for reply in stream:
                    tokens = reply.completion_tokens
                    if not first and tokens:
                        first = time.perf_counter()
                    parts.append(reply.text)
                    self._write(reply.text)
                    if interrupted():
                        self._write(" [stopped]")
                        break
            except ValueError as e:  # the conversation has outgrown the context, say
                self.messages.pop()
                self._write(f"{e}\n")
                return
            finally:
                stream.close()
        end = time.perf_counter()
        self.messages.append({"role": "assistant", "content": "".join(parts)})
        rate = f", {(tokens - 1) / (end - first):.0f} tokens/s" if tokens > 1 and end > first else ""
        self._write(f"\n[{tokens} tokens, first after {(first or end) - start:.2f} s{rate}]\n")


def chat(args: ServerArgs) -> int:
    """The shell on this terminal, or on standard input when that is no terminal. Returns the exit code."""
    setup_logging("warning" if args.silent_output else args.log_level, "shell")
    display = StartupProgress(sys.stderr, enabled=not args.silent_output)
    try:
        with contextlib.closing(display):
            # Only now, after the flags are checked and the first line is on the screen.
            display.update("shell", Stage("loading torch"))
            from minisgl.llm import LLM

            options = asdict(replace(args, max_running_req=1, model=None))
            del options["model"]
            llm = LLM(args.model, progress=lambda *stage: display.update("shell", Stage(*stage)), **options)
    except ModelNotAvailable as error:
        print(f"minisgl: {error}", file=sys.stderr)
        return 2
    except (ValueError, RuntimeError, MemoryError, OSError) as error:
        print(f"minisgl: {error}", file=sys.stderr)
        return 1
    with llm:
        params = SamplingParams(**{"temperature": 0.6} | llm.generation_defaults)
        if sys.stdin is not None and sys.stdin.isatty():
            history = cache_dir() / "shell_history"
            history.parent.mkdir(parents=True, exist_ok=True)
            session: PromptSession[str] = PromptSession(history=FileHistory(str(history)))
            print("Chat away: /help lists the commands, /exit leaves.")
            shell = Shell(llm, params, lambda: session.prompt("> "), _write)
        else:
            shell = Shell(llm, params, input, _write)
        try:
            shell.run()
        except RuntimeError as error:  # a rank has died, say
            print(f"minisgl: {error}", file=sys.stderr)
            return 1
    return 0


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
