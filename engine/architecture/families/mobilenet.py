"""The tower of Gemma 3n: MobileNetV5, as timm has it. No torch here."""

from __future__ import annotations

from typing import Any

from quire.engine.architecture.families.family import Config
from quire.engine.architecture.media_spec import MediaSpec
from quire.engine.architecture.mobilenet_spec import (
    BlockSpec,
    EdgeResidualSpec,
    InvertedResidualSpec,
    MobileAttentionSpec,
    MobileNetSpec,
)
from quire.engine.architecture.spec_parts import NormSpec
from quire.engine.protocol.errors import ConfigError

_WIDTH = 2048
_VISION: dict[str, Any] = {"architecture": "mobilenetv5_300m_enc", "hidden_size": _WIDTH, "vocab_size": 128}
_VISION |= {"vocab_offset": 262_144, "rms_norm_eps": 1e-6}


def media(config: Config) -> MediaSpec:
    """Of Gemma 3n."""
    own = {**_VISION, **config["vision_config"]}
    for name in ("architecture", "hidden_size"):
        if own[name] != _VISION[name]:
            raise ConfigError(f"vision_config: {name} {own[name]!r} is not supported; supported: {_VISION[name]!r}")
    arguments = dict(own.get("model_args") or {})
    multiplier = float(arguments.pop("channel_multiplier", 1.0))
    if arguments:
        raise ConfigError(f"vision_config: model_args {', '.join(arguments)} are not supported")
    count = int(config.get("vision_soft_tokens_per_image", 256))
    grid = int(count**0.5)
    if grid != 16 or grid**2 != count:
        raise ConfigError(f"vision_soft_tokens_per_image {count} is not supported; supported: 256")
    tower = MobileNetSpec(
        hidden_size=int(config["hidden_size"]),
        max_features=count,
        side=768,
        stem=64 if multiplier < 1 else _rounded(64, multiplier),
        stages=_stages(multiplier),
        width=_WIDTH,
        grid=grid,
        norm=NormSpec(eps=float(own["rms_norm_eps"])),
        num_tokens=int(own["vocab_size"]),
    )
    first = int(own["vocab_offset"])
    given = config.get("image_token_id")
    return MediaSpec(
        tower=tower,
        image_token_id=262_145 if given is None else int(given),
        own_tokens=range(first, first + tower.num_tokens),
    )


def _stages(multiplier: float) -> tuple[tuple[BlockSpec, ...], ...]:
    """Of the encoder with 300 million parameters; `multiplier` is a factor on channels."""
    first, second, third, fourth = (_rounded(channels, multiplier) for channels in (128, 256, 640, 1280))

    def inverted(outputs: int, expansion: int, start: int = 0, middle: int = 0) -> InvertedResidualSpec:
        stride = 2 if middle else 1
        return InvertedResidualSpec(outputs=outputs, expansion=expansion, start=start, middle=middle, stride=stride)

    def pair(outputs: int, **attention: int) -> tuple[BlockSpec, BlockSpec]:
        return MobileAttentionSpec(outputs=outputs, side=3, **attention), inverted(outputs, 2)

    return (
        tuple(EdgeResidualSpec(outputs=first, side=3, expansion=4, stride=stride) for stride in (2, 1, 1)),
        (inverted(second, 6, 3, 5), *(inverted(second, 4, start) for start in (5, 3, 5, 3))),
        (
            inverted(third, 6, 5, 5),
            *[inverted(third, 4, 5)] * 7,
            inverted(third, 1),
            *pair(third, num_heads=12, head_dim=64, reduction=2) * 14,
        ),
        (inverted(fourth, 6, 5, 5), *pair(fourth, num_heads=16, head_dim=96) * 19),
    )


def _rounded(channels: int, multiplier: float) -> int:
    """A multiple of 8 near the product, at least 0.9 of it."""
    product = channels * multiplier
    found = max(8, int(product + 4) // 8 * 8)
    return found if found >= 0.9 * product else found + 8


_TIMM = "model.vision_tower.timm_model."
_LAYERS = {"start": "dw_start", "expansion": "pw_exp", "middle": "dw_mid", "projection": "pw_proj"}
_BLOCK = {
    "edge": "conv_exp",
    "edge_norm": "bn1",
    "reduction": "conv_pwl",
    "reduction_norm": "bn2",
    **{name: f"{theirs}.conv" for name, theirs in _LAYERS.items()},
    **{f"{name}_norm": f"{theirs}.bn" for name, theirs in _LAYERS.items()},
    "norm": "norm",
    "query": "attn.query.proj",
    **{name: f"attn.{name}.proj" for name in ("key", "value", "output")},
    **{f"{name}_reduction": f"attn.{name}.down_conv" for name in ("key", "value")},
    **{f"{name}_reduction_norm": f"attn.{name}.norm" for name in ("key", "value")},
    "scale.weight": "layer_scale.gamma",
}
NAMES: dict[str, str] = {
    "tower.ends.stem": f"{_TIMM}conv_stem.conv",
    "tower.ends.stem_norm": f"{_TIMM}conv_stem.bn",
    "tower.ends.grid_norm": f"{_TIMM}msfa.norm",
    **{
        f"tower.stage_{stage}.{name}": f"{_TIMM}blocks.{stage}.{{layer}}.{theirs}"
        for stage in range(4)
        for name, theirs in _BLOCK.items()
    },
    **{f"tower.fusion.{name}": f"{_TIMM}msfa.ffn.{theirs}" for name, theirs in _BLOCK.items()},
    "tower.feature_norm": "model.embed_vision.soft_embedding_norm",
    "tower.tokens": "model.embed_vision.embedding",
    "tower.token_norm": "model.embed_vision.hard_embedding_norm",
    "tower.projector": "model.embed_vision.embedding_projection",
}
