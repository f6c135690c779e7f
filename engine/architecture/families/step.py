"""Step 3.5 and 3.7: windows with more heads than the full layers, a gate for each head, and experts with limits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from quire.engine.architecture.families import vit
from quire.engine.architecture.families.family import (
    NOT_TEXT,
    Config,
    DraftHeadLayout,
    Family,
    architecture,
    attention,
    head_dim,
    layer_norm,
    layers_by_kind,
    require,
    rms_norm,
    rope,
)
from quire.engine.architecture.families.llama import NAMES
from quire.engine.architecture.feed_forward_spec import MLPSpec, MoESpec
from quire.engine.architecture.media_spec import MediaSpec
from quire.engine.architecture.model_spec import LayerSpec, ModelSpec
from quire.engine.architecture.spec_parts import GatedActivation, NormSpec, RopeSpec
from quire.engine.architecture.vit_spec import ConvolutionsSpec
from quire.engine.protocol.errors import ConfigError


def _step(name: str, config: Config) -> ModelSpec:
    require(config, "hidden_act", "silu")
    require(config, "attention_bias", False)
    require(config, "mlp_bias", False)
    require(config, "moe_router_activation", "sigmoid")
    require(config, "yarn_only_types", ["full_attention"])
    require(config, "use_rope_layers", None, [])
    require(config, "sink", False)
    require(config, "use_bidirectional_attention", False, None)
    require(config, "gating", True, "per-head")
    for setting in ("use_head_wise_attn_gate", "use_qk_norm", "zero_centered"):
        require(config, setting, True)
    for setting in ("norm_expert_weight", "use_moe_router_bias"):
        require(config, setting, True)
    require(config.get("attention_other_setting") or {}, "num_attention_groups", config["num_key_value_heads"])
    require(config.get("attention_other_setting") or {}, "head_dim", head_dim(config))
    layers = [_layer(config, number, is_sparse) for number, is_sparse in enumerate(_are_sparse(config))]
    _check_layers(config, layers)
    return architecture(name, config, layers, rms_norm(config, offset=1.0))


def _mtp(config: Config) -> list[LayerSpec]:
    """The layers of the heads. Their settings follow the target's layers in the publisher's config.json, or are in
    lists of their own, as transformers writes them."""
    count, number = int(config["num_hidden_layers"]), int(config.get("num_nextn_predict_layers", 1))
    for setting, default in (("layer_types", "full_attention"), ("mlp_layer_types", "dense")):
        stated = config.get(setting)
        if stated and len(stated) == count:
            config = {**config, setting: [*stated, *(config.get(f"mtp_{setting}") or [default] * number)]}
    are_sparse = _are_sparse({"moe_layers_enum": [], **config, "num_hidden_layers": count + number})
    return [_layer(config, each, are_sparse[each]) for each in range(count, count + number)]


def _layer(config: Config, number: int, is_sparse: bool) -> LayerSpec:
    norm, other = rms_norm(config, offset=1.0), config.get("attention_other_setting") or {}
    heads = config.get("num_sliding_attention_heads") or other.get("num_attention_heads")
    windows: dict[str, Any] = {"num_heads": int(heads or config["num_attention_heads"])}
    windows["window"] = config.get("sliding_window")
    kind = _of_layer(config, "layer_types", number, "full_attention")
    full = attention(
        config,
        _rope(config, kind, number),
        scale=float(config.get("query_pre_attn_scalar") or head_dim(config)) ** -0.5,
        qk_norm=norm,
        output_gate="heads",
    )
    kinds = {"full_attention": {"attention": full}, "sliding_attention": {"attention": replace(full, **windows)}}
    inner = _experts(config, number) if is_sparse else _mlp(config, "intermediate_size", number)
    (layer,) = layers_by_kind([kind], kinds, [inner], attention_norm=norm, feed_forward_norm=norm)
    return layer


def _check_layers(config: Config, layers: Sequence[LayerSpec]) -> None:
    """Check that the settings of single layers, which transformers writes, agree with the others."""
    for number, settings in (config.get("per_layer_config") or {}).items():
        attention = layers[int(number)].attention if int(number) < len(layers) else None
        if attention is not None and dict(settings) != {"num_attention_heads": attention.num_heads}:
            raise ConfigError(f"per_layer_config of layer {number} is not supported: {dict(settings)}")


def _of_layer(config: Config, setting: str, number: int, default: Any) -> Any:
    """A setting of one layer. Lists may continue with layers for multi-token prediction."""
    value = config.get(setting)
    if not isinstance(value, list):
        return default if value is None else value
    if number >= len(value):
        raise ConfigError(f"{setting} has {len(value)} entries, but num_hidden_layers is {config['num_hidden_layers']}")
    return value[number]


def _rope(config: Config, kind: str, number: int) -> RopeSpec:
    """In the publisher's config.json, each layer has settings, and full attention alone is scaled."""
    settings = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(settings.get(kind), Mapping):
        factor = _of_layer(config, "partial_rotary_factors", number, 1.0)
        own = {"rope_theta": _of_layer(config, "rope_theta", number, 10000.0), "partial_rotary_factor": factor}
        settings = {kind: {**(settings if kind == "full_attention" else {}), **own}}
    return rope({**config, "rope_parameters": settings[kind]}, head_dim(config))


