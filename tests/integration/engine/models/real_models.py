"""config.json of real models, as far as sizes go, and how many parameters they are published with."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Real:
    """A published model. `parameters` does not count layers for multi-token prediction, nor scales."""

    parameters: int
    config: dict[str, Any]
    shapes: dict[str, tuple[int, ...]]
    """Shapes of some parameters on a rank of TP 8, worked out by hand."""
    kv_numbers: int = 0
    """Elements of a token's KV cache on a rank of the one of two stages that has more weights; 0: not checked."""
    stored: float = 0.0
    """Bytes of its weights as they are published, if they are quantized."""
    copies: dict[str, int] = field(default_factory=dict)
    """Tensors, by a part of their names, that several ranks of 8 have the same slice of."""


def _llama(layers: int, hidden: int, inner: int, heads: int) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-05,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }


REAL = {
    "Llama-3.1-405B": Real(
        405_853_388_800,
        _llama(126, 16384, 53248, 128),
        {
            "embedding.weight": (16032, 16384),
            "layers.0.attention.qkv.weight": (18 * 128, 16384),
            "layers.125.attention.output.weight": (16384, 2048),
            "layers.0.feed_forward.gate_up.weight": (2 * 6656, 16384),
            "layers.125.feed_forward.down.weight": (16384, 6656),
            "norm.weight": (16384,),
            "head.weight": (16032, 16384),
        },
        kv_numbers=63 * 2 * 128,
    ),
    "Llama-3.1-70B": Real(
        70_553_706_496,
        _llama(80, 8192, 28672, 64),
        {"layers.0.attention.qkv.weight": (10 * 128, 8192), "layers.79.feed_forward.down.weight": (8192, 3584)},
        kv_numbers=40 * 2 * 128,
    ),
    "Mixtral-8x22B": Real(
        140_620_634_112,
        {
            "architectures": ["MixtralForCausalLM"],
            "hidden_size": 6144,
            "intermediate_size": 16384,
            "num_hidden_layers": 56,
            "num_attention_heads": 48,
            "num_key_value_heads": 8,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "vocab_size": 32000,
            "max_position_embeddings": 65536,
            "rope_theta": 1000000,
            "sliding_window": None,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
        },
        {
            "layers.0.attention.qkv.weight": (8 * 128, 6144),
            "layers.0.feed_forward.router.weight": (8, 6144),
            "layers.55.feed_forward.experts.gate_up.weight": (8, 2 * 2048, 6144),
            "layers.55.feed_forward.experts.down.weight": (8, 6144, 2048),
        },
        kv_numbers=28 * 2 * 128,
    ),
    "DeepSeek-R1": Real(
        671_026_419_200,
        {
            "architectures": ["DeepseekV3ForCausalLM"],
            "hidden_size": 7168,
            "intermediate_size": 18432,
            "moe_intermediate_size": 2048,
            "num_hidden_layers": 61,
            "num_nextn_predict_layers": 1,
            "num_attention_heads": 128,
            "num_key_value_heads": 128,
            "n_routed_experts": 256,
            "n_shared_experts": 1,
            "num_experts_per_tok": 8,
            "first_k_dense_replace": 3,
            "n_group": 8,
            "topk_group": 4,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "q_lora_rank": 1536,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "vocab_size": 129280,
            "max_position_embeddings": 163840,
            "rope_theta": 10000,
            "rope_scaling": {
                "type": "yarn",
                "factor": 40,
                "original_max_position_embeddings": 4096,
                "beta_fast": 32,
                "beta_slow": 1,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
            },
            "quantization_config": {
                "quant_method": "fp8",
                "fmt": "e4m3",
                "activation_scheme": "dynamic",
                "weight_block_size": [128, 128],
            },
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
        },
        {
            "layers.0.attention.down.weight": (1536 + 576, 7168),
            "layers.0.attention.query.weight": (16 * 192, 1536),
            "layers.0.attention.up.weight": (16 * 256, 512),
            "layers.0.attention.output.weight": (7168, 2048),
            "layers.2.feed_forward.gate_up.weight": (2 * 2304, 7168),
            "layers.60.feed_forward.router.weight": (256, 7168),
            "layers.60.feed_forward.router.correction_bias": (256,),
            "layers.60.feed_forward.experts.gate_up.weight": (256, 2 * 256, 7168),
            "layers.60.feed_forward.experts.down.weight": (256, 7168, 256),
            "layers.60.feed_forward.shared.down.weight": (7168, 256),
        },
        kv_numbers=30 * 576,
        stored=675e9,
    ),
    "Qwen1.5-72B": Real(
        72_287_920_128,
        {
            "architectures": ["Qwen2ForCausalLM"],
            "hidden_size": 8192,
            "intermediate_size": 24576,
            "num_hidden_layers": 80,
            "num_attention_heads": 64,
            "num_key_value_heads": 64,
            "vocab_size": 152064,
            "max_position_embeddings": 32768,
            "max_window_layers": 70,
            "sliding_window": 32768,
            "use_sliding_window": False,
            "rope_theta": 1000000.0,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
        },
        {
            "layers.0.attention.qkv.weight": (24 * 128, 8192),
            "layers.0.attention.qkv.bias": (24 * 128,),
            "head.weight": (19008, 8192),
        },
        kv_numbers=40 * 2 * 8 * 128,
    ),
    "Qwen3-235B-A22B": Real(
        235_093_634_560,
        {
            "architectures": ["Qwen3MoeForCausalLM"],
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "moe_intermediate_size": 1536,
            "num_hidden_layers": 94,
            "num_attention_heads": 64,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "vocab_size": 151936,
            "max_position_embeddings": 40960,
            "rope_theta": 1000000.0,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
        },
        {
            "layers.0.attention.qkv.weight": (10 * 128, 4096),
            "layers.93.attention.query_norm.weight": (128,),
            "layers.93.feed_forward.experts.gate_up.weight": (128, 2 * 192, 4096),
        },
        kv_numbers=47 * 2 * 128,
        copies={"k_proj": 2, "v_proj": 2},
    ),
    "gpt-oss-120b": Real(
        116_829_156_672,
        {
            "architectures": ["GptOssForCausalLM"],
            "hidden_size": 2880,
            "intermediate_size": 2880,
            "num_hidden_layers": 36,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "num_local_experts": 128,
            "num_experts_per_tok": 4,
            "sliding_window": 128,
            "attention_bias": True,
            "vocab_size": 201088,
            "max_position_embeddings": 131072,
            "rope_theta": 150000,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 32.0,
                "original_max_position_embeddings": 4096,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
            },
            "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]},
            "tie_word_embeddings": False,
        },
        {
            "layers.0.attention.qkv.weight": (10 * 64, 2880),
            "layers.0.attention.sinks": (8,),
            "layers.35.feed_forward.experts.gate_up.weight": (128, 2 * 360, 2880),
            "layers.35.feed_forward.experts.gate_up.bias": (128, 2 * 360),
            "layers.35.feed_forward.experts.down.weight": (128, 2880, 360),
            "layers.35.feed_forward.experts.down.bias": (128, 2880),
        },
        stored=65.3e9,
    ),
    "OPT-66B": Real(
        65_719_701_504,  # published as 66B
        {
            "architectures": ["OPTForCausalLM"],
            "hidden_size": 9216,
            "word_embed_proj_dim": 9216,
            "ffn_dim": 36864,
            "num_hidden_layers": 64,
            "num_attention_heads": 72,
            "vocab_size": 50272,
            "max_position_embeddings": 2048,
            "do_layer_norm_before": True,
            "torch_dtype": "float16",
        },
        {
            "positions.weight": (2050, 9216),
            "layers.0.attention.qkv.weight": (27 * 128, 9216),
            "layers.63.feed_forward.gate_up.bias": (4608,),
            "head.weight": (6284, 9216),
        },
        kv_numbers=32 * 2 * 9 * 128,
    ),
    "Falcon-180B": Real(
        179_522_565_120,
        {
            "architectures": ["FalconForCausalLM"],
            "hidden_size": 14848,
            "num_hidden_layers": 80,
            "num_attention_heads": 232,
            "num_kv_heads": 8,
            "new_decoder_architecture": True,
            "alibi": False,
            "bias": False,
            "multi_query": True,
            "parallel_attn": True,
            "vocab_size": 65024,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
        },
        {
            "layers.0.attention.qkv.weight": (31 * 64, 14848),
            "layers.79.feed_forward.gate_up.weight": (7424, 14848),
            "layers.79.attention.output.weight": (14848, 1856),
        },
        kv_numbers=40 * 2 * 64,
    ),
}
