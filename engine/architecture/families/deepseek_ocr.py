"""DeepSeek-OCR 2: DeepSeek V2's experts behind plain attention, and SAM's tower."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quire.engine.architecture.families.deepseek import are_mixtures, softmax_experts
from quire.engine.architecture.families.family import (
    Config,
    Family,
    activation,
    architecture,
    attention,
    feed_forward,
    head_dim,
    layer_norm,
    require,
    rms_norm,
    rope,
)
from quire.engine.architecture.families.moe import NAMES_BY_EXPERT
from quire.engine.architecture.feed_forward_spec import MLPSpec
from quire.engine.architecture.media_spec import MediaSpec
from quire.engine.architecture.model_spec import LayerSpec, ModelSpec
from quire.engine.architecture.sam_spec import RelativeAttentionSpec, SamTowerSpec
from quire.engine.architecture.tower_spec import PatchSpec, tower_layer
from quire.engine.architecture.vit_spec import ImagePositionsSpec

_QUERIES = (144, 256)
"""For tiles of 768 and 1024 pixels."""
_SAM: dict[str, Any] = {"hidden_size": 768, "output_channels": 256, "num_hidden_layers": 12, "num_attention_heads": 12}
_SAM |= {"num_channels": 3, "image_size": 1024, "patch_size": 16, "layer_norm_eps": 1e-6, "mlp_ratio": 4.0}
_SAM |= {"window_size": 14, "global_attn_indexes": (2, 5, 8, 11), "downsample_channels": (512, 896)}
_READER = {"hidden_size": 4096, "intermediate_size": 22016, "num_hidden_layers": 32, "num_attention_heads": 32}
_READER |= {"max_position_embeddings": 32768}


def _decoder(name: str, config: Config) -> ModelSpec:
    norm = rms_norm(config)
    plain = LayerSpec(
        attention=attention(config, rope(config, head_dim(config))),
        attention_norm=norm,
        feed_forward=feed_forward(config),
        feed_forward_norm=norm,
    )
    mixture = replace(plain, feed_forward=softmax_experts(config))
    return architecture(name, config, [mixture if each else plain for each in are_mixtures(config)], norm)


def _media(arch: ModelSpec, config: Config) -> ModelSpec:
    vision = config["vision_config"]
    sam = {**_SAM, **{name: value for name, value in vision.get("sam_config", {}).items() if value is not None}}
    reader = {**_READER, **vision.get("encoder_config", {})}
    for setting in ("use_abs_pos", "use_rel_pos", "qkv_bias"):
        require(sam, setting, True)
    require(reader, "use_sliding_window", False)
    width, heads, side = int(sam["hidden_size"]), int(sam["num_attention_heads"]), int(sam["patch_size"])
    grid, channels, window = int(sam["image_size"]) // side, int(sam["num_channels"]), int(sam["window_size"])
    inner = MLPSpec(
        intermediate_size=int(sam.get("mlp_dim") or width * sam["mlp_ratio"]),
        activation=activation(sam.get("hidden_act", "gelu")),
        is_gated=False,
        bias=True,
    )
    of_window, of_tile = (
        _relative(tower_layer(width, heads, inner, layer_norm(sam["layer_norm_eps"])), size or grid, size)
        for size in (window, 0)
    )
    first, second = (int(each) for each in sam["downsample_channels"])
    neck = int(sam["output_channels"])
    require(reader, "hidden_size", second)
    norm, turns = rms_norm(reader), rope(reader, head_dim(reader))
    query_heads = int(reader["num_attention_heads"])
    reads = tower_layer(
        second,
        query_heads,
        feed_forward(reader, bias=False),
        norm,
        rope=turns,
        num_kv_heads=int(reader.get("num_key_value_heads") or query_heads),
        output_bias=False,
    )
    tower = SamTowerSpec(
        hidden_size=int(config["hidden_size"]),
        width=width,
        patch=PatchSpec(shape=(channels, side, side)),
        patch_side=side,
        positions=ImagePositionsSpec(grid=grid, kind="antialiased bicubic", leading_ones=1, is_square=True),
        layers=tuple(
            of_tile if number in sam["global_attn_indexes"] else of_window
            for number in range(int(sam["num_hidden_layers"]))
        ),
        channels=(neck, neck, first, second),
        neck_norm=layer_norm(1e-6),
        readers=(reads,) * int(reader["num_hidden_layers"]),
        reader_norm=norm,
        queries=_QUERIES,
    )
    return replace(arch, media=MediaSpec(tower=tower, image_token_id=int(config["image_token_id"])))


def _relative(layer: LayerSpec, side: int, window: int) -> LayerSpec:
    """With distances."""
    assert layer.attention is not None
    fields = {name: getattr(layer.attention, name) for name in layer.attention.__dataclass_fields__}
    return replace(layer, attention=RelativeAttentionSpec(**fields, side=side, window_side=window))


_SAM_LAYER, _READER_LAYER = "model.sam_model.blocks.{layer}.", "model.qwen2_model.model.model.layers.{layer}."
_NAMES: Mapping[str, str] = NAMES_BY_EXPERT | {
    "tower.patches": "model.sam_model.patch_embed.proj",
    "tower.positions.weight": "model.sam_model.pos_embed",
    "tower.layers.attention_norm": f"{_SAM_LAYER}norm1",
    "tower.layers.attention.qkv": f"{_SAM_LAYER}attn.qkv",
    "tower.layers.attention.distances.rows": f"{_SAM_LAYER}attn.rel_pos_h",
    "tower.layers.attention.distances.columns": f"{_SAM_LAYER}attn.rel_pos_w",
    "tower.layers.attention.output": f"{_SAM_LAYER}attn.proj",
    "tower.layers.feed_forward_norm": f"{_SAM_LAYER}norm2",
    "tower.layers.feed_forward.gate_up": f"{_SAM_LAYER}mlp.lin1",
    "tower.layers.feed_forward.down": f"{_SAM_LAYER}mlp.lin2",
    "tower.neck.first": "model.sam_model.neck.0",
    "tower.neck.first_norm": "model.sam_model.neck.1",
    "tower.neck.second": "model.sam_model.neck.2",
    "tower.neck.second_norm": "model.sam_model.neck.3",
    "tower.neck.third": "model.sam_model.net_2",
    "tower.neck.fourth": "model.sam_model.net_3",
    "tower.queries.few": "model.qwen2_model.query_768.weight",
    "tower.queries.many": "model.qwen2_model.query_1024.weight",
    "tower.readers.attention_norm": f"{_READER_LAYER}input_layernorm",
    "tower.readers.attention.qkv": f"{_READER_LAYER}self_attn.{{part}}_proj",
    "tower.readers.attention.output": f"{_READER_LAYER}self_attn.o_proj",
    "tower.readers.feed_forward_norm": f"{_READER_LAYER}post_attention_layernorm",
    "tower.readers.feed_forward.gate_up": f"{_READER_LAYER}mlp.{{part}}_proj",
    "tower.readers.feed_forward.down": f"{_READER_LAYER}mlp.down_proj",
    "tower.reader_norm": "model.qwen2_model.model.model.norm",
    "tower.projector": "model.projector.layers",
    "tower.separator.weight": "model.view_seperator",  # as published
}
FAMILIES = {
    "DeepseekOcr2ForConditionalGeneration": Family(
        _decoder,
        _NAMES,
        {
            "rms_norm_eps": 1e-6,
            "max_position_embeddings": 2048,
            "n_routed_experts": 64,
            "n_shared_experts": 2,
            "moe_intermediate_size": 1407,
            "routed_scaling_factor": 1.0,
            "topk_method": "greedy",
            "first_k_dense_replace": 0,
            "image_token_id": 128815,
        },
        ignored_prefixes=("model.sam_model.", "model.qwen2_model.", "model.projector.", "model.view_seperator"),
        media=_media,
    ),
}
