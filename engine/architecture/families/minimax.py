"""MiniMax-Text-01 and M1: layers with lightning attention, and a few with attention; experts as in Mixtral. M3:
attention to selected blocks of tokens, and experts as in M2 beside a shared one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quire.engine.architecture.attention_spec import BlockIndexerSpec
from quire.engine.architecture.families.family import (
    NOT_TEXT,
    Config,
    Family,
    Runs,
    activation,
    architecture,
    attention,
    head_dim,
    in_language_model,
    layer_norm,
    layers_by_kind,
    require,
    rms_norm,
    rope,
)
from quire.engine.architecture.families.llama import NAMES
from quire.engine.architecture.families.moe import MIXTRAL_NAMES, NAMES_BY_EXPERT, STACKED_EXPERTS
from quire.engine.architecture.families.qwen_vl import grid_media
from quire.engine.architecture.feed_forward_spec import MLPSpec, MoESpec
from quire.engine.architecture.model_spec import LayerSpec, ModelSpec
from quire.engine.architecture.recurrent_spec import LightningSpec
from quire.engine.architecture.residual_spec import NormedResidualSpec
from quire.engine.architecture.spec_parts import NormSpec, RopeSpec
from quire.engine.architecture.tower_spec import MergerSpec
from quire.engine.protocol.errors import ConfigError


def _minimax(name: str, config: Config) -> ModelSpec:
    """The residual stream is the normalized one; rates of decay decrease from layer to layer."""
    require(config, "hidden_act", "silu")
    require(config, "sliding_window", None)
    require(config, "mlp_beta_factor", 1, 1.0)
    norm, dim, count = rms_norm(config), head_dim(config), int(config["num_hidden_layers"])
    numbers = config.get("attn_type_list") or [(number + 1) % 2 for number in range(count)]
    by_number = {0: "linear_attention", 1: "full_attention"}
    kinds = config.get("layer_types") or [by_number.get(number, number) for number in numbers]
    if len(kinds) != count:
        raise ConfigError(f"layer_types has {len(kinds)} entries, but num_hidden_layers is {count}")
    experts = MoESpec(
        num_experts=int(config["num_local_experts"]),
        top_k=int(config["num_experts_per_tok"]),
        intermediate_size=int(config["intermediate_size"]),
        activation=activation(config["hidden_act"]),
        renormalize=True,
    )
    rope_spec = rope({**config, "partial_rotary_factor": None}, int(config.get("rotary_dim") or dim))
    layers: list[LayerSpec] = []
    for number, kind in enumerate(kinds):
        lightning = LightningSpec(
            num_value_heads=int(config["num_attention_heads"]),
            value_head_dim=dim,
            rate=1 - number / (count - 1 + 1e-5) + 1e-5,
            norm=NormSpec(eps=1e-6),
            output_multiplier=float(config["linear_attn_beta_factor"]),
        )
        full = attention(config, rope_spec, output_multiplier=float(config["full_attn_beta_factor"]))
        mixers: dict[str, dict[str, Any]] = {
            "linear_attention": {"attention": None, "state": lightning},
            "full_attention": {"attention": full},
        }
        before = "linear_attn_alpha_factor" if kind == "linear_attention" else "full_attn_alpha_factor"
        layers += layers_by_kind(
            [kind],
            mixers,
            [experts],
            attention_norm=norm,
            feed_forward_norm=norm,
            residual=NormedResidualSpec(
                mixer_multiplier=float(config[before]), feed_forward_multiplier=float(config["mlp_alpha_factor"])
            ),
        )
    return architecture(name, config, layers, norm)


def _as_published(name: str, config: Config) -> ModelSpec:
    """The publisher's config.json, from before transformers had the model."""
    require(config, "postnorm", True)
    require(config, "shared_intermediate_size", 0)
    return _minimax(name, config)


