"""The towers that several families have: CLIP, SigLIP, Pixtral and InternViT, with the names of their tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from quire.engine.architecture.families import vit
from quire.engine.architecture.families.family import Config, activation, layer_norm, require
from quire.engine.architecture.model_spec import ModelSpec
from quire.engine.architecture.spec_parts import NormSpec
from quire.engine.architecture.vit_spec import ProjectorSpec, ViTSpec
from quire.engine.protocol.errors import ConfigError


def settings(config: Config, kind: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """`vision_config` with transformers' defaults, and the fields for `vit.tower` that follow from it. `kind` is the
    model_type if it has none."""
    own = config["vision_config"]
    name = own.get("model_type") or kind
    if name not in _KINDS:
        raise ConfigError(
            f"vision_config of model_type {name!r} is not supported (supported: {', '.join(_KINDS)}); "
            "--language-model-only serves text alone"
        )
    fields, defaults = _KINDS[name]
    own = {**defaults, **own}
    return own, fields(own)


def _clip(own: Config) -> dict[str, Any]:
    norm = layer_norm(own["layer_norm_eps"])
    tokens = vit.tokens(own, bias=False, kind="learned", class_token="first")
    return {**tokens, "embedding_norm": norm, "layer": vit.layer(own, norm)}


def _siglip(own: Config) -> dict[str, Any]:
    return {**vit.tokens(own, kind="learned"), "layer": vit.layer(own, layer_norm(own["layer_norm_eps"]))}


def _any_size_siglip(own: Config) -> dict[str, Any]:
    return {**vit.tokens(own, kind="fractional"), "layer": vit.layer(own, layer_norm(own["layer_norm_eps"]))}


def _pixtral(own: Config) -> dict[str, Any]:
    norm = NormSpec(eps=1e-5)
    dim = int(own["hidden_size"]) // int(own["num_attention_heads"])
    require(own, "head_dim", None, dim)
    if dim % 4:
        raise ConfigError(f"heads of {dim} features cannot have rotary positions along two axes")
    layer = vit.layer(own, norm, is_gated=True, bias=False, rope=vit.rope(own, "axial", "default"))
    return {**vit.tokens(own, bias=False), "embedding_norm": norm, "layer": layer}


def _internvl(own: Config) -> dict[str, Any]:
    require(own, "norm_type", "layer_norm", "rms_norm")
    eps, has_qk_norm = float(own["layer_norm_eps"]), bool(own["use_qk_norm"])
    norm = layer_norm(eps) if own["norm_type"] == "layer_norm" else NormSpec(eps=eps)
    of_qk: dict[str, Any] = {"qk_norm": NormSpec(eps=1e-6), "qk_norm_over": "all heads"} if has_qk_norm else {}
    layer = vit.layer(own, norm, qkv_bias=bool(own["attention_bias"]), **of_qk)
    scale = NormSpec(eps=0.0, kind="scale")
    kind = "bicubic" if own["use_absolute_position_embeddings"] else None
    return {
        **vit.tokens(own, kind=kind, class_token="first", leading_ones=1),
        "layer": replace(layer, attention_post_norm=scale, feed_forward_post_norm=scale),
    }


def _siglip2(own: Config) -> dict[str, Any]:
    tokens = vit.tokens(own, is_linear=True, kind="antialiased", grid=int(int(own["num_patches"]) ** 0.5))
    return {**tokens, "pixels": "patches", "layer": vit.layer(own, layer_norm(own["layer_norm_eps"]))}


_SIGLIP = vit.DEFAULTS | {"patch_size": 16, "hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6}
_IDEFICS = _SIGLIP | {"hidden_size": 1152, "num_attention_heads": 16, "patch_size": 32}
_LARGE = vit.DEFAULTS | {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
}
_PIXTRAL = _LARGE | {"image_size": 1024, "patch_size": 16, "hidden_act": "gelu"}
_INTERNVL = (
    _LARGE
    | {"image_size": 448, "patch_size": 14, "hidden_act": "gelu", "layer_norm_eps": 1e-6, "norm_type": "layer_norm"}
    | {"attention_bias": False, "use_qk_norm": False, "use_absolute_position_embeddings": True}
    | {"use_mean_pooling": True}
)
_SIGLIP2 = _SIGLIP | {"num_patches": 256}
_KINDS: dict[str, tuple[Callable[[Config], dict[str, Any]], Mapping[str, Any]]] = {
    "clip_vision_model": (_clip, vit.DEFAULTS),
    "siglip_vision_model": (_siglip, _SIGLIP),
    "idefics3_vision": (_any_size_siglip, _IDEFICS),
    "idefics3": (_any_size_siglip, _IDEFICS),
    "smolvlm_vision": (_any_size_siglip, _IDEFICS),
    "pixtral": (_pixtral, _PIXTRAL),
    "internvl_vision": (_internvl, _INTERNVL),
    "siglip2_vision_model": (_siglip2, _SIGLIP2),
}
"""By `model_type`: the fields for `vit.tower`, and transformers' defaults."""


def outputs(config: Config, own: Config, default: int) -> tuple[int, ...]:
    """The layers whose outputs `vision_feature_layer` names; negative numbers count from the last output."""
    named = config.get("vision_feature_layer", default)
    numbers = [int(each) for each in (named if isinstance(named, Sequence) else [named])]
    return tuple(int(own["num_hidden_layers"]) + 1 + each if each < 0 else each for each in numbers)


