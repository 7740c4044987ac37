from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tiny_tokenizers import SaveModel, byte_level, sentencepiece
from tokenizers import AddedToken
from tokenizers.processors import TemplateProcessing

from minisgl.tokenizer import Tokenizer, TokenizerError, generation_defaults, load_tokenizer

CONFIG = {"bos_token": "<s>", "eos_token": {"__type": "AddedToken", "content": "</s>"}, "pad_token": None}
CHAT = [{"role": "user", "content": "hi"}]


def test_special_tokens_are_known_by_name_and_hidden(save_model: SaveModel) -> None:
    tokenizer = load_tokenizer(save_model(byte_level(), tokenizer_config=CONFIG))
    assert tokenizer.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    assert tokenizer.bos_token_id == tokenizer.encode("<s>")[0]
    assert tokenizer.decode(tokenizer.encode("<s>a</s>")) == "a"


def test_end_tokens_are_the_union_of_all_files(save_model: SaveModel) -> None:
    path = save_model(
        byte_level(),
        tokenizer_config=CONFIG,
        config={"eos_token_id": 5},
        generation_config={"eos_token_id": [6, 7]},
    )
    assert load_tokenizer(path).end_token_ids == {1, 5, 6, 7}


@pytest.mark.parametrize(
    ("files", "ends"),
    [
        ({}, set()),
        ({"config": {"eos_token_id": [2, 5]}}, {2, 5}),
        ({"generation_config": {"eos_token_id": 9}}, {9}),
        ({"config": {"text_config": {"eos_token_id": [4]}}}, {4}),
        ({"config": {"eos_token_id": None}, "special_tokens_map": {"eos_token": "</s>"}}, {1}),
    ],
)
def test_end_tokens_may_be_missing_anywhere(save_model: SaveModel, files: dict[str, Any], ends: set[int]) -> None:
    assert load_tokenizer(save_model(byte_level(), **files)).end_token_ids == ends


