"""DeepSeek V2 and V3 (and R1, and Kimi K2, which has V3's architecture), and Mistral 4: multi-head latent attention and
grouped routing. DeepSeek V3.2 and GLM-5: the same with sparse attention."""

from __future__ import annotations

from dataclasses import replace

from quire.engine.architecture.attention_spec import IndexerSpec, MLASpec
from quire.engine.architecture.families.family import (
    Config,
    Family,
    activation,
    architecture,
    feed_forward,
    layer_norm,
    query_scale,
    require,
    rms_norm,
    rope,
    yarn_temperature,
)
from quire.engine.architecture.families.moe import MTP_LAYER, NAMES_BY_EXPERT, STACKED_EXPERTS, sigmoid_experts
from quire.engine.architecture.feed_forward_spec import MoESpec
from quire.engine.architecture.model_spec import LayerSpec, ModelSpec
from quire.engine.protocol.errors import ConfigError


def deepseek(name: str, config: Config, experts: MoESpec | None = None) -> ModelSpec:
    norm, rotary_dim = rms_norm(config), int(config["qk_rope_head_dim"])
    scaling = {**(config.get("rope_parameters") or config.get("rope_scaling") or {}), "partial_rotary_factor": None}
    config = {**config, "rope_parameters": scaling, "partial_rotary_factor": None}
    rope_spec = rope(config, rotary_dim, is_interleaved=bool(config.get("rope_interleave", True)))
    scale = (int(config["qk_nope_head_dim"]) + rotary_dim) ** -0.5
    if rope_spec.kind != "default" and scaling.get("mscale_all_dim"):
        scale *= yarn_temperature(rope_spec.factor, float(scaling["mscale_all_dim"])) ** 2
    attention = MLASpec(
        num_heads=int(config["num_attention_heads"]),
        q_lora_rank=None if config["q_lora_rank"] is None else int(config["q_lora_rank"]),
        kv_lora_rank=int(config["kv_lora_rank"]),
        qk_nope_head_dim=int(config["qk_nope_head_dim"]),
        v_head_dim=int(config["v_head_dim"]),
        scale=scale,
        rope=rope_spec,
        norm=replace(norm, eps=1e-6),  # the latents' norm, independent of the model's eps
        bias=bool(config.get("attention_bias", False)),
        query_scale=query_scale(scaling),
    )
    dense = feed_forward(config)
    if experts is None:
        experts = softmax_experts(config) if name.startswith("DeepseekV2") else sigmoid_experts(config)
    layers = [
        LayerSpec(
            attention=attention,
            attention_norm=norm,
            feed_forward=experts if is_sparse else dense,
            feed_forward_norm=norm,
        )
        for is_sparse in are_mixtures(config)
    ]
    return architecture(name, config, layers, norm)


def are_mixtures(config: Config) -> list[bool]:
    """Whether the layers have experts: by the list of V3.2 and GLM-5, or all after the first ones."""
    count, first = int(config["num_hidden_layers"]), int(config["first_k_dense_replace"])
    kinds = config.get("mlp_layer_types") or [("dense", "sparse")[number >= first] for number in range(count)]
    if len(kinds) != count or not set(kinds) <= {"dense", "sparse"}:
        raise ConfigError(f"mlp_layer_types {kinds!r}: expected dense or sparse for each of the {count} layers")
    return [kind == "sparse" for kind in kinds]


def sparse(name: str, config: Config) -> ModelSpec:
    """Layers run their own indexer or (GLM-5) attend to the tokens that the last indexer before them selected."""
    arch = deepseek(name, config)
    kinds = indexer_types(config)
    if len(kinds) != arch.num_layers or not set(kinds) <= {"full", "shared"}:
        raise ConfigError(f"indexer_types {kinds!r}: expected full or shared for each of the {arch.num_layers} layers")
    if kinds[0] == "shared":
        raise ConfigError("indexer_types: the first layer cannot share what a layer before has selected")
    layers = []
    for layer, kind in zip(arch.layers, kinds, strict=True):
        attention = layer.attention
        assert isinstance(attention, MLASpec)
        is_interleaved = bool(config["indexer_rope_interleave"])
        indexer = IndexerSpec(
            num_heads=int(config["index_n_heads"]),
            head_dim=int(config["index_head_dim"]),
            norm=layer_norm(1e-6),
            rope=replace(attention.rope, is_interleaved=is_interleaved),
        )
        attention = replace(attention, top_k=int(config["index_topk"]), indexer=indexer if kind == "full" else None)
        layers.append(replace(layer, attention=attention))
    return replace(arch, layers=tuple(layers))


def indexer_types(config: Config) -> list[str]:
    """For each layer full or shared: stated, as a pattern of letters, or by the distance of full layers."""
    if kinds := config.get("indexer_types"):
        return list(kinds)
    if pattern := config.get("index_topk_pattern"):
        return [{"F": "full", "S": "shared"}.get(kind, kind) for kind in pattern]
    every = max(int(config.get("index_topk_freq") or 1), 1)
    after = int(config.get("index_skip_topk_offset", 2)) - 1
    numbers = range(int(config["num_hidden_layers"]))
    return ["shared" if max(number - after, 0) % every else "full" for number in numbers]


