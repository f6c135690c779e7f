"""Llama, and families that differ from it only in settings or names: Mistral, Qwen2, Qwen3, MiMo, InternLM2, Seed-OSS,
Granite, SmolLM3, Phi-3 and Phi-4.

A family is a `ModelSpec` and the names in its checkpoints; `engine/models/decoder.py` computes it.
"""

from __future__ import annotations

from typing import Any

from quire.engine.architecture.families.family import (
    Config,
    DraftHeadLayout,
    Family,
    architecture,
    attention,
    feed_forward,
    grouped_rows,
    head_dim,
    require,
    rms_norm,
    rope,
    windows,
)
from quire.engine.architecture.model_spec import LayerSpec, ModelSpec
from quire.engine.architecture.spec_parts import NormSpec, RopeSpec

NAMES = {
    "embedding": "model.embed_tokens",
    "layers.attention_norm": "model.layers.{layer}.input_layernorm",
    "layers.attention.qkv": "model.layers.{layer}.self_attn.{part}_proj",
    "layers.attention.query_norm": "model.layers.{layer}.self_attn.q_norm",
    "layers.attention.key_norm": "model.layers.{layer}.self_attn.k_norm",
    "layers.attention.output": "model.layers.{layer}.self_attn.o_proj",
    "layers.feed_forward_norm": "model.layers.{layer}.post_attention_layernorm",
    "layers.feed_forward.gate_up": "model.layers.{layer}.mlp.{part}_proj",
    "layers.feed_forward.down": "model.layers.{layer}.mlp.down_proj",
    "norm": "model.norm",
    "head": "lm_head",
}
"""Llama's names, which many families share."""

_INTERNLM2 = {
    "embedding": "model.tok_embeddings",
    "layers.attention_norm": "model.layers.{layer}.attention_norm",
    "layers.attention.qkv": "model.layers.{layer}.attention.wqkv",
    "layers.attention.output": "model.layers.{layer}.attention.wo",
    "layers.feed_forward_norm": "model.layers.{layer}.ffn_norm",
    "layers.feed_forward.gate_up.gate": "model.layers.{layer}.feed_forward.w1",
    "layers.feed_forward.gate_up.up": "model.layers.{layer}.feed_forward.w3",
    "layers.feed_forward.down": "model.layers.{layer}.feed_forward.w2",
    "norm": "model.norm",
    "head": "output",
}

FUSED = NAMES | {
    "layers.attention.qkv": "model.layers.{layer}.self_attn.qkv_proj",
    "layers.feed_forward.gate_up": "model.layers.{layer}.mlp.gate_up_proj",
}
"""Phi-3's names: one matrix for queries, keys and values, and one for gate and up."""


def sequential(
    config: Config, norm: NormSpec, rope_spec: RopeSpec | None, window: int | None, **changes: Any
) -> LayerSpec:
    """Llama's layer; `changes` apply to its attention."""
    return LayerSpec(
        attention=attention(config, rope_spec, window=window, **changes),
        attention_norm=norm,
        feed_forward=feed_forward(config),
        feed_forward_norm=norm,
        residual_multiplier=float(config.get("residual_multiplier", 1.0)),
    )


def _llama(name: str, config: Config) -> ModelSpec:
    """Also InternLM3, which has other names for its biases."""
    if config.get("model_type") == "internlm3":
        bias = bool(config.get("bias", False))
        require(config, "qkv_bias", bias)
        config = {**config, "attention_bias": bias, "mlp_bias": bias}
    norm = rms_norm(config)
    rope_spec = rope(config, head_dim(config), is_interleaved=bool(config.get("rope_interleave")))  # of GGUF
    layer = sequential(config, norm, rope_spec, None)
    return architecture(name, config, [layer] * int(config["num_hidden_layers"]), norm)


def mistral(name: str, config: Config) -> ModelSpec:
    """`rope_interleave` comes from Mistral's own layout."""
    norm = rms_norm(config)
    rope_spec = rope(config, head_dim(config), is_interleaved=bool(config.get("rope_interleave")))
    layers = [sequential(config, norm, rope_spec, window) for window in windows(config)]
    return architecture(name, config, layers, norm)


def _internlm2(name: str, config: Config) -> ModelSpec:
    """Llama with other names, and one matrix for queries, keys and values, in groups. `bias` applies to attention."""
    return _llama(name, {**config, "attention_bias": bool(config["bias"])})


def _seed_oss(name: str, config: Config) -> ModelSpec:
    norm, rope_spec = rms_norm(config), rope(config, head_dim(config))
    layer = sequential(config, norm, rope_spec, None, output_bias=bool(config["attention_out_bias"]))
    return architecture(name, config, [layer] * int(config["num_hidden_layers"]), norm)


