"""The tokenizer inside a GGUF file, as the files that a model directory would have: no torch, no transformers.

GGUF keeps the vocabulary, merges or scores, and a name for the way text is cut before merging (``tokenizer.ggml.pre``).
What each name means is in llama.cpp (src/llama-vocab.cpp); the expressions here are those of the tokenizer.json files
which the names stand for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing

from .errors import TokenizerError

# Token types of the GGUF specification.
_NORMAL, _CONTROL, _USER_DEFINED, _BYTE = 1, 3, 4, 6

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|" + _TAIL
_QWEN2 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|" + _TAIL
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CJK = r"[一-龥ࠀ-一가-퟿]+"
_CJK_KANA = r"[一-龥぀-ゟ゠-ヿ]+"
_DEEPSEEK_V3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class _Pre:
    """How text is cut: by one expression after the other. ``bos`` is what holds where the file does not say."""

    splits: tuple[str, ...]
    bos: bool = False
    ignore_merges: bool = False
    nfc: bool = False


_DIGITS_GPT2 = _Pre((r"\p{N}", _GPT2))
_PRE = {
    "default": _Pre((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
    "gpt-2": _Pre((_GPT2,)),
    "phi-2": _Pre((_GPT2,)),
    "smollm": _DIGITS_GPT2,
    "starcoder": _DIGITS_GPT2,
    "refact": _DIGITS_GPT2,
    "codeshell": _DIGITS_GPT2,
    "minerva-7b": _DIGITS_GPT2,
    "llama-bpe": _Pre((_LLAMA3,), bos=True, ignore_merges=True),
    "llama3": _Pre((_LLAMA3,), bos=True, ignore_merges=True),
    "llama-v3": _Pre((_LLAMA3,), bos=True, ignore_merges=True),
    "falcon3": _Pre((_LLAMA3,), bos=True, ignore_merges=True),
    "smaug-bpe": _Pre((_LLAMA3,)),
    "dbrx": _Pre((_LLAMA3,)),
    "qwen2": _Pre((_QWEN2,), nfc=True),
    "deepseek-r1-qwen": _Pre((_QWEN2,)),
    "tekken": _Pre((_TEKKEN,), bos=True, ignore_merges=True),
    "deepseek-coder": _Pre((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}")),
    "deepseek-v3": _Pre((r"\p{N}{1,3}", _CJK_KANA, _DEEPSEEK_V3)),
}


@dataclass(frozen=True, slots=True)
class ConvertedTokenizer:
    """The content of tokenizer.json, tokenizer_config.json and generation_config.json."""

    tokenizer: Tokenizer
    config: dict[str, Any]
    generation: dict[str, Any]


def convert(metadata: Mapping[str, Any], where: str) -> ConvertedTokenizer:
    """``metadata`` is that of the file, arrays as lists; ``where`` names it in errors.

    Raises :class:`TokenizerError` for a kind of tokenizer that is not supported.
    """
    vocabulary = _Vocabulary(metadata, where)
    if vocabulary.model == "gpt2":
        tokenizer, bos = _byte_level(vocabulary)
    elif vocabulary.model == "llama":
        tokenizer, bos = _sentencepiece(vocabulary), True
    else:
        raise TokenizerError(f"{where}: unsupported tokenizer {vocabulary.model!r}; supported are gpt2 and llama.")
    for kind, special in ((_CONTROL, True), (_USER_DEFINED, False)):
        tokens = [AddedToken(t, normalized=False, special=special) for t in vocabulary.of_type(kind)]
        (tokenizer.add_special_tokens if special else tokenizer.add_tokens)(tokens)
    _add_bos_and_eos(tokenizer, vocabulary, bos)
    return ConvertedTokenizer(tokenizer, _config(vocabulary), _generation(metadata))


class _Vocabulary:
    def __init__(self, metadata: Mapping[str, Any], where: str) -> None:
        self.metadata = metadata
        self.where = where
        self.model = str(self.get("model", "none"))
        tokens = self.get("tokens")
        if not tokens:
            raise TokenizerError(f"{where} has no vocabulary (tokenizer.ggml.tokens).")
        # Ids without a text of their own still are ids: they get a name that no text contains by accident.
        seen: set[str] = set()
        self.tokens: list[str] = []
        for token_id, token in enumerate(tokens):
            name = token if token and token not in seen else f"[UNNAMED_{token_id}]"
            seen.add(name)
            self.tokens.append(name)
        self.types: Sequence[int] = self.get("token_type") or [_NORMAL] * len(tokens)
        self.ids = {token: token_id for token_id, token in enumerate(self.tokens)}

    def get(self, key: str, default: Any = None) -> Any:
        return self.metadata.get(f"tokenizer.ggml.{key}", default)

    def of_type(self, kind: int) -> list[str]:
        return [token for token, t in zip(self.tokens, self.types, strict=True) if t == kind]

    def token(self, key: str) -> str | None:
        token_id = self.get(key)
        return self.tokens[token_id] if token_id is not None and 0 <= token_id < len(self.tokens) else None


def _byte_level(vocabulary: _Vocabulary) -> tuple[Tokenizer, bool]:
    """Byte-level BPE, and whether it starts with BOS by default."""
    name = str(vocabulary.get("pre", "default"))
    pre = _PRE.get(name)
    if pre is None:
        raise TokenizerError(
            f"{vocabulary.where}: unsupported pre-tokenizer {name!r}; supported are {', '.join(sorted(_PRE))}."
        )
    merges = []
    for merge in vocabulary.get("merges") or ():
        at = merge.index(" ", 1)
        merges.append((merge[:at], merge[at + 1 :]))
    tokenizer = Tokenizer(BPE(vocab=vocabulary.ids, merges=merges, ignore_merges=pre.ignore_merges))
    if pre.nfc:
        tokenizer.normalizer = normalizers.NFC()
    cuts = [pre_tokenizers.Split(Regex(split), behavior="isolated") for split in pre.splits]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, pre.bos


def _sentencepiece(vocabulary: _Vocabulary) -> Tokenizer:
    """SentencePiece BPE: of all neighbours, those merge first whose joint piece has the highest score."""
    scores = vocabulary.get("scores")
    if not scores:
        raise TokenizerError(f"{vocabulary.where} has no scores for its vocabulary (tokenizer.ggml.scores).")
    pieces = {t: i for i, t in enumerate(vocabulary.tokens) if vocabulary.types[i] in (_NORMAL, _USER_DEFINED)}
    merges = []
    for piece in sorted(pieces, key=lambda t: -scores[pieces[t]]):
        halves = [(piece[:at], piece[at:]) for at in range(1, len(piece))]
        merges += [(left, right) for left, right in halves if left in pieces and right in pieces]
    tokenizer = Tokenizer(
        BPE(
            vocab=vocabulary.ids,
            merges=merges,
            unk_token=vocabulary.token("unknown_token_id") or vocabulary.tokens[0],
            fuse_unk=True,
            byte_fallback=_BYTE in vocabulary.types,
        )
    )
    # The space before the first word, which SentencePiece adds and takes away again.
    prefix = bool(vocabulary.get("add_space_prefix", True))
    spaces = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if prefix else spaces
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return tokenizer


def _add_bos_and_eos(tokenizer: Tokenizer, vocabulary: _Vocabulary, bos: bool) -> None:
    """As the file says; where it does not, ``bos`` is whether BOS is added."""
    start = vocabulary.token("bos_token_id") if vocabulary.get("add_bos_token", bos) else None
    end = vocabulary.token("eos_token_id") if vocabulary.get("add_eos_token", False) else None
    tokenizer.post_processor = TemplateProcessing(
        single=[part for part in (start, "$A", end) if part is not None],
        special_tokens=[(token, vocabulary.ids[token]) for token in {start, end} if token is not None],
    )


def _config(vocabulary: _Vocabulary) -> dict[str, Any]:
    names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    config: dict[str, Any] = {f"{ours}_token": vocabulary.token(f"{theirs}_token_id") for ours, theirs in names.items()}
    if template := vocabulary.metadata.get("tokenizer.chat_template"):
        prefix = "tokenizer.chat_template."
        more = {key.removeprefix(prefix): t for key, t in vocabulary.metadata.items() if key.startswith(prefix)}
        templates = {"default": template, **more}
        config["chat_template"] = [{"name": name, "template": text} for name, text in templates.items()]
    return config


def _generation(metadata: Mapping[str, Any]) -> dict[str, Any]:
    ends = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    generation: dict[str, Any] = {"eos_token_id": [end for end in ends if end is not None]}
    names = {"temp": "temperature", "penalty_repeat": "repetition_penalty"}
    for key in ("temp", "top_k", "top_p", "min_p", "penalty_repeat"):
        value = metadata.get(f"general.sampling.{key}")
        if value is not None:
            generation[names.get(key, key)] = value
    return generation
