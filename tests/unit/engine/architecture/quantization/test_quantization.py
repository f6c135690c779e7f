"""Settings that are not supported are refused by name, and so are tensors that do not fit, before any is read."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

from quire.engine.architecture.families.tensors import NeededTensor
from quire.engine.architecture.quantization import METHODS, read
from quire.engine.config.checkpoint_tensors import check_tensors, logical_names
from quire.engine.config.options import EngineOptions
from quire.engine.protocol.errors import ConfigError
from quire.engine.repository.model_files import TensorInfo

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
NF4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}


def compressed(layout: str = "pack-quantized", **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}}
    group["weights"] |= {"symmetric": True, **weights}  # type: ignore[operator]
    return {"quant_method": "compressed-tensors", "format": layout, "config_groups": {"group_0": group}}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("gptq", "must be an object, got 'gptq'"),
        ({"bits": 4}, "quant_method None is not supported"),
        ({"quant_method": "hqq"}, "quant_method 'hqq' is not supported"),
        ({"quant_method": ["gptq"]}, "quant_method"),
        (GPTQ | {"bits": 5}, "bits 5 is not supported"),
        (GPTQ | {"bits": "4"}, "bits .*4.* is not supported"),
        (GPTQ | {"group_size": 100}, "group_size 100 is not supported"),
        (GPTQ | {"checkpoint_format": "marlin"}, "marlin"),
        (GPTQ | {"is_marlin_format": True}, "is_marlin_format"),
        (GPTQ | {"dynamic": {"+:(": {"bits": 8}}}, "dynamic"),
        (GPTQ | {"dynamic": {"+:.*": {"bits": 7}}}, "bits 7 is not supported"),
        (AWQ | {"bits": 8}, "bits 8 is not supported"),
        (AWQ | {"group_size": 16}, "group_size 16 is not supported"),
        (AWQ | {"version": "gemv"}, "gemv"),
        (FP8 | {"weight_block_size": [128]}, "weight_block_size"),
        (FP8 | {"weight_block_size": [128, 0]}, "weight_block_size"),
        (FP8 | {"fmt": "e5m2"}, "e5m2"),
        (FP8 | {"activation_scheme": "nearest"}, "nearest"),
        (FP8 | {"modules_to_not_convert": [1]}, "modules_to_not_convert"),
        (compressed("marlin-24"), "marlin-24"),
        (compressed("unheard-of"), "unheard-of"),
        (compressed(num_bits=3), "3"),
        (compressed(strategy="star"), "star"),
        (compressed(type="complex"), "complex"),
        (compressed() | {"transform_config": {"config_groups": {"u": {}}}}, "transform_config"),
        ({"quant_method": "modelopt", "quant_algo": "W4A16_AWQ"}, "W4A16_AWQ"),
        ({"quant_method": "modelopt", "quant_algo": None}, "quant_algo"),
        ({"quant_method": "bitsandbytes"}, "load_in_4bit or load_in_8bit"),
        (NF4 | {"bnb_4bit_quant_type": "int3"}, "bnb_4bit_quant_type int3 is not supported"),
        (NF4 | {"bnb_4bit_quant_storage": "complex64"}, "complex64"),
        ({"quant_method": "torchao", "quant_type": {"default": {"_type": "Unknown"}}}, "torchao|quant_type|Unknown"),
        ({"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "int3"}}}, "int3|quark|weight"),
        ({"quant_method": "gguf", "types": {"model.layers.0.mlp.up_proj": "IQ1_S"}}, "IQ1_S is not supported"),
    ],
)
def test_settings_are_refused_by_name(settings: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(settings)


def test_nothing_says_that_nothing_is_quantized() -> None:
    assert read(None) is None
    assert read({}) is None


def test_the_flag_names_every_method() -> None:
    (choices, _) = get_args(get_type_hints(EngineOptions)["quantization"])
    assert {*get_args(choices)} - {"int8", "int4"} == METHODS.keys()


NAME = "model.layers.0.mlp.up_proj"
TENSORS = {
    "qweight": ("I32", (16, 256)),
    "qzeros": ("I32", (1, 32)),
    "scales": ("F16", (1, 256)),
    "g_idx": ("I32", (128,)),
}


def headers(**changes: Any) -> dict[str, TensorInfo]:
    tensors = {name: each for name, each in (TENSORS | changes).items() if each is not None}
    return {
        f"{NAME}.{name}": TensorInfo(Path("m"), dtype, shape, f"{NAME}.{name}")
        for name, (dtype, shape) in tensors.items()
    }


def model(settings: Any) -> Any:
    class Model:
        path, quantized = Path("m"), read(settings)

    return Model


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scales": None}, f"{NAME}.scales is missing"),
        ({"qweight": None}, f"{NAME}.qweight is missing"),
        ({"scales": ("F16", (2, 256))}, f"{NAME}.scales has the shape [2, 256], expected [1, 256]"),
        ({"scales": ("I8", (1, 256))}, f"{NAME}.scales is of type I8, expected F32 or BF16 or F16"),
        ({"qweight": ("I32", (32, 256))}, f"{NAME}.qweight has the shape [32, 256], expected [16, 256]"),
        ({"weight": ("BF16", (256, 128)), "qweight": None}, f"{NAME}.qweight is missing"),
    ],
)
def test_tensors_are_refused_by_name(changes: dict[str, Any], message: str) -> None:
    needed = {f"{NAME}.weight": NeededTensor((256, 128))}
    with pytest.raises(ConfigError, match=re.escape(message)):
        check_tensors(model(GPTQ), needed, headers(**changes))


def test_a_weight_that_is_plain_though_the_settings_say_otherwise() -> None:
    needed = {f"{NAME}.weight": NeededTensor((256, 128))}
    plain = {f"{NAME}.weight": TensorInfo(Path("m"), "BF16", (256, 128), f"{NAME}.weight")}
    assert check_tensors(model(GPTQ), needed, plain) == {}
    assert check_tensors(model(GPTQ), needed, headers()).keys() == needed.keys()
    with pytest.raises(ConfigError, match=r"up_proj\.weight is missing"):
        check_tensors(model(None), needed, headers())


def test_tensors_of_a_quantized_weight_have_one_name() -> None:
    found = {*headers(), "model.norm.weight", f"{NAME}.bias"}
    assert logical_names(found, read(GPTQ)) == {f"{NAME}.weight", f"{NAME}.bias", "model.norm.weight"}
    assert logical_names(found, None) == found
