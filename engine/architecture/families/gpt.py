"""GPT, GPT-2 and its descendants: OPT, XGLM, GPT-NeoX, Falcon, Phi, StableLM, StarCoder2. They use LayerNorm, and most
of them feed-forward layers without gates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from quire.engine.architecture.families.family import (
    Config,
    Family,
    activation,
    architecture,
    attention,
    feed_forward,
    grouped_rows,
    head_dim,
    layer_norm,
    require,
    rope,
    windows,
)
from quire.engine.architecture.families.llama import NAMES
from quire.engine.architecture.model_spec import LayerSpec, ModelSpec
from quire.engine.architecture.residual_spec import NormedResidualSpec


def _gpt1(name: str, config: Config) -> ModelSpec:
    """Norms follow the additions to the residual stream. So a layer's input is normalized by the last norm of the layer
    before it, and the first layer's input is not normalized."""
    act = str(config["afn"])
    config = {
        **config,
        "hidden_size": config["n_embd"],
        "num_attention_heads": config["n_head"],
        "max_position_embeddings": config["n_positions"],
        "intermediate_size": 4 * config["n_embd"],
    }
    norm, heads = layer_norm(config["layer_norm_epsilon"]), int(config["n_head"])
    layers = [
        LayerSpec(
            attention=attention(config, None, num_kv_heads=heads, qkv_bias=True, output_bias=True),
            attention_norm=norm if number else None,
            feed_forward=feed_forward(
                config, activation=activation("gelu_new" if act == "gelu" else act), is_gated=False, bias=True
            ),
            feed_forward_norm=norm,
            residual=NormedResidualSpec(),
        )
        for number in range(int(config["n_layer"]))
    ]
    return architecture(name, config, layers, norm, position_embeddings=int(config["n_positions"]))


def _gpt1_names(arch: ModelSpec) -> Mapping[str, str]:
    return {
        "embedding": "transformer.tokens_embed",
        "positions": "transformer.positions_embed",
        "layers.attention_norm": "transformer.h.{previous}.ln_2",
        "layers.attention.qkv": "transformer.h.{layer}.attn.c_attn",
        "layers.attention.output": "transformer.h.{layer}.attn.c_proj",
        "layers.feed_forward_norm": "transformer.h.{layer}.ln_1",
        "layers.feed_forward.gate_up": "transformer.h.{layer}.mlp.c_fc",
        "layers.feed_forward.down": "transformer.h.{layer}.mlp.c_proj",
        "norm": f"transformer.h.{arch.num_layers - 1}.ln_2",
        "head": "lm_head",
    }


def _gpt2(name: str, config: Config) -> ModelSpec:
    require(config, "add_cross_attention", False)
    config = {
        **config,
        "hidden_size": config["n_embd"],
        "num_attention_heads": config["n_head"],
        "max_position_embeddings": config["n_positions"],
        "intermediate_size": config.get("n_inner") or 4 * config["n_embd"],
    }
    norm = layer_norm(config["layer_norm_epsilon"])
    scale = head_dim(config) ** -0.5 if config.get("scale_attn_weights", True) else 1.0
    falls = bool(config.get("scale_attn_by_inverse_layer_idx"))
    layers = [
        LayerSpec(
            attention=attention(
                config,
                None,
                num_kv_heads=int(config["n_head"]),
                scale=scale / (number + 1 if falls else 1),
                qkv_bias=True,
                output_bias=True,
            ),
            attention_norm=norm,
            feed_forward=feed_forward(
                config, activation=activation(config["activation_function"]), is_gated=False, bias=True
            ),
            feed_forward_norm=norm,
        )
        for number in range(int(config["n_layer"]))
    ]
    return architecture(name, config, layers, norm, position_embeddings=int(config["n_positions"]))


