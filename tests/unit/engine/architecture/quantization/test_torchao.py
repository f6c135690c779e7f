"""Settings of torchao."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from quire.engine.architecture.quantization.method import Scheme
from quire.engine.architecture.quantization.torchao import QDATA, SCALE, ZERO_POINT, TorchAoInt4, read
from quire.engine.architecture.quantization.unpacked import Unpacked
from quire.engine.protocol.errors import ConfigError

Q_PROJ = "model.layers.0.self_attn.q_proj"
PER_ROW = {"_type": "PerRow", "_version": 1, "_data": {"dim": -1}}
PER_GROUP = {"_type": "PerGroup", "_version": 1, "_data": {"group_size": 32}}


def config(kind: str, version: int = 2, **arguments: Any) -> dict[str, Any]:
    return {"_type": kind, "_version": version, "_data": arguments}


def settings(whole: Any, **more: Any) -> dict[str, Any]:
    return {
        "quant_method": "torchao",
        "quant_type": {"default": whole},
        "quant_type_kwargs": {},
        "include_input_output_embeddings": False,
        "untie_embedding_weights": False,
        "modules_to_not_convert": None,
        **more,
    }


def dtype(name: str) -> dict[str, str]:
    return {"_type": "torch.dtype", "_data": name}


INT4 = config(
    "Int4WeightOnlyConfig",
    group_size=128,
    set_inductor_config=True,
    int4_packing_format={"_type": "Int4PackingFormat", "_data": "PLAIN"},
    int4_choose_qparams_algorithm={"_type": "Int4ChooseQParamsAlgorithm", "_data": "TINYGEMM"},
)
FP8 = Unpacked(values="fp8", activations="fp8", rows=1, weight=QDATA, scale=SCALE, zero_point=ZERO_POINT)


@pytest.mark.parametrize(
    ("whole", "scheme"),
    [
        (INT4, TorchAoInt4(group=128)),
        (
            config(
                "Float8DynamicActivationFloat8WeightConfig",
                activation_dtype=dtype("float8_e4m3fn"),
                weight_dtype=dtype("float8_e4m3fn"),
                granularity=[PER_ROW, PER_ROW],
                kernel_preference={"_type": "KernelPreference", "_data": "AUTO"},
                mm_config={"_type": "Float8MMConfig", "_version": 1, "_data": {"use_fast_accum": True}},
            ),
            FP8,
        ),
        (
            config("Float8WeightOnlyConfig", granularity={"_type": "PerTensor", "_version": 1, "_data": {}}),
            Unpacked(values="fp8", weight=QDATA, scale=SCALE, zero_point=ZERO_POINT),
        ),
        (
            config("Int8WeightOnlyConfig", group_size=None, granularity=PER_GROUP),
            Unpacked(values="int8", rows=1, group=32, weight=QDATA, scale=SCALE, zero_point=ZERO_POINT),
        ),
        (
            config("Int8DynamicActivationInt8WeightConfig", granularity=PER_ROW, weight_only_decode=False),
            Unpacked(values="int8", activations="int8", rows=1, weight=QDATA, scale=SCALE, zero_point=ZERO_POINT),
        ),
        (
            config(
                "Int8DynamicActivationIntxWeightConfig",
                weight_dtype=dtype("int4"),
                weight_granularity=PER_GROUP,
                weight_mapping_type={"_type": "MappingType", "_data": "ASYMMETRIC"},
                intx_packing_format={"_type": "IntxPackingFormat", "_data": "UNPACKED_TO_INT8"},
            ),
            Unpacked(
                values="int4",
                activations="int8",
                rows=1,
                group=32,
                has_offsets=True,
                weight=QDATA,
                scale=SCALE,
                zero_point=ZERO_POINT,
            ),
        ),
        (
            config(
                "IntxWeightOnlyConfig",
                weight_dtype=dtype("int8"),
                granularity={"_type": "PerAxis", "_version": 1, "_data": {"axis": 0}},
            ),
            Unpacked(values="int8", rows=1, weight=QDATA, scale=SCALE, zero_point=ZERO_POINT),
        ),
    ],
)
def test_configurations(whole: dict[str, Any], scheme: Scheme) -> None:
    method = read(settings(whole))
    assert method.scheme(Q_PROJ) == scheme
    assert pickle.loads(pickle.dumps(method)) == method
    assert f"{Q_PROJ}._weight_qdata" in scheme.tensors(Q_PROJ, (256, 256))


def test_configurations_by_name() -> None:
    fp8 = config("Float8DynamicActivationFloat8WeightConfig", granularity=[PER_ROW, PER_ROW])
    by_name = {r"re:model\.layers\..*\.q_proj": fp8, "model.layers.1.self_attn.q_proj": None, "_default": INT4}
    method = read(settings(config("FqnToConfig", 1, fqn_to_config=by_name), modules_to_not_convert=["lm_head"]))
    assert method.scheme(Q_PROJ) == FP8
    assert method.scheme("model.layers.1.self_attn.q_proj") is None
    assert method.scheme("model.layers.1.mlp.up_proj") == TorchAoInt4(group=128)
    assert method.scheme("lm_head") is None


@pytest.mark.parametrize(
    ("whole", "message"),
    [
        ({**INT4, "_version": 1}, "Int4WeightOnlyConfig of version 1 is not supported; supported: 2"),
        (config("Int4WeightOnlyConfig", int4_packing_format="tile_packed_to_4d"), "int4_packing_format tile_packed"),
        (config("Int4WeightOnlyConfig", group_size=48), "group_size 48 is not supported"),
        (config("UIntXWeightOnlyConfig"), "UIntXWeightOnlyConfig is not supported; supported: Int4WeightOnlyConfig"),
        (config("IntxWeightOnlyConfig", weight_dtype=dtype("int3")), "weight_dtype int3 is not supported"),
        (config("Float8WeightOnlyConfig", weight_dtype=dtype("float8_e5m2")), "weight_dtype float8_e5m2"),
        (config("Int8WeightOnlyConfig", granularity={"_type": "PerToken", "_data": {}}), "granularity PerToken"),
        (config("Int8WeightOnlyConfig", rotated=True), "Int8WeightOnlyConfig: rotated is not supported"),
        ("int8_weight_only", "must be a configuration of torchao"),
    ],
)
def test_what_is_not_supported_is_refused(whole: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(settings(whole))


def test_names_of_old_versions_are_refused() -> None:
    with pytest.raises(ConfigError, match="'int4_weight_only' is not supported; save the model with torchao"):
        read({"quant_method": "torchao", "quant_type": "int4_weight_only"})
