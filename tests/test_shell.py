"""The terminal chat: its commands on a scripted conversation, Ctrl-C, and the program itself."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Generator
from typing import Any

import pytest

from minisgl.core import SamplingParams
from minisgl.message import UserReply
from minisgl.shell import Shell


class FakeLLM:
    """Answers with the number of messages it was given, word by word; may interrupt itself as Ctrl-C would."""

    def __init__(self, interrupt_at: int = -1, fail: bool = False) -> None:
        self.seen: list[list[dict[str, Any]]] = []
        self.closed = 0
        self._interrupt_at = interrupt_at
        self._fail = fail

    def stream_chat(self, messages: list[dict[str, Any]], params: SamplingParams) -> Generator[UserReply]:
        self.seen.append([dict(m) for m in messages])
        try:
            if self._fail:
                raise ValueError("The conversation is too long.")
            for i, word in enumerate(f"{len(messages)} messages so far".split()):
                if i == self._interrupt_at:
                    os.kill(os.getpid(), signal.SIGINT)
                yield UserReply(uid=0, text=word + " ", completion_tokens=i + 1)
        finally:
            self.closed += 1


def run(llm: FakeLLM, *lines: str | type[BaseException]) -> tuple[Shell, str]:
    out: list[str] = []
    feed = iter(lines)

    def read() -> str:
        line = next(feed, EOFError)
        if isinstance(line, str):
            return line
        raise line

    shell = Shell(llm, SamplingParams(), read, out.append)  # type: ignore[arg-type]
    shell.run()
    return shell, "".join(out)


def test_the_conversation_grows() -> None:
    llm = FakeLLM()
    shell, out = run(llm, "one", "two")
    assert [len(m) for m in llm.seen] == [1, 3]
    assert [m["role"] for m in shell.messages] == ["user", "assistant"] * 2
    assert shell.messages[3]["content"] == "3 messages so far "
    assert "3 messages so far" in out


def test_reset_forgets_and_exit_leaves() -> None:
    llm = FakeLLM()
    run(llm, "one", "/reset", "two", "/exit", "never asked")
    assert [len(m) for m in llm.seen] == [1, 1]


def test_help_and_unknown_commands_ask_nothing() -> None:
    llm = FakeLLM()
    _, out = run(llm, "/help", "/nonsense", "", KeyboardInterrupt)
    assert llm.seen == []
    assert "/reset" in out
    assert "no command /nonsense" in out


def test_ctrl_c_stops_the_answer_and_not_the_program() -> None:
    llm = FakeLLM(interrupt_at=1)
    before = signal.getsignal(signal.SIGINT)
    shell, out = run(llm, "one", "/help")
    assert "[stopped]" in out
    assert shell.messages[1]["content"] == "1 messages "
    assert llm.closed == 1
    assert "/reset" in out  # the program went on
    assert signal.getsignal(signal.SIGINT) is before


def test_a_refused_question_is_taken_back() -> None:
    shell, out = run(FakeLLM(fail=True), "far too long")
    assert "too long" in out
    assert shell.messages == []


@pytest.mark.model
@pytest.mark.process
def test_the_program_answers_and_leaves_nothing_behind() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "minisgl", "--shell", "--max-seq-len-override", "64"],
        input="Say hi\n/exit\n",
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    assert "tokens, first after" in result.stdout
    assert "Traceback" not in result.stderr
