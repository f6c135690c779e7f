"""llama.cpp's architectures: metadata → config.json, tensors → the published model's. No torch.

Source: convert_hf_to_gguf.py and gguf-py/gguf/tensor_mapping.py of github.com/ggml-org/llama.cpp.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from quire.engine.architecture.quantization.gguf import SCHEMES, without_expert
from quire.engine.protocol.errors import ConfigError
from quire.engine.repository.gguf import GgufFile, GgufTensor

Config = dict[str, Any]

_LLAMA = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "blk.attn_norm": "model.layers.{layer}.input_layernorm",
    "blk.attn_q": "model.layers.{layer}.self_attn.q_proj",
    "blk.attn_k": "model.layers.{layer}.self_attn.k_proj",
    "blk.attn_v": "model.layers.{layer}.self_attn.v_proj",
    "blk.attn_q_norm": "model.layers.{layer}.self_attn.q_norm",
    "blk.attn_k_norm": "model.layers.{layer}.self_attn.k_norm",
    "blk.attn_output": "model.layers.{layer}.self_attn.o_proj",
    "blk.ffn_norm": "model.layers.{layer}.post_attention_layernorm",
    "blk.ffn_gate": "model.layers.{layer}.mlp.gate_proj",
    "blk.ffn_up": "model.layers.{layer}.mlp.up_proj",
    "blk.ffn_down": "model.layers.{layer}.mlp.down_proj",
}
_QWEN_MOE = _LLAMA | {
    "blk.ffn_gate_inp": "model.layers.{layer}.mlp.gate",
    "blk.ffn_gate_exps": "model.layers.{layer}.mlp.experts.{expert}.gate_proj",
    "blk.ffn_up_exps": "model.layers.{layer}.mlp.experts.{expert}.up_proj",
    "blk.ffn_down_exps": "model.layers.{layer}.mlp.experts.{expert}.down_proj",
    "blk.ffn_gate_inp_shexp": "model.layers.{layer}.mlp.shared_expert_gate",
    "blk.ffn_gate_shexp": "model.layers.{layer}.mlp.shared_expert.gate_proj",
    "blk.ffn_up_shexp": "model.layers.{layer}.mlp.shared_expert.up_proj",
    "blk.ffn_down_shexp": "model.layers.{layer}.mlp.shared_expert.down_proj",
}
_MIXTRAL = _LLAMA | {
    "blk.ffn_gate_inp": "model.layers.{layer}.block_sparse_moe.gate",
    "blk.ffn_gate_exps": "model.layers.{layer}.block_sparse_moe.experts.{expert}.w1",
    "blk.ffn_up_exps": "model.layers.{layer}.block_sparse_moe.experts.{expert}.w3",
    "blk.ffn_down_exps": "model.layers.{layer}.block_sparse_moe.experts.{expert}.w2",
}
_GEMMA2 = _LLAMA | {
    "blk.post_attention_norm": "model.layers.{layer}.post_attention_layernorm",
    "blk.ffn_norm": "model.layers.{layer}.pre_feedforward_layernorm",
    "blk.post_ffw_norm": "model.layers.{layer}.post_feedforward_layernorm",
}
_PHI3 = _LLAMA | {
    "blk.attn_qkv": "model.layers.{layer}.self_attn.qkv_proj",
    "blk.ffn_up": "model.layers.{layer}.mlp.gate_up_proj",
}
_NAMES = {
    **dict.fromkeys(("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM"), _LLAMA),
    **dict.fromkeys(("Qwen3ForCausalLM", "GemmaForCausalLM"), _LLAMA),
    **dict.fromkeys(("Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM"), _QWEN_MOE),
    **dict.fromkeys(("Gemma2ForCausalLM", "Gemma3ForCausalLM"), _GEMMA2),
    "MixtralForCausalLM": _MIXTRAL,
    "Phi3ForCausalLM": _PHI3,
}
"""Modules by llama.cpp's names without the layer's number, for each architecture of config.json."""
_ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors that become settings of config.json."""


