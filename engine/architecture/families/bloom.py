"""BLOOM and MPT: ALiBi instead of positions."""

from __future__ import annotations

from quire.engine.architecture.families.family import (
    Config,
    Family,
    architecture,
    attention,
    feed_forward,
    grouped_rows,
    layer_norm,
    require,
)
from quire.engine.architecture.model_spec import LayerSpec, ModelSpec
from quire.engine.protocol.errors import ConfigError


def _bloom(name: str, config: Config) -> ModelSpec:
    """The embedding is normalized; each head's query, key and value are together in the checkpoint."""
    require(config, "apply_residual_connection_post_layernorm", False)
    config = {
        **config,
        "num_attention_heads": config["n_head"],
        "intermediate_size": 4 * config["hidden_size"],
        "max_position_embeddings": config.get("max_position_embeddings") or config["seq_length"],
    }
    norm = layer_norm(config["layer_norm_epsilon"])
    layer = LayerSpec(
        attention=attention(
            config, None, num_kv_heads=int(config["n_head"]), alibi=1.0, qkv_bias=True, output_bias=True
        ),
        attention_norm=norm,
        feed_forward=feed_forward(config, activation="gelu_tanh", is_gated=False, bias=True),
        feed_forward_norm=norm,
    )
    return architecture(name, config, [layer] * int(config["n_layer"]), norm, embedding_norm=norm)


def _mpt(name: str, config: Config) -> ModelSpec:
    settings = config.get("attn_config") or {}
    for key, supported in {
        "softmax_scale": None,
        **dict.fromkeys(("qk_ln", "prefix_lm", "attn_uses_sequence_id"), False),
        "attn_type": "multihead_attention",
        "alibi": True,
        "alibi_bias_max": 8,
    }.items():
        require(settings, key, supported)
    require(config, "no_bias", True)
    require(config, "logit_scale", None)
    require(config, "expansion_ratio", 4)
    heads = int(config["n_heads"])
    if heads & (heads - 1):
        raise ConfigError(f"n_heads {heads} is not supported; supported: powers of 2")
    config = {
        **config,
        "hidden_size": config["d_model"],
        "num_attention_heads": heads,
        "intermediate_size": 4 * config["d_model"],
        "max_position_embeddings": config["max_seq_len"],
    }
    norm = layer_norm(config["layer_norm_epsilon"], bias=False)
    layer = LayerSpec(
        attention=attention(config, None, num_kv_heads=heads, alibi=1.0, clip=float(settings.get("clip_qkv") or 0)),
        attention_norm=norm,
        feed_forward=feed_forward(config, activation="gelu", is_gated=False),
        feed_forward_norm=norm,
    )
    return architecture(name, config, [layer] * int(config["n_layers"]), norm)


_BLOOM_NAMES = {
    "embedding": "transformer.word_embeddings",
    "embedding_norm": "transformer.word_embeddings_layernorm",
    "layers.attention_norm": "transformer.h.{layer}.input_layernorm",
    "layers.attention.qkv": "transformer.h.{layer}.self_attention.query_key_value",
    "layers.attention.output": "transformer.h.{layer}.self_attention.dense",
    "layers.feed_forward_norm": "transformer.h.{layer}.post_attention_layernorm",
    "layers.feed_forward.gate_up": "transformer.h.{layer}.mlp.dense_h_to_4h",
    "layers.feed_forward.down": "transformer.h.{layer}.mlp.dense_4h_to_h",
    "norm": "transformer.ln_f",
    "head": "lm_head",
}
_MPT_NAMES = {
    "embedding": "transformer.wte",
    "layers.attention_norm": "transformer.blocks.{layer}.norm_1",
    "layers.attention.qkv": "transformer.blocks.{layer}.attn.Wqkv",
    "layers.attention.output": "transformer.blocks.{layer}.attn.out_proj",
    "layers.feed_forward_norm": "transformer.blocks.{layer}.norm_2",
    "layers.feed_forward.gate_up": "transformer.blocks.{layer}.ffn.up_proj",
    "layers.feed_forward.down": "transformer.blocks.{layer}.ffn.down_proj",
    "norm": "transformer.norm_f",
    "head": "lm_head",
}
_COMMON = {"layer_norm_epsilon": 1e-5, "tie_word_embeddings": True}
FAMILIES = {
    "BloomForCausalLM": Family(
        _bloom,
        _BLOOM_NAMES,
        {**_COMMON, "seq_length": 2048},
        {"num_attention_heads": "n_head", "num_hidden_layers": "n_layer", "n_embed": "hidden_size"},
        prefix="transformer.",
        rows=grouped_rows,
    ),
    "MptForCausalLM": Family(
        _mpt,
        _MPT_NAMES,
        {**_COMMON, "max_seq_len": 2048},
        {"hidden_size": "d_model", "num_attention_heads": "n_heads", "num_hidden_layers": "n_layers"},
        prefix="transformer.",
    ),
}
