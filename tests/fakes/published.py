"""Published models: their files with settings, and their publishers' figures.

`published_configs/NAME/` has the settings of the files that Quire reads, as far as public copies have them, without
settings that only matter to training. Numbers of parameters are from the model card or from the checkpoint's index.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.engine.models.transformers_backend.shrink import shrink

FOLDER = Path(__file__).parent / "published_configs"
UNLIMITED = 262_144
"""Quire's length for models without attention."""


@dataclass(frozen=True)
class Published:
    """Published figures of a model. Towers are counted only with `has_tower`; layers for multi-token prediction are not
    counted, nor are the poolers and heads of encoders."""

    parameters: int | str
    """Exact, or as many digits as are published, rounded or cut off."""
    length: int | None = None
    """None: max_position_embeddings."""
    quantization: str | None = None
    has_tower: bool = False

    def has(self, count: int) -> bool:
        """Whether this number of parameters is the published one."""
        if isinstance(self.parameters, int):
            return count == self.parameters
        number, unit = float(self.parameters[:-1]), {"M": 1e6, "B": 1e9, "T": 1e12}[self.parameters[-1]]
        digits = len(self.parameters[:-1].partition(".")[2])
        return bool(abs(count / unit - number) < 0.1**digits)


def config(name: str, file: str = "config.json") -> dict[str, Any]:
    """The settings in a model's file; empty if it has none."""
    path = FOLDER / name / file
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return found


