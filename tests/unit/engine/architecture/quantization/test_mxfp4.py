"""Settings of MXFP4 as gpt-oss has it, and its tensors."""

from __future__ import annotations

import pickle

import pytest

from quire.engine.architecture.quantization.method import Stored
from quire.engine.architecture.quantization.mxfp4 import GPT_OSS, MxFp4, read
from quire.engine.protocol.errors import ConfigError

SETTINGS = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        *("model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head")
    ],
}


def test_only_experts_are_quantized() -> None:
    method = read(SETTINGS)
    assert method.scheme("model.layers.0.mlp.experts.gate_up_proj") == GPT_OSS
    assert method.scheme("model.layers.0.self_attn.q_proj") is None
    assert method.scheme("model.layers.0.mlp.router") is None
    assert method.scheme("lm_head") is None
    assert pickle.loads(pickle.dumps(method)) == method


def test_experts_of_a_layer_may_be_skipped() -> None:
    method = read({**SETTINGS, "modules_to_not_convert": ["model.layers.0.mlp.experts"]})
    assert method.scheme("model.layers.0.mlp.experts.down_proj") is None
    assert method.scheme("model.layers.1.mlp.experts.down_proj") == GPT_OSS


def test_tensors() -> None:
    assert GPT_OSS.tensors("experts.down_proj", (32, 2880, 2880)) == {
        "experts.down_proj_blocks": Stored(("U8", "I8"), ((32, 2880, 1440), (32, 2880, 90, 16))),
        "experts.down_proj_scales": Stored(("U8", "F8_E8M0"), ((32, 2880, 90),)),
    }
    assert list(MxFp4().tensors("up_proj", (64, 64))) == ["up_proj.weight_packed", "up_proj.weight_scale"]
    assert GPT_OSS.problem((4, 32, 48)) == "48 inputs are not whole groups of 32"


def test_what_is_not_known_is_refused() -> None:
    with pytest.raises(ConfigError, match="group_size is not supported, got 16"):
        read({**SETTINGS, "group_size": 16})