def with_bos(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    bos = backend.token_to_id("<s>")
    backend.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    return backend


def test_bos_is_added_as_tokenizer_json_says_and_only_when_wanted(save_model: SaveModel) -> None:
    tokenizer = load_tokenizer(save_model(with_bos(byte_level()), tokenizer_config=CONFIG | {"add_bos_token": False}))
    plain = tokenizer.encode("abc", add_special_tokens=False)
    assert tokenizer.encode("abc") == [0, *plain]


def test_ids_are_those_of_transformers(save_model: SaveModel) -> None:
    transformers = pytest.importorskip("transformers")
    config = CONFIG | {"tokenizer_class": "PreTrainedTokenizerFast", "add_bos_token": False}
    path = save_model(with_bos(sentencepiece()), tokenizer_config=config, config={"model_type": "llama"})
    ours, theirs = load_tokenizer(path), transformers.AutoTokenizer.from_pretrained(str(path))
    for text in ("", " ", "Hello world", "  two  spaces </s> <unk>\n🔥 naïve", "<|im_start|>Hello"):
        assert ours.encode(text) == theirs.encode(text)
        ids = theirs.encode(text)
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def test_tokens_that_only_the_configuration_has_are_added(save_model: SaveModel) -> None:
    backend = byte_level()
    new = backend.get_vocab_size()
    token = {"content": "<tool>", "special": False, "lstrip": False, "rstrip": False, "normalized": False}
    more = {"added_tokens_decoder": {str(new): token}, "additional_special_tokens": ["two words"], "pad_token": "<pad>"}
    more["extra_special_tokens"] = {"accent": "é"}
    tokenizer = load_tokenizer(save_model(backend, tokenizer_config=CONFIG | more))
    assert tokenizer.encode("<tool>") == [new]
    assert tokenizer.decode([new]) == "<tool>"
    assert tokenizer.decode(tokenizer.encode("two wordsé")) == ""  # were no special tokens, now are
    assert len(tokenizer.encode("<pad>")) > 1  # no id of the model, so it becomes none
    assert tokenizer.vocab_size == new + 1


def test_a_special_token_keeps_its_ways_with_spaces(save_model: SaveModel) -> None:
    backend = byte_level()
    backend.add_special_tokens([AddedToken("<mask>", lstrip=True, special=True)])
    tokenizer = load_tokenizer(save_model(backend, tokenizer_config=CONFIG | {"mask_token": "<mask>"}))
    assert tokenizer.decode(tokenizer.encode("a  <mask>"), skip_special_tokens=False) == "a<mask>"


def test_truncation_and_padding_of_the_file_are_off(save_model: SaveModel) -> None:
    backend = byte_level()
    backend.enable_truncation(4)
    backend.enable_padding(length=64)
    tokenizer = load_tokenizer(save_model(backend))
    assert tokenizer.decode(tokenizer.encode("Hello world, how are you?")) == "Hello world, how are you?"


@pytest.mark.parametrize(
    ("files", "prompt"),
    [
        ({"tokenizer_config": {"chat_template": "a"}}, "a"),
        ({"tokenizer_config": {"chat_template": [{"name": "default", "template": "b"}]}}, "b"),
        ({"tokenizer_config": {"chat_template": "a"}, "chat_template": "c"}, "c"),  # a .jinja file
        ({"chat_template.json": {"chat_template": "d"}}, "d"),
    ],
)
def test_the_chat_template_is_found(save_model: SaveModel, files: dict[str, Any], prompt: str) -> None:
    files = {name.removesuffix(".json"): content for name, content in files.items()}
    tokenizer = load_tokenizer(save_model(byte_level(), **files))
    assert tokenizer.render_chat(CHAT) == prompt


@pytest.mark.parametrize(
    ("config", "defaults"),
    [
        (None, {}),
        (
            {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "max_new_tokens": 9, "eos_token_id": 1},
            {"temperature": 0.6, "top_p": 0.95, "top_k": 20},
        ),
        ({"do_sample": True, "min_p": 0.1, "repetition_penalty": 1.1}, {"min_p": 0.1, "repetition_penalty": 1.1}),
        ({"do_sample": False, "temperature": 0.6, "repetition_penalty": 1.1}, {"repetition_penalty": 1.1}),
    ],
)
def test_what_the_authors_recommend(tmp_path: Path, config: dict[str, Any] | None, defaults: dict[str, Any]) -> None:
    if config is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(config))
    assert generation_defaults(tmp_path) == defaults


def test_broken_files_are_named(tmp_path: Path, save_model: SaveModel) -> None:
    with pytest.raises(TokenizerError, match=r"has no tokenizer: neither tokenizer\.json nor"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(TokenizerError, match=r"tokenizer\.json cannot be read"):
        load_tokenizer(tmp_path)
    path = save_model(byte_level())
    (path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(TokenizerError, match="does not hold a JSON object"):
        load_tokenizer(path)
    (path / "tokenizer_config.json").write_text("{")
    with pytest.raises(TokenizerError, match="not valid JSON"):
        load_tokenizer(path)


@pytest.mark.parametrize("value", ["hot", True, [1], {}])
def test_recommendations_and_end_tokens_of_the_wrong_kind(tmp_path: Path, save_model: SaveModel, value: Any) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"temperature": value}))
    with pytest.raises(TokenizerError, match=r"generation_config\.json: temperature must be a number"):
        generation_defaults(tmp_path)
    if value != [1]:
        with pytest.raises(TokenizerError, match="eos_token_id must be a token id or a list of them"):
            load_tokenizer(save_model(byte_level(), generation_config={"eos_token_id": value}))


def test_the_fewest_tokens_a_text_can_have(families: dict[str, Tokenizer]) -> None:
    for name in ("byte_level", "sentencepiece"):
        tokenizer = families[name]
        for text in ("", "a" * 1000, "Hello world " * 100, "🔥" * 200):
            least = tokenizer.min_tokens(text)
            assert least <= len(tokenizer.encode(text))
        assert least > 0