def _are_sparse(config: Config) -> list[bool]:
    """Whether the layers have experts."""
    count, numbers = int(config["num_hidden_layers"]), config.get("moe_layers_enum")
    if config.get("mlp_layer_types"):
        return [_of_layer(config, "mlp_layer_types", number, "sparse") == "sparse" for number in range(count)]
    listed = numbers.split(",") if isinstance(numbers, str) else numbers
    chosen = range(3, count) if listed is None else {int(number) for number in listed if str(number).strip()}
    return [number in chosen for number in range(count)]


def _experts(config: Config, number: int) -> MoESpec:
    return MoESpec(
        num_experts=int(config["n_routed_experts"]),
        top_k=int(config["num_experts_per_tok"]),
        intermediate_size=int(config["moe_intermediate_size"]),
        activation=_activation(config, "swiglu_limits", number),
        scoring="sigmoid",
        renormalize=True,
        scale=float(config["moe_router_scaling_factor"]),
        correction_bias=True,
        shared=_mlp(config, "share_expert_dim", number),
    )


def _mlp(config: Config, size: str, number: int) -> MLPSpec:
    activation = _activation(config, "swiglu_limits_shared", number)
    return MLPSpec(intermediate_size=int(config[size]), activation=activation)


def _activation(config: Config, setting: str, number: int) -> GatedActivation:
    """The activation with the layer's limit."""
    limit = _of_layer(config, setting, number, 0) or 0
    if limit not in _LIMITED:
        raise ConfigError(f"{setting}: a limit of {limit} is not supported; supported: {', '.join(map(str, _LIMITED))}")
    return _LIMITED[limit]


def _media(config: Config) -> MediaSpec:
    """vision_config has the names of its publisher, or of transformers."""
    vision = config["vision_config"]
    renamed = {name: vision[own] for own, name in _VISION_NAMES.items() if own in vision}
    own = {**_VISION, **vision, **renamed}
    norm, scale = layer_norm(own["layer_norm_eps"]), NormSpec(eps=0.0, kind="scale")
    own["intermediate_size"] = int(own["hidden_size"] * own["mlp_ratio"])
    layer = vit.layer(own, norm, rope=vit.rope(own, is_interleaved=True))
    tower = vit.tower(
        config,
        own,
        **vit.tokens(own, bias=False, kind="bilinear"),
        rotary="columns first",
        embedding_norm=norm,
        layer=replace(layer, attention_post_norm=scale, feed_forward_post_norm=scale),
        projector=ConvolutionsSpec(bias=bool(config.get("projector_bias", False))),
    )
    return vit.media(config, tower, 151679)


