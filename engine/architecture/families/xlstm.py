"""xLSTM: layers with a matrix memory, and MLPs."""

from __future__ import annotations

import math

from quire.engine.architecture.families.family import Config, Family, architecture, feed_forward, require, rms_norm
from quire.engine.architecture.model_spec import LayerSpec, ModelSpec
from quire.engine.architecture.recurrent_spec import MLSTMSpec
from quire.engine.architecture.spec_parts import NormSpec
from quire.engine.protocol.errors import ConfigError

_MAX_GATE_CAP = 40.0
"""Sums of exponentials of gates must fit float32, even over long contexts."""


def _xlstm(name: str, config: Config) -> ModelSpec:
    """There are no positions: lengths have no limit of the model's own."""
    require(config, "use_bias", False)
    require(config, "add_out_norm", True)
    require(config, "weight_mode", "single")
    if not 0 < (cap := float(config["gate_soft_cap"])) <= _MAX_GATE_CAP:
        raise ConfigError(f"gate_soft_cap {cap} is not supported; supported: above 0, up to {_MAX_GATE_CAP}")
    hidden, heads, eps = int(config["hidden_size"]), int(config["num_heads"]), float(config["norm_eps"])
    keys, values = (int(hidden * config[f"{part}_dim_factor"]) for part in ("qk", "v"))
    if keys % heads or values % heads:
        raise ConfigError(f"num_heads {heads} does not divide {keys} features of keys and {values} of values")
    norm, multiple = rms_norm(config, eps=eps), int(config["ffn_round_up_to_multiple_of"])
    inner = math.floor((hidden * config["ffn_proj_factor"] + multiple - 1) / multiple) * multiple
    layer = LayerSpec(
        attention=None,
        state=MLSTMSpec(
            num_value_heads=heads,
            value_head_dim=values // heads,
            key_head_dim=keys // heads,
            norm=NormSpec(eps=eps, kind="layer"),
            gate_cap=cap,
        ),
        attention_norm=norm,
        feed_forward=feed_forward(config, intermediate_size=inner, activation="silu"),
        feed_forward_norm=norm,
    )
    layers = [layer] * int(config["num_hidden_layers"])
    return architecture(name, config, layers, norm, logit_softcap=float(config["output_logit_soft_cap"]))


_LAYER = "backbone.blocks.{layer}"
_NAMES = {
    "embedding": "backbone.embeddings",
    "layers.attention_norm": f"{_LAYER}.norm_mlstm",
    "layers.state.input": f"{_LAYER}.mlstm_layer.{{part}}",
    "layers.state.gates": f"{_LAYER}.mlstm_layer.{{part}}gate_preact",
    "layers.state.norm": f"{_LAYER}.mlstm_layer.multihead_norm",
    "layers.state.output": f"{_LAYER}.mlstm_layer.out_proj",
    "layers.feed_forward_norm": f"{_LAYER}.norm_ffn",
    "layers.feed_forward.gate_up.gate": f"{_LAYER}.ffn.proj_up_gate",
    "layers.feed_forward.gate_up.up": f"{_LAYER}.ffn.proj_up",
    "layers.feed_forward.down": f"{_LAYER}.ffn.proj_down",
    "norm": "backbone.out_norm",
    "head": "lm_head",
}
FAMILIES = {
    "xLSTMForCausalLM": Family(
        _xlstm,
        _NAMES,
        {
            "vocab_size": 50304,
            "hidden_size": 4096,
            "num_hidden_layers": 32,
            "num_heads": 8,
            "norm_eps": 1e-6,
            "qk_dim_factor": 0.5,
            "v_dim_factor": 1.0,
            "ffn_proj_factor": 2.667,
            "ffn_round_up_to_multiple_of": 64,
            "gate_soft_cap": 15.0,
            "output_logit_soft_cap": 30.0,
            "max_position_embeddings": 262144,
        },
        {"embedding_dim": "hidden_size", "num_blocks": "num_hidden_layers"},
        prefix="backbone.",
    ),
}
