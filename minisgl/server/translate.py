"""From a client's body to the internal request: every check that needs no tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from minisgl.core import ParameterError, SamplingParams
from minisgl.message import ChatPrompt, IdsPrompt, Prompt, TextPrompt, pack_ids

from .errors import invalid, invalid_parameter
from .formats import ChatFormat, CompletionFormat, Format, GenerateFormat
from .protocol import MAX_CHOICES, MAX_PROMPTS, NOT_BUILT, Body, ChatBody, CompletionBody, GenerateBody, OpenAIBody

COMPLETION_MAX_TOKENS = 16
"""What max_tokens is on /v1/completions and /generate when the client does not say (OpenAI's number)."""

MAX_TOKEN_ID = 2**31 - 1
ROLES = ("system", "developer", "user", "assistant", "tool")
KEPT_FIELDS = ("name", "tool_call_id", "reasoning_content")
"""Further fields of a message that chat templates read."""

_PLAIN_PARAMS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "ignore_eos",
    "include_stop_str_in_output",
    "skip_special_tokens",
)


@dataclass(slots=True)
class Job:
    """A client request, translated: ``n`` entries of ``requests`` for each prompt, prompt by prompt."""

    requests: list[tuple[Prompt, SamplingParams]]
    n: int
    format: Format
    stream: bool


class Translator:
    """Knows the name of the model that is served and its default sampling parameters (generation_config.json)."""

    def __init__(self, model: str, defaults: Mapping[str, Any]) -> None:
        self.model = model
        self._defaults = {name: value for name, value in defaults.items() if name in _PLAIN_PARAMS}
        try:
            SamplingParams(**self._defaults).validate()
        except ParameterError as error:
            raise ValueError(f"The model's generation_config.json recommends what cannot be served: {error}") from None

    def chat(self, body: ChatBody) -> Job:
        self.check_model(body.model)
        prompt = ChatPrompt(messages=_messages(body.messages), template_kwargs=body.chat_template_kwargs or {})
        limit = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
        params = self._params(body, limit, name)
        return _fan_out([prompt], params, body, ChatFormat(self.model, _include_usage(body)), bool(body.stream))

    def completion(self, body: CompletionBody) -> Job:
        self.check_model(body.model)
        prompts = _prompts(body.prompt)
        params = self._params(body, COMPLETION_MAX_TOKENS if body.max_tokens is None else body.max_tokens)
        return _fan_out(prompts, params, body, CompletionFormat(self.model, _include_usage(body)), bool(body.stream))

    def generate(self, body: GenerateBody) -> Job:
        given = {k: v for k in ("prompt", "text", "input_ids") if (v := getattr(body, k)) is not None}
        if len(given) != 1:
            raise invalid("Exactly one of prompt, text and input_ids must be given.", "prompt")
        ((name, value),) = given.items()
        prompt = _text_prompt(value, name) if isinstance(value, str) else _ids_prompt(value, name)
        sampling: Body = body
        if body.sampling_params is not None:
            sampling = body.sampling_params
            if beside := [k for k in sorted(Body.model_fields) if getattr(body, k) is not None]:
                raise invalid(f"{beside[0]} must not stand beside sampling_params, but in it.", beside[0])
            _refuse_what_is_not_built(body)
        if sampling.n not in (None, 1):
            raise invalid("n must be 1 here; /v1/completions gives several choices.", "n")
        limit = COMPLETION_MAX_TOKENS if sampling.max_tokens is None else sampling.max_tokens
        params = self._params(sampling, limit)
        return _fan_out([prompt], params, sampling, GenerateFormat(self.model), bool(body.stream))

    def check_model(self, model: str | None) -> None:
        """A client that names no model means the one there is."""
        if model is not None and model != self.model:
            raise invalid(
                f"The model {model!r} does not exist here; {self.model!r} is served.",
                "model",
                status=404,
                code="model_not_found",
            )

    def _params(self, body: Body, max_tokens: int | None, max_tokens_name: str = "max_tokens") -> SamplingParams:
        _refuse_what_is_not_built(body)
        values = dict(self._defaults)
        values.update((name, value) for name in _PLAIN_PARAMS if (value := getattr(body, name)) is not None)
        params = SamplingParams(
            max_tokens=max_tokens, stop=_stop(body.stop), stop_token_ids=tuple(body.stop_token_ids or ()), **values
        )
        try:
            params.validate()
        except ParameterError as error:
            if error.field == "max_tokens":
                error = ParameterError(max_tokens_name, str(error).replace("max_tokens", max_tokens_name, 1))
            raise invalid_parameter(error) from None
        return params


