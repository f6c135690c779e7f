"""Layers with recurrent states: the causal convolution, and linear attention, the selective scan and RWKV's weighted
means token by token."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.cache import StateSegments
from quire.kernels.reference.recurrent import LOWEST_EXPONENT

_CHANNELS = 256
"""Channels of a program of `causal_conv`."""
_PARTS = 16
"""Programs that share a row's tokens in `causal_conv`."""
_COLUMNS = 32
"""Value features of a program of `linear_attention`."""


@triton.jit
def _input(x, old, places, token, start, column, channels, stride, SIZE: tl.constexpr):
    """The input of the convolution at `token`, which may lie before the row's first token, at `start`."""
    new = tl.load(x + token * stride + column, mask=column < tl.where(token < start, 0, channels), other=0.0).to(
        tl.float32
    )
    return new + tl.sum(tl.where(places[:, None] == token - start + SIZE - 1, old, 0.0), axis=0)


@triton.jit
def _conv_kernel(
    x,
    weight,
    bias,
    inputs,
    starts,
    rows,
    read,
    write,
    out,
    channels,
    stride,
    weight_stride,
    tap_stride,
    page_size,
    SIZE: tl.constexpr,
    PLACES: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SILU: tl.constexpr,
):
    """A block of channels of a row. The first part has the tokens that see the state, and stores the new ones."""
    row, part = tl.program_id(0), tl.program_id(2)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < channels
    places = tl.arange(0, PLACES)
    first, last = tl.load(rows + row), tl.load(rows + row + 1)
    start, end = tl.load(starts + first), tl.load(starts + last)
    page = tl.load(read + first)
    old = tl.load(
        inputs + page * page_size + places[:, None] * channels + column[None, :],
        mask=(places[:, None] < tl.where(page < 0, 0, SIZE - 1)) & inside[None, :],
        other=0.0,
    ).to(tl.float32)
    seeing = end if PARTS == 1 else tl.minimum(end, start + SIZE - 1)
    step = 1 if part == 0 else PARTS - 1
    for token in range(start if part == 0 else seeing + part - 1, end if part > 0 else seeing, step):
        total = tl.zeros((BLOCK,), tl.float32)
        for tap in tl.static_range(SIZE):
            factor = tl.load(weight + column * weight_stride + tap * tap_stride, mask=inside, other=0.0)
            seen = _input(x, old, places, token - SIZE + 1 + tap, start, column, channels, stride, SIZE)
            total += factor.to(tl.float32) * seen
        if HAS_BIAS:
            total += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
        if SILU:
            total = total / (1.0 + tl.exp(-total))
        tl.store(out + token * channels + column, total.to(out.dtype.element_ty), mask=inside)
    if part == 0:
        for segment in range(first, last):
            page = tl.load(write + segment)
            stop = tl.load(starts + segment + 1)
            if page >= 0:
                for place in tl.static_range(SIZE - 1):
                    kept = _input(x, old, places, stop - SIZE + 1 + place, start, column, channels, stride, SIZE)
                    to = inputs + page * page_size + place * channels + column
                    tl.store(to, kept.to(inputs.dtype.element_ty), mask=inside)


