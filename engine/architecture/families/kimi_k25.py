"""Kimi K2.5: DeepSeek V3 with a tower for images and videos, which joins the frames of a video."""

from __future__ import annotations

from collections.abc import Mapping

from quire.engine.architecture.families import deepseek, vit
from quire.engine.architecture.families.family import NOT_TEXT, Config, Family, in_language_model, layer_norm, require
from quire.engine.architecture.media_spec import MediaSpec
from quire.engine.architecture.model_spec import ModelSpec
from quire.engine.architecture.vit_spec import ProjectorSpec


def _media(config: Config) -> MediaSpec:
    """config.json has the names of its publisher, or of transformers."""
    vision = config["vision_config"]
    renamed = {name: vision[f"vt_{name}"] for name in _RENAMED if f"vt_{name}" in vision}
    renamed |= {
        f"pos_emb_{axis}": vision[f"init_pos_emb_{axis}"]
        for axis in ("height", "width")
        if f"init_pos_emb_{axis}" in vision
    }
    own = {**_VISION, **vision, **renamed}
    norm = layer_norm(1e-5)
    require(own, "pos_emb_width", own["pos_emb_height"])
    side, width = vit.side(vision.get("merge_kernel_size", 2)), int(own["hidden_size"])
    eps = config.get("projection_layer_norm_eps") or vision.get("projector_ln_eps") or 1e-5
    projector = ProjectorSpec(side=side, patch_norm=layer_norm(eps), inner_size=width * side**2)
    tower = vit.tower(
        config,
        own,
        **vit.tokens(own, kind="bicubic", grid=int(own["pos_emb_height"]), is_square=True),
        pixels="grids",
        joins_frames=True,
        rotary="by turns",
        layer=vit.layer(own, norm, rope=vit.rope(own, "axial", is_interleaved=True)),
        norm=norm,
        projector=projector,
    )
    token = int(config.get("media_placeholder_token_id") or 163605)
    video = int(config.get("video_token_id") or 163840)
    return vit.media(config, tower, token, video_token_id=video)


def _names(arch: ModelSpec) -> Mapping[str, str]:
    return in_language_model(deepseek.names(arch)) | _TOWER_NAMES


_RENAMED = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
_VISION = (
    vit.DEFAULTS
    | {"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16}
    | {"hidden_act": "gelu_pytorch_tanh", "patch_size": 14, "pos_emb_height": 64, "pos_emb_width": 64}
)
_LAYER = "vision_tower.encoder.blocks.{layer}."
_TOWER_NAMES = {
    "tower.patches": "vision_tower.patch_embed.proj",
    "tower.positions": "vision_tower.patch_embed.pos_emb",
    "tower.layers.attention_norm": f"{_LAYER}norm0",
    "tower.layers.attention.qkv": f"{_LAYER}wqkv",
    "tower.layers.attention.output": f"{_LAYER}wo",
    "tower.layers.feed_forward_norm": f"{_LAYER}norm1",
    "tower.layers.feed_forward.gate_up": f"{_LAYER}mlp.fc0",
    "tower.layers.feed_forward.down": f"{_LAYER}mlp.fc1",
    "tower.norm": "vision_tower.encoder.final_layernorm",
    "tower.projector.patch_norm": "model.mm_projector.pre_norm",
    "tower.projector.up": "mm_projector.proj.0",
    "tower.projector.down": "mm_projector.proj.2",
}
FAMILIES = dict.fromkeys(
    ("KimiK25ForConditionalGeneration", "Kimi_K25ForConditionalGeneration"),  # its publisher's, and transformers'
    Family(deepseek.deepseek, _names, deepseek.V3, ignored_prefixes=NOT_TEXT, media=vit.with_tower(_media)),
)
