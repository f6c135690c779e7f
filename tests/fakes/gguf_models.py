"""GGUF files, written by llama.cpp's own package."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from quire.engine.architecture.families import from_hf_config
from quire.engine.architecture.families.tensors import checkpoint_tensors
from quire.engine.architecture.model_spec import ModelSpec

ARCHITECTURES = {
    "LlamaForCausalLM": gguf.MODEL_ARCH.LLAMA,
    "MixtralForCausalLM": gguf.MODEL_ARCH.LLAMA,
    "Qwen2ForCausalLM": gguf.MODEL_ARCH.QWEN2,
    "Qwen3ForCausalLM": gguf.MODEL_ARCH.QWEN3,
    "Qwen2MoeForCausalLM": gguf.MODEL_ARCH.QWEN2MOE,
    "Qwen3MoeForCausalLM": gguf.MODEL_ARCH.QWEN3MOE,
    "GemmaForCausalLM": gguf.MODEL_ARCH.GEMMA,
    "Gemma2ForCausalLM": gguf.MODEL_ARCH.GEMMA2,
    "Gemma3ForCausalLM": gguf.MODEL_ARCH.GEMMA3,
    "Phi3ForCausalLM": gguf.MODEL_ARCH.PHI3,
}
_SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 320,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_CHANGES: dict[str, dict[str, Any]] = {
    "MixtralForCausalLM": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Qwen2MoeForCausalLM": {**_EXPERTS, "shared_expert_intermediate_size": 64, "norm_topk_prob": False},
    "Qwen3MoeForCausalLM": {**_EXPERTS, "norm_topk_prob": True},
    "GemmaForCausalLM": {"tie_word_embeddings": True},
    "Gemma2ForCausalLM": {
        "tie_word_embeddings": True,
        "query_pre_attn_scalar": 32,
        "sliding_window": 128,
        "attn_logit_softcapping": 40.0,
        "final_logit_softcapping": 20.0,
    },
    "Gemma3ForCausalLM": {"tie_word_embeddings": True, "query_pre_attn_scalar": 32, "sliding_window": 128},
    "Phi3ForCausalLM": {"sliding_window": 256},
}


def config_of(architecture: str) -> dict[str, Any]:
    """A tiny config.json."""
    return {"architectures": [architecture], **_SIZES, **_CHANGES.get(architecture, {})}


def tensors_of(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """The model's tensors by their published names."""
    arch = from_hf_config(config)
    assert isinstance(arch, ModelSpec)
    return {name: tensor.shape for name, tensor in checkpoint_tensors(arch, has_head=True).items()}


def writer(path: Path, config: Mapping[str, Any]) -> gguf.GGUFWriter:
    """A file with the metadata of a config.json; tensors and the tokenizer are to be added."""
    (name,) = config["architectures"]
    made = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[ARCHITECTURES[name]])
    made.add_context_length(config["max_position_embeddings"])
    made.add_embedding_length(config["hidden_size"])
    made.add_block_count(config["num_hidden_layers"])
    made.add_feed_forward_length(config["intermediate_size"])
    made.add_head_count(config["num_attention_heads"])
    made.add_head_count_kv(config["num_key_value_heads"])
    made.add_key_length(config["head_dim"])
    made.add_value_length(config["head_dim"])
    made.add_layer_norm_rms_eps(config["rms_norm_eps"])
    made.add_rope_freq_base(config["rope_theta"])
    made.add_rope_dimension_count(config["head_dim"])
    made.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0)
    optional = {
        "num_local_experts": made.add_expert_count,
        "num_experts": made.add_expert_count,
        "num_experts_per_tok": made.add_expert_used_count,
        "moe_intermediate_size": made.add_expert_feed_forward_length,
        "shared_expert_intermediate_size": made.add_expert_shared_feed_forward_length,
        "sliding_window": made.add_sliding_window,
        "attn_logit_softcapping": made.add_attn_logit_softcapping,
        "final_logit_softcapping": made.add_final_logit_softcapping,
    }
    for key in optional.keys() & config.keys():
        optional[key](config[key])
    return made


def names_of(config: Mapping[str, Any], tensors: Iterable[str]) -> dict[str, str]:
    """llama.cpp's names of tensors, by their published ones; experts share a name."""
    names = gguf.get_tensor_name_map(ARCHITECTURES[config["architectures"][0]], config["num_hidden_layers"])
    found: dict[str, str] = {}
    for name in tensors:
        own = names.get_name(re.sub(r"\.experts\.\d+\.", ".experts.", name), (".weight", ".bias"))
        assert own is not None, name
        found[name] = own
    return found


def add_tensors(
    made: gguf.GGUFWriter, config: Mapping[str, Any], tensors: Mapping[str, npt.NDArray[np.float32]]
) -> None:
    """Add tensors by their published names, as float32, with experts in stacks."""
    stacks: dict[str, list[npt.NDArray[np.float32]]] = {}
    for name, found in names_of(config, tensors).items():
        stacks.setdefault(found, []).append(tensors[name])
    for found, parts in stacks.items():
        made.add_tensor(found, np.stack(parts) if "_exps" in found else parts[0])


def add_byte_level(made: gguf.GGUFWriter, backend: Tokenizer, pre: str, *, plain: tuple[str, ...] = ()) -> None:
    """The vocabulary of a byte-level tokenizer; `plain` are added tokens that are not special."""
    tokens = [token for token, _ in sorted(backend.get_vocab().items(), key=lambda each: each[1])]
    added = {token.content for token in backend.get_added_tokens_decoder().values()}
    kinds = [4 if token in plain else 3 if token in added else 1 for token in tokens]
    merges = [
        merge if isinstance(merge, str) else " ".join(merge)
        for merge in json.loads(backend.to_str())["model"]["merges"]
    ]
    made.add_tokenizer_model("gpt2")
    made.add_tokenizer_pre(pre)
    made.add_token_list(tokens)
    made.add_token_types(kinds)
    made.add_token_merges(merges)


def add_sentencepiece(made: gguf.GGUFWriter, pieces: Mapping[str, int], *, has_prefix: bool = True) -> None:
    """The vocabulary of Llama 2's kind: pieces with their kinds, the best ones first, after <unk>, <s> and </s>."""
    tokens = {"<unk>": 2, "<s>": 3, "</s>": 3, **{f"<0x{byte:02X}>": 6 for byte in range(256)}, **pieces}
    made.add_tokenizer_model("llama")
    made.add_token_list(list(tokens))
    made.add_token_types(list(tokens.values()))
    made.add_token_scores([-1000.0 if kind == 4 else -float(number) for number, kind in enumerate(tokens.values())])
    made.add_add_space_prefix(has_prefix)
    made.add_bos_token_id(1)
    made.add_eos_token_id(2)
    made.add_unk_token_id(0)


def close(made: gguf.GGUFWriter) -> None:
    """Write the file."""
    made.write_header_to_file()
    made.write_kv_data_to_file()
    made.write_tensors_to_file()
    made.close()