_LIMITED: dict[float, GatedActivation] = {0: "silu", 7: "silu_7", 16: "silu_16"}
_NAMES = NAMES | {
    "layers.attention.qkv.gate": "model.layers.{layer}.self_attn.g_proj",
    "layers.feed_forward.router": "model.layers.{layer}.moe.gate",
    "layers.feed_forward.router.correction_bias": "model.layers.{layer}.moe.router_bias",
    "layers.feed_forward.experts.gate_up": "model.layers.{layer}.moe.{part}_proj",
    "layers.feed_forward.experts.down": "model.layers.{layer}.moe.down_proj",
    "layers.feed_forward.shared.gate_up": "model.layers.{layer}.share_expert.{part}_proj",
    "layers.feed_forward.shared.down": "model.layers.{layer}.share_expert.down_proj",
}
_MTP = DraftHeadLayout(
    layer="model.layers.{after}",
    names={
        "heads.embedding_norm": "{prefix}.enorm",
        "heads.hidden_norm": "{prefix}.hnorm",
        "heads.projection": "{prefix}.eh_proj",
        "heads.norm": "{prefix}.transformer.shared_head.norm",
        "heads.head": "{prefix}.transformer.shared_head.output",
    },
    layers=_mtp,
    heads="listed",
    is_chained=True,
    has_own_logits=True,
    reads_normed=False,
)
_VISION = (
    vit.DEFAULTS
    | {"hidden_size": 1536, "num_hidden_layers": 47, "num_attention_heads": 16, "image_size": 728, "patch_size": 14}
    | {"mlp_ratio": 8960 / 1536}
)
_VISION_NAMES = {"width": "hidden_size", "layers": "num_hidden_layers", "heads": "num_attention_heads"}
_LAYER = "vision_model.transformer.resblocks.{layer}."
_TOWER_NAMES = {
    "tower.patches": "vision_model.conv1",
    "tower.positions.weight": "vision_model.positional_embedding",
    "tower.embedding_norm": "vision_model.ln_pre",
    "tower.layers.attention_norm": f"{_LAYER}ln_1",
    "tower.layers.attention.qkv.weight": f"{_LAYER}attn.in_proj_weight",
    "tower.layers.attention.qkv.bias": f"{_LAYER}attn.in_proj_bias",
    "tower.layers.attention.output": f"{_LAYER}attn.out_proj",
    "tower.layers.attention_post_norm.weight": f"{_LAYER}ls_1.gamma",
    "tower.layers.feed_forward_norm": f"{_LAYER}ln_2",
    "tower.layers.feed_forward.gate_up": f"{_LAYER}mlp.c_fc",
    "tower.layers.feed_forward.down": f"{_LAYER}mlp.c_proj",
    "tower.layers.feed_forward_post_norm.weight": f"{_LAYER}ls_2.gamma",
    "tower.projector.first": "vision_model.vit_downsampler1",
    "tower.projector.second": "vision_model.vit_downsampler2",
    "tower.projector.down": "vit_large_projector",
}
_FAMILY = Family(
    _step,
    _NAMES,
    {
        "max_position_embeddings": 128000,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "n_routed_experts": 288,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 1280,
        "share_expert_dim": 1280,
        "moe_router_scaling_factor": 1.0,
    },
    {
        "num_attention_groups": "num_key_value_heads",
        "moe_num_experts": "n_routed_experts",
        "num_local_experts": "n_routed_experts",
        "moe_top_k": "num_experts_per_tok",
        "share_expert_dims": "share_expert_dim",
    },
    ignored_prefixes=(*NOT_TEXT, "vit_large_projector."),
    after_layers="multi-token prediction",
    draft_heads={"mtp": _MTP},
)
FAMILIES = {
    "Step3p5ForCausalLM": _FAMILY,
    "Step3p7ForConditionalGeneration": replace(_FAMILY, names=_NAMES | _TOWER_NAMES, media=vit.with_tower(_media)),
}
