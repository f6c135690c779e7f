"""Example calls of every operation, at sizes that the caller chooses.

The check of a platform's kernels (`quire.kernels.check`), compiling them ahead of time and the checks of benchmarks on
GPUs make their lists of calls from these functions.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from quire.kernels import coded_words, fp4, int4_kv, packed, quantized, reference
from quire.kernels.attention_config import AttentionCase, AttentionLayer, HostMetadata
from quire.kernels.cache import FP8_CAPABILITY, INT4, LARGEST, StateSegments, allocate_kv_cache
from quire.kernels.coded_words import RowRounding, pack_words, typed_codes
from quire.kernels.fp4 import FP4_CAPABILITY, pack_fp4
from quire.kernels.low_rank import AdapterRows, ExpertChanges, LowRankPool
from quire.kernels.quantized import VALUES, QuantizedFormat, QuantizedWeight

_LEAST_STEPS = {
    "coded_linear": 2e-4,  # inputs are rounded to 16 bits
    "coded_experts": 2e-4,
    "rounded_matmul": 2e-3,  # Hopper's tensor cores add products of 8-bit floats with 14 bits
    "rounded_fused_experts": 2**-5,  # so an input of the second matmul may be rounded to the next code
    "fp4_matmul": 2e-3,
    "fp4_fused_experts": 2**-5,
}


def tolerance(operation: str, dtype: torch.dtype) -> float:
    """How far, relative and absolute, the result of an implementation may differ from the reference's."""
    return max(8 * torch.finfo(dtype).eps, _LEAST_STEPS.get(operation, 2e-5))


class Example(NamedTuple):
    """A call of an operation on fixed inputs."""

    operation: str
    sizes: str
    call: Callable[[Any], Any]
    """Calls the operation of the given module; returns everything that it computes."""

    def expected(self) -> Any:
        """The reference's result."""
        every = (reference, int4_kv, packed, quantized, coded_words, fp4)
        return self.call(next(module for module in every if hasattr(module, self.operation)))


def _example(operation: str, sizes: str, *arguments: Any, changes: int | None = None, **options: Any) -> Example:
    """`changes` is the argument that the operation changes in place."""

    def call(module: Any) -> Any:
        given = list(arguments)
        if changes is None:
            return getattr(module, operation)(*given, **options)
        given[changes] = given[changes].clone()
        result = getattr(module, operation)(*given, **options)
        return given[changes] if result is None else (result, given[changes])

    return Example(operation, sizes, call)


