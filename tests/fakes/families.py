"""A tiny random checkpoint of every family that is served, as transformers writes it. A line for each family."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.fakes.checkpoints import TEXT_PARTS, text_of

SIZES: dict[str, Any] = {
    "vocab_size": 131,  # no multiple of 2 or 4: the last rank's rows are padded
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,  # far enough from uniform that rounding cannot change the likeliest token
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 130,
    "pad_token_id": None,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN = {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "original_max_position_embeddings": 64}
_LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
    "long_factor": [1.0, 1.5, 2.0, 3.0, 4.0, 5.0],
}
_PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
_WINDOWS = {"sliding_window": 24}

_GROWING = {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.5}
_PALIGEMMA: dict[str, Any] = {"model_type": "siglip_vision_model", "hidden_size": 16, "intermediate_size": 16}
_PALIGEMMA |= {"num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28, "patch_size": 14}
_PIXTRAL: dict[str, Any] = {
    "vision_config": {
        "model_type": "pixtral",
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "head_dim": 8,
        "image_size": 28,
        "patch_size": 14,
    }
}

_EXPERTS = {"moe_intermediate_size": 20, "num_experts_per_tok": 2}
_LATENT = {
    **_EXPERTS,
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "q_lora_rank": 20,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
}
_HYBRID = {
    "head_dim": 16,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "layer_types": ["linear_attention", "full_attention"] * 2,
}
_DELTA = {
    "num_key_value_heads": 4,
    "num_local_experts": 6,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "q_lora_rank": None,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
}
_STATES = {
    "mamba_n_heads": 8,
    "mamba_d_head": 12,
    "mamba_d_state": 16,
    "mamba_chunk_size": 32,
}
_NEMOTRON = {
    "num_hidden_layers": 6,
    "head_dim": 16,
    "mamba_num_heads": 8,
    "mamba_head_dim": 12,
    "ssm_state_size": 16,
    "n_groups": 4,
    "chunk_size": 32,
    "time_step_min": 1e-9,  # transformers applies it to prompts only
}
_ZAMBA = {
    "layers_block_type": ["linear_attention", "hybrid", "hybrid", "linear_attention", "hybrid", "hybrid"],
    "num_hidden_layers": 6,
    "num_key_value_heads": 4,
    "n_mamba_heads": 8,
    "mamba_ngroups": 4,
    "mamba_d_state": 16,
    "num_mem_blocks": 2,
    "use_shared_attention_adapter": True,
    "adapter_rank": 6,
    "chunk_size": 32,
    "time_step_min": 1e-9,  # transformers applies it to prompts only
    "initializer_range": 0.1,  # with 0.2, float32 is not exact enough
    "tie_word_embeddings": True,
}
_INDEXED = {"index_topk": 20, "index_head_dim": 12, "index_n_heads": 16}
_VISION = {
    "vision_config": {
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_heads": 2,
        "out_hidden_size": 48,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [0],
    }
}
_M3 = {
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "intermediate_size": 20,
    "dense_intermediate_size": 80,
    "shared_intermediate_size": 24,
    "head_dim": 16,
    "partial_rotary_factor": 0.5,
    "moe_layer_freq": [0, 1, 1, 1],
    "sparse_attention_config": {
        "sparse_num_index_heads": 2,
        "sparse_index_dim": 12,
        "sparse_block_size": 6,
        "sparse_topk_blocks": 4,
        "sparse_local_block": 1,
        "sparse_attention_freq": [0, 1, 1, 1],
    },
}
_STEP: dict[str, Any] = {
    "pad_token_id": 0,
    "head_dim": 16,
    "sliding_window": 24,
    "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
    "moe_intermediate_size": 20,
}
_STEP_AS_PUBLISHED = {
    "num_attention_groups": 2,
    "moe_num_experts": 6,
    "moe_top_k": 2,
    "share_expert_dim": 24,
    "moe_router_scaling_factor": 3.0,
    "num_nextn_predict_layers": 1,
    "moe_layers_enum": "1,2,3,4",
    "layer_types": [*_STEP["layer_types"], "sliding_attention"],
    "attention_other_setting": {
        "attention_type": "sliding_attention",
        "num_attention_heads": 8,
        "num_attention_groups": 2,
        "head_dim": 16,
    },
    "rope_theta": [50000.0, 10000.0, 10000.0, 50000.0, 10000.0],
    "partial_rotary_factors": [0.5, 1.0, 1.0, 0.5, 1.0],
    "rope_scaling": {key: value for key, value in _LLAMA3.items() if key != "rope_theta"},
    "yarn_only_types": ["full_attention"],
    "swiglu_limits": [0.0, 0.0, 7.0, 7.0, 0.0],
    "swiglu_limits_shared": [0.0, 16.0, 0.0, 16.0, 0.0],
}
_COMPRESSED = {
    "num_key_value_heads": 1,
    "head_dim": 16,
    "partial_rotary_factor": 0.5,
    "q_lora_rank": 24,
    "o_groups": 4,
    "o_lora_rank": 12,
    "sliding_window": 14,
    "layer_types": [
        "sliding_attention",
        *("compressed_sparse_attention", "heavily_compressed_attention", "compressed_sparse_attention"),
    ],
    "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
    "mlp_layer_types": ["hash_moe", "moe", "hash_moe", "moe"],
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "index_topk": 6,
    "index_head_dim": 12,
    "index_n_heads": 16,
    "hc_mult": 3,
    "hc_sinkhorn_iters": 3,
}
_RATES_AS_PUBLISHED = {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128}
_DEEPSEEK_YARN = {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 32, "beta_slow": 1}

_GEMMA4 = {
    "head_dim": 16,
    "global_head_dim": 24,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0,
    "final_logit_softcapping": 5.0,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "tie_word_embeddings": True,
    **_WINDOWS,
}
_GEMMA3N = {
    "head_dim": 16,
    "intermediate_size": [80, 96, 80, 80, 80, 80, 80],
    "num_hidden_layers": 7,
    "layer_types": ["sliding_attention", *["sliding_attention", "full_attention"] * 3],
    "num_kv_shared_layers": 3,
    "activation_sparsity_pattern": [0.8, 0.0, 0.8, 0.8, 0.0, 0.0, 0.0],
    "vocab_size_per_layer_input": 120,
    "hidden_size_per_layer_input": 8,
    "laurel_rank": 10,
    "final_logit_softcapping": 5.0,
    "tie_word_embeddings": True,
    "pad_token_id": 0,
    **_WINDOWS,
}
_GEMMA4_SHARED = {
    "attention_k_eq_v": False,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 131,
    "num_hidden_layers": 7,
    "layer_types": ["sliding_attention", *["sliding_attention", "full_attention"] * 3],
    "num_kv_shared_layers": 3,
    "use_double_wide_mlp": True,
}
_GEMMA4_VISION = {
    "vision_config": {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    | {"num_key_value_heads": 2, "head_dim": 8},
    "audio_config": None,
    "tie_word_embeddings": True,
}
_LLAMA4 = {
    "head_dim": 12,
    "intermediate_size": 20,
    "intermediate_size_mlp": 80,
    "num_local_experts": 5,
    "interleave_moe_layer_step": 2,
    "attention_chunk_size": 32,
    "floor_scale": 24,
}

_MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 2, 2]}}
_CLIP: dict[str, Any] = {
    "vision_config": {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    | {"image_size": 28, "patch_size": 14},
    "tie_word_embeddings": False,
}
_SIGLIP_OF_CLIP = {"model_type": "siglip_vision_model", "hidden_size": 16, "intermediate_size": 16}
_SIGLIP_OF_CLIP |= {"num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 28, "patch_size": 14}
_SIGLIP = {
    "vision_config": {"model_type": "siglip2_vision_model", "hidden_size": 16, "intermediate_size": 16}
    | {"num_hidden_layers": 1, "num_attention_heads": 2}
}

_FOUR_AXES: dict[str, Any] = {"mrope_section": [2, 2, 2, 2]}
_SAM: dict[str, Any] = {"hidden_size": 16, "mlp_dim": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
_SAM |= {"image_size": 64, "window_size": 2, "output_channels": 8, "downsample_channels": [8, 16]}
_READER = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
_READER |= {"num_key_value_heads": 2}
_KIMI = {
    "vision_config": {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2},
    "projection_hidden_size": 16,
    "text_config": SIZES | _LATENT | {"model_type": "deepseek_v3"},
    "tie_word_embeddings": False,
}

_GLM_NEXT = (
    _LATENT
    | _INDEXED
    | {
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "qk_rope_head_dim": 0,
        "index_kpool": 4,
        "linear_head_dim": 12,
        "linear_num_heads": 4,
        "hc_mult": 3,
        "layer_types": ["linear_attention", "indexed_attention"] * 2,
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
    }
)
_DOTS = {
    **_LATENT,
    **_INDEXED,
    "n_shared_experts": 2,
    "n_group": 2,
    "topk_group": 1,
    "shared_experts_intermediate_size": 12,
    "routed_scaling_factor": 1.5,
    "layer_types": ["indexed_attention", "sliding_attention"] * 2,
    "sliding_window": 24,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 4,
    "swa_q_lora_rank": 16,
    "swa_kv_lora_rank": 24,
    "swa_head_dim": 20,
    "swa_qk_nope_head_dim": 14,
    "swa_v_head_dim": 12,
}
_QWEN4 = (
    _HYBRID
    | _EXPERTS
    | {
        "num_experts": 6,
        "shared_expert_intermediate_size": 24,
        "output_gate_type": "sigmoid",
        "rope_parameters": {**_PLAIN, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]},
        "hc_count": 3,
        "hc_lowrank": 10,
        "indexer_n_heads": 16,  # with few, several groups have a score of 0
        "indexer_kv_heads": 1,
        "indexer_head_dim": 12,
        "indexer_budget": 20,
        "indexer_compress_ratio": 4,
        "ple_layer_ids": [1, 3],
        "ple_embed_dim": 24,
        "ple_conv_kernel_size": 3,
        "ngram_size": 3,
        "heads_per_ngram": 2,
        "ngram_vocab_size_base": 20,
        "make_ngram_vocab_size_divisible_by": 8,
        "split_ngram_parts": 5,
    }
)
_GLM_NEXT_VISION = {
    "vision_config": {
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 16,
        "projection_intermediate_size": 16,
        "num_heads": 2,
        "out_hidden_size": 48,
        "image_size": 28,
        "patch_size": 14,
    }
}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("LlamaForCausalLM", {}),
    "Llama, multi-head, tied": ("LlamaForCausalLM", {"num_key_value_heads": 4, "tie_word_embeddings": True}),
    "Llama, llama3 rope": ("LlamaForCausalLM", {"rope_parameters": _LLAMA3}),
    "Llama, linear rope": (
        "LlamaForCausalLM",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 2.0}},
    ),
    "Llama, dynamic rope": (
        "LlamaForCausalLM",
        {
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
            "max_position_embeddings": 64,
        },
    ),
    "Llama, yarn rope": ("LlamaForCausalLM", {"rope_parameters": _YARN}),
    "Llama, biases, head_dim": ("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True, "head_dim": 10}),
    "Mistral": ("MistralForCausalLM", {"sliding_window": None}),
    "Mistral, windows": ("MistralForCausalLM", _WINDOWS),
    "Qwen2, tied": ("Qwen2ForCausalLM", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    "Qwen2, some windows": ("Qwen2ForCausalLM", {"use_sliding_window": True, "max_window_layers": 2, **_WINDOWS}),
    "Qwen3": ("Qwen3ForCausalLM", {"head_dim": 24}),
    "Llama 4": ("Llama4ForCausalLM", _LLAMA4),
    "Llama 4 with a vision part": (
        "Llama4ForConditionalGeneration",
        {
            "vision_config": {
                "hidden_size": 16,
                "intermediate_size": 64,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
            }
            | {"vision_output_dim": 16, "image_size": 28, "patch_size": 14}
            | {"projector_input_dim": 16, "projector_output_dim": 16},
            "text_config": SIZES | _LLAMA4,
        },
    ),
    "Seed-OSS": ("SeedOssForCausalLM", {"head_dim": 10, "attention_out_bias": True}),
    "Ministral": (
        "MinistralForCausalLM",
        {"head_dim": 12, "layer_types": ["sliding_attention", "full_attention"] * 2, **_WINDOWS},
    ),
    "Ministral 3": ("Ministral3ForCausalLM", {"head_dim": 12, "rope_parameters": _GROWING}),
    "Mistral Small 3 with a vision part": (
        "Mistral3ForConditionalGeneration",
        _PIXTRAL | {"text_config": SIZES | {"model_type": "mistral", "sliding_window": None}},
    ),
    "Ministral 3 with a vision part": (
        "Mistral3ForConditionalGeneration",
        _PIXTRAL | {"text_config": SIZES | {"model_type": "ministral3", "head_dim": 12, "rope_parameters": _GROWING}},
    ),
    "Granite": (
        "GraniteForCausalLM",
        {
            "attention_multiplier": 0.2,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.5,
            "logits_scaling": 2.0,
            "tie_word_embeddings": True,
        },
    ),
    "SmolLM3": ("SmolLM3ForCausalLM", {"no_rope_layer_interval": 2}),
    "Phi-3": ("Phi3ForCausalLM", {}),
    "Phi-3, longrope": (
        "Phi3ForCausalLM",
        {"rope_parameters": _LONG, "original_max_position_embeddings": 256, "max_position_embeddings": 1024},
    ),
    "Phi-3, long factors": (
        "Phi3ForCausalLM",
        {"rope_parameters": _LONG, "original_max_position_embeddings": 64, "max_position_embeddings": 256},
    ),
    "Phi-4-mini, partial rotary": ("Phi3ForCausalLM", {"partial_rotary_factor": 0.5, "tie_word_embeddings": True}),
    "Phi-4-multimodal": (
        "Phi4MultimodalForCausalLM",
        {
            "vision_config": {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
            | {"num_attention_heads": 2, "crop_size": 28, "patch_size": 14, "image_token_id": 129},
            "audio_config": {"hidden_size": 16, "intermediate_size": 16, "num_blocks": 1, "num_attention_heads": 2}
            | {"audio_token_id": 130, "depthwise_multiplier": 1, "nemo_conv_channels": 8, "input_size": 8},
        },
    ),
    "Gemma": ("GemmaForCausalLM", {"head_dim": 16, "tie_word_embeddings": True}),
    "Gemma 2": (
        "Gemma2ForCausalLM",
        {
            "head_dim": 16,
            "query_pre_attn_scalar": 20,
            "final_logit_softcapping": 5.0,
            "attn_logit_softcapping": 3.0,
            "tie_word_embeddings": True,
            **_WINDOWS,
        },
    ),
    "Gemma 3": (
        "Gemma3ForCausalLM",
        {"head_dim": 16, "query_pre_attn_scalar": 20, "sliding_window_pattern": 3, "tie_word_embeddings": True}
        | _WINDOWS,
    ),
    "Gemma 3, linear rope on full layers": (
        "Gemma3ForCausalLM",
        {
            "head_dim": 16,
            "rope_parameters": {
                "sliding_attention": _PLAIN,
                "full_attention": {"rope_type": "linear", "rope_theta": 1000000.0, "factor": 8.0},
            },
            "tie_word_embeddings": True,
        }
        | _WINDOWS,
    ),
    "PaliGemma": (
        "PaliGemmaForConditionalGeneration",
        {
            "vision_config": _PALIGEMMA,
            "projection_dim": 48,
            "tie_word_embeddings": True,
            # With True, the default, transformers' `generate` is causal for text, but its sdpa without masks is not.
            "text_config": SIZES
            | {"model_type": "gemma", "head_dim": 16, "tie_word_embeddings": True}
            | {"use_bidirectional_attention": False},
        },
    ),
    "PaliGemma 2": (
        "PaliGemmaForConditionalGeneration",
        {
            "vision_config": _PALIGEMMA,
            "projection_dim": 48,
            "tie_word_embeddings": True,
            "text_config": SIZES
            | {"model_type": "gemma2", "head_dim": 16, "query_pre_attn_scalar": 20, "tie_word_embeddings": True}
            | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0, "sliding_window": 16},
        },
    ),
    "Gemma 3 with a vision part": (
        "Gemma3ForConditionalGeneration",
        {
            "vision_config": {
                "hidden_size": 16,
                "intermediate_size": 16,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
            }
            | {"image_size": 28, "patch_size": 14},
            "mm_tokens_per_image": 4,
            "image_token_id": 130,
            "tie_word_embeddings": True,
            "text_config": SIZES
            | {"head_dim": 16, "query_pre_attn_scalar": 20, "sliding_window_pattern": 2, "tie_word_embeddings": True}
            | _WINDOWS,
        },
    ),
    "Gemma 4": ("Gemma4ForCausalLM", _GEMMA4),
    "Gemma 3n": ("Gemma3nForCausalLM", _GEMMA3N),
    "Gemma 3n, another stream": (
        "Gemma3nForCausalLM",
        _GEMMA3N | {"altup_active_idx": 1, "altup_num_inputs": 3, "altup_correct_scale": False},
    ),
    "Gemma 3n, its text part": (
        "Gemma3nForConditionalGeneration",
        {"text_config": SIZES | _GEMMA3N, "tie_word_embeddings": True, "vision_config": {}},
    ),
    "RecurrentGemma": (
        "RecurrentGemmaForCausalLM",
        {"attention_window_size": 24, "w_init_variance_scale": 0.2, "tie_word_embeddings": True},
    ),
    "Gemma 4, experts": (
        "Gemma4ForCausalLM",
        _GEMMA4 | {"enable_moe_block": True, "num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 20},
    ),
    "Gemma 4, layer inputs, shared keys and values": ("Gemma4ForCausalLM", _GEMMA4 | _GEMMA4_SHARED),
    "Gemma 4 with a vision part, layer inputs": (
        "Gemma4ForConditionalGeneration",
        _GEMMA4_VISION | {"text_config": SIZES | _GEMMA4 | _GEMMA4_SHARED | {"pad_token_id": 0}},
    ),
    "Gemma 4 with a vision part": (
        "Gemma4ForConditionalGeneration",
        _GEMMA4_VISION | {"text_config": SIZES | _GEMMA4 | {"pad_token_id": 0}},
    ),
    "OLMo 2": ("Olmo2ForCausalLM", {}),
    "OLMo 3": ("Olmo3ForCausalLM", _WINDOWS),
    "OLMo 3, yarn on full layers": (
        "Olmo3ForCausalLM",
        _WINDOWS | {"rope_parameters": {"sliding_attention": _PLAIN, "full_attention": _YARN}},
    ),
    "Command R": ("CohereForCausalLM", {"tie_word_embeddings": True}),
    "Command R+": ("CohereForCausalLM", {"use_qk_norm": True, "tie_word_embeddings": True}),
    "Command R7B": ("Cohere2ForCausalLM", {"sliding_window_pattern": 2, "tie_word_embeddings": True, **_WINDOWS}),
    "GPT": ("OpenAIGPTLMHeadModel", {"tie_word_embeddings": True}),
    "GPT-2": ("GPT2LMHeadModel", {"tie_word_embeddings": True}),
    "OPT": ("OPTForCausalLM", {"ffn_dim": 80, "word_embed_proj_dim": 48, "tie_word_embeddings": True}),
    "XGLM": ("XGLMForCausalLM", {"ffn_dim": 80, "init_std": 0.2, "tie_word_embeddings": True}),
    "GPT-J": ("GPTJForCausalLM", {"rotary_dim": 8}),
    "GPT-Neo": (
        "GPTNeoForCausalLM",
        {"attention_types": [[["global", "local"], 2]], "window_size": 24, "tie_word_embeddings": True},
    ),
    "BLOOM": ("BloomForCausalLM", {"tie_word_embeddings": True}),
    "MPT": ("MptForCausalLM", {"tie_word_embeddings": True, "max_seq_len": 256}),
    "MPT, clipped": (
        "MptForCausalLM",
        {"tie_word_embeddings": True, "max_seq_len": 256, "attn_config": {"clip_qkv": 1.0}},
    ),
    "GPT-NeoX": ("GPTNeoXForCausalLM", {"rotary_pct": 0.5}),
    "GPT-NeoX, sequential": ("GPTNeoXForCausalLM", {"use_parallel_residual": False, "rotary_pct": 1.0}),
    "GPT-NeoX Japanese": ("GPTNeoXJapaneseForCausalLM", {"rotary_pct": 0.5, "tie_word_embeddings": True}),
    "Falcon, one KV head": ("FalconForCausalLM", {"tie_word_embeddings": True}),
    "Falcon, groups": (
        "FalconForCausalLM",
        {"new_decoder_architecture": True, "num_kv_heads": 2, "bias": True, "tie_word_embeddings": True},
    ),
    "Falcon, groups, one norm": (
        "FalconForCausalLM",
        {
            "new_decoder_architecture": True,
            "num_kv_heads": 2,
            "num_ln_in_parallel_attn": 1,
            "tie_word_embeddings": True,
        },
    ),
    "Falcon-RW, ALiBi": (
        "FalconForCausalLM",
        {"alibi": True, "multi_query": False, "bias": True, "parallel_attn": False, "tie_word_embeddings": True},
    ),
    "Phi-2": ("PhiForCausalLM", {"partial_rotary_factor": 0.5}),
    "StableLM": ("StableLmForCausalLM", {"partial_rotary_factor": 0.5, "use_qkv_bias": True}),
    "StableLM, parallel": ("StableLmForCausalLM", {"partial_rotary_factor": 0.5, "use_parallel_residual": True}),
    "StarCoder2": ("Starcoder2ForCausalLM", {"tie_word_embeddings": True, **_WINDOWS}),
    "Mixtral": ("MixtralForCausalLM", {"num_local_experts": 5, "sliding_window": None}),
    "DBRX": (
        "DbrxForCausalLM",
        {
            "d_model": SIZES["hidden_size"],
            "attn_config": {"kv_n_heads": 2, "clip_qkv": 0.8, "rope_theta": 5000.0},
            "ffn_config": {"ffn_hidden_size": 20, "moe_num_experts": 5, "moe_top_k": 2},
            "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
        },
    ),
    "Qwen2 MoE": (
        "Qwen2MoeForCausalLM",
        _EXPERTS | {"num_experts": 6, "shared_expert_intermediate_size": 24, "decoder_sparse_step": 2},
    ),
    "Qwen3 MoE": ("Qwen3MoeForCausalLM", _EXPERTS | {"num_experts": 6, "norm_topk_prob": True, "head_dim": 12}),
    "Granite MoE": (
        "GraniteMoeForCausalLM",
        {
            "num_local_experts": 5,
            "attention_multiplier": 0.2,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.5,
            "logits_scaling": 2.0,
        },
    ),
    "GLM-4 MoE": (
        "Glm4MoeForCausalLM",
        _EXPERTS | {"n_routed_experts": 6, "first_k_dense_replace": 1, "use_qk_norm": True, "attention_bias": True},
    ),
    "dots1": (
        "Dots1ForCausalLM",
        _EXPERTS
        | {
            "n_routed_experts": 6,
            "n_shared_experts": 2,
            "first_k_dense_replace": 1,
            "n_group": 2,
            "norm_topk_prob": True,
        }
        | {"max_window_layers": 2, "routed_scaling_factor": 1.5, **_WINDOWS},
    ),
    "MiniMax-M2": (
        "MiniMaxM2ForCausalLM",
        {"num_local_experts": 6, "num_experts_per_tok": 2, "head_dim": 16, "rotary_dim": 8},
    ),
    "Phi-3.5-MoE": (
        "PhimoeForCausalLM",
        {"num_local_experts": 6, "num_experts_per_tok": 2, "router_jitter_noise": 0.1}
        | {"sliding_window": 256, "attention_bias": True, "lm_head_bias": True},
    ),
    "ERNIE 4.5": ("Ernie4_5ForCausalLM", {"head_dim": 12, "use_bias": True, "tie_word_embeddings": True}),
    "ERNIE 4.5 MoE": (
        "Ernie4_5_MoeForCausalLM",
        {"moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": 20, "moe_num_shared_experts": 2}
        | {"moe_layer_interval": 2, "tie_word_embeddings": True},
    ),
    "Hunyuan": (
        "HunYuanDenseV1ForCausalLM",
        {
            "head_dim": 12,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "alpha": 8.0, "factor": 1.0},
        },
    ),
    "Hunyuan MoE": ("HunYuanMoEV1ForCausalLM", {"head_dim": 12, "num_experts": 6, "moe_topk": 2}),
    "OLMoE": ("OlmoeForCausalLM", {"num_experts": 6, "num_experts_per_tok": 2, "norm_topk_prob": True}),
    "OLMoE, clipped": ("OlmoeForCausalLM", {"num_experts": 6, "num_experts_per_tok": 2, "clip_qkv": 0.8}),
    "EXAONE 4": ("Exaone4ForCausalLM", {"sliding_window_pattern": 2, **_WINDOWS}),
    "EXAONE MoE": (
        "ExaoneMoeForCausalLM",
        _EXPERTS | {"num_experts": 6, "n_group": 2, "sliding_window_pattern": 2, **_WINDOWS},
    ),
    "MiMo-V2-Flash": (
        "MiMoV2FlashForCausalLM",
        _EXPERTS
        | {"n_routed_experts": 6, "head_dim": 20, "v_head_dim": 12, "num_key_value_heads": 1, "attention_bias": True}
        | {"layer_types": ["full_attention", "sliding_attention"] * 2, **_WINDOWS}
        | {
            "rope_parameters": {
                kind: {**_PLAIN, "partial_rotary_factor": 0.4} for kind in ("full_attention", "sliding_attention")
            }
        },
    ),
    "gpt-oss": ("GptOssForCausalLM", {"num_local_experts": 5, "num_experts_per_tok": 2, "head_dim": 12, **_WINDOWS}),
    "gpt-oss, yarn rope": (
        "GptOssForCausalLM",
        {
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "head_dim": 12,
            "rope_parameters": {**_YARN, "truncate": False},
            **_WINDOWS,
        },
    ),
    "xLSTM": (
        "xLSTMForCausalLM",
        # the sizes of transformers' cache are multiples of 64
        {"hidden_size": 128, "num_heads": 4, "chunk_size": 32, "autocast_kernel_dtype": "float32"},
    ),
    "RWKV-4": ("RwkvForCausalLM", {"rescale_every": 2}),
    "DeepSeek V2": ("DeepseekV2ForCausalLM", _LATENT | {"topk_method": "group_limited_greedy", "q_lora_rank": None}),
    "DeepSeek V2, greedy": ("DeepseekV2ForCausalLM", _LATENT),
    "DeepSeek V2, yarn rope": (
        "DeepseekV2ForCausalLM",
        _LATENT | {"rope_parameters": {**_DEEPSEEK_YARN, "mscale": 0.707, "mscale_all_dim": 0.707}},
    ),
    "DeepSeek V3": ("DeepseekV3ForCausalLM", _LATENT | {"routed_scaling_factor": 1.5}),
    "Qwen3-Next": (
        "Qwen3NextForCausalLM",
        _HYBRID | _EXPERTS | {"num_experts": 6, "shared_expert_intermediate_size": 24, "decoder_sparse_step": 2},
    ),
    "Lara Mini": (
        "LaraMiniForCausalLM",
        _HYBRID
        | _EXPERTS
        | _WINDOWS
        | {"num_experts": 6, "shared_expert_intermediate_size": 24, "tie_word_embeddings": True}
        | {"layer_types": ["linear_attention", "sliding_attention", "full_attention", "linear_attention"]},
    ),
    "Qwen3.5": ("Qwen3_5ForCausalLM", _HYBRID | {"tie_word_embeddings": True}),
    "Qwen3.5 MoE": (
        "Qwen3_5MoeForCausalLM",
        _HYBRID | _EXPERTS | {"num_experts": 6, "shared_expert_intermediate_size": 24},
    ),
    "Qwen3.5 with a vision part": ("Qwen3_5ForConditionalGeneration", _VISION | {"text_config": SIZES | _HYBRID}),
    "Qwen3.5 MoE with a vision part, stacked experts": (
        "Qwen3_5MoeForConditionalGeneration",
        _VISION
        | {"text_config": SIZES | _HYBRID | _EXPERTS | {"num_experts": 6, "shared_expert_intermediate_size": 24}},
    ),
    "LFM2": (
        "Lfm2ForCausalLM",
        {
            "layer_types": ["conv", "full_attention", "conv", "conv"],
            "block_multiple_of": 16,
            "tie_word_embeddings": True,
        },
    ),
    "LFM2-MoE": (
        "Lfm2MoeForCausalLM",
        _EXPERTS
        | {
            "num_experts": 6,
            "num_dense_layers": 1,
            "layer_types": ["conv", "conv", "full_attention", "conv"],
            "tie_word_embeddings": True,
        },
    ),
    "Mamba-2": (
        "Mamba2ForCausalLM",
        {"num_heads": 8, "head_dim": 12, "n_groups": 4, "state_size": 16, "chunk_size": 32},
    ),
    "Bamba": ("BambaForCausalLM", _STATES | {"attn_layer_indices": [1, 3]}),
    "Granite 4, experts": (
        "GraniteMoeHybridForCausalLM",
        _STATES
        | {
            "num_local_experts": 5,
            "shared_intermediate_size": 24,
            "layer_types": ["linear_attention", "full_attention"] * 2,
            "attention_multiplier": 0.2,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.5,
            "logits_scaling": 2.0,
            "mamba_n_groups": 4,
        },
    ),
    "Granite 4, dense": (
        "GraniteMoeHybridForCausalLM",
        _STATES
        | {
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "shared_intermediate_size": 80,
            "layer_types": ["linear_attention", "full_attention"] * 2,
            "position_embedding_type": "rope",
            "tie_word_embeddings": True,
        },
    ),
    "Nemotron-H": (
        "NemotronHForCausalLM",
        _NEMOTRON
        | {"layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp", "linear_attention", "mlp"]},
    ),
    "Nemotron 3": (
        "NemotronHForCausalLM",
        _NEMOTRON
        | _EXPERTS
        | {"n_routed_experts": 6, "n_group": 2, "moe_shared_expert_intermediate_size": 28, "routed_scaling_factor": 1.5}
        | {"layers_block_type": ["linear_attention", "moe", "full_attention", "moe", "linear_attention", "mlp"]},
    ),
    "Nemotron 3, latent experts": (
        "NemotronHForCausalLM",
        _NEMOTRON
        | {"num_experts_per_tok": 2, "moe_intermediate_size": 40, "moe_latent_size": 20, "n_routed_experts": 5}
        | {"moe_shared_expert_intermediate_size": 28}
        | {"layers_block_type": ["linear_attention", "moe", "full_attention", "moe", "linear_attention", "moe"]},
    ),
    "Zamba": (
        "ZambaForCausalLM",
        {
            "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid", "linear_attention"],
            "num_hidden_layers": 5,
            "num_key_value_heads": 4,
            "n_mamba_heads": 4,
            "mamba_d_state": 8,
            "mamba_dt_rank": 6,
            "initializer_range": 0.1,
            "tie_word_embeddings": True,
        },
    ),
    "Zamba2": ("Zamba2ForCausalLM", _ZAMBA),
    "Zamba2, one block, rope, biases": (
        "Zamba2ForCausalLM",
        _ZAMBA
        | {"num_mem_blocks": 1, "use_shared_attention_adapter": False, "use_mem_rope": True, "add_bias_linear": True}
        | {"mamba_ngroups": 1, "num_key_value_heads": 4, "hidden_act": "silu"},
    ),
    "Falcon-H1": (
        "FalconH1ForCausalLM",
        _STATES
        | {
            "mamba_d_ssm": 96,
            "mamba_n_groups": 4,
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": False,
            "lm_head_multiplier": 0.5,
            "embedding_multiplier": 2.0,
            "mlp_multipliers": [0.8, 0.7],
            "key_multiplier": 0.9,
            "attention_in_multiplier": 0.8,
            "attention_out_multiplier": 0.7,
            "ssm_in_multiplier": 1.2,
            "ssm_out_multiplier": 0.6,
            "ssm_multipliers": [0.9, 1.1, 0.8, 1.2, 0.7],
        },
    ),
    "Kimi Linear": (
        "KimiLinearForCausalLM",
        _EXPERTS
        | _DELTA
        | {
            "linear_head_dim": 12,
            "linear_num_heads": 4,
            "layer_types": ["linear_attention", "full_attention"] * 2,
            "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        },
    ),
    "Ling hybrid": (
        "BailingHybridForCausalLM",
        _EXPERTS | _DELTA | {"head_dim": 12, "layer_group_size": 2, "first_k_dense_replace": 1},
    ),
    "MiniMax": (
        "MiniMaxForCausalLM",
        {
            "num_local_experts": 5,
            "block_size": 32,
            "linear_attn_alpha_factor": 1.5,
            "full_attn_alpha_factor": 1.3,
            "mlp_alpha_factor": 1.2,
            "linear_attn_beta_factor": 0.8,
        },
    ),
    "MiniMax-M3": ("MiniMaxM3VLForCausalLM", _M3),
    "MiniMax-M3 with a vision part": (
        "MiniMaxM3SparseForConditionalGeneration",
        {
            "vision_config": {
                "hidden_size": 16,
                "intermediate_size": 16,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
            }
            | {"image_size": 28, "patch_size": 14},
            "projector_hidden_size": 16,
            "text_config": SIZES | _M3,
        },
    ),
    "Step 3.7": (
        "Step3p7ForConditionalGeneration",
        {
            "vision_config": {
                "hidden_size": 16,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "mlp_ratio": 2.0,
                "image_size": 56,
                "patch_size": 14,
                "max_position_embeddings": 16,
            },
            "text_config": SIZES | _STEP | _STEP_AS_PUBLISHED,
        },
    ),
    "OLMo hybrid": (
        "OlmoHybridForCausalLM",
        {
            "layer_types": ["linear_attention", "full_attention"] * 2,
            "linear_key_head_dim": 8,
            "rope_parameters": {"rope_type": "default", "rope_theta": None},
        },
    ),
    "Jamba": (
        "JambaForCausalLM",
        {"num_experts": 5, "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_offset": 0},
    ),
    "Mamba": ("MambaForCausalLM", {"tie_word_embeddings": True}),
    "Falcon Mamba": ("FalconMambaForCausalLM", {"tie_word_embeddings": True}),
    "LFM3": (
        "Lfm3ForCausalLM",
        {"head_dim": 12, "layer_types": ["conv", "sliding_attention", "full_attention", "conv"], **_WINDOWS},
    ),
    "Qwen2-VL": (
        "Qwen2VLForConditionalGeneration",
        {"vision_config": {"depth": 1, "embed_dim": 16, "hidden_size": 48, "num_heads": 2}}
        | {"text_config": SIZES | _MROPE, "tie_word_embeddings": False},
    ),
    "Qwen2.5-VL": (
        "Qwen2_5_VLForConditionalGeneration",
        _VISION | {"text_config": SIZES | _MROPE, "tie_word_embeddings": False},
    ),
    "Qwen3-VL": (
        "Qwen3VLForConditionalGeneration",
        _VISION | {"text_config": SIZES | _MROPE | {"head_dim": 12}, "tie_word_embeddings": False},
    ),
    "Qwen3-VL MoE": (
        "Qwen3VLMoeForConditionalGeneration",
        _VISION
        | {"text_config": SIZES | _MROPE | _EXPERTS | {"head_dim": 12, "num_experts": 6}, "tie_word_embeddings": False},
    ),
    "Granite Vision 4": (
        "Granite4VisionForConditionalGeneration",
        {
            "vision_config": _SIGLIP_OF_CLIP | {"hidden_size": 64},
            "qformer_config": {"model_type": "blip_2_qformer", "intermediate_size": 16, "num_hidden_layers": 1},
            "downsample_rate": "1/2",
            "deepstack_layer_map": [[-1, 0]],
            "spatial_target_layers": [1, 2, 3, 4],
            "vision_feature_select_strategy": "full",
            "text_config": SIZES
            | {"num_hidden_layers": 12, "attention_multiplier": 0.2, "embedding_multiplier": 2.0}
            | {"logits_scaling": 2.0, "residual_multiplier": 0.5},
        },
    ),
    "Hunyuan VL": (
        "HunYuanVLForConditionalGeneration",
        {
            "vision_config": _CLIP["vision_config"] | {"max_image_size": 56},
            "text_config": SIZES
            | {"head_dim": 16}
            | {"rope_parameters": {**_PLAIN, "rope_type": "dynamic", "factor": 1.0, "alpha": 100.0, **_FOUR_AXES}},
            "tie_word_embeddings": True,
        },
    ),
    "ERNIE 4.5 VL": (
        "Ernie4_5_VLMoeForConditionalGeneration",
        {
            "vision_config": {"depth": 2, "hidden_size": 32, "intermediate_size": 40, "num_heads": 2},
            "text_config": SIZES
            | {"moe_intermediate_size": [24, 16], "moe_num_experts": 8, "moe_k": 2}
            | {"rope_parameters": {**_PLAIN, "mrope_section": [2, 2, 2]}},
            "tie_word_embeddings": True,
        },
    ),
    "DeepSeek-OCR 2": (
        "DeepseekOcr2ForConditionalGeneration",
        {
            "vision_config": {"sam_config": _SAM, "encoder_config": _READER},
            "text_config": SIZES
            | {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
            | {"mlp_layer_types": ["dense", *["sparse"] * (SIZES["num_hidden_layers"] - 1)]},
            "tie_word_embeddings": False,
        },
    ),
    "LLaVA": (
        "LlavaForConditionalGeneration",
        _CLIP | {"text_config": SIZES | {"model_type": "llama"}},
    ),
    "LLaVA over Mistral": (
        "LlavaForConditionalGeneration",
        _CLIP | {"text_config": SIZES | {"model_type": "mistral", "sliding_window": None}},
    ),
    "LLaVA-NeXT over Granite": (
        "LlavaNextForConditionalGeneration",
        _CLIP
        | {"text_config": SIZES | {"model_type": "granite", "attention_multiplier": 0.2, "residual_multiplier": 0.5}},
    ),
    "LLaVA-OneVision": (
        "LlavaOnevisionForConditionalGeneration",
        _CLIP | {"text_config": SIZES | {"model_type": "qwen2"}, "vision_config": _SIGLIP_OF_CLIP},
    ),
    "LightOnOCR": (
        "LightOnOcrForConditionalGeneration",
        _PIXTRAL | {"text_config": SIZES | {"model_type": "qwen3", "head_dim": 12}, "tie_word_embeddings": True},
    ),
    "InternVL over Qwen2": (
        "InternVLForConditionalGeneration",
        _CLIP | {"text_config": SIZES | {"model_type": "qwen2"}},
    ),
    "InternVL over Qwen3": (
        "InternVLForConditionalGeneration",
        _CLIP | {"text_config": SIZES | {"model_type": "qwen3", "head_dim": 12}},
    ),
    "Idefics3": (
        "Idefics3ForConditionalGeneration",
        _CLIP | {"text_config": SIZES | {"model_type": "llama"}},
    ),
    "SmolVLM": (
        "SmolVLMForConditionalGeneration",
        _CLIP | {"text_config": SIZES | {"model_type": "llama"}},
    ),
    "Command A Vision": (
        "Cohere2VisionForConditionalGeneration",
        _CLIP
        | {
            "text_config": SIZES
            | {"model_type": "cohere2", "sliding_window_pattern": 2, "logit_scale": 1.0, **_WINDOWS}
        },
    ),
    "Aya Vision": (
        "AyaVisionForConditionalGeneration",
        _CLIP
        | {
            "text_config": SIZES
            | {"model_type": "cohere2", "sliding_window_pattern": 2, "logit_scale": 1.0, **_WINDOWS}
        },
    ),
    "GLM-4.1V": (
        "Glm4vForConditionalGeneration",
        _VISION
        | {
            "text_config": SIZES
            | {"rope_parameters": {**_PLAIN, "mrope_section": [1, 1, 1], "partial_rotary_factor": 0.5}},
            "tie_word_embeddings": False,
        },
    ),
    "GLM-OCR": (
        "GlmOcrForConditionalGeneration",
        _VISION
        | {
            "text_config": SIZES
            | {"rope_parameters": {**_PLAIN, "mrope_section": [1, 1, 1], "partial_rotary_factor": 0.5}},
            "tie_word_embeddings": False,
        },
    ),
    "PaddleOCR-VL": (
        "PaddleOCRVLForConditionalGeneration",
        {
            "vision_config": _CLIP["vision_config"],
            "text_config": SIZES | {"head_dim": 12} | {"rope_parameters": {**_PLAIN, "mrope_section": [2, 2, 2]}},
            "tie_word_embeddings": True,
        },
    ),
    "GLM-4.5V": (
        "Glm4vMoeForConditionalGeneration",
        _VISION
        | {
            "text_config": SIZES
            | _EXPERTS
            | {"n_routed_experts": 6, "head_dim": 16, "attention_bias": True}
            | {"rope_parameters": {**_PLAIN, "mrope_section": [1, 1, 2], "partial_rotary_factor": 0.5}},
            "tie_word_embeddings": False,
        },
    ),
    "GLM-4.6V by its own name": (
        "Glm46VForConditionalGeneration",
        _VISION
        | {
            "text_config": SIZES
            | {"model_type": "glm4v_text"}
            | {"rope_parameters": {**_PLAIN, "mrope_section": [1, 1, 1], "partial_rotary_factor": 0.5}},
            "tie_word_embeddings": False,
        },
    ),
    "GLM-4.6V by its own name, experts": (
        "Glm46VForConditionalGeneration",
        _VISION
        | {
            "text_config": SIZES
            | _EXPERTS
            | {"model_type": "glm4v_moe_text", "n_routed_experts": 6, "head_dim": 16, "attention_bias": True}
            | {"rope_parameters": {**_PLAIN, "mrope_section": [1, 1, 2], "partial_rotary_factor": 0.5}},
            "tie_word_embeddings": False,
        },
    ),
    "LFM2-VL": (
        "Lfm2VlForConditionalGeneration",
        _SIGLIP
        | {"text_config": SIZES | {"model_type": "lfm2", "layer_types": ["conv", "full_attention"] * 2}}
        | {"tie_word_embeddings": True},
    ),
    "Kimi K2.5": ("Kimi_K25ForConditionalGeneration", _KIMI),
    "Mistral 4": ("Mistral4ForCausalLM", _LATENT | {"rope_parameters": dict(_GROWING)}),
    "DeepSeek V3.2": ("DeepseekV32ForCausalLM", _LATENT | _INDEXED | {"n_shared_experts": 1}),
    "DeepSeek V3.2, yarn rope": ("DeepseekV32ForCausalLM", _LATENT | _INDEXED | {"rope_parameters": _DEEPSEEK_YARN}),
    "GLM-5": ("GlmMoeDsaForCausalLM", _LATENT | _INDEXED | {"n_group": 1, "topk_group": 1}),
    "GLM-5, shared selection": (
        "GlmMoeDsaForCausalLM",
        _LATENT | _INDEXED | {"indexer_types": ["full", "full", "shared", "full"], "attention_bias": True},
    ),
    "A.X K2": ("AXK2ForCausalLM", _LATENT | _INDEXED | {"n_group": None, "topk_group": None, "gated_norm_rank": 6}),
    "A.X K2, groups of experts": ("AXK2ForCausalLM", _LATENT | _INDEXED | {"gated_norm_rank": 6}),
    "Hunyuan 4": (
        "HYV4ForCausalLM",
        _LATENT
        | _INDEXED
        | {"n_group": 1, "topk_group": 1, "hc_mult": 3, "indexer_types": ["full", "full", "shared", "full"]}
        | {"rope_interleave": False, "indexer_rope_interleave": False},  # transformers rotates halves
    ),
    "DeepSeek V4": ("DeepseekV4ForCausalLM", _COMPRESSED),
    "DeepSeek V4, rates as published": (
        "DeepseekV4ForCausalLM",
        _COMPRESSED | {"compress_rates": _RATES_AS_PUBLISHED, "rope_parameters": dict(_YARN), "index_topk": 20},
    ),
    "DeepSeek V3, yarn rope": ("DeepseekV3ForCausalLM", _LATENT | {"rope_parameters": _DEEPSEEK_YARN}),
    "dots3-note": ("Dots3NoteForCausalLM", _DOTS),
    "Qwen4-Exp": ("Qwen4ExpForCausalLM", _QWEN4),
    "Qwen4-Exp with a vision part, stacked experts": (
        "Qwen4ExpForConditionalGeneration",
        _VISION
        | {
            "text_config": SIZES
            | _QWEN4
            | {"output_gate_type": None, "ngram_size": 4, "ple_layer_ids": [2], "norm_topk_prob": False}
            | {"ple_embed_dim": 12}
            | {"layer_types": ["indexed_attention", "linear_attention", "indexed_attention", "linear_attention"]}
        },
    ),
    "GLM-5.3": ("Glm5NextForConditionalGeneration", _GLM_NEXT_VISION | {"text_config": SIZES | _GLM_NEXT}),
    "GLM-5.3, decays without a bound": (
        "Glm5NextForConditionalGeneration",
        _GLM_NEXT_VISION
        | {
            "text_config": SIZES
            | _GLM_NEXT
            | {"attention_bias": True, "index_kpool": 2, "linear_lower_bound": None, "norm_topk_prob": False}
            | {"layer_types": ["indexed_attention", "linear_attention", "indexed_attention", "linear_attention"]}
        },
    ),
}

LENGTHS = {"Llama, dynamic rope": 150, "Phi-3, long factors": 150}
"""Cases whose positions depend on the length of the request in transformers, and of the longest request here: they are
the same at this length, and only there."""
MODELS = {
    "LlamaForCausalLM": "Llama 2, 3, 3.1 (8B, 70B, 405B), 3.2, 3.3; Yi; InternLM3; DeepSeek-R1-Distill-Llama",
    "Llama4ForCausalLM": "Llama 4, text",
    "Llama4ForConditionalGeneration": "Llama 4 Scout, Maverick",
    "MistralForCausalLM": "Mistral 7B, Nemo, Small",
    "MinistralForCausalLM": "Ministral 8B",
    "Ministral3ForCausalLM": "Ministral 3, text",
    "Mistral3ForConditionalGeneration": "Mistral Small 3.1, 3.2; Ministral 3; Mistral Small 4",
    "Qwen2ForCausalLM": "Qwen1.5 and Qwen2.5, QwQ; DeepSeek-R1-Distill-Qwen",
    "MiMoForCausalLM": "MiMo-7B",
    "InternLM2ForCausalLM": "InternLM2, InternLM2.5",
    "Qwen3ForCausalLM": "Qwen3, dense",
    "SeedOssForCausalLM": "Seed-OSS 36B",
    "GraniteForCausalLM": "Granite 3",
    "SmolLM3ForCausalLM": "SmolLM3",
    "Phi3ForCausalLM": "Phi-3, Phi-3.5-mini, Phi-4, Phi-4-mini",
    "Phi4MultimodalForCausalLM": "Phi-4-multimodal in transformers' format, for text",
    "Phi4MMForCausalLM": "Phi-4-multimodal, for text",
    "GemmaForCausalLM": "Gemma",
    "Gemma2ForCausalLM": "Gemma 2",
    "Gemma3ForCausalLM": "Gemma 3, text (270M, 1B)",
    "Gemma3ForConditionalGeneration": "Gemma 3 (4B, 12B, 27B)",
    "PaliGemmaForConditionalGeneration": "PaliGemma; PaliGemma 2 (224 and 448 pixels)",
    "Gemma3nForCausalLM": "Gemma 3n, text",
    "Gemma3nForConditionalGeneration": "Gemma 3n (E2B, E4B)",
    "Gemma4ForCausalLM": "Gemma 4, text",
    "Gemma4ForConditionalGeneration": "Gemma 4 (E2B, E4B, 26B-A4B, 31B)",
    "RecurrentGemmaForCausalLM": "RecurrentGemma 2B, 9B",
    "Olmo2ForCausalLM": "OLMo 2",
    "Olmo3ForCausalLM": "OLMo 3",
    "OlmoeForCausalLM": "OLMoE",
    "CohereForCausalLM": "Command R, Command R+, Aya",
    "Cohere2ForCausalLM": "Command R7B, Command A",
    "Exaone4ForCausalLM": "EXAONE 4.0",
    "ExaoneMoeForCausalLM": "K-EXAONE",
    "OpenAIGPTLMHeadModel": "GPT",
    "GPT2LMHeadModel": "GPT-2",
    "OPTForCausalLM": "OPT, but for 350M, which transformers' implementation runs",
    "XGLMForCausalLM": "XGLM",
    "GPTJForCausalLM": "GPT-J",
    "GPTNeoForCausalLM": "GPT-Neo",
    "BloomForCausalLM": "BLOOM, BLOOMZ",
    "MptForCausalLM": "MPT 7B, 30B",
    "GPTNeoXForCausalLM": "Pythia, GPT-NeoX",
    "GPTNeoXJapaneseForCausalLM": "GPT-NeoX Japanese",
    "FalconForCausalLM": "Falcon 7B, 40B, 180B, RW",
    "RWForCausalLM": "Falcon 7B, 40B and RW, as first published",
    "PhiForCausalLM": "Phi-1, Phi-1.5, Phi-2",
    "StableLmForCausalLM": "StableLM 2 1.6B, StableLM 3B, but for 12B, which transformers' implementation runs",
    "Starcoder2ForCausalLM": "StarCoder2",
    "MixtralForCausalLM": "Mixtral 8x7B, 8x22B",
    "DbrxForCausalLM": "DBRX",
    "Qwen2MoeForCausalLM": "Qwen1.5-MoE, Qwen2-57B-A14B",
    "Qwen3MoeForCausalLM": "Qwen3-30B-A3B, 235B-A22B, Coder",
    "GraniteMoeForCausalLM": "PowerMoE, Granite 3 MoE",
    "Glm4MoeForCausalLM": "GLM-4.5, 4.6, 4.7",
    "Dots1ForCausalLM": "dots.llm1",
    "MiniMaxM2ForCausalLM": "MiniMax-M2, M2.1",
    "PhimoeForCausalLM": "Phi-3.5-MoE (PhiMoEForCausalLM), Phi-mini-MoE",
    "MiMoV2FlashForCausalLM": "MiMo-V2-Flash",
    "Ernie4_5ForCausalLM": "ERNIE 4.5 0.3B",
    "Ernie4_5_MoeForCausalLM": "ERNIE 4.5 21B-A3B, 300B-A47B",
    "HunYuanDenseV1ForCausalLM": "Hunyuan 0.5B, 1.8B, 4B, 7B",
    "HunYuanMoEV1ForCausalLM": "Hunyuan-A13B",
    "GptOssForCausalLM": "gpt-oss 20B, 120B",
    "Qwen3NextForCausalLM": "Qwen3-Next-80B-A3B, Qwen3-Coder-Next",
    "LaraMiniForCausalLM": "Lara 4 Mini",
    "Qwen3_5ForCausalLM": "Qwen3.5, dense, without its vision part",
    "Qwen3_5ForConditionalGeneration": "Qwen3.5 and 3.6, dense",
    "Qwen3_5MoeForCausalLM": "Qwen3.5 MoE, without its vision part",
    "Qwen3_5MoeForConditionalGeneration": "Qwen3.5 and 3.6 MoE",
    "Granite4VisionForConditionalGeneration": "Granite Vision 4",
    "HunYuanVLForConditionalGeneration": "Hunyuan VL, HunyuanOCR",
    "Ernie4_5_VLMoeForConditionalGeneration": "ERNIE 4.5 VL 28B-A3B",
    "DeepseekOCRForCausalLM": "DeepSeek-OCR",
    "DeepseekOCR2ForCausalLM": "DeepSeek-OCR 2",
    "DeepseekOcr2ForConditionalGeneration": "DeepSeek-OCR 2 in transformers' format",
    "LlavaForConditionalGeneration": "LLaVA 1.5, Pixtral 12B in transformers' format",
    "LlavaNextForConditionalGeneration": "LLaVA 1.6, Granite Vision 3",
    "LlavaOnevisionForConditionalGeneration": "LLaVA-OneVision",
    "LightOnOcrForConditionalGeneration": "LightOnOCR 1, 2",
    "InternVLForConditionalGeneration": "InternVL 2.5 to 3.5 in transformers' format",
    "Idefics3ForConditionalGeneration": "Idefics3",
    "SmolVLMForConditionalGeneration": "SmolVLM, SmolVLM2",
    "Cohere2VisionForConditionalGeneration": "Command A Vision",
    "AyaVisionForConditionalGeneration": "Aya Vision 8B, 32B",
    "Glm4vForConditionalGeneration": "GLM-4.1V, GLM-4.6V-Flash",
    "GlmOcrForConditionalGeneration": "GLM-OCR",
    "Glm4vMoeForConditionalGeneration": "GLM-4.5V, GLM-4.6V",
    "Glm46VForConditionalGeneration": "GLM-4.6V, by the name that it has in transformers",
    "PaddleOCRVLForConditionalGeneration": "PaddleOCR-VL",
    "Qwen2VLForConditionalGeneration": "Qwen2-VL",
    "Qwen2_5_VLForConditionalGeneration": "Qwen2.5-VL",
    "Qwen3VLForConditionalGeneration": "Qwen3-VL, dense",
    "Qwen3VLMoeForConditionalGeneration": "Qwen3-VL-30B-A3B, 235B-A22B",
    "Lfm2ForCausalLM": "LFM2",
    "Lfm2VlForConditionalGeneration": "LFM2-VL",
    "Lfm2MoeForCausalLM": "LFM2-8B-A1B, LFM2-24B-A2B",
    "Lfm3ForCausalLM": "LFM3",
    "Mamba2ForCausalLM": "Mamba-2, Codestral Mamba",
    "BambaForCausalLM": "Bamba",
    "GraniteMoeHybridForCausalLM": "Granite 4",
    "NemotronHForCausalLM": "Nemotron-H, Nemotron Nano 2, Nemotron 3",
    "ZambaForCausalLM": "Zamba 7B",
    "Zamba2ForCausalLM": "Zamba2",
    "FalconH1ForCausalLM": "Falcon-H1",
    "KimiLinearForCausalLM": "Kimi-Linear-48B-A3B",
    "BailingHybridForCausalLM": "Ling and Ring with Kimi Delta Attention",
    "MiniMaxForCausalLM": "MiniMax-Text-01, in transformers' format",
    "MiniMaxText01ForCausalLM": "MiniMax-Text-01",
    "MiniMaxM3VLForCausalLM": "MiniMax-M3, text, in transformers' format",
    "MiniMaxM3SparseForConditionalGeneration": "MiniMax-M3",
    "MiniMaxM1ForCausalLM": "MiniMax-M1",
    "Step3p5ForCausalLM": "Step 3.5 Flash",
    "Step3p7ForConditionalGeneration": "Step 3.7 Flash",
    "OlmoHybridForCausalLM": "OLMo Hybrid",
    "JambaForCausalLM": "Jamba, Jamba 1.5, 1.6, 1.7, Reasoning",
    "MambaForCausalLM": "Mamba",
    "FalconMambaForCausalLM": "Falcon Mamba 7B, Falcon3-Mamba",
    "xLSTMForCausalLM": "xLSTM 7B",
    "RwkvForCausalLM": "RWKV-4",
    "DeepseekV2ForCausalLM": "DeepSeek V2, V2-Lite, Coder-V2",
    "DeepseekV3ForCausalLM": "DeepSeek V3, V3.1, R1; Kimi K2",
    "KimiK25ForConditionalGeneration": "Kimi K2.5",
    "Kimi_K25ForConditionalGeneration": "Kimi K2.5, by transformers' name",
    "Mistral4ForCausalLM": "Mistral Small 4, text",
    "DeepseekV32ForCausalLM": "DeepSeek V3.2, V3.2-Exp",
    "GlmMoeDsaForCausalLM": "GLM-5",
    "AXK2ForCausalLM": "A.X K2 Light",
    "HYV4ForCausalLM": "Hunyuan 4, text",
    "DeepseekV4ForCausalLM": "DeepSeek V4 Flash, V4 Pro",
    "Dots3NoteForCausalLM": "dots3-note, for text",
    "Qwen4ExpForCausalLM": "Qwen4-Exp, without its vision part",
    "Qwen4ExpForConditionalGeneration": "Qwen4-Exp, for text",
    "Glm5NextForCausalLM": "GLM-5.3-Flash, without its vision part",
    "Glm5NextForConditionalGeneration": "GLM-5.3-Flash",
}
"""The usual names of an architecture's models."""

