"""Settings of Quark."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any

import pytest

from quire.engine.architecture.quantization.method import Scheme
from quire.engine.architecture.quantization.nvfp4 import W4A16_MODELOPT
from quire.engine.architecture.quantization.quark import INT8, INT8_OF_ROWS, MXFP4, read
from quire.engine.architecture.quantization.unpacked import FP8, FP8_OF_ROWS, MXFP8
from quire.engine.protocol.errors import ConfigError

Q_PROJ = "model.layers.0.self_attn.q_proj"


def tensor(dtype: str, qscheme: str, group_size: int | None = None, **more: Any) -> dict[str, Any]:
    spec = {"dtype": dtype, "qscheme": qscheme, "group_size": group_size, "is_dynamic": False, "symmetric": True}
    return {**spec, "ch_axis": None, "round_method": "half_even", "observer_cls": "PerTensorMinMaxObserver", **more}


def layer(weight: Any, **more: Any) -> dict[str, Any]:
    return {"weight": weight, "input_tensors": weight, "output_tensors": None, "bias": None, **more}


def settings(weight: Any, **more: Any) -> dict[str, Any]:
    return {
        "quant_method": "quark",
        "global_quant_config": layer(weight, target_device=None),
        "layer_quant_config": {},
        "layer_type_quant_config": {},
        "exclude": ["lm_head"],
        "export": {"kv_cache_group": [], "pack_method": "reorder", "weight_format": "real_quantized"},
        "algo_config": None,
        "quant_mode": "eager_mode",
        "softmax_quant_spec": None,
        "version": "0.9",
        **more,
    }


OF_FP8 = tensor("fp8_e4m3", "per_tensor")
OF_MXFP4 = tensor("fp4", "per_group", 32, scale_format="e8m0", ch_axis=-1, symmetric=None)


@pytest.mark.parametrize(
    ("weight", "scheme"),
    [
        (OF_FP8, FP8),
        (tensor("fp8_e4m3", "per_channel", ch_axis=0), FP8_OF_ROWS),
        (tensor("int8", "per_tensor"), INT8),
        (tensor("int8", "per_channel", ch_axis=0), INT8_OF_ROWS),
        (OF_MXFP4, MXFP4),
        (tensor("fp8_e4m3", "per_group", 32, scale_format="e8m0"), MXFP8),
        ([tensor("fp4", "per_group", 16), tensor("fp8_e4m3", "per_tensor", is_scale_quant=True)], W4A16_MODELOPT),
    ],
)
def test_layouts(weight: Any, scheme: Scheme) -> None:
    method = read(settings(weight))
    assert method.scheme(Q_PROJ) == scheme
    assert method.scheme("lm_head") is None
    assert pickle.loads(pickle.dumps(method)) == method


def test_activations_are_rounded_only_if_the_publisher_does() -> None:
    weight_only = {**layer(tensor("int8", "per_tensor")), "input_tensors": None}
    scheme = read(settings(None, global_quant_config=weight_only)).scheme(Q_PROJ)
    assert scheme == replace(INT8, activations=None)


def test_layers_of_their_own() -> None:
    of_layers = {"*self_attn*": layer(OF_FP8), "*.mlp.gate": layer(None)}
    method = read(settings(OF_MXFP4, layer_quant_config=of_layers, exclude=["re:.*embed.*"]))
    assert method.scheme(Q_PROJ) == FP8
    assert method.scheme("model.layers.0.mlp.up_proj") == MXFP4
    assert method.scheme("model.layers.0.mlp.gate") is None
    assert method.scheme("model.embed_tokens") is None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (settings(tensor("int4", "per_group", 128)), "global_quant_config: weights of int4 per_group of 128"),
        (settings(tensor("int8", "per_tensor", symmetric=False)), "weights of int8 per_tensor"),
        (settings(tensor("fp8_e4m3", "per_channel", ch_axis=1)), "weights of fp8_e4m3 per_channel"),
        (settings(tensor("fp4", "per_group", 32)), "weights of fp4 per_group of 32"),
        (settings([OF_FP8, tensor("int4", "per_channel")]), "fp8_e4m3 per_tensor of None and int4 per_channel"),
        (settings(OF_FP8, algo_config=[{"name": "rotation"}]), "algo_config rotation is not supported"),
        (settings(OF_FP8, export={"weight_format": "fake_quantized"}), "weight_format fake_quantized"),
        (settings(OF_FP8, layer_type_quant_config={"Linear": layer(OF_FP8)}), "layer_type_quant_config"),
        (settings(OF_FP8, softmax_quant_spec=OF_FP8), "softmax_quant_spec is not supported"),
        (settings(OF_FP8, layer_quant_config={"*.o_proj": layer(OF_FP8, bias=OF_FP8)}), r"\*\.o_proj: bias"),
    ],
)
def test_what_is_not_supported_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(given)
