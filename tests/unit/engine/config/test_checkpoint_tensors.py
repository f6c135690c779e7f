"""Headers of quantized checkpoints: tensors under other names, and missing ones."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quire.engine.architecture.families import from_hf_config
from quire.engine.architecture.families.tensors import NeededTensor, checkpoint_tensors
from quire.engine.architecture.model_spec import ModelSpec
from quire.engine.architecture.quantization import read
from quire.engine.config.checkpoint_tensors import (
    StoredWeight,
    by_needed_name,
    check_model,
    check_tensors,
    logical_names,
    quantized_outer,
)
from quire.engine.protocol.errors import ConfigError
from quire.engine.repository.model_files import TensorInfo
from tests.fakes.configs import TINY, engine_config

Q, STACK = "model.layers.0.self_attn.q_proj", "model.layers.0.mlp.experts.down_proj"
FP8: dict[str, Any] = {"quant_method": "fp8"}
OF_BLOCKS = {**FP8, "weight_block_size": [128, 128]}
OF_ROWS = {"quant_method": "fbgemm_fp8"}
MXFP4 = {"quant_method": "mxfp4"}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128}
GPTQ = {**AWQ, "quant_method": "gptq"}
WEIGHTS = {"num_bits": 4, "strategy": "channel", "symmetric": False}
PACKED = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": WEIGHTS}},
}


def checked(settings: dict[str, Any], needed: dict[str, tuple[int, ...]], **stored: Any) -> dict[str, StoredWeight]:
    model = engine_config(quantized=read(settings)).model
    headers = {name: TensorInfo(Path("file"), dtype, shape, name) for name, (dtype, shape) in stored.items()}
    return check_tensors(model, {name: NeededTensor(shape) for name, shape in needed.items()}, headers)


@pytest.mark.parametrize("name", ["weight_scale", "weight_scale_inv"])
def test_one_scale_has_one_of_two_names(name: str) -> None:
    stored: dict[str, Any] = {f"{Q}.weight": ("F8_E4M3", (8, 16)), f"{Q}.{name}": ("F32", ())}
    (found,) = checked(FP8, {f"{Q}.weight": (8, 16)}, **stored).values()
    assert {each: info.name for each, info in found.tensors.items()} == {
        f"{Q}.weight": f"{Q}.weight",
        f"{Q}.weight_scale": f"{Q}.{name}",
    }


def test_a_weight_without_scales_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"q_proj\.weight_scale or .*q_proj\.weight_scale_inv is missing"):
        checked(FP8, {f"{Q}.weight": (8, 16)}, **{f"{Q}.weight": ("F8_E4M3", (8, 16))})
    assert not checked(FP8, {f"{Q}.weight": (8, 16)}, **{f"{Q}.weight": ("BF16", (8, 16))}), "it is not quantized"


@pytest.mark.parametrize("suffix", ["", ".weight"])
def test_names_of_stacks_may_have_no_weight_in_them(suffix: str) -> None:
    name = STACK + suffix
    stored: dict[str, Any] = {name: ("F8_E4M3", (3, 8, 16)), f"{name}_scale": ("F32", (3, 8, 1))}
    (found,) = checked(OF_ROWS, {name: (3, 8, 16)}, **stored).values()
    assert [info.name for info in found.tensors.values()] == list(stored)
    with pytest.raises(ConfigError, match=r"_scale has the shape \[3, 8, 2\], expected \[3, 8, 1\] or"):
        checked(OF_ROWS, {name: (3, 8, 16)}, **{**stored, f"{name}_scale": ("F32", (3, 8, 2))})


@pytest.mark.parametrize(
    ("settings", "names", "logical"),
    [
        (FP8, [f"{Q}.weight", f"{Q}.weight_scale_inv"], f"{Q}.weight"),
        (FP8, [STACK, f"{STACK}_scale"], STACK),
        (OF_BLOCKS, [STACK, f"{STACK}_scale_inv"], STACK),
        (OF_ROWS, [f"{STACK}.weight", f"{STACK}.weight_scale"], f"{STACK}.weight"),
        (MXFP4, [f"{STACK}_blocks", f"{STACK}_scales"], STACK),
        (PACKED, [f"{Q}.weight_{x}" for x in ("packed", "scale", "zero_point", "shape")], f"{Q}.weight"),
        (PACKED, [f"{STACK}_packed", f"{STACK}_scale", f"{STACK}_zero_point"], STACK),
        (AWQ, [f"{Q}.{x}" for x in ("qweight", "qzeros", "scales")], f"{Q}.weight"),
        (GPTQ, [f"{Q}.{x}" for x in ("qweight", "qzeros", "scales", "g_idx")], f"{Q}.weight"),
        (None, [f"{Q}.weight"], f"{Q}.weight"),
    ],
)
def test_names_of_a_quantized_weight_are_those_of_the_weight(
    settings: dict[str, Any] | None, names: list[str], logical: str
) -> None:
    others = {"model.norm.weight", "model.layers.0.self_attn.k_proj.bias", "model.layers.1.mlp.up_proj.weight"}
    assert logical_names({*names, *others}, read(settings)) == {logical, *others}


@pytest.mark.parametrize(
    ("names", "with_awq", "with_gptq"),
    [
        (None, set(), {"head"}),
        (["lm_head.qweight", "lm_head.scales", "model.norm.weight"], {"head"}, {"head"}),
        (["lm_head.weight", "model.embed_tokens.weight"], set(), set()),
        (["lm_head.qweight", "model.embed_tokens.qweight", "model.embed_tokens.scales"], {"embedding"}, {"embedding"}),
        (["embed_tokens.qweight", "embed_tokens.scales"], {"embedding"}, {"embedding"}),
    ],
    ids=["not known", "head", "neither", "incomplete", "without a prefix"],
)
def test_embedding_and_head_are_quantized_as_their_tensors_say(
    names: list[str] | None, with_awq: set[str], with_gptq: set[str], tmp_path: Path
) -> None:
    index = {} if names is None else {"weight_map": dict.fromkeys(names, "model.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    for settings, expected in ((AWQ | {"zero_point": False}, with_awq), (GPTQ | {"lm_head": True}, with_gptq)):
        assert quantized_outer(tmp_path, "safetensors", TINY, read(settings)) == expected


def test_a_checkpoint_without_a_tower_may_take_text() -> None:
    arch = tiny_qwen2_vl()
    model = replace(engine_config().model, architecture=arch)
    text = checkpoint_tensors(replace(arch, media=None), has_head=True)
    headers = {name: TensorInfo(Path("file"), "BF16", tensor.shape, name) for name, tensor in text.items()}
    with pytest.raises(ConfigError, match=r"visual.* is missing; .* more; use --language-model-only"):
        check_model(model, headers)
    headers.popitem()
    with pytest.raises(ConfigError, match=r": [^;]* is missing$"):
        check_model(model, headers)


def tiny_qwen2_vl() -> ModelSpec:
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"intermediate_size": 96, "vocab_size": 100}
    axes = {"rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}}
    vision = {"depth": 1, "embed_dim": 32, "hidden_size": 64, "num_heads": 2}
    return from_hf_config(
        {**sizes, **axes, "vision_config": vision, "architectures": ["Qwen2VLForConditionalGeneration"]}
    )


def test_a_tower_is_quantized_as_its_tensors_say(tmp_path: Path) -> None:
    """Settings that do not mention it apply to it by name, but few publishers quantize it."""
    arch = tiny_qwen2_vl()
    qkv = "visual.blocks.0.attn.qkv"
    for names, expected in (
        ([f"{qkv}.weight"], set()),
        ([f"{qkv}.qweight", f"{qkv}.scales"], {"tower.layers.attention.qkv"}),
    ):
        index = {"weight_map": dict.fromkeys(["model.norm.weight", *names], "model.safetensors")}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
        assert quantized_outer(tmp_path, "safetensors", arch, read(AWQ | {"zero_point": False})) == expected


def test_the_names_of_other_stages_stay_those_of_older_checkpoints_with_pictures() -> None:
    """They are not taken for tensors that nothing uses."""
    names = [f"language_model.model.layers.{number}.mlp.up_proj.weight" for number in range(2)]
    assert [*by_needed_name(dict.fromkeys(names), "model.", names[:1])] == names
