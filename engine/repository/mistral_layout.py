"""Mistral's own layout of a model: params.json → config.json, and the names of tensors. No torch.

Sources: src/mistral_inference/args.py and transformer_layers.py of github.com/mistralai/mistral-inference, and
vllm/transformers_utils/configs/mistral.py of github.com/vllm-project/vllm for what newer params.json mean;
src/transformers/models/mistral4/convert_mistral4_weight_to_hf.py of github.com/huggingface/transformers for latent
attention.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from quire.engine.protocol.errors import ConfigError

Config = dict[str, Any]

_DEFAULT_LENGTH = 128_000
"""The positions of a model whose params.json does not state them, as in vLLM."""
_REQUIRED = {
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "hidden_dim": "intermediate_size",
    "vocab_size": "vocab_size",
    "norm_eps": "rms_norm_eps",
    "rope_theta": "rope_theta",
}
_OPTIONAL = {
    "n_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "tied_embeddings": "tie_word_embeddings",
    "activation": "hidden_act",
    "dtype": "dtype",
}
_OTHERS = (
    "max_batch_size model_parallel ragged_attention vision_encoder multimodal use_cache "
    "max_seq_len max_position_embeddings sliding_window moe yarn llama_4_scaling quantization"
)
"""Settings that text does not depend on, and settings that are not only renamed."""
_LATENT = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
"""Settings of latent attention, which have the same names in transformers."""
_LATENT_MOE = {
    "num_shared_experts": ("n_shared_experts", 0),
    "first_k_dense_replace": ("first_k_dense_replace", 0),
    "routed_scale": ("routed_scaling_factor", 1.0),
}
"""Settings of experts beside latent attention, and their defaults."""
_NEUTRAL: dict[str, tuple[Any, ...]] = {"model_type": ("transformer",), "causal": (True,)}
"""Values that change nothing, besides null and false."""

_MODULES = {
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "attention": "self_attn",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
    "feed_forward.gate": "block_sparse_moe.gate",
    "attention.wq_a": "self_attn.q_a_proj",
    "attention.q_a_norm": "self_attn.q_a_layernorm",
    "attention.wq_b": "self_attn.q_b_proj",
    "attention.wkv_a_with_mqa": "self_attn.kv_a_proj_with_mqa",
    "attention.kv_a_norm": "self_attn.kv_a_layernorm",
    "attention.wkv_b": "self_attn.kv_b_proj",
    "gate": "mlp.gate",
    "shared_experts.w1": "mlp.shared_experts.gate_proj",
    "shared_experts.w2": "mlp.shared_experts.down_proj",
    "shared_experts.w3": "mlp.shared_experts.up_proj",
}
_OUTER = {"tok_embeddings": "model.embed_tokens", "norm": "model.norm", "output": "lm_head"}
_FACTORS = {"qscale_weight": "weight_scale", "qscale_act": "input_scale"}
_LAYER = re.compile(r"layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"feed_forward\.experts\.(\d+)\.(w[123])")
_LATENT_EXPERT = re.compile(r"experts\.(\d+)\.w([123])")
_PARTS = {"1": "gate", "2": "down", "3": "up"}
_CACHE_FACTOR = re.compile(r"(.+)\.(kv|[qkv])_fake_quantizer\.qscale_act")
_NOT_TEXT = ("vision_encoder.", "vision_language_adapter.", "patch_merger.", "pre_mm_projector_norm.", "mm_")
"""Prefixes of the tensors that images go through."""


def hf_name(name: str) -> str | None:
    """The name of a tensor in the layout of transformers; None: it is not part of the model of text."""
    if name.startswith(_NOT_TEXT):
        return None
    if match := _CACHE_FACTOR.fullmatch(name):
        return f"{hf_name(f'{match[1]}.{match[2]}_scale')}"
    module, _, kind = name.rpartition(".")
    kind = _FACTORS.get(kind, kind)
    if module in _OUTER:
        return f"{_OUTER[module]}.{kind}"
    if not (match := _LAYER.fullmatch(module)):
        return name
    inner = match[2]
    if expert := _EXPERT.fullmatch(inner):
        found = f"block_sparse_moe.experts.{expert[1]}.{expert[2]}"
    elif expert := _LATENT_EXPERT.fullmatch(inner):
        found = f"mlp.experts.{expert[1]}.{_PARTS[expert[2]]}_proj"
    else:
        found = _MODULES.get(inner, inner)
    return f"model.layers.{match[1]}.{found}.{kind}"


def hf_config(params: Mapping[str, Any]) -> Config:
    """The config.json of the model of text. Raises `ConfigError` for unsupported settings."""
    is_latent = params.get("kv_lora_rank") is not None
    known = {*_REQUIRED, *_OPTIONAL, *_OTHERS.split(), *(_LATENT if is_latent else ())}
    for name, value in params.items():
        if name not in known and value not in (None, False, *_NEUTRAL.get(name, ())):
            raise ConfigError(f"{name} {value!r} is not supported in Mistral's own layout; use the model's config.json")
    if missing := [name for name in _REQUIRED if params.get(name) is None]:
        raise ConfigError(f"no {missing[0]}")
    config = {found: params[name] for name, found in _REQUIRED.items()}
    config |= {found: params[name] for name, found in _OPTIONAL.items() if params.get(name) is not None}
    config.setdefault("num_key_value_heads", config["num_attention_heads"])
    length = params.get("max_position_embeddings") or params.get("max_seq_len") or _DEFAULT_LENGTH
    config |= {"model_type": "mistral", "max_position_embeddings": length, "rope_interleave": True}
    config |= {"bos_token_id": 1, "eos_token_id": 2, "architectures": ["MistralForCausalLM"]}
    config |= _windows(params.get("sliding_window"), config["num_hidden_layers"])
    config |= _latent(params, config) if is_latent else {}
    parts: dict[str, Callable[[Config, Config], Config]] = {
        "yarn": _yarn,
        "llama_4_scaling": _query_scaling,
        "moe": _experts,
        "quantization": _quantization,
    }
    for name, read in parts.items():
        if (part := params.get(name)) is None:
            continue
        if not isinstance(part, dict):
            raise ConfigError(f"{name} must be an object or null, got {part!r}")
        config |= read(dict(part), config)
    return config


def _check_all_read(name: str, rest: Config) -> None:
    """`rest` are the settings that nothing has read."""
    if unknown := [key for key, value in rest.items() if value is not None]:
        raise ConfigError(f"{name}.{unknown[0]} {rest[unknown[0]]!r} is not supported in Mistral's own layout")


def _take(part: Config, name: str, key: str) -> Any:
    try:
        return part.pop(key)
    except KeyError:
        raise ConfigError(f"{name} lacks {key}") from None


def _windows(window: Any, layers: int) -> Config:
    """The window may be one for all layers, or a list that is repeated over them."""
    if not isinstance(window, list):
        return {"sliding_window": window}
    sizes = {size for size in window if size is not None}
    if len(sizes) > 1 or not window or layers % len(window):
        raise ConfigError(f"sliding_window {window!r} is not supported; supported: one size, repeated over all layers")
    kinds = ["full_attention" if size is None else "sliding_attention" for size in window]
    return {"sliding_window": next(iter(sizes), None), "layer_types": kinds * (layers // len(kinds))}


def _latent(params: Mapping[str, Any], config: Config) -> Config:
    """Latent attention, with experts as in Mistral Large 3 and Mistral Small 4, which have transformers' Mistral 4."""
    for name in ("moe", *_LATENT):
        if params.get(name) is None:
            raise ConfigError(f"kv_lora_rank is not supported without {name} in Mistral's own layout")
    if config["sliding_window"] is not None:
        raise ConfigError("sliding_window is not supported beside kv_lora_rank")
    return {
        "architectures": ["Mistral4ForCausalLM"],
        "model_type": "mistral4",
        "head_dim": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": config["rope_theta"]},
        **{name: params[name] for name in _LATENT},
    }


