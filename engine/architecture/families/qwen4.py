"""Qwen4-Exp: Qwen3.5 MoE's layers with gated hyper-connections, attention to the best groups of tokens, and embeddings
of n-grams that some layers add."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

from quire.engine.architecture.attention_spec import AttentionSpec, GroupIndexerSpec
from quire.engine.architecture.families.family import (
    Config,
    Family,
    architecture,
    attention,
    head_dim,
    layers_by_kind,
    of_multimodal,
    require,
    rms_norm,
    rope,
)
from quire.engine.architecture.families.moe import STACKED_EXPERTS
from quire.engine.architecture.families.qwen_next import NOT_TEXT, QWEN35_NAMES, delta_net, gate_rows, gated_experts
from quire.engine.architecture.model_spec import LayerSpec, ModelSpec
from quire.engine.architecture.residual_spec import GatedConnectionSpec, NGramSpec
from quire.engine.architecture.spec_parts import NormSpec
from quire.engine.protocol.errors import ConfigError

_INDEXER = ("indexer_n_heads", "indexer_kv_heads", "indexer_head_dim", "indexer_budget", "indexer_compress_ratio")
_LAYER_PRIME, _GAMMA, _MASK = 10007, 0x9E3779B97F4A7C15, (1 << 64) - 1


def _qwen4(name: str, config: Config) -> ModelSpec:
    require(config, "hidden_act", "silu")
    norm, count = rms_norm(config, offset=1.0), int(config["num_hidden_layers"])
    _check_least(config, "hc_count", 2)
    hyper = GatedConnectionSpec(num_streams=int(config["hc_count"]), rank=int(config["hc_lowrank"]), norm=norm)
    every = int(config["full_attention_interval"])
    kinds = config.get("layer_types") or [
        "linear_attention" if number % every else "indexed_attention" for number in range(1, count + 1)
    ]
    if len(kinds) != count:
        raise ConfigError(f"layer_types has {len(kinds)} entries, but num_hidden_layers is {count}")
    ngrams = _ngrams(config, norm, hyper.num_streams)
    if wrong := [number for number in ngrams if not 0 < number <= count or kinds[number - 1] != "linear_attention"]:
        raise ConfigError(f"ple_layer_ids {wrong} are not numbers of layers with linear attention, from 1 to {count}")
    gate = config.get("output_gate_type") or "silu"
    require({"output_gate_type": gate}, "output_gate_type", "silu", "sigmoid")
    sparse = {"attention": _attention(config, norm)}
    mixers: dict[str, dict[str, Any]] = {"indexed_attention": sparse, "full_attention": sparse}
    experts = gated_experts(config, renormalize=bool(config["norm_topk_prob"]))
    layers: list[LayerSpec] = []
    for number, kind in enumerate(kinds, start=1):
        own = ngrams.get(number)
        inputs = () if own is None else own.kept_inputs(int(config["hidden_size"]))
        mixers["linear_attention"] = {
            "attention": None,
            "state": delta_net(config, gate=gate, other_inputs=inputs),
        }
        common = {"attention_norm": None, "feed_forward_norm": None, "residual": replace(hyper, ngrams=own)}
        layers += layers_by_kind([kind], mixers, [experts], **common)
    return architecture(name, config, layers, None)


def _attention(config: Config, norm: NormSpec) -> AttentionSpec:
    if missing := [name for name in _INDEXER if config.get(name) is None]:
        raise ConfigError(f"config.json lacks {', '.join(missing)}, which layers with attention need")
    require(config, "indexer_kv_heads", 1)
    size, budget = int(config["indexer_compress_ratio"]), int(config["indexer_budget"])
    if size < 1 or budget % size:
        raise ConfigError(f"indexer_budget {budget} is not a multiple of indexer_compress_ratio {size}")
    indexer = GroupIndexerSpec(
        num_heads=int(config["indexer_n_heads"]),
        head_dim=int(config["indexer_head_dim"]),
        norm=norm,
        size=size,
        num_groups=budget // size,
    )
    turns = rope(config, head_dim(config))
    return attention(config, turns, qk_norm=norm, output_gate="features", indexer=indexer)


def _ngrams(config: Config, norm: NormSpec, num_streams: int) -> dict[int, NGramSpec]:
    """The n-grams by the number of their layer, counted from 1."""
    layers = sorted(set(config.get("ple_layer_ids") or ()))
    if not layers:
        return {}
    end = (config.get("text_config") or config).get("eos_token_id")  # the text part's own, whatever ends an answer
    end = end[0] if isinstance(end, list) and end else end
    if not isinstance(end, int):
        raise ConfigError("ple_layer_ids need eos_token_id in the settings of the text part")
    _check_least(config, "split_ngram_parts", 1)
    _check_least(config, "ple_conv_kernel_size", 2)
    tokens, by_tokens = int(config["ngram_size"]), int(config["heads_per_ngram"])
    heads, size = (tokens - 1) * by_tokens, int(config.get("ple_embed_dim") or config["hidden_size"])
    if heads < 1 or size % heads:
        raise ConfigError(f"ple_embed_dim {size} cannot be divided among {heads} heads of n-grams")
    primes, found = _primes_from(int(config["ngram_vocab_size_base"])), {}
    for index, layer in enumerate(layers):
        rows, divisor = tuple(islice(primes, heads)), int(config["make_ngram_vocab_size_divisible_by"])
        found[layer] = NGramSpec(
            size=size,
            multipliers=tuple(_multipliers(config, tokens, index)),
            head_rows=rows,
            total_rows=-(-sum(rows) // divisor) * divisor,
            parts=int(config["split_ngram_parts"]),
            end_token=end,
            num_streams=num_streams,
            conv_size=int(config["ple_conv_kernel_size"]),
            norm=norm,
        )
    return found


def _check_least(config: Config, name: str, least: int) -> None:
    if int(config[name]) < least:
        raise ConfigError(f"{name} {config[name]} is not supported; supported: {least} or more")


def _primes_from(first: int) -> Iterator[int]:
    """The primes from `first` on."""
    number = max(first, 2)
    while True:
        if all(number % divisor for divisor in range(2, math.isqrt(number) + 1)):
            yield number
        number += 1


def _multipliers(config: Config, tokens: int, index: int) -> Iterator[int]:
    """The factors on tokens before they are combined, odd numbers of a SplitMix64 generator (Steele et al. 2014); their
    products with ids have less than 64 bits."""
    bound = max(1, ((1 << 63) - 1) // max(int(config["vocab_size"]), 1) // 2)
    for number in range(1, tokens + 1):
        value = int(config["seed"]) + _LAYER_PRIME * index + _GAMMA * (number + 1) & _MASK
        value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
        value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _MASK
        yield 2 * ((value ^ (value >> 31)) % bound) + 1


_LAYER = "model.layers.{layer}"
_CONNECTION = {"norm": "hc_norm", "down": "input_mix_weight_down", "up": "input_mix_weight_up"}
_NAMES = QWEN35_NAMES | {
    "layers.attention.indexer.inputs": f"{_LAYER}.self_attn.indexer.index_qk_proj",
    "layers.attention.indexer.query_norm": f"{_LAYER}.self_attn.indexer.q_layernorm",
    "layers.attention.indexer.key_norm": f"{_LAYER}.self_attn.indexer.k_layernorm",
    **{f"merger.{part}": f"model.hyper_connection_mixer.{name}" for part, name in _CONNECTION.items()},
    **{
        f"layers.{module}_connection.{part}": f"{_LAYER}.{short}_hyper_connection.{name}"
        for module, short in (("attention", "attn"), ("feed_forward", "mlp"))
        for part, name in (_CONNECTION | {"outputs": "block_inject_weight"}).items()
    },
    "layers.ngrams.embedding": f"{_LAYER}.ple.ple_embedding.ngram_embedding.shard_{{part}}",
    **{f"layers.ngrams.{part}": f"{_LAYER}.ple.{part}_proj" for part in ("key", "value")},
    **{f"layers.ngrams.{part}_norm": f"{_LAYER}.ple.norm_{part}" for part in ("key", "query", "conv")},
    "layers.ngrams.conv": f"{_LAYER}.ple.conv1d.weight",
}
_DEFAULTS = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "full_attention_interval": 4,
    "head_dim": 256,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32768,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_experts_per_tok": 10,
    "num_experts": 512,
    "norm_topk_prob": True,
    "hc_count": 4,
    "hc_lowrank": 320,
    "ple_conv_kernel_size": 4,
    "ngram_size": 3,
    "heads_per_ngram": 8,
    "ngram_vocab_size_base": 20000000,
    "make_ngram_vocab_size_divisible_by": 128,
    "seed": 1234,
    "split_ngram_parts": 512,
}
_COMPUTED = r"rotary_emb\.inv_freq$|\.ple_embedding\.(layer_multipliers|ngram_heads_vocab_sizes|ngram_heads_offsets)$"
FAMILIES = {
    name: Family(_qwen4, names, _DEFAULTS, rows=gate_rows, ignored_prefixes=NOT_TEXT, ignored_pattern=_COMPUTED)
    for name, names in (
        ("Qwen4ExpForCausalLM", _NAMES),
        ("Qwen4ExpForConditionalGeneration", of_multimodal(_NAMES | STACKED_EXPERTS)),
    )
}