class _Metadata:
    """The metadata of an architecture; notes the settings that are read, because the rest is refused."""

    def __init__(self, gguf: GgufFile, architecture: str) -> None:
        self.tensors = gguf.tensors
        self._prefix = f"{architecture}."
        self._values = {name.removeprefix(self._prefix): value for name, value in gguf.metadata.items()}
        self._unread = {name.removeprefix(self._prefix) for name in gguf.metadata if name.startswith(self._prefix)}
        for name in ("vocab_size", "rope.scaling.finetuned", "tensor_data_layout"):  # nothing depends on them
            self._unread.discard(name)

    def __call__(self, name: str, *default: Any) -> Any:
        """A setting. A list with the same value for each layer is one setting."""
        self._unread.discard(name)
        if name not in self._values and not default:
            raise ConfigError(f"the metadata lack {self._prefix}{name}")
        value = self._values.get(name, *default)
        if isinstance(value, list):
            if len(set(value)) != 1:
                raise ConfigError(f"layers with different {self._prefix}{name} are not supported")
            value = value[0]
        return value

    def require(self, name: str, *supported: Any) -> None:
        if (value := self(name, supported[0])) not in supported:
            raise ConfigError(
                f"{self._prefix}{name} {value!r} is not supported; supported: {', '.join(map(repr, supported))}"
            )

    def check_all_read(self) -> None:
        if self._unread:
            raise ConfigError(f"{self._prefix}{min(self._unread)} is not supported for this architecture")


def hf_config(gguf: GgufFile) -> Config:
    """The model's config.json. Raises `ConfigError` for unsupported settings."""
    name = gguf.metadata.get("general.architecture")
    try:
        if name not in _CONFIGS:
            raise ConfigError(f"the architecture {name} is not supported; supported: {', '.join(_CONFIGS)}")
        metadata = _Metadata(gguf, str(name))
        config = _CONFIGS[name](metadata)
        metadata.check_all_read()
    except ConfigError as error:
        raise ConfigError(f"{gguf.path}: {error}") from None
    except (TypeError, ValueError, ArithmeticError) as error:
        raise ConfigError(f"{gguf.path}: the metadata have a value that {name} cannot use: {error}") from None
    ids = {f"{each}_token_id": gguf.metadata.get(f"tokenizer.ggml.{each}_token_id") for each in ("bos", "eos")}
    config |= {each: value for each, value in ids.items() if value is not None}
    modules = {each.removesuffix(".weight"): tensor for each, tensor in hf_tensors(gguf, config).items()}
    types = {without_expert(each): tensor.dtype for each, tensor in modules.items() if tensor.dtype in SCHEMES}
    return config | {"quantization_config": {"quant_method": "gguf", "types": types}}


def hf_tensors(gguf: GgufFile, config: Config) -> dict[str, GgufTensor]:
    """The tensors by the names that the model of this config.json has in its published form, experts one by one.

    Raises `ConfigError` for tensors that do not belong to the model.
    """
    (architecture,) = config["architectures"]
    found = {}
    for name, tensor in gguf.tensors.items():
        match = re.fullmatch(r"(blk\.)?(?:(\d+)\.)?(\w+)\.(weight|bias)", name)
        module = match and _NAMES[architecture].get(f"{match[1] or ''}{match[3]}")
        if name in _ROPE_TENSORS:
            continue
        is_stack = module is not None and "{expert}" in module
        if not match or not module or is_stack != (len(tensor.shape) == 3):
            raise ConfigError(f"{gguf.path}: {name} is not a tensor of {architecture}; the model is not supported")
        if architecture.startswith("Gemma") and match[3].endswith("norm"):
            tensor = replace(tensor, added=1.0)
        if match[3] == "ffn_gate_inp_shexp":  # llama.cpp drops the dimension of 1
            tensor = replace(tensor, shape=(1, tensor.shape[-1]))
        for expert in range(tensor.shape[0] if is_stack else 1):
            full_name = f"{module.format(layer=match[2], expert=expert)}.{match[4]}"
            found[full_name] = tensor.at(expert) if is_stack else tensor
    return found


