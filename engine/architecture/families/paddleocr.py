"""PaddleOCR-VL: a small Llama with positions along time, height and width, and SigLIP for pictures of any size."""

from __future__ import annotations

from dataclasses import replace

from quire.engine.architecture.families import vit
from quire.engine.architecture.families.family import (
    NOT_TEXT,
    Config,
    Family,
    architecture,
    feed_forward,
    head_dim,
    rms_norm,
    rope,
)
from quire.engine.architecture.families.llama import NAMES, sequential
from quire.engine.architecture.families.qwen_vl import with_axes
from quire.engine.architecture.model_spec import ModelSpec


def _paddleocr(name: str, config: Config) -> ModelSpec:
    has_biases, norm = bool(config.get("use_bias")), rms_norm(config)
    layer = sequential(config, norm, rope(config, head_dim(config)), None, qkv_bias=has_biases, output_bias=has_biases)
    layer = replace(layer, feed_forward=feed_forward(config, bias=has_biases))
    return architecture(name, config, [layer] * int(config["num_hidden_layers"]), norm)


def _media(arch: ModelSpec, config: Config) -> ModelSpec:
    return replace(with_axes(arch, config, (16, 24, 24), is_mixed=False), media=vit.paddleocr(config))


FAMILIES = {
    "PaddleOCRVLForConditionalGeneration": Family(
        _paddleocr,
        NAMES | vit.PADDLEOCR_NAMES,
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
