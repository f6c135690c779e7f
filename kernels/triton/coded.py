"""Matmuls by weights in few bits, which are dequantized in registers, and experts of such weights.

A weight is the first operand of the tensor cores, and a tile of the result is `[features, rows]`: the operand that is
computed in registers is the one that may come from there, and few rows fill an instruction.

Each row has its own sums in a fixed order, without atomics. So a row's result depends on the shape of the weight and on
the class of the number of rows (`_linear_shape`), not on the other rows: numbers of rows of one class give the same.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels import reference
from quire.kernels.coded_words import CodedWords
from quire.kernels.low_rank import ExpertChanges
from quire.kernels.quantized import VALUES
from quire.kernels.triton import limits
from quire.kernels.triton.elementwise import KINDS, act_mul
from quire.kernels.triton.experts import _block_rows, change, sort_pairs, sum_pairs


class _Decoding(NamedTuple):
    """How the kernels compute a number: a float32 from the bits of its code, times a factor, plus a term."""

    kind: str
    """integer: the code is the fraction of 1.…; float: its bits are bits of a float32; table: a value is loaded."""
    factor: float = 1.0
    term: float = 0.0
    fraction: int = 0
    """Bits of the fraction of a float."""


_DECODINGS = {
    "uint4": _Decoding("integer", 16.0, -16.0),
    "int4": _Decoding("integer", 16.0, -24.0),
    "uint8": _Decoding("integer", 256.0, -256.0),
    "int8": _Decoding("integer", 256.0, -384.0),  # the sign bit is stored inverted
    "e2m1": _Decoding("float", 2.0**126, fraction=1),  # exponents are biased by 1, in float32 by 127
    "fp8": _Decoding("float", 2.0**120, fraction=3),
    "nf4": _Decoding("table"),
    "fp4": _Decoding("table"),
    "iq4_nl": _Decoding("table"),
}


@triton.jit
def _bits_at(word, by: tl.constexpr, MASK: tl.constexpr):
    """The word shifted left by `by`, or right, and masked."""
    return (word << by if by >= 0 else word >> -by) & MASK


@triton.jit
def _selected(word, table, PLACE: tl.constexpr):
    """The number of `table` whose index is the four bits from PLACE on: halves are selected, from the last bit on."""
    low, second = (word >> PLACE) & 1 != 0, (word >> PLACE + 1) & 1 != 0
    third, high = (word >> PLACE + 2) & 1 != 0, (word >> PLACE + 3) & 1 != 0
    number = tl.zeros(word.shape, tl.float32)
    for half in tl.static_range(2):
        upper = number
        for quarter in tl.static_range(2):
            at = table + half * 8 + quarter * 4
            even, odd = tl.where(low, tl.load(at + 1), tl.load(at)), tl.where(low, tl.load(at + 3), tl.load(at + 2))
            pair = tl.where(second, odd, even)
            number = tl.where(third, pair, number) if quarter else pair
        number = tl.where(high, number, upper) if half else number
    return number


@triton.jit
def _decoded(word, table, PLACE: tl.constexpr, BITS: tl.constexpr, KIND: tl.constexpr, FRACTION: tl.constexpr):
    """The code at a place of each word as a float32, before its factor and term: see `_Decoding`."""
    if KIND == "integer":
        fraction = _bits_at(word, 23 - BITS - PLACE * BITS, ((1 << BITS) - 1) << (23 - BITS))
        return (fraction | 0x3F800000).to(tl.float32, bitcast=True)
    elif KIND == "float":
        plain = _bits_at(word, 23 - FRACTION - PLACE * BITS, ((1 << (BITS - 1)) - 1) << (23 - FRACTION))
        sign = _bits_at(word, 32 - BITS - PLACE * BITS, -(1 << 31))
        return (plain | sign).to(tl.float32, bitcast=True)
    else:
        return _selected(word, table, PLACE * BITS)


@triton.jit
def _factors(scales, offsets, at, inside, FACTOR: tl.constexpr, TERM: tl.constexpr, OFFSETS: tl.constexpr):
    """The factor and the term of a group's numbers."""
    scale = tl.load(scales + at, mask=inside, other=0.0).to(tl.float32)
    if OFFSETS:
        return scale * FACTOR, scale * (tl.load(offsets + at, mask=inside, other=0.0).to(tl.float32) + TERM)
    else:
        return scale * FACTOR, scale * TERM


