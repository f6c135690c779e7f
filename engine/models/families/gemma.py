"""Gemma 1, 2, 3 and 4 (text): norms stored minus 1, post-norms, scaled embeddings, sliding windows, soft-capping."""

from __future__ import annotations

from dataclasses import replace

from quire.engine.models.families.family import (
    NOT_TEXT,
    Config,
    Family,
    activation,
    architecture,
    attention,
    feed_forward,
    head_dim,
    of_multimodal,
    require,
    rms_norm,
    rope,
    windows,
)
from quire.engine.models.families.llama import NAMES
from quire.engine.models.model_spec import LayerSpec, ModelSpec

_BOTH = NAMES | {
    "layers.attention_post_norm": "model.layers.{layer}.post_attention_layernorm",
    "layers.feed_forward_norm": "model.layers.{layer}.pre_feedforward_layernorm",
    "layers.feed_forward_post_norm": "model.layers.{layer}.post_feedforward_layernorm",
}


def _gemma(name: str, config: Config) -> ModelSpec:
    norm, rope_spec = rms_norm(config, offset=1.0), rope(config, head_dim(config))
    layer = LayerSpec(
        attention=attention(config, rope_spec),
        attention_norm=norm,
        feed_forward=feed_forward(config, activation="gelu_tanh"),  # whatever config.json says
        feed_forward_norm=norm,
    )
    layers = [layer] * int(config["num_hidden_layers"])
    return architecture(name, config, layers, norm, embedding_multiplier=float(config["hidden_size"]) ** 0.5)


def _gemma2(name: str, config: Config) -> ModelSpec:
    """Gemma 2 and 3. Gemma 3 has QK norm instead of soft-capping, and another RoPE in sliding-window layers."""
    require(config, "use_bidirectional_attention", None, False)
    norm, is_third = rms_norm(config, offset=1.0), name.startswith("Gemma3")
    count, every = int(config["num_hidden_layers"]), int(config["sliding_window_pattern"])
    kinds = ["full_attention" if (number + 1) % every == 0 else "sliding_attention" for number in range(count)]
    config = {"layer_types": kinds, **config}
    dim, local = head_dim(config), {**config, "rope_theta": config.get("rope_local_base_freq")}
    if not config.get("rope_parameters"):
        local["rope_scaling"] = None
    rope_spec = {
        True: rope(local if is_third else config, dim, "sliding_attention"),
        False: rope(config, dim, "full_attention"),
    }
    layers = {
        window: LayerSpec(
            attention=attention(
                config,
                rope_spec[window is not None],
                window=window,
                scale=float(config["query_pre_attn_scalar"]) ** -0.5,
                softcap=float(config.get("attn_logit_softcapping") or 0.0),
                qk_norm=norm if is_third else None,
            ),
            attention_norm=norm,
            attention_post_norm=norm,
            feed_forward=feed_forward(config, activation=activation(config["hidden_activation"])),
            feed_forward_norm=norm,
            feed_forward_post_norm=norm,
        )
        for window in set(windows(config))
    }
    return architecture(
        name,
        config,
        [layers[window] for window in windows(config)],
        norm,
        max_position=int(config["max_position_embeddings"]),  # includes the factor of Gemma 3's linear scaling
        embedding_multiplier=float(config["hidden_size"]) ** 0.5,
        logit_softcap=float(config.get("final_logit_softcapping") or 0.0),
    )


def _gemma4(name: str, config: Config) -> ModelSpec:
    """Layers without windows have heads of another size, and values that are the keys. Dense models only."""
    require(config, "use_bidirectional_attention", None, False, "vision")  # of text, the last is none
    require(config, "enable_moe_block", False)
    require(config, "hidden_size_per_layer_input", 0)
    require(config, "num_kv_shared_layers", 0)
    count, norm = int(config["num_hidden_layers"]), rms_norm(config)
    every = [
        "full_attention" if number % 6 == 0 or number == count else "sliding_attention"
        for number in range(1, count + 1)
    ]
    kinds = [*(config.get("layer_types") or every)]
    kinds[-1] = "full_attention"
    config = {**config, "layer_types": kinds}
    own = {int(number): settings for number, settings in (config.get("per_layer_config") or {}).items()}
    layers = []
    for number, (kind, window) in enumerate(zip(kinds, windows(config), strict=True)):
        mine = config
        if window is None:
            kv_heads = config.get("num_global_key_value_heads") if config["attention_k_eq_v"] else None
            mine = {**config, "head_dim": config["global_head_dim"]}
            mine["num_key_value_heads"] = kv_heads or config["num_key_value_heads"]
        mine = {**mine, **own.get(number, {})}
        settings = mine if mine.get("rope_parameters") else {**mine, "rope_parameters": _GEMMA4_ROPE}
        layers.append(
            LayerSpec(
                attention=attention(
                    mine,
                    rope(settings, head_dim(mine), kind),
                    window=window,
                    scale=1.0,
                    qk_norm=norm,
                    value_norm=replace(norm, has_weight=False),
                    values_are_keys=window is None and bool(config["attention_k_eq_v"]),
                ),
                attention_norm=norm,
                attention_post_norm=norm,
                feed_forward=feed_forward(config, activation=activation(config["hidden_activation"])),
                feed_forward_norm=norm,
                feed_forward_post_norm=norm,
                has_scalar=True,
            )
        )
    return architecture(
        name,
        config,
        layers,
        norm,
        max_position=int(config["max_position_embeddings"]),
        embedding_multiplier=float(config["hidden_size"]) ** 0.5,
        logit_softcap=float(config.get("final_logit_softcapping") or 0.0),
    )


_COMMON = {"tie_word_embeddings": True, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh"}
_GEMMA2 = {
    **_COMMON,
    "max_position_embeddings": 8192,
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "sliding_window_pattern": 2,
    "final_logit_softcapping": 30.0,
    "attn_logit_softcapping": 50.0,
}
_GEMMA3 = {
    **_COMMON,
    "max_position_embeddings": 131072,
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "sliding_window_pattern": 6,
    "rope_theta": 1000000.0,
    "rope_local_base_freq": 10000.0,
}
_GEMMA4 = {
    **_COMMON,
    "vocab_size": 262144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "global_head_dim": 512,
    "attention_k_eq_v": False,
    "hidden_size_per_layer_input": 256,
    "max_position_embeddings": 131072,
    "sliding_window": 512,
}
_GEMMA4_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    "full_attention": {"rope_type": "proportional", "rope_theta": 1000000.0, "partial_rotary_factor": 0.25},
}
_GEMMA4_NAMES = _BOTH | {"layers.scalar": "model.layers.{layer}.layer_scalar"}
FAMILIES = {
    "GemmaForCausalLM": Family(_gemma, NAMES, {**_COMMON, "max_position_embeddings": 8192, "num_key_value_heads": 16}),
    "Gemma2ForCausalLM": Family(_gemma2, _BOTH, _GEMMA2),
    "Gemma3ForCausalLM": Family(_gemma2, _BOTH, _GEMMA3),
    "Gemma4ForCausalLM": Family(_gemma4, _GEMMA4_NAMES, _GEMMA4),
    "Gemma4ForConditionalGeneration": Family(_gemma4, of_multimodal(_GEMMA4_NAMES), _GEMMA4, ignored_prefixes=NOT_TEXT),
    "Gemma3ForConditionalGeneration": Family(
        _gemma2,
        of_multimodal(_BOTH),
        {
            **_GEMMA3,
            "vocab_size": 262208,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 26,
            "num_attention_heads": 8,
        },
        ignored_prefixes=NOT_TEXT,
    ),
}
