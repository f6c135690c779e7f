"""A tiny random checkpoint of architectures that only transformers has, as transformers writes it. A line for each."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from quire.engine.models.transformers_backend.shrink import shrink
from tests.fakes.families import SIZES, write_model


class Other(NamedTuple):
    """`layouts` are tensor × pipeline parallel sizes."""

    architecture: str
    changes: Mapping[str, Any] = MappingProxyType({})
    layouts: tuple[tuple[int, int], ...] = ((1, 1), (2, 1), (1, 2), (2, 2))


_ONE_STAGE = ((1, 1), (2, 1))
_MOE = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32}

_INKLING: dict[str, Any] = {
    "head_dim": 12,
    "swa_head_dim": 8,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 4,
}
_INKLING |= {"sliding_window_size": 24, "rel_extent": 40, "d_rel": 8, "log_scaling_n_floor": 10}
_INKLING |= {"num_experts_per_tok": 2, "moe_intermediate_size": 32, "logits_mup_width_multiplier": 2.0}
_INKLING_2 = _INKLING | {"n_routed_experts": 6, "unpadded_vocab_size": 131, "rel_l2_clip_threshold": 2.0}

CASES = {
    "OLMo": Other("OlmoForCausalLM", {"clip_qkv": 2.0}),
    "Arcee": Other("ArceeForCausalLM"),
    "Helium": Other("HeliumForCausalLM", {"head_dim": 12}),
    "Apertus": Other("ApertusForCausalLM"),
    "EXAONE 4, windows": Other("Exaone4ForCausalLM", {"sliding_window": 24, "sliding_window_pattern": 2}),
    "GLM-4": Other("Glm4ForCausalLM", {"head_dim": 12, "partial_rotary_factor": 0.5}),
    "ERNIE 4.5": Other("Ernie4_5ForCausalLM", {"head_dim": 12, "use_bias": True, "tie_word_embeddings": True}),
    "Seed-OSS": Other("SeedOssForCausalLM", {"head_dim": 12}),
    "MiniCPM3": Other(
        "MiniCPM3ForCausalLM",
        {"q_lora_rank": 20, "kv_lora_rank": 16, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10}
        | {"num_key_value_heads": 4, "head_dim": 8},
    ),
    "Hunyuan": Other("HunYuanDenseV1ForCausalLM", {"head_dim": 12}, _ONE_STAGE),
    "Nemotron": Other("NemotronForCausalLM", {"head_dim": 12}, _ONE_STAGE),
    "Phi-3.5-MoE": Other("PhimoeForCausalLM", {"num_local_experts": 6, "num_experts_per_tok": 2}, _ONE_STAGE),
    "OLMoE": Other("OlmoeForCausalLM", _MOE, _ONE_STAGE),
    "ERNIE 4.5 MoE": Other(
        "Ernie4_5_MoeForCausalLM",
        {"moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": 32, "moe_num_shared_experts": 1}
        | {"moe_layer_start_index": 1, "tie_word_embeddings": True},
    ),
    "StableLM": Other("StableLmForCausalLM", {"partial_rotary_factor": 0.5}, ((1, 1),)),
    "OPT-350M": Other(
        "OPTForCausalLM",
        {"ffn_dim": 80, "word_embed_proj_dim": 24, "do_layer_norm_before": False, "tie_word_embeddings": True},
        ((1, 1),),
    ),
    "Zamba": Other(
        "ZambaForCausalLM",
        {"layers_block_type": ["linear_attention", "hybrid"] * 2, "attention_hidden_size": 96, "attention_head_dim": 24}
        | {"mamba_d_state": 8, "mamba_dt_rank": 4},
        ((1, 1),),
    ),
    "LaraMini": Other(
        "LaraMiniForCausalLM",
        {"layer_types": ["linear_attention", "sliding_attention", "linear_attention", "full_attention"]}
        | {"sliding_window": 24, "head_dim": 12, "num_experts": 6, "num_experts_per_tok": 2}
        | {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}
        | {
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 12,
        },
    ),
    "Zaya": Other(
        "ZayaForCausalLM",
        {"layer_types": ["hybrid", "hybrid_sliding"] * 2, "sliding_window": 24, "head_dim": 16, "num_experts": 6}
        | {"num_experts_per_tok": 1, "moe_intermediate_size": 32, "router_hidden_size": 16}
        | {"initializer_range": 0.5, "tie_word_embeddings": True},
        ((1, 1),),
    ),
    "Inkling": Other(
        "InklingForCausalLM",
        {"layer_types": ["hybrid_sliding", "hybrid"] * 2, "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]}
        | {"n_routed_experts": 6, "unpadded_vocab_size": 131}
        | _INKLING,
    ),
    "Inkling 2": Other(
        "Inkling2ForCausalLM",
        {"layer_types": ["hybrid_sliding", "hybrid"] * 2, "n_layers_per_attn_res_block": 2} | _INKLING_2,
        _ONE_STAGE,
    ),
    "Inkling 2, loops": Other(
        "Inkling2LoopForCausalLM",
        {"layer_types": ["hybrid_sliding", "hybrid_sliding", "hybrid", "hybrid"], "n_layers_per_attn_res_block": 1}
        | {"loop_layer_index_start": 1, "loop_layer_index_end": 3, "loop_num_passes": 3, "loop_gate_rank": 8}
        | _INKLING_2,
        _ONE_STAGE,
    ),
    "Doge": Other("DogeForCausalLM", layouts=((1, 1), (1, 2))),
    "Dory": Other(
        "DoryForCausalLM",
        {"layer_types": ["sliding_attention", "full_attention"] * 3, "num_hidden_layers": 6, "sliding_window": 24}
        | {"n_input_layers": 1, "n_output_layers": 2, "n_recurrent_loops": 3, "head_dim": 12},
        ((1, 1),),
    ),
}


def small_sizes(kind: Any) -> dict[str, Any]:
    """The usual sizes that a config class has, made small."""
    values: dict[str, Any] = kind().to_dict()
    small = shrink(values)
    return {name: value for name, value in small.items() if value != values[name]}


def write(case: str, folder: Path) -> Any:
    """The case's model in `folder`, and as transformers has it, in float32 and ready to be asked."""
    return write_model(CASES[case].architecture, SIZES | dict(CASES[case].changes), folder)
