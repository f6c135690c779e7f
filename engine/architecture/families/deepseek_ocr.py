"""DeepSeek-OCR and DeepSeek-OCR 2: DeepSeek V2's experts behind plain attention, and SAM's tower.

config.json is as published, or of the second as in transformers' format.
"""

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
from quire.engine.architecture.sam_spec import QueriedSamTowerSpec, RelativeAttentionSpec, TwofoldSamTowerSpec
from quire.engine.architecture.tower_spec import PatchSpec, tower_layer
from quire.engine.architecture.vit_spec import ImagePositionsSpec
from quire.engine.protocol.errors import ConfigError

_QUERIES = (144, 256)
"""For tiles of 768 and 1024 pixels."""
_SAM: dict[str, Any] = {"hidden_size": 768, "output_channels": 256, "num_hidden_layers": 12, "num_attention_heads": 12}
_SAM |= {"num_channels": 3, "image_size": 1024, "patch_size": 16, "layer_norm_eps": 1e-6, "mlp_ratio": 4.0}
_SAM |= {"window_size": 14, "global_attn_indexes": (2, 5, 8, 11), "downsample_channels": (512, 896)}
_READER = {"hidden_size": 4096, "intermediate_size": 22016, "num_hidden_layers": 32, "num_attention_heads": 32}
_READER |= {"max_position_embeddings": 32768}
_QWEN: dict[str, Any] = {
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
}
_QWEN |= {"num_key_value_heads": 2, "rope_theta": 1000000.0}
_CLIP: dict[str, Any] = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16}
_CLIP |= {"image_size": 224, "patch_size": 14, "layer_norm_eps": 1e-5, "mlp_ratio": 4.0}
_PUBLISHED = {"width": "hidden_size", "dim": "hidden_size", "layers": "num_hidden_layers"}
_PUBLISHED |= {"heads": "num_attention_heads"}
"""Names of settings as published, which leave out those of `_QWEN`."""


def _decoder(name: str, config: Config) -> ModelSpec:
    require(config, "use_mla", False)
    norm = rms_norm(config)
    plain = LayerSpec(
        attention=attention(config, rope(config, head_dim(config))),
        attention_norm=norm,
        feed_forward=feed_forward(config),
        feed_forward_norm=norm,
    )
    mixture = replace(plain, feed_forward=softmax_experts(config))
    return architecture(name, config, [mixture if each else plain for each in are_mixtures(config)], norm)


def _parts(config: Config) -> tuple[dict[str, Any], dict[str, Any]]:
    """The settings of SAM, and of its reader."""
    vision = config["vision_config"]
    if not isinstance(vision.get("width"), Mapping):  # transformers' format
        told = {name: value for name, value in vision.get("sam_config", {}).items() if value is not None}
        return _SAM | told, _READER | dict(vision.get("encoder_config", {}))
    kinds = {"sam_vit_b": _SAM, "qwen2-0-5b": _READER | _QWEN, "clip-l-14-224": _CLIP}
    if unknown := vision["width"].keys() - kinds:
        raise ConfigError(f"vision_config.width: {', '.join(sorted(unknown))}: not supported")
    parts = {
        kind: kinds[kind] | {_PUBLISHED.get(name, name): value for name, value in own.items()}
        for kind, own in vision["width"].items()
    }
    sam = parts.pop("sam_vit_b")
    ((_, reader),) = parts.items()
    return sam | {"downsample_channels": (sam["downsample_channels"][0], reader["hidden_size"])}, reader


def _sam(config: Config, sam: Config) -> dict[str, Any]:
    """The fields of the tower without its readers."""
    for setting in ("use_abs_pos", "use_rel_pos", "qkv_bias"):
        require(sam, setting, True)
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
    return {
        "hidden_size": int(config["hidden_size"]),
        "width": width,
        "patch": PatchSpec(shape=(channels, side, side)),
        "patch_side": side,
        "positions": ImagePositionsSpec(grid=grid, kind="antialiased bicubic", leading_ones=1, is_square=True),
        "layers": tuple(
            of_tile if number in sam["global_attn_indexes"] else of_window
            for number in range(int(sam["num_hidden_layers"]))
        ),
        "channels": (neck, neck, first, second),
        "neck_norm": layer_norm(1e-6),
    }


def _queried(arch: ModelSpec, config: Config) -> ModelSpec:
    """Version 2."""
    sam, reader = _parts(config)
    require(reader, "use_sliding_window", False)
    fields = _sam(config, sam)
    require(reader, "hidden_size", fields["channels"][-1])
    norm, heads = rms_norm(reader), int(reader["num_attention_heads"])
    reads = tower_layer(
        int(reader["hidden_size"]),
        heads,
        feed_forward(reader, bias=False),
        norm,
        rope=rope(reader, head_dim(reader)),
        num_kv_heads=int(reader.get("num_key_value_heads") or heads),
        output_bias=False,
    )
    readers = (reads,) * int(reader["num_hidden_layers"])
    tower = QueriedSamTowerSpec(**fields, readers=readers, reader_norm=norm, queries=_QUERIES)
    return replace(arch, media=MediaSpec(tower=tower, image_token_id=int(config["image_token_id"])))


