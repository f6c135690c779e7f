"""GLM-5.3: layers with Kimi Delta Attention, and a few with latent attention to the best groups of tokens, with
hyper-connections around all of them."""

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
    of_multimodal,
    require,
    rms_norm,
)
from quire.engine.architecture.families.glm_vl import TOWER, glm5_media
from quire.engine.architecture.families.kimi_linear import KIMI_NAMES
from quire.engine.architecture.families.moe import sigmoid_experts
from quire.engine.architecture.feed_forward_spec import MLPSpec, MoESpec
from quire.engine.architecture.model_spec import ModelSpec
from quire.engine.architecture.recurrent_spec import KimiDeltaSpec
from quire.engine.architecture.residual_spec import HyperConnectionSpec
from quire.engine.architecture.spec_parts import RopeSpec
from quire.engine.protocol.errors import ConfigError


def _glm5_next(name: str, config: Config) -> ModelSpec:
    require(config, "hidden_act", "silu")
    require(config, "swiglu_limit", 10.0)
    norm = rms_norm(config)
    hyper = HyperConnectionSpec(
        num_streams=int(config["hc_mult"]),
        iterations=int(config["hc_sinkhorn_iters"]),
        eps=float(config["hc_eps"]),
        averages=True,
        norm=rms_norm(config, has_weight=False),
    )
    if hyper.iterations < 1:
        raise ConfigError(f"hc_sinkhorn_iters {hyper.iterations} is not supported; it must be at least 1")
    kinds = _kinds(config)
    mixers: dict[str, dict[str, Any]] = {
        "linear_attention": {"attention": None, "state": _state(config)},
        "indexed_attention": {"attention": _attention(config)},
    }
    common = {"attention_norm": norm, "feed_forward_norm": norm, "residual": hyper}
    layers = layers_by_kind(kinds, mixers, _feed_forwards(config), **common)
    return architecture(name, config, layers, norm)


def _kinds(config: Config) -> list[str]:
    """The kind of each layer. Full attention is the indexed one, and each such layer has an indexer."""
    count = int(config["num_hidden_layers"])
    kinds = config.get("layer_types")
    if kinds is None:
        kinds = ["indexed_attention" if number % 4 == 3 else "linear_attention" for number in range(count)]
    kinds = ["indexed_attention" if kind == "full_attention" else kind for kind in kinds]
    indexers = deepseek.indexer_types(config)
    if len(indexers) != count or len(kinds) != count:
        raise ConfigError(f"layer_types and indexer_types must be those of the {count} layers")
    for number, (kind, indexer) in enumerate(zip(kinds, indexers, strict=True)):
        if kind == "indexed_attention" and indexer != "full":
            raise ConfigError(f"indexer_types: {indexer!r} of layer {number} is not supported; supported: 'full'")
    return kinds


def _feed_forwards(config: Config) -> list[MLPSpec | MoESpec]:
    """The feed-forward of each layer; gates and ups of all have limits."""
    count, experts = int(config["num_hidden_layers"]), sigmoid_experts(config)
    kinds = config.get("mlp_layer_types") or [("dense", "sparse")[number >= 3] for number in range(count)]
    if len(kinds) != count or not set(kinds) <= {"dense", "sparse"}:
        raise ConfigError(f"mlp_layer_types {kinds!r}: expected dense or sparse for each of the {count} layers")
    dense = feed_forward(config, activation="silu_clamped", bias=False)
    shared = None if experts.shared is None else replace(experts.shared, activation="silu_clamped")
    experts = replace(experts, activation="silu_clamped", shared=shared)
    return [experts if kind == "sparse" else dense for kind in kinds]