_TEXT01 = {
    "num_local_experts": 5,
    "block_size": 32,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    "linear_attn_alpha_factor": 1.5,
    "full_attn_alpha_factor": 1.3,
    "mlp_alpha_factor": 1.2,
    "full_attn_beta_factor": 0.8,
}
_TEXT01_AS_PUBLISHED = {
    "attn_type_list": [0, 0, 1, 0],
    "postnorm": True,
    "shared_intermediate_size": 0,
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "layernorm_linear_attention_alpha": 1.5,
    "layernorm_linear_attention_beta": 1.0,
    "layernorm_full_attention_alpha": 1.3,
    "layernorm_full_attention_beta": 0.8,
    "layernorm_mlp_alpha": 1.2,
    "layernorm_mlp_beta": 1.0,
}

_OCR_AS_PUBLISHED = {
    "model_type": "deepseek_vl_v2",
    "language_config": SIZES
    | {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_shared_experts": 2}
    | {"first_k_dense_replace": 1, "topk_method": "greedy", "n_group": 1, "topk_group": 1, "use_mla": False}
    | {"kv_lora_rank": None, "q_lora_rank": None, "qk_nope_head_dim": 0, "qk_rope_head_dim": 0, "v_head_dim": 0},
}
"""Without a tower."""

RENAMED: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "MiMo": ("MiMoForCausalLM", "Qwen2ForCausalLM", {}, {"model_type": "mimo", "attention_bias": True}),
    "Phi-4-multimodal as published": ("Phi4MMForCausalLM", "Phi3ForCausalLM", {}, {"model_type": "phi4mm"}),
    "InternLM2": ("InternLM2ForCausalLM", "LlamaForCausalLM", {}, {"model_type": "internlm2", "bias": False}),
    "InternLM2, biases": ("InternLM2ForCausalLM", "LlamaForCausalLM", {"attention_bias": True}, {"bias": True}),
    "Kimi K2.5 as published": (
        "KimiK25ForConditionalGeneration",
        "Kimi_K25ForConditionalGeneration",
        _KIMI,
        {"model_type": "kimi_k25"},
    ),
    "MiniMax-Text-01 as published": (
        "MiniMaxText01ForCausalLM",
        "MiniMaxForCausalLM",
        _TEXT01,
        _TEXT01_AS_PUBLISHED | {"model_type": "minimax_text_01"},
    ),
    "MiniMax-M1": (
        "MiniMaxM1ForCausalLM",
        "MiniMaxForCausalLM",
        _TEXT01,
        _TEXT01_AS_PUBLISHED | {"model_type": "minimax_m1"},
    ),
    "GLM-5.3 without its vision part": (
        "Glm5NextForCausalLM",
        "Glm5NextForConditionalGeneration",
        CASES["GLM-5.3"][1],
        SIZES | _GLM_NEXT | {"model_type": "glm5_next"},
    ),
    "Step 3.5": (
        "Step3p5ForCausalLM",
        "Step3p7ForConditionalGeneration",
        CASES["Step 3.7"][1],
        SIZES | _STEP | _STEP_AS_PUBLISHED | {"model_type": "step3p5"},
    ),
    "DeepSeek-OCR": (
        "DeepseekOCRForCausalLM",
        "DeepseekOcr2ForConditionalGeneration",
        CASES["DeepSeek-OCR 2"][1],
        _OCR_AS_PUBLISHED,
    ),
    "DeepSeek-OCR 2 as published": (
        "DeepseekOCR2ForCausalLM",
        "DeepseekOcr2ForConditionalGeneration",
        CASES["DeepSeek-OCR 2"][1],
        _OCR_AS_PUBLISHED,
    ),
    "Falcon 7B of RefinedWeb": (
        "RWForCausalLM",
        "FalconForCausalLM",
        {"tie_word_embeddings": True},
        {"model_type": "RefinedWebModel", "multi_query": True, "parallel_attn": True},
    ),
    "Falcon 40B of RefinedWeb": (
        "RWForCausalLM",
        "FalconForCausalLM",
        {"new_decoder_architecture": True, "num_kv_heads": 2, "tie_word_embeddings": True},
        {"model_type": "RefinedWeb", "n_head_kv": 2, "parallel_attn": True},
    ),
    "Falcon-RW of RefinedWeb": (
        "RWForCausalLM",
        "FalconForCausalLM",
        {"alibi": True, "multi_query": False, "bias": True, "parallel_attn": False, "tie_word_embeddings": True},
        {"model_type": "RefinedWebModel", "alibi": True, "bias": True},
    ),
}
"""Architectures that transformers lacks, and the same model in it: its class, its settings, and their replacements in
the publisher's config.json."""


