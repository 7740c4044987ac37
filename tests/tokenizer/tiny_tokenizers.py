"""Small tokenizers of every family, made on the spot."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers

SaveModel = Callable[..., Path]
"""What the fixture ``save_model`` is."""

TEXT = [
    "Hello world, how are you? The quick brown fox jumps over the lazy dog.",
    "def f(x):\n    return x + 1  # naïve café, 東京 is the capital, 🔥🔥 very hot",
    "alpha beta gamma delta, one two three, 0123456789, Zürich in Größe XXL",
]
SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]


def byte_level() -> tokenizers.Tokenizer:
    """As GPT-2, Llama 3 and Qwen: every id below the specials is some bytes, many of them broken UTF-8 alone."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=420, initial_alphabet=alphabet, special_tokens=SPECIAL, show_progress=False
    )
    backend.train_from_iterator(TEXT * 3, trainer)
    backend.add_tokens([AddedToken("two words", special=False), AddedToken("é", special=False)])
    return backend


def _sentencepiece_vocab() -> dict[str, int]:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    letters = sorted({c for text in TEXT for c in text if ord(c) < 0x3000 and c not in " \n"} | {"▁"})
    words = ["▁▁", "▁Hello", "▁world", "▁b", "lo", "He", "▁the", "ab", "▁a"]
    return {token: i for i, token in enumerate(dict.fromkeys([*tokens, *letters, *words]))}


def sentencepiece() -> tokenizers.Tokenizer:
    """As Llama 1 and 2: a space before the first word that is stripped again, bytes for unknown characters."""
    vocab = _sentencepiece_vocab()
    merges = [("▁", "▁"), ("▁", "b"), ("l", "o"), ("H", "e"), ("a", "b"), ("▁", "a")]
    backend = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(SPECIAL)
    return backend


def sentencepiece_without_prefix() -> tokenizers.Tokenizer:
    """As Gemma."""
    backend = sentencepiece()
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse(), decoders.Replace("▁", " ")])
    return backend


def metaspace() -> tokenizers.Tokenizer:
    """As T5 and XLM-R: the first token loses its space."""
    backend = sentencepiece()
    backend.normalizer = None
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    return backend


def metaspace_with_bytes() -> tokenizers.Tokenizer:
    backend = metaspace()
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(), decoders.Fuse()])
    return backend


def word_piece() -> tokenizers.Tokenizer:
    """As BERT: a space between words, none before a continuation, and spaces "cleaned up" token by token."""
    tokens = ["[UNK]", *SPECIAL, "hello", "##lo", "world", ".", "##.", "!", "n't", "##'s", "'m", "a", "##a", "?", ","]
    backend = tokenizers.Tokenizer(models.WordPiece({t: i for i, t in enumerate(tokens)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.WordPiece()
    backend.add_special_tokens(SPECIAL)
    return backend


def word_level() -> tokenizers.Tokenizer:
    """No decoder at all: words, and a space between each two."""
    tokens = ["[UNK]", *SPECIAL, "hello", "world", "", "a"]
    backend = tokenizers.Tokenizer(models.WordLevel({t: i for i, t in enumerate(tokens)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.add_special_tokens(SPECIAL)
    return backend


FAMILIES: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    f.__name__: f
    for f in (
        byte_level,
        sentencepiece,
        sentencepiece_without_prefix,
        metaspace,
        metaspace_with_bytes,
        word_piece,
        word_level,
    )
}
