"""PaddleOCR-VL: a small Llama with positions along time, height and width, and SigLIP for pictures of any size."""

from __future__ import annotations

from dataclasses import replace

from quire.engine.architecture.families import towers, vit
from quire.engine.architecture.families.family import (
    NOT_TEXT,
    Config,
    Family,
    architecture,
    feed_forward,
    head_dim,
    layer_norm,
    require,
    rms_norm,
    rope,
)
from quire.engine.architecture.families.llama import NAMES, sequential
from quire.engine.architecture.families.qwen_vl import with_axes
from quire.engine.architecture.model_spec import ModelSpec
from quire.engine.architecture.vit_spec import ProjectorSpec


def _paddleocr(name: str, config: Config) -> ModelSpec:
    has_biases, norm = bool(config.get("use_bias")), rms_norm(config)
    layer = sequential(config, norm, rope(config, head_dim(config)), None, qkv_bias=has_biases, output_bias=has_biases)
    layer = replace(layer, feed_forward=feed_forward(config, bias=has_biases))
    return architecture(name, config, [layer] * int(config["num_hidden_layers"]), norm)


def _media(arch: ModelSpec, config: Config) -> ModelSpec:
    own = {**_VISION, **config["vision_config"]}
    require(own, "model_type", None, "paddleocr_vl_vision", "paddleocr_vl")
    side, width, norm = int(own["spatial_merge_size"]), int(own["hidden_size"]), layer_norm(own["layer_norm_eps"])
    tower = vit.tower(
        config,
        own,
        **vit.tokens(own, kind="bilinear"),
        pixels="grids",
        rotary="rows first",
        layer=vit.layer(own, norm, rope=vit.rope(own, "axial")),
        norm=norm,
        projector=ProjectorSpec(side=side, patch_norm=layer_norm(1e-5), inner_size=width * side**2),
    )
    return replace(with_axes(arch, config, (16, 24, 24), is_mixed=False), media=vit.media(config, tower, 100295))


_VISION = (
    vit.DEFAULTS
    | {"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16}
    | {"image_size": 384, "patch_size": 14, "hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6}
    | {"spatial_merge_size": 2}
)
_TOWER_NAMES = towers.siglip_names("visual.vision_model.") | {
    "tower.projector.patch_norm": "mlp_AR.pre_norm",
    "tower.projector.up": "mlp_AR.linear_1",
    "tower.projector.down": "mlp_AR.linear_2",
}
FAMILIES = {
    "PaddleOCRVLForConditionalGeneration": Family(
        _paddleocr,
        NAMES | _TOWER_NAMES,
        {
            "max_position_embeddings": 131072,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "tie_word_embeddings": True,
        },
        ignored_prefixes=(*NOT_TEXT, "mlp_AR."),
        ignored_pattern=r"rotary_emb\.inv_freq$|visual\.vision_model\.(head|embeddings\.packing_position_embedding)\.",
        media=_media,
    )
}
