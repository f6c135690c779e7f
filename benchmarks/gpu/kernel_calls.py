"""Calls of every kernel, at small odd sizes and at the sizes of models."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from quire.kernels import AttentionLayer, QuantizedFormat, examples
from quire.kernels.cache import LARGEST
from quire.kernels.examples import Example, Inputs
from quire.kernels.quantized import VALUES

MAIN = torch.bfloat16
"""The main type; the others are checked at fewer sizes, because each variant takes a second to compile."""
HEADS = ((32, 8, 128), (64, 8, 128), (16, 8, 256), (32, 32, 64))
"""Query heads, KV heads and head sizes of models."""
Requests = list[tuple[int, int]]
"""Tokens before and in this step."""


def calls(device: torch.device, dtype: torch.dtype, *, tiny: bool) -> Iterator[Example]:
    """Yield all calls; the inputs of a call are created when it is reached."""
    inputs = Inputs(device, dtype, torch.Generator(device).manual_seed(0))
    yield from _elementwise(inputs, 3, (200, 72), 80)
    small = [(37, 1), (0, 20), (583, 17), (18, 1)]
    yield from _attention(inputs, small, [(6, 2, 80)], (8, 1, 96))
    yield from _selection(inputs, small, (6, 80), 24)
    yield from examples.hyper_connections(inputs, 5, 72, iterations=20)
    yield examples.compression(inputs, [(36, 1), *small[1:]], (20, 4, 2), rotary_dim=10)
    yield from _experts(inputs, 5, (5, 2, 200, 48))
    yield from examples.low_rank(inputs, 21, 200, (72, 40), (3, 0, 16, 1, 35))
    yield from _quantized(inputs, [5], (5, 2, 256, 128))
    yield from examples.recurrent(inputs, 10, (2, 6, 80), state_size=16)
    if dtype == torch.float32:
        yield from _sampling(inputs, 5, 999)
    if tiny:
        return
    for tokens in (1, 64, 8192):
        yield from _elementwise(inputs, tokens, (4096, 14336), 128)
    heads = list(HEADS if dtype == MAIN else HEADS[:1])
    decodes = [(1000 + 13 * number, 1) for number in range(64)]
    mixed = [(0, 700), (900, 1), (3000, 1), (500, 300), (4000, 1)]
    for requests in (decodes, mixed):
        yield from _attention(inputs, requests, heads, (32, 1, 576))
        yield from _selection(inputs, requests, (64, 128), 2048)
        for entry in ((512, 4, 2), (128, 4, 2), (512, 128, 1)):
            yield examples.compression(inputs, requests, entry, rotary_dim=64)
    yield from _experts(inputs, 64, (8, 2, 4096, 1792))
    yield from _experts(inputs, 2048, (64, 6, 2048, 1408))
    for rows, ranks in ((32, [16] * 32), (64, [8, 64, 12, 16]), (2048, [16, 64, 3])):
        for in_features, widths in ((4096, (4096, 1024, 1024)), (14336, (4096,))):
            yield from examples.low_rank(inputs, rows, in_features, widths, ranks)
    yield from _quantized(inputs, [1, 64, 2048], (8, 2, 4096, 1792))
    for tokens in (64, 1003):
        yield from examples.hyper_connections(inputs, tokens, 4096, iterations=20)
    for tokens in (3, 128, 4096):
        yield from examples.recurrent(inputs, tokens, (16, 32, 128), state_size=16)
    if dtype == torch.float32:
        yield from _sampling(inputs, 64, 128_256)


def _elementwise(inputs: Inputs, tokens: int, sizes: tuple[int, int], head_dim: int) -> Iterator[Example]:
    hidden, inner = sizes
    yield from examples.norms(inputs, tokens, hidden)
    for name in ("silu", "gelu_tanh") if inputs.dtype == MAIN else ("silu",):
        yield examples.activation(inputs, tokens, inner, name)
    for cache_dtype in (inputs.dtype, *LARGEST):  # three quarters of each head are rotated
        yield examples.cache_write(inputs, tokens, (32, 8, head_dim), head_dim * 3 // 4, cache_dtype)


def _attention(
    inputs: Inputs, requests: Requests, heads: list[tuple[int, int, int]], latent: tuple[int, int, int]
) -> Iterator[Example]:
    layers = [AttentionLayer(*each, each[2] ** -0.5) for each in heads]
    for layer in layers:
        yield examples.attention(inputs, requests, layer)
    options = replace(layers[0], window=128, softcap=30.0, has_sinks=True, has_alibi=True)
    yield examples.attention(inputs, requests, options)
    yield examples.attention(inputs, requests, AttentionLayer(*latent, latent[2] ** -0.5, is_mla=True))
    for cache_dtype in LARGEST:
        yield examples.attention(inputs, requests, layers[0], cache_dtype)
    yield from examples.int4_cache(inputs, requests, layers[0])


def _selection(inputs: Inputs, requests: Requests, heads: tuple[int, int], top_k: int) -> Iterator[Example]:
    """`heads` are query heads and the head size."""
    count, dim = heads
    blocks = 32, max(2, top_k // 32), 1
    yield from examples.selection(inputs, requests, heads, [(top_k, 1)], [blocks])
    latent = AttentionLayer(count, 1, dim, dim**-0.5, is_mla=True)
    yield examples.sparse_attention(inputs, requests, latent, top_k)


def _experts(inputs: Inputs, tokens: int, sizes: tuple[int, int, int, int]) -> Iterator[Example]:
    experts, top_k, *_ = sizes
    yield examples.fused_experts(inputs, tokens, sizes)
    yield examples.route(inputs, tokens, experts, top_k, "softmax", renormalize=True)
    yield examples.route(inputs, tokens, experts, top_k, "sigmoid", has_bias=True)


def _quantized(inputs: Inputs, counts: list[int], sizes: tuple[int, int, int, int]) -> Iterator[Example]:
    """Matmuls and experts of weights in few bits: of one kind of 4 bits and one of 8, or all in the main type."""
    _, _, hidden, inner = sizes
    forms = [
        QuantizedFormat(values, 128 if len(VALUES[values]) == 16 else 0, has_offsets=values.startswith("uint"))
        for values in (VALUES if inputs.dtype == MAIN else ("uint4", "fp8"))
    ]
    forms += [replace(form, has_order=True) for form in forms if form.values == "uint4"]
    forms += [replace(form, has_rounding=True) for form in forms if form.values == "int8"]
    for values, group in (("int8", 0), ("fp8", 0), ("fp8", 128), ("e2m1", 16)):
        forms.append(QuantizedFormat(values, group, rounds_inputs=True))
    for form in forms:
        yield from examples.quantized_matmuls(inputs, form, counts, hidden, 2 * inner)
        yield from examples.quantized_experts(inputs, form, counts, sizes)


def _sampling(inputs: Inputs, rows: int, vocabulary: int) -> Iterator[Example]:
    for controls in ({"temperature": 0.0}, {}, {"top_p": 0.9}, {"top_k": 50, "top_p": 0.95}, {"min_p": 0.05}):
        yield examples.sample(inputs, rows, vocabulary, **controls)
    yield from examples.on_logits(inputs, rows, vocabulary, longest=290, num_top=20)