MODELS = {
    "Llama-2-7b-hf": Published(6_738_415_616),
    "Llama-2-13b-hf": Published(13_015_864_320),
    "Llama-2-70b-hf": Published(68_976_648_192),
    "CodeLlama-7b-hf": Published(6_738_546_688),
    "CodeLlama-13b-hf": Published(13_016_028_160),
    "CodeLlama-34b-hf": Published(33_743_970_304),
    "TinyLlama-1.1B-Chat-v1.0": Published(1_100_048_384),
    "Meta-Llama-3-8B": Published(8_030_261_248),
    "Llama-3.1-8B-Instruct": Published(8_030_261_248),
    "Meta-Llama-3.1-8B-Instruct-FP8-dynamic": Published(8_030_261_248, quantization="compressed-tensors"),
    "Meta-Llama-3.1-8B-Instruct-quantized.w4a16": Published(8_030_261_248, quantization="compressed-tensors"),
    "Meta-Llama-3.1-8B-Instruct-quantized.w8a8": Published(8_030_261_248, quantization="compressed-tensors"),
    "Meta-Llama-3.1-70B": Published(70_553_706_496),
    "Llama-3.1-70B-Instruct-FP8": Published(70_553_706_496, quantization="modelopt"),
    "Meta-Llama-3.1-405B": Published(405_853_388_800),
    "Llama-3.2-1B-Instruct": Published(1_235_814_400),
    "Llama-3.2-3B-Instruct": Published(3_212_749_824),
    "Llama-3.3-70B-Instruct": Published(70_553_706_496),
    "Llama-4-Scout-17B-16E-Instruct": Published(108_641_793_536 - 871_932_416),
    "Llama-4-Maverick-17B-128E-Instruct": Published(401_583_781_376 - 871_932_416),
    "Mistral-7B-v0.1": Published(7_241_732_096),
    "Mistral-7B-Instruct-v0.3": Published(7_248_023_552),
    "Mistral-Nemo-Instruct-2407": Published(12_247_782_400),
    "Mistral-Small-24B-Instruct-2501": Published(23_572_403_200),
    "Mistral-Small-3.1-24B-Instruct-2503": Published(24_011_361_280 - 438_958_080),
    "Devstral-Small-2-24B-Instruct-2512": Published(24_011_361_280 - 438_958_080, quantization="fp8"),
    "Ministral-8B-Instruct-2410": Published(8_019_808_256),
    "Ministral-3-3B-Instruct-2512": Published("3.4B"),
    "Mistral-Large-Instruct-2407": Published(122_610_069_504),
    "Mixtral-8x7B-v0.1": Published(46_702_792_704),
    "Mixtral-8x22B-v0.1": Published("141B"),
    "SmolLM-135M": Published(134_515_008),
    "SmolLM-360M": Published(361_821_120),
    "SmolLM-1.7B": Published(1_711_376_384),
    "SmolLM3-3B": Published(3_075_098_624),
    "Yi-34B": Published(34_388_917_248),
    "Yi-1.5-9B": Published(8_829_407_232),
    "internlm3-8b-instruct": Published("8.80B", 196_608),
    "Falcon3-7B-Base": Published(7_455_550_464),
    "Qwen1.5-0.5B": Published(463_987_712),
    "Qwen1.5-72B-Chat": Published("72.3B"),
    "Qwen1.5-MoE-A2.7B": Published(14_315_784_192),
    "Qwen2-0.5B": Published(494_032_768),
    "Qwen2-1.5B": Published(1_543_714_304),
    "Qwen2-7B": Published(7_615_616_512),
    "Qwen2-57B-A14B-Instruct": Published("57.4B"),
    "Qwen2.5-3B": Published(3_085_938_688),
    "Qwen2.5-7B-Instruct": Published(7_615_616_512),
    "Qwen2.5-7B-Instruct-AWQ": Published(7_615_616_512, quantization="awq"),
    "Qwen2.5-7B-Instruct-GPTQ-Int4": Published(7_615_616_512, quantization="gptq"),
    "Qwen2.5-14B-Instruct": Published(14_770_033_664),
    "Qwen2.5-72B-Instruct": Published(72_706_203_648),
    "QwQ-32B": Published(32_763_876_352),
    "DeepSeek-R1-Distill-Qwen-1.5B": Published(1_777_088_000),
    "Qwen3-0.6B": Published(596_049_920),
    "Qwen3-1.7B": Published(1_720_574_976),
    "Qwen3-4B": Published(4_022_468_096),
    "Qwen3-8B": Published(8_190_735_360),
    "Qwen3-14B": Published(14_768_307_200),
    "Qwen3-32B": Published(32_762_123_264),
    "Qwen3-32B-FP8": Published(32_762_123_264, quantization="fp8"),
    "Qwen3-32B-FP8-Static-PerTensor": Published(32_762_123_264, quantization="modelopt"),
    "Qwen3-30B-A3B": Published(30_532_122_624),
    "Qwen3-30B-A3B-FP8": Published(30_532_122_624, quantization="fp8"),
    "Qwen3-235B-A22B": Published(235_093_634_560),
    "Qwen3-235B-A22B-NVFP4": Published(235_093_634_560, quantization="modelopt"),
    "Qwen3-Coder-480B-A35B-Instruct": Published(480_154_875_392),
    "Qwen3-Next-80B-A3B-Instruct": Published("80B"),
    "ERNIE-4.5-VL-28B-A3B-PT": Published("28B"),
    "DeepSeek-OCR": Published(3_336_106_240 - 1024 * 3 * 14**2, length=8192, has_tower=True),  # CLIP's own patches
    "DeepSeek-OCR-2": Published(3_389_119_360, has_tower=True),
    "Qwen3-VL-4B-Instruct": Published(4_437_815_808, has_tower=True),
    "Qwen3.5-27B": Published("27B"),
    "Qwen3.5-35B-A3B": Published("35B"),
    "Qwen3.5-122B-A10B-NVFP4": Published("122B", quantization="modelopt"),
    "Qwen3.5-397B-A17B": Published("397B"),
    "gemma-2b": Published(2_506_172_416),
    "gemma-7b": Published(8_537_680_896),
    "gemma-2-2b": Published(2_614_341_888),
    "gemma-2-9b": Published(9_241_705_984),
    "gemma-2-27b": Published(27_227_128_320),
    "gemma-3-270m-it": Published(268_098_176),
    "gemma-3-1b-it": Published(999_885_952),
    "gemma-3-4b-it": Published(4_300_079_472 - 419_816_304, 131_072),
    "gemma-3-27b-it": Published(27_432_406_640 - 423_060_336, 131_072),
    "Gemma-4-31B-IT-NVFP4": Published("30.7B", quantization="modelopt"),
    "gemma-4-E4B-it": Published("8B"),
    "phi-1_5": Published(1_418_270_720),
    "phi-2": Published(2_779_683_840),
    "Phi-3-mini-4k-instruct": Published(3_821_079_552),
    "Phi-3-medium-4k-instruct": Published(13_960_238_080),
    "Phi-3.5-mini-instruct": Published(3_821_079_552),
    "Phi-4-mini-instruct": Published(3_836_021_760),
    "phi-4": Published(14_659_507_200),
    "DeepSeek-V2-Lite": Published(15_706_484_224),
    "DeepSeek-V2-Chat": Published(235_741_434_880),
    "DeepSeek-R1": Published(671_026_419_200, quantization="fp8"),
    "DeepSeek-V3.2": Published("671B", quantization="fp8"),
    "DeepSeek-V4-Flash": Published("284B", quantization="fp8"),
    "Kimi-K2-Instruct": Published("1.03T", quantization="fp8"),
    "Kimi-Linear-48B-A3B-Instruct": Published("49.1B", 1_048_576),
    "GLM-4.5-Air": Published("106B"),
    "GLM-5": Published("744B"),
    "GLM-5.2": Published("744B"),
    "gpt-oss-20b": Published("20.9B", quantization="mxfp4"),
    "gpt-oss-120b": Published(116_829_156_672, quantization="mxfp4"),
    "MiniMax-M2.5": Published("229B", quantization="fp8"),
    "MiniMax-M2.7": Published("229B", quantization="fp8"),
    "MiniMax-M3": Published(426_174_572_928),
    "MiMo-V2-Flash": Published("309B", quantization="fp8"),
    "granite-3.1-2b-instruct": Published(2_533_531_648),
    "granite-3.1-8b-instruct": Published(8_170_848_256),
    "granite-3.1-3b-a800m-instruct": Published("3.30B"),
    "granite-4.0-h-tiny": Published("7B"),
    "granite-4.0-h-small": Published("32B"),
    "OLMo-2-1124-7B": Published("7.30B"),
    "OLMo-2-1124-13B": Published("13.7B"),
    "OLMo-2-0325-32B": Published("32.2B"),
    "OLMo-3-1125-32B": Published("32.2B"),
    "OLMoE-1B-7B-0924": Published(6_919_161_856),
    "falcon-rw-1b": Published("1.31B", 2_048),
    "falcon-7b": Published(6_921_720_704, 2_048),
    "falcon-40b": Published(41_303_293_952, 2_048),
    "falcon-11B": Published("11.1B"),
    "Falcon-H1-0.5B-Instruct": Published(521_411_104),
    "aya-23-8B": Published(8_028_033_024),
    "c4ai-command-r-v01": Published(34_980_831_232, 131_072),
    "c4ai-command-r-plus": Published(103_810_674_688, 131_072),
    "c4ai-command-a-03-2025": Published(111_057_580_032),
    "dbrx-base": Published(131_596_523_520, 32_768),
    "starcoder2-3b": Published(3_030_371_328),
    "starcoder2-7b": Published(7_173_923_840),
    "gpt2": Published(124_439_808, 1_024),
    "gpt2-xl": Published(1_557_611_200, 1_024),
    "gpt-neo-2.7B": Published("2.65B"),
    "gpt-j-6b": Published(6_050_882_784, 2_048),
    "pythia-70m": Published(70_426_624),
    "pythia-1b": Published(1_011_781_632),
    "pythia-12b": Published(11_846_072_320),
    "gpt-neox-20b": Published(20_554_567_680),
    "RedPajama-INCITE-Base-3B-v1": Published("2.8B"),
    "bloom-560m": Published(559_214_592, 2_048),
    "bloom": Published(176_247_271_424, 2_048),
    "mpt-7b": Published(6_649_286_656, 2_048),
    "mpt-30b": Published("30.0B", 8_192),
    "opt-125m": Published(125_239_296),
    "opt-1.3b": Published(1_315_758_080),
    "opt-30b": Published(29_974_540_288),
    "stablelm-3b": Published(2_795_443_200),
    "stablelm-2-zephyr-1_6b": Published(1_644_515_328),
    "mamba-130m-hf": Published(129_135_360, UNLIMITED),
    "mamba-2.8b-hf": Published(2_768_345_600, UNLIMITED),
    "Mamba-Codestral-7B-v0.1": Published(7_285_403_648, UNLIMITED),
    "Jamba-v0.1": Published(51_570_323_328),
    "AI21-Jamba-1.5-Large": Published("398B"),
    "Bamba-9B-v1": Published("9.78B"),
    "Nemotron-H-8B-Base-8K": Published("8.1B"),
    "Nemotron-H-56B-Base-8K": Published("56B"),
    "LFM2-350M": Published(354_483_968),
    "LFM2-1.2B": Published(1_170_340_608),
    "LFM2-8B-A1B": Published("8.3B"),
    "ERNIE-4.5-0.3B-PT": Published(360_748_032),
    "ERNIE-4.5-21B-A3B-PT": Published("21B"),
    "Seed-OSS-36B-Instruct": Published(36_151_104_512),
    "dots.llm1.inst": Published("142B"),
    "EXAONE-4.0-1.2B": Published("1.28B"),
    "EXAONE-4.0-32B": Published("32.0B"),
    "bge-base-en-v1.5": Published(109_482_240 - 590_592),
    "snowflake-arctic-embed-m": Published("109M"),
    "all-MiniLM-L6-v2": Published(22_713_216 - 147_840),
    "ms-marco-MiniLM-L6-v2": Published("22.6M"),
    "bge-m3": Published(567_754_752 - 1_049_600, 8_192),
    "bge-reranker-v2-m3": Published("567M", 8_192),
    "embeddinggemma-300m": Published(302_863_104),
    "gte-multilingual-base": Published("305M"),
    "ModernBERT-large": Published("395M"),
    "nomic-embed-text-v1.5": Published("137M", 2_048),
}


