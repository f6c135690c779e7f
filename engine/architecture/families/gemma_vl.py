"""The towers of Gemma 3, Gemma 4 and PaliGemma, with the names of their tensors."""

from __future__ import annotations

import math
from dataclasses import replace

from quire.engine.architecture.families import towers, vit
from quire.engine.architecture.families.family import Config, layer_norm, require
from quire.engine.architecture.media_spec import MediaSpec
from quire.engine.architecture.spec_parts import BOUNDS, NormSpec
from quire.engine.architecture.vit_spec import ProjectorSpec
from quire.engine.protocol.errors import ConfigError


def gemma3(config: Config) -> MediaSpec:
    """The tokens of an image attend to each other in both directions."""
    own, fields = towers.settings(config, "siglip_vision_model")
    eps, grid = float(own["layer_norm_eps"]), vit.grid(own)
    run = int(config.get("mm_tokens_per_image", 256))
    side = grid // max(1, math.isqrt(max(0, run)))  # of the squares of patches that are averaged
    if not side or (grid // side) ** 2 != run:
        raise ConfigError(
            f"mm_tokens_per_image {run} is not supported with image_size {own['image_size']} and patch_size "
            f"{own['patch_size']} in vision_config: {grid} by {grid} patches cannot be averaged to so many tokens"
        )
    projector = ProjectorSpec(side=side, merging="mean", norm=NormSpec(eps=eps, offset=1.0), bias=False)
    most = run * 5  # with four crops of the image (pan and scan)
    tower = vit.tower(config, own, **fields, norm=layer_norm(eps), projector=projector, max_features=most)
    return vit.media(config, tower, 262144, is_bidirectional=True, run_length=run)


def paligemma(config: Config) -> MediaSpec:
    """The tokens of a prompt attend to each other in both directions, if it has images."""
    own, fields = towers.settings(config, "siglip_vision_model")
    features = vit.grid(own) ** 2
    norm = layer_norm(own["layer_norm_eps"])
    tower = vit.tower(config, own, **fields, norm=norm, projector=ProjectorSpec(), max_features=features)
    return vit.media(config, tower, 256000, is_bidirectional=True, joins_prompt=True, run_length=features)


def gemma4(config: Config) -> MediaSpec:
    """With bidirectional attention, the tokens of an image attend to each other in layers with a window."""
    own = {**_GEMMA4, **config["vision_config"]}
    require(own, "model_type", None, "gemma4_vision")
    norm, dim = NormSpec(eps=float(own["rms_norm_eps"])), int(own["head_dim"])
    require(own, "attention_bias", None, False)
    layer = vit.layer(
        {**own, "hidden_act": own["hidden_activation"]},
        norm,
        is_gated=True,
        bias=False,
        is_clipped=bool(own["use_clipped_linears"]),
        num_kv_heads=int(own["num_key_value_heads"]),
        head_dim=dim,
        scale=1.0,
        rope=vit.rope(own, "axial", "default", dim=dim),
        qk_norm=norm,
        value_norm=replace(norm, has_weight=False),
    )
    projector = ProjectorSpec(
        side=int(own["pooling_kernel_size"]),
        merging="mean",
        multiplier=int(own["hidden_size"]) ** 0.5,
        standardizes=bool(own["standardize"]),
        norm=NormSpec(eps=float(own["rms_norm_eps"]), has_weight=False),
        bias=False,
    )
    tower = vit.tower(
        config,
        own,
        **vit.tokens(own, bias=False, is_linear=True, kind="axes", grid=int(own["position_embedding_size"])),
        pixels="placed patches",
        rotary="columns first, in halves",
        layer=replace(layer, attention_post_norm=norm, feed_forward_post_norm=norm),
        projector=projector,
    )
    is_bidirectional = config.get("use_bidirectional_attention") == "vision"
    return vit.media(
        config,
        tower,
        258880,
        video_token_id=int(config.get("video_token_id") or 258884),
        is_bidirectional=is_bidirectional,
        is_causal_without_window=is_bidirectional,
        layer_input_token_id=int(config.get("pad_token_id") or 0) if config["hidden_size_per_layer_input"] else None,
    )


_GEMMA4 = (
    vit.DEFAULTS
    | {"num_hidden_layers": 16, "num_key_value_heads": 12, "head_dim": 64, "hidden_activation": "gelu_pytorch_tanh"}
    | {"rms_norm_eps": 1e-6, "patch_size": 16, "pooling_kernel_size": 3, "position_embedding_size": 10240}
    | {"use_clipped_linears": False, "standardize": False, "rope_theta": 100.0}
)
GEMMA3_NAMES = towers.SIGLIP_NAMES | {
    "tower.projector.down.weight": "model.multi_modal_projector.mm_input_projection_weight",
    "tower.projector.norm": "model.multi_modal_projector.mm_soft_emb_norm",
}
PALIGEMMA_NAMES = towers.SIGLIP_NAMES | {"tower.projector.down": "model.multi_modal_projector.linear"}
_TOWER = "model.vision_tower."
_GEMMA4_LAYER = f"{_TOWER}encoder.layers.{{layer}}."
_GEMMA4_LINEARS = {
    **{f"attention.qkv.{part}": f"self_attn.{part}_proj" for part in "qkv"},
    "attention.output": "self_attn.o_proj",
    **{f"feed_forward.gate_up.{part}": f"mlp.{part}_proj" for part in ("gate", "up")},
    "feed_forward.down": "mlp.down_proj",
}
GEMMA4_NAMES = {
    "tower.patches": f"{_TOWER}patch_embedder.input_proj",
    "tower.positions.weight": f"{_TOWER}patch_embedder.position_embedding_table",
    "tower.layers.attention_norm": f"{_GEMMA4_LAYER}input_layernorm",
    "tower.layers.attention_post_norm": f"{_GEMMA4_LAYER}post_attention_layernorm",
    "tower.layers.attention.query_norm": f"{_GEMMA4_LAYER}self_attn.q_norm",
    "tower.layers.attention.key_norm": f"{_GEMMA4_LAYER}self_attn.k_norm",
    "tower.layers.feed_forward_norm": f"{_GEMMA4_LAYER}pre_feedforward_layernorm",
    "tower.layers.feed_forward_post_norm": f"{_GEMMA4_LAYER}post_feedforward_layernorm",
    **{f"tower.layers.{ours}": f"{_GEMMA4_LAYER}{theirs}.linear" for ours, theirs in _GEMMA4_LINEARS.items()},
    **{
        f"tower.layers.{ours}.{kind}": f"{_GEMMA4_LAYER}{theirs}.{kind}"
        for ours, theirs in _GEMMA4_LINEARS.items()
        for kind in BOUNDS
    },
    "tower.projector.shift": f"{_TOWER}std_bias",
    "tower.projector.scale": f"{_TOWER}std_scale",
    "tower.projector.down": "model.embed_vision.embedding_projection",
}
GEMMA4_SCALARS = frozenset(
    f"tower.layers.{module}.{kind}"
    for module in ("attention.qkv", "attention.output", "feed_forward.gate_up", "feed_forward.down")
    for kind in BOUNDS
)