def adapter_modules(metadata: Mapping[str, Any], tensors: Iterable[str], architecture: str) -> dict[str, str]:
    """The modules in its published form of the model `architecture` that an adapter's tensors are for, by the tensors'
    names without `.lora_a` and `.lora_b`; experts are named `{expert}`.

    Raises `ConfigError` if the adapter is for another architecture, or for tensors that do not belong to it.
    """
    own = metadata.get("general.architecture")
    if not isinstance(own, str) or architecture not in _ADAPTED.get(own, ()):
        supported = ", ".join(name for name, each in _ADAPTED.items() if architecture in each) or "none"
        raise ConfigError(f"general.architecture {own!r} is not that of {architecture}; supported for it: {supported}")
    found = {}
    for tensor in tensors:
        name = re.sub(r"\.lora_[ab]$", "", tensor)
        match = re.fullmatch(r"(blk\.)?(?:(\d+)\.)?(\w+)\.weight", name)
        module = match and _NAMES[architecture].get(f"{match[1] or ''}{match[3]}")
        if not match or not module:
            raise ConfigError(f"{tensor} is not a tensor of an adapter of {architecture}")
        found[name] = module.replace("{layer}", match[2] or "")
    return found


_ADAPTED: dict[str, tuple[str, ...]] = {
    "llama": ("LlamaForCausalLM", "MistralForCausalLM", "MixtralForCausalLM"),
    "qwen2": ("Qwen2ForCausalLM",),
    "qwen3": ("Qwen3ForCausalLM",),
    "qwen2moe": ("Qwen2MoeForCausalLM",),
    "qwen3moe": ("Qwen3MoeForCausalLM",),
    "gemma": ("GemmaForCausalLM",),
    "gemma2": ("Gemma2ForCausalLM",),
    "gemma3": ("Gemma3ForCausalLM",),
    "phi3": ("Phi3ForCausalLM",),
}
"""The architectures of bases by llama.cpp's name of an adapter's architecture."""


