"""Norms, rotary embedding fused with the write to the KV cache, and gated activations."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.cache import LARGEST
from quire.kernels.coded_words import ROUNDED_GROUP

_ELEMENTS = 1024
"""Output elements per program of `act_mul`."""


@triton.jit
def to_e4m3(x):
    """The bits of |x| ≤ 448 as an 8-bit float, ties to even. Uses arithmetic, as only the newest GPUs convert them.

    Below 2⁻⁶ the bits count steps of 2⁻⁹. Above, they are those of the float32, whose exponent bias is 127, not 7.
    """
    bits = x.to(tl.int32, bitcast=True)
    plain = bits & 0x7FFFFFFF
    rounded = ((plain + 0x7FFFF + ((plain >> 20) & 1)) >> 20) - 960
    steps = (tl.abs(x) * 512.0 + 12582912.0 - 12582912.0).to(tl.int32)
    return tl.where(plain < 0x3C800000, steps, rounded) | ((bits >> 24) & 0x80)


@triton.jit
def codes_of(values, scale, LARGEST: tl.constexpr):
    """Float32 `values` in units of `scale`, as 8-bit floats or integers."""
    values = tl.clamp(tl.div_rn(values, tl.where(scale > 0.0, scale, 1.0)), -LARGEST, LARGEST)
    # The alternative rounds to an integer, ties to even.
    return to_e4m3(values) if LARGEST == 448.0 else values + 12582912.0 - 12582912.0


@triton.jit
def largest_of(values):
    """The largest magnitudes along the last axis; NaN if there is one."""
    axis: tl.constexpr = len(values.shape) - 1
    has_nan = tl.max((values != values).to(tl.int32), axis=axis) > 0
    return tl.where(has_nan, float("nan"), tl.max(tl.abs(values), axis=axis))


@triton.jit
def store_rounded(codes, scales, values, first, columns, groups, GROUP: tl.constexpr, LARGEST: tl.constexpr):
    """Round float32 `values` of a row, `[GROUP or more]` from column `first` on, in groups, and store them; those
    outside must be 0."""
    GROUPS: tl.constexpr = values.shape[0] // GROUP
    grouped = tl.reshape(values, [GROUPS, GROUP])
    scale = tl.div_rn(largest_of(grouped), LARGEST)
    column = first + tl.arange(0, GROUPS)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    rounded = codes_of(grouped, scale[:, None], LARGEST)
    tl.store(codes + column, rounded.to(codes.dtype.element_ty), mask=column < columns)
    group = first // GROUP + tl.arange(0, GROUPS)
    tl.store(scales + group, scale, mask=group < groups)


@triton.jit
def _rms_norm_kernel(
    x,
    residual,
    weight,
    normed,
    scales,
    plain,
    total,
    groups,
    inner,
    columns,
    x_outer,
    x_inner,
    eps,
    offset,
    ADDS: tl.constexpr,
    KEEPS: tl.constexpr,
    GROUP: tl.constexpr,
    LARGEST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row, which is rounded in groups unless LARGEST is 0, and stored as it is, too, if KEEPS.

    It is at `row // inner * x_outer + row % inner * x_inner` in `x`; the other tensors are contiguous.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < columns
    values = tl.load(x + row // inner * x_outer + row % inner * x_inner + column, mask=inside, other=0.0)
    if ADDS:
        values = (tl.load(residual + row * columns + column, mask=inside, other=0.0) + values).to(values.dtype)
        tl.store(total + row * columns + column, values, mask=inside)
    wide = values.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / columns + eps)
    factor = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32) + offset
    result = (wide * scale * factor).to(values.dtype)
    if KEEPS:
        tl.store(plain + row * columns + column, result, mask=inside)
    if LARGEST > 0.0:
        wide = tl.where(inside, result.to(tl.float32), 0.0)
        store_rounded(normed + row * columns, scales + row * groups, wide, 0, columns, groups, GROUP, LARGEST)
    else:
        tl.store(normed + row * columns + column, result, mask=inside)


def _rows(x: Tensor) -> tuple[Tensor, int, int, int]:
    """`x` with a contiguous last dimension, the number of inner rows, and the strides of outer and of inner rows."""
    if x.dim() == 3 and x.stride(-1) == 1:
        return x, x.shape[1], x.stride(0), x.stride(1)
    x = x.reshape(-1, x.shape[-1]).contiguous()
    return x, 1, x.stride(0), 0


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """See `quire.kernels.reference`."""
    normed = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch_norm(x, None, weight, normed, None, None, eps, offset)
    return normed


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> tuple[Tensor, Tensor]:
    """See `quire.kernels.reference`."""
    normed, total = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
    _launch_norm(x, residual, weight, normed, total, None, eps, offset)
    return normed, total


def rms_norm_rounded(
    x: Tensor,
    weight: Tensor,
    eps: float,
    offset: float,
    dtype: torch.dtype,
    groups: int,
    plain: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See `quire.kernels.coded_words`."""
    codes, scales = rounded_rows(x, x.shape[1], dtype, groups)
    _launch_norm(x, None, weight, codes, None, scales, eps, offset, plain)
    return codes.view(dtype), scales


