"""`LLM`: prompts in, completions out, with the scheduler and the engine in this very process."""

from __future__ import annotations

import contextlib
import itertools
import random
import weakref
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from pathlib import Path
from reprlib import repr as brief
from types import TracebackType
from typing import Any, Self, overload

import msgspec
import numpy as np
from tqdm import tqdm

from minisgl.addresses import Addresses
from minisgl.core import EngineInfo, FinishReason, ParameterError, SamplingParams
from minisgl.engine.engine import TorchEngine
from minisgl.message import (
    AbortBackendMsg,
    ChatPrompt,
    IdsPrompt,
    Prompt,
    TextPrompt,
    TokenizeMsg,
    UserReply,
    pack_ids,
    unpack_ids,
)
from minisgl.models.config import ModelConfig
from minisgl.models.source import resolve_model
from minisgl.scheduler import Scheduler, SchedulerConfig
from minisgl.server.args import ServerArgs, check_options
from minisgl.server.scheduler_process import RankConfig, engine_config
from minisgl.tokenizer import Detokenizer, generation_defaults, load_tokenizer, tokenize_request
from minisgl.utils.progress import Progress, silent

from .local_io import LocalIO
from .ranks import FollowerRanks, interrupts_held_back

_DEATH_SECONDS = 2.0  # within which the death of a process shows, after the end of its connections

Message = dict[str, Any]
"""A chat message in OpenAI's shape: ``{"role": ..., "content": ...}``."""


class RequestError(ValueError):
    """A prompt that cannot be served; what it says names the reason."""


