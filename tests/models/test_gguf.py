from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as GGMLType
from model_driver import Driver
from tiny_gguf import VOCABULARY, interleave, write_gguf
from tiny_models import COMMON

from minisgl.models.build import build_model
from minisgl.models.config import ConfigError, ModelConfig
from minisgl.models.gguf import SUPPORTED_TYPES, GGUFTensor, checkpoint_name, tensors_in_gguf
from minisgl.models.gguf_file import GGUFError, TensorInfo, read_gguf
from minisgl.models.weights import WeightError

CPU = torch.device("cpu")
PROMPT = [5, 17, 99, 4, 4, 150, 23]


def make(family: str, **changes: Any) -> Any:
    import transformers

    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16}
    config = getattr(transformers, f"{family}Config")(**{**COMMON, **sizes, **changes})
    if not hasattr(config, "head_dim"):
        config.head_dim = 16
    torch.manual_seed(0)
    return getattr(transformers, f"{family}ForCausalLM")(config).eval()


def check(reference: Any, path: Path) -> ModelConfig:
    config = ModelConfig.from_path(path)
    model = build_model(config, dtype=torch.float32, device=CPU, path=path)
    logits = Driver(model).step({0: PROMPT}, every_token=True)
    with torch.inference_mode():
        expected = reference(torch.tensor([PROMPT])).logits[0]
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    return config


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_llama(kind: str, tmp_path: Path) -> None:
    reference, path = make("Llama"), tmp_path / "model.gguf"
    write_gguf(reference, "llama", path, GGMLType[kind])
    config = check(reference, path)
    assert config.architecture == "LlamaForCausalLM"
    assert config.vocab_size == 199
    assert not config.tie_word_embeddings


@pytest.mark.parametrize(
    ("family", "architecture", "changes", "extra"),
    [
        ("Llama", "llama", {"tie_word_embeddings": True, "num_key_value_heads": 4}, {}),
        ("Mistral", "llama", {"sliding_window": 4}, {"attention.sliding_window": 4}),
        ("Qwen2", "qwen2", {}, {}),
        ("Qwen3", "qwen3", {"tie_word_embeddings": True}, {}),
        (
            "Llama",
            "llama",
            {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}},
            {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0},
        ),
        (
            "Llama",
            "llama",
            {
                "rope_parameters": {
                    "rope_type": "yarn",
                    "factor": 4.0,
                    "rope_theta": 1e4,
                    "original_max_position_embeddings": 32,
                }
            },
            {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 32},
        ),
    ],
)
def test_architectures(family: str, architecture: str, changes: dict, extra: dict, tmp_path: Path) -> None:
    reference, path = make(family, **changes), tmp_path / "model.gguf"
    write_gguf(reference, architecture, path, GGMLType.Q8_0, extra)
    config = check(reference, path)
    assert config.architecture == f"{family}ForCausalLM"
    assert config.tie_word_embeddings == changes.get("tie_word_embeddings", False)


