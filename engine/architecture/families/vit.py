"""The towers of models that take images: CLIP, SigLIP, Pixtral, InternViT, with their projectors. No torch here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from quire.engine.architecture.encoder_spec import EncoderAttentionSpec
from quire.engine.architecture.families.family import Config, activation, layer_norm, require
from quire.engine.architecture.feed_forward_spec import MLPSpec
from quire.engine.architecture.media_spec import MediaSpec
from quire.engine.architecture.model_spec import LayerSpec, ModelSpec
from quire.engine.architecture.spec_parts import BOUNDS, NormSpec, RopeSpec
from quire.engine.architecture.tower_spec import PatchSpec, tower_layer
from quire.engine.architecture.vit_spec import (
    AnyResolutionSpec,
    ConvolutionsSpec,
    FramedSpec,
    ImagePositionsSpec,
    ProjectorSpec,
    ViTSpec,
    WindowReaderSpec,
)
from quire.engine.protocol.errors import ConfigError


def _own(config: Config, kind: str) -> dict[str, Any]:
    """`vision_config` with transformers' defaults; `kind` is the model_type if it has none."""
    own = config["vision_config"]
    name = own.get("model_type") or kind
    if name not in _KINDS:
        raise ConfigError(
            f"vision_config of model_type {name!r} is not supported (supported: {', '.join(_KINDS)}); "
            "--language-model-only serves text alone"
        )
    return {**_KINDS[name][1], **own, "model_type": name}


def _tower(config: Config, own: Config, **changes: Any) -> ViTSpec:
    """The tower of `_own`. `changes` are the fields that depend on the model: `projector`, `outputs`, `norm` or
    `any_resolution`."""
    count = int(own["num_hidden_layers"])
    fields = {"outputs": (count,), **_KINDS[own["model_type"]][0](own), **changes}
    used = max(fields["outputs"], default=0)  # layers behind the last output are not part of the tower
    layers = (fields.pop("layer"),) * (used if 0 < used <= count else count)
    return ViTSpec(hidden_size=int(config["hidden_size"]), width=int(own["hidden_size"]), layers=layers, **fields)


def _tokens(own: Config, *, bias: bool = True, is_linear: bool = False, **changes: Any) -> dict[str, Any]:
    """The fields for the patches and what is added to them; `changes` are fields of `ImagePositionsSpec`."""
    size, channels = _side(own["patch_size"]), int(own["num_channels"])
    if "grid" not in changes:
        changes["grid"] = _grid(own)
    positions = ImagePositionsSpec(**{"kind": None, **changes})
    shape = (channels * size**2,) if is_linear else (channels, size, size)
    return {"patch": PatchSpec(shape=shape, bias=bias), "side": size, "positions": positions}


def _grid(own: Config) -> int:
    return _side(own["image_size"]) // _side(own["patch_size"])


def _side(value: Any) -> int:
    """A size in pixels, which may be given for height and width."""
    sides = {*value} if isinstance(value, Sequence) else {value}
    if len(sides) > 1:
        raise ConfigError(f"patches and images of {value} pixels, which are not square, are not supported")
    return int(sides.pop())


def _layer(own: Config, norm: NormSpec, *, is_gated: bool = False, bias: bool = True, **changes: Any) -> LayerSpec:
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


def _clip(own: Config) -> dict[str, Any]:
    norm = layer_norm(own["layer_norm_eps"])
    tokens = _tokens(own, bias=False, kind="learned", class_token="first")
    return {**tokens, "embedding_norm": norm, "layer": _layer(own, norm)}


def _siglip(own: Config) -> dict[str, Any]:
    return {**_tokens(own, kind="learned"), "layer": _layer(own, layer_norm(own["layer_norm_eps"]))}


def _any_size_siglip(own: Config) -> dict[str, Any]:
    return {**_tokens(own, kind="fractional"), "layer": _layer(own, layer_norm(own["layer_norm_eps"]))}


def _pixtral(own: Config) -> dict[str, Any]:
    norm = NormSpec(eps=1e-5)
    dim = int(own["hidden_size"]) // int(own["num_attention_heads"])
    turns = own.get("rope_parameters") or {}
    require(turns, "rope_type", "axial", "default")
    require(own, "head_dim", None, dim)
    if dim % 4:
        raise ConfigError(f"heads of {dim} features cannot have rotary positions along two axes")
    rope = RopeSpec(theta=float(turns.get("rope_theta") or own["rope_theta"]), dim=dim)
    layer = _layer(own, norm, is_gated=True, bias=False, rope=rope)
    return {**_tokens(own, bias=False), "embedding_norm": norm, "layer": layer}


