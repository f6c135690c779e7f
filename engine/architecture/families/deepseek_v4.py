"""DeepSeek V4: attention to a window and to compressed entries, hyper-connections, and experts chosen by a table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.engine.architecture.attention_spec import CompressedAttentionSpec, CompressorSpec, EntryIndexerSpec
from quire.engine.architecture.families.family import (
    Config,
    DraftHeadLayout,
    Family,
    architecture,
    require,
    rms_norm,
    rope,
)
from quire.engine.architecture.feed_forward_spec import MLPSpec, MoESpec
from quire.engine.architecture.model_spec import LayerSpec, ModelSpec
from quire.engine.architecture.residual_spec import HyperConnectionSpec
from quire.engine.architecture.spec_parts import RopeSpec
from quire.engine.protocol.errors import ConfigError

_WINDOW, _SPARSE, _HEAVY = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
_KINDS = {0: _WINDOW, 4: _SPARSE, 128: _HEAVY}
"""Kinds of layers by their value in `compress_ratios`."""
_RATES = {_SPARSE: "compress_rate_csa", _HEAVY: "compress_rate_hca"}


def _deepseek_v4(name: str, config: Config) -> ModelSpec:
    require(config, "scoring_func", "sqrtsoftplus")
    require(config, "topk_method", "noaux_tc")
    require(config, "norm_topk_prob", True)
    require(config, "swiglu_limit", 10.0)
    require(config, "hidden_act", "silu")
    require(config, "n_shared_experts", 1)
    require(config, "num_key_value_heads", 1)
    require(config, "attention_bias", False)
    require(config, "mlp_bias", False)
    if int(config["hc_sinkhorn_iters"]) < 1:
        raise ConfigError(f"hc_sinkhorn_iters {config['hc_sinkhorn_iters']} is not supported; it must be at least 1")
    count = int(config["num_hidden_layers"])
    layers = _layers(config, _kinds(config)[:count], _mixtures(config))
    return architecture(name, config, layers, rms_norm(config))


def _mtp(config: Config) -> list[LayerSpec]:
    """The layer of the head for multi-token prediction: it has only a window unless config.json states another kind,
    and experts that are not in a table."""
    return _layers(config, [*_kinds(config)[int(config["num_hidden_layers"]) :], _WINDOW][:1], ["moe"])


def _layers(config: Config, kinds: list[str], mixtures: list[str]) -> list[LayerSpec]:
    norm, size = rms_norm(config), int(config["moe_intermediate_size"])
    hyper = HyperConnectionSpec(
        num_streams=int(config["hc_mult"]),
        iterations=int(config["hc_sinkhorn_iters"]),
        eps=float(config["hc_eps"]),
        norm=rms_norm(config, has_weight=False),
    )
    attentions, experts = _attentions(config), _experts(config, size)
    return [
        LayerSpec(
            attention=attentions[kind],
            attention_norm=norm,
            feed_forward=experts[mixture],
            feed_forward_norm=norm,
            residual=hyper,
        )
        for kind, mixture in zip(kinds, mixtures, strict=True)
    ]


def _kinds(config: Config) -> list[str]:
    """The kind of each layer and, if stated, of the layers of heads for multi-token prediction after them."""
    count = int(config["num_hidden_layers"])
    kinds = config.get("layer_types")
    if kinds is None and (ratios := config.get("compress_ratios")) is not None:
        if unknown := set(ratios) - _KINDS.keys():
            raise ConfigError(f"compress_ratios {sorted(unknown)} are not supported; supported: 0, 4, 128")
        kinds = [_KINDS[ratio] for ratio in ratios]
    if kinds is None:
        kinds = [*[_HEAVY] * 2, *((_HEAVY, _SPARSE)[number % 2] for number in range(count))][:count]
    if len(kinds) < count or not set(kinds) <= set(_KINDS.values()):
        raise ConfigError(f"layer_types {kinds!r}: expected {', '.join(_KINDS.values())} for each of {count} layers")
    return list(kinds)


def _mixtures(config: Config) -> list[str]:
    """For each layer moe, or hash_moe if its experts are in a table."""
    count, hashed = int(config["num_hidden_layers"]), config.get("num_hash_layers")
    first = 3 if hashed is None else int(hashed)
    kinds = config.get("mlp_layer_types") or [("moe", "hash_moe")[number < first] for number in range(count)]
    if len(kinds) < count or not set(kinds) <= {"moe", "hash_moe"}:
        raise ConfigError(f"mlp_layer_types {kinds!r}: expected moe or hash_moe for each of {count} layers")
    return list(kinds[:count])


def _experts(config: Config, size: int) -> dict[str, MoESpec]:
    """The experts by the kind of mixture."""
    common: dict[str, Any] = {
        "num_experts": int(config["n_routed_experts"]),
        "top_k": int(config["num_experts_per_tok"]),
        "intermediate_size": size,
        "activation": "silu_clamped",
        "scoring": "sqrt_softplus",
        "renormalize": True,
        "scale": float(config["routed_scaling_factor"]),
        "shared": MLPSpec(intermediate_size=size, activation="silu_clamped"),
    }
    return {
        "moe": MoESpec(**common, correction_bias=True),
        "hash_moe": MoESpec(**common, table_size=int(config["vocab_size"])),
    }


def _attentions(config: Config) -> dict[str, CompressedAttentionSpec]:
    """The attention by the kind of layer."""
    norm, head_dim, (plain, compressed) = rms_norm(config), int(config["head_dim"]), _ropes(config)
    rates = dict(config.get("compress_rates") or {})
    rates |= {kind: config[name] for kind, name in _RATES.items() if config.get(name) is not None}
    common: dict[str, Any] = {
        "num_heads": int(config["num_attention_heads"]),
        "head_dim": head_dim,
        "q_lora_rank": int(config["q_lora_rank"]),
        "scale": head_dim**-0.5,
        "norm": norm,
        "query_norm": rms_norm(config, has_weight=False),
        "window": int(config["sliding_window"]),
        "output_groups": int(config["o_groups"]),
        "output_rank": int(config["o_lora_rank"]),
    }
    indexer = EntryIndexerSpec(
        num_heads=int(config["index_n_heads"]),
        head_dim=int(config["index_head_dim"]),
        top_k=int(config["index_topk"]),
    )
    sparse = CompressorSpec(ratio=int(rates.get(_SPARSE, 4)), overlaps=True, norm=norm)
    heavy = CompressorSpec(ratio=int(rates.get(_HEAVY, 128)), overlaps=False, norm=norm)
    return {
        _WINDOW: CompressedAttentionSpec(**common, rope=plain),
        _SPARSE: CompressedAttentionSpec(**common, rope=compressed, compressor=sparse, indexer=indexer),
        _HEAVY: CompressedAttentionSpec(**common, rope=compressed, compressor=heavy),
    }


def _ropes(config: Config) -> tuple[RopeSpec, RopeSpec]:
    """The rotary settings of layers without entries, and of other layers, which have another base and are scaled
    without a temperature."""
    head_dim, settings = int(config["head_dim"]), config.get("rope_parameters") or config.get("rope_scaling") or {}
    partial = config.get("partial_rotary_factor")
    if partial is None:
        dim = config.get("qk_rope_head_dim")
        partial = 64 / 512 if dim is None else int(dim) / head_dim
    if isinstance(settings.get("main"), Mapping) and isinstance(settings.get("compress"), Mapping):
        plain, compressed = dict(settings["main"]), dict(settings["compress"])
    else:
        plain = {"rope_theta": config["rope_theta"]}
        scaling = {key: value for key, value in settings.items() if key not in ("main", "compress")}
        compressed = {**scaling, "rope_theta": config["compress_rope_theta"]}
        if (compressed.get("rope_type") or compressed.get("type")) == "yarn":
            compressed.setdefault("attention_factor", 1.0)
    found = []
    for each in (plain, compressed):
        each.setdefault("partial_rotary_factor", partial)
        spec = rope({**config, "rope_parameters": each, "rope_scaling": None}, head_dim, is_interleaved=True)
        if spec.kind not in ("default", "linear", "yarn", "llama3"):
            raise ConfigError(f"rope scaling {spec.kind!r} is not supported")
        found.append(spec)
    return found[0], found[1]


_ATTENTION, _INDEXER, _MIXTURE = "layers.{layer}.attn", "layers.{layer}.attn.indexer", "layers.{layer}.ffn"
_MERGER = {"function": "hc_head_fn", "base": "hc_head_base", "scale": "hc_head_scale"}
_NAMES = {
    "embedding": "embed",
    "norm": "norm",
    "head": "head",
    **{f"merger.{part}": name for part, name in _MERGER.items()},
    **{
        f"layers.{module}_connection.{part}": f"layers.{{layer}}.hc_{short}_{name}"
        for module, short in (("attention", "attn"), ("feed_forward", "ffn"))
        for part, name in (("function", "fn"), ("base", "base"), ("scale", "scale"))
    },
    "layers.attention_norm": "layers.{layer}.attn_norm",
    "layers.feed_forward_norm": "layers.{layer}.ffn_norm",
    "layers.attention.down.q": f"{_ATTENTION}.wq_a",
    "layers.attention.down.kv": f"{_ATTENTION}.wkv",
    "layers.attention.query_norm": f"{_ATTENTION}.q_norm",
    "layers.attention.query": f"{_ATTENTION}.wq_b",
    "layers.attention.key_norm": f"{_ATTENTION}.kv_norm",
    "layers.attention.sinks": f"{_ATTENTION}.attn_sink",
    "layers.attention.group_output": f"{_ATTENTION}.wo_a",
    "layers.attention.output": f"{_ATTENTION}.wo_b",
    "layers.attention.indexer.query": f"{_INDEXER}.wq_b",
    "layers.attention.indexer.weights": f"{_INDEXER}.weights_proj",
    **{
        f"{module}.compressor.{ours}": f"{theirs}.compressor.{name}"
        for module, theirs in (("layers.attention", _ATTENTION), ("layers.attention.indexer", _INDEXER))
        for ours, name in (
            ("inputs.kv", "wkv"),
            ("inputs.gate", "wgate"),
            ("position_bias", "ape"),
            ("norm", "norm"),
        )
    },
    "layers.feed_forward.router": f"{_MIXTURE}.gate",
    "layers.feed_forward.router.correction_bias": f"{_MIXTURE}.gate.bias",
    "layers.feed_forward.router.table": f"{_MIXTURE}.gate.tid2eid",
    "layers.feed_forward.experts.gate_up.gate": f"{_MIXTURE}.experts.{{expert}}.w1",
    "layers.feed_forward.experts.gate_up.up": f"{_MIXTURE}.experts.{{expert}}.w3",
    "layers.feed_forward.experts.down": f"{_MIXTURE}.experts.{{expert}}.w2",
    "layers.feed_forward.shared.gate_up.gate": f"{_MIXTURE}.shared_experts.w1",
    "layers.feed_forward.shared.gate_up.up": f"{_MIXTURE}.shared_experts.w3",
    "layers.feed_forward.shared.down": f"{_MIXTURE}.shared_experts.w2",
}

_MTP = DraftHeadLayout(
    layer="mtp.{layer}",
    names={
        "heads.embedding_norm": "{prefix}.enorm",
        "heads.hidden_norm": "{prefix}.hnorm",
        "heads.embedding_projection": "{prefix}.e_proj",
        "heads.projection": "{prefix}.h_proj",
        "heads.norm": "{prefix}.norm",
        **{f"heads.merger.{part}": f"{{prefix}}.{name}" for part, name in _MERGER.items()},
    },
    layers=_mtp,
    reads_normed=False,
)

FAMILIES = {
    "DeepseekV4ForCausalLM": Family(
        _deepseek_v4,
        _NAMES,
        {
            "vocab_size": 129280,
            "hidden_size": 4096,
            "moe_intermediate_size": 2048,
            "num_hidden_layers": 43,
            "num_attention_heads": 64,
            "num_key_value_heads": 1,
            "head_dim": 512,
            "q_lora_rank": 1024,
            "qk_rope_head_dim": None,
            "num_experts_per_tok": 6,
            "n_routed_experts": 256,
            "n_shared_experts": 1,
            "routed_scaling_factor": 1.5,
            "max_position_embeddings": 1048576,
            "rope_theta": 10000.0,
            "compress_rope_theta": 160000.0,
            "hc_mult": 4,
            "hc_sinkhorn_iters": 20,
            "hc_eps": 1e-6,
            "sliding_window": 128,
            "o_groups": 8,
            "o_lora_rank": 1024,
            "index_n_heads": 64,
            "index_head_dim": 128,
            "index_topk": 512,
            "rms_norm_eps": 1e-6,
        },
        aliases={"num_local_experts": "n_routed_experts", "intermediate_size": "moe_intermediate_size"},
        prefix="",
        ignored_prefixes=("mtp.",),
        draft_heads={"mtp": _MTP},
    ),
}
