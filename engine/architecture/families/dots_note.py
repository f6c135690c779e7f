"""dots3-note: DeepSeek V3.2's layers beside others with windows and sizes of their own, with gated outputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quire.engine.architecture.attention_spec import IndexerSpec, MLASpec
from quire.engine.architecture.families import deepseek
from quire.engine.architecture.families.family import (
    NOT_TEXT,
    Config,
    Family,
    architecture,
    feed_forward,
    layer_norm,
    layers_by_kind,
    rms_norm,
    rope,
)
from quire.engine.architecture.families.moe import sigmoid_experts
from quire.engine.architecture.feed_forward_spec import MLPSpec, MoESpec
from quire.engine.architecture.model_spec import ModelSpec
from quire.engine.protocol.errors import ConfigError

_SLIDING, _FULL, _INDEXED = "sliding_attention", "full_attention", "indexed_attention"
_WINDOW_SIZES = {
    "num_attention_heads": 64,
    "q_lora_rank": 1024,
    "kv_lora_rank": 1024,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
"""Default sizes of layers with windows."""
_BY_LAYER = {
    *_WINDOW_SIZES,
    "num_key_value_heads", "head_dim", "attention_bias",  # transformers checks the values of the first two
    "sliding_window", "index_n_heads", "index_head_dim", "index_topk",
}  # fmt: skip
"""Settings that `per_layer_config` may state."""
_THETAS = {_SLIDING: ("swa_rope_theta", 50000.0), _FULL: ("rope_theta", 8e7), _INDEXED: ("rope_theta", 8e7)}


def _dots3_note(name: str, config: Config) -> ModelSpec:
    norm, kinds = rms_norm(config), _kinds(config)
    mixers = {kind: {"attention": _attention(config, kinds, kind)} for kind in sorted(set(kinds))}
    layers = layers_by_kind(kinds, mixers, _feed_forwards(config), attention_norm=norm, feed_forward_norm=norm)
    return architecture(name, config, layers, norm)


def _kinds(config: Config) -> list[str]:
    """The kind of each layer. In published files, full attention is the indexed one unless `use_dsa` is false."""
    count, kinds = int(config["num_hidden_layers"]), config.get("layer_types")
    is_indexed = config.get("use_dsa", None if "per_layer_config" in config else True)
    if kinds is None:
        has_windows = bool(config.get("use_sliding_window", True))
        kinds = [_SLIDING if has_windows and i >= 2 and i % 4 != 1 else _FULL for i in range(count)]
        is_indexed = True if is_indexed is None else is_indexed
    if len(kinds) != count or not set(kinds) <= set(_THETAS):
        raise ConfigError(f"layer_types {kinds!r}: expected {', '.join(_THETAS)} for each of the {count} layers")
    if is_indexed is None:
        return list(kinds)
    return [kind if kind == _SLIDING else (_FULL, _INDEXED)[bool(is_indexed)] for kind in kinds]


def _sizes(config: Config, kinds: list[str], kind: str) -> dict[str, Any]:
    """The settings of a kind of layer: in `per_layer_config`, or without it, under names of their own for windows."""
    by_layer = config.get("per_layer_config")
    if by_layer is not None:
        numbers = [number for number, each in enumerate(kinds) if each == kind]
        own_of = {int(number): each for number, each in by_layer.items()}  # transformers writes 02
        entries = [own_of.get(number) or {} for number in numbers]
        if any(entry != entries[0] for entry in entries):
            raise ConfigError(f"per_layer_config that differs among the layers of type {kind} is not supported")
        if unknown := sorted(entries[0].keys() - _BY_LAYER):
            raise ConfigError(f"per_layer_config of layer {numbers[0]}: {', '.join(unknown)} is not supported")
        return {**config, **entries[0]}
    if kind != _SLIDING:
        return dict(config)
    own = {size: config.get(f"swa_{size}", default) for size, default in _WINDOW_SIZES.items()}
    if "swa_qk_rope_head_dim" not in config:
        own["qk_rope_head_dim"] = config.get("swa_head_dim", 256) - own["qk_nope_head_dim"]
    return {**config, **own}


def _attention(config: Config, kinds: list[str], kind: str) -> MLASpec:
    """Latents are multiplied by the square root of (hidden size / latent size). For queries, this factor is part of the
    scale."""
    sizes, norm, hidden = _sizes(config, kinds, kind), rms_norm(config), int(config["hidden_size"])
    if sizes["q_lora_rank"] is None:
        raise ConfigError("q_lora_rank null is not supported")
    plain, rotary, rank = (int(sizes[each]) for each in ("qk_nope_head_dim", "qk_rope_head_dim", "q_lora_rank"))
    theta, default = _THETAS[kind]
    settings = _rope_settings(config, kind)
    settings |= {"rope_theta": settings.get("rope_theta") or config.get(theta) or default}
    settings |= {"partial_rotary_factor": None}
    turns = rope({**config, "rope_parameters": settings, "partial_rotary_factor": None}, rotary, is_interleaved=True)
    spec = MLASpec(
        num_heads=int(sizes["num_attention_heads"]),
        q_lora_rank=rank,
        kv_lora_rank=int(sizes["kv_lora_rank"]),
        qk_nope_head_dim=plain,
        v_head_dim=int(sizes["v_head_dim"]),
        scale=(plain + rotary) ** -0.5 * (hidden / rank) ** 0.5,
        rope=turns,
        norm=norm,
        rotary_norm=norm,
        latent_multiplier=(hidden / int(sizes["kv_lora_rank"])) ** 0.5,
        bias=bool(sizes.get("attention_bias", False)),
        output_gate="heads",
    )
    if kind == _SLIDING:
        return replace(spec, window=int(sizes.get("sliding_window") or sizes.get("sliding_window_size") or 512))
    if kind == _FULL:
        return spec
    indexer = IndexerSpec(
        num_heads=int(sizes["index_n_heads"]),
        head_dim=int(sizes["index_head_dim"]),
        norm=layer_norm(1e-6),
        rope=turns,
    )
    return replace(spec, top_k=int(sizes["index_topk"]), indexer=indexer)


def _rope_settings(config: Config, kind: str) -> dict[str, Any]:
    """Rotary settings of a kind of layer, or of all. Full attention may have either of its names, whatever `use_dsa`
    says."""
    settings: Config = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not any(isinstance(each, Mapping) for each in settings.values()):
        return dict(settings)
    names = [_SLIDING] if kind == _SLIDING else sorted((_FULL, _INDEXED), key=kind.__ne__)
    found = next((settings[name] for name in names if isinstance(settings.get(name), Mapping)), None)
    if found is None:
        raise ConfigError(f"rope_parameters has settings of {', '.join(settings)}, but not of {kind}")
    return dict(found)


def _feed_forwards(config: Config) -> list[MLPSpec | MoESpec]:
    count, every = int(config["num_hidden_layers"]), config.get("moe_layer_freq", 1)
    is_sparse = every if isinstance(every, list) else [number % int(every) == 0 for number in range(count)]
    first = int(config.get("first_k_dense_replace", 1))
    kinds = config.get("mlp_layer_types") or [
        "sparse" if number >= first and is_sparse[number] else "dense" for number in range(count)
    ]
    if len(kinds) != count or not set(kinds) <= {"dense", "sparse"}:
        raise ConfigError(f"mlp_layer_types {kinds!r}: expected dense or sparse for each of the {count} layers")
    if not config["n_shared_experts"]:
        raise ConfigError(f"n_shared_experts {config['n_shared_experts']} is not supported; supported: 1 or more")
    size = int(config["n_shared_experts"]) * int(config["shared_experts_intermediate_size"])
    experts = sigmoid_experts({**config, "moe_layer_freq": 1, "n_shared_experts": 0})
    experts = replace(experts, shared=feed_forward(config, intermediate_size=size, bias=False))
    return [experts if kind == "sparse" else feed_forward(config, bias=False) for kind in kinds]


def _names(arch: ModelSpec) -> Mapping[str, str]:
    return deepseek.names(arch) | {
        "layers.attention.rotary_norm": "model.layers.{layer}.self_attn.k_rope_only_layernorm",
        "layers.attention.gate": "model.layers.{layer}.self_attn.g_proj",
    }


FAMILIES = {
    "Dots3NoteForCausalLM": Family(
        _dots3_note,
        _names,
        {
            "vocab_size": 152064,
            "hidden_size": 5120,
            "intermediate_size": 13824,
            "moe_intermediate_size": 1536,
            "shared_experts_intermediate_size": 1536,
            "num_hidden_layers": 46,
            "num_attention_heads": 128,
            "n_shared_experts": 1,
            "n_routed_experts": 256,
            "num_experts_per_tok": 8,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.0,
            "n_group": 1,
            "topk_group": 1,
            "q_lora_rank": 1024,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "max_position_embeddings": 524288,
            "rms_norm_eps": 1e-5,
            "index_topk": 2048,
            "index_head_dim": 128,
            "index_n_heads": 64,
        },
        aliases={
            "num_local_experts": "n_routed_experts",
            "moe_shared_expert_intermediate_size": "shared_experts_intermediate_size",
        },
        ignored_prefixes=(*NOT_TEXT, "vision_encoder.", "audio_encoder.", "audio_adapter.", "model.mtp."),
        after_layers="multi-token prediction",
    ),
}