@dataclass(frozen=True)
class Inputs:
    """Random tensors on a device; `dtype` is the type of activations."""

    device: torch.device
    dtype: torch.dtype
    noise: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(0))
    """On the CPU, it makes the same numbers for every device; large tensors need one on the device."""

    def normal(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        numbers = torch.randn(shape, generator=self.noise, device=self.noise.device)
        return numbers.to(self.device, dtype or self.dtype)

    def uniform(self, *shape: int) -> Tensor:
        """Float32."""
        return torch.rand(shape, generator=self.noise, device=self.noise.device).to(self.device)

    def integers(self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        numbers = torch.randint(low, high, shape, generator=self.noise, device=self.noise.device, dtype=dtype)
        return numbers.to(self.device)

    def tensor(self, *numbers: int) -> Tensor:
        return torch.tensor(numbers, device=self.device)


def norms(inputs: Inputs, tokens: int, hidden: int) -> Iterator[Example]:
    x, residual, weight = inputs.normal(tokens, hidden), inputs.normal(tokens, hidden), inputs.normal(hidden)
    yield _example("rms_norm", f"{tokens} × {hidden}", x, weight, 1e-6)
    yield _example("add_rms_norm", f"{tokens} × {hidden}", x, residual, weight, 1e-6, 1.0)


def activation(inputs: Inputs, tokens: int, inner: int, name: str, *, gated: bool = True) -> Example:
    x = inputs.normal(tokens, inner * (1 + gated))
    return _example("act_mul" if gated else "activate", f"{tokens} × {inner}, {name}", x, name)


def cache_write(
    inputs: Inputs, tokens: int, heads: tuple[int, int, int], rotary_dim: int, cache_dtype: torch.dtype
) -> Example:
    """`heads` are query heads, KV heads and the head size. A quantized cache is compared as attention reads it."""
    query_heads, kv_heads, head_dim = heads
    qkv = inputs.normal(tokens, query_heads + 2 * kv_heads, head_dim)
    angles, blocks = inputs.normal(tokens, rotary_dim // 2, dtype=torch.float32), -(-tokens // 16) + 1
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1)
    slots, table = inputs.uniform(blocks * 16).argsort()[:tokens], torch.arange(blocks, device=inputs.device)

    def call(module: Any) -> Any:
        cache = allocate_kv_cache(1, blocks, kv_heads, 16, head_dim, cache_dtype, inputs.device)[0]
        query, key, value = qkv.clone().split_with_sizes([query_heads, kv_heads, kv_heads], dim=1)
        rotated = module.rotary_write_kv(query, key, value, cos_sin, cache, slots)
        if cache_dtype not in LARGEST:
            return rotated, cache
        # A value between two of the cache's numbers may round to either, so a difference of one step is allowed.
        step = tolerance("rotary_write_kv", inputs.dtype) * (127 if cache_dtype == torch.int8 else 8)
        read = [reference.read_kv(side, table, blocks * 16, torch.float32) for side in cache]
        return rotated, *(side / side.abs().amax().clamp(min=1) * step for side in read)

    return Example("rotary_write_kv", f"{tokens} tokens, heads {heads}, {str(cache_dtype)[6:]} cache", call)


def attention_case(
    inputs: Inputs,
    requests: Sequence[tuple[int, int]],
    layer: AttentionLayer,
    cache_dtype: torch.dtype | None = None,
    block_size: int = 16,
) -> AttentionCase:
    """Paged attention for requests of (context, queries), with shuffled block tables."""
    counts, lengths = np.array([count for _, count in requests]), np.array([sum(request) for request in requests])
    width, device, cache_dtype = -(-int(lengths.max()) // block_size), inputs.device, cache_dtype or inputs.dtype
    tables = inputs.uniform(len(requests) * width).argsort().view(-1, width)
    cache = allocate_kv_cache(
        1,
        tables.numel(),
        layer.kv_heads,
        block_size,
        layer.head_dim,
        cache_dtype,
        device,
        num_tensors=1 if layer.is_mla else 2,
    )[0]
    for slots in torch.split(torch.arange(tables.numel() * block_size, device=device), 1 << 14):
        key, value = inputs.normal(2, len(slots), layer.kv_heads, layer.head_dim)
        reference.write_kv(key, None if layer.is_mla else value, cache, slots)
    query = inputs.normal(int(counts.sum()), layer.heads, layer.head_dim)
    starts = torch.from_numpy(np.concatenate(([0], counts.cumsum()))).to(device)
    options: dict[str, Any] = {"window": layer.window, "softcap": layer.softcap}
    if layer.has_sinks:
        options["sinks"] = torch.linspace(-1.0, 2.0, layer.heads, device=device)
    if layer.has_own_sinks:
        options["sinks"] = inputs.normal(len(query), layer.heads, dtype=torch.float32)
    if layer.has_alibi:
        options["slopes"] = 2.0 ** -torch.linspace(1.0, 8.0, layer.heads, device=device)
    if layer.num_biases:
        options["biases"] = inputs.normal(len(query), layer.heads, layer.num_biases)
    if layer.has_ends:
        positions = torch.cat([torch.arange(sum(each) - each[1], sum(each), device=device) for each in requests])
        last = torch.from_numpy(lengths.repeat(counts)).to(device)
        options["ends"] = torch.where(positions % 110 < 10, positions + 1, (positions // 110 * 110 + 110).minimum(last))
    if layer.is_partial:
        ends = torch.cat([torch.arange(sum(each) - each[1], sum(each), device=device) for each in requests]) // 2
        options["ends"], lengths = ends, ends[starts[1:] - 1].cpu().numpy()
        options["logs"] = torch.zeros(len(query), layer.heads, device=device)
    cache = cache.expand(2, *cache.shape[1:]) if layer.is_mla else cache
    args = (query, cache, tables, torch.from_numpy(lengths).to(device), starts, layer.scale)
    return AttentionCase(args, options, HostMetadata(counts, lengths, {}))


def attention(
    inputs: Inputs,
    requests: Sequence[tuple[int, int]],
    layer: AttentionLayer,
    cache_dtype: torch.dtype | None = None,
    block_size: int = 16,
) -> Example:
    """An implementation that takes the host's numbers gets them, as from a model."""
    case = attention_case(inputs, requests, layer, cache_dtype, block_size)

    def call(module: Any) -> Any:
        takes_host = "host" in inspect.signature(module.paged_attention).parameters
        options = case.options | ({"host": case.host} if takes_host else {})
        out = module.paged_attention(*case.args, **options)
        return (out, options["logs"].clone()) if layer.is_partial else out

    kind = f"{str(cache_dtype or inputs.dtype)[6:]} cache"
    return Example("paged_attention", f"{len(requests)} requests, {kind}, {layer}", call)


def int4_cache(
    inputs: Inputs, requests: Sequence[tuple[int, int]], layer: AttentionLayer, block_size: int = 16
) -> Iterator[Example]:
    """Writing a cache of 4-bit numbers, which is compared as attention reads it, and attention. All blocks are among
    the recent ones, too, in the same places; those that are not complete have scales of NaN."""
    case = attention_case(inputs, requests, layer, block_size=block_size)
    query, recent, tables, lengths, starts, scale = case.args
    places = [torch.arange(context, context + count, device=inputs.device) for context, count in requests]
    of_queries = [
        table[place // block_size] * block_size + place % block_size
        for table, place in zip(tables, places, strict=True)
    ]
    is_complete = torch.arange(tables.shape[1], device=inputs.device) < lengths[:, None] // block_size
    ends = torch.where(is_complete, (tables + 1) * block_size - 1, -1).flatten()

    def quantize(module: Any) -> Tensor:
        sizes = tables.numel(), layer.kv_heads, block_size, layer.head_dim
        cache = allocate_kv_cache(1, *sizes, INT4, inputs.device)[0].fill_(255)
        module.quantize_kv(recent, cache, ends, ends)
        return cache

    def call(module: Any) -> Tensor:
        # A number between two codes may get either, so a difference of one step is allowed.
        read = int4_kv.Int4Blocks.of(quantize(module)).dequantize().nan_to_num()
        return read / recent.float().abs().amax() * (7 * tolerance("quantize_kv", inputs.dtype))

    named = f"{len(requests)} requests, blocks of {block_size}, {layer}"
    yield Example("quantize_kv", named, call)
    given = query, quantize(int4_kv), tables, lengths, starts, scale, recent, torch.cat(of_queries)
    yield _example("int4_attention", named, *given, **case.options)


def sequences(
    inputs: Inputs, lengths: Sequence[int], heads: tuple[int, int, int], rotary_dim: int
) -> Iterator[Example]:
    """Attention without a cache, at once and by slices of the rows, some of which end inside sequences. `heads` are
    query heads, KV heads and the head size."""
    (query_heads, kv_heads, head_dim), tokens = heads, sum(lengths)
    query, key, value = inputs.normal(tokens, query_heads + 2 * kv_heads, head_dim).split_with_sizes(
        [query_heads, kv_heads, kv_heads], dim=1
    )
    angles = inputs.normal(tokens, rotary_dim // 2, dtype=torch.float32)
    cos_sin, starts = torch.cat((angles.cos(), angles.sin()), dim=1), inputs.tensor(0, *lengths).cumsum(0)
    named, scale = f"sequences of {[*lengths]}, heads {heads}", head_dim**-0.5
    yield _example("attention", named, query, key, value, starts, scale)
    yield _example("attention", f"{named}, rotary", query, key, value, starts, scale, cos_sin=cos_sin)
    bounds = (0, tokens // 5, tokens // 5, tokens // 2, tokens)

    def call(module: Any) -> Tensor:
        kv = module.sequence_kv(query, starts, kv_heads, head_dim)
        slices = [slice(*each) for each in pairwise(bounds)]
        turned = [kv.write(query[each], key[each], value[each], each.start, cos_sin[each]) for each in slices]
        return torch.cat([kv.attend(*each, scale) for each in zip(turned, bounds, strict=False)])

    yield Example("sequence_kv", f"{named}, slices at {bounds}", call)


def selection(
    inputs: Inputs,
    requests: Sequence[tuple[int, int]],
    heads: tuple[int, int],
    tokens: Iterable[tuple[int, int]],
    blocks: Iterable[tuple[int, int, int]],
    cache_dtype: torch.dtype | None = None,
) -> Iterator[Example]:
    """`heads` are query heads and the head size; `tokens` and `blocks` are the last arguments of `select_tokens` and of
    `select_blocks`."""
    count, dim = heads
    query, cache, *where, _ = attention_case(
        inputs, requests, AttentionLayer(count, 1, dim, 1.0, is_mla=True), cache_dtype
    ).args
    # Whole numbers have exact scores, whose order does not depend on rounding.
    query, keys = (query * 2).round(), cache[:1] if cache.dtype in LARGEST else (cache[:1] * 2).round()
    weights, named = inputs.integers(-4, 5, len(query), count).float(), f"{len(requests)} requests, heads {heads}"
    for each in tokens:
        yield _example("select_tokens", f"{named}, {each}", query, weights, keys, *where, *each)
    for sizes in blocks:
        yield _example("select_blocks", f"{named}, {sizes}", query, keys, *where, *sizes)


def sparse_attention(
    inputs: Inputs,
    requests: Sequence[tuple[int, int]],
    layer: AttentionLayer,
    top_k: int,
    cache_dtype: torch.dtype | None = None,
) -> Example:
    case = attention_case(inputs, requests, layer, cache_dtype)
    query, cache = case.args[:2]
    slots = inputs.integers(0, cache.shape[1] * cache.shape[3], len(query), top_k)
    counts = inputs.integers(1, top_k + 1, len(query))
    named = f"{len(requests)} requests, {top_k} tokens, {layer}"
    return _example("sparse_attention", named, query, cache, slots, counts, layer.scale, case.options.get("sinks"))


def compression(
    inputs: Inputs,
    requests: Sequence[tuple[int, int]],
    sizes: tuple[int, int, int],
    rotary_dim: int,
    *,
    gated: bool = True,
    normed: bool = True,
) -> Example:
    """`sizes` are an entry's features, the tokens of a group, and the groups of an entry."""
    head_dim, ratio, groups = sizes
    width = head_dim * groups
    layer = AttentionLayer(2, 2, width * (1 + gated), 1.0)
    query, cache, tables, lengths, starts, _ = attention_case(inputs, requests, layer).args
    bias, weight = inputs.normal(ratio, width, dtype=torch.float32), inputs.normal(head_dim) if normed else None
    turns = inputs.normal(len(query), rotary_dim, dtype=torch.float32)
    slots = torch.arange(len(query), device=inputs.device)
    entries = torch.zeros(1, tables.numel(), 1, 4, head_dim, device=inputs.device, dtype=inputs.dtype)
    return _example(
        "compress_tokens",
        f"{len(requests)} requests, {sizes}",
        cache[:1, :, :1],
        bias,
        weight,
        1e-6 if normed else 0.0,
        turns,
        entries,
        slots,
        tables,
        lengths,
        starts,
        tables.flip(1),
        changes=5,
    )


def hyper_connections(inputs: Inputs, tokens: int, hidden: int, iterations: int) -> Iterator[Example]:
    """Four streams."""
    streams, named = inputs.normal(tokens, 4 * hidden), f"{tokens} tokens, 4 streams of {hidden}"
    function = inputs.normal(24, 4 * hidden, dtype=torch.float32) / (4 * hidden) ** 0.5
    base = inputs.normal(24, dtype=torch.float32)
    for rows, parts, steps in ((24, 3, iterations), (8, 2, 0), (4, 1, 0)):
        given = function[:rows], base[:rows], base[:parts], 4, 1e-6, 1e-6, steps
        yield _example("mhc_pre", f"{named}, {parts} parts", streams, *given)
    output, outputs = inputs.normal(tokens, hidden), inputs.uniform(tokens, 4)
    mixed = inputs.normal(tokens, 4, 4, dtype=torch.float32)
    for each in (mixed, mixed[:, :0, :0]):
        yield _example("mhc_post", named, output, streams, outputs, each)


def recurrent(inputs: Inputs, tokens: int, heads: tuple[int, int, int], state_size: int) -> Iterator[Example]:
    """Two requests, of which one begins and has a snapshot in between. `heads` are heads of keys and of values, and
    their size; `state_size` is the selective scan's."""
    key_heads, value_heads, size = heads
    numbers = (0, tokens * 3 // 5, tokens - 1, tokens), (0, 2, 3), (-1, 1, 2), (1, 0, 2)
    segments = StateSegments(*(inputs.tensor(*each) for each in numbers))
    channels, widths = value_heads * size, [key_heads * size, key_heads * size, value_heads * size]
    mixed, taps = inputs.normal(tokens, sum(widths)), inputs.normal(sum(widths), 4)
    named, kept = f"{tokens} tokens, heads {heads}", inputs.normal(3, 3, sum(widths))
    bias = taps[:, 0].contiguous()
    yield _example("causal_conv", named, mixed, taps, None, kept, segments, changes=3)
    yield _example("causal_conv", f"{named}, bias", mixed, taps, bias, kept, segments, changes=3, silu=False)
    query, key, value = (torch.unflatten(each, 1, (-1, size)) for each in mixed.split_with_sizes(widths, 1))
    decay, beta = -inputs.uniform(tokens, value_heads), inputs.uniform(tokens, value_heads)
    matrices = inputs.normal(3, value_heads, size, size, dtype=torch.float32)
    given = query, key, value, decay, beta, matrices, segments, size**-0.5
    yield _example("linear_attention", named, *given, 1e-6, changes=5)
    yield _example("linear_attention", f"{named}, sums", *given, changes=5, is_delta=False)
    # No rate is near 0: a state that never decays sums the errors of all steps.
    step, rates = inputs.uniform(tokens, channels), -0.1 - inputs.uniform(state_size, channels)
    sides = inputs.normal(tokens, state_size), inputs.normal(tokens, state_size)
    states, named = inputs.normal(3, 1, state_size, channels, dtype=torch.float32), f"{tokens} tokens, {channels}"
    x = value.flatten(1)
    yield _example("selective_scan", f"{named} × {state_size}", x, step, rates, *sides, states, segments, changes=5)
    means, keys = inputs.uniform(3, 1, 3, channels), inputs.normal(tokens, channels)
    yield _example("wkv", named, keys, x, rates[0], inputs.uniform(channels), means, segments, changes=4)


def _chosen(inputs: Inputs, tokens: int, experts: int, top_k: int) -> tuple[Tensor, Tensor]:
    """Weights and ids of experts: all if there are enough tokens, and ids of other ranks, below and above."""
    ids = inputs.integers(-1, experts + 1, tokens * top_k)
    every = torch.arange(experts, -2, -1, device=inputs.device)[: len(ids)]
    ids[: len(every)] = every
    return inputs.uniform(tokens, top_k), ids.view(tokens, top_k)


def fused_experts(
    inputs: Inputs,
    tokens: int,
    sizes: tuple[int, int, int, int],
    activation: str = "silu",
    *,
    gated: bool = True,
    has_biases: bool = False,
    has_changes: bool = False,
) -> Example:
    """`sizes` are experts, the experts of a token, and features of the input and inside."""
    experts, top_k, hidden, inner = sizes
    up = inputs.normal(experts, inner * (1 + gated), hidden) / hidden**0.5
    down = inputs.normal(experts, hidden, inner) / inner**0.5
    biases: tuple[Any, ...] = (inputs.normal(*up.shape[:2]), inputs.normal(*down.shape[:2])) if has_biases else ()
    x, chosen = inputs.normal(tokens, hidden), _chosen(inputs, tokens, experts, top_k)
    named = f"{tokens} tokens, {sizes}, {activation}"
    if has_changes:
        named, changes = f"{named}, changes", expert_changes(inputs, x, chosen[1], sizes, gated=gated)
        biases = *(biases or (None, None)), changes
    return _example("fused_experts", named, x, *chosen, up, down, activation, *biases)


def expert_changes(
    inputs: Inputs, x: Tensor, ids: Tensor, sizes: tuple[int, int, int, int], *, gated: bool = True
) -> ExpertChanges:
    """Changes of experts by as many adapters as servers have slots. `sizes` are as in `fused_experts`."""
    (experts, _, hidden, inner), adapters = sizes, 64
    ranks = [1 + (5 * slot) % 16 for slot in range(adapters * experts)]
    pools = (
        low_rank_pool(inputs, hidden, (inner, inner)[: 1 + gated], ranks),
        low_rank_pool(inputs, inner, (hidden,), ranks),
    )
    for pool in pools:
        pool.b.mul_(0.25)  # so that the rounding of what is in between changes no result by more than the tolerance
    rows = AdapterRows.of(inputs.integers(-1, adapters, len(x)), adapters)
    return ExpertChanges.of(*pools, x, ids, rows, experts)


def low_rank_pool(
    inputs: Inputs,
    in_features: int,
    widths: Sequence[int],
    ranks: Sequence[int],
    dtype: torch.dtype | None = None,
    **options: bool,
) -> LowRankPool:
    """A slot for each rank, which is that of its first part; the second part has the rank of the next slot, … The
    second slot has no row of scales and biases."""
    ranks_of = [[ranks[(slot + part) % len(ranks)] for part in range(len(widths))] for slot in range(len(ranks))]
    pool = LowRankPool.allocate(
        len(ranks),
        sum(map(sum, ranks_of)),
        in_features,
        widths,
        dtype or inputs.dtype,
        inputs.device,
        max(ranks),
        **options,
    )
    first = 0
    for slot, every in enumerate(ranks_of):
        changes = [
            (inputs.normal(rank, in_features) / in_features**0.5, inputs.normal(width, rank) / max(1, rank) ** 0.5)
            for rank, width in zip(every, widths, strict=True)
        ]
        pool.assign(slot, first, [change if len(change[0]) else None for change in changes])
        first += sum(every)
    pool.vectors.copy_(pool.vectors.flip(0))
    pool.vectors[1:2] = -1
    if pool.scale is not None:
        pool.scale.copy_(inputs.uniform(*pool.scale.shape) + 0.5)
    if pool.bias is not None:
        pool.bias.copy_(inputs.normal(*pool.bias.shape))
    return pool


def low_rank(
    inputs: Inputs, rows: int, in_features: int, widths: Sequence[int], ranks: Sequence[int]
) -> Iterator[Example]:
    """Rows of adapters of these ranks (see `low_rank_pool`), and of none, in random order."""
    x, out = inputs.normal(rows, in_features), inputs.normal(rows, sum(widths))
    of_rows = AdapterRows.of(inputs.integers(-1, len(ranks), rows), len(ranks))
    named = f"{rows} × {in_features}, {[*widths]}, {len(ranks)} ranks up to {max(ranks)}"
    every: list[tuple[str, Tensor, dict[str, Any]]] = [
        ("", out, {}),
        (", scale and bias, float32 result", out.float(), {"has_scale": True, "has_bias": True}),
    ]
    if inputs.dtype == torch.float32:
        every += [(f", {str(dtype)[6:]} pool", out, {"dtype": dtype}) for dtype in (torch.bfloat16, torch.float16)]
    for what, given, options in every:
        pool = low_rank_pool(inputs, in_features, widths, ranks, **options)
        yield _example("add_low_rank", named + what, given, x, pool, of_rows, changes=0)


def route(
    inputs: Inputs, tokens: int, experts: int, top_k: int, scoring: str, *, has_bias: bool = False, **options: Any
) -> Example:
    scores = inputs.normal(tokens, experts, dtype=torch.float32)
    bias = inputs.normal(experts, dtype=torch.float32) if has_bias else None
    named = f"{tokens} tokens, {top_k} of {experts}, {scoring}"
    return _example("route", named, scores, top_k, scoring, correction_bias=bias, **options)


def sampler_arguments(inputs: Inputs, rows: int, vocabulary: int, **controls: Any) -> tuple[Tensor, ...]:
    """The arguments of `kernels.sample`: logits on the device, the others on the host, pinned if that is a GPU. A
    control is a number for all rows, or one for each."""
    chosen = {"temperature": 0.8, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | controls
    types = {"top_k": torch.int64}
    columns = [torch.tensor(value, dtype=types.get(name, torch.float32)) for name, value in chosen.items()]
    hosts = [*(column.expand(rows).contiguous() for column in columns), torch.arange(rows), torch.arange(rows)]
    if inputs.device.type == "cuda":
        hosts = [host.pin_memory() for host in hosts]
    return (inputs.normal(rows, vocabulary, dtype=torch.float32) * 3, *hosts)


def sample(inputs: Inputs, rows: int, vocabulary: int, **controls: Any) -> Example:
    logits, *hosts = sampler_arguments(inputs, rows, vocabulary, **controls)
    named = ", ".join(f"{name} {value}" for name, value in controls.items())
    return Example(
        "sample", f"{rows} × {vocabulary}, {named or 'plain'}", lambda module: module.sample(logits.clone(), *hosts)
    )


def on_logits(inputs: Inputs, rows: int, vocabulary: int, longest: int, num_top: int) -> Iterator[Example]:
    """Requests in every third row, with up to `longest` tokens."""
    x, tokens = inputs.normal(rows, vocabulary, dtype=torch.float32), inputs.integers(0, vocabulary, rows)
    chosen, named = torch.arange(1, rows, 3, device=inputs.device).flip(0), f"{rows} × {vocabulary}"
    tokens[:2] = inputs.tensor(0, vocabulary - 1)
    yield _example("score_tokens", named, x, tokens, num_top)
    history = inputs.integers(0, vocabulary, longest, dtype=torch.int32)
    history[longest // 30 : longest // 8 : 3] = 5  # in a prompt and in the output
    spans = inputs.tensor(longest // 60, longest // 15, longest).repeat(len(chosen), 1)
    spans[-1] = inputs.tensor(0, 0, longest // 20)
    factors = inputs.uniform(len(chosen), 3) * 1.5 - inputs.tensor(0, 0, 1)
    yield _example("penalize", named, x, history, chosen, spans, factors + 0.1, longest, changes=0)
    masks = inputs.integers(-(2**31), 2**31, len(chosen), -(-vocabulary // 32)).int()
    yield _example("apply_bitmask", named, x, chosen, masks, changes=0)


def uniform_noise(inputs: Inputs) -> Example:
    seeds = inputs.integers(-(2**63), 2**63 - 1, 6)
    return _example("uniform_noise", "6 × 77", seeds, seeds.flip(0), inputs.tensor(*range(77)).int())


def random_weight(inputs: Inputs, form: QuantizedFormat, *shape: int) -> QuantizedWeight:
    """A weight of few bits, or a stack. The mean norm of its rows is 1/2, as is about the product with a normal input.

    Its numbers are about as often negative as positive: otherwise they would be nearly the same for all features, and
    for all experts."""
    table, (*stack, _, columns) = VALUES[form.values], shape
    codes = inputs.integers(0, min(120, len(table)), *shape, dtype=torch.uint8)  # without NaN
    if len(table) == 256 and (table < 0).any():
        codes += 128 * inputs.integers(0, 2, *shape, dtype=torch.uint8)
    largest = float(table[:120].abs().max())
    center = 0.0 if (table < 0).any() else largest // 2
    scales = inputs.uniform(*shape[:-1], max(1, columns // (form.group or columns))) / largest
    offsets = inputs.integers(-8, 8, *scales.shape) * min(largest / 8, 1.0) - center if form.has_offsets else None
    weight = QuantizedWeight(form.values, torch.float32, codes, scales, offsets, wide=form.wide)
    if form.has_rounding:
        weight = replace(weight, rounding=torch.tensor([1 / 32, 3.0], device=inputs.device).expand(*stack, 2))
    if form.has_order:
        order = inputs.uniform(*stack, columns).argsort()
        order[..., 5] = columns  # a column without an input
        weight = replace(weight, columns=order)
    norm = (weight.at(0) if stack else weight).dequantize().norm(dim=-1).mean()
    return replace(weight, scales=scales / norm / 2)


def _random_experts(
    inputs: Inputs,
    form: QuantizedFormat,
    sizes: tuple[int, int, int],
    x: Tensor,
    chosen: Iterable[Tensor],
    activation: str = "silu",
) -> tuple[QuantizedWeight, QuantizedWeight]:
    """Stacks for `fused_experts`. The largest result is far above the tolerance, but rounding an input of the second
    matmul to the next code changes no result by more than the tolerance."""
    experts, hidden, inner = sizes
    up = random_weight(inputs, form, experts, inner * (2 if activation == "silu" else 1), hidden)
    down, few = random_weight(inputs, form, experts, hidden, inner), slice(0, 8)
    shares, ids = (each[few] for each in chosen)
    found = reference.fused_experts(x[few].float(), shares, ids, up.dequantize(), down.dequantize(), activation)
    target = 0.25 if form.values == "e2m1" else 0.5  # codes of 4 bits are further apart
    return up, replace(down, scales=down.scales * (target / found.abs().max()))


def _is_widened(form: QuantizedFormat, device: torch.device, capability: tuple[int, int] | None) -> bool:
    """Whether a GPU of this compute capability (default: the device's, and of a CPU the highest) widens the codes."""
    if capability is None:
        capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else FP4_CAPABILITY
    least = {"fp8": FP8_CAPABILITY, "e2m1": FP4_CAPABILITY}
    return not form.rounds_inputs or capability < least.get(form.values, capability)


def quantized_matmuls(
    inputs: Inputs,
    form: QuantizedFormat,
    counts: Sequence[int],
    hidden: int,
    features: int,
    capability: tuple[int, int] | None = None,
) -> Iterator[Example]:
    """The operations of `coded_words` or of `fp4` that a layer with such a weight uses on a GPU, for each count of
    tokens."""
    is_widened = _is_widened(form, inputs.device, capability)
    all_x, some_bias = inputs.normal(max(counts), hidden), inputs.normal(features)
    weight = random_weight(inputs, form, features, hidden)
    for count in counts:
        x, bias, named = all_x[:count], some_bias if count == counts[0] else None, f"{count} × {hidden}, {form}"
        if is_widened or form.values == "e2m1":  # which a layer is without the constant scale of its inputs
            yield _example("coded_matmul", named, x, pack_words(weight), bias)
        if not is_widened and form.values == "e2m1":
            largest = _fp4_scale(inputs)
            yield Example("round_fp4", named, partial(_round_fp4, x, largest))
            yield _example("fp4_matmul", named, x, pack_fp4(replace(weight, global_scale=largest)), bias)
        elif not is_widened:
            rounding = RowRounding(typed_codes(weight).dtype, weight.scales.shape[1])
            for operation in ("round_rows", "rms_norm_rounded", "add_rms_norm_rounded", "act_mul_rounded"):
                yield Example(operation, named, partial(_round, operation, x, rounding))
            yield _example("rounded_matmul", named, x, typed_codes(weight), weight.scales, bias)


def quantized_experts(
    inputs: Inputs,
    form: QuantizedFormat,
    counts: Sequence[int],
    sizes: tuple[int, int, int, int],
    capability: tuple[int, int] | None = None,
    *,
    gated: bool = True,
) -> Iterator[Example]:
    """The same for experts; `sizes` are as in `fused_experts`."""
    is_widened, (experts, top_k, hidden, inner) = _is_widened(form, inputs.device, capability), sizes
    all_x, all_chosen = inputs.normal(max(counts), hidden), _chosen(inputs, max(counts), experts, top_k)
    activation = "silu" if gated else "relu2"
    stacks = _random_experts(inputs, form, (experts, hidden, inner), all_x, all_chosen, activation)
    for count in counts:
        x, chosen, named = all_x[:count], [each[:count] for each in all_chosen], f"{count} tokens, {sizes}, {form}"
        if is_widened or form.values == "e2m1":
            words = map(pack_words, stacks)
            yield _example("coded_fused_experts", named, x, *chosen, *words, activation, gated=gated)
        if not is_widened and form.values == "e2m1":
            scaled = (replace(each, global_scale=_fp4_scale(inputs).expand(experts)) for each in stacks)
            yield _example("fp4_fused_experts", named, x, *chosen, *map(pack_fp4, scaled), activation)
        elif not is_widened:
            parts = [part for each in stacks for part in (typed_codes(each), each.scales)]
            codes, scales = coded_words.round_rows(x, parts[0].dtype, parts[1].shape[2])
            before: dict[str, Any] = {"x_scales": scales, "dtype": x.dtype}
            for rows, options in ((x, {}), (codes, before)):
                yield _example("rounded_fused_experts", named, rows, *chosen, *parts, activation, **options)


def _fp4_scale(inputs: Inputs) -> Tensor:
    """A scale with which some inputs are cut off."""
    return torch.full((), 6.0 * 448 / 3, device=inputs.device)


def _round_fp4(x: Tensor, global_scale: Tensor, module: Any) -> Any:
    codes, scales = module.round_fp4(x, global_scale)
    return scales.float(), fp4.widen_fp4(codes, scales)


def _round(operation: str, x: Tensor, rounding: RowRounding, module: Any) -> Any:
    if operation == "round_rows":
        return _rounded_as(x, *module.round_rows(x, *rounding))
    if operation == "act_mul_rounded":
        both = torch.cat((x, x.flip(0)), dim=1)
        gated = _rounded_as(reference.act_mul(both, "silu"), *module.act_mul_rounded(both, "silu", *rounding))
        plain = reference.activate(x, "relu2")
        return *gated, *_rounded_as(plain, *module.act_mul_rounded(x, "relu2", *rounding, gated=False))
    weight, kept = x[0].abs() + 0.5, torch.empty_like(x)
    if operation == "rms_norm_rounded":
        plain = reference.rms_norm(x, weight, 1e-6, 1.0)
        alone = _rounded_as(plain, *module.rms_norm_rounded(x, weight, 1e-6, 1.0, *rounding))
        return *alone, *_rounded_as(plain, *module.rms_norm_rounded(x, weight, 1e-6, 1.0, *rounding, kept)), kept
    plain, _ = reference.add_rms_norm(x, x.flip(0), weight, 1e-6)
    alone = _rounded_as(plain, *module.add_rms_norm_rounded(x, x.flip(0), weight, 1e-6, 0.0, *rounding)[:2])
    codes, scales, total = module.add_rms_norm_rounded(x, x.flip(0), weight, 1e-6, 0.0, *rounding, kept)
    return *alone, *_rounded_as(plain, codes, scales), total, kept


def _rounded_as(plain: Tensor, codes: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """The scales of rounded rows, and whether each row is `plain` but for the rounding. Numbers near the middle between
    two codes may become either."""
    size = coded_words.ROUNDED_GROUP if scales.shape[1] > 1 else plain.shape[1]
    wide, exact = scales.repeat_interleave(size, dim=1)[:, : plain.shape[1]], plain.float()
    half = wide / 2 if codes.dtype == torch.int8 else torch.maximum(exact.abs() / 16, wide * 2**-10)
    allowed = 1.01 * half + 8 * torch.finfo(plain.dtype).eps * exact.abs()
    return scales, ((codes.float() * wide - exact).abs() <= allowed).all(dim=1)


def packed_matmuls(inputs: Inputs) -> Iterator[Example]:
    """The operations of `packed` and of `quantized`, at one small size. Packed inputs are packed by the reference."""
    x, weight, bias, dtype = inputs.normal(5, 96), inputs.normal(70, 96), inputs.normal(70), inputs.dtype
    yield _example("quantize_rows", "", x)
    yield _example("quantize_weight", "", weight)
    by_column = bias[:1].expand(96).contiguous()
    scales = inputs.uniform(5)
    yield Example("scale_rows", "", lambda module: module.scale_rows(x.clone(), scales, by_column, dtype))
    for gated in (False, True):
        yield _example("pack_tiles", "", weight, 2 if dtype == torch.bfloat16 else 1, gated)
        yield _example("pack_int8_tiles", "", weight, gated)
    yield _example("pack_int4_tiles", "", weight, 32)
    yield _example("int8_linear", "", x, *packed.pack_int8_tiles(weight), bias, 70)
    yield _example("int4_linear", "", x, packed.pack_int4_tiles(weight, 32), bias, 70)
    pool = low_rank_pool(inputs, 96, (35, 35), (3, 16, 0), has_scale=True)
    adapters = pool, AdapterRows.of(inputs.tensor(1, -1, 0, 2, 0), 3)
    per_word = 2 if dtype == torch.bfloat16 else 1
    for of_weight in (
        packed.pack_int8_tiles(weight, True),
        (packed.pack_int4_tiles(weight, 32, True), None),
        (packed.pack_tiles(weight, per_word, True), None),
    ):
        yield _example("gated_low_rank", "", x, *of_weight, None, 35, "silu", *adapters)
    chosen = _chosen(inputs, 5, 3, 2)
    for values, group in (("int4", 32), ("nf4", 32), ("fp8", 32), ("int8", 0), ("uint8", 32)):
        form = QuantizedFormat(values, group, has_offsets=group > 0)
        one = random_weight(inputs, form, 70, 96)
        for activation in ("", "silu"):
            tiles = quantized.pack_coded(one, bool(activation))
            given = (None, 35) if activation else (bias, 70)
            kind = values, tiles.group, tiles.factors, activation
            yield _example("coded_linear", values, x, tiles.tiles, tiles.scales, *given, *kind)
        up, down = _random_experts(inputs, form, (3, 96, 48), x, chosen)
        first, second = quantized.stack_coded(up, True), quantized.stack_coded(down)
        yield _example(
            "coded_experts",
            values,
            x,
            *chosen,
            first.tiles,
            first.scales,
            None,
            second.tiles,
            second.scales,
            None,
            "silu",
            values,
            first.group,
            first.factors,
            second.group,
            second.factors,
        )
    codes, factors = inputs.integers(0, 16, *weight.shape, dtype=torch.uint8), inputs.normal(2, 70, 3).float()
    for given in ((None, None, 8, 8, False, True), (*factors, 32, 8, True), (*factors, 32, 4, False)):
        yield _example("pack_coded_tiles", "", codes, *given)
    stacks = inputs.normal(3, 96, 96) / 10, inputs.normal(3, 96, 48) / 7
    for stored in (dtype, torch.bfloat16, torch.float16) if dtype == torch.float32 else (dtype,):
        per_word = 2 if stored == torch.bfloat16 else 1
        yield _example("tiled_linear", f"{stored}", x, packed.pack_tiles(weight.to(stored), per_word), bias, 70)
        tiles_of_both = [
            torch.stack([packed.pack_tiles(expert, per_word, gated) for expert in stack.to(stored)])
            for stack, gated in zip(stacks, (True, False), strict=True)
        ]
        parts = [part for each in tiles_of_both for part in (each, None, None)]
        yield _example("packed_experts", f"{stored}", x, *chosen, *parts, "silu")
