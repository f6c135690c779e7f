"""Hyper-connections: the products of some tokens with some features of the function, of which there are enough to keep
a GPU's memory busy with a single token; then a program for each token and some features of the layer's input.

The summation of a token's products does not depend on other tokens.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_TOKENS, _PART, _STEP = 16, 512, 64
"""Tokens and features of a program that computes products, and features that it reads at once."""
_BLOCK = 1024
"""Features of a program that reads or writes streams."""


@triton.jit(do_not_specialize=["tokens"])
def _mhc_products_kernel(
    x,
    function,
    products,
    tokens,
    width,
    FUNCTIONS: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    PART: tl.constexpr,
    STEP: tl.constexpr,
):
    """Products of some features with all rows of the function, and the sum of their squares as the last one."""
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    row, begin = tl.arange(0, ROWS), tl.program_id(1) * PART
    total, squares = tl.zeros([TOKENS, ROWS], tl.float32), tl.zeros([TOKENS], tl.float32)
    for start in range(begin, tl.minimum(begin + PART, width), STEP):
        column = start + tl.arange(0, STEP)
        inside = (column < width)[None, :]
        at = x + token[:, None] * width + column[None, :]
        values = tl.load(at, mask=(token < tokens)[:, None] & inside, other=0.0).to(tl.float32)
        at = function + row[:, None] * width + column[None, :]
        factors = tl.load(at, mask=(row < FUNCTIONS)[:, None] & inside, other=0.0)
        total += tl.dot(values, tl.trans(factors), input_precision="ieee")
        squares += tl.sum(values * values, axis=1)
    to = products + (tl.program_id(1) * tokens + token) * (FUNCTIONS + 1)
    tl.store(to[:, None] + row[None, :], total, mask=(token < tokens)[:, None] & (row < FUNCTIONS)[None, :])
    tl.store(to + FUNCTIONS, squares, mask=token < tokens)


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit(do_not_specialize=["tokens"])
def _mhc_read_kernel(
    x,
    products,
    base,
    scale,
    read,
    outputs,
    mixed,
    tokens,
    hidden,
    parts,
    norm_eps,
    eps,
    iterations,
    magnitude,
    output_eps,
    KINDS: tl.constexpr,
    FUNCTIONS: tl.constexpr,
    STREAMS: tl.constexpr,
    PLACES: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Some features of what a layer reads of a token's streams; the first program stores the weights for `mhc_post`."""
    token, part, place = tl.program_id(0).to(tl.int64), tl.arange(0, PARTS), tl.arange(0, PLACES)
    rows, is_part, is_stream = products + (part * tokens + token) * (FUNCTIONS + 1), part < parts, place < STREAMS
    squares = tl.sum(tl.load(rows + FUNCTIONS, mask=is_part, other=0.0), axis=0)
    factor = tl.rsqrt(squares / (STREAMS * hidden) + norm_eps)
    both = is_part[:, None] & is_stream[None, :]
    reads = tl.sum(tl.load(rows[:, None] + place[None, :], mask=both, other=0.0), axis=0)
    reads = reads * factor * tl.load(scale) + tl.load(base + place, mask=is_stream, other=0.0)
    if KINDS > 1:
        writes = tl.sum(tl.load(rows[:, None] + STREAMS + place[None, :], mask=both, other=0.0), axis=0)
        writes = writes * factor * tl.load(scale + 1) + tl.load(base + STREAMS + place, mask=is_stream, other=0.0)
        writes = magnitude * _sigmoid(writes) + output_eps
        if tl.program_id(1) == 0:
            tl.store(outputs + token * STREAMS + place, writes, mask=is_stream)
    if KINDS > 2:
        number = 2 * STREAMS + place[:, None] * STREAMS + place[None, :]
        is_number = is_stream[:, None] & is_stream[None, :]
        every = is_part[:, None, None] & is_number[None, :, :]
        mixing = tl.sum(tl.load(rows[:, None, None] + number[None, :, :], mask=every, other=0.0), axis=0)
        mixing = mixing * factor * tl.load(scale + 2) + tl.load(base + number, mask=is_number, other=0.0)
        mixing = tl.where(is_number, mixing, float("-inf"))
        mixing = tl.exp(mixing - tl.where(is_stream, tl.max(mixing, axis=1), 0.0)[:, None])
        mixing = tl.where(is_number, mixing / tl.where(is_stream, tl.sum(mixing, axis=1), 1.0)[:, None] + eps, 0.0)
        mixing = mixing / tl.where(is_stream, tl.sum(mixing, axis=0) + eps, 1.0)[None, :]
        for _ in range(iterations - 1):
            mixing = mixing / tl.where(is_stream, tl.sum(mixing, axis=1) + eps, 1.0)[:, None]
            mixing = mixing / tl.where(is_stream, tl.sum(mixing, axis=0) + eps, 1.0)[None, :]
        if tl.program_id(1) == 0:
            tl.store(mixed + token * STREAMS * STREAMS + number - 2 * STREAMS, mixing, mask=is_number)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = x + (token * STREAMS + place)[:, None] * hidden + column[None, :]
    values = tl.load(at, mask=is_stream[:, None] & (column < hidden)[None, :], other=0.0).to(tl.float32)
    total = tl.sum(values * (_sigmoid(reads) + eps)[:, None], axis=0)
    tl.store(read + token * hidden + column, total.to(read.dtype.element_ty), mask=column < hidden)