def _yarn(yarn: Config, config: Config) -> Config:
    names = {
        "factor": "factor",
        "original_max_position_embeddings": "original_max_position_embeddings",
        "beta": "beta_fast",
        "alpha": "beta_slow",
    }
    rope = {"rope_type": "yarn", "rope_theta": config["rope_theta"]}
    rope |= {found: yarn.pop(name) for name, found in names.items() if name in yarn}
    if not yarn.pop("apply_scale", True):
        rope["attention_factor"] = 1.0
    elif config["model_type"] == "mistral4":  # as in DeepSeek: scores have yarn's temperature, rotations do not
        rope |= {"mscale": 1.0, "mscale_all_dim": 1.0}
    _check_all_read("yarn", yarn)
    return {"rope_parameters": rope}


def _query_scaling(scaling: Config, config: Config) -> Config:
    """Queries that grow with their position: in Ministral 3, and in latent attention."""
    original = _take(scaling, "llama_4_scaling", "original_max_position_embeddings")
    rope = dict(config.get("rope_parameters") or {"rope_type": "default", "rope_theta": config["rope_theta"]})
    if rope.setdefault("original_max_position_embeddings", original) != original:
        raise ConfigError(
            f"llama_4_scaling.original_max_position_embeddings {original} is not supported beside yarn's "
            f"{rope['original_max_position_embeddings']}"
        )
    rope["llama_4_scaling_beta"] = _take(scaling, "llama_4_scaling", "beta")
    _check_all_read("llama_4_scaling", scaling)
    third = {"architectures": ["Ministral3ForCausalLM"], "model_type": "ministral3"}
    return {"rope_parameters": rope, **({} if config["model_type"] == "mistral4" else third)}


