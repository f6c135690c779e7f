"""Calls of every kernel, at small odd sizes and at the sizes of models."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, get_args, get_type_hints

import numpy as np
import torch
from torch import Tensor

from quire import kernels
from quire.engine.config.options import EngineOptions
from quire.kernels import fp4, reference
from quire.kernels.cache import FP8_CAPABILITY
from quire.kernels.check import rounds, tolerance
from quire.kernels.coded_words import RowRounding, pack_words
from quire.kernels.quantized import VALUES, QuantizedWeight

BLOCK = 16
MAIN = torch.bfloat16
"""The main type; the others are checked at fewer sizes, because each variant takes a second to compile."""
HEADS = ((32, 8, 128), (64, 8, 128), (16, 8, 256), (32, 32, 64))
"""Query heads, KV heads and head sizes of models."""
_SLOTS_AT_ONCE = 1 << 16
Call = Callable[[Any], Any]
"""Calls an operation of the given module on fixed inputs; returns the result to compare."""
Named = tuple[str, str, Call]
"""Operation, its sizes, and the call."""


@dataclass(frozen=True)
class Case:
    """The arguments of paged attention."""

    query: Tensor
    cache: Tensor
    tables: Tensor
    lengths: Tensor
    starts: Tensor
    host: kernels.HostMetadata
    options: dict[str, Any]

    def call(self, module: Any) -> Tensor:
        """Call the module's operation; the public one also gets the host's numbers, as from a model."""
        batch = (self.query, self.cache, self.tables, self.lengths, self.starts, self.query.shape[2] ** -0.5)
        options = self.options | ({"host": self.host} if module is kernels else {})
        return module.paged_attention(*batch, **options)  # type: ignore[no-any-return]


def attention_case(
    requests: list[tuple[int, int]],
    heads: tuple[int, int, int],
    dtype: torch.dtype,
    device: torch.device,
    *,
    cache_dtype: torch.dtype | None = None,
    num_tensors: int = 2,
    **options: Any,
) -> Case:
    """`requests` are tokens before and in this step; `heads` are query heads, KV heads and the head size."""
    query_heads, kv_heads, head_dim = heads
    counts, lengths = np.array([new for _, new in requests]), np.array([sum(request) for request in requests])
    width = -(-int(lengths.max()) // BLOCK)
    blocks = len(requests) * width
    cache_dtype = cache_dtype or dtype
    cache = kernels.allocate_kv_cache(
        1, blocks, kv_heads, BLOCK, head_dim, cache_dtype, device, num_tensors=num_tensors
    )[0]
    if cache_dtype == dtype:
        cache.normal_()
    else:  # a row includes its scale
        for slots in torch.split(torch.arange(blocks * BLOCK, device=device), _SLOTS_AT_ONCE):
            keys, values = (torch.randn(len(slots), kv_heads, head_dim, device=device).to(dtype) for _ in range(2))
            reference.write_kv(keys, values if num_tensors == 2 else None, cache, slots)
    return Case(
        torch.randn(int(counts.sum()), query_heads, head_dim, device=device, dtype=dtype),
        cache if num_tensors == 2 else cache.expand(2, -1, -1, -1, -1),
        torch.randperm(blocks, device=device).view(len(requests), width),
        torch.from_numpy(lengths).to(device),
        torch.from_numpy(np.concatenate(([0], counts.cumsum()))).to(device),
        kernels.HostMetadata(counts, lengths, {}),
        options,
    )


def sampler_arguments(rows: int, vocabulary: int, device: torch.device, **controls: float) -> tuple[Tensor, ...]:
    """The arguments of `kernels.sample`: logits on the device, the others on the host, pinned if that is a GPU."""
    chosen = {"temperature": 0.8, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | controls
    columns = [
        torch.full((rows,), value, dtype=torch.int64 if name == "top_k" else torch.float32)
        for name, value in chosen.items()
    ]
    hosts = [*columns, torch.arange(rows), torch.arange(rows)]
    if device.type == "cuda":
        hosts = [host.pin_memory() for host in hosts]
    return (torch.randn(rows, vocabulary, device=device) * 3, *hosts)


def calls(device: torch.device, dtype: torch.dtype, *, tiny: bool) -> Iterator[Named]:
    """Yield all calls; the inputs of a call are created when it is reached."""
    yield from _elementwise(device, dtype, 3, (200, 72), 80)
    yield from _attention(device, dtype, [(37, 1), (0, 20), (583, 17), (18, 1)], [(6, 2, 80)], (8, 1, 96))
    yield from _selection(device, dtype, [(37, 1), (0, 20), (583, 17), (18, 1)], (6, 80), 24)
    yield from _deepseek_v4(device, dtype, [(36, 1), (0, 20), (583, 17), (18, 1)], 72, (20, 4))
    yield from _experts(device, dtype, 5, (5, 2, 200, 48))
    yield from _quantized(device, dtype, 5, (5, 2, 256, 128))
    yield from _recurrent(device, dtype, 5, (2, 6, 80))
    if dtype == torch.float32:
        yield from _sampling(device, 5, 999)
    if tiny:
        return
    for tokens in (1, 64, 8192):
        yield from _elementwise(device, dtype, tokens, (4096, 14336), 128)
    heads = list(HEADS if dtype == MAIN else HEADS[:1])
    decodes = [(1000 + 13 * number, 1) for number in range(64)]
    mixed = [(0, 700), (900, 1), (3000, 1), (500, 300), (4000, 1)]
    for requests in (decodes, mixed):
        yield from _attention(device, dtype, requests, heads, (32, 1, 576))
        yield from _selection(device, dtype, requests, (64, 128), 2048)
        for entries in ((512, 4), (128, 4), (512, 128)):
            yield from _deepseek_v4(device, dtype, requests, 4096, entries)
    yield from _experts(device, dtype, 64, (8, 2, 4096, 1792))
    yield from _experts(device, dtype, 2048, (64, 6, 2048, 1408))
    for tokens in (1, 64, 2048):
        yield from _quantized(device, dtype, tokens, (8, 2, 4096, 1792))
        yield from _recurrent(device, dtype, tokens, (16, 32, 128))
    if dtype == torch.float32:
        yield from _sampling(device, 64, 128_256)


def _elementwise(
    device: torch.device, dtype: torch.dtype, tokens: int, sizes: tuple[int, int], head_dim: int
) -> Iterator[Named]:
    hidden, inner = sizes
    x, residual = (torch.randn(tokens, hidden, device=device, dtype=dtype) for _ in range(2))
    weight = torch.rand(hidden, device=device, dtype=dtype)
    yield "rms_norm", f"{tokens} × {hidden}", lambda module: module.rms_norm(x, weight, 1e-6)
    yield "add_rms_norm", f"{tokens} × {hidden}", lambda module: module.add_rms_norm(x, residual, weight, 1e-6)
    gates = torch.randn(tokens, 2 * inner, device=device, dtype=dtype)
    for activation in ("silu", "gelu_tanh") if dtype == MAIN else ("silu",):
        yield "act_mul", f"{tokens} × {inner}, {activation}", _activation(gates, activation)
    for cache_dtype in (dtype, *quantized_caches().values()):
        of = f"{tokens} tokens, heads of {head_dim}, {str(cache_dtype)[6:]} cache"
        yield "rotary_write_kv", of, _write(device, dtype, cache_dtype, tokens, head_dim)


def _activation(gates: Tensor, name: str) -> Call:
    return lambda module: module.act_mul(gates, name)


def _write(device: torch.device, dtype: torch.dtype, cache_dtype: torch.dtype, tokens: int, head_dim: int) -> Call:
    """Rotates three quarters of each head. The cache is compared after dequantization, as attention reads it."""
    qkv = torch.randn(tokens, 48, head_dim, device=device, dtype=dtype)
    angles = torch.randn(tokens, head_dim * 3 // 8, device=device)
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1)
    blocks = -(-tokens // BLOCK) + 1
    slots = torch.randperm(blocks * BLOCK, device=device)[:tokens]
    table = torch.arange(blocks, device=device)

    def call(module: Any) -> Any:
        cache = kernels.allocate_kv_cache(1, blocks, 8, BLOCK, head_dim, cache_dtype, device)[0]
        query, key, value = qkv.clone().split_with_sizes([32, 8, 8], dim=1)
        rotated = module.rotary_write_kv(query, key, value, cos_sin, cache, slots)
        if cache_dtype == dtype:
            return rotated, cache
        # A value between two of the cache's numbers may round to either, so a difference of one step is allowed.
        read = [reference.read_kv(side, table, blocks * BLOCK, torch.float32) for side in cache]
        apart = 1 / 127 if cache_dtype == torch.int8 else 1 / 8
        return rotated, *(
            side / side.abs().amax().clamp(min=1) * (tolerance("rotary_write_kv", dtype) / apart) for side in read
        )

    return call


def _attention(
    device: torch.device,
    dtype: torch.dtype,
    requests: list[tuple[int, int]],
    heads: list[tuple[int, int, int]],
    latent: tuple[int, int, int],
) -> Iterator[Named]:
    count = len(requests)
    for sizes in heads:
        yield _attends(f"{count} requests, heads {sizes}", attention_case(requests, sizes, dtype, device))
    per_head = torch.randn(heads[0][0], device=device)
    options: dict[str, Any] = {"window": 128, "softcap": 30.0, "sinks": per_head, "slopes": per_head.abs() / 100}
    case = attention_case(requests, heads[0], dtype, device, **options)
    yield _attends(f"{count} requests, {', '.join(options)}, heads {heads[0]}", case)
    case = attention_case(requests, latent, dtype, device, num_tensors=1)
    yield _attends(f"{count} requests, latent, heads {latent}", case)
    for name, cache_dtype in quantized_caches().items():
        case = attention_case(requests, heads[0], dtype, device, cache_dtype=cache_dtype)
        yield _attends(f"{count} requests, {name} cache, heads {heads[0]}", case)


def _selection(
    device: torch.device, dtype: torch.dtype, requests: list[tuple[int, int]], heads: tuple[int, int], top_k: int
) -> Iterator[Named]:
    """`heads` are query heads and the head size."""
    count, dim = heads
    case = attention_case(requests, (count, 1, dim), dtype, device, num_tensors=1)
    # Whole numbers have exact scores, whose order does not depend on rounding.
    query, keys = (case.query * 2).round(), (case.cache[:1] * 2).round()
    weights = torch.randint(-4, 5, query.shape[:2], device=device).float()
    where = case.tables, case.lengths, case.starts
    named = f"{len(requests)} requests, {count} heads of {dim}, {top_k} tokens"
    yield "select_tokens", named, lambda module: module.select_tokens(query, weights, keys, *where, top_k)
    size, blocks = 32, max(2, top_k // 32)
    named_blocks = f"{len(requests)} requests, {count} heads of {dim}, {blocks} blocks of {size} tokens"
    yield "select_blocks", named_blocks, lambda module: module.select_blocks(query, keys, *where, size, blocks, 1)
    slots = torch.randint(keys.shape[1] * BLOCK, (len(query), top_k), device=device)
    counts = torch.randint(1, top_k + 1, (len(query),), device=device)
    yield (
        "sparse_attention",
        named,
        lambda module: module.sparse_attention(case.query, case.cache, slots, counts, dim**-0.5),
    )


def _deepseek_v4(
    device: torch.device, dtype: torch.dtype, requests: list[tuple[int, int]], hidden: int, entries: tuple[int, int]
) -> Iterator[Named]:
    """`entries` are their size and the tokens of one. Those of few tokens are of the group before, too."""
    (size, ratio), streams = entries, 4
    width, rotary = size * (1 + (ratio <= 4)), min(64, size // 2)
    case = attention_case(requests, (1, 1, 2 * width), dtype, device, num_tensors=1)
    tokens, named = len(case.query), f"{len(requests)} requests, {size} features of {ratio} tokens"
    bias, weight = torch.randn(ratio, width, device=device), torch.randn(size, device=device).to(dtype)
    turns, slots = torch.randn(tokens, rotary, device=device), torch.arange(tokens, device=device)
    where = slots, case.tables, case.lengths, case.starts, case.tables.flip(1)

    def compress(module: Any) -> Tensor:
        cache = torch.zeros(1, case.tables.numel(), 1, 4, size, device=device, dtype=dtype)
        module.compress_tokens(case.cache[:1], bias, weight, 1e-6, turns, cache, *where)
        return cache

    yield "compress_tokens", named, compress
    x, output = (torch.randn(tokens, count * hidden, device=device).to(dtype) for count in (streams, 1))
    function = torch.randn(24, streams * hidden, device=device) / (streams * hidden) ** 0.5
    given = x, function, function[:, 0].contiguous(), function[0, :3].contiguous(), streams, 1e-6, 1e-6, 20
    named = f"{tokens} tokens, {streams} streams of {hidden}"
    yield "mhc_pre", named, lambda module: module.mhc_pre(*given)
    weights = reference.mhc_pre(*given)[1:]
    yield "mhc_post", named, lambda module: module.mhc_post(output, x, *weights)


def _attends(sizes: str, case: Case) -> Named:
    return "paged_attention", sizes, case.call


def quantized_caches() -> dict[str, torch.dtype]:
    """The values of `--kv-cache-dtype` that no model computes in, and the element type of the cache."""
    offered = get_args(get_type_hints(EngineOptions)["kv_cache_dtype"])
    types = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
    return {name: types[name] for name in offered if name in types}


def _experts(
    device: torch.device, dtype: torch.dtype, tokens: int, sizes: tuple[int, int, int, int]
) -> Iterator[Named]:
    experts, top_k, hidden, inner = sizes
    x = torch.randn(tokens, hidden, device=device, dtype=dtype)
    ids = torch.rand(tokens, experts, device=device).topk(top_k).indices
    shares = torch.rand(tokens, top_k, device=device)
    up = torch.randn(experts, 2 * inner, hidden, device=device, dtype=dtype) / hidden**0.5
    down = torch.randn(experts, hidden, inner, device=device, dtype=dtype) / inner**0.5
    of = f"{tokens} tokens, {top_k} of {experts} experts, {hidden} × {inner}"
    yield "fused_experts", of, lambda module: module.fused_experts(x, shares, ids, up, down, "silu")
    scores = torch.randn(tokens, experts, device=device)
    yield "route", of, lambda module: module.route(scores, top_k, "softmax", renormalize=True)
    bias = torch.randn(experts, device=device) / 10
    yield "route", f"{of}, biased", lambda module: module.route(scores, top_k, "sigmoid", correction_bias=bias)


def _recurrent(device: torch.device, dtype: torch.dtype, tokens: int, heads: tuple[int, int, int]) -> Iterator[Named]:
    """Two requests with `tokens` tokens each, one that begins and one that goes on; heads of keys and of values, and
    their size."""
    key_heads, value_heads, size = heads
    numbers = (0, tokens, 2 * tokens), (0, 1, 2), (-1, 1), (0, 1)
    segments, count = kernels.StateSegments(*(torch.tensor(each, device=device) for each in numbers)), 2 * tokens
    widths = [part * size for part in (key_heads, key_heads, value_heads)]
    mixed = torch.randn(count, sum(widths), device=device, dtype=dtype)
    weight = torch.randn(sum(widths), 4, device=device, dtype=dtype)
    inputs = torch.randn(2, 3, sum(widths), device=device, dtype=dtype)
    matrices = torch.randn(2, value_heads, size, size, device=device)
    query, key, value = (torch.unflatten(each, 1, (-1, size)) for each in mixed.split_with_sizes(widths, 1))
    decay, beta = -torch.rand(count, value_heads, device=device), torch.rand(count, value_heads, device=device)

    def convolve(module: Any) -> tuple[Tensor, Tensor]:
        kept = inputs.clone()
        return module.causal_conv(mixed, weight, None, kept, segments), kept

    def attend(module: Any) -> tuple[Tensor, Tensor]:
        kept = matrices.clone()
        return module.linear_attention(query, key, value, decay, beta, kept, segments, size**-0.5, 1e-6), kept

    channels, state_size = value_heads * size, 16
    # No rate is near 0: what never decays sums the errors of all steps.
    step, rates = torch.rand(count, channels, device=device), -0.1 - torch.rand(state_size, channels, device=device)

    def scan(module: Any) -> tuple[Tensor, Tensor]:
        kept = matrices.flatten()[: 2 * rates.numel()].view(2, 1, state_size, channels).clone()
        sides = query[:, 0, :state_size], query[:, 1, :state_size]
        return module.selective_scan(value.flatten(1), step, rates, *sides, kept, segments), kept

    named = f"2 × {tokens} tokens, {key_heads} and {value_heads} heads of {size}"
    yield "causal_conv", named, convolve
    yield "linear_attention", named, attend
    yield "selective_scan", f"2 × {tokens} tokens, {channels} channels", scan

    def weigh(module: Any) -> tuple[Tensor, Tensor]:
        kept = matrices.flatten()[: 6 * channels].view(2, 1, 3, channels).abs()
        keys = value.flatten(1)
        return module.wkv(keys, keys, rates[0], rates[1], kept, segments), kept

    yield "wkv", f"2 × {tokens} tokens, {channels} channels", weigh


def _quantized(
    device: torch.device, dtype: torch.dtype, tokens: int, sizes: tuple[int, int, int, int]
) -> Iterator[Named]:
    """Matmuls and experts of weights in few bits: of one kind of 4 bits and one of 8, or all in the main type."""
    experts, top_k, hidden, inner = sizes
    x = torch.randn(tokens, hidden, device=device, dtype=dtype)
    chosen = torch.rand(tokens, top_k, device=device), torch.rand(tokens, experts, device=device).topk(top_k).indices
    of = f"{tokens} tokens, {hidden} × {inner}"
    for values in VALUES if dtype == MAIN else ("uint4", "fp8"):
        stacks = [
            random_stack(values, size, device, dtype)
            for size in ((experts, 2 * inner, hidden), (experts, hidden, inner))
        ]
        packed = [pack_words(stack) for stack in stacks]
        if values in ("uint4", "int8"):
            changed = [pack_words(_ordered(stack) if values == "uint4" else _static(stack)) for stack in stacks]
            named = f"{of}, {values}, {'act order' if values == 'uint4' else 'static scales'}"
            yield "coded_matmul", named, _multiplies("coded_matmul", x, changed[0].at(0))
            yield "coded_fused_experts", named, _multiplies("coded_fused_experts", x, *chosen, *changed, "silu")
        yield "coded_matmul", f"{of}, {values}", _multiplies("coded_matmul", x, packed[0].at(0))
        yield "coded_fused_experts", f"{of}, {values}", _multiplies("coded_fused_experts", x, *chosen, *packed, "silu")
    has_fp8 = device.type != "cuda" or torch.cuda.get_device_capability(device) >= FP8_CAPABILITY
    for kind, groups in ((torch.int8, 1), (torch.float8_e4m3fn, 1), (torch.float8_e4m3fn, 128))[: 3 if has_fp8 else 1]:
        rounded: list[Tensor] = []
        for out, inputs in ((2 * inner, hidden), (hidden, inner)):
            codes = (torch.randn(experts, out, inputs, device=device) * 32).clamp(-127, 127).to(kind)
            count = 1 if groups == 1 else -(-inputs // groups)
            rounded += [codes, (torch.rand(experts, out, count, device=device) + 0.1) / 32 / inputs**0.5]
        named = f"{of}, {str(kind)[6:]}, groups of {groups if groups > 1 else 'all'} inputs"
        for operation in ("round_rows", "rms_norm_rounded", "add_rms_norm_rounded", "act_mul_rounded"):
            rounding = RowRounding(kind, rounded[1].shape[2])
            yield operation, named, functools.partial(rounds, operation, x, rounding)
        yield "rounded_matmul", named, _multiplies("rounded_matmul", x, rounded[0][0], rounded[1][0])
        yield "rounded_fused_experts", named, _multiplies("rounded_fused_experts", x, *chosen, *rounded, "silu")
    if device.type != "cuda" or torch.cuda.get_device_capability(device) >= fp4.FP4_CAPABILITY:
        global_scales = torch.rand(experts, device=device) * 448 + 448
        both = [
            fp4.pack_fp4(replace(random_stack("e2m1", size, device, dtype, 16), global_scale=global_scales))
            for size in ((experts, 2 * inner, hidden), (experts, hidden, inner))
        ]
        one = both[0].at(0)
        yield "round_fp4", of, functools.partial(_round_fp4, x, one.global_scale)
        yield "fp4_matmul", of, _multiplies("fp4_matmul", x, one)
        yield "fp4_fused_experts", of, _multiplies("fp4_fused_experts", x, *chosen, *both, "silu")


def _round_fp4(x: Tensor, global_scale: Tensor, module: Any) -> Any:
    codes, scales = module.round_fp4(x, global_scale)
    return scales.float(), fp4.widen_fp4(codes, scales)


def _ordered(stack: QuantizedWeight) -> QuantizedWeight:
    """With each expert's columns in an order of their own."""
    experts, _, inputs = stack.codes.shape
    return replace(stack, columns=torch.rand(experts, inputs, device=stack.codes.device).argsort())


