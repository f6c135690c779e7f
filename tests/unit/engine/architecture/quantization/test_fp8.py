"""Settings of FP8 checkpoints, and the tensors that they imply."""

from __future__ import annotations

from typing import Any

import pytest

from quire.engine.architecture.quantization.fp8 import read, read_fbgemm
from quire.engine.architecture.quantization.method import Stored
from quire.engine.architecture.quantization.unpacked import Unpacked
from quire.engine.protocol.errors import ConfigError

Q = "model.layers.0.self_attn.q_proj"
EXPERTS = "model.layers.0.mlp.experts.gate_up_proj"
DEEPSEEK = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
    "scale_fmt": "ue8m0",
}


def settings(**others: Any) -> dict[str, Any]:
    return {"quant_method": "fp8", **others}


def shapes(stored: Stored) -> set[tuple[int, ...]]:
    return set(stored.shapes)


def test_blocks_have_a_scale_each_also_the_last_ones() -> None:
    scheme = read(DEEPSEEK).scheme(Q)
    assert scheme == Unpacked(
        values="fp8", rows=128, group=128, scale=".weight_scale_inv", other_scale=".scale", activations="fp8"
    )
    tensors = scheme.tensors(Q, (300, 130))
    assert tensors.keys() == {f"{Q}.weight", f"{Q}.weight_scale_inv"}
    assert tensors[f"{Q}.weight"] == Stored(("F8_E4M3",), ((300, 130),))
    scale = tensors[f"{Q}.weight_scale_inv"]
    assert shapes(scale) == {(3, 2), (3, 1, 2, 1)}
    assert {"F32", "BF16", "F8_E8M0"} <= set(scale.dtypes)
    assert not scale.is_optional
    assert scheme.problem((300, 130)) is None
    assert scheme.values == "fp8"
    assert scheme.bits == 8


def test_a_stack_of_experts_has_blocks_in_both_orders() -> None:
    scheme = read(DEEPSEEK).scheme(EXPERTS)
    assert scheme is not None
    tensors = scheme.tensors(EXPERTS, (4, 300, 130))
    weight, scale = tensors[f"{EXPERTS}.weight"], tensors[f"{EXPERTS}.weight_scale_inv"]
    assert shapes(weight) == {(4, 300, 130), (4, 130, 300)}
    assert shapes(scale) == {(4, 3, 2), (4, 2, 3), (4, 3, 1, 2, 1)}
    assert weight.other_names == (EXPERTS,)
    assert f"{EXPERTS}_scale_inv" in scale.other_names
    assert scheme.problem((4, 300, 130)) is None
    assert "square" in str(scheme.problem((4, 300, 300)))


@pytest.mark.parametrize("block", [{}, {"weight_block_size": None}])
@pytest.mark.parametrize("activations", ["static", "dynamic"])
def test_without_blocks_a_weight_has_one_scale_with_one_of_two_names(block: dict[str, Any], activations: str) -> None:
    scheme = read(settings(activation_scheme=activations, **block)).scheme(Q)
    assert scheme is not None
    tensors = scheme.tensors(Q, (300, 130))
    assert tensors.keys() == {f"{Q}.weight", f"{Q}.weight_scale"}
    scale = tensors[f"{Q}.weight_scale"]
    assert not scale.is_optional
    assert scale.other_names == (f"{Q}.weight_scale_inv",)
    assert {(), (1,), (1, 1)} <= shapes(scale)
    stack = scheme.tensors(EXPERTS, (4, 300, 130))[f"{EXPERTS}.weight_scale"]
    assert {(4, 1, 1), (4, 1), (4,), (1,), ()} <= shapes(stack)
    assert set(stack.other_names) == {f"{EXPERTS}.weight_scale_inv", f"{EXPERTS}_scale", f"{EXPERTS}_scale_inv"}


def test_fbgemm_has_a_scale_for_each_row() -> None:
    method = read_fbgemm({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": None})
    assert method.name == "fbgemm_fp8"
    scheme = method.scheme(Q)
    assert scheme is not None
    tensors = scheme.tensors(Q, (300, 130))
    assert tensors.keys() == {f"{Q}.weight", f"{Q}.weight_scale"}
    assert {(300, 1), (300,)} <= shapes(tensors[f"{Q}.weight_scale"])
    stack = scheme.tensors(EXPERTS, (4, 300, 130))[f"{EXPERTS}.weight_scale"]
    assert {(4, 300, 1), (4, 1, 300), (4, 300)} <= shapes(stack)


@pytest.mark.parametrize("key", ["modules_to_not_convert", "ignored_layers"])
def test_modules_are_skipped_by_the_start_or_end_of_names(key: str) -> None:
    names = ["lm_head", "model.layers.1", "mlp.gate", r"re:model\.vision.*\.fc\d"]
    method = read(settings(weight_block_size=[128, 128], **{key: names}))
    for module in ("lm_head", "model.layers.1.mlp.up_proj", "model.layers.7.mlp.gate", "model.vision.blocks.3.fc2"):
        assert method.scheme(module) is None, module
    for module in ("model.layers.11.mlp.up_proj", "model.layers.7.mlp.gate_proj", "model.vision.blocks.3.proj"):
        assert method.scheme(module) is not None, module


def test_real_settings_are_accepted() -> None:
    qwen = {**DEEPSEEK, "weight_per_tensor": False, "act_per_tensor": False}
    ministral = settings(activation_scheme="static", dequantize=False, weight_block_size=None, kv_cache_scheme=None)
    minimax = settings(fmt="float8_e4m3fn", weight_block_size=[128, 128], ignored_layers=["gate"], expert_dtype="fp8")
    for each in (qwen, ministral, minimax):
        assert read(each).scheme(Q) is not None


@pytest.mark.parametrize(
    ("refused", "message"),
    [
        ({"fmt": "e5m2"}, "fmt e5m2 is not supported; supported: e4m3"),
        ({"activation_scheme": "block"}, "activation_scheme block.*supported: dynamic, static"),
        ({"expert_dtype": "fp4"}, "expert_dtype fp4"),
        ({"modules_to_convert": ["embed_tokens"]}, "modules_to_convert"),
        ({"weight_block_size": [128]}, r"weight_block_size must be two positive numbers or null, got \[128\]"),
        ({"weight_block_size": [0, 128]}, "weight_block_size must be"),
        ({"weight_block_size": 128}, "weight_block_size must be"),
        ({"ignored_layers": ["re:("]}, r"ignored_layers has an invalid expression, \("),
        ({"ignored_layers": [3]}, "ignored_layers must be a list of modules' names"),
    ],
)
def test_what_would_change_answers_is_refused(refused: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(settings(**refused))


def test_experts_of_deepseek_v4_are_in_mxfp4() -> None:
    method = read({**DEEPSEEK, "expert_dtype": "fp4"})
    scheme = method.scheme("layers.0.ffn.experts.3.w1")
    assert scheme is not None
    tensors = scheme.tensors("layers.0.ffn.experts.3.w1", (96, 64))
    weight, scale = tensors.values()
    assert weight.dtypes == ("U8", "I8")
    assert (96, 32) in weight.shapes
    assert shapes(scale) == {(96, 2)}
    assert "layers.0.ffn.experts.3.w1.scale" in scale.other_names
    assert isinstance(method.scheme("layers.0.ffn.shared_experts.w1"), Unpacked)
    with pytest.raises(ConfigError, match="expert_dtype fp4 is supported with a weight_block_size only"):
        read(settings(expert_dtype="fp4"))
    with pytest.raises(ConfigError, match="expert_dtype int4 is not supported"):
        read(settings(expert_dtype="int4"))
