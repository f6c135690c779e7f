"""OLMo 2 and 3: norms only after attention and feed-forward, and over all queries and all keys."""

from __future__ import annotations

from quire.engine.models.families.family import (
    Config,
    Family,
    architecture,
    attention,
    feed_forward,
    head_dim,
    rms_norm,
    rope,
    windows,
)
from quire.engine.models.families.llama import NAMES
from quire.engine.models.model_spec import LayerSpec, ModelSpec

_NAMES = NAMES | {
    "layers.attention_post_norm": "model.layers.{layer}.post_attention_layernorm",
    "layers.feed_forward_post_norm": "model.layers.{layer}.post_feedforward_layernorm",
}


def _olmo(name: str, config: Config) -> ModelSpec:
    norm, dim = rms_norm(config), head_dim(config)
    if name.startswith("Olmo3"):
        every = range(1, int(config["num_hidden_layers"]) + 1)
        config = {"layer_types": ["sliding_attention" if n % 4 else "full_attention" for n in every], **config}
    plain = {**config, "rope_scaling": None}  # in old configs, scaling applies to full attention only
    layers = {
        window: LayerSpec(
            attention=attention(
                config,
                rope(config, dim, "full_attention") if window is None else rope(plain, dim, "sliding_attention"),
                window=window,
                qk_norm=norm,
                qk_norm_over="all heads",
            ),
            attention_norm=None,
            attention_post_norm=norm,
            feed_forward=feed_forward(config),
            feed_forward_norm=None,
            feed_forward_post_norm=norm,
        )
        for window in set(windows(config))
    }
    return architecture(name, config, [layers[window] for window in windows(config)], norm)


_COMMON = {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5}
FAMILIES = {
    "Olmo2ForCausalLM": Family(_olmo, _NAMES, _COMMON),
    "Olmo3ForCausalLM": Family(_olmo, _NAMES, {**_COMMON, "sliding_window": 4096, "rope_theta": 500000.0}),
}