def add_rms_norm_rounded(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    offset: float,
    dtype: torch.dtype,
    groups: int,
    plain: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `quire.kernels.coded_words`."""
    (codes, scales), total = rounded_rows(x, x.shape[1], dtype, groups), torch.empty_like(x)
    _launch_norm(x, residual, weight, codes, total, scales, eps, offset, plain)
    return codes.view(dtype), scales, total


def rounded_rows(x: Tensor, columns: int, dtype: torch.dtype, groups: int) -> tuple[Tensor, Tensor]:
    """Memory for the rounded rows of `x`: codes, which are bytes if they are floats, and scales."""
    assert groups in (1, triton.cdiv(columns, ROUNDED_GROUP))
    codes = torch.empty((len(x), columns), dtype=torch.int8 if dtype == torch.int8 else torch.uint8, device=x.device)
    return codes, torch.empty((len(x), groups), dtype=torch.float32, device=x.device)


def _launch_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    normed: Tensor,
    total: Tensor | None,
    scales: Tensor | None,
    eps: float,
    offset: float,
    plain: Tensor | None = None,
) -> None:
    """With `scales`, the result is rounded to the type of `normed`; bytes are 8-bit floats. `plain` is contiguous."""
    rows, inner, x_outer, x_inner = _rows(x)
    count, columns, groups = x.numel() // x.shape[-1], x.shape[-1], 1 if scales is None else scales.shape[1]
    if not count:
        return
    block = triton.next_power_of_2(columns)
    _rms_norm_kernel[(count,)](
        *(rows, rows if residual is None else residual.contiguous(), weight, normed),
        *(weight if scales is None else scales, normed if plain is None else plain),
        *(normed if total is None else total, groups),
        *(inner, columns, x_outer, x_inner, eps, offset),
        ADDS=residual is not None,
        KEEPS=plain is not None,
        GROUP=ROUNDED_GROUP if groups > 1 else block,
        LARGEST=0.0 if scales is None else _largest(normed),
        BLOCK=block,
        num_warps=min(16, max(1, block // 256)),
    )


def _largest(codes: Tensor) -> float:
    return LARGEST[torch.int8 if codes.dtype == torch.int8 else torch.float8_e4m3fn]


@triton.jit
def _rotated(row, column, cos_sin, half, width):
    """The features `column` of a row, the first 2 * half of them rotated by `cos_sin` (cosines, then sines)."""
    inside = column < width
    values = tl.load(row + column, mask=inside, other=0.0)
    is_rotary = column < 2 * half
    partner = tl.where(column < half, column + half, column - half)
    other = tl.load(row + partner, mask=is_rotary & inside, other=0.0).to(tl.float32)
    angle = tl.where(column < half, column, column - half)
    cos = tl.load(cos_sin + angle, mask=is_rotary, other=1.0)
    sin = tl.load(cos_sin + half + angle, mask=is_rotary, other=0.0)
    sign = tl.where(column < half, -1.0, 1.0)
    rotated = (values.to(tl.float32) * cos + sign * other * sin).to(values.dtype)
    return tl.where(is_rotary, rotated, values)


@triton.jit
def _write_row(row, scale_at, values, column, width, LARGEST: tl.constexpr):
    """Write a row of the KV cache, quantized if LARGEST is not 0 (see `quire.kernels.cache`)."""
    if LARGEST > 0.0:
        wide = values.to(tl.float32)
        scale = tl.div_rn(tl.max(tl.abs(tl.where(column < width, wide, 0.0)), axis=0), LARGEST)
        values = codes_of(wide, scale, LARGEST)
        tl.store(scale_at, scale, mask=width > 0)
    tl.store(row + column, values.to(row.dtype.element_ty), mask=column < width)


@triton.jit(do_not_specialize=["slots"])
def _rotary_write_kernel(
    query,
    key,
    value,
    cos_sin,
    slots,
    out,
    cache,
    scales,
    heads,
    query_width,
    key_width,
    half,
    block_size,
    query_token,
    query_head,
    key_token,
    key_head,
    value_token,
    value_head,
    cache_side,
    cache_block,
    cache_head,
    cache_row,
    HAS_VALUE: tl.constexpr,
    LARGEST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One head of a token: either a query, or a key and its value."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.arange(0, BLOCK)
    token_cos_sin = cos_sin + token * 2 * half
    if head < heads:
        row = query + token * query_token + head * query_head
        rotated = _rotated(row, column, token_cos_sin, half, query_width)
        tl.store(out + (token * heads + head) * query_width + column, rotated, mask=column < query_width)
    else:
        head -= heads
        slot = tl.load(slots + token).to(tl.int64)
        block, number = slot // block_size * cache_block + head * cache_head, slot % block_size
        place, scale_at = cache + block + number * cache_row, scales + (block + block_size * key_width) // 4 + number
        width = tl.where(slot < 0, 0, key_width)
        rotated = _rotated(key + token * key_token + head * key_head, column, token_cos_sin, half, key_width)
        _write_row(place, scale_at, rotated, column, width, LARGEST)
        if HAS_VALUE:
            row = value + token * value_token + head * value_head
            plain = tl.load(row + column, mask=column < key_width, other=0.0)
            _write_row(place + cache_side, scale_at + cache_side // 4, plain, column, width, LARGEST)


def rotary_write_kv(
    query: Tensor, key: Tensor, value: Tensor | None, cos_sin: Tensor, cache: Tensor, slots: Tensor
) -> Tensor:
    """See `quire.kernels.reference`. Heads in a quantized cache must be a multiple of 4."""
    tokens, heads, query_width = query.shape
    kv_heads, key_width = key.shape[1:]
    query, key = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key))
    value = key if value is None else value if value.stride(-1) == 1 else value.contiguous()
    out, largest = torch.empty(query.shape, dtype=query.dtype, device=query.device), LARGEST.get(cache.dtype, 0.0)
    if tokens:
        _rotary_write_kernel[(tokens, heads + kv_heads)](
            *(query, key, value, cos_sin.contiguous(), slots, out),
            cache.view(torch.uint8) if cache.dtype == torch.float8_e4m3fn else cache,
            cache[0].view(torch.float32) if largest else cache,
            *(heads, query_width, key_width, cos_sin.shape[1] // 2, cache.shape[3]),
            *(query.stride(0), query.stride(1), key.stride(0), key.stride(1), value.stride(0), value.stride(1)),
            *(*cache.stride()[:3], key_width if largest else cache.stride(3)),
            HAS_VALUE=len(cache) == 2,
            LARGEST=largest,
            BLOCK=triton.next_power_of_2(max(query_width, key_width)),
            num_warps=1,
        )
    return out


@triton.jit
def activated(x, KIND: tl.constexpr):
    """Apply an activation to float32 `x`; NaN propagates."""
    if KIND == "silu":
        return x * tl.sigmoid(x)
    elif KIND == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif KIND == "gelu_tanh":  # (1 + tanh(u)) / 2 = sigmoid(2 u)
        return x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    elif KIND == "relu":
        return tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
    else:
        tl.static_assert(KIND == "relu2")
        positive = tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
        return positive * positive


@triton.jit
def gated(gate, up, KIND: tl.constexpr):
    """`activation(gate) * up` of float32 numbers; "swiglu_oai" (gpt-oss), "silu_7" and "silu_16" (Step), and
    "silu_clamped" (DeepSeek-V4) clamp both."""
    if KIND == "swiglu_oai":
        gate = tl.minimum(gate, 7.0, propagate_nan=tl.PropagateNan.ALL)
        up = tl.clamp(up, -7.0, 7.0, propagate_nan=tl.PropagateNan.ALL)
        return gate * tl.sigmoid(1.702 * gate) * (up + 1.0)
    elif KIND == "silu_7" or KIND == "silu_16":
        limit: tl.constexpr = 7.0 if KIND == "silu_7" else 16.0
        up = tl.clamp(up, -limit, limit, propagate_nan=tl.PropagateNan.ALL)
        return tl.minimum(activated(gate, "silu"), limit, propagate_nan=tl.PropagateNan.ALL) * up
    elif KIND == "silu_clamped":
        gate = tl.minimum(gate, 10.0, propagate_nan=tl.PropagateNan.ALL)
        return activated(gate, "silu") * tl.clamp(up, -10.0, 10.0, propagate_nan=tl.PropagateNan.ALL)
    else:
        return activated(gate, KIND) * up


@triton.jit
def _act_mul_kernel(x, out, size, KIND: tl.constexpr, GATED: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    source = x + row * size * (2 if GATED else 1)
    gate = tl.load(source + column, mask=inside, other=0.0).to(tl.float32)
    if GATED:
        result = gated(gate, tl.load(source + size + column, mask=inside, other=0.0).to(tl.float32), KIND)
    else:
        result = activated(gate, KIND)
    tl.store(out + row * size + column, result.to(out.dtype.element_ty), mask=inside)


def act_mul(x: Tensor, activation: str, is_gated: bool = True) -> Tensor:
    """See `quire.kernels.reference`; if not `is_gated`, `activate`."""
    if activation not in KINDS:
        raise KeyError(activation)
    x = x.contiguous()
    size = x.shape[-1] // (2 if is_gated else 1)
    out = torch.empty((*x.shape[:-1], size), dtype=x.dtype, device=x.device)
    if out.numel():
        _act_mul_kernel[(out.numel() // size, triton.cdiv(size, _ELEMENTS))](
            x, out, size, KIND=activation, GATED=is_gated, BLOCK=_ELEMENTS
        )
    return out


@triton.jit
def _activated_part(row, column, size, KIND: tl.constexpr, GATED: tl.constexpr, DTYPE: tl.constexpr):
    """Activated numbers of a row, rounded to its type, as float32; 0 outside."""
    inside = column < size
    gate = tl.load(row + column, mask=inside, other=0.0).to(tl.float32)
    if GATED:
        result = gated(gate, tl.load(row + size + column, mask=inside, other=0.0).to(tl.float32), KIND)
    else:
        result = activated(gate, KIND)
    return tl.where(inside, result.to(DTYPE).to(tl.float32), 0.0)


@triton.jit
def _act_mul_rounded_kernel(
    x,
    codes,
    scales,
    size,
    groups,
    KIND: tl.constexpr,
    GATED: tl.constexpr,
    GROUPED: tl.constexpr,
    GROUP: tl.constexpr,
    LARGEST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Some groups of a row; or a whole row, computed twice: for its largest number, and to be rounded."""
    row = tl.program_id(0).to(tl.int64)
    source, to = x + row * (2 if GATED else 1) * size, codes + row * size
    lane = tl.arange(0, BLOCK)
    DTYPE: tl.constexpr = x.dtype.element_ty
    if GROUPED:
        first = tl.program_id(1) * BLOCK
        values = _activated_part(source, first + lane, size, KIND, GATED, DTYPE)
        store_rounded(to, scales + row * groups, values, first, size, groups, GROUP, LARGEST)
    else:
        largest = tl.zeros([BLOCK], tl.float32)
        for first in range(0, size, BLOCK):
            values = tl.abs(_activated_part(source, first + lane, size, KIND, GATED, DTYPE))
            largest = tl.maximum(largest, values, propagate_nan=tl.PropagateNan.ALL)
        scale = tl.div_rn(largest_of(largest), LARGEST)
        tl.store(scales + row, scale)
        for first in range(0, size, BLOCK):
            rounded = codes_of(_activated_part(source, first + lane, size, KIND, GATED, DTYPE), scale, LARGEST)
            tl.store(to + first + lane, rounded.to(codes.dtype.element_ty), mask=first + lane < size)


def act_mul_rounded(
    x: Tensor, activation: str, dtype: torch.dtype, groups: int, gated: bool = True
) -> tuple[Tensor, Tensor]:
    """See `quire.kernels.coded_words`."""
    if activation not in KINDS:
        raise KeyError(activation)
    x = x.contiguous()
    size = x.shape[1] // 2 if gated else x.shape[1]
    codes, scales = rounded_rows(x, size, dtype, groups)
    block = _ELEMENTS if groups > 1 else min(4 * _ELEMENTS, triton.next_power_of_2(size))
    if len(x):
        _act_mul_rounded_kernel[len(x), triton.cdiv(size, block) if groups > 1 else 1](
            *(x, codes, scales, size, groups),
            KIND=activation,
            GATED=gated,
            GROUPED=groups > 1,
            GROUP=ROUNDED_GROUP,
            LARGEST=_largest(codes),
            BLOCK=block,
            num_warps=min(8, max(1, block // 256)),
        )
    return codes.view(dtype), scales


KINDS = ("silu", "gelu", "gelu_tanh", "relu", "relu2", "swiglu_oai", "silu_7", "silu_16", "silu_clamped")