def _internvl(own: Config) -> dict[str, Any]:
    require(own, "norm_type", "layer_norm", "rms_norm")
    eps, has_qk_norm = float(own["layer_norm_eps"]), bool(own["use_qk_norm"])
    norm = layer_norm(eps) if own["norm_type"] == "layer_norm" else NormSpec(eps=eps)
    of_qk: dict[str, Any] = {"qk_norm": NormSpec(eps=1e-6), "qk_norm_over": "all heads"} if has_qk_norm else {}
    layer = _layer(own, norm, qkv_bias=bool(own["attention_bias"]), **of_qk)
    scale = NormSpec(eps=0.0, kind="scale")
    kind = "bicubic" if own["use_absolute_position_embeddings"] else None
    return {
        **_tokens(own, kind=kind, class_token="first", leading_ones=1),
        "layer": replace(layer, attention_post_norm=scale, feed_forward_post_norm=scale),
    }


def _siglip2(own: Config) -> dict[str, Any]:
    tokens = _tokens(own, is_linear=True, kind="antialiased", grid=int(int(own["num_patches"]) ** 0.5))
    return {**tokens, "pixels": "patches", "layer": _layer(own, layer_norm(own["layer_norm_eps"]))}


def _paddleocr(own: Config) -> dict[str, Any]:
    turns = own.get("rope_parameters") or {}
    require(turns, "rope_type", "axial")
    dim = int(own["hidden_size"]) // int(own["num_attention_heads"])
    rope = RopeSpec(theta=float(turns.get("rope_theta", 10000.0)), dim=dim)
    return {
        **_tokens(own, kind="bilinear"),
        "pixels": "grids",
        "rotary": "rows first",
        "layer": _layer(own, layer_norm(own["layer_norm_eps"]), rope=rope),
    }


def _llama4(own: Config) -> dict[str, Any]:
    norm = layer_norm(1e-5)
    turns = own.get("rope_parameters") or {}
    dim = int(own["hidden_size"]) // int(own["num_attention_heads"])
    rope = RopeSpec(theta=float(turns.get("rope_theta") or own["rope_theta"]), dim=dim, is_interleaved=True)
    return {
        **_tokens(own, bias=False, is_linear=True, kind="learned", class_token="last"),
        "rotary": "columns first",
        "embedding_norm": norm,
        "layer": _layer({**own, "hidden_act": "gelu"}, norm, rope=rope),
        "norm": norm,
    }


def _gemma4(own: Config) -> dict[str, Any]:
    norm, dim = NormSpec(eps=float(own["rms_norm_eps"])), int(own["head_dim"])
    turns = own.get("rope_parameters") or {}
    require(turns, "rope_type", "axial", "default")
    require(own, "attention_bias", None, False)
    layer = _layer(
        {**own, "hidden_act": own["hidden_activation"]},
        norm,
        is_gated=True,
        bias=False,
        is_clipped=bool(own["use_clipped_linears"]),
        num_kv_heads=int(own["num_key_value_heads"]),
        head_dim=dim,
        scale=1.0,
        rope=RopeSpec(theta=float(turns.get("rope_theta", 100.0)), dim=dim),
        qk_norm=norm,
        value_norm=replace(norm, has_weight=False),
    )
    return {
        **_tokens(own, bias=False, is_linear=True, kind="axes", grid=int(own["position_embedding_size"])),
        "pixels": "placed patches",
        "rotary": "columns first, in halves",
        "layer": replace(layer, attention_post_norm=norm, feed_forward_post_norm=norm),
    }


def _kimi(own: Config) -> dict[str, Any]:
    norm, dim = layer_norm(1e-5), int(own["hidden_size"]) // int(own["num_attention_heads"])
    require(own, "pos_emb_width", own["pos_emb_height"])
    turns = own.get("rope_parameters") or {}
    require(turns, "rope_type", "axial")
    rope = RopeSpec(theta=float(turns.get("rope_theta", 10000.0)), dim=dim, is_interleaved=True)
    return {
        **_tokens(own, kind="bicubic", grid=int(own["pos_emb_height"]), is_square=True),
        "pixels": "grids",
        "joins_frames": True,
        "rotary": "by turns",
        "layer": _layer(own, norm, rope=rope),
        "norm": norm,
    }


def _hunyuan(own: Config) -> dict[str, Any]:
    norm = layer_norm(own["rms_norm_eps"])
    require(own, "interpolate_mode", "bilinear", "bicubic")
    require(own, "temporal_patch_size", 1)
    grid = int(own["max_image_size"]) // _side(own["patch_size"])
    return {
        **_tokens(own, kind=own["interpolate_mode"], grid=grid, unused=1),
        "pixels": "grids",
        "layer": _layer(own, norm),
    }


