"""AWQ: explicit and missing settings."""

from __future__ import annotations

from typing import Any

import pytest

from quire.engine.architecture.quantization.awq import AwqScheme, read
from quire.engine.protocol.errors import ConfigError

Q_PROJ = "model.layers.3.self_attn.q_proj"
SETTINGS: dict[str, Any] = {
    "quant_method": "awq",
    "bits": 4,
    "group_size": 128,
    "zero_point": True,
    "version": "gemm",
    "modules_to_not_convert": None,
}


def scheme(settings: dict[str, Any]) -> AwqScheme:
    found = read(settings).scheme(Q_PROJ)
    assert found is not None
    return found


def test_zero_points_are_offsets() -> None:
    assert scheme(SETTINGS) == AwqScheme(values="uint4", group=128, has_offsets=True)
    assert scheme({**SETTINGS, "zero_point": False}) == AwqScheme(values="int4", group=128)
    assert scheme({"bits": 4, "group_size": -1}) == AwqScheme(values="uint4", has_offsets=True)


def test_shapes_of_tensors() -> None:
    tensors = scheme(SETTINGS).tensors("q", (512, 1024))
    assert {name: stored.shapes for name, stored in tensors.items()} == {
        "q.qweight": ((1024, 64),),
        "q.qzeros": ((8, 64),),
        "q.scales": ((8, 512),),
    }
    assert not any(stored.is_optional for stored in tensors.values())
    assert scheme({**SETTINGS, "zero_point": False}).tensors("q", (512, 1024))["q.qzeros"].is_optional
    assert scheme({**SETTINGS, "group_size": -1}).tensors("q", (512, 1000))["q.scales"].shapes == ((1, 512),)


@pytest.mark.parametrize(
    ("shape", "problem"),
    [
        ((512, 1024), "None"),
        ((512, 1000), "1000 inputs are not whole groups of 128"),
        ((500, 1024), "500 outputs are not whole words of 8 codes"),
        ((4, 512, 1024), "stacks of experts"),
    ],
)
def test_shapes_that_do_not_fit(shape: tuple[int, ...], problem: str) -> None:
    assert problem in str(scheme(SETTINGS).problem(shape))


def test_modules_to_not_convert_are_parts_of_names() -> None:
    method = read({**SETTINGS, "modules_to_not_convert": ["visual", "mlp.gate", "layers.0."]})
    assert method.scheme("visual.blocks.1.attn.qkv") is None
    assert method.scheme("model.layers.1.mlp.gate") is None
    assert method.scheme("model.layers.1.mlp.gate_proj") == scheme(SETTINGS)
    assert method.scheme("model.layers.0.mlp.up_proj") is None
    assert method.scheme("model.layers.10.mlp.up_proj") == scheme(SETTINGS)


def test_dynamic() -> None:
    method = read({**SETTINGS, "dynamic": {r"-:.*k_proj": {}, r"+:.*down_proj": {"group_size": 32}}})
    assert method.scheme("model.layers.1.self_attn.k_proj") is None
    assert method.scheme("model.layers.1.mlp.down_proj") == AwqScheme(values="uint4", group=32, has_offsets=True)
    assert method.scheme(Q_PROJ) == scheme(SETTINGS)


def test_what_publishers_add_is_accepted() -> None:
    plain = read(SETTINGS)
    transformers = {
        "backend": "autoawq",
        "do_fuse": False,
        "exllama_config": None,
        "fuse_max_seq_len": None,
        "modules_to_fuse": None,
        "desc_act": False,
        "sym": True,
        "version": "GEMM",
    }
    gptqmodel = {"checkpoint_format": "gemm", "format": "gemm", "pack_dtype": "int32", "meta": {"n": 1}}
    assert [read({**SETTINGS, **each}) for each in (transformers, gptqmodel)] == [plain] * 2


def test_quant_config_json() -> None:
    assert read({"w_bit": 4, "q_group_size": 64, "zero_point": True, "version": "GEMM"}) == read(
        {**SETTINGS, "group_size": 64}
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bits": 8}, "quantization_config: bits 8 is not supported; supported: 4."),
        ({"group_size": 16}, "group_size 16 is not supported; supported: -1, 32, 64, 128"),
        ({"group_size": None}, "group_size is missing"),
        ({"version": "gemv"}, "version gemv is not supported; supported: gemm"),
        ({"version": None, "checkpoint_format": "marlin"}, "version marlin is not supported"),
        ({"backend": "llm-awq"}, "backend llm-awq is not supported"),
        ({"zero_point": "some"}, "zero_point some is not supported"),
        ({"dynamic": {"q": {"bits": 8}}}, "dynamic 'q': bits 8 is not supported"),
        ({"rotation": "hadamard"}, "rotation hadamard is not supported"),
    ],
)
def test_refusals(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read({**SETTINGS, **changes})
    assert message in str(refused.value)
