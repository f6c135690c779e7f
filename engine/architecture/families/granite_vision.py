"""Granite Vision 4: parts of the features are added to the input of several of the decoder's layers."""

from __future__ import annotations

from typing import Any

from quire.engine.architecture.encoder_spec import EncoderAttentionSpec
from quire.engine.architecture.families import llama, llava, towers, vit
from quire.engine.architecture.families.family import NOT_TEXT, Config, Family, layer_norm, of_multimodal, require
from quire.engine.architecture.feed_forward_spec import MLPSpec
from quire.engine.architecture.media_spec import MediaSpec
from quire.engine.architecture.model_spec import ModelSpec
from quire.engine.architecture.vit_spec import WindowReaderSpec
from quire.engine.protocol.errors import ConfigError


def _granite4(name: str, config: Config) -> ModelSpec:
    return llava.text(name, {**config, "model_type": "granite"})


def _media(config: Config) -> MediaSpec:
    """Parts of features for the input of several of the decoder's layers, the first of which replaces the embedding."""
    own, fields = towers.settings(config, "clip_vision_model")
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
    reader = vit.layer({**inner, "hidden_size": width, "num_attention_heads": width // 64}, eps)
    assert isinstance(reader.attention, EncoderAttentionSpec)
    assert isinstance(reader.feed_forward, MLPSpec)
    projector = WindowReaderSpec(
        grid=vit.grid(own),
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
    if targets[0] != 0:
        raise ConfigError(f"deepstack_layer_map must begin with a layer for layer 0, not {pairs[0]}")
    tower = vit.tower(
        config,
        own,
        **fields,
        outputs=outputs,
        projector=projector,
        any_resolution=llava.any_resolution(config, own),
        num_levels=len(targets) - 1,
        level_layers=tuple(target - 1 for target in targets[1:]),
    )
    return vit.media(config, tower, 32000, "default")


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
_TOWER_NAMES = (
    towers.SIGLIP_NAMES
    | _reader_names("averaged", "layerwise_projectors")
    | _reader_names("sampled", "spatial_projectors")
)
FAMILIES = {
    "Granite4VisionForConditionalGeneration": Family(
        _granite4,
        of_multimodal(llama.NAMES) | _TOWER_NAMES,
        ignored_prefixes=(*NOT_TEXT, "model.image_newline", "model.layerwise_projectors.", "model.spatial_projectors."),
        ignored_pattern=towers.UNUSED,
        media=vit.with_tower(_media),
    )
}
