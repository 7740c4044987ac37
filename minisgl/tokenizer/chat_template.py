"""Chat templates: messages in OpenAI's shape to the text that the model was trained on.

The environment is the one that templates are written for, that of ``transformers.apply_chat_template``: sandboxed,
trimmed blocks, ``raise_exception``, ``strftime_now``, a ``tojson`` that leaves HTML alone, ``{% break %}`` and
``{% continue %}``, and ``{% generation %}`` blocks, which only mark text for training and are rendered as they are.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

DEFAULT = "default"
TOOL_USE = "tool_use"


class ChatTemplateError(ValueError):
    """The messages cannot be brought into the form the model expects, in one sentence."""


class ChatTemplate:
    """The chat template of one model; it may have several, by name."""

    def __init__(self, sources: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        """``sources`` maps names to Jinja templates, "default" and perhaps "tool_use". ``special_tokens`` are what the
        template knows as ``bos_token`` and so on.
        """
        self._sources = dict(sources)
        self._special_tokens = dict(special_tokens)
        self._compiled: dict[str, jinja2.Template] = {}
        self._environment = _environment()

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """The prompt. ``variables`` are handed to the template (``enable_thinking=False``), special tokens included.

        Raises :class:`ChatTemplateError` for messages that the template refuses or was not written for.
        """
        if not messages:
            raise ChatTemplateError("messages is empty; a chat takes at least one message.")
        if "messages" in variables:
            raise ChatTemplateError("A template variable cannot be called messages.")
        prepared = [_prepare(message) for message in messages]
        known: dict[str, Any] = {"documents": None, **self._special_tokens, **variables}
        try:
            return self._template(bool(tools)).render(
                known, messages=prepared, tools=tools or None, add_generation_prompt=add_generation_prompt
            )
        except ChatTemplateError:
            raise
        except Exception as error:  # a template is a program: on messages it does not expect it fails in any way
            raise ChatTemplateError(f"The model's chat template refuses these messages: {error}.") from error

    def _template(self, with_tools: bool) -> jinja2.Template:
        name = TOOL_USE if with_tools and TOOL_USE in self._sources else DEFAULT
        if name not in self._sources:
            raise ChatTemplateError("The model has no chat template, so it cannot chat; use completions with a prompt.")
        if name not in self._compiled:
            self._compiled[name] = self._environment.from_string(self._sources[name])
        return self._compiled[name]


def text_of(content: Any) -> str:
    """A message's content as one string: text parts are joined in their order, none at all is empty.

    Raises :class:`ChatTemplateError` for parts of another kind.
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        raise ChatTemplateError(f"The content of a message is a string or a list of text parts, not {content!r}.")
    return "".join(_part_text(part) for part in content)


def _part_text(part: Any) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, Mapping) and part.get("type", "text") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    raise ChatTemplateError(f"A message has a content part of type {kind!r}; this model takes text parts only.")


def _prepare(message: Mapping[str, Any]) -> dict[str, Any]:
    """What the template sees: keys without a value left out, as ``message.tool_calls is defined`` would be fooled by
    them, but always a content, since templates add it to strings unasked; arguments of tool calls as objects, since
    templates write them as JSON.
    """
    prepared = {key: value for key, value in message.items() if value is not None}
    prepared["content"] = text_of(message.get("content"))
    if calls := prepared.get("tool_calls"):
        prepared["tool_calls"] = [_with_object_arguments(call) for call in calls]
    return prepared


def _with_object_arguments(call: Any) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except (ValueError, RecursionError):
        return call  # what the model wrote back then, to be shown as it was
    return {**call, "function": {**function, "arguments": arguments}}


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class _Generation(jinja2.ext.Extension):
    """``{% generation %}...{% endgeneration %}`` is its content."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node | list[jinja2.nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(line)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)
