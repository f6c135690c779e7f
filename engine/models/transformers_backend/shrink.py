"""Shrinks a config to a small model of the same kind, for comparison with the original implementation."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

from quire.engine.architecture.families.family import LENGTHS

HEAD = 16
VOCABULARY = 128
LENGTH = 128
SHORT = 8
"""The training length before the context was extended."""
WINDOW = 5
_LAYERS = 4

_LAYER_COUNTS = "num_hidden_layers n_layer num_layers n_layers decoder_layers num_decoder_layers"
_HEADS = (
    "num_attention_heads n_head n_heads num_heads decoder_attention_heads encoder_attention_heads "
    "swa_num_attention_heads linear_num_heads"
)
_WIDTHS = "hidden_size n_embd d_model word_embed_proj_dim embedding_size embed_dim n_embed dim"
_INNER = (
    "intermediate_size ffn_dim n_inner ffn_hidden_size d_inner decoder_ffn_dim encoder_ffn_dim moe_intermediate_size "
    "shared_expert_intermediate_size expert_ffn_hidden_size shared_intermediate_size intermediate_size_mlp "
    "block_ff_dim dense_intermediate_size d_ff dim_ff moe_shared_intermediate_size moe_shared_expert_intermediate_size "
    "shared_expert_size ffn_intermediate_size"
)
_STATE_HEADS = (
    ("mamba_expand", "mamba_n_heads", "mamba_d_head"),
    ("mamba_expand", "n_mamba_heads", "mamba_headdim"),
    ("expand", "num_heads", "head_dim"),
    ("expand", "mamba_num_heads", "mamba_head_dim"),
)
"""Names for Mamba-2: a factor on the hidden size, and the heads and their size that the product is divided into."""
_SECTIONS = ("n_input_layers", "n_recurrent_layers", "n_output_layers")
"""Layers before the layers that run several times, these layers, and the layers after them."""


@dataclass(frozen=True)
class _Original:
    """The config to shrink, and the sizes of the small model that the others depend on."""

    values: Mapping[str, Any]
    ranks: int
    """Divides the small sizes."""

    @property
    def heads(self) -> int:
        return max(4, 2 * self.ranks)

    @property
    def kv_heads(self) -> int:
        """If there are more than one and fewer than heads."""
        return max(2, self.ranks)

    @property
    def inner(self) -> int:
        """Features inside a feed-forward layer."""
        return 16 * self.kv_heads

    def first(self, names: str) -> int:
        """The value of the first of these names that has a number; 0: none has."""
        return next((self.values[name] for name in names.split() if isinstance(self.values.get(name), int)), 0)

    @cached_property
    def sections(self) -> dict[str, range]:
        """The layers of each of `_SECTIONS`, if a config has them."""
        sizes = [size for name in _SECTIONS if isinstance(size := self.values.get(name), int)]
        if len(sizes) < len(_SECTIONS):
            return {}
        ends = [*accumulate(sizes)]
        return {name: range(end - size, end) for name, size, end in zip(_SECTIONS, sizes, ends, strict=True)}

    @cached_property
    def kept_layers(self) -> list[int]:
        """Up to `_LAYERS` layers: the first of each kind, then the second of each, and so on."""
        count = self.first(_LAYER_COUNTS)
        if self.sections:
            size = 2 if "mlp" in (self.values.get("layer_types") or ()) else 1  # a layer may be two blocks
            first, middle, last = self.sections.values()
            return sorted({*first[:size], *middle[:size], *middle[-size:], *last[-size:]})
        lists = [v for v in self.values.values() if isinstance(v, list) and count and len(v) == count]
        kinds = [tuple(map(str, kind)) for kind in zip(*lists, strict=True)] or [()] * count
        earlier = [kinds[:number].count(kind) for number, kind in enumerate(kinds)]
        """How many layers of its kind come before each layer."""
        return sorted(sorted(range(count), key=lambda number: (earlier[number], number))[:_LAYERS])


_Rule = Callable[[int, _Original], int]


def _named(names: str, rule: _Rule) -> dict[str, _Rule]:
    return dict.fromkeys(names.split(), rule)


def _fixed(size: int) -> _Rule:
    return lambda value, _: value and size


def _at_most(size: int) -> _Rule:
    return lambda value, _: min(value, size)


def _kv_heads(value: int, original: _Original) -> int:
    if value <= 1:
        return value
    return original.heads if value == original.first(_HEADS) else original.kv_heads


def _value_heads(value: int, original: _Original) -> int:
    return original.kv_heads * max(1, value // (original.first("linear_num_key_heads") or value))


def _head_dim(value: int, original: _Original) -> int:
    return HEAD // 2 if value == original.values.get("qk_rope_head_dim") else value and HEAD


def _window(value: int, original: _Original) -> int:
    """A window that is not below the length is none."""
    if value <= 0:
        return value
    return LENGTH if value >= (original.first(LENGTHS) or math.inf) else min(value, WINDOW)


_RULES: Mapping[str, _Rule] = {
    **_named(_LAYER_COUNTS, lambda _, original: len(original.kept_layers)),
    **_named(_HEADS, lambda _, original: original.heads),
    **_named("num_key_value_heads n_head_kv num_kv_heads multi_query_group_num swa_num_key_value_heads", _kv_heads),
    "linear_num_key_heads": lambda _, original: original.kv_heads,
    "linear_num_value_heads": _value_heads,
    **_named(_WIDTHS, lambda _, original: original.heads * HEAD),
    "attention_hidden_size": lambda _, original: 2 * original.heads * HEAD,  # Zamba's attention sees two hidden states
    **_named(_INNER, lambda value, original: value and original.inner),
    "head_dim": _head_dim,
    **_named("qk_nope_head_dim v_head_dim swa_head_dim swa_v_head_dim global_head_dim index_head_dim", _fixed(HEAD)),
    **_named("linear_head_dim linear_key_head_dim linear_value_head_dim attention_head_dim kv_channels", _fixed(HEAD)),
    **_named("mamba_d_state ssm_state_size state_size", _fixed(HEAD)),
    **_named("qk_rope_head_dim rotary_dim hidden_size_per_layer_input", _fixed(HEAD // 2)),
    "qk_head_dim": _fixed(HEAD + HEAD // 2),
    **_named("q_lora_rank kv_lora_rank o_lora_rank", _fixed(24)),
    **_named("index_n_heads o_groups", _fixed(2)),  # as many as KV heads, which MiniMax-M3 needs
    **_named("n_layers_per_attn_res_block loop_layer_index_start core_start", _fixed(1)),
    **_named("loop_layer_index_end core_end", _fixed(3)),
    **_named("num_experts num_local_experts n_routed_experts moe_num_experts num_experts_per_layer", _at_most(8)),
    **_named("num_experts_per_tok num_experts_per_token moe_topk moe_k top_k_experts moe_top_k", _at_most(2)),
    **_named("num_selected_experts topk_group", _at_most(2)),
    **_named("n_group num_expert_group", _at_most(4)),
    **_named("first_k_dense_replace num_dense_layers moe_layer_start_index max_window_layers", _at_most(1)),
    **_named("num_nextn_predict_layers num_kv_shared_layers", _at_most(1)),
    **_named("vocab_size vocab_size_per_layer_input padded_vocab_size", lambda *_: VOCABULARY),
    "pad_token_id": lambda *_: 0,
    **_named(LENGTHS, _at_most(LENGTH)),
    "original_max_position_embeddings": lambda *_: SHORT,
    "floor_scale": lambda *_: SHORT,
    "log_scaling_n_floor": _fixed(SHORT),
    **_named("sliding_window sliding_window_size window_size attention_chunk_size local_attention", _window),
    **_named("rel_extent index_topk", _window),
}
"""The small size for each name that is a size, given the original size."""


def shrink(values: Mapping[str, Any], ranks: int = 1) -> dict[str, Any]:
    """Replace the usual sizes in a config.json's `values` by small ones; kinds and settings of layers are kept.

    The first layer of each kind is kept. Every size is divisible by `ranks`, a power of 2.
    """
    original = _Original(values, ranks)
    small = {name: _shrunk(name, value, original) for name, value in values.items()}
    for factor, number, size in _STATE_HEADS:
        has_sizes = small.get(number) is not None and small.get(size) is not None
        if isinstance(values.get(factor), int) and has_sizes and not small.get("mamba_d_ssm"):
            small |= {number: values[factor] * original.heads, size: HEAD}
    for name in ("rope_parameters", "rope_scaling"):
        if isinstance(small.get(name), dict):
            small[name] = _shrink_rope(small[name], _rotary_dims(original, small))
    return small


_OF_TOWERS = frozenset(f"{_HEADS} {_WIDTHS} {_INNER} num_key_value_heads head_dim".split())


def shrink_tower(values: Mapping[str, Any], hidden_size: int, ranks: int = 1) -> dict[str, Any]:
    """Replace the sizes of vectors in the config of a tower; layers, patches and pictures are kept. `hidden_size` is
    the original decoder's."""
    original = _Original(values, ranks)

    def small(name: str, value: Any) -> Any:
        if type(value) is not int:
            return value
        if name in _OF_TOWERS:
            return _RULES[name](value, original)
        is_width = value == hidden_size and any(part in name for part in ("hidden", "dim", "width"))
        return original.heads * HEAD if is_width else value

    return {name: small(name, value) for name, value in values.items()}


