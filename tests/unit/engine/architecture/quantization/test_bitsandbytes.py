"""Settings of bitsandbytes."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from quire.engine.architecture.quantization.bitsandbytes import BitsAndBytes4, BitsAndBytes8, read
from quire.engine.architecture.quantization.method import Stored
from quire.engine.protocol.errors import ConfigError

SETTINGS = {
    "_load_in_4bit": True,
    "_load_in_8bit": False,
    "bnb_4bit_compute_dtype": "bfloat16",
    "bnb_4bit_quant_storage": "uint8",
    "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_use_double_quant": True,
    "llm_int8_enable_fp32_cpu_offload": False,
    "llm_int8_has_fp16_weight": False,
    "llm_int8_skip_modules": ["lm_head", "model.layers.3.mlp"],
    "llm_int8_threshold": 6.0,
    "load_in_4bit": True,
    "load_in_8bit": False,
    "quant_method": "bitsandbytes",
}
Q_PROJ = "model.layers.0.self_attn.q_proj"


def test_four_bits() -> None:
    method = read(SETTINGS)
    scheme = BitsAndBytes4(values="nf4", is_nested=True)
    assert method.scheme(Q_PROJ) == scheme
    assert method.scheme("lm_head") is None
    assert method.scheme("model.layers.3.mlp.up_proj") is None
    assert pickle.loads(pickle.dumps(method)) == method
    assert scheme.tensors("q", (100, 256)) == {
        "q.weight": Stored(("U8", "I8"), ((12800, 1), (1, 12800))),
        "q.weight.absmax": Stored(("U8",), ((400,),)),
        "q.weight.quant_map": Stored(("F32",), ((16,),)),
        "q.weight.quant_state.bitsandbytes__nf4": Stored(("U8",), ()),
        "q.weight.nested_absmax": Stored(("F32",), ((2,),)),
        "q.weight.nested_quant_map": Stored(("F32",), ((256,),)),
    }


def test_codes_may_be_stored_as_another_data_type() -> None:
    method = read({**SETTINGS, "bnb_4bit_quant_storage": "bfloat16", "bnb_4bit_use_double_quant": False})
    scheme = method.scheme(Q_PROJ)
    assert scheme == BitsAndBytes4(values="nf4", item=2)
    assert scheme.tensors("q", (4, 64))["q.weight"] == Stored(("BF16", "F16"), ((64, 1), (1, 64)))


def test_blocks_may_be_of_two_rows() -> None:
    scheme = BitsAndBytes4(values="nf4")
    assert scheme.problem((64, 96)) is None
    assert scheme.tensors("q", (3, 98))["q.weight.absmax"] == Stored(("F32",), ((5,),))
    assert scheme.problem((64, 97)) == "97 inputs are not pairs"
    assert scheme.problem((2, 64, 64)) == "stacks of weights are not supported"
    assert scheme.problem((3, 64)) is None


def test_eight_bits() -> None:
    method = read({**SETTINGS, "load_in_4bit": False, "load_in_8bit": True})
    assert method.scheme(Q_PROJ) == BitsAndBytes8()
    tensors = BitsAndBytes8().tensors("q", (4, 6))
    assert tensors["q.weight"] == Stored(("I8",), ((4, 6),))
    assert (4,) in tensors["q.SCB"].shapes
    assert tensors["q.weight_format"].is_optional


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"load_in_4bit": False}, "needs load_in_4bit or load_in_8bit"),
        ({"bnb_4bit_quant_type": "nf3"}, "bnb_4bit_quant_type nf3 is not supported; supported: nf4, fp4"),
        ({"bnb_4bit_quant_storage": "float64"}, "bnb_4bit_quant_storage float64 is not supported"),
        ({"llm_int8_has_fp16_weight": True}, "llm_int8_has_fp16_weight is not supported"),
        ({"blocksize": 128}, "blocksize is not supported"),
    ],
)
def test_what_is_not_supported_is_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read({**SETTINGS, **changed})
