"""A.X K2 and Hunyuan 4: DeepSeek V3.2's layers, with a gate on the output of the attention."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from quire.engine.architecture.attention_spec import MLASpec
from quire.engine.architecture.families import deepseek
from quire.engine.architecture.families.family import Config, Family, require, rms_norm
from quire.engine.architecture.families.moe import STACKED_EXPERTS
from quire.engine.architecture.feed_forward_spec import MoESpec
from quire.engine.architecture.model_spec import ModelSpec
from quire.engine.architecture.residual_spec import HyperConnectionSpec


def _axk2(name: str, config: Config) -> ModelSpec:
    """Norms before attention and experts have gates of low rank. Experts that are not eligible have a score of 0."""
    arch = deepseek.sparse(name, config)
    layers = []
    for layer in arch.layers:
        attention, mixture = layer.attention, layer.feed_forward
        assert isinstance(attention, MLASpec)
        gated = rms_norm(config, gate_rank=int(config["gated_norm_rank"]))
        if isinstance(mixture, MoESpec):
            layer = replace(layer, feed_forward=replace(mixture, ineligible_score=0.0), feed_forward_norm=gated)
        layers.append(replace(layer, attention=replace(attention, output_gate="queries"), attention_norm=gated))
    return replace(arch, layers=tuple(layers))


def _hy_v4(name: str, config: Config) -> ModelSpec:
    """Attention with sinks, hyper-connections that do not mix streams, and experts with limits.

    Published weights rotate neighbouring features, as in vLLM and SGLang; transformers rotates halves.
    """
    require(config, "swiglu_limit", 10.0)
    require(config, "gated_mla", True)
    require(config, "gating_type", "elementwise")
    require(config, "enable_ihc", True)
    require(config, "learnable_sink", True)
    count = int(config["num_hidden_layers"])
    kinds = ["shared" if number and (number - 1) % 4 else "full" for number in range(count)]
    config = {**config, "indexer_types": config.get("indexer_types") or kinds}
    arch, eps = deepseek.sparse(name, config), float(config["hc_eps"])
    hyper = HyperConnectionSpec(
        num_streams=int(config["hc_mult"]),
        iterations=0,
        eps=eps,
        magnitude=float(config["hc_magnitude"]),
        output_eps=eps,
        norm=rms_norm(config, has_weight=False),
    )
    layers = []
    for layer in arch.layers:
        attention, mixture = layer.attention, layer.feed_forward
        assert isinstance(attention, MLASpec)
        if (indexer := attention.indexer) is not None:
            norm = replace(indexer.norm, eps=float(config["rms_norm_eps"]))
            indexer = replace(indexer, norm=norm, rotates_last=True)
        attention = replace(attention, output_gate="features", has_sinks=True, indexer=indexer)
        if isinstance(mixture, MoESpec):
            mixture = replace(mixture, activation="silu_clamped")
        layers.append(replace(layer, attention=attention, feed_forward=mixture, residual=hyper))
    return replace(arch, layers=tuple(layers))


_LAYER = "model.layers.{layer}"
_GATED_NORMS = {
    f"layers.{ours}.{part}": f"{_LAYER}.{theirs}.{name}"
    for ours, theirs in (("attention_norm", "input_layernorm"), ("feed_forward_norm", "post_attention_layernorm"))
    for part, name in (("norm", "norm"), ("gate_down", "W_down"), ("gate_up", "W_up"))
}
_HYPER = {
    "merger": "model.hc_head.hc_head_",
    "layers.attention_connection": f"{_LAYER}.hc_attn_layer.hc_pre.hc_",
    "layers.feed_forward_connection": f"{_LAYER}.hc_mlp_layer.hc_pre.hc_",
}
_HY_NAMES = {
    "layers.attention.gate": f"{_LAYER}.self_attn.linear_gate",
    "layers.attention.sinks": f"{_LAYER}.self_attn.learnable_sink_param",
    **{
        f"{module}.{part}": f"{prefix}{name}"
        for module, prefix in _HYPER.items()
        for part, name in (("function", "fn"), ("base", "base"), ("scale", "scale"))
    },
}


def _axk2_names(arch: ModelSpec) -> Mapping[str, str]:
    return deepseek.names(arch) | _GATED_NORMS


def _hy_names(arch: ModelSpec) -> Mapping[str, str]:
    return deepseek.names(arch) | STACKED_EXPERTS | _HY_NAMES


FAMILIES = {
    "AXK2ForCausalLM": Family(
        _axk2,
        _axk2_names,
        {
            **deepseek.V3,
            **deepseek.INDEX,
            "max_position_embeddings": 131072,
            "q_lora_rank": 384,
            "kv_lora_rank": 128,
            "qk_nope_head_dim": 64,
            "qk_rope_head_dim": 32,
            "v_head_dim": 64,
            "first_k_dense_replace": 1,
            "n_group": None,
            "topk_group": None,
            "index_n_heads": 16,
            "gated_norm_rank": 16,
        },
    ),
    "HYV4ForCausalLM": Family(
        _hy_v4,
        _hy_names,
        {
            **deepseek.V3,
            **deepseek.INDEX,
            "max_position_embeddings": 262144,
            "rms_norm_eps": 1e-5,
            "qk_nope_head_dim": 192,
            "v_head_dim": 256,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": 2.827,
            "index_n_heads": 16,
            "indexer_rope_interleave": True,
            "rope_interleave": True,
            "hc_mult": 4,
            "hc_magnitude": 2.0,
            "hc_eps": 1e-6,
            "swiglu_limit": 10.0,
        },
        ignored_prefixes=("model.mtp_layers.",),
    ),
}
