"""Models in Mistral's own layout: params.json, consolidated*.safetensors and tekken.json."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

PARAMS: dict[str, Any] = {
    "dim": 64,
    "n_layers": 3,
    "head_dim": 16,
    "hidden_dim": 96,
    "n_heads": 8,
    "n_kv_heads": 2,
    "norm_eps": 1e-05,
    "vocab_size": 320,
    "rope_theta": 10000.0,
    "max_position_embeddings": 512,
}
WORDS = ("he", "ll", "llo", "hello", " w", "or", " wor", " world", "th", "the", " the", "12", "é", "中", "aa", "aaa")
PATTERN = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPECIAL = ("<unk>", "<s>", "</s>", "[INST]", "[/INST]")


def tekken(
    words: Sequence[str] = WORDS, special: Sequence[str] | None = SPECIAL, *, num_special: int = 40, version: str = "v2"
) -> dict[str, Any]:
    """tekken.json with all bytes and some words, and two more tokens, which are not used. v2 has no chat template."""
    tokens = [bytes([byte]) for byte in range(256)] + [word.encode() for word in (*words, "un", "used")]
    listed = [{"rank": number, "token_str": text, "is_control": True} for number, text in enumerate(special or ())]
    return {
        "config": {
            "pattern": PATTERN,
            "num_vocab_tokens": len(tokens),
            "default_vocab_size": num_special + len(tokens) - 2,
            "default_num_special_tokens": num_special,
            "version": version,
        },
        "vocab": [
            {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
            for rank, token in enumerate(tokens)
        ],
        **({} if special is None else {"special_tokens": listed}),
    }


def write_folder(folder: Path, **params: Any) -> Path:
    """A folder without weights."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "params.json").write_text(json.dumps(PARAMS | params))
    (folder / "tekken.json").write_text(json.dumps(tekken()))
    return folder


_NAMES = {
    r"model\.embed_tokens": "tok_embeddings",
    r"model\.norm": "norm",
    r"lm_head": "output",
    r"model\.(layers\.\d+)\.input_layernorm": r"\1.attention_norm",
    r"model\.(layers\.\d+)\.post_attention_layernorm": r"\1.ffn_norm",
    r"model\.(layers\.\d+)\.self_attn\.([qkvo])_proj": r"\1.attention.w\2",
    r"model\.(layers\.\d+)\.mlp\.gate_proj": r"\1.feed_forward.w1",
    r"model\.(layers\.\d+)\.mlp\.down_proj": r"\1.feed_forward.w2",
    r"model\.(layers\.\d+)\.mlp\.up_proj": r"\1.feed_forward.w3",
    r"model\.(layers\.\d+)\.mlp\.gate": r"\1.feed_forward.gate",
}
LATENT: dict[str, Any] = {
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "moe": {
        "expert_parallel": 1,
        "expert_model_parallel": 1,
        "route_every_n": 1,
        "first_k_dense_replace": 1,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "num_expert_groups": 1,
        "num_expert_groups_per_tok": 1,
        "routed_scale": 1.5,
        "expert_hidden_dim": 20,
        "num_shared_experts": 2,
    },
}
"""Settings of latent attention."""
_LATENT_NAMES = _NAMES | {
    r"model\.(layers\.\d+)\.self_attn\.q_a_proj": r"\1.attention.wq_a",
    r"model\.(layers\.\d+)\.self_attn\.q_a_layernorm": r"\1.attention.q_a_norm",
    r"model\.(layers\.\d+)\.self_attn\.q_b_proj": r"\1.attention.wq_b",
    r"model\.(layers\.\d+)\.self_attn\.kv_a_proj_with_mqa": r"\1.attention.wkv_a_with_mqa",
    r"model\.(layers\.\d+)\.self_attn\.kv_a_layernorm": r"\1.attention.kv_a_norm",
    r"model\.(layers\.\d+)\.self_attn\.kv_b_proj": r"\1.attention.wkv_b",
    r"model\.(layers\.\d+)\.mlp\.gate": r"\1.gate",
    r"model\.(layers\.\d+)\.mlp\.shared_experts\.gate_proj": r"\1.shared_experts.w1",
    r"model\.(layers\.\d+)\.mlp\.shared_experts\.down_proj": r"\1.shared_experts.w2",
    r"model\.(layers\.\d+)\.mlp\.shared_experts\.up_proj": r"\1.shared_experts.w3",
}


def mistral_name(name: str, *, is_latent: bool = False) -> str:
    """The name of a transformers tensor; also of a model with latent attention."""
    module, _, kind = name.rpartition(".")
    for pattern, found in (_LATENT_NAMES if is_latent else _NAMES).items():
        if match := re.fullmatch(pattern, module):
            return f"{match.expand(found)}.{kind}"
    raise AssertionError(name)


def stored(state: Mapping[str, Any], params: Mapping[str, Any]) -> dict[str, Any]:
    """The tensors of a model of transformers as Mistral stores them: rotary pairs side by side, experts one by one."""
    heads = {"q": params["n_heads"], "k": params["n_kv_heads"]}
    is_latent = "kv_lora_rank" in params
    tensors = {}
    for name, tensor in state.items():
        if match := re.search(r"self_attn\.([qk])_proj", name):
            halves = tensor.view(heads[match[1]], 2, -1, tensor.shape[1])
            tensors[mistral_name(name)] = halves.transpose(1, 2).reshape(tensor.shape).contiguous()
        elif match := re.fullmatch(r"model\.(layers\.\d+)\.mlp\.experts\.(gate_up|down)_proj", name):
            for number, expert in enumerate(tensor):
                place = f"{match[1]}.{'' if is_latent else 'feed_forward.'}experts.{number}"
                if match[2] == "down":
                    tensors[f"{place}.w2.weight"] = expert.clone()
                else:
                    for kind, part in zip(("w1", "w3"), expert.chunk(2), strict=True):
                        tensors[f"{place}.{kind}.weight"] = part.clone()
        else:
            tensors[mistral_name(name, is_latent=is_latent)] = tensor.clone()
    return tensors
