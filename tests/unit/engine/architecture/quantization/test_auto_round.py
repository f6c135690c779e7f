"""AutoRound: the layout of GPTQ or AWQ, and the effects of settings of modules."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from quire.engine.architecture.quantization import read
from quire.engine.architecture.quantization.awq import AwqScheme
from quire.engine.architecture.quantization.gptq import GptqScheme
from quire.engine.protocol.errors import ConfigError

Q_PROJ = "model.layers.3.self_attn.q_proj"
SETTINGS: dict[str, Any] = {
    "quant_method": "auto-round",
    "autoround_version": "0.8.0",
    "bits": 4,
    "group_size": 128,
    "sym": True,
    "data_type": "int",
    "iters": 200,
    "packing_format": "auto_round:auto_gptq",
}


def scheme(module: str = Q_PROJ, **changes: Any) -> Any:
    method = read(SETTINGS | changes)
    assert method is not None
    return pickle.loads(pickle.dumps(method)).scheme(module)


def test_layouts_are_those_of_gptq_and_awq() -> None:
    found = scheme(bits=2, sym=False)
    assert isinstance(found, GptqScheme)
    assert (found.width, found.group, found.has_offsets) == (2, 128, True)
    assert found.minus_one
    assert not found.has_order
    assert not scheme(packing_format="auto_round", sym=False).minus_one
    for sym in (True, False):
        awq = scheme(packing_format="auto_round:auto_awq", sym=sym)
        assert isinstance(awq, AwqScheme)
        assert (awq.values, awq.has_offsets) == (("int4", False) if sym else ("uint4", True))
    assert scheme(act_bits=16, act_data_type="int") == scheme()
    assert scheme(quant_method="intel/auto-round") == scheme(packing_format=None)


def test_modules_may_have_settings_of_their_own() -> None:
    extra = {Q_PROJ: {"bits": 8}, r".*\.o_proj": {"group_size": 32}, "lm_head": {"bits": 16, "data_type": "float"}}
    assert scheme(extra_config=extra).width == 8
    assert scheme("model.layers.3.self_attn.k_proj", extra_config=extra).width == 4
    assert scheme("model.layers.3.self_attn.o_proj", extra_config=extra).group == 32
    assert scheme("lm_head", extra_config=extra) is None
    assert scheme("lm_head", extra_config={"lm_head": {"bits": 4}}).width == 4


@pytest.mark.parametrize("blocks", ["model.layers,model.other", ["model.layers"], [["model.layers.3"]]])
def test_only_the_named_blocks_are_quantized(blocks: Any) -> None:
    assert scheme("lm_head") is None
    assert scheme("visual.blocks.0.proj", block_name_to_quantize=blocks) is None
    assert scheme(block_name_to_quantize=blocks).width == 4


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"packing_format": "auto_round:llm_compressor"}, "packing_format auto_round:llm_compressor is not supported"),
        ({"data_type": "mx_fp"}, "data_type mx_fp is not supported; supported: int"),
        ({"act_bits": 8}, "act_bits 8 is not supported"),
        ({"bits": 5}, "bits 5 is not supported"),
        ({"packing_format": "auto_round:auto_awq", "bits": 8}, "bits 8 is not supported; supported: 4"),
        ({"extra_config": {Q_PROJ: {"bits": 3, "group_size": 7}}}, f"extra_config '{Q_PROJ}': group_size 7"),
        ({"extra_config": {"*": {"bits": 3}}}, r"extra_config '\*' has an invalid expression"),
        ({"extra_config": {Q_PROJ: 8}}, "extra_config must be an object"),
    ],
)
def test_others_are_refused_by_name(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        read(SETTINGS | changes)