def softmax_experts(config: Config) -> MoESpec:
    """V2: softmax scores, and optionally groups that are chosen by their best expert."""
    require(config, "topk_method", "greedy", "group_limited_greedy")
    require(config, "scoring_func", "softmax")
    require(config, "moe_layer_freq", 1)
    require(config, "mlp_bias", False)
    grouped = config["topk_method"] == "group_limited_greedy"
    size, shared = int(config["moe_intermediate_size"]), int(config.get("n_shared_experts") or 0)
    return MoESpec(
        num_experts=int(config["n_routed_experts"]),
        top_k=int(config["num_experts_per_tok"]),
        intermediate_size=size,
        activation=activation(config.get("hidden_act", "silu")),
        renormalize=False,
        scale=float(config["routed_scaling_factor"]),
        groups=int(config["n_group"]) if grouped else 1,
        top_groups=int(config["topk_group"]) if grouped else 1,
        shared=feed_forward(config, intermediate_size=size * shared, bias=False) if shared else None,
    )


def mistral4(name: str, config: Config) -> ModelSpec:
    """DeepSeek-V3's layers, with softmax scores, and queries that grow with their position."""
    experts = sigmoid_experts({**config, "scoring_func": "sigmoid", "topk_method": "noaux_tc"})
    if not config.get("rope_parameters"):
        config = {**config, "rope_parameters": _MISTRAL4_ROPE}
    return deepseek(name, config, replace(experts, scoring="softmax", correction_bias=False))


_NAMES = NAMES_BY_EXPERT | {
    "layers.attention.down.q": "model.layers.{layer}.self_attn.q_a_proj",
    "layers.attention.down.kv": "model.layers.{layer}.self_attn.kv_a_proj_with_mqa",
    "layers.attention.query_norm": "model.layers.{layer}.self_attn.q_a_layernorm",
    "layers.attention.latent_norm": "model.layers.{layer}.self_attn.kv_a_layernorm",
    "layers.attention.up": "model.layers.{layer}.self_attn.kv_b_proj",
    "layers.attention.indexer.query": "model.layers.{layer}.self_attn.indexer.wq_b",
    "layers.attention.indexer.key": "model.layers.{layer}.self_attn.indexer.wk",
    "layers.attention.indexer.key_norm": "model.layers.{layer}.self_attn.indexer.k_norm",
    "layers.attention.indexer.weights": "model.layers.{layer}.self_attn.indexer.weights_proj",
    "layers.feed_forward.router.correction_bias": "model.layers.{layer}.mlp.gate.e_score_correction_bias",
}


def names(arch: ModelSpec) -> dict[str, str]:
    attention = arch.layers[0].attention
    is_direct = isinstance(attention, MLASpec) and attention.q_lora_rank is None
    return {**_NAMES, "layers.attention.query": f"model.layers.{{layer}}.self_attn.q_{'' if is_direct else 'b_'}proj"}


def mistral4_names(arch: ModelSpec) -> dict[str, str]:
    return names(arch) | STACKED_EXPERTS


_COMMON = {"rms_norm_eps": 1e-6, "q_lora_rank": 1536, "kv_lora_rank": 512, "v_head_dim": 128} | {
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
}
V3 = {
    **_COMMON,
    "max_position_embeddings": 4096,
    "first_k_dense_replace": 3,
    "n_shared_experts": 1,
    "routed_scaling_factor": 2.5,
    "n_group": 8,
    "topk_group": 4,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
}
INDEX = {"index_topk": 2048, "index_head_dim": 128, "index_n_heads": 64, "indexer_rope_interleave": False}
_GLM = {"rms_norm_eps": 1e-5, "q_lora_rank": 2048, "v_head_dim": 256, "qk_nope_head_dim": 192} | {
    "n_group": 1,
    "topk_group": 1,
    "max_position_embeddings": 202752,
    "index_n_heads": 32,
    "indexer_rope_interleave": True,
}
_MISTRAL4_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 128.0,
    "original_max_position_embeddings": 8192,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
MISTRAL4 = {
    **_COMMON,
    "q_lora_rank": 1024,
    "kv_lora_rank": 256,
    "qk_nope_head_dim": 64,
    "max_position_embeddings": 1048576,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "first_k_dense_replace": 0,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
}


FAMILIES = {
    "DeepseekV2ForCausalLM": Family(
        deepseek,
        names,
        {
            **_COMMON,
            "max_position_embeddings": 2048,
            "first_k_dense_replace": 0,
            "n_shared_experts": 2,
            "routed_scaling_factor": 1.0,
            "topk_method": "greedy",
        },
    ),
    "DeepseekV3ForCausalLM": Family(
        deepseek,
        names,
        V3,
        after_layers="multi-token prediction",
        draft_heads={"mtp": MTP_LAYER},
    ),
    "DeepseekV32ForCausalLM": Family(
        sparse,
        names,
        {**V3, **INDEX, "max_position_embeddings": 163840},
        after_layers="multi-token prediction",
        draft_heads={"mtp": MTP_LAYER},
    ),
    "GlmMoeDsaForCausalLM": Family(
        sparse,
        names,
        {**V3, **INDEX, **_GLM},
        after_layers="multi-token prediction",
        draft_heads={"mtp": MTP_LAYER},
    ),
    "Mistral4ForCausalLM": Family(mistral4, mistral4_names, MISTRAL4),
}