_GPT2_NAMES = {
    "embedding": "transformer.wte",
    "positions": "transformer.wpe",
    "layers.attention_norm": "transformer.h.{layer}.ln_1",
    "layers.attention.qkv": "transformer.h.{layer}.attn.c_attn",
    "layers.attention.output": "transformer.h.{layer}.attn.c_proj",
    "layers.feed_forward_norm": "transformer.h.{layer}.ln_2",
    "layers.feed_forward.gate_up": "transformer.h.{layer}.mlp.c_fc",
    "layers.feed_forward.down": "transformer.h.{layer}.mlp.c_proj",
    "norm": "transformer.ln_f",
    "head": "lm_head",
}

GPT2_ALIASES = {
    "hidden_size": "n_embd",
    "max_position_embeddings": "n_positions",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
}


def _opt(name: str, config: Config) -> ModelSpec:
    """OPT, except OPT-350m, which has post-norms and a projected embedding."""
    require(config, "do_layer_norm_before", True)
    require(config, "_remove_final_layer_norm", False)
    require(config, "layer_norm_elementwise_affine", True)
    require(config, "word_embed_proj_dim", None, config["hidden_size"])
    norm, bias = layer_norm(1e-5), bool(config.get("enable_bias", True))
    config = {**config, "intermediate_size": config["ffn_dim"]}
    layer = LayerSpec(
        attention=attention(
            config, None, num_kv_heads=int(config["num_attention_heads"]), qkv_bias=bias, output_bias=bias
        ),
        attention_norm=norm,
        feed_forward=feed_forward(
            config, activation=activation(config["activation_function"]), is_gated=False, bias=bias
        ),
        feed_forward_norm=norm,
    )
    layers, positions = [layer] * int(config["num_hidden_layers"]), int(config["max_position_embeddings"])
    return architecture(name, config, layers, norm, position_embeddings=positions + 2, position_offset=2)


_OPT_NAMES = {
    "embedding": "model.decoder.embed_tokens",
    "positions": "model.decoder.embed_positions",
    "layers.attention_norm": "model.decoder.layers.{layer}.self_attn_layer_norm",
    "layers.attention.qkv": "model.decoder.layers.{layer}.self_attn.{part}_proj",
    "layers.attention.output": "model.decoder.layers.{layer}.self_attn.out_proj",
    "layers.feed_forward_norm": "model.decoder.layers.{layer}.final_layer_norm",
    "layers.feed_forward.gate_up": "model.decoder.layers.{layer}.fc1",
    "layers.feed_forward.down": "model.decoder.layers.{layer}.fc2",
    "norm": "model.decoder.final_layer_norm",
    "head": "lm_head",
}


def _xglm(name: str, config: Config) -> ModelSpec:
    """OPT with computed positions. transformers zeroes row `pad_token_id` of its table, which no position uses."""
    require(config, "add_cross_attention", False)
    require(config, "pad_token_id", 1, 0, None)
    factor = float(config["hidden_size"]) ** 0.5 if config.get("scale_embedding", True) else 1.0
    return replace(_opt(name, config), position_embeddings=0, has_sinusoids=True, embedding_multiplier=factor)


_XGLM_NAMES = {module: name.replace("model.decoder.", "model.") for module, name in _OPT_NAMES.items()} | {
    "norm": "model.layer_norm",
}


def _neox(name: str, config: Config) -> ModelSpec:
    norm, dim = layer_norm(config["layer_norm_eps"]), head_dim(config)
    config = {
        "partial_rotary_factor": config.get("rotary_pct", 0.25),
        "rope_theta": config.get("rotary_emb_base"),
        **config,
    }
    layer = LayerSpec(
        attention=attention(config, rope(config, dim), num_kv_heads=int(config["num_attention_heads"])),
        attention_norm=norm,
        feed_forward=feed_forward(config, is_gated=False, bias=True),
        feed_forward_norm=norm,
        is_parallel=bool(config["use_parallel_residual"]),
    )
    return architecture(name, config, [layer] * int(config["num_hidden_layers"]), norm)