HEADS, HEAD = 4, 16
_STATE = {
    **dict.fromkeys(("state_size", "ssm_state_size", "mamba_d_state", "mamba_dt_rank", "time_step_rank"), 8),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim", "attention_head_dim"), HEAD),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), HEAD),
    **dict.fromkeys(("chunk_size", "mamba_chunk_size", "attention_chunk_size", "floor_scale"), 16),
    **dict.fromkeys(("conv_dim", "conv_dim_out", "block_dim"), HEADS * HEAD),
    "index_n_heads": 16,  # with few, scores are often 0, and equal ones have no order
    "index_topk": 20,
    "attn_layer_period": 4,
    "attn_layer_offset": 2,
    "attn_layer_indices": [1],
    "attn_rotary_emb": HEAD // 2,
    "full_attn_idxs": [2],
}
"""Sizes of layers with a state, and which of four layers have attention."""
_CHANGES: dict[str, dict[str, Any]] = {
    "MiMo-V2-Flash": {
        "head_dim": 24,
        "swa_head_dim": 24,
        "swa_num_key_value_heads": 4,
        "hybrid_layer_pattern": [0, 1, 1, 1],
    },
    "gemma-4-E4B-it": {"audio_token_id": 258881, "image_token_id": 258880, "video_token_id": 258884},
    "dbrx-base": {
        "attn_config": {"clip_qkv": 8, "kv_n_heads": 2, "rope_theta": 500000},
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 8, "moe_top_k": 2},
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    },
    "Mistral-Small-3.1-24B-Instruct-2503": {"tie_word_embeddings": False},
    **{key: {"time_step_min": 1e-9} for key in ("Nemotron-H-8B-Base-8K", "Nemotron-H-56B-Base-8K")},
}
"""Other changes. MiMo rotates a third of a head, and transformers has its own rule for KV heads and windows; for tokens
that stand for images transformers reads other rows of the layers' own embeddings, so Gemma 4 has none of them among its
128; DBRX's rope_theta is where transformers does not read it; Mistral's checkpoint has a head, which transformers would
tie; Nemotron-H: see docs/reference/models.md."""


