"""A model as a user would have it, and one LLM that serves it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tiny_models import make_reference

from minisgl import LLM

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"


@pytest.fixture(scope="package")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory as a user would have it: config, weights, tokenizer, chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    path = tmp_path_factory.mktemp("llm") / "tiny"
    make_reference("llama").save_pretrained(path)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    printable = [c for c in alphabet if c.isascii()] + ["Ġ", "Ċ"]
    vocab = {token: i + 3 for i, token in enumerate(printable)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "chat_template.jinja").write_text(TEMPLATE)
    return path


@pytest.fixture(scope="package")
def llm(model: Path) -> Iterator[LLM]:
    with LLM(str(model), page_size=4, num_pages=200, max_running_req=8) as llm:
        yield llm
