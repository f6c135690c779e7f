"""GPTQ: explicit and missing settings."""

from __future__ import annotations

from typing import Any

import pytest

from quire.engine.architecture.quantization.gptq import GptqScheme, read
from quire.engine.protocol.errors import ConfigError

Q_PROJ = "model.layers.3.self_attn.q_proj"
SETTINGS: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}


def scheme(settings: dict[str, Any], module: str = Q_PROJ) -> GptqScheme:
    found = read(settings).scheme(module)
    assert found is not None
    return found


def refusal(settings: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as refused:
        read(settings)
    return str(refused.value)


@pytest.mark.parametrize(
    ("bits", "sym", "values"),
    [(2, True, "int4"), (3, False, "uint4"), (4, True, "int4"), (4, False, "uint4"), (8, True, "int8")],
)
def test_values_follow_from_bits_and_symmetry(bits: int, sym: bool, values: str) -> None:
    found = scheme({**SETTINGS, "bits": bits, "sym": sym})
    assert (found.values, found.width, found.has_offsets, found.group) == (values, bits, not sym, 128)


def test_act_order_needs_groups() -> None:
    assert scheme({**SETTINGS, "desc_act": True}).has_order
    assert not scheme(SETTINGS).has_order
    of_all = scheme({**SETTINGS, "desc_act": True, "group_size": -1})
    assert (of_all.has_order, of_all.group) == (False, 0)


def test_layouts_differ_in_zero_points() -> None:
    assert scheme(SETTINGS).minus_one
    assert scheme({**SETTINGS, "checkpoint_format": "gptq"}).minus_one
    assert not scheme({**SETTINGS, "checkpoint_format": "gptq_v2"}).minus_one
    assert not scheme({**SETTINGS, "format": "gptq_v2"}).minus_one


def test_shapes_of_tensors() -> None:
    tensors = scheme({**SETTINGS, "bits": 3, "sym": False}).tensors("q", (512, 1024))
    assert {name: stored.shapes for name, stored in tensors.items()} == {
        "q.qweight": ((96, 512),),
        "q.qzeros": ((8, 48),),
        "q.scales": ((8, 512),),
        "q.g_idx": ((1024,),),
    }
    assert [name for name, stored in tensors.items() if stored.is_optional] == ["q.g_idx"]
    assert scheme({**SETTINGS, "group_size": -1}).tensors("q", (512, 1024))["q.scales"].shapes == ((1, 512),)


def test_only_what_settings_make_redundant_is_optional() -> None:
    tensors = scheme({**SETTINGS, "desc_act": True}).tensors("q", (512, 1024))
    assert [name for name, stored in tensors.items() if stored.is_optional] == ["q.qzeros"]


@pytest.mark.parametrize(
    ("bits", "shape", "problem"),
    [
        (4, (64, 192), "192 inputs are not whole groups of 128"),
        (4, (60, 256), "60 x 256 codes of 4 bits are not whole words"),
        (3, (48, 256), "48 x 256 codes of 3 bits are not whole words"),
        (4, (8, 64, 256), "stacks of experts"),
    ],
)
def test_shapes_that_do_not_fit(bits: int, shape: tuple[int, ...], problem: str) -> None:
    assert problem in str(scheme({**SETTINGS, "bits": bits}).problem(shape))


def test_shapes_that_fit() -> None:
    assert scheme(SETTINGS).problem((64, 256)) is None
    assert scheme({**SETTINGS, "group_size": -1}).problem((64, 200)) is None


def test_what_publishers_add_is_accepted() -> None:
    autogptq = {
        "damp_percent": 0.1,
        "static_groups": False,
        "true_sequential": True,
        "is_marlin_format": False,
        "model_name_or_path": None,
        "model_file_base_name": "model",
        "use_exllama": True,
        "dataset": None,
    }
    gptqmodel = {
        "method": "gptq",
        "format": "gptq",
        "checkpoint_format": "gptq",
        "pack_dtype": "int32",
        "lm_head": False,
        "meta": {"quantizer": ["gptqmodel:5.0.0"], "static_groups": False, "act_group_aware": True},
    }
    auto_round = {"autoround_version": "0.9.0", "iters": 1000, "provider": "auto-round", "low_gpu_mem_usage": True}
    plain = read(SETTINGS)
    assert [read({**SETTINGS, **each}) for each in (autogptq, gptqmodel, auto_round)] == [plain] * 3


def test_quantize_config_json() -> None:
    found = read({"bits": 4, "group_size": 32, "desc_act": True})
    assert found.name == "gptq"
    assert found.scheme(Q_PROJ) == scheme({**SETTINGS, "group_size": 32, "desc_act": True})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bits": 5}, "quantization_config: bits 5 is not supported; supported: 2, 3, 4, 8."),
        ({"bits": None}, "bits is missing; supported: 2, 3, 4, 8"),
        ({"group_size": 100}, "group_size 100 is not supported; supported: -1, 16, 32, 64"),
        ({"checkpoint_format": "marlin"}, "checkpoint_format marlin is not supported; supported: gptq, gptq_v2"),
        ({"checkpoint_format": "gptq_p"}, "checkpoint_format gptq_p is not supported"),
        ({"is_marlin_format": True}, "is_marlin_format True is not supported"),
        ({"pack_dtype": "int64"}, "pack_dtype int64 is not supported"),
        ({"rotation": "hadamard"}, "rotation hadamard is not supported; use a checkpoint that was made without it"),
        ({"sym": "maybe"}, "sym maybe is not supported"),
        ({"dynamic": {"+:.*q_proj": {"bits": 6}}}, "dynamic '+:.*q_proj': bits 6 is not supported"),
        ({"dynamic": {"-:(": {}}}, "dynamic '-:(' has an invalid expression, (: "),
        ({"dynamic": {"q_proj": 8}}, "dynamic 'q_proj': must be an object with settings, or false, got 8"),
    ],
)
def test_refusals(changes: dict[str, Any], message: str) -> None:
    assert message in refusal({**SETTINGS, **changes})