def _minimax_m3(name: str, config: Config) -> ModelSpec:
    """The publisher's config.json has the settings of sparse attention in a dictionary, and numbers for kinds of
    layers."""
    sparse = config.get("sparse_attention_config") or {}
    config = {**config, **{_INDEX[key]: value for key, value in sparse.items() if key in _INDEX}}
    require(config, "qk_norm_type", "per_head")
    require(config, "use_qk_norm", True)
    require(config, "use_gemma_norm", True)
    require(config, "attention_output_gate", False)
    require(config, "scoring_func", "sigmoid")
    require(config, "use_routing_bias", True)
    require(config, "n_shared_experts", 1)
    require(config, "hidden_act", "silu", "swigluoai")  # in transformers the former means the same
    require(config, "swiglu_alpha", 1.702)
    require(config, "swiglu_limit", 7.0)
    require(sparse, "use_sparse_attention", True)
    require(sparse, "sparse_score_type", "max")
    require(sparse, "sparse_init_block", 0)
    require(config, "index_n_heads", config["num_key_value_heads"])
    count = int(config["num_hidden_layers"])
    kinds = config.get("layer_types") or [
        _M3_KINDS[bool(each)] for each in sparse.get("sparse_attention_freq") or [0] * count
    ]
    of_values = sparse.get("sparse_disable_index_value") or [1] * len(kinds)
    if any(kind == _M3_KINDS[1] and not each for kind, each in zip(kinds, of_values, strict=True)):
        raise ConfigError("sparse_disable_index_value: values of the indexer are not supported")
    mixtures = [("dense", "sparse")[bool(each)] for each in config.get("moe_layer_freq") or [1] * count]
    mixtures = config.get("mlp_layer_types") or mixtures
    if not len(kinds) == len(mixtures) == count or not set(mixtures) <= {"dense", "sparse"}:
        raise ConfigError(
            f"the types of attention and feed-forward must be those of the {count} layers: {kinds}, {mixtures}"
        )
    norm, rope_spec = rms_norm(config, offset=1.0), rope(config, head_dim(config))
    indexer = BlockIndexerSpec(
        head_dim=int(config["index_head_dim"]),
        norm=norm,
        block_size=int(config["index_block_size"]),
        num_blocks=int(config["index_topk_blocks"]),
        num_local_blocks=int(config["index_local_blocks"]),
    )
    mixers = {
        kind: {"attention": attention(config, rope_spec, qk_norm=norm, indexer=each)}
        for kind, each in zip(_M3_KINDS, (None, indexer), strict=True)
    }
    dense, shared = (
        MLPSpec(intermediate_size=int(config[f"{part}_intermediate_size"]), activation="swiglu_oai")
        for part in ("dense", "shared")
    )
    experts = MoESpec(
        num_experts=int(config["num_local_experts"]),
        top_k=int(config["num_experts_per_tok"]),
        intermediate_size=int(config["intermediate_size"]),
        activation="swiglu_oai",
        scoring="sigmoid",
        renormalize=True,
        scale=float(config["routed_scaling_factor"]),
        correction_bias=True,
        shared=shared,
    )
    inner = [experts if kind == "sparse" else dense for kind in mixtures]
    layers = layers_by_kind(kinds, mixers, inner, attention_norm=norm, feed_forward_norm=norm)
    return architecture(name, config, layers, norm)


