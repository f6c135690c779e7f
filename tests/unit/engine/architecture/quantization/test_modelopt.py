"""Settings of ModelOpt, from config.json and hf_quant_config.json."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from quire.engine.architecture.quantization import modelopt
from quire.engine.architecture.quantization.method import Scheme
from quire.engine.architecture.quantization.modelopt import ModelOpt
from quire.engine.architecture.quantization.nvfp4 import MODELOPT, W4A16_MODELOPT
from quire.engine.architecture.quantization.unpacked import FP8, FP8_OF_BLOCKS, FP8_OF_ROWS, MXFP8
from quire.engine.protocol.errors import ConfigError

Q_PROJ, UP_PROJ = "model.layers.0.self_attn.q_proj", "model.layers.0.mlp.experts.3.up_proj"


def file(**quantization: Any) -> dict[str, Any]:
    return {"producer": {"name": "modelopt", "version": "0.33.0"}, "quantization": quantization}


def read(settings: dict[str, Any]) -> ModelOpt:
    method = modelopt.read(settings)
    assert method is not None
    return method


def test_hf_quant_config() -> None:
    method = read(
        file(
            quant_algo="NVFP4",
            kv_cache_quant_algo="FP8",
            group_size=16,
            exclude_modules=["lm_head", "model.layers.0.self_attn*", "*.router"],
        )
    )
    assert method.scheme(UP_PROJ) == MODELOPT
    for module in (Q_PROJ, "lm_head", "model.layers.1.mlp.router"):
        assert method.scheme(module) is None
    assert pickle.loads(pickle.dumps(method)) == method


def test_config_json() -> None:
    weights = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
    method = read(
        {
            "quant_method": "modelopt",
            "quant_algo": "NVFP4",
            "config_groups": {"group_0": {"weights": weights, "input_activations": weights, "targets": ["Linear"]}},
            "ignore": ["lm_head"],
            "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
            "producer": {"name": "modelopt", "version": "0.37.0"},
        }
    )
    assert method.scheme(Q_PROJ) == MODELOPT
    assert method.scheme("lm_head") is None


def test_only_the_cache_may_be_quantized() -> None:
    assert modelopt.read(file(quant_algo=None, kv_cache_quant_algo="FP8", exclude_modules=["lm_head"])) is None


@pytest.mark.parametrize(
    ("algo", "scheme"),
    [
        ("FP8", FP8),
        ("fp8_pb_wo", FP8_OF_BLOCKS),
        ("FP8_PER_CHANNEL_PER_TOKEN", FP8_OF_ROWS),
        ("MXFP8", MXFP8),
        ("NVFP4", MODELOPT),
        ("W4A16_NVFP4", W4A16_MODELOPT),
    ],
)
def test_algorithms(algo: str, scheme: Scheme) -> None:
    assert read(file(quant_algo=algo)).scheme(Q_PROJ) == scheme


def test_mixed_precision() -> None:
    layers = {
        Q_PROJ: {"quant_algo": "FP8"},
        "model.layers.0.mlp.experts": {"quant_algo": "NVFP4", "group_size": 16},
    }
    for settings in (
        file(quant_algo="MIXED_PRECISION", quantized_layers=layers),
        {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers},
    ):
        method = read(settings)
        assert method.scheme(Q_PROJ) == FP8
        assert method.scheme(UP_PROJ) == MODELOPT
        assert method.scheme("model.layers.0.self_attn.k_proj") is None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"quant_algo": "W4A16_AWQ"}, "hf_quant_config.json: quant_algo W4A16_AWQ is not supported; supported: FP8, "),
        ({"quant_algo": "W4A8_AWQ"}, "quant_algo W4A8_AWQ"),
        ({"quant_algo": "NVFP4_AWQ"}, "quant_algo NVFP4_AWQ"),
        ({}, "quant_algo None"),
        ({"quant_algo": "NVFP4", "group_size": 32}, "group_size 32 is not supported with NVFP4; supported: 16"),
        ({"quant_algo": "NVFP4", "pre_quant_scale": True}, "pre_quant_scale is not supported"),
        ({"quant_algo": "MIXED_PRECISION"}, "needs quantized_layers"),
        ({"quant_algo": "MIXED_PRECISION", "quantized_layers": {"a": {"quant_algo": "X"}}}, r"layers\.a: quant_algo X"),
    ],
)
def test_what_is_not_supported_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(file(**settings))