def _decoder(name: str, metadata: _Metadata) -> Config:
    """The settings that all architectures have."""
    heads, hidden = int(metadata("attention.head_count")), int(metadata("embedding_length"))
    head_dim = int(metadata("attention.key_length", hidden // heads))
    metadata.require("attention.value_length", head_dim)
    metadata.require("attention.causal", True)
    if "token_embd.weight" not in metadata.tensors:
        raise ConfigError("token_embd.weight is missing: the file is not a complete language model")
    config = {
        "architectures": [name],
        "hidden_size": hidden,
        "intermediate_size": metadata("feed_forward_length", metadata("expert_feed_forward_length", None)),
        "num_hidden_layers": metadata("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": metadata("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": metadata("context_length"),
        "rms_norm_eps": metadata("attention.layer_norm_rms_epsilon"),
        "vocab_size": metadata.tensors["token_embd.weight"].shape[0],
        "tie_word_embeddings": "output.weight" not in metadata.tensors,
        "rope_theta": metadata("rope.freq_base", 10000.0),
    }
    rotary = metadata("rope.dimension_count", head_dim)
    if rotary != head_dim:
        config["partial_rotary_factor"] = rotary / head_dim
    if scaling := _rope_scaling(metadata, config):
        config["rope_scaling"] = scaling
    return config


def _rope_scaling(metadata: _Metadata, config: Config) -> Config | None:
    """Llama 3's factors of frequencies are a tensor, which is LongRoPE with the same factors at all lengths."""
    kind = metadata("rope.scaling.type", "linear")
    factor = metadata("rope.scaling.factor", metadata("rope.scale_linear", 1.0))
    original = metadata("rope.scaling.original_context_length", config["max_position_embeddings"])
    amplitude = metadata("rope.scaling.attn_factor", None)
    same, long, short = (metadata.tensors.get(name) for name in _ROPE_TENSORS)
    if same:
        amplitude, long, short = 1.0, same, same
    if long and short:
        if kind != "longrope" and factor != 1.0:
            raise ConfigError(f"rope.scaling.type {kind} is not supported together with factors of frequencies")
        longrope = {
            "rope_type": "longrope",
            "long_factor": long.numbers(),
            "short_factor": short.numbers(),
            "original_max_position_embeddings": original,
        }
        return longrope if amplitude is None else {**longrope, "attention_factor": amplitude}
    if amplitude not in (None, 1.0):
        raise ConfigError(f"rope.scaling.attn_factor {amplitude} is not supported without factors of frequencies")
    match kind:
        case "none":
            return None
        case "linear":
            return None if factor in (0.0, 1.0) else {"rope_type": "linear", "factor": factor}
        case "yarn":
            return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    raise ConfigError(f"rope.scaling.type {kind} is not supported; supported: none, linear, yarn")


def _llama(metadata: _Metadata) -> Config:
    """Llama, Mistral and Mixtral. The rows of queries and keys are permuted, so that rotary pairs are neighbours."""
    experts = metadata("expert_count", 0)
    config = _decoder("MixtralForCausalLM" if experts else "LlamaForCausalLM", metadata)
    if "partial_rotary_factor" in config:
        raise ConfigError("a rope.dimension_count other than the size of a head is not supported for llama")
    config |= {"rope_interleave": True, "attention_bias": "blk.0.attn_q.bias" in metadata.tensors}
    config["mlp_bias"] = "blk.0.ffn_gate.bias" in metadata.tensors
    used = metadata("expert_used_count", 0)
    return config | {"num_local_experts": experts, "num_experts_per_tok": used} if experts else config


def _qwen_moe(name: str, metadata: _Metadata, *, renormalize: bool) -> Config:
    metadata.require("expert_gating_func", 1)  # softmax
    metadata.require("expert_weights_scale", 1.0, 0.0)
    config = _decoder(name, metadata)
    if not (stack := metadata.tensors.get("blk.0.ffn_gate_exps.weight")) or len(stack.shape) != 3:
        raise ConfigError("blk.0.ffn_gate_exps.weight, a stack of experts, is missing; convert the model again")
    experts, size, _ = stack.shape
    metadata.require("expert_count", experts)
    metadata.require("expert_feed_forward_length", size)
    config |= {
        "num_experts": experts,
        "num_experts_per_tok": metadata("expert_used_count"),
        "moe_intermediate_size": size,
        "norm_topk_prob": metadata("expert_weights_norm", renormalize),
    }
    if shared := metadata.tensors.get("blk.0.ffn_gate_shexp.weight"):
        metadata.require("expert_shared_feed_forward_length", shared.shape[0])
        config["shared_expert_intermediate_size"] = shared.shape[0]
    return config


def _gemma2(metadata: _Metadata) -> Config:
    config = _decoder("Gemma2ForCausalLM", metadata)
    return config | {
        "query_pre_attn_scalar": _query_scale(config, layers_of_27b=46),
        "sliding_window": metadata("attention.sliding_window", 4096),
        "attn_logit_softcapping": metadata("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": metadata("final_logit_softcapping", 30.0),
    }


def _gemma3(metadata: _Metadata) -> Config:
    config = _decoder("Gemma3ForCausalLM", metadata)
    metadata.require("attention.sliding_window_pattern", 6)
    return config | {
        "query_pre_attn_scalar": _query_scale(config, layers_of_27b=62),
        "sliding_window": metadata("attention.sliding_window"),
        "rope_theta": metadata("rope.freq_base", 1000000.0),
        "rope_local_base_freq": metadata("rope.freq_base_swa", 10000.0),
        "final_logit_softcapping": metadata("final_logit_softcapping", None),
    }


def _query_scale(config: Config, layers_of_27b: int) -> int:
    """The metadata lack this number: 27B's is not the size of a head."""
    is_27b = config["num_hidden_layers"] == layers_of_27b
    return int(config["hidden_size"] // config["num_attention_heads"] if is_27b else config["head_dim"])


def _phi3(metadata: _Metadata) -> Config:
    config = _decoder("Phi3ForCausalLM", metadata)
    original = metadata("rope.scaling.original_context_length", config["max_position_embeddings"])
    window = metadata("attention.sliding_window", 0) or None
    return config | {"original_max_position_embeddings": original, "sliding_window": window}


_CONFIGS: dict[Any, Callable[[_Metadata], Config]] = {
    "llama": _llama,
    "qwen2": lambda metadata: _decoder("Qwen2ForCausalLM", metadata),
    "qwen3": lambda metadata: _decoder("Qwen3ForCausalLM", metadata),
    "qwen2moe": lambda metadata: _qwen_moe("Qwen2MoeForCausalLM", metadata, renormalize=False),
    "qwen3moe": lambda metadata: _qwen_moe("Qwen3MoeForCausalLM", metadata, renormalize=True),
    "gemma": lambda metadata: _decoder("GemmaForCausalLM", metadata),
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "phi3": _phi3,
}
"""Readers of the settings, by llama.cpp's name of the architecture."""