def test_directory_agrees_with_the_gguf_package(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(make("Llama"), "llama", path, GGMLType.Q4_1)
    ours, theirs = read_gguf(path, arrays=True), gguf.GGUFReader(path)
    assert (
        ours.metadata.items()
        == {name: field.contents() for name, field in theirs.fields.items() if not name.startswith("GGUF.")}.items()
    )
    assert ours.metadata["tokenizer.ggml.tokens"] == VOCABULARY
    assert read_gguf(path).metadata["tokenizer.ggml.tokens"] == len(VOCABULARY)
    assert {t.name: (t.offset, t.type, list(t.shape)) for t in ours.tensors.values()} == {
        t.name: (t.data_offset, t.tensor_type, t.shape.tolist()[::-1]) for t in theirs.tensors
    }


@pytest.mark.filterwarnings("ignore:invalid value")  # Random scales may be infinite.
@pytest.mark.parametrize("kind", SUPPORTED_TYPES, ids=lambda kind: kind.name)
@pytest.mark.parametrize("interleaved", [False, True])
def test_any_shard_of_any_type(
    kind: GGMLType, interleaved: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunk by chunk and cut as the ranks do it, on random bytes: the package's dequantiser applied to the whole."""
    rows, columns, heads, lead = 24, 512, 6, 7
    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    data = np.random.default_rng(0).integers(0, 256, (rows, columns // block * block_bytes), np.uint8)
    path = tmp_path / "bytes"
    path.write_bytes(bytes(lead) + data.tobytes())
    whole = gguf.quants.dequantize(data, kind)
    monkeypatch.setattr("minisgl.models.gguf._CHUNK", 5 * columns)
    info = TensorInfo("x", (rows, columns), int(kind), lead)
    tensor = GGUFTensor("x", (rows, columns), data.nbytes, path, info, heads if interleaved else None)
    for index in ((slice(0, 24), slice(0, 512)), (slice(8, 20), slice(128, 384))):
        part = torch.empty([len(range(n)[cut]) for n, cut in zip((rows, columns), index, strict=True)])
        tensor.read_into(part, index)
        if interleaved:
            before = torch.empty(rows, columns)
            tensor.read_into(before, (slice(0, rows), slice(0, columns)))
            stored = interleave(before.numpy(), rows // heads)
            np.testing.assert_array_equal(stored, whole)
            np.testing.assert_array_equal(part.numpy(), before.numpy()[index])
        else:
            np.testing.assert_array_equal(part.numpy(), whole[index])


def test_names() -> None:
    assert checkpoint_name("blk.12.attn_q.bias") == "model.layers.12.self_attn.q_proj.bias"
    assert checkpoint_name("token_embd.weight") == "model.embed_tokens.weight"
    assert checkpoint_name("blk.0.ssm_a.weight") == "blk.0.ssm_a.weight"


def test_llama3_divisors(tmp_path: Path) -> None:
    """A file with rope_freqs.weight runs with divided frequencies."""
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    for add, value in (
        (writer.add_block_count, 1),
        (writer.add_context_length, 64),
        (writer.add_embedding_length, 32),
        (writer.add_feed_forward_length, 64),
        (writer.add_head_count, 4),
    ):
        add(value)
    writer.add_tensor("rope_freqs.weight", np.array([1, 2, 4, 8], np.float32))
    writer.add_tensor("token_embd.weight", np.zeros((10, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    config = ModelConfig.from_path(path)
    assert config.rope.freq_divisors == (1.0, 2.0, 4.0, 8.0)
    assert [t.name for t in tensors_in_gguf(path, 4, 4)] == ["model.embed_tokens.weight"]


def test_what_cannot_be_read(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(make("Llama"), "falcon", path, GGMLType.F32)
    with pytest.raises(ConfigError, match=r"falcon.*supported are llama, qwen2, qwen3"):
        ModelConfig.from_path(path)
    write_gguf(make("Llama"), "llama", path, GGMLType.F32)
    whole = path.read_bytes()
    path.write_bytes(whole[:900])
    with pytest.raises(GGUFError, match="damaged"):
        read_gguf(path)
    path.write_bytes(whole[:-1000])
    with pytest.raises(WeightError, match="damaged or incomplete"):
        tensors_in_gguf(path, 4, 2)
    path.write_bytes(b"GGML" + whole[4:])
    with pytest.raises(ConfigError, match="not a GGUF file"):
        ModelConfig.from_path(path)
    path.write_bytes(whole[:4] + b"\x09\0\0\0" + whole[8:])
    with pytest.raises(GGUFError, match="version 9"):
        read_gguf(path)
    path.write_bytes(b"")
    with pytest.raises(GGUFError, match="not a GGUF file"):
        read_gguf(path)


def test_one_part_of_several(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint16("split.count", 3)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ConfigError, match="one part of several"):
        ModelConfig.from_path(path)


def test_unsupported_quantisation(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    block = np.zeros((2, gguf.GGML_QUANT_SIZES[GGMLType.IQ1_S][1]), np.uint8)
    writer.add_tensor("blk.0.ffn_up.weight", block, raw_dtype=GGMLType.IQ1_S)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(WeightError, match=r"IQ1_S; supported are F32, .*Q6_K"):
        tensors_in_gguf(path, 4, 4)
