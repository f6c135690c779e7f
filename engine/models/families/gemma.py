"""Gemma 1, 2 and 3 (text): norms stored minus 1, post-norms, scaled embeddings, sliding windows, soft-capping."""

from __future__ import annotations

from quire.engine.models.families.family import (
    Config,
    Family,
    activation,
    architecture,
    attention,
    feed_forward,
    head_dim,
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
FAMILIES = {
    "GemmaForCausalLM": Family(_gemma, NAMES, {**_COMMON, "max_position_embeddings": 8192, "num_key_value_heads": 16}),
    "Gemma2ForCausalLM": Family(_gemma2, _BOTH, _GEMMA2),
    "Gemma3ForCausalLM": Family(_gemma2, _BOTH, _GEMMA3),
}