def _fan_out(prompts: list[Prompt], params: SamplingParams, body: Body, shape: Format, stream: bool) -> Job:
    n = 1 if body.n is None else body.n
    if not 1 <= n <= MAX_CHOICES:
        raise invalid(f"n must be between 1 and {MAX_CHOICES}, not {n}.", "n")
    if len(prompts) * n > MAX_PROMPTS:
        raise invalid(f"{len(prompts)} prompts with {n} choices each are more than {MAX_PROMPTS} answers.", "prompt")
    each = [params]
    if n > 1 and params.seed is not None:
        each = [msgspec.structs.replace(params, seed=_wrap(params.seed + i)) for i in range(n)]
    elif n > 1:
        each *= n
    return Job([(prompt, p) for prompt in prompts for p in each], n, shape, stream)


def _wrap(seed: int) -> int:
    return seed if seed < 2**64 else seed - 2**64


def _include_usage(body: OpenAIBody) -> bool:
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options is only allowed when stream is true.", "stream_options")
    return bool(body.stream_options and body.stream_options.include_usage)


def _refuse_what_is_not_built(body: Body) -> None:
    for name, value in (body.model_extra or {}).items():
        # The type matters: logprobs 0 asks for something, logprobs false does not.
        if value is None or name not in NOT_BUILT or any(_same(value, allowed) for allowed in NOT_BUILT[name]):
            continue
        raise invalid(f"{name} is not supported by this server; leave it out.", name)


def _same(value: object, allowed: object) -> bool:
    return value == allowed and isinstance(value, bool) == isinstance(allowed, bool)


def _stop(value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    strings = [value] if isinstance(value, str) else value
    if not isinstance(strings, list) or not all(isinstance(s, str) for s in strings):
        raise invalid("stop must be a string or a list of strings.", "stop")
    return tuple(strings)


def _prompts(value: Any) -> list[Prompt]:
    """OpenAI's four shapes: a string, strings, token ids, lists of token ids."""
    match value:
        case None:
            raise invalid("prompt is missing.", "prompt")
        case str():
            return [_text_prompt(value, "prompt")]
        case []:
            raise invalid("prompt must not be empty.", "prompt")
        case [int(), *_]:
            return [_ids_prompt(value, "prompt")]
        case [str() | list(), *_]:
            if len(value) > MAX_PROMPTS:
                raise invalid(f"prompt holds {len(value)} prompts; {MAX_PROMPTS} are allowed.", "prompt")
            kind = type(value[0])
            if all(type(item) is kind for item in value):
                make: Any = _text_prompt if kind is str else _ids_prompt
                return [make(item, f"prompt[{i}]") for i, item in enumerate(value)]
    raise invalid(
        "prompt must be a string, a list of strings, a list of token ids, or a list of lists of token ids.", "prompt"
    )


def _text_prompt(text: str, name: str) -> TextPrompt:
    if not text:
        raise invalid(f"{name} must not be empty.", name)
    return TextPrompt(text=text)


def _ids_prompt(ids: list[Any], name: str) -> IdsPrompt:
    if not ids:
        raise invalid(f"{name} must not be empty.", name)
    if not all(type(i) is int and 0 <= i <= MAX_TOKEN_ID for i in ids):
        raise invalid(f"{name} must hold token ids only.", name)
    return IdsPrompt(ids=pack_ids(ids))


def _messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    if not messages:
        raise invalid("messages must not be empty.", "messages")
    return [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _message(message: dict[str, Any], where: str) -> dict[str, Any]:
    """One message, its content as one string."""
    role = message.get("role")
    if role not in ROLES:
        raise invalid(f"{where}.role must be one of {', '.join(ROLES)}, not {role!r}.", f"{where}.role")
    tool_calls = message.get("tool_calls")
    if tool_calls is not None and (role != "assistant" or not isinstance(tool_calls, list)):
        raise invalid(f"{where}.tool_calls must be a list, in a message of the assistant.", f"{where}.tool_calls")
    out: dict[str, Any] = {
        # OpenAI's newer name for the same thing; templates know the older one.
        "role": "system" if role == "developer" else role,
        "content": _content(message.get("content"), f"{where}.content", optional=bool(tool_calls)),
    }
    out.update((name, message[name]) for name in KEPT_FIELDS if message.get(name) is not None)
    if tool_calls:
        if not all(isinstance(call, dict) for call in tool_calls):
            raise invalid(f"{where}.tool_calls must hold objects.", f"{where}.tool_calls")
        out["tool_calls"] = tool_calls
    return out


def _content(content: Any, where: str, *, optional: bool) -> str:
    match content:
        case str():
            return content
        case None if optional:
            return ""
        case list():
            return "".join(_part(part, f"{where}[{i}]") for i, part in enumerate(content))
    raise invalid(f"{where} must be a string or a list of text parts.", where)


def _part(part: Any, where: str) -> str:
    match part:
        case {"type": "text", "text": str(text)}:
            return text
        case {"type": "text"}:
            raise invalid(f"{where}.text must be a string.", f"{where}.text")
        case {"type": kind}:
            raise invalid(f"{where} is of type {kind!r}; only text is supported.", f"{where}.type")
    raise invalid(f"{where} must be an object with a type.", where)