def table() -> str:
    """The table of docs/reference/models.md."""
    lines = ["| architecture in config.json | models | variants that are tested |", "|---|---|---|"]
    for architecture, models in MODELS.items():
        cases = [name for name, (of, *_) in (CASES | RENAMED).items() if of == architecture]
        lines.append(f"| {architecture} | {models} | {'; '.join(cases)} |")
    return "\n".join(lines)


def write(case: str, folder: Path, **settings: Any) -> Any:
    """The case's model in `folder`, with other settings if given; and as transformers has it, in float32."""
    architecture, changes = CASES[case]
    model = write_model(architecture, SIZES | changes | settings, folder)
    if "stacked experts" in case:
        stack_experts(folder)
    else:
        name_as_published(architecture, folder, model)
    return model


def write_renamed(case: str, folder: Path) -> Any:
    """The case's model in `folder`, as its publisher writes it; and transformers' model of the same numbers."""
    architecture, same, changes, own = RENAMED[case]
    model = write_model(same, SIZES | changes, folder)
    name_as_published(same, folder, model)
    path, written = folder / "model.safetensors", json.loads((folder / "config.json").read_text())
    tensors = load_file(path)
    common = ("vocab_size", "hidden_size", "tie_word_embeddings", "max_position_embeddings", "rms_norm_eps")
    sizes = ("num_attention_heads", "num_hidden_layers", "num_key_value_heads", "intermediate_size")
    config = {name: written[name] for name in (*common, *sizes) if name in written}
    if architecture == "RWForCausalLM":
        config = {name: written[name] for name in common if name in written}
        config |= {"n_head": written["num_attention_heads"], "n_layer": written["num_hidden_layers"]}
    elif architecture == "MiMoForCausalLM":
        tensors["model.mtp_layers.0.input_proj.weight"] = torch.zeros(3, 5)
    elif architecture == "KimiK25ForConditionalGeneration":
        config = written | {"text_config": written["text_config"] | {"model_type": "kimi_k2"}}
    elif architecture == "Phi4MMForCausalLM":
        tensors = {re.sub(r"_proj\.weight$", "_proj.base_layer.weight", name): each for name, each in tensors.items()}
        tensors["model.layers.0.mlp.down_proj.lora_A.vision.weight"] = torch.zeros(3, 5)
    elif architecture == "Glm5NextForCausalLM":
        tensors = {name.replace("model.language_model.", "model."): each for name, each in tensors.items()}
    elif architecture == "InternLM2ForCausalLM":
        tensors = _internlm2(tensors, written["num_key_value_heads"])
    (folder / "config.json").write_text(json.dumps({**config, **own, "architectures": [architecture]}))
    save_file(tensors, path, {"format": "pt"})
    return model