def _twofold(arch: ModelSpec, config: Config) -> ModelSpec:
    """Version 1."""
    sam, clip = _parts(config)
    require(config.get("projector_config") or {}, "projector_type", "linear")
    width, norm = int(clip["hidden_size"]), layer_norm(clip["layer_norm_eps"])
    inner = MLPSpec(
        intermediate_size=int(width * clip["mlp_ratio"]), activation="quick_gelu", is_gated=False, bias=True
    )
    reads = tower_layer(width, int(clip["num_attention_heads"]), inner, norm)
    positions = ImagePositionsSpec(
        grid=int(clip["image_size"]) // int(clip["patch_size"]), kind="antialiased bicubic", class_token="first"
    )
    tower = TwofoldSamTowerSpec(
        **_sam(config, sam),
        readers=(reads,) * int(clip["num_hidden_layers"]),
        reader_positions=positions,
        reader_embedding_norm=norm,
    )
    return replace(arch, media=MediaSpec(tower=tower, image_token_id=int(config["image_token_id"])))


def _relative(layer: LayerSpec, side: int, window: int) -> LayerSpec:
    """With distances."""
    assert layer.attention is not None
    fields = {name: getattr(layer.attention, name) for name in layer.attention.__dataclass_fields__}
    return replace(layer, attention=RelativeAttentionSpec(**fields, side=side, window_side=window))


_SAM_LAYER, _QWEN_LAYER = "model.sam_model.blocks.{layer}.", "model.qwen2_model.model.model.layers.{layer}."
_CLIP_LAYER = "model.vision_model.transformer.layers.{layer}."
_NAMES: dict[str, str] = NAMES_BY_EXPERT | {
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
    "tower.projector": "model.projector.layers",
    "tower.marks.separator": "model.view_seperator",  # as published
}
_QUERIED_NAMES = _NAMES | {
    "tower.queries.few": "model.qwen2_model.query_768.weight",
    "tower.queries.many": "model.qwen2_model.query_1024.weight",
    "tower.readers.attention_norm": f"{_QWEN_LAYER}input_layernorm",
    "tower.readers.attention.qkv": f"{_QWEN_LAYER}self_attn.{{part}}_proj",
    "tower.readers.attention.output": f"{_QWEN_LAYER}self_attn.o_proj",
    "tower.readers.feed_forward_norm": f"{_QWEN_LAYER}post_attention_layernorm",
    "tower.readers.feed_forward.gate_up": f"{_QWEN_LAYER}mlp.{{part}}_proj",
    "tower.readers.feed_forward.down": f"{_QWEN_LAYER}mlp.down_proj",
    "tower.reader_norm": "model.qwen2_model.model.model.norm",
}
_TWOFOLD_NAMES = _NAMES | {
    "tower.reader_positions.class_token": "model.vision_model.embeddings.class_embedding",
    "tower.reader_positions.weight": "model.vision_model.embeddings.position_embedding.weight",
    "tower.reader_embedding_norm": "model.vision_model.pre_layrnorm",
    "tower.readers.attention_norm": f"{_CLIP_LAYER}layer_norm1",
    "tower.readers.attention.qkv": f"{_CLIP_LAYER}self_attn.qkv_proj",
    "tower.readers.attention.output": f"{_CLIP_LAYER}self_attn.out_proj",
    "tower.readers.feed_forward_norm": f"{_CLIP_LAYER}layer_norm2",
    "tower.readers.feed_forward.gate_up": f"{_CLIP_LAYER}mlp.fc1",
    "tower.readers.feed_forward.down": f"{_CLIP_LAYER}mlp.fc2",
    "tower.marks.newline": "model.image_newline",
}
_DEFAULTS = {
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 2048,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "moe_intermediate_size": 1407,
    "routed_scaling_factor": 1.0,
    "topk_method": "greedy",
    "first_k_dense_replace": 0,
    "image_token_id": 128815,
}
_NOT_TEXT = ("model.sam_model.", "model.projector.", "model.view_seperator")
_UNUSED = ("model.vision_model.embeddings.patch_embedding.", "model.vision_model.embeddings.position_ids")
_QUERIED = Family(
    _decoder, _QUERIED_NAMES, _DEFAULTS, ignored_prefixes=(*_NOT_TEXT, "model.qwen2_model."), media=_queried
)
FAMILIES = {
    "DeepseekOcr2ForConditionalGeneration": _QUERIED,
    "DeepseekOCR2ForCausalLM": _QUERIED,
    "DeepseekOCRForCausalLM": Family(
        _decoder,
        _TWOFOLD_NAMES,
        _DEFAULTS,
        {"image_token_index": "image_token_id"},
        ignored_prefixes=(*_NOT_TEXT, "model.vision_model.", *_UNUSED, "model.image_newline"),
        media=_twofold,
    ),
}