@dataclass(slots=True)
class Completion:
    """The answer to one prompt. ``token_ids`` are all that were sampled, an end token included."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0

    def add(self, reply: UserReply) -> None:
        self.text += reply.text
        self.token_ids += unpack_ids(reply.ids).tolist()
        self.finish_reason = reply.finish
        self.prompt_tokens, self.cached_tokens = reply.prompt_tokens, reply.cached_tokens
        self.completion_tokens = reply.completion_tokens


class LLM:
    """A model in this process.

        with LLM("path/or/id") as llm:
            llm.generate("The capital of France is", SamplingParams(max_tokens=8)).text
            llm.chat([{"role": "user", "content": "Hello"}]).text

    ``model`` and ``options`` are those of the command line, with underscores (``LLM(page_size=1, tp=2)``); the options
    of the server (ports, processes) do nothing here. With ``tp`` above 1 the other ranks are processes of their own, so
    the program needs the usual ``if __name__ == "__main__":``. ``progress`` is told how the start goes on. Not for
    several threads at once.

    Raises :class:`~minisgl.models.source.ModelNotAvailable`, or ValueError for an option that cannot be served. When
    the process of another rank dies, whatever runs and all that comes after it raises RuntimeError.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        progress: Progress = silent,
        **options: Any,
    ) -> None:
        args = check_options(model=model, **options)
        path = resolve_model(args.model, args.model_source, weights=args.load_format != "dummy", progress=progress)
        if args.tp > 1:
            ModelConfig.from_path(path).check_ranks(args.tp)
        seed = random.getrandbits(63) if args.seed is None else args.seed
        self._ranks: FollowerRanks | None = None
        self._closed = False
        self._closing = contextlib.ExitStack()
        # Where nobody closes it, the end of the object does, or that of the program.
        self._finalizer = weakref.finalize(self, self._closing.close)
        self._uids = itertools.count()
        self._open: set[int] = set()
        """Requests that have not ended."""
        self._arrived: dict[int, list[UserReply]] = {}
        """Replies that nobody has taken yet, by request: several generators may be under way."""
        try:
            with self._in_one_piece() as hear_interrupt:
                self._start(args, path, seed, progress, hear_interrupt)
        except BaseException:
            self.close()
            raise

    def _start(
        self, args: ServerArgs, path: Path, seed: int, progress: Progress, hear_interrupt: Callable[[], None]
    ) -> None:
        """Whatever is made here, :meth:`close` ends."""
        if args.tp > 1:
            self._ranks = FollowerRanks(args, path, seed, hear_interrupt)
            self._closing.callback(self._ranks.close)
        addresses = self._ranks.addresses if self._ranks else Addresses(directory="")
        rank_config = RankConfig(args=args, model_path=path, addresses=addresses, rank=0, seed=seed)

        def at_a_good_moment(what: str, fraction: float | None) -> None:
            hear_interrupt()
            progress(what, fraction)

        with self._naming_the_dead():
            engine = TorchEngine(engine_config(rank_config), at_a_good_moment, watch=self._ranks)
        self._closing.callback(engine.close)
        if self._ranks:
            self._ranks.wait_ready()
        self._tokenizer = load_tokenizer(path)
        self._io = LocalIO(Detokenizer(self._tokenizer), self._ranks.inboxes if self._ranks else ())
        config = SchedulerConfig(cache=args.cache, overlap=not args.disable_overlap, seed=seed)
        self._scheduler = Scheduler(engine, self._io, config)
        self.engine_info: EngineInfo = engine.info
        self.generation_defaults = generation_defaults(path)

    @overload
    def generate(
        self, prompts: str | list[int], params: SamplingParams | None = None, *, progress: bool = True
    ) -> Completion: ...
    @overload
    def generate(
        self,
        prompts: list[str] | list[list[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = True,
    ) -> list[Completion]: ...
    def generate(
        self,
        prompts: str | list[int] | list[str] | list[list[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = True,
    ) -> Completion | list[Completion]:
        """Completes one prompt (a string or token ids), or a list of them in order, with one ``params`` or one each.

        ``progress`` shows a bar. Raises :class:`RequestError` for a prompt that cannot be served, and
        :class:`~minisgl.core.ParameterError` for a parameter out of range; the other prompts are dropped then.
        """
        if not isinstance(prompts, list | tuple) or (prompts and isinstance(prompts[0], Integral)):
            return self._run([_prompt(prompts)], params, False)[0]
        return self._run([_prompt(prompt) for prompt in prompts], params, progress)

    @overload
    def chat(
        self, messages: list[Message], params: SamplingParams | None = None, *, progress: bool = True
    ) -> Completion: ...
    @overload
    def chat(
        self,
        messages: list[list[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = True,
    ) -> list[Completion]: ...
    def chat(
        self,
        messages: list[Message] | list[list[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = True,
    ) -> Completion | list[Completion]:
        """Answers one conversation, or a list of them; otherwise as :meth:`generate`."""
        one = not isinstance(messages, list) or (bool(messages) and isinstance(messages[0], dict))
        conversations: Any = [messages] if one else messages
        completions = self._run([_conversation(c) for c in conversations], params, progress and not one)
        return completions[0] if one else completions

    def stream_chat(self, messages: list[Message], params: SamplingParams | None = None) -> Generator[UserReply]:
        """The answer to one conversation, piece by piece. Closing the generator ends the request."""
        prompt, uids = _conversation(messages), set[int]()
        try:
            self._submit(prompt, params or SamplingParams(), uids.add)
            yield from self._replies(set(uids))
        finally:
            self._abort(uids)

    def close(self) -> None:
        """Frees the model and everything else. Safe to call twice."""
        self._closed = True
        with self._in_one_piece():
            self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(
        self,
        prompts: list[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
        progress: bool,
    ) -> list[Completion]:
        if isinstance(params, list | tuple):
            each: Sequence[SamplingParams] = params
        else:
            each = [SamplingParams() if params is None else params] * len(prompts)  # type: ignore[list-item]
        if len(each) != len(prompts):
            raise ValueError(f"There are {len(prompts)} prompts but {len(each)} SamplingParams; give one, or one each.")
        completions: dict[int, Completion] = {}
        try:
            for prompt, its in zip(prompts, each, strict=True):
                self._submit(prompt, its, lambda uid: completions.setdefault(uid, Completion()))
            with tqdm(total=len(prompts), desc="generating", unit="prompt", disable=not progress) as bar:
                tokens = 0
                for reply in self._replies(set(completions)):
                    completions[reply.uid].add(reply)
                    if reply.finish is not None:
                        tokens += reply.completion_tokens
                        bar.update()
                        bar.set_postfix(tokens=tokens)
        finally:
            self._abort(completions)
        return list(completions.values())

    def _submit(self, prompt: Prompt, params: SamplingParams, own: Callable[[int], object]) -> None:
        """Whoever is told its uid, by ``own``, has to abort it."""
        self._check_open()
        params = _checked(params)
        uid = next(self._uids)
        message = tokenize_request(self._tokenizer, TokenizeMsg(uid=uid, prompt=prompt, params=params))
        if isinstance(message, UserReply):
            raise RequestError(message.error.message if message.error else "The prompt cannot be served.")
        with self._in_one_piece():
            self._io.submit(message)
            self._open.add(uid)
            own(uid)

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("This LLM has been closed; make a new one.")

    def _replies(self, uids: set[int]) -> Generator[UserReply]:
        """Runs the scheduler until all of ``uids`` have ended."""
        while uids:
            mine = [reply for uid in uids & self._arrived.keys() for reply in self._arrived.pop(uid)]
            if not mine:
                self._step()
            for reply in mine:
                if reply.error is not None:
                    raise RequestError(reply.error.message)
                if reply.finish is not None:
                    uids.discard(reply.uid)
                yield reply

    def _abort(self, uids: Iterable[int]) -> None:
        """Ends what is left of ``uids``, so that the next call finds a clean house. Most often that is nothing."""
        if self._closed:
            return  # a generator may outlive it
        for uid in uids:
            self._arrived.pop(uid, None)
            if uid in self._open:
                self._open.discard(uid)
                self._io.submit(AbortBackendMsg(uid=uid))
        # Where others are under way, it goes along with their next step.
        while not self._open and not (self._ranks and self._ranks.lost) and self._step():
            pass

    def _step(self) -> bool:
        """One turn of the scheduler. From the loss of a rank on, what comes back is garbage and nobody must see it."""
        self._check_open()
        with self._in_one_piece():
            with self._naming_the_dead():
                more = self._scheduler.step()
            if self._ranks:
                self._ranks.check()
            for reply in self._io.take_replies():
                if reply.uid in self._open:
                    self._arrived.setdefault(reply.uid, []).append(reply)
                    if reply.finish is not None or reply.error is not None:
                        self._open.discard(reply.uid)
        return more

    def _in_one_piece(self) -> contextlib.AbstractContextManager[Callable[[], None]]:
        """Ctrl-C is heard at the end. Who insists loses the other ranks, for which this one may be waiting."""
        return interrupts_held_back(lambda: self._ranks.kill() if self._ranks else None)

    @contextlib.contextmanager
    def _naming_the_dead(self) -> Generator[None]:
        """A broken connection to another rank becomes the reason for it, which may show a little later."""
        if self._ranks:
            self._ranks.check()
        try:
            yield
        except Exception as error:
            if self._ranks:
                # Out of memory is this rank's own fault, after which the others fail too.
                broken = isinstance(error, RuntimeError) and type(error).__name__ != "OutOfMemoryError"
                self._ranks.check(_DEATH_SECONDS if broken else 0.0)
            raise


def _checked(params: SamplingParams) -> SamplingParams:
    """``params`` with every value in its range and of its type. A stop string may stand alone."""
    if not isinstance(params, SamplingParams):
        raise TypeError(f"The parameters must be SamplingParams, not {brief(params)}.")
    if isinstance(params.stop, str):
        params = msgspec.structs.replace(params, stop=(params.stop,))
    try:
        params = msgspec.convert(msgspec.to_builtins(params, enc_hook=_plain), SamplingParams)
    except msgspec.ValidationError as error:
        what, _, name = str(error).partition(" - at `$.")
        name = name.rstrip("`")
        raise ParameterError(name, f"{name}: {what}.") from None
    params.validate()
    return params


def _plain(value: object) -> object:
    if isinstance(value, np.generic):
        return value.item()
    raise NotImplementedError(f"{type(value).__name__} is no type of a parameter.")


def _prompt(prompt: object) -> Prompt:
    if isinstance(prompt, str):
        return TextPrompt(text=prompt)
    if isinstance(prompt, list) and all(
        isinstance(token, Integral) and not isinstance(token, bool) for token in prompt
    ):
        if not all(0 <= token < 2**31 for token in prompt):
            raise RequestError("Token ids must be at least 0, and below 2**31.")
        return IdsPrompt(ids=pack_ids(prompt))
    raise TypeError(f"A prompt must be a string or a list of token ids, not {brief(prompt)}.")


def _conversation(messages: object) -> ChatPrompt:
    if isinstance(messages, list) and all(isinstance(m, dict) and isinstance(m.get("role"), str) for m in messages):
        return ChatPrompt(messages=messages)
    raise TypeError(f'A conversation must be a list of dicts, each with a "role", not {brief(messages)}.')