def _m3_media(arch: ModelSpec, config: Config) -> ModelSpec:
    """With positions along time, rows and columns, for as many of a head's features as are a multiple of 6."""
    vision = config["vision_config"]
    own = {"num_heads": 16, "depth": 32, "in_channels": 3, **vision}
    for name, same in (("num_heads", "attention_heads"), ("depth", "hidden_layers"), ("in_channels", "channels")):
        own[name] = int(vision.get(f"num_{same}", own[name]))
    width, output = int(own.get("hidden_size", 1280)), arch.hidden_size
    theta = (vision.get("rope_parameters") or vision).get("rope_theta") or 10000.0
    rope = RopeSpec(theta=float(theta), dim=width // own["num_heads"] // 6 * 6)
    norm = layer_norm(own.get("layer_norm_eps", 1e-5))
    inner = MLPSpec(
        intermediate_size=int(own.get("intermediate_size", 5120)),
        activation=activation(own.get("hidden_act", "gelu")),
        is_gated=False,
        bias=True,
    )
    squares = int(own.get("spatial_merge_size", 2)) ** 2
    projector = MergerSpec(width=width, merged=1, output=output, inner=int(config["projector_hidden_size"]), norm=None)
    media = grid_media(
        arch,
        {**config, "vision_config": own},
        width,
        norm,
        inner,
        output,
        patch_bias=False,
        attention={"rope": rope},
        embedding_norm=norm,
        projector=projector,
        merger=replace(projector, width=output, merged=squares),
        turns_by_time=True,
        is_joint=True,
    )
    return replace(arch, media=media)


def _rows(layer: LayerSpec, module: str, part: str) -> Runs | None:
    """Each head has its query, key and value together."""
    if not isinstance(layer.state, LightningSpec) or module != "layers.state.input" or part == "gate":
        return None
    size, first = layer.state.value_head_dim, ("q", "k", "v").index(part)
    return [range((3 * head + first) * size, (3 * head + first + 1) * size) for head in range(layer.state.num_heads)]


_NAMES = NAMES | {
    "layers.state.input": "model.layers.{layer}.self_attn.qkv_proj",
    "layers.state.input.gate": "model.layers.{layer}.self_attn.output_gate",
    "layers.state.norm": "model.layers.{layer}.self_attn.norm",
    "layers.state.output": "model.layers.{layer}.self_attn.out_proj",
    "layers.feed_forward.router": "model.layers.{layer}.block_sparse_moe.gate",
    "layers.feed_forward.experts.gate_up.gate": "model.layers.{layer}.block_sparse_moe.experts.{expert}.w1",
    "layers.feed_forward.experts.gate_up.up": "model.layers.{layer}.block_sparse_moe.experts.{expert}.w3",
    "layers.feed_forward.experts.down": "model.layers.{layer}.block_sparse_moe.experts.{expert}.w2",
}
_FACTORS = [f"{part}_{factor}_factor" for part in ("full_attn", "linear_attn", "mlp") for factor in ("alpha", "beta")]
_DEFAULTS = {
    "max_position_embeddings": 131072,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1000000.0,
    "hidden_act": "silu",
    **dict.fromkeys(_FACTORS, 1),
}
_ORIGINAL_FACTORS = {
    f"layernorm_{original}_{factor}": f"{part}_{factor}_factor"
    for original, part in (("full_attention", "full_attn"), ("linear_attention", "linear_attn"), ("mlp", "mlp"))
    for factor in ("alpha", "beta")
}
_M3_KINDS = ("full_attention", "minimax_m3_sparse")
_INDEX = {
    "sparse_num_index_heads": "index_n_heads",
    "sparse_index_dim": "index_head_dim",
    "sparse_block_size": "index_block_size",
    "sparse_topk_blocks": "index_topk_blocks",
    "sparse_local_block": "index_local_blocks",
}
_M3 = {
    "max_position_embeddings": 524288,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
    "dense_intermediate_size": 12288,
    "shared_intermediate_size": 3072,
    "routed_scaling_factor": 2.0,
    "rope_theta": 5000000.0,
    "hidden_act": "silu",
    "index_n_heads": 4,
    "index_head_dim": 128,
    "index_block_size": 128,
    "index_topk_blocks": 16,
    "index_local_blocks": 1,
}
_M3_NAMES = {  # of transformers
    **NAMES_BY_EXPERT,
    **STACKED_EXPERTS,
    "layers.feed_forward.gate_up": "model.layers.{layer}.mlp.gate_up_proj",
    "layers.feed_forward.shared.gate_up": "model.layers.{layer}.mlp.shared_experts.gate_up_proj",
    "layers.feed_forward.router.correction_bias": "model.layers.{layer}.mlp.gate.e_score_correction_bias",
    "layers.attention.indexer.query": "model.layers.{layer}.self_attn.indexer.q_proj",
    "layers.attention.indexer.key": "model.layers.{layer}.self_attn.indexer.k_proj",
    "layers.attention.indexer.query_norm": "model.layers.{layer}.self_attn.indexer.q_norm",
    "layers.attention.indexer.key_norm": "model.layers.{layer}.self_attn.indexer.k_norm",
}
_M3_PUBLISHED_NAMES = {
    **MIXTRAL_NAMES,
    "layers.feed_forward.shared.gate_up": "model.layers.{layer}.block_sparse_moe.shared_experts.{part}_proj",
    "layers.feed_forward.shared.down": "model.layers.{layer}.block_sparse_moe.shared_experts.down_proj",
    "layers.feed_forward.router.correction_bias": "model.layers.{layer}.block_sparse_moe.e_score_correction_bias",
    "layers.attention.indexer.query": "model.layers.{layer}.self_attn.index_q_proj",
    "layers.attention.indexer.key": "model.layers.{layer}.self_attn.index_k_proj",
    "layers.attention.indexer.query_norm": "model.layers.{layer}.self_attn.index_q_norm",
    "layers.attention.indexer.key_norm": "model.layers.{layer}.self_attn.index_k_norm",
}
_M3_VISION = "vision_tower.vision_model"
_M3_TOWER = {
    "tower.patches": f"{_M3_VISION}.embeddings.patch_embedding",
    "tower.embedding_norm": f"{_M3_VISION}.pre_layrnorm",
    **{
        f"tower.layers.{module}": f"{_M3_VISION}.encoder.layers.{{layer}}.{name}"
        for module, name in {
            "attention_norm": "layer_norm1",
            "attention.qkv": "self_attn.{part}_proj",
            "attention.output": "self_attn.out_proj",
            "feed_forward_norm": "layer_norm2",
            "feed_forward.gate_up": "mlp.fc1",
            "feed_forward.down": "mlp.fc2",
        }.items()
    },
    "tower.projector.up": "multi_modal_projector.linear_1",
    "tower.projector.down": "multi_modal_projector.linear_2",
    "tower.merger.up": "patch_merge_mlp.linear_1",
    "tower.merger.down": "patch_merge_mlp.linear_2",
}
_BUFFERS = r"self_attn\.(slope_rate|query_decay|key_decay|diagonal_decay)$"
FAMILIES = {
    "MiniMaxForCausalLM": Family(_minimax, _NAMES, _DEFAULTS, rows=_rows, ignored_pattern=_BUFFERS),
    **dict.fromkeys(
        ("MiniMaxText01ForCausalLM", "MiniMaxM1ForCausalLM"),
        Family(_as_published, _NAMES, _DEFAULTS, _ORIGINAL_FACTORS, rows=_rows, ignored_pattern=_BUFFERS),
    ),
    "MiniMaxM3VLForCausalLM": Family(_minimax_m3, _M3_NAMES, _M3),
    "MiniMaxM3SparseForConditionalGeneration": Family(
        _minimax_m3,
        in_language_model(_M3_PUBLISHED_NAMES) | _M3_TOWER,
        _M3 | {"image_token_id": 200025, "video_token_id": 200026, "projector_hidden_size": 6144},
        aliases={"image_token_index": "image_token_id", "video_token_index": "video_token_id"},
        media=_m3_media,
        ignored_prefixes=(*NOT_TEXT, "patch_merge_mlp.", "model.patch_merge_mlp."),
        ignored_pattern=r"rotary_emb\.inv_freq$|(^|\.)mtp\.",
        after_layers="multi-token prediction",
    ),
}
