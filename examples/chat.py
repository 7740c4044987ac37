"""Starts a server, asks it once in one piece and once streamed, then eight questions at once.

    python examples/chat.py                                    # starts the default model on a free port, stops it
    python examples/chat.py --url http://127.0.0.1:1919/v1     # or asks a server that runs already

Prints the answers, and how long eight requests at once take beside a single one.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import openai


@contextmanager
def server() -> Iterator[str]:
    """A server of our own, on a free port, for as long as the block lasts. Yields its base URL."""
    process = subprocess.Popen(
        [sys.executable, "-m", "minisgl", "--port", "0"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert process.stdout is not None
    try:
        for line in process.stdout:
            print("  server |", line, end="")
            if match := re.search(r"http://[\w.:]+", line):  # the last line of the start-up is the address
                yield match[0] + "/v1"
                return
        raise SystemExit("The server ended before it was ready.")
    finally:
        process.terminate()
        process.wait(timeout=30)


async def timed(client: openai.AsyncOpenAI, model: str, questions: list[str]) -> float:
    """Seconds until all the questions, asked at once, are answered."""
    start = time.perf_counter()
    answers = (
        client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": q}],
            max_tokens=48,
            temperature=0,
            extra_body={"ignore_eos": True},
        )
        for q in questions
    )
    await asyncio.gather(*answers)
    return time.perf_counter() - start


async def chat(base_url: str) -> None:
    client = openai.AsyncOpenAI(base_url=base_url, api_key="unused")
    model = (await client.models.list()).data[0].id

    answer = await client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "What is the capital of France?"}],
        max_tokens=32,
        temperature=0,
    )
    print("\nin one piece:", answer.choices[0].message.content)

    print("streamed:     ", end="")
    stream = await client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "Name three colours."}],
        max_tokens=32,
        temperature=0,
        stream=True,
    )
    async for chunk in stream:
        print(chunk.choices[0].delta.content or "", end="", flush=True)
    print()

    one = await timed(client, model, ["Tell me something about the number 0."])
    eight = await timed(client, model, [f"Tell me something about the number {i}." for i in range(1, 9)])
    print(f"\none request: {one:.2f} s, eight at once: {eight:.2f} s, {eight / one:.2f} times as long")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default=None, help="base URL of a running server; without it one is started")
    args = parser.parse_args()
    if args.url:
        asyncio.run(chat(args.url))
    else:
        with server() as base_url:
            asyncio.run(chat(base_url))


if __name__ == "__main__":
    main()
