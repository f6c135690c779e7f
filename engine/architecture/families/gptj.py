"""GPT-J (attention and feed-forward in parallel, interleaved rotary pairs) and GPT-Neo (windows, scores without a
scale)."""

from __future__ import annotations

from quire.engine.architecture.families.family import (
    Config,
    Family,
    activation,
    architecture,
    attention,
    feed_forward,
    head_dim,
    layer_norm,
    rope,
)
from quire.engine.architecture.families.gpt import GPT2_ALIASES
from quire.engine.architecture.model_spec import LayerSpec, ModelSpec
from quire.engine.protocol.errors import ConfigError


def _gptj(name: str, config: Config) -> ModelSpec:
    config = {
        **config,
        "hidden_size": config["n_embd"],
        "num_attention_heads": config["n_head"],
        "max_position_embeddings": config["n_positions"],
        "intermediate_size": config.get("n_inner") or 4 * config["n_embd"],
    }
    dim, norm = head_dim(config), layer_norm(config["layer_norm_epsilon"])
    layer = LayerSpec(
        attention=attention(
            config,
            rope(config, int(config.get("rotary_dim") or dim), is_interleaved=True),
            num_kv_heads=int(config["n_head"]),
        ),
        attention_norm=norm,
        feed_forward=feed_forward(
            config, activation=activation(config["activation_function"]), is_gated=False, bias=True
        ),
        feed_forward_norm=None,
        is_parallel=True,
    )
    return architecture(name, config, [layer] * int(config["n_layer"]), norm, head_bias=True)


def _gpt_neo(name: str, config: Config) -> ModelSpec:
    count, kinds = int(config["num_layers"]), config.get("attention_layers")
    if not kinds:
        kinds = [kind for period, repeats in config["attention_types"] for kind in [*period] * repeats]
    if len(kinds) != count or not set(kinds) <= {"global", "local"}:
        raise ConfigError(f"attention_types must give {count} layers, each global or local, got {kinds}")
    config = {
        **config,
        "num_attention_heads": config["num_heads"],
        "intermediate_size": config["intermediate_size"] or 4 * config["hidden_size"],
    }
    norm = layer_norm(config["layer_norm_epsilon"])
    layers = [
        LayerSpec(
            attention=attention(
                config,
                None,
                num_kv_heads=int(config["num_heads"]),
                scale=1.0,
                window=int(config["window_size"]) if kind == "local" else None,
                output_bias=True,
            ),
            attention_norm=norm,
            feed_forward=feed_forward(
                config, activation=activation(config["activation_function"]), is_gated=False, bias=True
            ),
            feed_forward_norm=norm,
        )
        for kind in kinds
    ]
    return architecture(name, config, layers, norm, position_embeddings=int(config["max_position_embeddings"]))


_GPTJ_NAMES = {
    "embedding": "transformer.wte",
    "layers.attention_norm": "transformer.h.{layer}.ln_1",
    "layers.attention.qkv": "transformer.h.{layer}.attn.{part}_proj",
    "layers.attention.output": "transformer.h.{layer}.attn.out_proj",
    "layers.feed_forward.gate_up": "transformer.h.{layer}.mlp.fc_in",
    "layers.feed_forward.down": "transformer.h.{layer}.mlp.fc_out",
    "norm": "transformer.ln_f",
    "head": "lm_head",
}
_GPT_NEO_NAMES = _GPTJ_NAMES | {
    "positions": "transformer.wpe",
    "layers.attention.qkv": "transformer.h.{layer}.attn.attention.{part}_proj",
    "layers.attention.output": "transformer.h.{layer}.attn.attention.out_proj",
    "layers.feed_forward_norm": "transformer.h.{layer}.ln_2",
    "layers.feed_forward.gate_up": "transformer.h.{layer}.mlp.c_fc",
    "layers.feed_forward.down": "transformer.h.{layer}.mlp.c_proj",
}
_COMMON = {"activation_function": "gelu_new", "layer_norm_epsilon": 1e-5}
_MASKS = r"\.attn\.(attention\.)?(masked_)?bias$"
"""Buffers that older checkpoints contain."""
FAMILIES = {
    "GPTJForCausalLM": Family(
        _gptj,
        _GPTJ_NAMES,
        {**_COMMON, "n_positions": 2048, "rotary_dim": 64},
        GPT2_ALIASES,
        prefix="transformer.",
        ignored_pattern=_MASKS,
    ),
    "GPTNeoForCausalLM": Family(
        _gpt_neo,
        _GPT_NEO_NAMES,
        {
            **_COMMON,
            "max_position_embeddings": 2048,
            "intermediate_size": None,
            "window_size": 256,
            "attention_types": [[["global", "local"], 12]],
            "tie_word_embeddings": True,
        },
        {"num_attention_heads": "num_heads", "num_hidden_layers": "num_layers"},
        prefix="transformer.",
        ignored_pattern=_MASKS,
    ),
}