def _shrunk(name: str, value: Any, original: _Original) -> Any:
    kept, ranks = original.kept_layers, original.ranks
    match value:
        case bool():
            return value
        case int() if name in original.sections:
            return len({*kept} & {*original.sections[name]})
        case int():
            rule = _RULES.get(name, _at_most(3) if name.endswith("_token_id") else None)
            return value if rule is None else rule(value, original)
        case dict() if name == "per_layer_config":
            own = {str(number): place for place, number in enumerate(kept)}
            return {own[str(number)]: shrink(each, ranks) for number, each in value.items() if str(number) in own}
        case dict() if name == "loop_config" or (name.endswith("_config") and "hidden_size" in value):
            return shrink(value, ranks)
        case list() if name == "hybrid_layer_ids":
            return [kept.index(number) for number in value if number in kept]
        case list() if name.endswith("_token_id"):
            return [min(each, 3) for each in value]
        case [_, *_]:
            by_layer = len(value) == original.first(_LAYER_COUNTS)
            value = [value[number] for number in kept] if by_layer else value
            is_inner = name in _INNER.split() and all(type(each) is int for each in value)
            return [original.inner] * len(value) if is_inner else value
    return value


def _rotary_dims(original: _Original, small: Mapping[str, Any]) -> tuple[int, int]:
    """A head's rotary features, before and after."""
    if dim := original.first("qk_rope_head_dim"):
        return dim, int(small["qk_rope_head_dim"])
    width, heads = original.first(_WIDTHS) or HEAD, original.first(_HEADS) or 1
    return int(original.values.get("head_dim") or width // heads), HEAD


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