@triton.jit
def _mhc_post_kernel(
    x,
    streams,
    outputs,
    mixed,
    out,
    hidden,
    MIXES: tl.constexpr,
    STREAMS: tl.constexpr,
    PLACES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Some features of a token's streams after a layer."""
    token, place = tl.program_id(0).to(tl.int64), tl.arange(0, PLACES)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside, is_stream = column < hidden, place < STREAMS
    at = streams + (token * STREAMS + place)[:, None] * hidden + column[None, :]
    before = tl.load(at, mask=is_stream[:, None] & inside[None, :], other=0.0).to(tl.float32)
    added = tl.load(x + token * hidden + column, mask=inside, other=0.0).to(tl.float32)
    for stream in tl.static_range(STREAMS):
        if MIXES:
            weights = tl.load(mixed + (token * STREAMS + place) * STREAMS + stream, mask=is_stream, other=0.0)
            parts = before * weights[:, None]
        else:
            parts = tl.where((place == stream)[:, None], before, 0.0)
        total = added * tl.load(outputs + token * STREAMS + stream) + tl.sum(parts, axis=0)
        tl.store(out + (token * STREAMS + stream) * hidden + column, total.to(out.dtype.element_ty), mask=inside)


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
    """See `quire.kernels.reference`."""
    (tokens, width), functions, kinds = x.shape, len(function), len(scale)
    hidden, parts = width // num_streams, triton.cdiv(width, _PART)
    written, mixes = num_streams if kinds > 1 else 0, num_streams if kinds > 2 else 0
    assert functions == num_streams + written + mixes**2
    x, function, base, scale = (each.contiguous() for each in (x, function, base, scale))
    read = torch.empty((tokens, hidden), dtype=x.dtype, device=x.device)
    products, outputs, mixed = (
        torch.empty(shape, dtype=torch.float32, device=x.device)
        for shape in ((parts, tokens, functions + 1), (tokens, written), (tokens, mixes, mixes))
    )
    if tokens:
        _mhc_products_kernel[triton.cdiv(tokens, _TOKENS), parts](
            *(x, function, products, tokens, width),
            FUNCTIONS=functions,
            ROWS=max(16, triton.next_power_of_2(functions)),
            TOKENS=_TOKENS,
            PART=_PART,
            STEP=_STEP,
            num_warps=4,
        )
        _mhc_read_kernel[tokens, triton.cdiv(hidden, _BLOCK)](
            *(x, products, base, scale, read, outputs, mixed, tokens, hidden, parts, norm_eps, eps, iterations),
            *(magnitude, output_eps),
            KINDS=kinds,
            FUNCTIONS=functions,
            STREAMS=num_streams,
            PLACES=triton.next_power_of_2(num_streams),
            PARTS=triton.next_power_of_2(parts),
            BLOCK=_BLOCK,
            num_warps=4,
        )
    return read, outputs, mixed


def mhc_post(x: Tensor, streams: Tensor, outputs: Tensor, mixed: Tensor) -> Tensor:
    """See `quire.kernels.reference`."""
    (tokens, hidden), count = x.shape, outputs.shape[1]
    out = torch.empty(streams.shape, dtype=x.dtype, device=x.device)
    if tokens:
        _mhc_post_kernel[tokens, triton.cdiv(hidden, _BLOCK)](
            *(x.contiguous(), streams.contiguous(), outputs.contiguous(), mixed.contiguous(), out, hidden),
            MIXES=mixed.shape[1] > 0,
            STREAMS=count,
            PLACES=triton.next_power_of_2(count),
            BLOCK=_BLOCK,
            num_warps=4,
        )
    return out