def _step(own: Config) -> dict[str, Any]:
    norm, scale = layer_norm(own["layer_norm_eps"]), NormSpec(eps=0.0, kind="scale")
    dim = int(own["hidden_size"]) // int(own["num_attention_heads"])
    turns = own.get("rope_parameters") or {}
    rope = RopeSpec(theta=float(turns.get("rope_theta") or 10000.0), dim=dim, is_interleaved=True)
    layer = _layer({**own, "intermediate_size": int(own["hidden_size"] * own["mlp_ratio"])}, norm, rope=rope)
    return {
        **_tokens(own, bias=False, kind="bilinear"),
        "rotary": "columns first",
        "embedding_norm": norm,
        "layer": replace(layer, attention_post_norm=scale, feed_forward_post_norm=scale),
    }


_CLIP = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12} | {
    "num_channels": 3,
    "image_size": 224,
    "patch_size": 32,
    "hidden_act": "quick_gelu",
    "layer_norm_eps": 1e-5,
}
_SIGLIP = _CLIP | {"patch_size": 16, "hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6}
_IDEFICS = _SIGLIP | {"hidden_size": 1152, "num_attention_heads": 16, "patch_size": 32}
_LARGE = _CLIP | {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16}
_PIXTRAL = _LARGE | {"image_size": 1024, "patch_size": 16, "hidden_act": "gelu", "rope_theta": 10000.0}
_INTERNVL = (
    _LARGE
    | {"image_size": 448, "patch_size": 14, "hidden_act": "gelu", "layer_norm_eps": 1e-6, "norm_type": "layer_norm"}
    | {"attention_bias": False, "use_qk_norm": False, "use_absolute_position_embeddings": True}
    | {"use_mean_pooling": True}
)
_SIGLIP2 = _SIGLIP | {"num_patches": 256}
_LLAMA4 = (
    _CLIP
    | {"intermediate_size": 5632, "num_hidden_layers": 34, "num_attention_heads": 16, "image_size": 448}
    | {"patch_size": 14, "projector_input_dim": 4096, "projector_output_dim": 4096, "pixel_shuffle_ratio": 0.5}
    | {"rope_theta": 10000.0}
)
_GEMMA4 = (
    _CLIP
    | {"num_hidden_layers": 16, "num_key_value_heads": 12, "head_dim": 64, "hidden_activation": "gelu_pytorch_tanh"}
    | {"rms_norm_eps": 1e-6, "patch_size": 16, "pooling_kernel_size": 3, "position_embedding_size": 10240}
    | {"use_clipped_linears": False, "standardize": False}
)
_KIMI = _CLIP | {"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16}
_KIMI |= {"hidden_act": "gelu_pytorch_tanh", "patch_size": 14, "pos_emb_height": 64, "pos_emb_width": 64}
_STEP = {
    "hidden_size": 1536,
    "num_hidden_layers": 47,
    "num_attention_heads": 16,
    "num_channels": 3,
    "image_size": 728,
} | {"patch_size": 14, "hidden_act": "quick_gelu", "layer_norm_eps": 1e-5, "mlp_ratio": 8960 / 1536}
_STEP_NAMES = {"width": "hidden_size", "layers": "num_hidden_layers", "heads": "num_attention_heads"}
_HUNYUAN = _KIMI | {"patch_size": 16, "hidden_act": "gelu", "rms_norm_eps": 1e-5, "max_image_size": 2048}
_HUNYUAN |= {"interpolate_mode": "bilinear", "temporal_patch_size": 1, "spatial_merge_size": 2}
_PADDLEOCR = _IDEFICS | {"intermediate_size": 4304, "num_hidden_layers": 27, "image_size": 384, "patch_size": 14}
_PADDLEOCR |= {"spatial_merge_size": 2}
_KINDS: dict[str, tuple[Callable[[Config], dict[str, Any]], Mapping[str, Any]]] = {
    "clip_vision_model": (_clip, _CLIP),
    "siglip_vision_model": (_siglip, _SIGLIP),
    "idefics3_vision": (_any_size_siglip, _IDEFICS),
    "idefics3": (_any_size_siglip, _IDEFICS),
    "smolvlm_vision": (_any_size_siglip, _IDEFICS),
    "pixtral": (_pixtral, _PIXTRAL),
    "internvl_vision": (_internvl, _INTERNVL),
    "siglip2_vision_model": (_siglip2, _SIGLIP2),
    "llama4_vision_model": (_llama4, _LLAMA4),
    "gemma4_vision": (_gemma4, _GEMMA4),
    "paddleocr_vl": (_paddleocr, _PADDLEOCR),
    "paddleocr_vl_vision": (_paddleocr, _PADDLEOCR),
    "kimi_k25_vision": (_kimi, _KIMI),
    "step3p5_vision": (_step, _STEP),
    "hunyuan_vl_vision": (_hunyuan, _HUNYUAN),
}
"""By `model_type`: the fields of `ViTSpec`, with one `layer`; and transformers' defaults."""


def _outputs(config: Config, own: Config, default: int) -> tuple[int, ...]:
    """The layers whose outputs `vision_feature_layer` names; negative numbers count from the last output."""
    named = config.get("vision_feature_layer", default)
    numbers = [int(each) for each in (named if isinstance(named, Sequence) else [named])]
    return tuple(int(own["num_hidden_layers"]) + 1 + each if each < 0 else each for each in numbers)


def _two_layers(config: Config, **changes: Any) -> ProjectorSpec:
    """A projector with an inner layer as large as its output."""
    act = activation(config.get("projector_hidden_act") or "gelu")
    bias = bool(config.get("multimodal_projector_bias", True))
    return ProjectorSpec(**{"inner_size": int(config["hidden_size"]), "activation": act, "bias": bias, **changes})


def _media(config: Config, tower: ViTSpec, token: int, selects: str = "", **changes: Any) -> MediaSpec:
    """`token` is transformers' default for the token of an image, `selects` its default for
    `vision_feature_select_strategy`, if the model has it: a class token must be cut, and nothing else."""
    selects = config.get("vision_feature_select_strategy", selects) if selects else ""
    if selects and (selects == "full") == (tower.positions.class_token is not None):
        raise ConfigError(f"vision_feature_select_strategy {selects!r} is not supported with this vision_config")
    names = ("image_token_id", "image_token_index")
    given = next((config[name] for name in names if config.get(name) is not None), token)
    return MediaSpec(tower=tower, image_token_id=int(given), **changes)


def llava(config: Config) -> MediaSpec:
    """LLaVA, and Pixtral in its format."""
    own = _own(config, "clip_vision_model")
    tower = _tower(config, own, outputs=_outputs(config, own, -2), projector=_two_layers(config))
    if tower.positions.kind == "learned":
        tower = replace(tower, max_features=tower.positions.grid**2)
    return _media(config, tower, 32000, "default")


def llava_next(config: Config) -> MediaSpec:
    own = _own(config, "clip_vision_model")
    sizes = config.get("image_grid_pinpoints") or [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]
    resolution = AnyResolutionSpec(sizes=_sizes(sizes), tile=_side(own["image_size"]))
    fields = {"outputs": _outputs(config, own, -2), "projector": _two_layers(config)}
    return _media(config, _tower(config, own, **fields, any_resolution=resolution), 32000, "default")


def granite4(config: Config) -> MediaSpec:
    """Parts of features for the input of several of the decoder's layers, the first of which replaces the embedding."""
    own = _own(config, "clip_vision_model")
    sizes = config.get("image_grid_pinpoints") or [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]
    resolution = AnyResolutionSpec(sizes=_sizes(sizes), tile=_side(own["image_size"]))
    width, count = int(own["hidden_size"]), int(own["num_hidden_layers"])
    queries, window = (int(each) for each in str(config["downsample_rate"]).split("/"))
    pairs = [(int(layer), int(target)) for layer, target in config["deepstack_layer_map"]]
    samples = [int(each) for each in config.get("spatial_target_layers") or (12, 15, 18, 21)]
    targets = [target for _, target in pairs] + samples
    if len(samples) != 4 or len({*targets}) < len(targets) or 0 not in targets:
        raise ConfigError(
            "deepstack_layer_map and spatial_target_layers must name different layers, the first of the decoder and "
            f"4 in spatial_target_layers; they name {targets}"
        )
    inner: dict[str, Any] = {"num_hidden_layers": 1, "intermediate_size": 3072, "hidden_act": "gelu"}
    inner |= {"layer_norm_eps": 1e-12} | dict(config.get("qformer_config") or {})
    require(inner, "num_hidden_layers", 1)
    require(inner, "use_qformer_text_input", False)
    if width % 64:
        raise ConfigError(f"vision_config: hidden_size {width} is not a multiple of 64, the size of heads")
    eps = layer_norm(inner["layer_norm_eps"])
    reader = _layer({**inner, "hidden_size": width, "num_attention_heads": width // 64}, eps)
    assert isinstance(reader.attention, EncoderAttentionSpec)
    assert isinstance(reader.feed_forward, MLPSpec)
    projector = WindowReaderSpec(
        grid=_grid(own),
        window=window,
        queries=queries,
        num_averaged=len(pairs),
        num_sampled=len(samples),
        attention=reader.attention,
        feed_forward=reader.feed_forward,
        inner_norm=eps,
        norm=layer_norm(1e-6),
    )
    layers = [layer for layer, _ in pairs] + [int(config.get("spatial_vision_layer", -1))] * len(samples)
    outputs = tuple(count + 1 + each if each < 0 else each for each in layers)
    fields = {"outputs": outputs, "projector": projector, "any_resolution": resolution}
    if targets[0] != 0:
        raise ConfigError(f"deepstack_layer_map must begin with a layer for layer 0, not {pairs[0]}")
    tower = _tower(
        config,
        own,
        **fields,
        num_levels=len(targets) - 1,
        level_layers=tuple(target - 1 for target in targets[1:]),
    )
    return _media(config, tower, 32000, "default")


def llava_onevision(config: Config) -> MediaSpec:
    own = _own(config, "siglip_vision_model")
    limit = str(config.get("vision_aspect_ratio", "anyres_max_9")).removeprefix("anyres_max_")
    if not limit.isdigit():
        raise ConfigError(f"vision_aspect_ratio {limit!r} is not supported; supported: anyres_max_ and a number")
    sizes = config.get("image_grid_pinpoints") or [[384 * a, 384 * b] for a in range(1, 7) for b in range(1, 7)]
    resolution = AnyResolutionSpec(
        sizes=_sizes(sizes),
        tile=_side(own["image_size"]),
        max_tiles=int(limit),
        video_side=-(-_grid(own) // 2),
    )
    fields = {"outputs": _outputs(config, own, -1), "projector": _two_layers(config)}
    video = next((config[name] for name in ("video_token_id", "video_token_index") if name in config), 151647)
    tower = _tower(config, own, **fields, any_resolution=resolution)
    return _media(config, tower, 151646, "full", video_token_id=int(video))


def _sizes(pairs: Any) -> tuple[tuple[int, int], ...]:
    return tuple((int(height), int(width)) for height, width in pairs)


def internvl(config: Config) -> MediaSpec:
    """Videos are frames whose features replace the token of images."""
    own = _own(config, "internvl_vision")
    # The norm after the last layer is part of its output only under the name -1.
    is_last = config.get("vision_feature_layer", -1) == -1
    norm = layer_norm(own["layer_norm_eps"]) if is_last and not own["use_mean_pooling"] else None
    projector = _two_layers(
        config, side=round(1 / float(config.get("downsample_ratio", 0.5))), norm=layer_norm(1e-5), bias=True
    )
    tower = _tower(config, own, outputs=_outputs(config, own, -1), norm=norm, projector=projector)
    media = _media(config, tower, 151667, "default")
    return replace(media, video_token_id=media.image_token_id)


def idefics3(config: Config) -> MediaSpec:
    own = _own(config, "idefics3_vision")
    projector = ProjectorSpec(side=int(config.get("scale_factor", 2)), bias=False)
    tower = _tower(config, own, norm=layer_norm(own["layer_norm_eps"]), projector=projector)
    return _media(config, tower, 128257)


def smolvlm(config: Config) -> MediaSpec:
    """Videos are frames whose features replace the token of images."""
    media = idefics3(config)
    return replace(media, video_token_id=media.image_token_id)


def mistral3(config: Config) -> MediaSpec:
    """Mistral Small 3, Ministral 3, Mistral 4 and LightOnOCR."""
    own = _own(config, "pixtral")
    outputs = _outputs(config, own, -1)
    if len(outputs) > 1:
        raise ConfigError("vision_feature_layer with several layers is not supported")
    projector = _two_layers(
        config,
        patch_norm=NormSpec(eps=float(config["rms_norm_eps"])),
        side=int(config.get("spatial_merge_size", 2)),
        merging="channels",
        merged_size=int(own["hidden_size"]),
        bias=bool(config.get("multimodal_projector_bias", False)),
    )
    return _media(config, _tower(config, own, outputs=outputs, projector=projector), 10)


def gemma3(config: Config) -> MediaSpec:
    """The tokens of an image attend to each other in both directions."""
    own = _own(config, "siglip_vision_model")
    eps, grid = float(own["layer_norm_eps"]), _grid(own)
    side = grid // int(int(config.get("mm_tokens_per_image", 256)) ** 0.5)
    projector = ProjectorSpec(side=side, merging="mean", norm=NormSpec(eps=eps, offset=1.0), bias=False)
    run = (grid // side) ** 2
    most = run * 5  # with four crops of the image (pan and scan)
    tower = _tower(config, own, norm=layer_norm(eps), projector=projector, max_features=most)
    return _media(config, tower, 262144, is_bidirectional=True, run_length=run)


def gemma4(config: Config) -> MediaSpec:
    """With bidirectional attention, the tokens of an image attend to each other in layers with a window."""
    own = _own(config, "gemma4_vision")
    projector = ProjectorSpec(
        side=int(own["pooling_kernel_size"]),
        merging="mean",
        multiplier=int(own["hidden_size"]) ** 0.5,
        standardizes=bool(own["standardize"]),
        norm=NormSpec(eps=float(own["rms_norm_eps"]), has_weight=False),
        bias=False,
    )
    is_bidirectional = config.get("use_bidirectional_attention") == "vision"
    return _media(
        config,
        _tower(config, own, projector=projector),
        258880,
        video_token_id=int(config.get("video_token_id") or 258884),
        is_bidirectional=is_bidirectional,
        is_causal_without_window=is_bidirectional,
        layer_input_token_id=int(config.get("pad_token_id") or 0) if config["hidden_size_per_layer_input"] else None,
    )


def lfm2_vl(config: Config) -> MediaSpec:
    own = _own(config, "siglip2_vision_model")
    projector = ProjectorSpec(
        side=int(config.get("downsample_factor", 2)),
        norm=layer_norm(1e-5) if config.get("projector_use_layernorm", True) else None,
        inner_size=int(config.get("projector_hidden_size", 2560)),
        activation=activation(config.get("projector_hidden_act") or "gelu"),
        bias=bool(config.get("projector_bias", True)),
    )
    return _media(config, _tower(config, own, norm=layer_norm(own["layer_norm_eps"]), projector=projector), 396)


def llama4(config: Config) -> MediaSpec:
    own = _own(config, "llama4_vision_model")
    inner = int(own["projector_input_dim"])
    require(own, "projector_output_dim", inner)
    require(own, "vision_output_dim", inner)
    projector = ProjectorSpec(
        side=round(1 / float(own["pixel_shuffle_ratio"])),
        merged_size=inner,
        activates_merged=True,
        inner_size=inner,
        bias=False,
    )
    return _media(config, _tower(config, own, projector=projector), 200092)


_KIMI_NAMES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


def kimi_k25(config: Config) -> MediaSpec:
    """config.json has the names of its publisher, or of transformers."""
    vision = config["vision_config"]
    renamed = {name: vision[f"vt_{name}"] for name in _KIMI_NAMES if f"vt_{name}" in vision}
    renamed |= {
        f"pos_emb_{axis}": vision[f"init_pos_emb_{axis}"]
        for axis in ("height", "width")
        if f"init_pos_emb_{axis}" in vision
    }
    own = _own({**config, "vision_config": {**vision, **renamed, "model_type": "kimi_k25_vision"}}, "")
    side, width = _side(vision.get("merge_kernel_size", 2)), int(own["hidden_size"])
    eps = config.get("projection_layer_norm_eps") or vision.get("projector_ln_eps") or 1e-5
    projector = ProjectorSpec(side=side, patch_norm=layer_norm(eps), inner_size=width * side**2)
    tower = _tower(config, own, projector=projector)
    token = int(config.get("media_placeholder_token_id") or 163605)
    video = int(config.get("video_token_id") or 163840)
    return _media(config, tower, token, video_token_id=video)


def step37(config: Config) -> MediaSpec:
    """vision_config has the names of its publisher, or of transformers."""
    vision = config["vision_config"]
    renamed = {name: vision[own] for own, name in _STEP_NAMES.items() if own in vision}
    own = _own({**config, "vision_config": {**vision, **renamed, "model_type": "step3p5_vision"}}, "")
    projector = ConvolutionsSpec(bias=bool(config.get("projector_bias", False)))
    return _media(config, _tower(config, own, projector=projector), 151679)


def hunyuan(config: Config) -> MediaSpec:
    """Without the positions of tokens."""
    own = _own(config, "hunyuan_vl_vision")
    projector = FramedSpec(
        side=int(own["spatial_merge_size"]),
        activation=activation(own["hidden_act"]),
        norm=NormSpec(eps=float(own["rms_norm_eps"])),
    )
    return _media(config, _tower(config, own, projector=projector), 120120)


def paddleocr(config: Config) -> MediaSpec:
    own = _own(config, "paddleocr_vl_vision")
    side, width = int(own["spatial_merge_size"]), int(own["hidden_size"])
    projector = ProjectorSpec(side=side, patch_norm=layer_norm(1e-5), inner_size=width * side**2)
    return _media(config, _tower(config, own, norm=layer_norm(own["layer_norm_eps"]), projector=projector), 100295)


def aya_vision(config: Config) -> MediaSpec:
    own = _own(config, "siglip_vision_model")
    projector = _gated(config, norm=layer_norm(config.get("adapter_layer_norm_eps", 1e-6)))
    tower = _tower(config, own, outputs=_outputs(config, own, -1), projector=projector)
    return _media(config, tower, 255036, "full")


def cohere2_vision(config: Config) -> MediaSpec:
    own = _own(config, "siglip_vision_model")
    projector = _gated({"alignment_intermediate_size": 36864, **config})
    return _media(config, _tower(config, own, norm=layer_norm(own["layer_norm_eps"]), projector=projector), 255036)


def _gated(config: Config, **changes: Any) -> ProjectorSpec:
    inner = int(config.get("alignment_intermediate_size") or config["hidden_size"])
    if inner % 2:
        raise ConfigError(f"alignment_intermediate_size {inner} is not even")
    side = int(config.get("downsample_factor", 2))
    return ProjectorSpec(side=side, inner_size=inner // 2, activation="silu", is_gated=True, **changes)


_TOWER = "model.vision_tower."
_PROJECTOR = {
    "tower.projector.up": "model.multi_modal_projector.linear_1",
    "tower.projector.down": "model.multi_modal_projector.linear_2",
    "tower.projector.norm": "model.multi_modal_projector.layernorm",
    "tower.any_resolution.newline": "model.image_newline",
}


def _siglip_names(prefix: str) -> dict[str, str]:
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
_PIXTRAL_NAMES = {
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


def with_tower(
    media: Callable[[Config], MediaSpec], *, multiplies_features: bool = False
) -> Callable[[ModelSpec, Config], ModelSpec]:
    """What `Family.media` takes, for a function above. `multiplies_features`: the decoder's factor on embedded
    tokens is one on features, too."""

    def add(arch: ModelSpec, config: Config) -> ModelSpec:
        eps = {} if arch.norm is None else {"rms_norm_eps": arch.norm.eps}  # its default depends on the decoder
        spec = media({**config, **eps})
        if multiplies_features:
            assert isinstance(spec.tower, ViTSpec)
            spec = replace(spec, tower=replace(spec.tower, multiplier=arch.embedding_multiplier))
        return replace(arch, media=spec)

    return add


def names(arch: ModelSpec) -> dict[str, str]:
    """The names of the tower's tensors, for models that have CLIP, SigLIP, Pixtral or InternViT."""
    if arch.media is None:
        return {}
    assert isinstance(arch.media.tower, ViTSpec)
    attention, positions = arch.media.tower.layers[0].attention, arch.media.tower.positions
    if positions.leading_ones:
        return _PROJECTOR | _INTERNVL_NAMES
    return SIGLIP_NAMES if attention is None or attention.rope is None else _PROJECTOR | _PIXTRAL_NAMES


LIGHTON_OCR_NAMES = {
    module: name.replace(".vision_tower.", ".vision_encoder.").replace(".multi_modal_projector.", ".vision_projection.")
    for module, name in (_PROJECTOR | _PIXTRAL_NAMES).items()
}
SIGLIP_NAMES = _PROJECTOR | _siglip_names(_TOWER)
GEMMA3_NAMES = SIGLIP_NAMES | {
    "tower.projector.down.weight": "model.multi_modal_projector.mm_input_projection_weight",
    "tower.projector.norm": "model.multi_modal_projector.mm_soft_emb_norm",
}
IDEFICS3_NAMES = _siglip_names("model.vision_model.") | {
    "tower.projector.down": "model.connector.modality_projection.proj"
}
LFM2_NAMES = SIGLIP_NAMES | {"tower.projector.norm": "model.multi_modal_projector.layer_norm"}
_LLAMA4_LAYER = "vision_model.model.layers.{layer}."
LLAMA4_NAMES = {
    "tower.patches": "vision_model.patch_embedding.linear",
    "tower.positions.class_token": "vision_model.class_embedding",
    "tower.positions.weight": "vision_model.positional_embedding_vlm",
    "tower.embedding_norm": "vision_model.layernorm_pre",
    "tower.layers.attention_norm": f"{_LLAMA4_LAYER}input_layernorm",
    "tower.layers.attention.qkv": f"{_LLAMA4_LAYER}self_attn.{{part}}_proj",
    "tower.layers.attention.output": f"{_LLAMA4_LAYER}self_attn.o_proj",
    "tower.layers.feed_forward_norm": f"{_LLAMA4_LAYER}post_attention_layernorm",
    "tower.layers.feed_forward.gate_up": f"{_LLAMA4_LAYER}mlp.fc1",
    "tower.layers.feed_forward.down": f"{_LLAMA4_LAYER}mlp.fc2",
    "tower.norm": "vision_model.layernorm_post",
    "tower.projector.merged": "vision_model.vision_adapter.mlp.fc1",
    "tower.projector.up": "vision_model.vision_adapter.mlp.fc2",
    "tower.projector.down": "multi_modal_projector.linear_1",
}
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


def _reader_names(ours: str, theirs: str) -> dict[str, str]:
    reader, layer = f"model.{theirs}.{{layer}}.", f"model.{theirs}.{{layer}}.qformer.encoder.layer.0."
    names = {
        "norm": f"{reader}norm",
        "tokens.queries": f"{reader}query",
        "tokens.places": f"{reader}image_positions",
        "input_norm": f"{reader}qformer.layernorm",
        **{f"attention.qkv.{p}": f"{layer}attention.attention.{name}" for p, name in zip("qkv", _QKV, strict=True)},
        "attention.output": f"{layer}attention.output.dense",
        "attention_norm": f"{layer}attention.output.LayerNorm",
        "cross.query": f"{layer}crossattention.attention.query",
        **{f"cross.kv.{p}": f"{layer}crossattention.attention.{name}" for p, name in zip("kv", _QKV[1:], strict=True)},
        "cross.output": f"{layer}crossattention.output.dense",
        "cross_norm": f"{layer}crossattention.output.LayerNorm",
        "feed_forward.gate_up": f"{layer}intermediate_query.dense",
        "feed_forward.down": f"{layer}output_query.dense",
        "feed_forward_norm": f"{layer}output_query.LayerNorm",
        "down": f"{reader}out_linear",
    }
    return {f"tower.projector.{ours}.{module}": name for module, name in names.items()}


_QKV = ("query", "key", "value")
GRANITE4_NAMES = (
    SIGLIP_NAMES | _reader_names("averaged", "layerwise_projectors") | _reader_names("sampled", "spatial_projectors")
)
_KIMI_LAYER = "vision_tower.encoder.blocks.{layer}."
_STEP_LAYER = "vision_model.transformer.resblocks.{layer}."
STEP37_NAMES = {
    "tower.patches": "vision_model.conv1",
    "tower.positions.weight": "vision_model.positional_embedding",
    "tower.embedding_norm": "vision_model.ln_pre",
    "tower.layers.attention_norm": f"{_STEP_LAYER}ln_1",
    "tower.layers.attention.qkv.weight": f"{_STEP_LAYER}attn.in_proj_weight",
    "tower.layers.attention.qkv.bias": f"{_STEP_LAYER}attn.in_proj_bias",
    "tower.layers.attention.output": f"{_STEP_LAYER}attn.out_proj",
    "tower.layers.attention_post_norm.weight": f"{_STEP_LAYER}ls_1.gamma",
    "tower.layers.feed_forward_norm": f"{_STEP_LAYER}ln_2",
    "tower.layers.feed_forward.gate_up": f"{_STEP_LAYER}mlp.c_fc",
    "tower.layers.feed_forward.down": f"{_STEP_LAYER}mlp.c_proj",
    "tower.layers.feed_forward_post_norm.weight": f"{_STEP_LAYER}ls_2.gamma",
    "tower.projector.first": "vision_model.vit_downsampler1",
    "tower.projector.second": "vision_model.vit_downsampler2",
    "tower.projector.down": "vit_large_projector",
}
KIMI_K25_NAMES = {
    "tower.patches": "vision_tower.patch_embed.proj",
    "tower.positions": "vision_tower.patch_embed.pos_emb",
    "tower.layers.attention_norm": f"{_KIMI_LAYER}norm0",
    "tower.layers.attention.qkv": f"{_KIMI_LAYER}wqkv",
    "tower.layers.attention.output": f"{_KIMI_LAYER}wo",
    "tower.layers.feed_forward_norm": f"{_KIMI_LAYER}norm1",
    "tower.layers.feed_forward.gate_up": f"{_KIMI_LAYER}mlp.fc0",
    "tower.layers.feed_forward.down": f"{_KIMI_LAYER}mlp.fc1",
    "tower.norm": "vision_tower.encoder.final_layernorm",
    "tower.projector.patch_norm": "model.mm_projector.pre_norm",
    "tower.projector.up": "mm_projector.proj.0",
    "tower.projector.down": "mm_projector.proj.2",
}
_HUNYUAN_LAYER = "vit.layers.{layer}."
HUNYUAN_NAMES = {
    "tower.patches": "vit.embeddings.patch_embedding",
    "tower.positions.weight": "vit.embeddings.position_embedding.weight",
    "tower.layers.attention_norm": f"{_HUNYUAN_LAYER}input_layernorm",
    "tower.layers.attention.qkv": f"{_HUNYUAN_LAYER}self_attn.{{part}}_proj",
    "tower.layers.attention.output": f"{_HUNYUAN_LAYER}self_attn.o_proj",
    "tower.layers.feed_forward_norm": f"{_HUNYUAN_LAYER}post_attention_layernorm",
    "tower.layers.feed_forward.gate_up": f"{_HUNYUAN_LAYER}mlp.dense_h_to_4h",
    "tower.layers.feed_forward.down": f"{_HUNYUAN_LAYER}mlp.dense_4h_to_h",
    "tower.projector.patch_norm": "vit.perceive.before_rms",
    "tower.projector.first": "vit.perceive.proj.0",
    "tower.projector.second": "vit.perceive.proj.2",
    "tower.projector.down": "vit.perceive.mlp",
    **{f"tower.projector.marks.{kind}": f"vit.perceive.image_{kind}" for kind in ("newline", "begin", "end")},
    "tower.projector.norm": "vit.perceive.after_rms",
}
PADDLEOCR_NAMES = _siglip_names("visual.vision_model.") | {
    "tower.projector.patch_norm": "mlp_AR.pre_norm",
    "tower.projector.up": "mlp_AR.linear_1",
    "tower.projector.down": "mlp_AR.linear_2",
}
UNUSED = r"rotary_emb\.inv_freq$|vision_tower\.(vision_model\.)?(head|post_layernorm|(encoder|transformer)\.layers?)\."
"""A pattern of tensors that a tower may have behind its last output."""