def _internlm2(tensors: dict[str, Tensor], kv_heads: int) -> dict[str, Tensor]:
    """Llama's tensors by InternLM2's names: for each KV head its query heads, its key and its value in one matrix."""
    names = {"model.embed_tokens": "model.tok_embeddings", "lm_head": "output", "self_attn.o_proj": "attention.wo"}
    names |= {"input_layernorm": "attention_norm", "post_attention_layernorm": "ffn_norm"}
    names |= {f"mlp.{part}_proj": f"feed_forward.w{w}" for part, w in (("gate", 1), ("down", 2), ("up", 3))}
    found = {}
    for name, tensor in tensors.items():
        if ".q_proj." in name:
            parts = [tensors[name.replace(".q_proj.", f".{part}_proj.")] for part in "qkv"]
            groups = [part.reshape(kv_heads, -1, *part.shape[1:]) for part in parts]
            found[name.replace("self_attn.q_proj", "attention.wqkv")] = torch.cat(groups, 1).flatten(0, 1)
        elif ".k_proj." not in name and ".v_proj." not in name:
            theirs = next((each for each in names if each in name), "")
            found[name.replace(theirs, names[theirs]) if theirs else name] = tensor
    return found


_PUBLISHED_NAMES: dict[str, dict[str, str]] = {
    "DeepseekV4ForCausalLM": {
        "model.embed_tokens.": "embed.",
        "model.hc_head.hc_": "hc_head_",
        "attn.norm.": "attn.kv_norm.",
        "model.": "",
    },
    "HYV4ForCausalLM": {
        "mlp.linear_gate.": "mlp.gate_proj.",
        "shared_experts.linear_gate.": "shared_experts.gate_proj.",
        "hc_pre.hc_head.": "hc_head.",
        "hc_pre.hc_attn_layer.": "hc_attn_layer.hc_pre.",
        "hc_pre.hc_mlp_layer.": "hc_mlp_layer.hc_pre.",
    },
    "Kimi_K25ForConditionalGeneration": {
        "language_model.model.blocks.": "language_model.model.layers.",
        "vision_tower.encoder.patch_embed.": "vision_tower.patch_embed.",
    },
    "Qwen3VLMoeForConditionalGeneration": {},
    "KimiLinearForCausalLM": {"layers.0.block_sparse_moe": "layers.0.mlp"},
    "OlmoHybridForCausalLM": {
        f"layers.{number}.feedforward_layer_norm": f"layers.{number}.post_attention_layernorm" for number in (1, 3)
    },
}
"""Tensors that transformers reads by their publishers' names, and writes by others, such as the names of layers of
another kind."""


