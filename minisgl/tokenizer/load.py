"""A model's tokenizer: text to ids and back, chats to prompts, and the tokens that end an answer."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from .chat_template import DEFAULT, ChatTemplate
from .convert import GENERATION_CONFIG, TOKENIZER, TOKENIZER_CONFIG, tokenizer_directory
from .errors import TokenizerError
from .incremental import TextStream, text_streams

_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_SAMPLING_FIELDS = ("temperature", "top_p", "top_k", "min_p")


class Tokenizer:
    """What :func:`load_tokenizer` returns. Ids are plain ints below the vocabulary's size."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        special_tokens: Mapping[str, str],
        chat_templates: Mapping[str, str],
        end_token_ids: frozenset[int],
    ) -> None:
        """``special_tokens`` maps names as "bos_token" to the token's text; ``chat_templates`` names to templates."""
        self._backend = backend
        self._streams = text_streams(backend)
        self._chat = ChatTemplate(chat_templates, special_tokens)
        self.special_tokens = dict(special_tokens)
        self.bos_token_id: int | None = self._id("bos_token")
        self.adds_bos: bool = self.bos_token_id is not None and self.encode("")[:1] == [self.bos_token_id]
        """Whether :meth:`encode` puts BOS in front of a text."""
        eos = self._id("eos_token")
        self.end_token_ids: frozenset[int] = end_token_ids | ({eos} if eos is not None else set())
        """All tokens that end an answer, from wherever the model names them."""
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The ids of ``text``; with ``add_special_tokens`` BOS and EOS as the model was trained with them."""
        ids: list[int] = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        return ids

    def min_tokens(self, text: str) -> int:
        """How many tokens ``text`` has at least, known from its length alone; 0 where nothing can be said."""
        return len(text) // self._max_chars if self._max_chars else 0

    @functools.cached_property
    def _max_chars(self) -> int:
        return _max_chars(self._backend)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of ``ids``; ids that do not exist have none. No spaces are "cleaned up"."""
        return str(self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def stream(self, skip_special_tokens: bool = True) -> TextStream:
        """Decodes ids one by one; joined, the texts are those of :meth:`decode`."""
        return self._streams(skip_special_tokens)

    def render_chat(self, messages: Sequence[Mapping[str, Any]], /, **variables: Any) -> str:
        """The prompt as text; see :meth:`ChatTemplate.render`. Raises :class:`ChatTemplateError`.

        The template writes BOS where the model wants one: encode it without special tokens.
        """
        return self._chat.render(messages, **variables)

    def _id(self, name: str) -> int | None:
        token = self.special_tokens.get(name)
        token_id: int | None = self._backend.token_to_id(token) if token is not None else None
        return token_id


def load_tokenizer(path: Path) -> Tokenizer:
    """``path`` is a model directory or a .gguf file. Raises :class:`TokenizerError` with one sentence."""
    directory = tokenizer_directory(path)
    try:
        backend = tokenizers.Tokenizer.from_file(str(directory / TOKENIZER))
    except Exception as error:  # the library raises plain Exception
        raise TokenizerError(f"{directory / TOKENIZER} cannot be read: {error}.") from None
    config = _read_json(directory / TOKENIZER_CONFIG)
    special_tokens = _special_tokens(_read_json(directory / "special_tokens_map.json") | config)
    _complete(backend, config, special_tokens)
    return Tokenizer(backend, special_tokens, _chat_templates(directory, config), _end_token_ids(path, directory))


def generation_defaults(path: Path) -> dict[str, Any]:
    """What the model's authors recommend, under the names of ``SamplingParams``: a subset of temperature, top_p, top_k,
    min_p and repetition_penalty, from generation_config.json or the GGUF metadata.

    Where ``do_sample`` is false the first four are left out: they are meant not to be used. How long an answer may be
    (``max_new_tokens``) is for the client to say, so that is never among them.
    """
    directory = path if path.is_dir() else tokenizer_directory(path)
    config = _read_json(directory / GENERATION_CONFIG)
    names = ["repetition_penalty"] if config.get("do_sample") is False else [*_SAMPLING_FIELDS, "repetition_penalty"]
    defaults = {name: config[name] for name in names if config.get(name) is not None}
    for name, value in defaults.items():
        if isinstance(value, bool) or not isinstance(value, int if name == "top_k" else int | float):
            raise TokenizerError(f"{directory / GENERATION_CONFIG}: {name} must be a number, not {value!r}.")
    return defaults


def _max_chars(backend: tokenizers.Tokenizer) -> int:
    """More characters than one token can stand for, 0 where there may be no bound.

    A token is never shorter than its text (bytes for byte-level BPE), except that added tokens may swallow the spaces
    around them, and that a normalizer may shorten the text first: NFC makes one character of four at most.
    """
    if any(token.lstrip or token.rstrip for token in backend.get_added_tokens_decoder().values()):
        return 0
    normalizer = json.loads(backend.normalizer.__getstate__()) if backend.normalizer is not None else {"type": "NFC"}
    for step in normalizer.get("normalizers", [normalizer]):
        if step["type"] not in ("NFC", "Prepend") and not _keeps_length(step):
            return 0
    return 4 * max(map(len, backend.get_vocab(with_added_tokens=True)))


def _keeps_length(step: Mapping[str, Any]) -> bool:
    """Whether a normalizer replaces a fixed text by one that is no shorter (a space by "▁")."""
    pattern = step["pattern"].get("String") if step["type"] == "Replace" else None
    return pattern is not None and len(step["content"]) >= len(pattern)


def _read_json(path: Path) -> dict[str, Any]:
    """An object; empty where there is no such file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise TokenizerError(f"{path} is not valid JSON: {error}.") from None
    if not isinstance(value, dict):
        raise TokenizerError(f"{path} does not hold a JSON object.")
    return value


def _content(token: Any) -> str | None:
    """A token is written as its text, or as an object with it."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    found = {name: _content(config.get(name)) for name in _NAMED_TOKENS}
    return {name: token for name, token in found.items() if token is not None}


def _complete(backend: tokenizers.Tokenizer, config: Mapping[str, Any], special_tokens: Mapping[str, str]) -> None:
    """Gives ``backend`` the tokens that the configuration has beyond tokenizer.json.

    Whether BOS and EOS are added is for tokenizer.json alone to say: ``add_bos_token`` in the configuration is for the
    older forms of tokenizers, and transformers 5 does not look at it here either.
    """
    backend.no_truncation()
    backend.no_padding()
    known = backend.get_added_tokens_decoder()
    for token_id, token in sorted(config.get("added_tokens_decoder", {}).items(), key=lambda item: int(item[0])):
        if int(token_id) not in known:
            backend.add_tokens([AddedToken(**{k: v for k, v in token.items() if k != "__type"})])
    more: list[str | None] = []
    for key in ("additional_special_tokens", "extra_special_tokens"):
        tokens = config.get(key) or ()
        more += [_content(token) for token in (tokens.values() if isinstance(tokens, dict) else tokens)]
    added = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    for name in [*special_tokens.values(), *more]:
        # One that is no id of the model (a padding token that training added) stays out: it would become a new id.
        if name is None or backend.token_to_id(name) is None:
            continue
        token = added.get(name) or AddedToken(name, normalized=False)
        if not token.special:
            token.special = True
            backend.add_special_tokens([token])


def _chat_templates(directory: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """By name; a file of its own goes before the entry in the configuration."""
    templates: dict[str, str] = {}
    entry = config.get("chat_template") or _read_json(directory / "chat_template.json").get("chat_template")
    if isinstance(entry, str):
        templates[DEFAULT] = entry
    elif isinstance(entry, list):
        templates |= {t["name"]: t["template"] for t in entry}
    files = [(DEFAULT, directory / "chat_template.jinja")]
    files += [(file.stem, file) for file in sorted((directory / "additional_chat_templates").glob("*.jinja"))]
    return templates | {name: file.read_text(encoding="utf-8") for name, file in files if file.is_file()}


def _end_token_ids(path: Path, directory: Path) -> frozenset[int]:
    """The end tokens of config.json and generation_config.json, each an id, a list of ids, or nothing."""
    home = path if path.is_dir() else directory
    config = _read_json(home / "config.json")
    text_config = config.get("text_config")
    ids: set[int] = set()
    for source in (config, text_config if isinstance(text_config, dict) else {}, _read_json(home / GENERATION_CONFIG)):
        value = source.get("eos_token_id")
        values = value if isinstance(value, list) else [] if value is None else [value]
        if not all(type(i) is int for i in values):
            raise TokenizerError(f"{home}: eos_token_id must be a token id or a list of them, not {value!r}.")
        ids.update(values)
    return frozenset(ids)