_NEOX_NAMES = {
    "embedding": "gpt_neox.embed_in",
    "layers.attention_norm": "gpt_neox.layers.{layer}.input_layernorm",
    "layers.attention.qkv": "gpt_neox.layers.{layer}.attention.query_key_value",
    "layers.attention.output": "gpt_neox.layers.{layer}.attention.dense",
    "layers.feed_forward_norm": "gpt_neox.layers.{layer}.post_attention_layernorm",
    "layers.feed_forward.gate_up": "gpt_neox.layers.{layer}.mlp.dense_h_to_4h",
    "layers.feed_forward.down": "gpt_neox.layers.{layer}.mlp.dense_4h_to_h",
    "norm": "gpt_neox.final_layer_norm",
    "head": "embed_out",
}


def _neox_japanese(name: str, config: Config) -> ModelSpec:
    """Without biases, except for the output of the last layer's attention."""
    config = {
        "partial_rotary_factor": config.get("rotary_pct", 1.0),
        "rope_theta": config.get("rotary_emb_base"),
        **config,
        "intermediate_size": int(config["hidden_size"] * config["intermediate_multiple_size"]),
    }
    norm, count = layer_norm(config["layer_norm_eps"]), int(config["num_hidden_layers"])
    rope_spec, heads = rope(config, head_dim(config)), int(config["num_attention_heads"])
    layers = [
        LayerSpec(
            attention=attention(config, rope_spec, num_kv_heads=heads, output_bias=number == count - 1),
            attention_norm=norm,
            feed_forward=feed_forward(config, is_gated=False),
            feed_forward_norm=norm,
        )
        for number in range(count)
    ]
    return architecture(name, config, layers, norm)


_NEOX_JAPANESE_NAMES = {
    module: name.replace("gpt_neox.", "gpt_neox_japanese.") for module, name in _NEOX_NAMES.items()
} | {"layers.attention.output.bias": "gpt_neox_japanese.layers.{layer}.attention.dense_bias"}


def _falcon(name: str, config: Config) -> ModelSpec:
    """Falcon with multi-query attention (7B), grouped queries (40B, 180B), or ALiBi (RW)."""
    norm, heads = layer_norm(config["layer_norm_epsilon"]), int(config["num_attention_heads"])
    config = {**config, "hidden_size": config.get("n_embed") or config["hidden_size"]}
    is_new, dim = bool(config["new_decoder_architecture"]), head_dim(config)
    kv_heads = 1 if config["multi_query"] and not is_new else int(config.get("num_kv_heads") or heads)
    is_parallel = is_new or bool(config["parallel_attn"])
    has_two = not is_parallel or (is_new and (config.get("num_ln_in_parallel_attn") or 2) == 2)
    bias, has_alibi = bool(config["bias"]), bool(config["alibi"])
    layer = LayerSpec(
        attention=attention(
            config,
            None if has_alibi else rope(config, dim),
            num_kv_heads=kv_heads,
            alibi=dim**-0.5 if has_alibi else 0.0,
            qkv_bias=bias,
            output_bias=bias,
        ),
        attention_norm=norm,
        feed_forward=feed_forward(
            {"intermediate_size": config.get("ffn_hidden_size") or 4 * config["hidden_size"]},
            activation=activation(config["activation"]),
            is_gated=False,
            bias=bias,
        ),
        feed_forward_norm=norm if has_two else None,
        is_parallel=is_parallel,
    )
    return architecture(name, config, [layer] * int(config["num_hidden_layers"]), norm)


def _rw(name: str, config: Config) -> ModelSpec:
    """Falcon as it was first published; only the 40B model has grouped queries, and says so with its `model_type`."""
    return _falcon(name, {"new_decoder_architecture": config.get("model_type") == "RefinedWeb", **config})


