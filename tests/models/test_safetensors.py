from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from model_driver import Driver
from safetensors.torch import load_file, save_file
from tiny_models import Tiny, make_reference

from minisgl.models.base import CausalLM
from minisgl.models.build import build_model
from minisgl.models.config import ModelConfig
from minisgl.models.safetensors import safetensors_in
from minisgl.models.weights import WeightError

PROMPT = [5, 17, 99, 4, 4, 150]


def build(path: Path, dtype: torch.dtype = torch.float32, **options: Any) -> CausalLM:
    config = ModelConfig.from_path(path)
    return build_model(config, dtype=dtype, device=torch.device("cpu"), path=path, **options)


def rewrite(tiny: Tiny, path: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    """The checkpoint of ``tiny`` with other tensors."""
    tensors = load_file(tiny.path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text((tiny.path / "config.json").read_text())
    return path


@pytest.mark.parametrize("variant", ["llama-tied", "qwen3-moe"])
def test_shards(variant: str, tmp_path: Path) -> None:
    reference = make_reference(variant)
    reference.save_pretrained(tmp_path, max_shard_size="60KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    seen: list[tuple[int, int]] = []
    model = build(tmp_path, progress=lambda done, total: seen.append((done, total)))
    logits = Driver(model).step({0: PROMPT}, every_token=True)
    with torch.inference_mode():
        expected = reference(torch.tensor([PROMPT])).logits[0]
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    stored = sum(tensor.nbytes for tensor in safetensors_in(tmp_path))
    assert seen[-1] == (stored, stored)
    assert seen == sorted(seen)


def mapped(directory: Path) -> set[str]:
    """The files of the directory that this process has mapped."""
    return {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if str(directory) in line}


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_shard_is_closed_when_all_of_it_has_been_read(tmp_path: Path) -> None:
    """What was read of it would be resident memory until then."""
    make_reference("llama-tied").save_pretrained(tmp_path, max_shard_size="60KB")
    tensors = safetensors_in(tmp_path)
    for index, tensor in enumerate(tensors):
        tensor.read_into(torch.empty(tensor.shape), tuple(slice(None) for _ in tensor.shape))
        rest = {later.path for later in tensors[index + 1 :]}
        assert mapped(tmp_path) == {str(path) for path in {tensor.path} & rest}


def test_dtype_is_the_models(tiny: Callable[[str], Tiny], tmp_path: Path) -> None:
    """A float32 checkpoint runs in bfloat16, and a bfloat16 one in float32."""
    case = tiny("llama")
    expected = case.reference_logits(PROMPT)
    logits = Driver(build(case.path, torch.bfloat16)).step({0: PROMPT}, every_token=True)
    assert logits.dtype == torch.bfloat16
    assert (logits - expected).abs().max() < 0.25

    def halve(tensors: dict[str, torch.Tensor]) -> None:
        for name in tensors:
            tensors[name] = tensors[name].bfloat16()

    logits = Driver(build(rewrite(case, tmp_path, halve))).step({0: PROMPT}, every_token=True)
    assert logits.dtype == torch.float32
    assert 1e-4 < (logits - expected).abs().max() < 0.25


def test_built_in_inference_mode(tiny: Callable[[str], Tiny]) -> None:
    """The mode belongs to a thread, and weights are read by others."""
    case = tiny("llama")
    with torch.inference_mode():
        model = build(case.path)
    logits = Driver(model).step({0: PROMPT}, every_token=True)
    torch.testing.assert_close(logits, case.reference_logits(PROMPT), rtol=1e-4, atol=1e-4)


def test_tensors_that_say_nothing_new(tiny: Callable[[str], Tiny], tmp_path: Path) -> None:
    def add(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)

    case = tiny("llama-tied")
    logits = Driver(build(rewrite(case, tmp_path, add))).step({0: PROMPT}, every_token=True)
    torch.testing.assert_close(logits, case.reference_logits(PROMPT), rtol=1e-4, atol=1e-4)


def drop(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["model.norm.weight"]
    del tensors["model.layers.1.mlp.up_proj.weight"]


def invent(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.7.mlp.up_proj.weight"] = torch.ones(2)


def reshape(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.norm.weight"] = torch.ones(47)


def quantise(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.norm.weight"] = torch.ones(48, dtype=torch.int8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (drop, r"lacks model\.layers\.1\.mlp\.up_proj\.weight, model\.norm\.weight"),
        (invent, r"does not know: model\.layers\.7"),
        (reshape, r"model\.norm\.weight has shape \(47,\).*\(48,\)"),
        (quantise, "norm.weight is I8; supported"),
    ],
)
def test_checkpoints_that_do_not_fit(
    change: Callable[[dict[str, torch.Tensor]], None], message: str, tiny: Callable[[str], Tiny], tmp_path: Path
) -> None:
    path = rewrite(tiny("llama"), tmp_path, change)
    with pytest.raises(WeightError, match=message):
        build(path)


def test_missing_and_damaged_files(tiny: Callable[[str], Tiny], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((tiny("llama").path / "config.json").read_text())
    with pytest.raises(WeightError, match="no weights in"):
        build(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model-1.safetensors"}}))
    with pytest.raises(WeightError, match=r"lacks model-1\.safetensors"):
        build(tmp_path)
    for damaged in ("{", "[]", "{}", '{"weight_map": 5}'):
        index.write_text(damaged)
        with pytest.raises(WeightError, match=r"model\.safetensors\.index\.json is damaged"):
            build(tmp_path)
    index.unlink()
    whole = (tiny("llama").path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[:5000])
    with pytest.raises(WeightError, match="damaged"):
        build(tmp_path)


def test_files_of_two_checkpoints(tiny: Callable[[str], Tiny], tmp_path: Path) -> None:
    path = rewrite(tiny("llama"), tmp_path, lambda tensors: None)
    (path / "pytorch_copy.safetensors").write_bytes((path / "model.safetensors").read_bytes())
    with pytest.raises(WeightError, match=r"model\.safetensors and pytorch_copy\.safetensors in .* both have .*keep"):
        build(path)


def test_what_lies_beside_a_checkpoint(tiny: Callable[[str], Tiny], tmp_path: Path) -> None:
    """A second copy under Mistral's name, and what an operating system leaves behind."""
    path = rewrite(tiny("llama"), tmp_path, lambda tensors: None)
    (path / "consolidated.safetensors").write_bytes((path / "model.safetensors").read_bytes())
    (path / "._model.safetensors").write_bytes(b"Mac")
    (path / "empty.safetensors").mkdir()
    assert {tensor.path.name for tensor in safetensors_in(path)} == {"model.safetensors"}
    (path / "model.safetensors").unlink()
    assert {tensor.path.name for tensor in safetensors_in(path)} == {"consolidated.safetensors"}


def test_shards_beside_another_whole_file(tiny: Callable[[str], Tiny], tmp_path: Path) -> None:
    path = rewrite(tiny("llama"), tmp_path, lambda tensors: None)
    shard = path / "model-00001-of-00001.safetensors"
    shard.write_bytes((path / "model.safetensors").read_bytes())
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"lm_head.weight": shard.name}}))
    with pytest.raises(WeightError, match=r"does not know model\.safetensors beside it"):
        build(path)


@pytest.mark.parametrize("weight_map", [{"a": 3}, {"a": None}, {"a": ""}, [], "x"])
def test_an_index_of_nonsense(tiny: Callable[[str], Tiny], tmp_path: Path, weight_map: Any) -> None:
    rewrite(tiny("llama"), tmp_path, lambda tensors: None)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(WeightError, match="download it again"):
        build(tmp_path)


def test_a_rank_reads_only_its_shard(tiny: Callable[[str], Tiny]) -> None:
    """Column slices and row slices, straight from the file."""
    for tensor in safetensors_in(tiny("llama").path):
        if tensor.name == "model.layers.0.self_attn.o_proj.weight":
            dest = torch.empty(48, 24)
            tensor.read_into(dest, (slice(0, 48), slice(24, 48)))
            whole = tiny("llama").reference.model.layers[0].self_attn.o_proj.weight
            assert torch.equal(dest, whole[:, 24:])
            return
    pytest.fail("no such tensor")
