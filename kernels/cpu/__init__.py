"""C++ kernels for CPUs, with the names and meaning of the operations in `quire.kernels.reference` and `packed`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels import int4_kv, reference
from quire.kernels.cache import StateSegments
from quire.kernels.cpu.build import CannotBuild, Operations, load
from quire.kernels.low_rank import AdapterRows, ExpertChanges, LowRankPool
from quire.kernels.packed import TILE
from quire.kernels.quantized import VALUES
from quire.kernels.sequences import SequenceBlocks, SequenceKV

__all__ = [
    "CannotBuild",
    "act_mul",
    "activate",
    "add_low_rank",
    "add_rms_norm",
    "apply_bitmask",
    "attention",
    "causal_conv",
    "coded_experts",
    "coded_linear",
    "compress_tokens",
    "gated_low_rank",
    "int4_attention",
    "int4_linear",
    "int8_linear",
    "linear_attention",
    "load",
    "mhc_post",
    "mhc_pre",
    "pack_coded_tiles",
    "pack_int4_tiles",
    "pack_int8_tiles",
    "pack_tiles",
    "packed_experts",
    "paged_attention",
    "quantize_kv",
    "quantize_rows",
    "quantize_weight",
    "rms_norm",
    "rotary_write_kv",
    "route",
    "sample",
    "scale_rows",
    "select_blocks",
    "select_tokens",
    "selective_scan",
    "sequence_kv",
    "sparse_attention",
    "tiled_linear",
    "uniform_noise",
    "wkv",
]

_LARGEST_BLOCK = 256
"""Tokens of a block whose score is computed in C++ (`kStepKeys`), or that may be in 4 bits (`kDirectKeys`)."""
_ENCODER_BLOCK = 64
"""Tokens of a block in the cache of `attention`."""
_PAIRS_AT_ONCE = 2048
"""Pairs of tokens and experts whose products are in memory at a time, if adapters change these."""
_operations = Operations()


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    out: Tensor = _operations.rms_norm(x, weight, eps, offset)
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> tuple[Tensor, Tensor]:
    out: tuple[Tensor, Tensor] = _operations.add_rms_norm(x, residual, weight, eps, offset)
    return out


def rotary_write_kv(
    query: Tensor, key: Tensor, value: Tensor | None, cos_sin: Tensor, cache: Tensor, slots: Tensor
) -> Tensor:
    out: Tensor = _operations.rotary_write_kv(query, key, value, cos_sin, cache, slots)
    return out


def quantize_kv(recent: Tensor, cache: Tensor, recent_slots: Tensor, slots: Tensor) -> None:
    _operations.quantize_kv(recent, cache, recent_slots, slots)


def int4_attention(
    query: Tensor,
    cache: Tensor,
    block_tables: Tensor,
    sequence_lengths: Tensor,
    query_starts: Tensor,
    scale: float,
    recent: Tensor,
    recent_slots: Tensor,
    *,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    slopes: Tensor | None = None,
    biases: Tensor | None = None,
) -> Tensor:
    batch = query, cache, block_tables, sequence_lengths, query_starts, scale, recent, recent_slots
    if cache.shape[3] > _LARGEST_BLOCK:
        return int4_kv.int4_attention(*batch, window=window, softcap=softcap, sinks=sinks, slopes=slopes, biases=biases)
    out: Tensor = _operations.int4_attention(*batch, window, softcap, sinks, slopes, biases)
    return out


def select_blocks(
    query: Tensor,
    cache: Tensor,
    block_tables: Tensor,
    sequence_lengths: Tensor,
    query_starts: Tensor,
    size: int,
    count: int,
    local: int,
) -> Tensor:
    if size > _LARGEST_BLOCK:
        return reference.select_blocks(query, cache, block_tables, sequence_lengths, query_starts, size, count, local)
    out: Tensor = _operations.select_blocks(
        query, cache, block_tables, sequence_lengths, query_starts, size, count, local
    )
    return out


def select_tokens(
    query: Tensor,
    weights: Tensor,
    cache: Tensor,
    block_tables: Tensor,
    sequence_lengths: Tensor,
    query_starts: Tensor,
    top_k: int,
    tokens_per_key: int = 1,
) -> Tensor:
    out: Tensor = _operations.select_tokens(
        query, weights, cache, block_tables, sequence_lengths, query_starts, top_k, tokens_per_key
    )
    return out


def sparse_attention(
    query: Tensor,
    cache: Tensor,
    slots: Tensor,
    counts: Tensor,
    scale: float,
    sinks: Tensor | None = None,
    logs: Tensor | None = None,
) -> Tensor:
    out: Tensor = _operations.sparse_attention(query, cache, slots, counts, scale, sinks, logs)
    return out


def compress_tokens(
    inputs: Tensor,
    position_bias: Tensor,
    weight: Tensor | None,
    eps: float,
    cos_sin: Tensor,
    cache: Tensor,
    slots: Tensor,
    block_tables: Tensor,
    sequence_lengths: Tensor,
    query_starts: Tensor,
    entry_tables: Tensor,
) -> None:
    _operations.compress_tokens(
        inputs,
        position_bias,
        weight,
        eps,
        cos_sin,
        cache,
        slots,
        block_tables,
        sequence_lengths,
        query_starts,
        entry_tables,
    )


def mhc_pre(
    x: Tensor,
    function: Tensor,
    base: Tensor,
    scale: Tensor,
    num_streams: int,
    norm_eps: float,
    eps: float,
    iterations: int = 0,
    magnitude: float = 2.0,
    output_eps: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    out: tuple[Tensor, Tensor, Tensor] = _operations.mhc_pre(
        x, function, base, scale, num_streams, norm_eps, eps, iterations, magnitude, output_eps
    )
    return out


def mhc_post(x: Tensor, streams: Tensor, outputs: Tensor, mixed: Tensor) -> Tensor:
    out: Tensor = _operations.mhc_post(x, streams, outputs, mixed)
    return out


def causal_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, inputs: Tensor, segments: StateSegments, *, silu: bool = True
) -> Tensor:
    out: Tensor = _operations.causal_conv(x, weight, bias, inputs, *segments, silu)
    return out


def linear_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    beta: Tensor | None,
    matrices: Tensor,
    segments: StateSegments,
    scale: float,
    eps: float = 0.0,
    *,
    is_delta: bool = True,
) -> Tensor:
    out: Tensor = _operations.linear_attention(
        query, key, value, decay, beta, matrices, *segments, scale, eps, is_delta
    )
    return out


def selective_scan(
    x: Tensor, step: Tensor, rates: Tensor, key: Tensor, query: Tensor, matrices: Tensor, segments: StateSegments
) -> Tensor:
    out: Tensor = _operations.selective_scan(x, step, rates, key, query, matrices, *segments)
    return out


def wkv(key: Tensor, value: Tensor, decay: Tensor, bonus: Tensor, matrices: Tensor, segments: StateSegments) -> Tensor:
    out: Tensor = _operations.wkv(key, value, decay, bonus, matrices, *segments)
    return out


def act_mul(x: Tensor, activation: str) -> Tensor:
    out: Tensor = _operations.act_mul(x, activation)
    return out


def activate(x: Tensor, activation: str) -> Tensor:
    out: Tensor = _operations.activate(x, activation)
    return out


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    quantized, scales = _operations.quantize_rows(x)
    return quantized, scales


def scale_rows(x: Tensor, scales: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    out: Tensor = _operations.scale_rows(x, scales, bias, dtype)
    return out


def pack_tiles(weight: Tensor, per_word: int = 1, gated: bool = False) -> Tensor:
    out: Tensor = _operations.pack_tiles(weight, per_word, gated)
    return out


def pack_int8_tiles(weight: Tensor, gated: bool = False) -> tuple[Tensor, Tensor]:
    quantized, scales = _operations.pack_int8_tiles(weight, gated)
    return quantized, scales


def quantize_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    quantized, scales = _operations.quantize_weight(weight)
    return quantized, scales


def tiled_linear(x: Tensor, weight: Tensor, bias: Tensor | None, features: int, activation: str = "") -> Tensor:
    out: Tensor = _operations.tiled_linear(x, weight, bias, features, activation)
    return out


def int8_linear(
    x: Tensor,
    weight: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    features: int,
    activation: str = "",
    rounding: Tensor | None = None,
    excess: Tensor | None = None,
) -> Tensor:
    out: Tensor = _operations.int8_linear(x, weight, scales, bias, features, activation, rounding, excess)
    return out


def pack_int4_tiles(weight: Tensor, group: int, gated: bool = False) -> Tensor:
    out: Tensor = _operations.pack_int4_tiles(weight, group, gated)
    return out


def int4_linear(x: Tensor, weight: Tensor, bias: Tensor | None, features: int, activation: str = "") -> Tensor:
    out: Tensor = _operations.int4_linear(x, weight, bias, features, activation)
    return out


def pack_coded_tiles(
    codes: Tensor, scales: Tensor | None, offsets: Tensor | None, group: int, bits: int, wide: bool, gated: bool = False
) -> Tensor:
    out: Tensor = _operations.pack_coded_tiles(codes, scales, offsets, group, bits, wide, gated)
    return out


def coded_linear(
    x: Tensor,
    tiles: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    features: int,
    values: str,
    group: int,
    factors: int,
    activation: str = "",
) -> Tensor:
    out: Tensor = _operations.coded_linear(
        x, tiles, scales, bias, features, values, VALUES[values], group, factors, activation
    )
    return out


def route(
    logits: Tensor,
    top_k: int,
    scoring: str,
    *,
    renormalize: bool = False,
    scale: float = 1.0,
    groups: int = 1,
    top_groups: int = 1,
    group_score: str = "max",
    ineligible: float = -math.inf,
    correction_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    weights, ids = _operations.route(
        logits, top_k, scoring, renormalize, scale, groups, top_groups, group_score, ineligible, correction_bias
    )
    return weights, ids


def packed_experts(
    x: Tensor,
    weights: Tensor,
    ids: Tensor,
    gate_up: Tensor,
    gate_up_scales: Tensor | None,
    gate_up_bias: Tensor | None,
    down: Tensor,
    down_scales: Tensor | None,
    down_bias: Tensor | None,
    activation: str,
    gated: bool = True,
    changes: ExpertChanges | None = None,
) -> Tensor:
    if changes is not None:
        weights_of = (gate_up, gate_up_scales, gate_up_bias), (down, down_scales, down_bias)
        multiply = _operations.multiply_packed_pairs
        return _mix_pairs(x, weights, ids, multiply, *weights_of, activation, gated, changes)
    out: Tensor = _operations.packed_experts(
        x, weights, ids, gate_up, gate_up_scales, gate_up_bias, down, down_scales, down_bias, activation, gated
    )
    return out


def coded_experts(
    x: Tensor,
    weights: Tensor,
    ids: Tensor,
    gate_up: Tensor,
    gate_up_scales: Tensor,
    gate_up_bias: Tensor | None,
    down: Tensor,
    down_scales: Tensor,
    down_bias: Tensor | None,
    activation: str,
    values: str,
    gate_up_group: int,
    gate_up_factors: int,
    down_group: int,
    down_factors: int,
    gated: bool = True,
    changes: ExpertChanges | None = None,
) -> Tensor:
    if changes is not None:
        first = gate_up, gate_up_scales, gate_up_bias, values, VALUES[values], gate_up_group, gate_up_factors
        second = down, down_scales, down_bias, values, VALUES[values], down_group, down_factors
        multiply = _operations.multiply_coded_pairs
        return _mix_pairs(x, weights, ids, multiply, first, second, activation, gated, changes)
    out: Tensor = _operations.coded_experts(
        x,
        weights,
        ids,
        gate_up,
        gate_up_scales,
        gate_up_bias,
        down,
        down_scales,
        down_bias,
        activation,
        values,
        VALUES[values],
        gate_up_group,
        gate_up_factors,
        down_group,
        down_factors,
        gated,
    )
    return out


def paged_attention(
    query: Tensor,
    cache: Tensor,
    block_tables: Tensor,
    sequence_lengths: Tensor,
    query_starts: Tensor,
    scale: float,
    *,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    slopes: Tensor | None = None,
    biases: Tensor | None = None,
    ends: Tensor | None = None,
    logs: Tensor | None = None,
) -> Tensor:
    batch = query, cache, block_tables, sequence_lengths, query_starts
    out: Tensor = _operations.paged_attention(*batch, scale, window, softcap, sinks, slopes, biases, ends, logs)
    return out


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts: Tensor,
    scale: float,
    biases: Tensor | None = None,
    cos_sin: Tensor | None = None,
) -> Tensor:
    if biases is not None or len(starts) == 1:  # no sequences have no longest one
        return reference.attention(query, key, value, starts, scale, biases, cos_sin)
    kv = PagedSequenceKV(query, starts, *key.shape[1:])
    return kv.attend(kv.write(query, key, value, 0, cos_sin), 0, scale)


class PagedSequenceKV(SequenceKV):
    """Paged attention with a cache of its own, whose blocks begin with the sequences."""

    def __init__(self, like: Tensor, starts: Tensor, kv_heads: int, head_dim: int) -> None:
        self._starts, self._blocks = starts, SequenceBlocks.of(starts, _ENCODER_BLOCK)
        self._cache = like.new_empty(2, self._blocks.num_blocks, kv_heads, _ENCODER_BLOCK, head_dim)

    def write(self, query: Tensor, key: Tensor, value: Tensor, first: int, cos_sin: Tensor | None) -> Tensor:
        cos_sin = torch.empty(len(query), 0) if cos_sin is None else cos_sin
        slots = self._blocks.slots[first : first + len(query)]
        return rotary_write_kv(query, key, value, cos_sin, self._cache, slots)

    def attend(self, query: Tensor, first: int, scale: float) -> Tensor:
        end = first + len(query)
        low, high = (self._starts[1:] <= first).sum(), (self._starts[:-1] < end).sum()
        starts = (self._starts[low : high + 1] - first).clamp(0, len(query))
        sequences = self._blocks.tables[low:high], self._blocks.lengths[low:high], starts
        return paged_attention(query, self._cache, *sequences, scale, ends=self._blocks.ends[first:end])


def sequence_kv(like: Tensor, starts: Tensor, kv_heads: int, head_dim: int) -> PagedSequenceKV:
    return PagedSequenceKV(like, starts, kv_heads, head_dim)


def _mix_pairs(
    x: Tensor,
    weights: Tensor,
    ids: Tensor,
    multiply: Callable[..., Tensor],
    gate_up: tuple[Any, ...],
    down: tuple[Any, ...],
    activation: str,
    gated: bool,
    changes: ExpertChanges,
) -> Tensor:
    """`packed_experts` with changes, by `multiply(rows, ids, features, gated, *gate_up)`, the float32 products of the
    row of each pair by its expert."""
    num_experts, tiles, *_ = gate_up[0].shape
    inputs = tiles * (TILE // 2 if gated else TILE)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    at_once = max(1, _PAIRS_AT_ONCE // ids.shape[1])
    for first in range(0, len(x), at_once):
        some = slice(first, first + at_once)
        own = changes if len(x) <= at_once else changes.of_rows(some)
        both = multiply(x[some], ids[some], own.size, gated, *gate_up)
        if own.gate_up is not None:
            add_low_rank(both, own.x, own.gate_up, own.pairs)
        inner = (act_mul if gated else activate)(both, activation).to(x.dtype)
        rows = multiply(F.pad(inner, (0, inputs - own.size)), ids[some], x.shape[1], False, *down)
        if own.down is not None:
            add_low_rank(rows, inner, own.down, own.pairs)
        _operations.sum_pairs(out[some], rows, weights[some], ids[some], num_experts)
    return out


def add_low_rank(out: Tensor, x: Tensor, pool: LowRankPool, rows: AdapterRows) -> None:
    _operations.add_low_rank(out, x, *_adapters(pool, rows))


def gated_low_rank(
    x: Tensor,
    weight: Tensor,
    scales: Tensor | None,
    bias: Tensor | None,
    features: int,
    activation: str,
    pool: LowRankPool,
    rows: AdapterRows,
) -> Tensor:
    of_tiles = weight, scales, bias, features, activation
    out: Tensor = _operations.gated_low_rank(x, *of_tiles, *_adapters(pool, rows))
    return out


def _adapters(pool: LowRankPool, rows: AdapterRows) -> tuple[Tensor | None, ...]:
    of_slots = pool.slots, pool.bounds, pool.vectors, pool.scale, pool.bias
    return pool.a, pool.b, *of_slots, rows.order, rows.starts


def apply_bitmask(logits: Tensor, rows: Tensor, masks: Tensor) -> None:
    _operations.apply_bitmask(logits, rows, masks)


def sample(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, seeds: Tensor, positions: Tensor
) -> Tensor:
    out: Tensor = _operations.sample(logits, temperature, top_k, top_p, min_p, seeds, positions)
    return out


def uniform_noise(seeds: Tensor, positions: Tensor, ids: Tensor) -> Tensor:
    out: Tensor = _operations.uniform_noise(seeds, positions, ids)
    return out