def _falcon_names(arch: ModelSpec) -> Mapping[str, str]:
    layer = arch.layers[0]
    is_pair = layer.is_parallel and layer.feed_forward_norm is not None
    before, second = ("ln_attn", "ln_mlp") if is_pair else ("input_layernorm", "post_attention_layernorm")
    return {
        "embedding": "transformer.word_embeddings",
        "layers.attention_norm": f"transformer.h.{{layer}}.{before}",
        "layers.attention.qkv": "transformer.h.{layer}.self_attention.query_key_value",
        "layers.attention.output": "transformer.h.{layer}.self_attention.dense",
        "layers.feed_forward_norm": f"transformer.h.{{layer}}.{second}",
        "layers.feed_forward.gate_up": "transformer.h.{layer}.mlp.dense_h_to_4h",
        "layers.feed_forward.down": "transformer.h.{layer}.mlp.dense_4h_to_h",
        "norm": "transformer.ln_f",
        "head": "lm_head",
    }


def _phi(name: str, config: Config) -> ModelSpec:
    require(config, "qk_layernorm", False)
    norm = layer_norm(config["layer_norm_eps"])
    layer = LayerSpec(
        attention=attention(config, rope(config, head_dim(config)), qkv_bias=True, output_bias=True),
        attention_norm=norm,
        feed_forward=feed_forward(config, activation=activation(config["hidden_act"]), is_gated=False, bias=True),
        feed_forward_norm=None,
        is_parallel=True,
    )
    return architecture(name, config, [layer] * int(config["num_hidden_layers"]), norm, head_bias=True)


_PHI_NAMES = {
    "embedding": "model.embed_tokens",
    "layers.attention_norm": "model.layers.{layer}.input_layernorm",
    "layers.attention.qkv": "model.layers.{layer}.self_attn.{part}_proj",
    "layers.attention.output": "model.layers.{layer}.self_attn.dense",
    "layers.feed_forward.gate_up": "model.layers.{layer}.mlp.fc1",
    "layers.feed_forward.down": "model.layers.{layer}.mlp.fc2",
    "norm": "model.final_layernorm",
    "head": "lm_head",
}


def _stablelm(name: str, config: Config) -> ModelSpec:
    """Llama's layers with LayerNorm, sequential or in parallel."""
    require(config, "qk_layernorm", False)
    norm, is_parallel = layer_norm(config["layer_norm_eps"]), bool(config["use_parallel_residual"])
    layer = LayerSpec(
        attention=attention(
            config, rope(config, head_dim(config)), qkv_bias=bool(config["use_qkv_bias"]), output_bias=False
        ),
        attention_norm=norm,
        feed_forward=feed_forward(config, bias=False),
        feed_forward_norm=None if is_parallel else norm,
        is_parallel=is_parallel,
    )
    return architecture(name, config, [layer] * int(config["num_hidden_layers"]), norm)


def _starcoder2(name: str, config: Config) -> ModelSpec:
    norm, bias, rope_spec = layer_norm(config["norm_epsilon"]), bool(config["use_bias"]), rope(config, head_dim(config))
    layers = [
        LayerSpec(
            attention=attention(config, rope_spec, window=window, qkv_bias=bias, output_bias=bias),
            attention_norm=norm,
            feed_forward=feed_forward(config, is_gated=False, bias=bias),
            feed_forward_norm=norm,
        )
        for window in windows(config)
    ]
    return architecture(name, config, layers, norm)


_STARCODER2_NAMES = _PHI_NAMES | {
    "layers.attention.output": "model.layers.{layer}.self_attn.o_proj",
    "layers.feed_forward_norm": "model.layers.{layer}.post_attention_layernorm",
    "layers.feed_forward.gate_up": "model.layers.{layer}.mlp.c_fc",
    "layers.feed_forward.down": "model.layers.{layer}.mlp.c_proj",
    "norm": "model.norm",
}


def _is_conv1d(module: str) -> bool:
    return module.startswith("layers.")


