"""Checks the values in config.json that every family reads, whatever it does with them. No torch here.

A wrong value is an error in the file, unlike a setting that a family does not support and transformers may.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from typing import Any

from quire.engine.protocol.errors import ConfigError

_SIZES = (
    "hidden_size", "n_embd", "dim", "num_hidden_layers", "n_layer", "n_layers", "vocab_size",
    "num_attention_heads", "n_head", "n_heads", "intermediate_size", "hidden_dim", "ffn_dim",
    "max_position_embeddings", "n_positions",
)  # fmt: skip
"""Whole numbers of at least 1."""
_LATENT_SIZES = ("kv_lora_rank", "qk_nope_head_dim", "v_head_dim")
"""The same, unless `use_mla` is false."""
_BY_LAYER = ("intermediate_size", "moe_intermediate_size", "rope_theta")
"""Settings that may be lists, with a number for each layer, or for each kind of experts."""
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_CHOSEN_EXPERTS = "num_experts_per_tok"
"""One of `_SIZES` in a model with experts; dense models may have the key, too, with 0 or null."""
_OPTIONAL_SIZES = (
    "num_key_value_heads", "num_kv_heads", "head_dim", "n_inner", "ffn_hidden_size", "q_lora_rank",
    *_EXPERTS, _CHOSEN_EXPERTS, "n_shared_experts", "moe_intermediate_size", "shared_expert_intermediate_size",
)  # fmt: skip
"""Whole numbers of at least 0, or null."""
_SIZES_FROM_0 = ("qk_rope_head_dim",)
"""Whole numbers of at least 0."""
_POSITIVE = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "rope_theta")
"""Finite numbers above 0, or null."""
_NAMES = ("hidden_act", "hidden_activation", "activation_function", "activation")
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers")
_ROPES = ("rope_parameters", "rope_scaling")


def check_values(config: Mapping[str, Any], nullable: Collection[str], max_layers: int) -> None:
    """Raise `ConfigError` for a value that no model can have, or for more than `max_layers` layers.

    Sizes may be null if they are `nullable`.
    """
    required = {*_SIZES, _CHOSEN_EXPERTS} if any(map(config.get, _EXPERTS)) else {*_SIZES}
    required |= {*_LATENT_SIZES} if config.get("use_mla") is not False else set()
    optional = {*_OPTIONAL_SIZES} - required
    for name in config.keys() & {*required, *_SIZES_FROM_0, *optional}:
        value, minimum = config[name], int(name in required)
        if value is None and (name in optional or name in nullable):
            continue
        values = value if name in _BY_LAYER and isinstance(value, list) else [value]
        if any(not isinstance(each, int) or isinstance(each, bool) or each < minimum for each in values):
            alternative = "null or " if name in optional else ""
            raise ConfigError(f"{name} must be {alternative}a whole number of at least {minimum}, got {_json(value)}")
    for name in _LAYERS:
        if config.get(name, 0) > max_layers:
            raise ConfigError(
                f"num_hidden_layers {config[name]:,} is more than this host has memory for, whatever their size; at "
                f"most {max_layers:,} fit into what is free"
            )
    for name in _NAMES:
        if not isinstance(config.get(name), str | None):
            raise ConfigError(f"{name} must be a name, got {_json(config[name])}")
    ropes = {name: config.get(name) for name in _ROPES}
    for name, rope in ropes.items():
        if rope is not None and not isinstance(rope, Mapping):
            raise ConfigError(f"{name} must be an object or null, got {_json(rope)}")
    for settings in (config, *filter(None, ropes.values())):
        for name in settings.keys() & set(_POSITIVE):
            value = settings[name]
            values = value if name in _BY_LAYER and isinstance(value, list) else [value]
            if value is not None and not all(map(_is_positive, values)):
                raise ConfigError(f"{name} must be a number above 0, got {_json(value)}")
    heads, kv_heads = config.get("num_attention_heads"), config.get("num_key_value_heads")
    if heads and kv_heads and heads % kv_heads:
        raise ConfigError(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")


def _is_positive(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and value > 0 and math.isfinite(value)


def _json(value: Any) -> str:
    """A value as it is in the file."""
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:60]}…"