def name_as_published(architecture: str, folder: Path, model: Any) -> None:
    """Rename the tensors of architectures that transformers writes by other names than their publishers. Also with
    convolutions of the sizes of queries, keys and values, where transformers writes three equal parts, and with
    Qwen3-VL's stacked experts as `[experts, in, out]`."""
    if architecture not in _PUBLISHED_NAMES:
        return
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for theirs, ours in _PUBLISHED_NAMES[architecture].items():
        for name in [name for name in tensors if theirs in name]:
            tensors[name.replace(theirs, ours)] = tensors.pop(name)
    stacks = (".experts.gate_up_proj", ".experts.down_proj")
    for name in [name for name in tensors if name.endswith(stacks)] if architecture.startswith("Qwen3VLMoe") else ():
        tensors[name] = tensors[name].transpose(1, 2).contiguous()
    for module, layer in model.named_modules():
        if isinstance(getattr(layer, "conv1d", None), torch.nn.Conv1d) and hasattr(layer, "q_proj"):
            sizes = [len(getattr(layer, f"{part}_proj").weight) for part in "qkv"]
            for part, weight in zip("qkv", layer.conv1d.weight.split_with_sizes(sizes), strict=True):
                tensors[f"{module}.{part}_conv1d.weight"] = weight.detach().clone()
    save_file(tensors, path, {"format": "pt"})


