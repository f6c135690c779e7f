"""The storage of a weight in GGUF, by the settings that are derived from the file."""

from __future__ import annotations

import pickle

import pytest

from quire.engine.architecture.quantization.gguf import SCHEMES, GgufMethod, read
from quire.engine.architecture.quantization.method import Stored
from quire.engine.protocol.errors import ConfigError

LAYER = "model.layers.0"
SETTINGS = {
    "quant_method": "gguf",
    "types": {f"{LAYER}.self_attn.q_proj": "Q4_K", f"{LAYER}.mlp.experts.down_proj": "Q6_K", "lm_head": "Q8_0"},
}


def test_each_module_has_the_type_of_its_tensor() -> None:
    method = read(SETTINGS)
    assert method.name == "gguf"
    assert method.scheme(f"{LAYER}.self_attn.q_proj") is SCHEMES["Q4_K"]
    assert method.scheme("lm_head") is SCHEMES["Q8_0"]
    assert method.scheme(f"{LAYER}.mlp.gate") is None


def test_experts_of_a_layer_share_an_entry() -> None:
    method = read(SETTINGS)
    assert method.scheme(f"{LAYER}.mlp.experts.0.down_proj") is SCHEMES["Q6_K"]
    assert method.scheme(f"{LAYER}.mlp.experts.127.down_proj") is SCHEMES["Q6_K"]
    assert method.scheme(f"{LAYER}.mlp.experts.0.up_proj") is None


def test_the_method_goes_to_ranks() -> None:
    assert pickle.loads(pickle.dumps(read(SETTINGS))) == read(SETTINGS) != GgufMethod(types={})


def test_a_weight_is_one_tensor_of_blocks() -> None:
    scheme = SCHEMES["Q4_K"]
    assert scheme.tensors("lm_head", (64, 512)) == {"lm_head.weight": Stored(("Q4_K",), ((64, 512),))}
    assert (scheme.bits, scheme.group, scheme.has_offsets) == (4, 32, True)
    assert (SCHEMES["Q6_K"].bits, SCHEMES["Q6_K"].group) == (8, 16)
    assert scheme.problem((64, 512)) is None
    assert scheme.problem((64, 288)) == "288 inputs are not whole blocks of 256"
    assert SCHEMES["Q8_0"].problem((64, 288)) is None


@pytest.mark.parametrize("types", [None, ["lm_head"], {"lm_head": 4}])
def test_types_are_needed(types: object) -> None:
    with pytest.raises(ConfigError, match="gguf needs types"):
        read({"quant_method": "gguf", "types": types})


def test_other_types_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"type IQ2_XXS is not supported; supported: Q4_0, .*MXFP4"):
        read({"quant_method": "gguf", "types": {"lm_head": "IQ2_XXS"}})
