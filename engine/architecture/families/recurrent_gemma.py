"""RecurrentGemma: layers with a real-gated linear recurrent unit, and some with attention in a window (Griffin)."""

from __future__ import annotations

import struct
from itertools import cycle, islice
from typing import Any

from quire.engine.architecture.families.family import (
    Config,
    Family,
    activation,
    architecture,
    attention,
    feed_forward,
    head_dim,
    layers_by_kind,
    require,
    rms_norm,
    rope,
)
from quire.engine.architecture.model_spec import ModelSpec
from quire.engine.architecture.recurrent_spec import RGLRUSpec


def _recurrent_gemma(name: str, config: Config) -> ModelSpec:
    """Half of a head is rotated. The factor on embeddings is a number in bfloat16, whatever the model's type."""
    require(config, "embeddings_scale_by_sqrt_dim", True)
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    require({"rope_type": kind}, "rope_type", "default")
    require(config, "head_dim", None, int(config["hidden_size"]) // int(config["num_attention_heads"]))
    norm, act = rms_norm(config, offset=1.0), activation(config["hidden_activation"])
    hidden, count = int(config["hidden_size"]), int(config["num_hidden_layers"])
    window = int(config["attention_window_size"])
    unit = RGLRUSpec(
        width=int(config["lru_width"] or hidden),
        blocks=int(config["num_attention_heads"]),
        conv_size=int(config["conv1d_width"]),
        activation=act,
    )
    mixers: dict[str, dict[str, Any]] = {
        "recurrent": {"attention": None, "state": unit},
        "attention": {"attention": attention(config, rope(config, head_dim(config)), window=window, output_bias=True)},
    }
    dense = feed_forward(config, activation=act, intermediate_size=int(config["intermediate_size"]) // 2, bias=True)
    layers = layers_by_kind(
        list(islice(cycle(config["block_types"]), count)),
        mixers,
        [dense] * count,
        attention_norm=norm,
        feed_forward_norm=norm,
    )
    return architecture(
        name,
        config,
        layers,
        norm,
        embedding_multiplier=_as_bfloat16(hidden**0.5),
        logit_softcap=float(config["logits_soft_cap"]),
    )


def _as_bfloat16(value: float) -> float:
    """The nearest number in bfloat16, the even one of two."""
    (bits,) = struct.unpack("<I", struct.pack("<f", value))
    rounded = bits + 0x7FFF + (bits >> 16 & 1) & 0xFFFF0000
    (nearest,) = struct.unpack("<f", struct.pack("<I", rounded))
    return float(nearest)


_LAYER = "model.layers.{layer}"
_NAMES = {
    "embedding": "model.embed_tokens",
    "layers.attention_norm": f"{_LAYER}.temporal_pre_norm",
    "layers.attention.qkv": f"{_LAYER}.temporal_block.{{part}}_proj",
    "layers.attention.output": f"{_LAYER}.temporal_block.o_proj",
    "layers.state.input": f"{_LAYER}.temporal_block.linear_{{part}}",
    "layers.state.conv": f"{_LAYER}.temporal_block.conv_1d",
    "layers.state.input_gate.weight": f"{_LAYER}.temporal_block.rg_lru.input_gate_weight",
    "layers.state.input_bias": f"{_LAYER}.temporal_block.rg_lru.input_gate_bias",
    "layers.state.decay_gate.weight": f"{_LAYER}.temporal_block.rg_lru.recurrent_gate_weight",
    "layers.state.decay_bias": f"{_LAYER}.temporal_block.rg_lru.recurrent_gate_bias",
    "layers.state.decay": f"{_LAYER}.temporal_block.rg_lru.recurrent_param",
    "layers.state.output": f"{_LAYER}.temporal_block.linear_out",
    "layers.feed_forward_norm": f"{_LAYER}.channel_pre_norm",
    "layers.feed_forward.gate_up": f"{_LAYER}.mlp_block.{{part}}_proj",
    "layers.feed_forward.down": f"{_LAYER}.mlp_block.down_proj",
    "norm": "model.final_norm",
    "head": "lm_head",
}
FAMILIES = {
    "RecurrentGemmaForCausalLM": Family(
        _recurrent_gemma,
        _NAMES,
        {
            "num_hidden_layers": 26,
            "vocab_size": 256000,
            "hidden_size": 2560,
            "intermediate_size": 7680,
            "num_attention_heads": 10,
            "num_key_value_heads": None,
            "lru_width": None,
            "attention_window_size": 2048,
            "conv1d_width": 4,
            "logits_soft_cap": 30.0,
            "hidden_activation": "gelu_pytorch_tanh",
            "partial_rotary_factor": 0.5,
            "block_types": ("recurrent", "recurrent", "attention"),
            "max_position_embeddings": 262144,
            "tie_word_embeddings": True,
        },
        {"sliding_window": "attention_window_size"},
        is_transposed=lambda module: module in ("layers.state.input_gate", "layers.state.decay_gate"),
    ),
}
