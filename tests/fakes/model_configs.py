"""config.json of well-known models, as far as it determines their sizes; and a folder with one of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_LLAMA = {"rms_norm_eps": 1e-5, "rope_theta": 500000.0, "torch_dtype": "bfloat16", "eos_token_id": 2}
MODEL_CONFIGS: dict[str, dict[str, Any]] = {
    "Llama 3 70B": {
        **_LLAMA,
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 8192,
    },
    "Mixtral 8x7B": {
        **_LLAMA,
        "architectures": ["MixtralForCausalLM"],
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "sliding_window": None,
        "vocab_size": 32000,
        "max_position_embeddings": 32768,
    },
    "DeepSeek R1": {
        **_LLAMA,
        "architectures": ["DeepseekV3ForCausalLM"],
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "num_hidden_layers": 61,
        "first_k_dense_replace": 3,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "n_group": 8,
        "topk_group": 4,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "vocab_size": 129280,
        "max_position_embeddings": 163840,
        "quantization_config": {
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "quant_method": "fp8",
            "weight_block_size": [128, 128],
        },
    },
    "Qwen3 0.6B": {
        **_LLAMA,
        "architectures": ["Qwen3ForCausalLM"],
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "tie_word_embeddings": True,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
    },
}


def write_config(folder: Path, name: str, **changes: Any) -> str:
    """Write one of them and return the folder's name."""
    (folder / "config.json").write_text(json.dumps(MODEL_CONFIGS[name] | changes))
    return str(folder)