def stack_experts(folder: Path) -> None:
    """Write the experts of a layer as two tensors, as the model's publisher does and transformers does not."""
    path = folder / "model.safetensors"
    tensors, stacks = load_file(path), defaultdict[str, dict[str, Tensor]](dict)
    for name in [name for name in tensors if ".experts." in name]:
        module, _, rest = name.partition(".experts.")
        stacks[module][rest] = tensors.pop(name)
    for module, parts in stacks.items():
        gate, up, down = (
            torch.stack([parts[f"{expert}.{part}_proj.weight"] for expert in range(len(parts) // 3)])
            for part in ("gate", "up", "down")
        )
        tensors[f"{module}.experts.gate_up_proj"] = torch.cat((gate, up), dim=1)
        tensors[f"{module}.experts.down_proj"] = down
    save_file(tensors, path, {"format": "pt"})


_STARTS_AT_0 = ("DeepseekV4ForCausalLM", "Glm5NextForConditionalGeneration", "Ernie4_5_VLMoeForConditionalGeneration")
"""Architectures whose corrections of the choice of experts start at 0."""
_START_AT_0 = (
    "rel_pos_h",
    "rel_pos_w",
    "pos_embed",
    "cls_token",
    ".position_embeddings",
    "mm_input_projection_weight",
    "pos_emb.position_embeddings",
)
"""Parameters of towers that do, too."""


def write_model(architecture: str, settings: dict[str, Any], folder: Path) -> Any:
    """A random model of transformers in `folder`, and itself."""
    import transformers  # here, as it takes seconds

    kind: Any = getattr(transformers, TEXT_PARTS.get(architecture, architecture))
    torch.manual_seed(0)
    torch.set_num_threads(1)  # the matrices are too small to be shared
    part = settings["text_config"] if architecture in TEXT_PARTS else settings
    model = kind(kind.config_class(**part)).train(False)
    with torch.no_grad():
        for parameter in model.parameters():  # transformers starts biases at 0 and norms at 1, which hides them
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter), alpha=0.2)
        for name, tensor in model.state_dict().items():  # which start at 0, too
            biases = "compressor.position_bias", "indexer.position_bias", "input_gate_bias", "recurrent_gate_bias"
            if name.endswith((*biases, "compress_ape", "compress_gate")) or name == "rwkv.embeddings.weight":
                tensor.normal_()
            elif "gate_preact." in name:  # exponentials of large gates multiply errors
                tensor.normal_(std=0.1)
            elif name.endswith(".ple.conv1d.weight"):
                tensor.normal_(std=0.5)
            elif name.endswith(("_input.query", ".static_weight", *_START_AT_0)):
                tensor.normal_(std=0.2)
            elif name.endswith(("put_min", "put_max", "std_bias", "std_scale")):
                tensor.normal_(-1.5 if name.endswith("_min") else 1.5, 0.3)
            elif name.endswith(("norm.scale", "layer_scalar")):  # which start at 1
                tensor.add_(torch.randn_like(tensor), alpha=0.2)
            elif name.endswith(".tid2eid"):
                experts = model.config.n_routed_experts
                tensor.copy_(torch.rand(len(tensor), experts).topk(tensor.shape[1], dim=-1).indices)
            elif architecture in _STARTS_AT_0 and name.endswith("e_score_correction_bias"):
                tensor.normal_(std=0.2)
    model.save_pretrained(folder)
    if architecture in TEXT_PARTS:
        _name_as_part(architecture, settings, folder)
    return text_of(model)


def _name_as_part(architecture: str, settings: dict[str, Any], folder: Path) -> None:
    """Rewrite the folder as the text part of a model that transformers has. Its config.json has no other, whose tensors
    are not there, either."""
    import transformers

    config = getattr(transformers, architecture).config_class(**settings).to_dict() | {"architectures": [architecture]}
    config |= {"vision_config": None, "audio_config": None}
    (folder / "config.json").write_text(json.dumps(config))
    path = folder / "model.safetensors"
    tensors = {name.replace("model.", "model.language_model.", 1): each for name, each in load_file(path).items()}
    save_file(tensors, path, {"format": "pt"})


if __name__ == "__main__":
    print(table())
