"""Shrinks a config to a small model of the same kind, for comparison with the original implementation."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import accumulate
from typing import Any

HEAD = 16
VOCABULARY = 128
LENGTH = 128
SHORT = 8
"""The training length before the context was extended."""
WINDOW = 5
_LAYERS = 4

_LAYER_COUNTS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "decoder_layers", "num_decoder_layers")
_HEADS = (
    *("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads", "encoder_attention_heads"),
    *("swa_num_attention_heads", "linear_num_heads"),
)
_KV_HEADS = ("num_key_value_heads", "n_head_kv", "num_kv_heads", "multi_query_group_num", "swa_num_key_value_heads")
_WIDTHS = ("hidden_size", "n_embd", "d_model", "word_embed_proj_dim", "embedding_size", "embed_dim", "n_embed", "dim")
_INNER = (
    *("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", "d_inner", "decoder_ffn_dim", "encoder_ffn_dim"),
    *("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size", "shared_intermediate_size"),
    *(
        "intermediate_size_mlp",
        "block_ff_dim",
        "dense_intermediate_size",
        "d_ff",
        "dim_ff",
        "moe_shared_intermediate_size",
    ),
    *("moe_shared_expert_intermediate_size", "shared_expert_size", "ffn_intermediate_size"),
)
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_experts_per_layer")
_TOP = (
    "num_experts_per_tok",
    "moe_topk",
    "moe_k",
    "top_k_experts",
    "moe_top_k",
    "num_selected_experts",
    "num_experts_per_token",
)
_VOCABULARIES = ("vocab_size", "vocab_size_per_layer_input", "padded_vocab_size")
_LENGTHS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length", "max_sequence_length")
_WINDOWS = (
    "sliding_window",
    "attention_chunk_size",
    "window_size",
    "local_attention",
    "sliding_window_size",
    "rel_extent",
    "index_topk",
)
_STATE_HEADS = (
    ("mamba_expand", "mamba_n_heads", "mamba_d_head"),
    ("mamba_expand", "n_mamba_heads", "mamba_headdim"),
    ("expand", "num_heads", "head_dim"),
    ("expand", "mamba_num_heads", "mamba_head_dim"),
)
"""Names for Mamba-2: a factor on the hidden size, and the heads and their size that the product is divided into."""
_SECTIONS = ("n_input_layers", "n_recurrent_layers", "n_output_layers")
"""Layers before those that run several times, these layers, and those after them."""
_SMALL = {
    "q_lora_rank": 24,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": HEAD,
    "qk_rope_head_dim": HEAD // 2,
    "qk_head_dim": HEAD + HEAD // 2,
    "v_head_dim": HEAD,
    "head_dim": HEAD,
    "swa_head_dim": HEAD,
    "attention_head_dim": HEAD,
    "mamba_d_state": HEAD,
    "ssm_state_size": HEAD,
    "state_size": HEAD,
    "linear_head_dim": HEAD,
    "linear_key_head_dim": HEAD,
    "linear_value_head_dim": HEAD,
    "swa_v_head_dim": HEAD,
    "global_head_dim": HEAD,
    "kv_channels": HEAD,
    "hidden_size_per_layer_input": 8,
    "index_head_dim": HEAD,
    "index_n_heads": 2,  # as many as KV heads, which MiniMax-M3 needs
    "o_groups": 2,
    "o_lora_rank": 24,
    "rotary_dim": HEAD // 2,
    "log_scaling_n_floor": SHORT,
    "n_layers_per_attn_res_block": 1,
    "loop_layer_index_start": 1,
    "loop_layer_index_end": 3,
    "core_start": 1,
    "core_end": 3,
}


def shrink(values: Mapping[str, Any], ranks: int = 1) -> dict[str, Any]:
    """Replace the usual sizes in a config.json's `values` by small ones; kinds and settings of layers are kept.

    The first layer of each kind is kept. Every size is divisible by `ranks`, a power of 2.
    """
    small = {name: shrink(value, ranks) if _is_text(name, value) else value for name, value in values.items()}
    heads = max(4, 2 * ranks)
    inner = 16 * max(2, ranks)
    was_heads = next((values[name] for name in _HEADS if isinstance(values.get(name), int)), 0)
    kept = _kept_layers(values)
    count, sections = _layer_count(values), _sections(values)
    length = next((values[name] for name in _LENGTHS if isinstance(values.get(name), int)), 0) or math.inf
    """A window that is not below it is none."""
    for name, value in small.items():
        if isinstance(value, list) and count and len(value) == count:
            small[name] = value = [value[number] for number in kept]
        if isinstance(value, bool) or not isinstance(value, int):
            if isinstance(value, list) and value and all(type(each) is int for each in value) and name in _INNER:
                small[name] = [inner] * len(value)
            continue
        if name in _LAYER_COUNTS:
            small[name] = len(kept)
        elif name in sections:
            small[name] = len({*kept} & {*sections[name]})
        elif name in _HEADS:
            small[name] = heads
        elif name in _KV_HEADS:
            small[name] = value if value <= 1 else heads if value == was_heads else max(2, ranks)
        elif name in _WIDTHS:
            small[name] = heads * HEAD
        elif name == "linear_num_key_heads":
            small[name] = max(2, ranks)
        elif name == "linear_num_value_heads":
            small[name] = max(2, ranks) * max(1, value // (values.get("linear_num_key_heads") or value))
        elif name == "attention_hidden_size":  # Zamba's attention sees two hidden states
            small[name] = 2 * heads * HEAD
        elif name in _INNER:
            small[name] = inner if value else value
        elif name in _EXPERTS:
            small[name] = min(value, 8)
        elif name in _TOP:
            small[name] = min(value, 2)
        elif name in _VOCABULARIES:
            small[name] = VOCABULARY
        elif name in _LENGTHS:
            small[name] = min(value, LENGTH)
        elif name in _WINDOWS:
            small[name] = (LENGTH if value >= length else min(value, WINDOW)) if value > 0 else value
        elif name == "head_dim" and value == values.get("qk_rope_head_dim"):
            small[name] = _SMALL["qk_rope_head_dim"]
        elif name in _SMALL:
            small[name] = _SMALL[name] if value else value
        elif name == "floor_scale":
            small[name] = SHORT
        elif name in ("n_group", "num_expert_group"):
            small[name] = min(value, 4)
        elif name in ("topk_group",):
            small[name] = min(value, 2)
        elif name in ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index", "max_window_layers"):
            small[name] = min(value, 1)
        elif name.endswith("_token_id"):
            small[name] = min(value, 3) if value >= 0 else value
        elif name in ("num_nextn_predict_layers", "num_kv_shared_layers"):
            small[name] = min(value, 1)
    for name, number, size in _STATE_HEADS:
        factor, has_sizes = values.get(name), small.get(number) is not None and small.get(size) is not None
        if isinstance(factor, int) and has_sizes and not small.get("mamba_d_ssm"):
            small |= {number: factor * heads, size: HEAD}
    for name, value in small.items():
        if name.endswith("_token_id") and isinstance(value, list):
            small[name] = [min(each, 3) for each in value]
    if small.get("pad_token_id") is not None:
        small["pad_token_id"] = 0
    if isinstance(own := small.get("per_layer_config"), dict):  # settings by layer number
        places = {str(number): place for place, number in enumerate(kept)}
        small["per_layer_config"] = {
            places[str(number)]: shrink(value, ranks) for number, value in own.items() if str(number) in places
        }
    if isinstance(loop := small.get("loop_config"), dict):
        small["loop_config"] = shrink(loop, ranks)
    if isinstance(numbers := small.get("hybrid_layer_ids"), list):
        small["hybrid_layer_ids"] = [kept.index(number) for number in numbers if number in kept]
    for name in ("rope_parameters", "rope_scaling"):
        if isinstance(small.get(name), dict):
            small[name] = _shrink_rope(small[name], _rotary_dims(values, small))
    if isinstance(small.get("original_max_position_embeddings"), int):
        small["original_max_position_embeddings"] = SHORT
    return small


def _is_text(name: str, value: object) -> bool:
    return isinstance(value, dict) and name.endswith("_config") and "hidden_size" in value


def _layer_count(values: Mapping[str, Any]) -> int:
    return next((values[name] for name in _LAYER_COUNTS if isinstance(values.get(name), int)), 0)


def _sections(values: Mapping[str, Any]) -> dict[str, range]:
    """The layers of each of `_SECTIONS`, if a config has them."""
    sizes = [size for name in _SECTIONS if isinstance(size := values.get(name), int)]
    if len(sizes) < len(_SECTIONS):
        return {}
    ends = [*accumulate(sizes)]
    return {name: range(end - size, end) for name, size, end in zip(_SECTIONS, sizes, ends, strict=True)}


def _kept_layers(values: Mapping[str, Any]) -> list[int]:
    """Up to `_LAYERS` layers: the first of each kind, then the second of each, and so on."""
    count = _layer_count(values)
    if sections := _sections(values):
        size = 2 if "mlp" in (values.get("layer_types") or ()) else 1  # a layer may be two blocks
        first, middle, last = sections.values()
        return sorted({*first[:size], *middle[:size], *middle[-size:], *last[-size:]})
    lists = [v for v in values.values() if isinstance(v, list) and count and len(v) == count]
    kinds = [tuple(map(str, kind)) for kind in zip(*lists, strict=True)] or [()] * count
    earlier = [kinds[:number].count(kind) for number, kind in enumerate(kinds)]
    """How many layers of its kind come before each layer."""
    return sorted(sorted(range(count), key=lambda number: (earlier[number], number))[:_LAYERS])


def _rotary_dims(values: Mapping[str, Any], small: Mapping[str, Any]) -> tuple[int, int]:
    """A head's rotary features, before and after."""
    heads = next((values[name] for name in _HEADS if isinstance(values.get(name), int)), 1)
    width = next((values[name] for name in _WIDTHS if isinstance(values.get(name), int)), HEAD)
    if isinstance(values.get("qk_rope_head_dim"), int):
        return int(values["qk_rope_head_dim"]), int(small["qk_rope_head_dim"])
    return int(values.get("head_dim") or width // heads), HEAD


def _shrink_rope(rope: Mapping[str, Any], rotary_dims: tuple[int, int]) -> dict[str, Any]:
    """Keep as many frequency factors as there are frequencies, and shorten lengths."""
    before, after = rotary_dims
    small: dict[str, Any] = {}
    for name, value in rope.items():
        if isinstance(value, Mapping):
            small[name] = _shrink_rope(value, rotary_dims)
        elif name in ("short_factor", "long_factor") and isinstance(value, list):
            small[name] = (value * after)[: max(1, len(value) * after // before)]
        elif name == "mrope_section" and isinstance(value, list):
            rest = [each * after // before for each in value[1:]]
            small[name] = [sum(value) * after // before - sum(rest), *rest]
        elif name == "original_max_position_embeddings":
            small[name] = SHORT
        else:
            small[name] = value
    return small