def test_dynamic() -> None:
    method = read(
        {
            **SETTINGS,
            "dynamic": {
                r"-:.*\.layers\.0\.": {},
                r"+:.*\.(gate|up)_proj": {"bits": 8, "group_size": 32},
                r".*\.up_proj": {"bits": 2},
                r".*\.k_proj": False,
                r"o_proj": {"bits": 2},
                r".*\.v_proj": {},
            },
        }
    )
    default = method.scheme("model.layers.1.mlp.down_proj")
    assert default == scheme(SETTINGS)
    up = method.scheme("model.layers.1.mlp.up_proj")
    assert up is not None
    assert (up.width, up.group, up.values) == (8, 32, "int8"), "the first rule applies"
    assert method.scheme("model.layers.0.mlp.up_proj") is None
    assert method.scheme("model.layers.1.self_attn.k_proj") is None
    assert method.scheme("model.layers.1.self_attn.o_proj") == default, "rules match from the start"
    assert method.scheme("model.layers.1.self_attn.v_proj") == default, "settings that change nothing"


def test_lm_head() -> None:
    assert read(SETTINGS).scheme("lm_head") is None
    assert read({**SETTINGS, "lm_head": False}).scheme("language_model.lm_head") is None
    method = read({**SETTINGS, "lm_head": True, "dynamic": {"+:lm_head": {"bits": 8}}})
    assert getattr(method.scheme("lm_head"), "width", None) == 8
    inside = {"lm_head": True, "modules_in_block_to_quantize": [["mlp.up_proj"]]}
    assert read({**SETTINGS, **inside}).scheme("lm_head") == scheme(SETTINGS)


@pytest.mark.parametrize("names", [[["self_attn.q_proj"], ["mlp.up_proj"]], ["self_attn.q_proj", "mlp.up_proj"]])
def test_modules_in_block(names: list[Any]) -> None:
    method = read({**SETTINGS, "modules_in_block_to_quantize": names})
    assert method.scheme(Q_PROJ) == method.scheme("model.layers.3.mlp.up_proj") == scheme(SETTINGS)
    assert method.scheme("model.layers.3.self_attn.o_proj") is None
    assert method.scheme("model.layers.3.shared_mlp.up_proj") is None, "names are whole"