_PHI4 = {"max_position_embeddings": 131072, "original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5}
_PHI4 |= {"num_key_value_heads": 8}
_PHI4_PARTS = ("model.embed_tokens_extend.",)
_PHI4_NAMES = {module: f"{name}.base_layer" if name.endswith("_proj") else name for module, name in FUSED.items()}
"""As published, with adapters for pictures and speech beside the matrices, which text does not use."""


def _phi3(name: str, config: Config) -> ModelSpec:
    """Older configs use other names for longrope."""
    settings = ("rope_parameters", "rope_scaling")
    scaling = next((dict(config[key]) for key in settings if config.get(key)), {})
    if (scaling.get("rope_type") or scaling.get("type")) in ("su", "yarn"):
        scaling["rope_type"] = "longrope"
    return mistral(name, {**config, **dict.fromkeys(settings, scaling)})


def _qwen_windows(config: Config) -> list[int | None]:
    return windows(config if config["use_sliding_window"] else {**config, "sliding_window": None})


def qwen2(name: str, config: Config) -> ModelSpec:
    norm, rope_spec = rms_norm(config), rope(config, head_dim(config))
    biases = {"qkv_bias": True, "output_bias": False}
    layers = [sequential(config, norm, rope_spec, window, **biases) for window in _qwen_windows(config)]
    return architecture(name, config, layers, norm)


def qwen3(name: str, config: Config) -> ModelSpec:
    norm, rope_spec = rms_norm(config), rope(config, head_dim(config))
    layers = [sequential(config, norm, rope_spec, window, qk_norm=norm) for window in _qwen_windows(config)]
    return architecture(name, config, layers, norm)


def _granite(name: str, config: Config) -> ModelSpec:
    norm, rope_spec = rms_norm(config), rope(config, head_dim(config))
    layer = sequential(config, norm, rope_spec, None, scale=float(config["attention_multiplier"]))
    return architecture(
        name,
        config,
        [layer] * int(config["num_hidden_layers"]),
        norm,
        embedding_multiplier=float(config["embedding_multiplier"]),
        logit_multiplier=1 / float(config["logits_scaling"]),
    )


def _smollm3(name: str, config: Config) -> ModelSpec:
    """Every fourth layer has no rotary positions; windows, if enabled, apply to these layers."""
    norm, rope_spec, count = rms_norm(config), rope(config, head_dim(config)), int(config["num_hidden_layers"])
    every = int(config["no_rope_layer_interval"])
    has_rope = config.get("no_rope_layers") or [(number + 1) % every != 0 for number in range(count)]
    is_windowed = bool(config["use_sliding_window"])
    kinds = ["sliding_attention" if is_windowed and not turned else "full_attention" for turned in has_rope]
    layers = [
        sequential(config, norm, rope_spec if turned else None, window)
        for turned, window in zip(has_rope, windows({"layer_types": kinds, **config}), strict=True)
    ]
    return architecture(name, config, layers, norm)


_EAGLE = DraftHeadLayout(layer="model.layers.0", names={"heads.projection": "model.fc"})
_EAGLE3 = DraftHeadLayout(
    layer="model.layers.0",
    names={
        "heads.embedding_norm": "{prefix}.input_layernorm",
        "heads.hidden_norm": "{prefix}.hidden_norm",
        "layers.attention_norm": "{prefix}.hidden_norm",
        "heads.projection": "model.fc",
    },
)
_MIMO_MTP = DraftHeadLayout(
    layer="model.mtp_layers.0",
    names={
        "heads.embedding_norm": "{prefix}.token_layernorm",
        "heads.hidden_norm": "{prefix}.hidden_layernorm",
        "heads.projection": "{prefix}.input_proj",
        "heads.norm": "{prefix}.final_layernorm",
    },
    hidden_first=True,
)
MISTRAL = {"sliding_window": 4096, "num_key_value_heads": 8, "max_position_embeddings": 131072}
QWEN = {
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
}
FAMILIES = {
    "LlamaForCausalLM": Family(
        _llama, NAMES, {"max_position_embeddings": 2048}, draft_heads={"eagle": _EAGLE, "eagle3": _EAGLE3}
    ),
    "MistralForCausalLM": Family(mistral, NAMES, MISTRAL),
    "Qwen2ForCausalLM": Family(qwen2, NAMES, QWEN),
    "MiMoForCausalLM": Family(
        qwen2, NAMES, QWEN, ignored_prefixes=("model.mtp_layers.",), draft_heads={"mtp": _MIMO_MTP}
    ),
    "InternLM2ForCausalLM": Family(
        _internlm2, _INTERNLM2, {"max_position_embeddings": 2048, "bias": True}, rows=grouped_rows
    ),
    "Qwen3ForCausalLM": Family(qwen3, NAMES, {**QWEN, "head_dim": 128}),
    "SeedOssForCausalLM": Family(
        _seed_oss,
        NAMES,
        {
            "max_position_embeddings": 524288,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "attention_bias": True,
            "attention_out_bias": False,
        },
    ),
    "GraniteForCausalLM": Family(
        _granite,
        NAMES,
        {
            "max_position_embeddings": 2048,
            "attention_multiplier": 1.0,
            "embedding_multiplier": 1.0,
            "logits_scaling": 1.0,
        },
    ),
    "SmolLM3ForCausalLM": Family(
        _smollm3,
        NAMES,
        {
            "max_position_embeddings": 32768,
            "num_key_value_heads": 4,
            "rope_theta": 2000000.0,
            "no_rope_layer_interval": 4,
            "tie_word_embeddings": True,
            "use_sliding_window": False,
        },
    ),
    "Phi3ForCausalLM": Family(_phi3, FUSED, {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5}),
    "Phi4MultimodalForCausalLM": Family(_phi3, FUSED, _PHI4, ignored_prefixes=_PHI4_PARTS),
    "Phi4MMForCausalLM": Family(
        _phi3,
        _PHI4_NAMES,
        _PHI4,
        ignored_prefixes=_PHI4_PARTS,
        ignored_pattern=r"\.lora_[AB]\.(vision|speech)\.weight$",
    ),
}