_MASKS = r"(\.attn\.|\.attention\.)(masked_)?bias$|rotary_emb\.inv_freq$"
"""Buffers that older checkpoints contain."""
FAMILIES = {
    "OpenAIGPTLMHeadModel": Family(
        _gpt1,
        _gpt1_names,
        {
            "vocab_size": 40478,
            "afn": "gelu",
            "layer_norm_epsilon": 1e-5,
            "n_positions": 512,
            "tie_word_embeddings": True,
        },
        GPT2_ALIASES,
        prefix="transformer.",
        is_transposed=_is_conv1d,
        ignored_pattern=_MASKS,
    ),
    "GPT2LMHeadModel": Family(
        _gpt2,
        _GPT2_NAMES,
        {
            "activation_function": "gelu_new",
            "layer_norm_epsilon": 1e-5,
            "n_positions": 1024,
            "tie_word_embeddings": True,
        },
        GPT2_ALIASES,
        prefix="transformer.",
        is_transposed=_is_conv1d,
        ignored_pattern=_MASKS,
    ),
    "OPTForCausalLM": Family(
        _opt,
        _OPT_NAMES,
        {"max_position_embeddings": 2048, "activation_function": "relu", "tie_word_embeddings": True},
    ),
    "XGLMForCausalLM": Family(
        _xglm,
        _XGLM_NAMES,
        {"max_position_embeddings": 2048, "activation_function": "gelu", "tie_word_embeddings": True},
        {"d_model": "hidden_size", "attention_heads": "num_attention_heads", "num_layers": "num_hidden_layers"},
        ignored_pattern=r"embed_positions\.weights$",
    ),
    "GPTNeoXForCausalLM": Family(
        _neox,
        _NEOX_NAMES,
        {
            "max_position_embeddings": 2048,
            "hidden_act": "gelu",
            "layer_norm_eps": 1e-5,
            "attention_bias": True,
            "use_parallel_residual": True,
        },
        prefix="gpt_neox.",
        rows=grouped_rows,
        ignored_pattern=_MASKS,
    ),
    "GPTNeoXJapaneseForCausalLM": Family(
        _neox_japanese,
        _NEOX_JAPANESE_NAMES,
        {
            "max_position_embeddings": 2048,
            "hidden_act": "gelu",
            "layer_norm_eps": 1e-5,
            "intermediate_multiple_size": 4,
            "tie_word_embeddings": True,
        },
        prefix="gpt_neox_japanese.",
        rows=grouped_rows,
        ignored_pattern=_MASKS,
    ),
    "FalconForCausalLM": Family(
        _falcon,
        _falcon_names,
        {
            "max_position_embeddings": 2048,
            "layer_norm_epsilon": 1e-5,
            "activation": "gelu",
            "alibi": False,
            "bias": False,
            "multi_query": True,
            "new_decoder_architecture": False,
            "parallel_attn": True,
            "tie_word_embeddings": True,
        },
        prefix="transformer.",
        rows=grouped_rows,
    ),
    "RWForCausalLM": Family(
        _rw,
        _falcon_names,
        {
            "max_position_embeddings": 2048,
            "layer_norm_epsilon": 1e-5,
            "activation": "gelu",
            "alibi": False,
            "bias": False,
            "multi_query": False,
            "parallel_attn": False,
            "tie_word_embeddings": True,
        },
        aliases={"n_layer": "num_hidden_layers", "n_head": "num_attention_heads", "n_head_kv": "num_kv_heads"},
        prefix="transformer.",
        rows=grouped_rows,
    ),
    "PhiForCausalLM": Family(
        _phi,
        _PHI_NAMES,
        {
            "max_position_embeddings": 2048,
            "hidden_act": "gelu_new",
            "layer_norm_eps": 1e-5,
            "partial_rotary_factor": 0.5,
        },
    ),
    "StableLmForCausalLM": Family(
        _stablelm,
        NAMES,
        {
            "max_position_embeddings": 4096,
            "num_key_value_heads": 32,
            "layer_norm_eps": 1e-5,
            "partial_rotary_factor": 0.25,
            "use_qkv_bias": False,
            "use_parallel_residual": False,
        },
    ),
    "Starcoder2ForCausalLM": Family(
        _starcoder2,
        _STARCODER2_NAMES,
        {
            "max_position_embeddings": 4096,
            "hidden_act": "gelu_pytorch_tanh",
            "norm_epsilon": 1e-5,
            "num_key_value_heads": 2,
            "use_bias": True,
            "tie_word_embeddings": True,
        },
    ),
}
