"""Llama 4: chunked attention, layers without positions whose queries grow, and one expert for each token."""

from __future__ import annotations

from quire.engine.architecture.attention_spec import AttentionSpec
from quire.engine.architecture.families import vit
from quire.engine.architecture.families.family import (
    NOT_TEXT,
    Config,
    Family,
    activation,
    architecture,
    attention,
    feed_forward,
    head_dim,
    layer_norm,
    of_multimodal,
    require,
    rms_norm,
    rope,
)
from quire.engine.architecture.families.llama import NAMES
from quire.engine.architecture.families.moe import STACKED_EXPERTS
from quire.engine.architecture.feed_forward_spec import MoESpec
from quire.engine.architecture.media_spec import MediaSpec
from quire.engine.architecture.model_spec import LayerSpec, ModelSpec
from quire.engine.architecture.spec_parts import NormSpec, QueryScaleSpec
from quire.engine.architecture.vit_spec import ProjectorSpec
from quire.engine.protocol.errors import ConfigError


def _attention(config: Config, kind: str, *, has_rope: bool) -> AttentionSpec:
    """Layers with positions have a QK norm without weights, which commutes with their rotation."""
    if kind not in ("chunked_attention", "full_attention"):
        raise ConfigError(f"layers of type {kind!r} are not supported; supported: chunked_attention, full_attention")
    grows = not has_rope and config["attn_temperature_tuning"]
    norm = NormSpec(eps=float(config["rms_norm_eps"]), has_weight=False)
    return attention(
        config,
        rope(config, head_dim(config), is_interleaved=True) if has_rope else None,
        window=int(config["attention_chunk_size"]) if kind == "chunked_attention" else None,
        is_chunked=kind == "chunked_attention",
        qk_norm=norm if has_rope and config["use_qk_norm"] else None,
        query_scale=QueryScaleSpec(weight=float(config["attn_scale"]), every=int(config["floor_scale"]), offset=1)
        if grows
        else None,
    )


def _llama4(name: str, config: Config) -> ModelSpec:
    require(config, "num_experts_per_tok", 1)
    count, norm, every = int(config["num_hidden_layers"]), rms_norm(config), int(config["no_rope_layer_interval"])
    has_rope = config.get("no_rope_layers") or [(number + 1) % every != 0 for number in range(count)]  # 1: with
    is_chunked = config.get("attention_chunk_size") is not None
    kinds = config.get("layer_types") or [
        "chunked_attention" if turned and is_chunked else "full_attention" for turned in has_rope
    ]
    step, sparse = int(config["interleave_moe_layer_step"]), config.get("moe_layers")
    sparse = set(range(step - 1, count, step) if sparse is None else sparse)
    experts = MoESpec(
        num_experts=int(config["num_local_experts"]),
        top_k=1,
        intermediate_size=int(config["intermediate_size"]),
        activation=activation(config.get("hidden_act", "silu")),
        scoring="sigmoid",
        weighs_inputs=True,
        shared=feed_forward(config),
    )
    dense = feed_forward(config, intermediate_size=int(config["intermediate_size_mlp"]))
    layers = [
        LayerSpec(
            attention=_attention(config, kind, has_rope=bool(turned)),
            attention_norm=norm,
            feed_forward=experts if number in sparse else dense,
            feed_forward_norm=norm,
        )
        for number, (kind, turned) in enumerate(zip(kinds, has_rope, strict=True))
    ]
    positions = int(config["max_position_embeddings"])
    return architecture(name, config, layers, norm, max_position=positions)


def _media(config: Config) -> MediaSpec:
    own = {**_VISION, **config["vision_config"]}
    require(own, "model_type", None, "llama4_vision_model")
    inner = int(own["projector_input_dim"])
    require(own, "projector_output_dim", inner)
    require(own, "vision_output_dim", inner)
    projector = ProjectorSpec(
        side=round(1 / float(own["pixel_shuffle_ratio"])),
        merged_size=inner,
        activates_merged=True,
        inner_size=inner,
        bias=False,
    )
    norm = layer_norm(1e-5)
    tower = vit.tower(
        config,
        own,
        **vit.tokens(own, bias=False, is_linear=True, kind="learned", class_token="last"),
        rotary="columns first",
        embedding_norm=norm,
        layer=vit.layer({**own, "hidden_act": "gelu"}, norm, rope=vit.rope(own, is_interleaved=True)),
        norm=norm,
        projector=projector,
    )
    return vit.media(config, tower, 200092)


_NAMES = NAMES | {
    "layers.feed_forward.gate_up": "model.layers.{layer}.feed_forward.{part}_proj",
    "layers.feed_forward.down": "model.layers.{layer}.feed_forward.down_proj",
    "layers.feed_forward.router": "model.layers.{layer}.feed_forward.router",
    "layers.feed_forward.shared.gate_up": "model.layers.{layer}.feed_forward.shared_expert.{part}_proj",
    "layers.feed_forward.shared.down": "model.layers.{layer}.feed_forward.shared_expert.down_proj",
    **{module: name.replace(".mlp.", ".feed_forward.") for module, name in STACKED_EXPERTS.items()},
}
_DEFAULTS = {
    "max_position_embeddings": 131072,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "num_experts_per_tok": 1,
    "num_local_experts": 16,
    "interleave_moe_layer_step": 1,
    "intermediate_size_mlp": 16384,
    "use_qk_norm": True,
    "no_rope_layer_interval": 4,
    "attention_chunk_size": 8192,
    "attn_temperature_tuning": True,
    "floor_scale": 8192,
    "attn_scale": 0.1,
}
_VISION = (
    vit.DEFAULTS
    | {"intermediate_size": 5632, "num_hidden_layers": 34, "num_attention_heads": 16, "image_size": 448}
    | {"patch_size": 14, "projector_input_dim": 4096, "projector_output_dim": 4096, "pixel_shuffle_ratio": 0.5}
)
_LAYER = "vision_model.model.layers.{layer}."
_TOWER_NAMES = {
    "tower.patches": "vision_model.patch_embedding.linear",
    "tower.positions.class_token": "vision_model.class_embedding",
    "tower.positions.weight": "vision_model.positional_embedding_vlm",
    "tower.embedding_norm": "vision_model.layernorm_pre",
    "tower.layers.attention_norm": f"{_LAYER}input_layernorm",
    "tower.layers.attention.qkv": f"{_LAYER}self_attn.{{part}}_proj",
    "tower.layers.attention.output": f"{_LAYER}self_attn.o_proj",
    "tower.layers.feed_forward_norm": f"{_LAYER}post_attention_layernorm",
    "tower.layers.feed_forward.gate_up": f"{_LAYER}mlp.fc1",
    "tower.layers.feed_forward.down": f"{_LAYER}mlp.fc2",
    "tower.norm": "vision_model.layernorm_post",
    "tower.projector.merged": "vision_model.vision_adapter.mlp.fc1",
    "tower.projector.up": "vision_model.vision_adapter.mlp.fc2",
    "tower.projector.down": "multi_modal_projector.linear_1",
}


def _is_transposed(module: str) -> bool:
    return module.startswith("layers.feed_forward.experts.")


FAMILIES = {
    "Llama4ForCausalLM": Family(_llama4, _NAMES, _DEFAULTS, is_transposed=_is_transposed),
    "Llama4ForConditionalGeneration": Family(
        _llama4,
        of_multimodal(_NAMES) | _TOWER_NAMES,
        _DEFAULTS,
        is_transposed=_is_transposed,
        ignored_prefixes=NOT_TEXT,
        media=vit.with_tower(_media),
    ),
}