def _static(stack: QuantizedWeight) -> QuantizedWeight:
    """With a static scale of the inputs."""
    rounding = torch.tensor([1 / 32, 3.0], device=stack.codes.device)
    return replace(stack, rounding=rounding.expand(len(stack.codes), 2))


def random_stack(
    values: str, shape: tuple[int, int, int], device: torch.device, dtype: torch.dtype, group: int = 128
) -> QuantizedWeight:
    """Weights `[experts, out, in]` of about 1 / sqrt(in), in groups if their codes have 4 bits."""
    table = VALUES[values].nan_to_num()
    codes = torch.randint(len(table), shape, dtype=torch.uint8, device=device)
    if values == "fp8":
        codes.masked_fill_((codes & 0x7F) == 0x7F, 0)  # NaN
    groups = max(1, shape[2] // group) if len(table) == 16 else 1
    scales = (torch.rand(*shape[:2], groups, device=device) + 0.5) / table.abs().max() / shape[2] ** 0.5
    offsets = torch.full_like(scales, -float(table.mean())) if values.startswith("uint") else None
    return QuantizedWeight(values, dtype, codes, scales, offsets)


def _multiplies(operation: str, *arguments: Any) -> Call:
    return lambda module: getattr(module, operation)(*arguments)


def _sampling(device: torch.device, rows: int, vocabulary: int) -> Iterator[Named]:
    for controls in ({"temperature": 0.0}, {}, {"top_p": 0.9}, {"top_k": 50, "top_p": 0.95}, {"min_p": 0.05}):
        arguments = sampler_arguments(rows, vocabulary, device, **controls)
        named = ", ".join(f"{name} {value}" for name, value in controls.items())
        yield "sample", f"{rows} × {vocabulary}, {named or 'plain'}", _draw(arguments)
    masks = torch.randint(-(2**31), 2**31, (rows, -(-vocabulary // 32)), device=device).int()
    logits, numbers = torch.randn(rows, vocabulary, device=device), torch.arange(rows, device=device)

    def mask(module: Any) -> Tensor:
        masked = logits.clone()
        module.apply_bitmask(masked, numbers, masks)
        return masked.nan_to_num(neginf=-1e4)

    yield "apply_bitmask", f"{rows} × {vocabulary}", mask
    tokens = torch.randint(vocabulary, (rows,), device=device)
    yield "score_tokens", f"{rows} × {vocabulary}", lambda module: module.score_tokens(logits, tokens, 20)
    reported = torch.randint(vocabulary, (rows, 300), device=device, dtype=torch.int32)
    spans = torch.tensor([0, 200, 290], device=device) + 300 * numbers[:, None]
    factors = torch.tensor([1.2, 0.5, 0.25], device=device).expand(rows, 3).contiguous()

    def penalize(module: Any) -> Tensor:
        changed = logits.clone()
        module.penalize(changed, reported.flatten(), numbers, spans, factors, 290)
        return changed

    yield "penalize", f"{rows} × {vocabulary}", penalize


def _draw(arguments: tuple[Tensor, ...]) -> Call:
    logits, *hosts = arguments
    return lambda module: module.sample(logits.clone(), *hosts)
