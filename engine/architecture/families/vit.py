"""Plain vision transformers with a projector: what the mappings of vision_config have in common. No torch here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from quire.engine.architecture.families.family import Config, activation, require
from quire.engine.architecture.feed_forward_spec import MLPSpec
from quire.engine.architecture.media_spec import MediaSpec
from quire.engine.architecture.model_spec import LayerSpec, ModelSpec
from quire.engine.architecture.spec_parts import NormSpec, RopeSpec
from quire.engine.architecture.tower_spec import PatchSpec, tower_layer
from quire.engine.architecture.vit_spec import ImagePositionsSpec, ViTSpec
from quire.engine.protocol.errors import ConfigError

DEFAULTS = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12} | {
    "num_channels": 3,
    "image_size": 224,
    "patch_size": 32,
    "hidden_act": "quick_gelu",
    "layer_norm_eps": 1e-5,
}
"""transformers' defaults for CLIP's vision_config, which others share but for a few."""


def tower(
    config: Config, own: Config, *, layer: LayerSpec, outputs: tuple[int, ...] | None = None, **fields: Any
) -> ViTSpec:
    """The tower that `own` describes, vision_config with defaults, for a decoder that `config` describes. `outputs` are
    those of the last layer if nothing is said; `fields` are the other fields."""
    count = int(own["num_hidden_layers"])
    outputs = (count,) if outputs is None else outputs
    used = max(outputs, default=0)  # layers behind the last output are not part of the tower
    layers = (layer,) * (used if 0 < used <= count else count)
    width = int(own["hidden_size"])
    return ViTSpec(hidden_size=int(config["hidden_size"]), width=width, layers=layers, outputs=outputs, **fields)


def tokens(own: Config, *, bias: bool = True, is_linear: bool = False, **changes: Any) -> dict[str, Any]:
    """The fields for the patches and what is added to them; `changes` are fields of `ImagePositionsSpec`."""
    size, channels = side(own["patch_size"]), int(own["num_channels"])
    if "grid" not in changes:
        changes["grid"] = grid(own)
    positions = ImagePositionsSpec(**{"kind": None, **changes})
    shape = (channels * size**2,) if is_linear else (channels, size, size)
    return {"patch": PatchSpec(shape=shape, bias=bias), "side": size, "positions": positions}


def grid(own: Config) -> int:
    """Patches along the side of an image."""
    image, patch = side(own["image_size"]), side(own["patch_size"])
    if not 0 < patch <= image:
        raise ConfigError(f"vision_config: patch_size must be from 1 to image_size {image}, got {patch}")
    return image // patch


def side(value: Any) -> int:
    """A size in pixels, which may be given for height and width."""
    sides = {*value} if isinstance(value, Sequence) else {value}
    if len(sides) > 1:
        raise ConfigError(f"patches and images of {value} pixels, which are not square, are not supported")
    return int(sides.pop())


def layer(own: Config, norm: NormSpec, *, is_gated: bool = False, bias: bool = True, **changes: Any) -> LayerSpec:
    """`changes` are fields of the attention."""
    feed_forward = MLPSpec(
        intermediate_size=int(own["intermediate_size"]),
        activation=activation(own["hidden_act"]),
        is_gated=is_gated,
        bias=bias,
        is_clipped=changes.get("is_clipped", False),
    )
    width, heads = int(own["hidden_size"]), int(own["num_attention_heads"])
    return tower_layer(width, heads, feed_forward, norm, **{"bias": bias, **changes})


def rope(own: Config, *kinds: str, **changes: Any) -> RopeSpec:
    """Rotary positions along two axes. `kinds` are the supported values of rope_type, the default first; without any,
    it is not read. `changes` are fields of the spec."""
    turns = own.get("rope_parameters") or {}
    if kinds:
        require(turns, "rope_type", *kinds)
    theta = float(turns.get("rope_theta") or own.get("rope_theta") or 10000.0)
    dim = int(own["hidden_size"]) // int(own["num_attention_heads"])
    return RopeSpec(**{"theta": theta, "dim": dim, **changes})


def media(config: Config, tower: ViTSpec, token: int, selects: str = "", **changes: Any) -> MediaSpec:
    """`token` is transformers' default for the token of an image, `selects` its default for
    `vision_feature_select_strategy`, if the model has it: a class token must be cut, and nothing else."""
    selects = config.get("vision_feature_select_strategy", selects) if selects else ""
    if selects and (selects == "full") == (tower.positions.class_token is not None):
        raise ConfigError(f"vision_feature_select_strategy {selects!r} is not supported with this vision_config")
    names = ("image_token_id", "image_token_index")
    given = next((config[name] for name in names if config.get(name) is not None), token)
    return MediaSpec(tower=tower, image_token_id=int(given), **changes)


def with_tower(
    media: Callable[[Config], MediaSpec], *, multiplies_features: bool = False
) -> Callable[[ModelSpec, Config], ModelSpec]:
    """What `Family.media` takes, for a function of config.json. `multiplies_features`: the decoder's factor on embedded
    tokens is one on features, too."""

    def add(arch: ModelSpec, config: Config) -> ModelSpec:
        eps = {} if arch.norm is None else {"rms_norm_eps": arch.norm.eps}  # its default depends on the decoder
        spec = media({**config, **eps})
        if multiplies_features:
            assert isinstance(spec.tower, ViTSpec)
            spec = replace(spec, tower=replace(spec.tower, multiplier=arch.embedding_multiplier))
        return replace(arch, media=spec)

    return add
