"""Nomic's BERT: rotary positions and a gated feed-forward (Nussbaum et al. 2024), with the names of its own code."""

from __future__ import annotations

from typing import Any

from quire.engine.architecture.encoder_spec import EncoderAttentionSpec, EncoderSpec
from quire.engine.architecture.families.family import Config, Family, activation, head_dim, layer_norm, require, rope
from quire.engine.architecture.feed_forward_spec import MLPSpec
from quire.engine.architecture.model_spec import LayerSpec

_NAMES_OF_GPT2 = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "intermediate_size": "n_inner",
    "max_position_embeddings": "n_positions",
    "layer_norm_eps": "layer_norm_epsilon",
    "rope_theta": "rotary_emb_base",
}
"""Settings of transformers' class, and their names in the config.json of Nomic's own code."""
_GATES = {"swiglu": "silu", "geglu": "gelu"}


def _nomic(name: str, config: Config) -> EncoderSpec:
    renamed: dict[str, Any] = {ours: config[theirs] for ours, theirs in _NAMES_OF_GPT2.items() if theirs in config}
    config = {"layer_norm_eps": 1e-12, "rope_theta": 1000.0, "max_position_embeddings": 2048, **config, **renamed}
    for setting in ("prenorm", "use_rms_norm", "parallel_block", "rotary_emb_interleaved", "causal"):
        require(config, setting, False, None)
    for setting in ("qkv_proj_bias", "mlp_fc1_bias", "mlp_fc2_bias"):
        require(config, setting, False)
    require(config, "rotary_emb_fraction", 1.0)
    require(config, "num_experts", None, 0)
    kind = config.get("activation_function", config.get("hidden_act", "silu"))
    dim, heads = head_dim(config), int(config["num_attention_heads"])
    norm = layer_norm(config["layer_norm_eps"])
    # Beyond the trained length, positions would have to be scaled.
    longest = min(int(config["max_position_embeddings"]), int(config.get("max_trained_positions") or 2**31))
    layer = LayerSpec(
        attention=EncoderAttentionSpec(
            num_heads=heads,
            num_kv_heads=heads,
            head_dim=dim,
            scale=dim**-0.5,
            rope=rope({**config, "max_position_embeddings": longest}, dim),
        ),
        attention_norm=None,
        attention_post_norm=norm,
        feed_forward=MLPSpec(
            intermediate_size=int(config["intermediate_size"]), activation=activation(_GATES.get(kind, kind))
        ),
        feed_forward_norm=None,
        feed_forward_post_norm=norm,
    )
    return EncoderSpec(
        name=name,
        hidden_size=int(config["hidden_size"]),
        vocab_size=int(config["vocab_size"]),
        max_position=longest,
        layers=(layer,) * int(config["num_hidden_layers"]),
        norm=None,
        embedding_norm=norm,
        tie_embeddings=True,
        token_types=int(config.get("type_vocab_size", 2)),
    )


_NAMES = {
    "embedding": "embeddings.word_embeddings",
    "token_types": "embeddings.token_type_embeddings",
    "embedding_norm": "emb_ln",
    "layers.attention.qkv": "encoder.layers.{layer}.attn.Wqkv",
    "layers.attention.output": "encoder.layers.{layer}.attn.out_proj",
    "layers.attention_post_norm": "encoder.layers.{layer}.norm1",
    "layers.feed_forward.gate_up.up": "encoder.layers.{layer}.mlp.fc11",
    "layers.feed_forward.gate_up.gate": "encoder.layers.{layer}.mlp.fc12",
    "layers.feed_forward.down": "encoder.layers.{layer}.mlp.fc2",
    "layers.feed_forward_post_norm": "encoder.layers.{layer}.norm2",
}
FAMILIES = {"NomicBertModel": Family(_nomic, _NAMES, prefix="", ignored_prefixes=("pooler.", "cls."))}
