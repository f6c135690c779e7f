"""ERNIE 4.5: dense, and mixtures whose experts are chosen by the softmax plus a bias; interleaved rotary pairs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from quire.engine.architecture.families.family import (
    Config,
    DraftHeadLayout,
    Family,
    activation,
    architecture,
    attention,
    feed_forward,
    head_dim,
    require,
    rms_norm,
    rope,
)
from quire.engine.architecture.families.llama import NAMES
from quire.engine.architecture.families.moe import NAMES_BY_EXPERT
from quire.engine.architecture.feed_forward_spec import MLPSpec, MoESpec
from quire.engine.architecture.model_spec import LayerSpec, ModelSpec
from quire.engine.protocol.errors import ConfigError


def _layer(config: Config, feed_forward: MLPSpec | MoESpec) -> LayerSpec:
    norm, bias = rms_norm(config), bool(config["use_bias"])
    rope_spec = rope(config, head_dim(config), is_interleaved=True)
    return LayerSpec(
        attention=attention(config, rope_spec, qkv_bias=bias, output_bias=bias),
        attention_norm=norm,
        feed_forward=feed_forward,
        feed_forward_norm=norm,
    )


def _ernie(name: str, config: Config) -> ModelSpec:
    layer = _layer(config, feed_forward(config, bias=bool(config["use_bias"])))
    return architecture(name, config, [layer] * int(config["num_hidden_layers"]), rms_norm(config))


def _mtp(config: Config) -> list[LayerSpec]:
    """The head's layer has no experts."""
    require(config, "use_bias", False)
    return [_layer(config, feed_forward(config, bias=False))]


def mixture(name: str, config: Config, kinds: Sequence[str] | None = None, **changes: Any) -> ModelSpec:
    """`kinds` say of each layer whether it is dense or sparse; None: by numbers. `changes` are fields of the
    mixture."""
    bias, size, shared = (
        bool(config["use_bias"]),
        int(config["moe_intermediate_size"]),
        config["moe_num_shared_experts"],
    )
    experts = MoESpec(
        num_experts=int(config["moe_num_experts"]),
        top_k=int(config["moe_k"]),
        intermediate_size=size,
        activation=activation(config.get("hidden_act", "silu")),
        renormalize=True,
        correction_bias=True,
        shared=feed_forward(config, intermediate_size=size * int(shared), bias=bias) if shared else None,
        **changes,
    )
    every, count = int(config["moe_layer_interval"]), int(config["num_hidden_layers"])
    first, last = int(config["moe_layer_start_index"]), int(config["moe_layer_end_index"])
    sparse = range(first, count if last == -1 else last + 1)
    if kinds is None:
        kinds = ["sparse" if number in sparse and (number + 1) % every == 0 else "dense" for number in range(count)]
    parts: dict[str, MLPSpec | MoESpec] = {"sparse": experts, "dense": feed_forward(config, bias=bias)}
    if len(kinds) != count or not {*kinds} <= parts.keys():
        raise ConfigError(f"mlp_layer_types {kinds!r}: expected dense or sparse for each of the {count} layers")
    layers = [_layer(config, parts[kind]) for kind in kinds]
    return architecture(name, config, layers, rms_norm(config), head_bias=bias)


_COMMON = {
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "use_bias": False,
}
_MTP = DraftHeadLayout(
    layer="model.mtp_block.0",
    names={
        "heads.embedding_norm": "model.mtp_emb_norm.0",
        "heads.hidden_norm": "model.mtp_hidden_norm.0",
        "heads.projection": "model.mtp_linear_proj.0",
    },
    layers=_mtp,
)
MOE_DEFAULTS = {
    **_COMMON,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 1536,
    "moe_k": 6,
    "moe_num_experts": 64,
    "moe_num_shared_experts": 2,
    "moe_layer_start_index": 1,
    "moe_layer_end_index": -1,
    "moe_layer_interval": 1,
}
CORRECTION = "layers.feed_forward.router.correction_bias"
FAMILIES = {
    "Ernie4_5ForCausalLM": Family(_ernie, NAMES, {**_COMMON, "num_key_value_heads": 2, "head_dim": 128}),
    "Ernie4_5_MoeForCausalLM": Family(
        mixture,
        NAMES_BY_EXPERT | {CORRECTION: "model.layers.{layer}.mlp.moe_statics.e_score_correction_bias"},
        MOE_DEFAULTS,
        leading_ones=frozenset({CORRECTION}),
        ignored_prefixes=("model.mtp_",),
        draft_heads={"mtp": _MTP},
    ),
}
