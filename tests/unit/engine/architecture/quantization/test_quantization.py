"""Settings that are not supported are refused by name, and so are tensors that do not fit, before any is read."""

from __future__ import annotations

import pickle
import re
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

from quire.engine.architecture.families.tensors import NeededTensor
from quire.engine.architecture.quantization import METHODS, read
from quire.engine.config.checkpoint_tensors import check_tensors
from quire.engine.config.options import EngineOptions
from quire.engine.protocol.errors import ConfigError
from quire.engine.repository.model_files import TensorInfo

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
WEIGHTS = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128}
PACKED = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": WEIGHTS}},
}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("gptq", "must be an object, got 'gptq'"),
        ({"bits": 4}, "quant_method None is not supported"),
        ({"quant_method": "hqq"}, "quant_method 'hqq' is not supported"),
        ({"quant_method": ["gptq"]}, "quant_method"),
        (GPTQ | {"bits": "4"}, "bits .*4.* is not supported"),
    ],
)
def test_settings_are_refused_by_name(settings: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(settings)


@pytest.mark.parametrize(
    ("settings", "others"),
    [
        (GPTQ, {"dynamic": {"-:.*k_proj": {}}, "modules_in_block_to_quantize": [["self_attn.q_proj"]]}),
        (AWQ, {"modules_to_not_convert": ["visual"]}),
        (FP8, {"ignored_layers": ["a", "re:b"]}),
        (PACKED, {"ignore": ["lm_head"]}),
    ],
    ids=lambda settings: settings.get("quant_method", ""),
)
def test_methods_are_values(settings: dict[str, Any], others: dict[str, Any]) -> None:
    """They are sent to the ranks, and compared."""
    method, other = read(settings), read(settings | others)
    assert pickle.loads(pickle.dumps(other)) == other == read(settings | others)
    assert hash(other) == hash(read(settings | others))
    assert method != other


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
