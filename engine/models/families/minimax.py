"""MiniMax-Text-01 and M1: layers with lightning attention, and a few with attention; experts as in Mixtral."""

from __future__ import annotations

from typing import Any

from quire.engine.models.families.family import (
    Config,
    Family,
    Runs,
    activation,
    architecture,
    attention,
    head_dim,
    layers_by_kind,
    require,
    rms_norm,
    rope,
)
from quire.engine.models.families.llama import NAMES
from quire.engine.models.model_spec import LayerSpec, ModelSpec, MoESpec
from quire.engine.models.recurrent_spec import LightningSpec
from quire.engine.models.spec_parts import NormSpec
from quire.engine.protocol.errors import ConfigError


def _minimax(name: str, config: Config) -> ModelSpec:
    """The residual stream is the normalized one; rates of decay decrease from layer to layer."""
    require(config, "hidden_act", "silu")
    require(config, "sliding_window", None)
    require(config, "mlp_beta_factor", 1, 1.0)
    norm, dim, count = rms_norm(config), head_dim(config), int(config["num_hidden_layers"])
    numbers = config.get("attn_type_list") or [(number + 1) % 2 for number in range(count)]
    by_number = {0: "linear_attention", 1: "full_attention"}
    kinds = config.get("layer_types") or [by_number.get(number, number) for number in numbers]
    if len(kinds) != count:
        raise ConfigError(f"layer_types has {len(kinds)} entries, but num_hidden_layers is {count}")
    experts = MoESpec(
        num_experts=int(config["num_local_experts"]),
        top_k=int(config["num_experts_per_tok"]),
        intermediate_size=int(config["intermediate_size"]),
        activation=activation(config["hidden_act"]),
        renormalize=True,
    )
    rope_spec = rope({**config, "partial_rotary_factor": None}, int(config.get("rotary_dim") or dim))
    layers: list[LayerSpec] = []
    for number, kind in enumerate(kinds):
        lightning = LightningSpec(
            num_value_heads=int(config["num_attention_heads"]),
            value_head_dim=dim,
            rate=1 - number / (count - 1 + 1e-5) + 1e-5,
            norm=NormSpec(eps=1e-6),
            output_multiplier=float(config["linear_attn_beta_factor"]),
        )
        full = attention(config, rope_spec, output_multiplier=float(config["full_attn_beta_factor"]))
        mixers: dict[str, dict[str, Any]] = {
            "linear_attention": {"attention": None, "state": lightning},
            "full_attention": {"attention": full},
        }
        before = "linear_attn_alpha_factor" if kind == "linear_attention" else "full_attn_alpha_factor"
        layers += layers_by_kind(
            [kind],
            mixers,
            [experts],
            attention_norm=norm,
            feed_forward_norm=norm,
            normed_residuals=(float(config[before]), float(config["mlp_alpha_factor"])),
        )
    return architecture(name, config, layers, norm)


def _as_published(name: str, config: Config) -> ModelSpec:
    """The publisher's config.json, from before transformers had the model."""
    require(config, "postnorm", True)
    require(config, "shared_intermediate_size", 0)
    return _minimax(name, config)


def _rows(layer: LayerSpec, module: str, part: str) -> Runs | None:
    """Each head has its query, key and value together."""
    if not isinstance(layer.state, LightningSpec) or module != "layers.state.input" or part == "gate":
        return None
    size, first = layer.state.value_head_dim, ("q", "k", "v").index(part)
    return [range((3 * head + first) * size, (3 * head + first + 1) * size) for head in range(layer.state.num_heads)]


_NAMES = NAMES | {
    "layers.state.input": "model.layers.{layer}.self_attn.qkv_proj",
    "layers.state.input.gate": "model.layers.{layer}.self_attn.output_gate",
    "layers.state.norm": "model.layers.{layer}.self_attn.norm",
    "layers.state.output": "model.layers.{layer}.self_attn.out_proj",
    "layers.feed_forward.router": "model.layers.{layer}.block_sparse_moe.gate",
    "layers.feed_forward.experts.gate_up.gate": "model.layers.{layer}.block_sparse_moe.experts.{expert}.w1",
    "layers.feed_forward.experts.gate_up.up": "model.layers.{layer}.block_sparse_moe.experts.{expert}.w3",
    "layers.feed_forward.experts.down": "model.layers.{layer}.block_sparse_moe.experts.{expert}.w2",
}
_FACTORS = [f"{part}_{factor}_factor" for part in ("full_attn", "linear_attn", "mlp") for factor in ("alpha", "beta")]
_DEFAULTS = {
    "max_position_embeddings": 131072,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1000000.0,
    "hidden_act": "silu",
    **dict.fromkeys(_FACTORS, 1),
}
_ORIGINAL_FACTORS = {
    f"layernorm_{original}_{factor}": f"{part}_{factor}_factor"
    for original, part in (("full_attention", "full_attn"), ("linear_attention", "linear_attn"), ("mlp", "mlp"))
    for factor in ("alpha", "beta")
}
_BUFFERS = r"self_attn\.(slope_rate|query_decay|key_decay|diagonal_decay)$"
FAMILIES = {
    "MiniMaxForCausalLM": Family(_minimax, _NAMES, _DEFAULTS, rows=_rows, ignored_pattern=_BUFFERS),
    **dict.fromkeys(
        ("MiniMaxText01ForCausalLM", "MiniMaxM1ForCausalLM"),
        Family(_as_published, _NAMES, _DEFAULTS, _ORIGINAL_FACTORS, rows=_rows, ignored_pattern=_BUFFERS),
    ),
}
