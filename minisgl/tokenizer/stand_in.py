"""A tokenizer for models that have none: a bare config.json, served with random weights to measure the engine."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from .errors import TokenizerError

CHAT_TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant:"


def write_stand_in(config: Path, target: Path) -> None:
    """Writes tokenizer.json and a chat template to ``target``: a token per byte, a made-up word for every other id."""
    size = json.loads(config.read_text(encoding="utf-8")).get("vocab_size")
    if not isinstance(size, int):
        raise TokenizerError(f"{config} has no vocab_size, so not even bytes can stand in for the missing tokenizer.")
    tokens = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens += [f"Ġtoken{i}" for i in range(len(tokens), size)]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens[:size])}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(target / "tokenizer.json"))
    (target / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
