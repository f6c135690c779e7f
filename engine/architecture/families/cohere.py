"""Command R and R7B: attention and feed-forward in parallel after one norm; interleaved rotary pairs.

Logits are multiplied in models that take images, too; transformers' classes of these do not.
"""

from __future__ import annotations

from typing import Any

from quire.engine.architecture.families import towers, vit
from quire.engine.architecture.families.family import (
    NOT_TEXT,
    Config,
    Family,
    architecture,
    attention,
    feed_forward,
    head_dim,
    in_language_model,
    layer_norm,
    of_multimodal,
    require,
    rope,
    windows,
)
from quire.engine.architecture.families.llama import NAMES
from quire.engine.architecture.media_spec import MediaSpec
from quire.engine.architecture.model_spec import LayerSpec, ModelSpec
from quire.engine.architecture.vit_spec import ProjectorSpec
from quire.engine.protocol.errors import ConfigError


def _cohere(name: str, config: Config) -> ModelSpec:
    """Cohere2 has sliding-window layers; only these have RoPE."""
    norm, is_second = layer_norm(config["layer_norm_eps"], bias=False), name != "CohereForCausalLM"
    count = int(config["num_hidden_layers"])
    if is_second:
        every = int(config.get("sliding_window_pattern") or 4)
        kinds = ["full_attention" if (number + 1) % every == 0 else "sliding_attention" for number in range(count)]
        config = {"layer_types": kinds, **config}
    rope_spec = rope(config, head_dim(config), is_interleaved=True)
    layers = [
        LayerSpec(
            attention=attention(
                config,
                None if is_second and window is None else rope_spec,
                window=window,
                qk_norm=norm if config.get("use_qk_norm") else None,
                qk_norm_over="each head",
            ),
            attention_norm=norm,
            feed_forward=feed_forward(config),
            feed_forward_norm=None,
            is_parallel=True,
        )
        for window in (windows(config) if is_second else [None] * count)
    ]
    return architecture(name, config, layers, norm, logit_multiplier=float(config["logit_scale"]))


def _aya_vision(name: str, config: Config) -> ModelSpec:
    require(config, "model_type", "cohere2")
    return _cohere(name, config)


def _aya_media(config: Config) -> MediaSpec:
    own, fields = towers.settings(config, "siglip_vision_model")
    projector = _gated(config, norm=layer_norm(config.get("adapter_layer_norm_eps", 1e-6)))
    tower = vit.tower(config, own, **fields, outputs=towers.outputs(config, own, -1), projector=projector)
    return vit.media(config, tower, 255036, "full")


def _cohere2_media(config: Config) -> MediaSpec:
    own, fields = towers.settings(config, "siglip_vision_model")
    projector = _gated({"alignment_intermediate_size": 36864, **config})
    tower = vit.tower(config, own, **fields, norm=layer_norm(own["layer_norm_eps"]), projector=projector)
    return vit.media(config, tower, 255036)


def _gated(config: Config, **changes: Any) -> ProjectorSpec:
    inner = int(config.get("alignment_intermediate_size") or config["hidden_size"])
    if inner % 2:
        raise ConfigError(f"alignment_intermediate_size {inner} is not even")
    side = int(config.get("downsample_factor", 2))
    return ProjectorSpec(side=side, inner_size=inner // 2, activation="silu", is_gated=True, **changes)


_COMMON = {
    "max_position_embeddings": 8192,
    "layer_norm_eps": 1e-5,
    "logit_scale": 0.0625,
    "tie_word_embeddings": True,
}
_COHERE2 = {**_COMMON, "sliding_window": 4096}
FAMILIES = {
    "CohereForCausalLM": Family(_cohere, NAMES, {**_COMMON, "rope_theta": 500000.0}),
    "Cohere2ForCausalLM": Family(_cohere, NAMES, _COHERE2),
    "Cohere2VisionForConditionalGeneration": Family(
        _cohere,
        of_multimodal(NAMES) | towers.SIGLIP_NAMES,
        _COHERE2,
        ignored_prefixes=NOT_TEXT,
        ignored_pattern=towers.UNUSED,
        media=vit.with_tower(_cohere2_media),
    ),
    "AyaVisionForConditionalGeneration": Family(
        _aya_vision,
        in_language_model(NAMES) | towers.SIGLIP_NAMES,
        _COHERE2,
        ignored_prefixes=NOT_TEXT,
        ignored_pattern=towers.UNUSED,
        media=vit.with_tower(_aya_media),
    ),
}
