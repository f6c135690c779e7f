"""EXAONE 4 and EXAONE MoE: QK norm, and rotary positions only in layers with windows, where there are any."""

from __future__ import annotations

from dataclasses import replace

from quire.engine.architecture.attention_spec import AttentionSpec
from quire.engine.architecture.families.family import (
    Config,
    Family,
    architecture,
    attention,
    feed_forward,
    head_dim,
    require,
    rms_norm,
    rope,
    windows,
)
from quire.engine.architecture.families.moe import NAMES_BY_EXPERT, sigmoid_experts
from quire.engine.architecture.families.olmo import POST_NORM_NAMES
from quire.engine.architecture.families.qwen_next import NEXT_MTP
from quire.engine.architecture.model_spec import LayerSpec, ModelSpec
from quire.engine.protocol.errors import ConfigError


def _attentions(config: Config) -> list[AttentionSpec]:
    """The attention of each layer. A pattern is a period, whose last layer has no window, or a string such as LLLG
    (local, global). With `sliding_windows`, each layer has a window of its own."""
    pattern, count = config.get("sliding_window_pattern") or 0, int(config["num_hidden_layers"])
    sizes = config.get("sliding_windows")
    if sizes and config.get("sliding_window") is None:
        config = {**config, "sliding_window": max(size or 0 for size in sizes)}
    if isinstance(pattern, str):
        is_local = [pattern[number % len(pattern)] == "L" and number < count - 1 for number in range(count)]
    else:
        is_local = [bool(pattern) and (number + 1) % pattern != 0 for number in range(count)]
    kinds = ["sliding_attention" if local else "full_attention" for local in is_local]
    rope_spec, norm = rope(config, head_dim(config)), rms_norm(config)
    found = windows({"layer_types": kinds, **{key: each for key, each in config.items() if each is not None}})
    if sizes:
        if len(sizes) != count:
            raise ConfigError(f"sliding_windows has {len(sizes)} entries, but num_hidden_layers is {count}")
        if wrong := [number for number in range(count) if found[number] is not None and not sizes[number]]:
            raise ConfigError(f"sliding_windows states no window for layers {wrong}, which layer_types gives one")
        found = [None if window is None else int(size) for window, size in zip(found, sizes, strict=True)]
    return [
        attention(
            config,
            rope_spec if config.get("sliding_window") is None or window is not None else None,
            window=window,
            qk_norm=norm,
            qkv_bias=False,
            output_bias=False,
        )
        for window in found
    ]


def _exaone4(name: str, config: Config) -> ModelSpec:
    norm = rms_norm(config)
    layers = [
        LayerSpec(
            attention=each,
            attention_norm=None,
            attention_post_norm=norm,
            feed_forward=feed_forward(config, bias=False),
            feed_forward_norm=None,
            feed_forward_post_norm=norm,
        )
        for each in _attentions(config)
    ]
    return architecture(name, config, layers, norm)


def _exaone_moe(name: str, config: Config) -> ModelSpec:
    """The norms are Llama's, the experts DeepSeek-V3's."""
    for limit in ("swiglu_limits", "swiglu_limit"):
        require(config, limit, None)
    norm, dense, first = rms_norm(config), feed_forward(config, bias=False), int(config["first_k_dense_replace"])
    mixture = sigmoid_experts(
        {**config, "n_routed_experts": config["num_experts"], "n_shared_experts": config["num_shared_experts"]}
    )
    attentions = _attentions(config)
    kinds = config.get("mlp_layer_types") or [
        "dense" if number < first else "sparse" for number in range(len(attentions))
    ]
    layers = [
        LayerSpec(
            attention=each,
            attention_norm=norm,
            feed_forward=mixture if kind == "sparse" else dense,
            feed_forward_norm=norm,
        )
        for each, kind in zip(attentions, kinds, strict=True)
    ]
    return architecture(name, config, layers, norm)


def _mtp(config: Config) -> list[LayerSpec]:
    """The head's layer has no experts, and rotary positions in any case. It has the window of the target's first layer,
    unless config.json states its own."""
    norm, first, kinds = rms_norm(config), _attentions(config)[0], config.get("mtp_layer_types")
    window = first.window
    if kinds:
        require({"mtp_layer_types": kinds[0]}, "mtp_layer_types", "full_attention", "sliding_attention")
        sizes = config.get("mtp_sliding_windows") or [config.get("sliding_window")]
        window = int(sizes[0]) if kinds[0] == "sliding_attention" else None
    attention = replace(first, window=window, rope=rope(config, head_dim(config)))
    dense = feed_forward(config, bias=False)
    return [LayerSpec(attention=attention, attention_norm=norm, feed_forward=dense, feed_forward_norm=norm)]


_COMMON = {
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "num_key_value_heads": 32,
    "sliding_window": 4096,
    "sliding_window_pattern": 4,
}
FAMILIES = {
    "Exaone4ForCausalLM": Family(_exaone4, POST_NORM_NAMES, _COMMON),
    "ExaoneMoeForCausalLM": Family(
        _exaone_moe,
        NAMES_BY_EXPERT
        | {"layers.feed_forward.router.correction_bias": "model.layers.{layer}.mlp.e_score_correction_bias"},
        {
            **_COMMON,
            "first_k_dense_replace": 1,
            "moe_intermediate_size": 1024,
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "num_shared_experts": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
        },
        ignored_prefixes=("mtp.",),
        draft_heads={"mtp": replace(NEXT_MTP, layers=_mtp)},
    ),
}
