"""Settings of compressed-tensors checkpoints, and the tensors that they imply."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from quire.engine.architecture.quantization.compressed_tensors import (
    CompressedTensors,
    PackedScheme,
    Sparse24Scheme,
    read,
)
from quire.engine.architecture.quantization.method import Scheme
from quire.engine.architecture.quantization.mxfp4 import MxFp4
from quire.engine.architecture.quantization.nvfp4 import NvFp4
from quire.engine.architecture.quantization.unpacked import Unpacked
from quire.engine.protocol.errors import ConfigError

Q, DOWN = "model.layers.0.self_attn.q_proj", "model.layers.0.mlp.down_proj"
INT4 = {
    "num_bits": 4,
    "type": "int",
    "symmetric": True,
    "strategy": "group",
    "group_size": 128,
    "dynamic": False,
    "actorder": None,
    "block_structure": None,
    "observer": "minmax",
    "observer_kwargs": {},
}
INT8 = {**INT4, "num_bits": 8, "strategy": "channel", "group_size": None}
FP8 = {**INT8, "type": "float"}
TOKENS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True, "observer": None}
FLOAT_TOKENS = {**TOKENS, "type": "float"}


def group(weights: Any, *targets: str, **others: Any) -> dict[str, Any]:
    found = {"targets": targets or ["Linear"], "weights": weights, "input_activations": None}
    return {**found, "output_activations": None, **others}


def settings(*groups: dict[str, Any], **others: Any) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "frozen",
        "config_groups": {f"group_{number}": each for number, each in enumerate(groups)},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "global_compression_ratio": 1.5,
        "version": "0.12.2",
        "sparsity_config": {},
        "transform_config": {},
        **others,
    }


def method(*groups: dict[str, Any], **others: Any) -> CompressedTensors:
    found = read(settings(*groups, **others))
    assert found is not None
    return found


def scheme(weights: dict[str, Any], inputs: dict[str, Any] | None = None, **others: Any) -> Scheme:
    found = method(group(weights, input_activations=inputs), **others).scheme(Q)
    assert found is not None
    return found


def test_static_inputs_of_int8_are_rounded_as_stored() -> None:
    static = {**TOKENS, "strategy": "tensor", "dynamic": False}
    tensors = scheme(INT8, static, format="int-quantized").tensors(Q, (300, 256))
    assert not tensors[f"{Q}.input_scale"].is_optional
    assert tensors[f"{Q}.input_zero_point"].is_optional
    for inputs in (TOKENS, {**static, "dynamic": True}):
        assert f"{Q}.input_scale" not in scheme(INT8, inputs, format="int-quantized").tensors(Q, (300, 256))
    assert not scheme(FP8, {**static, "type": "float"}, format="float-quantized").has_rounding


def test_int4_in_words() -> None:
    found = scheme(INT4)
    assert found == PackedScheme(values="int4", rows=1, group=128)
    tensors = found.tensors(Q, (300, 256))
    assert tensors.keys() == {f"{Q}.weight_packed", f"{Q}.weight_scale", f"{Q}.weight_shape"}
    assert tensors[f"{Q}.weight_packed"].shapes == ((300, 32),)
    assert tensors[f"{Q}.weight_packed"].dtypes == ("I32",)
    assert tensors[f"{Q}.weight_scale"].shapes == ((300, 2),)
    assert found.problem((300, 256)) is None
    assert found.problem((300, 200)) == "200 inputs are not whole groups of 128"


def test_zero_points_and_orders_are_tensors_of_their_own() -> None:
    found = scheme({**INT4, "symmetric": False, "actorder": "group"})
    assert found.has_offsets
    assert found.has_order
    tensors = found.tensors(Q, (300, 256))
    assert tensors[f"{Q}.weight_zero_point"].shapes == ((38, 2),)
    assert tensors[f"{Q}.weight_g_idx"].shapes == ((256,),)
    assert tensors[f"{Q}.weight_g_idx"].is_optional
    for order in ("weight", "static", None, False):
        assert not scheme({**INT4, "actorder": order}).has_order


def test_int8_in_words() -> None:
    found = scheme(INT8)
    assert found == PackedScheme(values="int8", rows=1)
    tensors = found.tensors(Q, (300, 255))
    assert tensors[f"{Q}.weight_packed"].shapes == ((300, 64),)
    assert set(tensors[f"{Q}.weight_scale"].shapes) == {(300, 1), (300,)}


@pytest.mark.parametrize("layout", ["int-quantized", "naive-quantized", "mixed-precision"])
def test_int8_in_bytes(layout: str) -> None:
    found = scheme(INT8, TOKENS, format=layout)
    assert found == Unpacked(values="int8", rows=1, activations="int8")
    tensors = found.tensors(Q, (300, 256))
    assert [name for name in tensors if not tensors[name].is_optional] == [f"{Q}.weight", f"{Q}.weight_scale"]
    assert tensors[f"{Q}.weight"].dtypes == ("I8",)
    asymmetric = scheme({**INT8, "symmetric": False}, format="int-quantized").tensors(Q, (300, 256))
    assert "I8" in asymmetric[f"{Q}.weight_zero_point"].dtypes
    assert not asymmetric[f"{Q}.weight_zero_point"].is_optional
    assert asymmetric[f"{Q}.weight_zero_point"].shapes == asymmetric[f"{Q}.weight_scale"].shapes


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        (FP8, Unpacked(values="fp8", rows=1)),
        ({**FP8, "strategy": "tensor"}, Unpacked(values="fp8")),
        ({**FP8, "strategy": None}, Unpacked(values="fp8")),
        ({**FP8, "strategy": "block", "block_structure": [128, 64]}, Unpacked(values="fp8", rows=128, group=64)),
        ({**FP8, "strategy": "block", "block_structure": "128x64"}, Unpacked(values="fp8", rows=128, group=64)),
        ({**FP8, "strategy": None, "group_size": 32}, Unpacked(values="fp8", rows=1, group=32)),
        ({**FP8, "strategy": None, "group_size": -1}, Unpacked(values="fp8", rows=1)),
    ],
)
def test_fp8(weights: dict[str, Any], expected: Unpacked) -> None:
    assert scheme(weights, format="float-quantized") == expected


NVFP4 = {**INT4, "type": "float", "strategy": "tensor_group", "group_size": 16}
MXFP4 = {**INT4, "type": "float", "group_size": 32, "scale_dtype": "torch.uint8", "zp_dtype": "torch.uint8"}


@pytest.mark.parametrize(
    ("weights", "layout", "expected"),
    [(NVFP4, "nvfp4-pack-quantized", NvFp4()), (MXFP4, "mxfp4-pack-quantized", MxFp4())],
)
def test_4_bit_floats(weights: dict[str, Any], layout: str, expected: Scheme) -> None:
    inputs = {**weights, "dynamic": "local", "observer": "static_minmax"}
    with_inputs = replace(expected, activations="fp4") if layout.startswith("nvfp4") else expected
    assert scheme(weights, inputs, format=layout) == with_inputs
    for others in ({**inputs, "dynamic": True}, {**inputs, "group_size": 32}, {**inputs, "type": "int"}, TOKENS):
        assert scheme(weights, others, format=layout) == expected
    assert method(group(weights, format=layout), format="mixed-precision").scheme(Q) == expected
    for changes in ({"group_size": 64}, {"num_bits": 8}, {"type": "int"}, {"symmetric": False}):
        (key,) = changes
        with pytest.raises(ConfigError, match=f"config_groups.group_0.weights: {key} .* is not supported; supported: "):
            scheme({**weights, **changes}, format=layout)
    with pytest.raises(ConfigError, match="sparsity_config with format sparse-24-bitmask is not supported"):
        scheme(weights, format=layout, sparsity_config={"format": "sparse-24-bitmask"})


def test_int4_with_8_bit_inputs() -> None:
    packed: dict[str, Any] = {"values": "int4", "rows": 1, "group": 128}
    assert scheme(INT4, TOKENS, format="pack-quantized") == PackedScheme(**packed, activations="int8")
    assert scheme(INT4, TOKENS, format="int-quantized") == Unpacked(**packed, activations="int8")
    assert scheme(INT4, FLOAT_TOKENS, format="pack-quantized") == PackedScheme(**packed, activations="fp8")


@pytest.mark.parametrize(
    ("inputs", "expected"),
    [
        (None, None),
        (TOKENS, "int8"),
        ({**TOKENS, "symmetric": False}, "int8"),
        ({**TOKENS, "strategy": "tensor", "dynamic": False, "symmetric": False}, "int8"),
        ({**TOKENS, "strategy": "group", "group_size": 128}, None),
        ({**TOKENS, "num_bits": 4}, None),
        (FLOAT_TOKENS, "fp8"),
        ({**FLOAT_TOKENS, "strategy": "group", "group_size": 128}, "fp8"),
    ],
)
def test_inputs_may_be_rounded_where_that_is_no_coarser(inputs: dict[str, Any] | None, expected: str | None) -> None:
    assert scheme(INT8, inputs, format="int-quantized").activations == expected


def test_targets_are_names_then_expressions_then_all() -> None:
    found = method(
        group(INT4),
        group(FP8, "re:.*self_attn.*", format="float-quantized"),
        group(INT8, Q, format="int-quantized"),
        group(None, r"re:.*layers\.1\."),
        format="mixed-precision",
    )
    assert found.scheme(DOWN) == PackedScheme(values="int4", rows=1, group=128)
    assert found.scheme("model.layers.0.self_attn.k_proj") == Unpacked(values="fp8", rows=1)
    assert found.scheme(Q) == Unpacked(values="int8", rows=1)
    assert found.scheme("model.layers.1.mlp.down_proj") is None
    assert found.scheme("lm_head") is None


def test_targets_without_linear_are_exclusive() -> None:
    found = method(group(INT4, Q, "re:.*mlp", "LlamaAttention"))
    assert found.scheme(Q) is not None
    assert found.scheme(DOWN) is not None
    assert found.scheme("model.layers.1.self_attn.q_proj") is None
    assert found.scheme(f"{Q}.other") is None


def test_ignored_modules_are_named_exactly_or_by_expressions() -> None:
    found = method(group(INT4), ignore=["lm_head", "model.layers.0", r"re:.*\.gate$", Q])
    for module in ("lm_head", Q, "model.layers.3.mlp.gate"):
        assert found.scheme(module) is None, module
    for module in (DOWN, "model.layers.3.mlp.gate_proj", "model.lm_head"):
        assert found.scheme(module) is not None, module


def test_settings_of_nothing_quantized() -> None:
    assert read(settings(group(INT8), format="dense")) is None
    assert read(settings(group(None))) is None
    assert read({"quant_method": "compressed-tensors", "sparsity_config": {"format": "dense"}}) is None


def test_the_older_compression_config_is_nested() -> None:
    nested = {"quantization_config": settings(group(INT4)), "sparsity_config": {"format": "dense"}}
    assert read(nested) == method(group(INT4))


def test_a_quantized_cache_and_rounded_outputs_are_hints() -> None:
    hints = {"kv_cache_scheme": {**FP8, "strategy": "tensor"}, "quantization_status": "compressed"}
    assert method(group(INT4, output_activations=TOKENS), **hints) == method(group(INT4))


def test_sparse_weights_are_those_of_the_sparsity_config() -> None:
    sparsity = {
        "format": "sparse-24-bitmask",
        "targets": ["Linear"],
        "ignore": ["re:.*self_attn"],
        "sparsity_structure": "2:4",
        "global_sparsity": 0.5,
        "registry_requires_subclass": False,
    }
    found = method(group(FP8, input_activations=FLOAT_TOKENS), format="float-quantized", sparsity_config=sparsity)
    assert found.scheme(Q) == Unpacked(values="fp8", rows=1, activations="fp8")
    sparse = found.scheme(DOWN)
    assert sparse == Sparse24Scheme(values="fp8", rows=1, activations="fp8")
    tensors = sparse.tensors(DOWN, (300, 252))
    assert tensors.keys() == {f"{DOWN}.compressed", f"{DOWN}.bitmask", f"{DOWN}.weight_scale"}
    assert tensors[f"{DOWN}.compressed"].shapes == ((300, 126),)
    assert tensors[f"{DOWN}.compressed"].dtypes == ("F8_E4M3",)
    assert tensors[f"{DOWN}.bitmask"].shapes == ((300, 32),)
    assert sparse.problem((300, 252)) is None
    assert sparse.problem((300, 254)) == "254 inputs are not whole groups of 4"
    assert "stacks" in str(sparse.problem((4, 300, 252)))


@pytest.mark.parametrize(
    ("refused", "message"),
    [
        ({"transform_config": {"config_groups": {"R1": {"type": "hadamard"}}}}, "transform_config is not supported"),
        ({"format": "marlin-24"}, "in format marlin-24 are not supported; supported: int of 4 or 8 bits"),
        ({"format": "mxfp8-quantized"}, "in format mxfp8-quantized"),
        ({"sparsity_config": {"format": "sparse-bitmask"}}, "sparsity_config with format sparse-bitmask"),
        ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config with format sparse-24-bitmask"),
        ({"moe_sparsity_config": {"method": "novice"}}, "moe_sparsity_config is not supported"),
        ({"ignore": ["re:["]}, r"ignore has an invalid expression, \["),
        ({"ignore": "lm_head"}, "ignore must be a list of modules' names"),
    ],
)
def test_settings_that_are_not_supported_are_refused(refused: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(settings(group(INT4), **refused))


@pytest.mark.parametrize(
    ("weights", "layout", "message"),
    [
        ({**INT4, "type": "complex"}, "pack-quantized", "complex"),
        ({**INT4, "num_bits": 3}, "pack-quantized", "config_groups.group_0: weights of type int with num_bits 3"),
        ({**FP8, "num_bits": 6}, "naive-quantized", "type float with num_bits 6"),
        (FP8, "pack-quantized", "type float with num_bits 8 in format pack-quantized"),
        ({**FP8, "symmetric": False}, "float-quantized", "float and not symmetric"),
        ({**INT8, "dynamic": True}, "int-quantized", "dynamic"),
        ({**INT4, "actorder": "group"}, "int-quantized", "actorder group is not supported in int-quantized"),
        ({**INT4, "strategy": "tensor_group"}, "pack-quantized", "strategy tensor_group with group_size 128"),
        ({**INT4, "group_size": None}, "pack-quantized", "strategy group with group_size None"),
        ({**FP8, "strategy": "block"}, "float-quantized", "strategy block .* block_structure None"),
        ({**INT8, "strategy": "tensor", "symmetric": False}, "pack-quantized", "strategy tensor .* symmetric"),
        ({**INT4, "codebook": "nf4"}, "pack-quantized", "group_0.weights: codebook is not supported, got 'nf4'"),
        (4, "pack-quantized", "group_0.weights must be an object, got 4"),
    ],
)
def test_weights_that_are_not_supported_are_refused(weights: Any, layout: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(settings(group(weights), format=layout))
