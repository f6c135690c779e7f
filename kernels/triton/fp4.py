"""Matmuls of 4-bit floats by 4-bit floats on tensor cores (NVFP4, W4A4), and experts of such weights.

GPUs of compute capability 10.0 and higher multiply them with the scales of both sides in one instruction; for others,
Triton would widen both to bfloat16, slowly. Inputs are rounded by a kernel of their own. A row's result depends neither
on the other rows nor on their number, except for the order in which the tensor cores add within a step.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels import reference
from quire.kernels.fp4 import GROUP, Fp4Weight, has_gates
from quire.kernels.low_rank import ExpertChanges
from quire.kernels.triton import limits
from quire.kernels.triton.elementwise import KINDS, act_mul, largest_of, to_e4m3
from quire.kernels.triton.experts import _block_rows, change, sort_pairs, sum_pairs
from quire.kernels.triton.limits import Tile

_ROUNDED_AT_ONCE = 1024
"""Inputs of a program that rounds them."""


@triton.jit
def _to_e2m1(x):
    """The bits of float32 numbers as 4-bit floats, ties to even, at most 6.

    Below 1 the bits count steps of a half. Above, they are those of the float32, whose exponent bias is 127, not 1.
    """
    bits = x.to(tl.int32, bitcast=True)
    plain = bits & 0x7FFFFFFF
    rounded = tl.minimum(((plain + 0x1FFFFF + ((plain >> 22) & 1)) >> 22) - 252, 7)
    steps = (tl.abs(x) * 2.0 + 12582912.0 - 12582912.0).to(tl.int32)
    return tl.where(plain < 0x3F800000, steps, rounded) | ((bits >> 28) & 8)


@triton.jit
def _round_kernel(
    x,
    global_scales,
    ids,
    codes,
    scales,
    columns,
    x_row,
    experts,
    per_row,
    EXPERTS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Round some groups of a row; if EXPERTS, of a pair of a row and an expert, with the expert's scale.

    Rows of `x` have `per_row` pairs each.
    """
    row, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK
    column, source = first + tl.arange(0, BLOCK), row
    if EXPERTS:
        expert = tl.load(ids + row)
        # The pairs of an expert that is not here are not read.
        global_scales += tl.where((expert >= 0) & (expert < experts), expert, 0)
        source = row // per_row
    factor = tl.load(global_scales)
    wide = tl.load(x + source * x_row + column, mask=column < columns, other=0.0).to(tl.float32)
    grouped = tl.reshape(wide, [BLOCK // GROUP, GROUP])
    exact = tl.div_rn(largest_of(grouped), 6.0) * factor
    bits = tl.where(exact == exact, to_e4m3(tl.minimum(exact, 448.0)), 0x7F)
    scale = tl.div_rn((bits << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36, factor)  # 2¹²⁰
    numbers = tl.div_rn(grouped, tl.where(scale > 0.0, scale, float("inf"))[:, None])
    low, high = tl.split(tl.reshape(_to_e2m1(numbers), [BLOCK // 2, 2]))
    pair, group = first // 2 + tl.arange(0, BLOCK // 2), first // GROUP + tl.arange(0, BLOCK // GROUP)
    tl.store(codes + row * (columns // 2) + pair, (low | (high << 4)).to(tl.uint8), mask=pair < columns // 2)
    tl.store(scales + row * (columns // GROUP) + group, bits.to(tl.uint8), mask=group < columns // GROUP)


@triton.jit
def _product(
    codes,
    scales,
    row,
    is_row,
    weight,
    weight_scales,
    feature,
    is_feature,
    inputs,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    FEATURES: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """The sums `[FEATURES, ROWS]` without the scales of the features; `row` and `feature` are int64."""
    product = tl.zeros([FEATURES, ROWS], tl.float32)
    for step in range(tl.cdiv(inputs, DEPTH)):
        pair = step * (DEPTH // 2) + tl.arange(0, DEPTH // 2)
        group = step * (DEPTH // GROUP) + tl.arange(0, DEPTH // GROUP)
        is_pair, is_group = pair < inputs // 2, group < inputs // GROUP
        at = weight + feature[:, None] * (inputs // 2) + pair[None, :]
        left = tl.load(at, mask=is_feature[:, None] & is_pair[None, :], other=0)
        at = weight_scales + feature[:, None] * (inputs // GROUP) + group[None, :]
        left_scales = tl.load(at, mask=is_feature[:, None] & is_group[None, :], other=0.0)
        at = codes + row[None, :] * (inputs // 2) + pair[:, None]
        right = tl.load(at, mask=is_row[None, :] & is_pair[:, None], other=0)
        at = scales + row[:, None] * (inputs // GROUP) + group[None, :]
        right_scales = tl.load(at, mask=is_row[:, None] & is_group[None, :], other=0.0)
        product = tl.dot_scaled(left, left_scales, "e2m1", right, right_scales, "e2m1", product)
    return product


@triton.jit
def _finished(product, of_rows, bias, feature, is_feature, BIAS: tl.constexpr):
    """The sums with the features' scales and biases."""
    product *= tl.load(of_rows + feature, mask=is_feature, other=0.0)[:, None]
    if BIAS:
        product += tl.load(bias + feature, mask=is_feature, other=0.0).to(tl.float32)[:, None]
    return product


@triton.jit(do_not_specialize=["count"])
def _fp4_kernel(
    codes,
    scales,
    weight,
    weight_scales,
    of_rows,
    bias,
    out,
    count,
    features,
    inputs,
    BIAS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    FEATURES: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Multiply a tile of rows by a tile of features."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    feature = tl.program_id(1).to(tl.int64) * FEATURES + tl.arange(0, FEATURES)
    is_row, is_feature = row < count, feature < features
    product = _product(
        *(codes, scales, row, is_row, weight, weight_scales, feature, is_feature, inputs),
        *(GROUP, ROWS, FEATURES, DEPTH),
    )
    product = _finished(product, of_rows, bias, feature, is_feature, BIAS)
    to = out + row[None, :] * features + feature[:, None]
    tl.store(to, product.to(out.dtype.element_ty), mask=is_row[None, :] & is_feature[:, None])


@triton.jit
def _fp4_grouped_kernel(
    codes,
    scales,
    weight,
    weight_scales,
    of_rows,
    bias,
    out,
    pairs,
    blocks,
    features,
    inputs,
    BIAS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    FEATURES: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Multiply a block of an expert's pairs, of `experts._sort_kernel`, by a tile of its features."""
    block = blocks + 3 * tl.program_id(0)
    begin, end = tl.load(block + 1), tl.load(block + 2)
    if begin < end:
        expert = tl.load(block).to(tl.int64)
        place = begin + tl.arange(0, ROWS)
        is_row = place < end
        pair = tl.load(pairs + place, mask=is_row, other=0).to(tl.int64)
        feature = tl.program_id(1).to(tl.int64) * FEATURES + tl.arange(0, FEATURES)
        is_feature, own = feature < features, expert * features
        product = _product(
            *(codes, scales, pair, is_row, weight + own * (inputs // 2), weight_scales + own * (inputs // GROUP)),
            *(feature, is_feature, inputs, GROUP, ROWS, FEATURES, DEPTH),
        )
        product = _finished(product, of_rows + own, bias + own, feature, is_feature, BIAS)
        to = out + pair[None, :] * features + feature[:, None]
        tl.store(to, product.to(out.dtype.element_ty), mask=is_row[None, :] & is_feature[:, None])


def _shape(rows: int, device: torch.device) -> Tile:
    """Tiles whose instructions are whole (128 features), and that fit the shared memory."""
    depth = 128 if limits.is_narrow(device) else 256
    if rows <= 16:
        return Tile(16, 128, depth, 4, 4)
    return Tile(64, 128, depth, 4, 4) if rows <= 64 else Tile(128, 128, depth, 8, 3)


def _rounded(
    x: Tensor, global_scale: Tensor, ids: Tensor | None = None, experts: int = 0, per_row: int = 1
) -> tuple[Tensor, Tensor]:
    """Rows as by `round_fp4`; with `ids`, a row for each pair of a row and an expert."""
    x = x if x.stride(1) == 1 else x.contiguous()
    rows, columns = len(x) if ids is None else ids.numel(), x.shape[1]
    codes = torch.empty((rows, columns // 2), dtype=torch.uint8, device=x.device)
    scales = torch.empty((rows, columns // GROUP), dtype=torch.uint8, device=x.device)
    if rows:
        block = min(_ROUNDED_AT_ONCE, triton.next_power_of_2(columns))
        _round_kernel[rows, triton.cdiv(columns, block)](
            *(x, global_scale, global_scale if ids is None else ids, codes, scales),
            *(columns, x.stride(0), experts, per_row),
            EXPERTS=ids is not None,
            GROUP=GROUP,
            BLOCK=block,
            num_warps=max(1, block // 256),
        )
    return codes, scales.view(torch.float8_e4m3fn)


def round_fp4(x: Tensor, global_scale: Tensor) -> tuple[Tensor, Tensor]:
    """See `quire.kernels.fp4`. All rows have the same `global_scale`."""
    return _rounded(x, global_scale)


def fp4_matmul(x: Tensor, weight: Fp4Weight, bias: Tensor | None = None) -> Tensor:
    """See `quire.kernels.fp4`."""
    (rows, inputs), features = x.shape, len(weight.codes)
    out = x.new_empty(rows, features)
    if not rows or not features:
        return out
    shape = _shape(rows, x.device)
    _fp4_kernel[triton.cdiv(rows, shape.rows), triton.cdiv(features, shape.features)](
        *(*_rounded(x, weight.global_scale), *weight.tensors[:3], weight.of_rows if bias is None else bias),
        *(out, rows, features, inputs),
        BIAS=bias is not None,
        GROUP=GROUP,
        ROWS=shape.rows,
        FEATURES=shape.features,
        DEPTH=shape.depth,
        num_warps=shape.warps,
        num_stages=shape.stages,
    )
    return out


def fp4_fused_experts(
    x: Tensor,
    weights: Tensor,
    ids: Tensor,
    gate_up: Fp4Weight,
    down: Fp4Weight,
    activation: str,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    changes: ExpertChanges | None = None,
) -> Tensor:
    """See `quire.kernels.fp4`. Does not wait for the device."""
    if activation not in KINDS:
        raise KeyError(activation)
    experts, count, top_k = len(down.codes), ids.numel(), ids.shape[1]
    if not count or not experts:
        return torch.zeros_like(x)
    weights, ids = weights.contiguous(), ids.contiguous()
    shape = _shape(_block_rows(count, experts), x.device)
    pairs, blocks = sort_pairs(ids, experts, shape.rows)

    def grouped(source: Tensor, weight: Fp4Weight, bias: Tensor | None, per_row: int) -> Tensor:
        features = weight.codes.shape[1]
        out = x.new_empty(count, features)
        _fp4_grouped_kernel[len(blocks), triton.cdiv(features, shape.features)](
            *_rounded(source, weight.global_scale, ids, experts, per_row),
            *(
                *weight.tensors[:3],
                weight.of_rows if bias is None else bias,
                out,
                pairs,
                blocks,
                features,
                source.shape[1],
            ),
            BIAS=bias is not None,
            GROUP=GROUP,
            ROWS=shape.rows,
            FEATURES=shape.features,
            DEPTH=shape.depth,
            num_warps=shape.warps,
            num_stages=shape.stages,
        )
        return out

    both = grouped(x, gate_up, gate_up_bias, top_k)
    if changes is not None:
        change(both, changes.x, changes.gate_up, changes)
    inner = (act_mul if has_gates(gate_up, down) else reference.activate)(both, activation)
    outer = grouped(inner, down, down_bias, 1)
    if changes is not None:
        change(outer, inner, changes.down, changes)
    return sum_pairs(outer, weights, ids, experts)