def causal_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, inputs: Tensor, segments: StateSegments, *, silu: bool = True
) -> Tensor:
    """See `quire.kernels.reference`."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    tokens, channels = x.shape
    rows, size = len(segments.rows) - 1, weight.shape[1]
    x = x if x.stride(1) == 1 else x.contiguous()
    parts = 1 if tokens <= rows else _PARTS
    if tokens:
        _conv_kernel[(rows, triton.cdiv(channels, _CHANNELS), parts)](
            *(x, weight, weight if bias is None else bias, inputs, segments.starts, segments.rows, segments.read),
            *(segments.write, out),
            *(channels, x.stride(0), weight.stride(0), weight.stride(1), inputs.stride(0)),
            SIZE=size,
            PLACES=triton.next_power_of_2(size),
            PARTS=parts,
            BLOCK=_CHANNELS,
            HAS_BIAS=bias is not None,
            SILU=silu,
        )
    return out


@triton.jit
def _of_page(page, feature, key_dim, is_value):
    """The mask of a state; empty without a page."""
    return (feature[:, None] < tl.where(page < 0, 0, key_dim)) & is_value[None, :]


@triton.jit
def _attention_kernel(
    query,
    key,
    value,
    decay,
    beta,
    matrices,
    starts,
    rows,
    read,
    write,
    out,
    heads,
    repeats,
    key_dim,
    value_dim,
    query_token,
    query_head,
    key_token,
    key_head,
    value_token,
    value_head,
    page_size,
    scale,
    eps,
    IS_DELTA: tl.constexpr,
    HAS_BETA: tl.constexpr,
    PER_FEATURE: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
):
    """Some columns of a head's state, through a row."""
    row, head = tl.program_id(0), tl.program_id(1)
    feature, column = tl.arange(0, KEYS), tl.program_id(2) * VALUES + tl.arange(0, VALUES)
    is_key, is_value = feature < key_dim, column < value_dim
    place = head * key_dim * value_dim + feature[:, None] * value_dim + column[None, :]
    first, last = tl.load(rows + row), tl.load(rows + row + 1)
    page = tl.load(read + first)
    state = tl.load(matrices + page * page_size + place, mask=_of_page(page, feature, key_dim, is_value), other=0.0)
    for segment in range(first, last):
        for token in range(tl.load(starts + segment), tl.load(starts + segment + 1)):
            k = tl.load(key + token * key_token + head // repeats * key_head + feature, mask=is_key, other=0.0)
            q = tl.load(query + token * query_token + head // repeats * query_head + feature, mask=is_key, other=0.0)
            v = tl.load(value + token * value_token + head * value_head + column, mask=is_value, other=0.0)
            k, q, update = k.to(tl.float32), q.to(tl.float32), v.to(tl.float32)
            if eps > 0.0:
                k *= tl.rsqrt(tl.sum(k * k, axis=0) + eps)
                q *= tl.rsqrt(tl.sum(q * q, axis=0) + eps)
            if PER_FEATURE:
                factor = tl.exp(tl.load(decay + (token * heads + head) * key_dim + feature, mask=is_key, other=0.0))
                state *= factor[:, None]
            else:
                state *= tl.exp(tl.load(decay + token * heads + head))
            if IS_DELTA:
                update -= tl.sum(k[:, None] * state, axis=0)
            if HAS_BETA:
                update *= tl.load(beta + token * heads + head)
            state += k[:, None] * update[None, :]
            answer = tl.sum(q[:, None] * state, axis=0) * scale
            to = out + (token * heads + head) * value_dim + column
            tl.store(to, answer.to(out.dtype.element_ty), mask=is_value)
        page = tl.load(write + segment)
        tl.store(matrices + page * page_size + place, state, mask=_of_page(page, feature, key_dim, is_value))


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
    """See `quire.kernels.reference`."""
    out = torch.empty(value.shape, dtype=value.dtype, device=value.device)
    tokens, heads, value_dim = value.shape
    rows, key_dim = len(segments.rows) - 1, key.shape[2]
    query, key, value = (x if x.stride(2) == 1 else x.contiguous() for x in (query, key, value))
    decay = decay.contiguous()
    if tokens:
        _attention_kernel[(rows, heads, triton.cdiv(value_dim, _COLUMNS))](
            *(query, key, value, decay, decay if beta is None else beta.contiguous(), matrices, *segments[:2]),
            *(segments.read, segments.write, out, heads, heads // key.shape[1], key_dim, value_dim),
            *(*query.stride()[:2], *key.stride()[:2], *value.stride()[:2], matrices.stride(0), scale, eps),
            IS_DELTA=is_delta,
            HAS_BETA=beta is not None,
            PER_FEATURE=decay.dim() == 3,
            KEYS=triton.next_power_of_2(key_dim),
            VALUES=_COLUMNS,
        )
    return out


@triton.jit
def _scan_kernel(
    x,
    step,
    rates,
    key,
    query,
    matrices,
    starts,
    rows,
    read,
    write,
    out,
    channels,
    state_size,
    x_token,
    key_token,
    query_token,
    page_size,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
):
    """Some channels of the state, through a row."""
    row = tl.program_id(0)
    feature, column = tl.arange(0, KEYS), tl.program_id(1) * VALUES + tl.arange(0, VALUES)
    is_key, inside = feature < state_size, column < channels
    place = feature[:, None] * channels + column[None, :]
    rate = tl.load(rates + place, mask=is_key[:, None] & inside[None, :], other=0.0)
    first, last = tl.load(rows + row), tl.load(rows + row + 1)
    page = tl.load(read + first)
    state = tl.load(matrices + page * page_size + place, mask=_of_page(page, feature, state_size, inside), other=0.0)
    for segment in range(first, last):
        for token in range(tl.load(starts + segment), tl.load(starts + segment + 1)):
            by = tl.load(step + token * channels + column, mask=inside, other=0.0)
            k = tl.load(key + token * key_token + feature, mask=is_key, other=0.0).to(tl.float32)
            q = tl.load(query + token * query_token + feature, mask=is_key, other=0.0).to(tl.float32)
            update = by * tl.load(x + token * x_token + column, mask=inside, other=0.0).to(tl.float32)
            state = tl.exp(by[None, :] * rate) * state + k[:, None] * update[None, :]
            answer = tl.sum(q[:, None] * state, axis=0)
            tl.store(out + token * channels + column, answer.to(out.dtype.element_ty), mask=inside)
        page = tl.load(write + segment)
        tl.store(matrices + page * page_size + place, state, mask=_of_page(page, feature, state_size, inside))


def selective_scan(
    x: Tensor, step: Tensor, rates: Tensor, key: Tensor, query: Tensor, matrices: Tensor, segments: StateSegments
) -> Tensor:
    """See `quire.kernels.reference`."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    (tokens, channels), rows = x.shape, len(segments.rows) - 1
    x, key, query = (each if each.stride(1) == 1 else each.contiguous() for each in (x, key, query))
    if tokens:
        _scan_kernel[(rows, triton.cdiv(channels, _COLUMNS))](
            *(x, step.contiguous(), rates.contiguous(), key, query, matrices, *segments[:2]),
            *(segments.read, segments.write, out, channels, len(rates)),
            *(x.stride(0), key.stride(0), query.stride(0), matrices.stride(0)),
            KEYS=triton.next_power_of_2(len(rates)),
            VALUES=_COLUMNS,
        )
    return out


@triton.jit
def _wkv_kernel(
    key,
    value,
    decay,
    bonus,
    matrices,
    starts,
    rows,
    read,
    write,
    out,
    channels,
    key_token,
    value_token,
    page_size,
    LOWEST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Some channels, through a row."""
    row, column = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < channels
    by, first_bonus = tl.load(decay + column, mask=inside, other=0.0), tl.load(bonus + column, mask=inside, other=0.0)
    first, last = tl.load(rows + row), tl.load(rows + row + 1)
    page = tl.load(read + first)
    has_page = column < tl.where(page < 0, 0, channels)
    place = matrices + page * page_size + column
    total = tl.load(place, mask=has_page, other=0.0)
    weight = tl.load(place + channels, mask=has_page, other=0.0)
    largest = tl.load(place + 2 * channels, mask=has_page, other=LOWEST)
    for segment in range(first, last):
        for token in range(tl.load(starts + segment), tl.load(starts + segment + 1)):
            k = tl.load(key + token * key_token + column, mask=inside, other=0.0).to(tl.float32)
            v = tl.load(value + token * value_token + column, mask=inside, other=0.0).to(tl.float32)
            top = tl.maximum(largest, k + first_bonus)
            before, own = tl.exp(largest - top), tl.exp(k + first_bonus - top)
            mean = (before * total + own * v) / (before * weight + own)
            tl.store(out + token * channels + column, mean.to(out.dtype.element_ty), mask=inside)
            top = tl.maximum(largest + by, k)
            before, own = tl.exp(largest + by - top), tl.exp(k - top)
            total, weight, largest = before * total + own * v, before * weight + own, top
        page = tl.load(write + segment)
        has_page = column < tl.where(page < 0, 0, channels)
        place = matrices + page * page_size + column
        tl.store(place, total, mask=has_page)
        tl.store(place + channels, weight, mask=has_page)
        tl.store(place + 2 * channels, largest, mask=has_page)


def wkv(key: Tensor, value: Tensor, decay: Tensor, bonus: Tensor, matrices: Tensor, segments: StateSegments) -> Tensor:
    """See `quire.kernels.reference`."""
    out = torch.empty(value.shape, dtype=value.dtype, device=value.device)
    (tokens, channels), rows = value.shape, len(segments.rows) - 1
    key, value = (each if each.stride(1) == 1 else each.contiguous() for each in (key, value))
    if tokens:
        _wkv_kernel[(rows, triton.cdiv(channels, _COLUMNS))](
            *(key, value, decay.contiguous(), bonus.contiguous(), matrices, *segments[:2], segments.read),
            *(segments.write, out, channels, key.stride(0), value.stride(0), matrices.stride(0)),
            LOWEST=LOWEST_EXPONENT,
            BLOCK=_COLUMNS,
        )
    return out