def two_layers(config: Config, **changes: Any) -> ProjectorSpec:
    """A projector with an inner layer as large as its output."""
    act = activation(config.get("projector_hidden_act") or "gelu")
    bias = bool(config.get("multimodal_projector_bias", True))
    return ProjectorSpec(**{"inner_size": int(config["hidden_size"]), "activation": act, "bias": bias, **changes})


def names(arch: ModelSpec) -> dict[str, str]:
    """The names of the tower's tensors, for models that have CLIP, SigLIP, Pixtral or InternViT."""
    if arch.media is None:
        return {}
    assert isinstance(arch.media.tower, ViTSpec)
    attention, positions = arch.media.tower.layers[0].attention, arch.media.tower.positions
    if positions.leading_ones:
        return _PROJECTOR | _INTERNVL_NAMES
    return SIGLIP_NAMES if attention is None or attention.rope is None else PIXTRAL_NAMES


_TOWER = "model.vision_tower."
_PROJECTOR = {
    "tower.projector.up": "model.multi_modal_projector.linear_1",
    "tower.projector.down": "model.multi_modal_projector.linear_2",
    "tower.projector.norm": "model.multi_modal_projector.layernorm",
    "tower.any_resolution.newline": "model.image_newline",
}


def siglip_names(prefix: str) -> dict[str, str]:
    """CLIP's and SigLIP's."""
    layer = f"{prefix}encoder.layers.{{layer}}."
    return {
        "tower.patches": f"{prefix}embeddings.patch_embedding",
        "tower.positions.class_token": f"{prefix}embeddings.class_embedding",
        "tower.positions.weight": f"{prefix}embeddings.position_embedding.weight",
        "tower.embedding_norm": f"{prefix}pre_layrnorm",
        "tower.layers.attention_norm": f"{layer}layer_norm1",
        "tower.layers.attention.qkv": f"{layer}self_attn.{{part}}_proj",
        "tower.layers.attention.output": f"{layer}self_attn.out_proj",
        "tower.layers.feed_forward_norm": f"{layer}layer_norm2",
        "tower.layers.feed_forward.gate_up": f"{layer}mlp.fc1",
        "tower.layers.feed_forward.down": f"{layer}mlp.fc2",
        "tower.norm": f"{prefix}post_layernorm",
    }


_PIXTRAL_LAYER = f"{_TOWER}transformer.layers.{{layer}}."
PIXTRAL_NAMES = _PROJECTOR | {
    "tower.patches": f"{_TOWER}patch_conv",
    "tower.embedding_norm": f"{_TOWER}ln_pre",
    "tower.layers.attention_norm": f"{_PIXTRAL_LAYER}attention_norm",
    "tower.layers.attention.qkv": f"{_PIXTRAL_LAYER}attention.{{part}}_proj",
    "tower.layers.attention.output": f"{_PIXTRAL_LAYER}attention.o_proj",
    "tower.layers.feed_forward_norm": f"{_PIXTRAL_LAYER}ffn_norm",
    "tower.layers.feed_forward.gate_up": f"{_PIXTRAL_LAYER}feed_forward.{{part}}_proj",
    "tower.layers.feed_forward.down": f"{_PIXTRAL_LAYER}feed_forward.down_proj",
    "tower.projector.patch_norm": "model.multi_modal_projector.norm",
    "tower.projector.merged": "model.multi_modal_projector.patch_merger.merging_layer",
}
_INTERNVL_LAYER = f"{_TOWER}encoder.layer.{{layer}}."
_INTERNVL_NAMES = {
    "tower.patches": f"{_TOWER}embeddings.patch_embeddings.projection",
    "tower.positions.class_token": f"{_TOWER}embeddings.cls_token",
    "tower.positions.weight": f"{_TOWER}embeddings.position_embeddings",
    "tower.layers.attention_norm": f"{_INTERNVL_LAYER}layernorm_before",
    "tower.layers.attention_post_norm.weight": f"{_INTERNVL_LAYER}lambda_1",
    "tower.layers.attention.qkv": f"{_INTERNVL_LAYER}attention.{{part}}_proj",
    "tower.layers.attention.query_norm": f"{_INTERNVL_LAYER}attention.q_norm",
    "tower.layers.attention.key_norm": f"{_INTERNVL_LAYER}attention.k_norm",
    "tower.layers.attention.output": f"{_INTERNVL_LAYER}attention.projection_layer",
    "tower.layers.feed_forward_norm": f"{_INTERNVL_LAYER}layernorm_after",
    "tower.layers.feed_forward_post_norm.weight": f"{_INTERNVL_LAYER}lambda_2",
    "tower.layers.feed_forward.gate_up": f"{_INTERNVL_LAYER}mlp.fc1",
    "tower.layers.feed_forward.down": f"{_INTERNVL_LAYER}mlp.fc2",
    "tower.norm": f"{_TOWER}layernorm",
    "tower.projector.norm": "model.multi_modal_projector.layer_norm",
}
SIGLIP_NAMES = _PROJECTOR | siglip_names(_TOWER)
UNUSED = r"rotary_emb\.inv_freq$|vision_tower\.(vision_model\.)?(head|post_layernorm|(encoder|transformer)\.layers?)\."
"""A pattern of tensors that a tower may have behind its last output."""