def _state(config: Config) -> KimiDeltaSpec:
    """Settings are at the top level, or under other names in `linear_attn_config`, which takes precedence."""
    own: Config = config.get("linear_attn_config") or {}
    width = int(own.get("head_dim", config["linear_head_dim"]))
    bound = own.get("gate_lower_bound", config["linear_lower_bound"])
    if bound is None and own and own.get("safe_gate", True):
        bound = -5.0
    return KimiDeltaSpec(
        num_value_heads=int(own.get("num_heads", config["linear_num_heads"])),
        value_head_dim=width,
        rank=width,
        lower_bound=None if bound is None else float(bound),
        conv_size=int(own.get("short_conv_kernel_size", config["linear_conv_kernel_dim"])),
        norm=rms_norm(config),
    )


def _attention(config: Config) -> MLASpec:
    """Without positions. A query attends to the tokens of the best groups and of an incomplete group."""
    require(config, "qk_rope_head_dim", 0)
    require(config, "index_kpool_always_select_tail", True)
    if config["q_lora_rank"] is None:
        raise ConfigError("sparse attention (index_topk) needs q_lora_rank")
    pool, top_k, head_dim = int(config["index_kpool"]), int(config["index_topk"]), int(config["qk_nope_head_dim"])
    if pool < 2 or top_k % pool or top_k < pool:
        raise ConfigError(f"index_kpool {pool} is not supported for index_topk {top_k}: it must divide it, from 2 on")
    rope_spec = RopeSpec(theta=1.0, dim=0, kind="none")
    return MLASpec(
        num_heads=int(config["num_attention_heads"]),
        q_lora_rank=int(config["q_lora_rank"]),
        kv_lora_rank=int(config["kv_lora_rank"]),
        qk_nope_head_dim=head_dim,
        v_head_dim=int(config["v_head_dim"]),
        scale=head_dim**-0.5,
        rope=rope_spec,
        norm=rms_norm(config),
        bias=bool(config.get("attention_bias", False)),
        top_k=top_k + pool - 1,
        indexer=IndexerSpec(
            num_heads=int(config["index_n_heads"]),
            head_dim=int(config["index_head_dim"]),
            norm=layer_norm(1e-6),
            rope=rope_spec,
            pool=pool,
        ),
    )


_LAYER = "model.layers.{layer}"
_NAMES = {
    **{module: name for module, name in KIMI_NAMES.items() if module.startswith("layers.state.")},
    "layers.attention.indexer.gate.weight": f"{_LAYER}.self_attn.indexer.index_kpool_compress_gate",
    "layers.attention.indexer.position_bias": f"{_LAYER}.self_attn.indexer.index_kpool_compress_ape",
    **{
        f"layers.{module}_connection.{part}": f"{_LAYER}.hc_{short}_{name}"
        for module, short in (("attention", "attn"), ("feed_forward", "ffn"))
        for part, name in (("function", "fn"), ("base", "base"), ("scale", "scale"))
    },
}


def _names(arch: ModelSpec) -> Mapping[str, str]:
    own = deepseek.names(arch) | _NAMES
    return of_multimodal(own) | TOWER if arch.name == "Glm5NextForConditionalGeneration" else own


_DEFAULTS = {
    "vocab_size": 154880,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 45,
    "num_attention_heads": 64,
    "n_shared_experts": 1,
    "n_routed_experts": 288,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 256,
    "qk_rope_head_dim": 0,
    "v_head_dim": 256,
    "max_position_embeddings": 1048576,
    "rms_norm_eps": 1e-5,
    "index_topk": 2048,
    "index_head_dim": 128,
    "index_n_heads": 32,
    "index_kpool": 16,
    "linear_head_dim": 128,
    "linear_num_heads": 64,
    "linear_conv_kernel_dim": 4,
    "linear_lower_bound": -5.0,
    "hc_mult": 4,
    "hc_eps": 1e-6,
    "hc_sinkhorn_iters": 20,
    "image_token_id": 154854,
}
FAMILIES = {
    name: Family(
        _glm5_next,
        _names,
        _DEFAULTS,
        aliases={"num_local_experts": "n_routed_experts"},
        ignored_prefixes=NOT_TEXT,
        after_layers="multi-token prediction",
        media=media,
    )
    for name, media in (("Glm5NextForCausalLM", None), ("Glm5NextForConditionalGeneration", glm5_media))
}