def _experts(moe: Config, config: Config) -> Config:
    if config["model_type"] == "mistral4":
        return _latent_experts(moe)
    if config["architectures"] != ["MistralForCausalLM"]:
        raise ConfigError("moe is not supported beside llama_4_scaling")
    found = {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "num_local_experts": _take(moe, "moe", "num_experts"),
        "num_experts_per_tok": moe.pop("num_experts_per_tok", 2),
    }
    _check_all_read("moe", moe)
    return found


def _latent_experts(moe: Config) -> Config:
    """Softmax scores, normalized over the chosen experts, and experts that every token uses."""
    found = {
        "n_routed_experts": _take(moe, "moe", "num_experts"),
        "num_experts_per_tok": _take(moe, "moe", "num_experts_per_tok"),
        "moe_intermediate_size": _take(moe, "moe", "expert_hidden_dim"),
        "norm_topk_prob": True,
    }
    found |= {theirs: moe.pop(name, default) for name, (theirs, default) in _LATENT_MOE.items()}
    for name in ("num_expert_groups", "route_every_n"):  # how groups would be chosen is not established
        if (value := moe.pop(name, 1)) != 1:
            raise ConfigError(f"moe.{name} {value!r} is not supported; supported: 1")
    for name in ("num_expert_groups_per_tok", "expert_parallel", "expert_model_parallel"):  # of one group; in training
        moe.pop(name, None)
    _check_all_read("moe", moe)
    return found


def _quantization(settings: Config, config: Config) -> Config:
    """FP8 with a scale for each weight, and perhaps one for its inputs."""
    if (found := settings.pop("qformat_weight", None)) != "fp8_e4m3":
        given = settings.get("quant_method", found)
        raise ConfigError(f"quantization {given!r} is not supported in Mistral's own layout; supported: fp8_e4m3")
    if (scheme := settings.pop("qscheme_act", None)) not in (None, "TENSOR", "NO_SCALES"):
        raise ConfigError(f"quantization.qscheme_act {scheme!r} is not supported; supported: TENSOR, NO_SCALES")
    _check_all_read("quantization", settings)
    activations = "dynamic" if scheme == "NO_SCALES" else "static"
    return {"quantization_config": {"quant_method": "fp8", "activation_scheme": activations}}