@triton.jit
def _joined(numbers, FEATURES: tl.constexpr, PLACES: tl.constexpr):
    """The numbers of all places side by side: `[FEATURES, PLACES * 16]`."""
    if PLACES == 4:
        both = tl.join(tl.join(numbers[0], numbers[1]), tl.join(numbers[2], numbers[3]))
        return tl.reshape(tl.permute(both, (0, 3, 2, 1)), (FEATURES, 64))
    else:
        first = tl.join(tl.join(numbers[0], numbers[1]), tl.join(numbers[2], numbers[3]))
        second = tl.join(tl.join(numbers[4], numbers[5]), tl.join(numbers[6], numbers[7]))
        return tl.reshape(tl.permute(tl.join(first, second), (0, 4, 3, 2, 1)), (FEATURES, 128))


@triton.jit
def _product(
    source,
    is_row,
    words,
    scales,
    offsets,
    table,
    columns,
    rounding,
    feature,
    features,
    inputs,
    stored,
    first,
    last,
    ROWS: tl.constexpr,
    FEATURES: tl.constexpr,
    BITS: tl.constexpr,
    KIND: tl.constexpr,
    FACTOR: tl.constexpr,
    TERM: tl.constexpr,
    FRACTION: tl.constexpr,
    GROUP: tl.constexpr,
    OFFSETS: tl.constexpr,
    ORDERED: tl.constexpr,
    STATIC: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The sums `[FEATURES, ROWS]` over the blocks from `first` to `last`, without the scales of the features.

    `source` has pointers to the rows of the inputs; `feature` is int64. If ORDERED, `columns` has the input of each of
    the `stored` columns. If STATIC, inputs are rounded with the scale and the zero point in `rounding`.
    """
    PLACES: tl.constexpr = 32 // BITS
    lane = tl.arange(0, 16)
    is_feature = feature < features
    product = tl.zeros([FEATURES, ROWS], tl.float32)
    if STATIC:
        scale_of_inputs, zero = tl.load(rounding), tl.load(rounding + 1)
    for block in range(first, last):
        at = (block * features + feature)[:, None] * 16 + lane
        word = tl.load(words + at, mask=is_feature[:, None], other=0)
        numbers = ()
        for place in tl.static_range(PLACES):
            start = (block * PLACES + place) * 16
            if GROUP == 0:
                factor, term = FACTOR, TERM
            elif GROUP < 16:
                of_group = (start + lane) // GROUP
                wide = of_group[None, :] * features + feature[:, None]
                factor, term = _factors(scales, offsets, wide, is_feature[:, None], FACTOR, TERM, OFFSETS)
            elif place * 16 % GROUP == 0:
                of_group = start // GROUP * features + feature
                factor, term = _factors(scales, offsets, of_group, is_feature, FACTOR, TERM, OFFSETS)
                factor, term = factor[:, None], term[:, None]
            number = _decoded(word, table, place, BITS, KIND, FRACTION) * factor
            if KIND == "integer" or OFFSETS:
                number += term
            one = (number.to(source.dtype.element_ty),)
            numbers = numbers + one  # type: ignore[assignment]
        column = block * (PLACES * 16) + tl.arange(0, PLACES * 16)
        if ORDERED:
            column = tl.load(columns + column, mask=column < stored, other=inputs)
        is_inside = is_row[None, :] & (column < inputs)[:, None]
        x = tl.load(source[None, :] + column[:, None], mask=is_inside, other=0.0)
        if STATIC:
            wide = tl.div_rn(x.to(tl.float32), scale_of_inputs) + zero
            # Adding and subtracting rounds to an integer, ties to even.
            rounded = tl.clamp(wide, -128.0, 127.0) + 12582912.0 - 12582912.0 - zero
            x = tl.where(wide == wide, tl.where(is_inside, rounded, 0.0), wide).to(x.dtype)
        product = tl.dot(_joined(numbers, FEATURES, PLACES), x, product, input_precision=PRECISION)
    return product


@triton.jit
def _finished(product, of_rows, bias, feature, is_feature, BIAS: tl.constexpr):
    """The sums with the features' scales and biases."""
    product *= tl.load(of_rows + feature, mask=is_feature, other=0.0)[:, None]
    if BIAS:
        product += tl.load(bias + feature, mask=is_feature, other=0.0).to(tl.float32)[:, None]
    return product


@triton.jit(do_not_specialize=["count", "steps"])
def _coded_kernel(
    x,
    words,
    scales,
    offsets,
    of_rows,
    table,
    columns,
    rounding,
    bias,
    out,
    count,
    features,
    inputs,
    stored,
    x_row,
    blocks,
    steps,
    SPLIT: tl.constexpr,
    BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    FEATURES: tl.constexpr,
    BITS: tl.constexpr,
    KIND: tl.constexpr,
    FACTOR: tl.constexpr,
    TERM: tl.constexpr,
    FRACTION: tl.constexpr,
    GROUP: tl.constexpr,
    OFFSETS: tl.constexpr,
    ORDERED: tl.constexpr,
    STATIC: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Multiply a tile of rows by a tile of features; if SPLIT, store the sums of some blocks `[splits, rows, out]`."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    feature = tl.program_id(1).to(tl.int64) * FEATURES + tl.arange(0, FEATURES)
    is_row, is_feature, split = row < count, feature < features, tl.program_id(2)
    product = _product(
        *(x + row.to(tl.int64) * x_row, is_row, words, scales, offsets, table, columns, rounding),
        *(feature, features, inputs, stored, split * steps, tl.minimum(blocks, (split + 1) * steps)),
        *(ROWS, FEATURES, BITS, KIND, FACTOR, TERM, FRACTION, GROUP, OFFSETS, ORDERED, STATIC, PRECISION),
    )
    if SPLIT:
        row += split * count
    else:
        product = _finished(product, of_rows, bias, feature, is_feature, BIAS)
    to = out + row.to(tl.int64)[None, :] * features + feature[:, None]
    tl.store(to, product.to(out.dtype.element_ty), mask=is_row[None, :] & is_feature[:, None])


@triton.jit(do_not_specialize=["count"])
def _join_splits_kernel(
    parts, of_rows, bias, out, count, features, SPLITS: tl.constexpr, BIAS: tl.constexpr, FEATURES: tl.constexpr
):
    """Add a row's sums in order."""
    row = tl.program_id(0).to(tl.int64)
    feature = tl.program_id(1).to(tl.int64) * FEATURES + tl.arange(0, FEATURES)
    is_feature = feature < features
    product = tl.zeros([FEATURES], tl.float32)
    for split in tl.static_range(SPLITS):
        product += tl.load(parts + (split * count + row) * features + feature, mask=is_feature, other=0.0)
    product = _finished(product[:, None], of_rows, bias, feature, is_feature, BIAS)
    to = out + row * features + feature[:, None]
    tl.store(to, product.to(out.dtype.element_ty), mask=is_feature[:, None])


@triton.jit
def _coded_grouped_kernel(
    x,
    words,
    scales,
    offsets,
    of_rows,
    table,
    columns,
    rounding,
    bias,
    out,
    pairs,
    blocks_of_rows,
    features,
    inputs,
    stored,
    x_row,
    blocks,
    groups,
    per_row,
    BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    FEATURES: tl.constexpr,
    BITS: tl.constexpr,
    KIND: tl.constexpr,
    FACTOR: tl.constexpr,
    TERM: tl.constexpr,
    FRACTION: tl.constexpr,
    GROUP: tl.constexpr,
    OFFSETS: tl.constexpr,
    ORDERED: tl.constexpr,
    STATIC: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Multiply a block of an expert's rows, of `_sort_kernel`, by a tile of its features into the pairs' rows.

    Rows of `x` have `per_row` pairs each.
    """
    at = blocks_of_rows + 3 * tl.program_id(0)
    begin, end = tl.load(at + 1), tl.load(at + 2)
    if begin < end:
        expert = tl.load(at).to(tl.int64)
        row = begin + tl.arange(0, ROWS)
        is_row = row < end
        pair = tl.load(pairs + row, mask=is_row, other=0).to(tl.int64)
        feature = tl.program_id(1).to(tl.int64) * FEATURES + tl.arange(0, FEATURES)
        is_feature = feature < features
        of_expert = expert * groups * features
        product = _product(
            *(x + pair // per_row * x_row, is_row, words + expert * blocks * features * 16, scales + of_expert),
            *(offsets + of_expert, table, columns + expert * stored, rounding + expert * 2),
            *(feature, features, inputs, stored, 0, blocks, ROWS, FEATURES, BITS, KIND, FACTOR),
            *(TERM, FRACTION, GROUP, OFFSETS, ORDERED, STATIC, PRECISION),
        )
        own = expert * features
        product = _finished(product, of_rows + own, bias + own, feature, is_feature, BIAS)
        to = out + pair[None, :] * features + feature[:, None]
        tl.store(to, product.to(out.dtype.element_ty), mask=is_row[None, :] & is_feature[:, None])


class _SplitTile(NamedTuple):
    """The launch parameters of a matmul: tile, parts that the blocks of inputs are divided into, warps and stages."""

    rows: int
    features: int
    splits: int
    warps: int
    stages: int


_CLASSES = (16, 64)
"""Numbers of rows up to which a matmul divides the inputs in its own way; for more it does not."""


def _linear_shape(rows: int, features: int, blocks: int, dtype: torch.dtype, device: torch.device) -> _SplitTile:
    """Up to 64 rows, loads in flight count: the inputs are divided until processors have several tiles."""

    def splits(tile: int, most: int) -> int:
        return max(1, min(8, most * limits.PROCESSORS // triton.cdiv(features, tile), blocks // 4))

    if rows <= _CLASSES[0]:
        return _SplitTile(16, 64, splits(64, 8), 4, 3)
    if dtype == torch.float32:
        return _SplitTile(32, 64, 1, 4, 2)
    if rows <= _CLASSES[1]:
        return _SplitTile(64, 128, splits(128, 2), 8, 3)
    return _SplitTile(128, 128, 1, 4, 3) if rows <= 128 or limits.is_narrow(device) else _SplitTile(256, 128, 1, 8, 3)


def _launch(weight: CodedWords, bias: Tensor | None, dtype: torch.dtype) -> tuple[list[Tensor], dict[str, object]]:
    """The tensors and the constants of a weight."""
    decoding = _DECODINGS[weight.values]
    table = weight.of_rows  # read by nobody
    if decoding.kind == "table":
        table = _table(weight.values, weight.words.device)
    scales = weight.of_rows if weight.scales is None else weight.scales
    offsets = scales if weight.offsets is None else weight.offsets
    columns = weight.of_rows if weight.columns is None else weight.columns
    rounding = weight.of_rows if weight.rounding is None else weight.rounding
    constants = {
        "BIAS": bias is not None,
        "BITS": weight.bits,
        "KIND": decoding.kind,
        "FACTOR": decoding.factor,
        "TERM": decoding.term,
        "FRACTION": decoding.fraction,
        "GROUP": weight.group,
        "OFFSETS": weight.offsets is not None,
        "ORDERED": weight.columns is not None,
        "STATIC": weight.rounding is not None,
        "PRECISION": "ieee" if dtype == torch.float32 else "tf32",
    }
    factors = [weight.words, scales, offsets, weight.of_rows, table, columns, rounding]
    return [*factors, weight.of_rows if bias is None else bias], constants


_tables: dict[tuple[str, torch.device], Tensor] = {}


def _table(values: str, device: torch.device) -> Tensor:
    """The table of VALUES on a device, copied there once."""
    if (values, device) not in _tables:
        _tables[values, device] = VALUES[values].to(device)
    return _tables[values, device]


def coded_matmul(x: Tensor, weight: CodedWords, bias: Tensor | None = None) -> Tensor:
    """See `coded_words`. Rows give the same result with any others up to 16 rows, up to 64, and beyond."""
    rows, inputs = x.shape
    assert inputs == weight.inputs or weight.columns is not None
    features, blocks = weight.features, weight.words.shape[0]
    out = x.new_empty(rows, features)
    if not rows or not features:
        return out
    x = x if x.stride(1) == 1 else x.contiguous()
    shape = _linear_shape(rows, features, blocks, x.dtype, x.device)
    is_split = shape.splits > 1
    parts = x.new_empty((shape.splits, rows, features), dtype=torch.float32) if is_split else out
    tensors, constants = _launch(weight, bias, x.dtype)
    grid = triton.cdiv(rows, shape.rows), triton.cdiv(features, shape.features), shape.splits
    _coded_kernel[grid](
        *(x, *tensors, parts, rows, features, inputs, weight.inputs, x.stride(0), blocks),
        triton.cdiv(blocks, shape.splits),
        **constants,
        SPLIT=is_split,
        ROWS=shape.rows,
        FEATURES=shape.features,
        num_warps=shape.warps,
        num_stages=shape.stages,
    )
    if is_split:
        _join_splits_kernel[rows, triton.cdiv(features, _JOINED_AT_ONCE)](
            *(parts, weight.of_rows, tensors[-1], out, rows, features),
            SPLITS=shape.splits,
            BIAS=bias is not None,
            FEATURES=_JOINED_AT_ONCE,
            num_warps=4,
        )
    return out


_JOINED_AT_ONCE = 512


def coded_fused_experts(
    x: Tensor,
    weights: Tensor,
    ids: Tensor,
    gate_up: CodedWords,
    down: CodedWords,
    activation: str,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    gated: bool = True,
    changes: ExpertChanges | None = None,
) -> Tensor:
    """See `coded_words`. Does not wait for the device."""
    if activation not in KINDS:
        raise KeyError(activation)
    experts, count, top_k = len(down.words), ids.numel(), ids.shape[1]
    if not count or not experts:
        return torch.zeros_like(x)
    x, weights, ids = x.contiguous(), weights.contiguous(), ids.contiguous()
    rows = min(_block_rows(count, experts), 32 if x.dtype == torch.float32 else 128)
    pairs, blocks = sort_pairs(ids, experts, rows)
    both = _grouped(x, gate_up, gate_up_bias, pairs, blocks, rows, top_k)
    if changes is not None:
        change(both, changes.x, changes.gate_up, changes)
    inner = (act_mul if gated else reference.activate)(both, activation)
    outer = _grouped(inner, down, down_bias, pairs, blocks, rows, 1)
    if changes is not None:
        change(outer, inner, changes.down, changes)
    return sum_pairs(outer, weights, ids, experts)


def _grouped(
    x: Tensor, weight: CodedWords, bias: Tensor | None, pairs: Tensor, blocks: Tensor, rows: int, per_row: int
) -> Tensor:
    """Each pair's row of `x`, which has `per_row` pairs a row, by its expert: `[pairs, out]`."""
    features, many = weight.features, rows >= 64 and x.dtype != torch.float32
    out = x.new_empty(len(pairs), features)
    tensors, constants = _launch(weight, bias, x.dtype)
    size = 128 if many else 64
    _coded_grouped_kernel[len(blocks), triton.cdiv(features, size)](
        *(x, *tensors, out, pairs, blocks, features, x.shape[1], weight.inputs, x.stride(0), weight.words.shape[-3]),
        *(0 if weight.scales is None else weight.scales.shape[-2], per_row),
        **constants,
        ROWS=rows,
        FEATURES=size,
        num_warps=rows // 16 if many else 4,
        num_stages=2 if x.dtype == torch.float32 else 3,
    )
    return out