def tiny(name: str) -> dict[str, Any]:
    """A model's config.json with small sizes, and otherwise as published; without quantization and remote code."""
    published = {key: value for key, value in config(name).items() if key not in ("quantization_config", "auto_map")}
    if isinstance(pattern := published.get("hybrid_override_pattern"), str):
        published["hybrid_override_pattern"] = list(pattern)  # of the layers
    small = shrink(published)
    if pattern:
        small["hybrid_override_pattern"] = "".join(small["hybrid_override_pattern"])
    for part in (small, small.get("text_config", {})):
        part |= {key: value for key, value in _STATE.items() if isinstance(part.get(key), type(value))}
        inner = HEADS * HEAD * part.get("mamba_expand", part.get("expand", 1))
        heads = inner // HEAD
        sizes = dict.fromkeys(("num_heads", "mamba_num_heads", "mamba_n_heads"), heads) | {"mamba_d_ssm": inner}
        if part.get("model_type") in ("mamba", "mamba2"):
            sizes |= {"intermediate_size": inner}
        if (ratio := part.get("linear_num_value_heads", 0) // part.get("linear_num_key_heads", 1)) > 0:
            sizes |= {"linear_num_key_heads": 2, "linear_num_value_heads": 2 * ratio}
        part |= {key: value for key, value in sizes.items() if key in part}
        if part.get("num_kv_shared_layers"):
            part |= {"num_kv_shared_layers": 2, "layer_types": ["sliding_attention", "full_attention"] * 2}
        if "n_groups" in part:
            part["n_groups"] = 2
        if "linear_attn_config" in part:
            layers = {"full_attn_layers": [4], "kda_layers": [1, 2, 3]}
            part["linear_attn_config"] |= {"head_dim": HEAD, "num_heads": HEADS, **layers}
        if "sparse_attention_config" in part:
            own = part["sparse_attention_config"] | {"sparse_num_index_heads": part["num_key_value_heads"]}
            own |= dict.fromkeys(("sparse_attention_freq", "sparse_disable_index_value"), part["moe_layer_freq"])
            own |= {"sparse_index_dim": HEAD, "sparse_block_size": 8, "sparse_topk_blocks": 3}
            part["sparse_attention_config"] = own
        part["initializer_range"] = 0.2  # far enough from uniform that rounding cannot change the likeliest token
    return small | _CHANGES.get(name, {})
