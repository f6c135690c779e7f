"""Matmuls of 8-bit floats and of 8-bit integers on tensor cores: inputs are rounded to the weight's type (W8A8).

The inputs of a row that share a scale are rounded at run time, all of the row's or 128 at a time, as DeepSeek-V3 does
with weights in blocks of 128 by 128 (DeepSeek-AI 2024, section 3.3.2). A row's result depends neither on the other rows
nor on their number, except for the order in which the tensor cores add within 128 inputs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels import reference
from quire.kernels.cache import LARGEST
from quire.kernels.coded_words import ROUNDED_GROUP
from quire.kernels.low_rank import ExpertChanges
from quire.kernels.triton import limits
from quire.kernels.triton.elementwise import KINDS, act_mul, act_mul_rounded, rounded_rows, store_rounded
from quire.kernels.triton.experts import _block_rows, change, sort_pairs, sum_pairs
from quire.kernels.triton.limits import Tile

DEPTH = ROUNDED_GROUP
"""Inputs of a step."""


@triton.jit
def _round_kernel(x, out, scales, x_row, columns, groups, GROUP: tl.constexpr, LARGEST: tl.constexpr):
    """Round the inputs of a group."""
    row, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * GROUP
    column = first + tl.arange(0, GROUP)
    wide = tl.load(x + row * x_row + column, mask=column < columns, other=0.0).to(tl.float32)
    store_rounded(out + row * columns, scales + row * groups, wide, first, columns, groups, GROUP, LARGEST)


@triton.jit
def _product(
    source,
    row,
    is_row,
    x_scales,
    weight,
    scales,
    feature,
    is_feature,
    inputs,
    groups,
    GROUPED: tl.constexpr,
    ROWS: tl.constexpr,
    FEATURES: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """The sums `[FEATURES, ROWS]` with all scales: floats in float32 after each step, integers exactly.

    `row` and `feature` are int64.
    """
    IS_EXACT: tl.constexpr = weight.dtype.element_ty == tl.int8 and not GROUPED
    product = tl.zeros([FEATURES, ROWS], tl.int32 if IS_EXACT else tl.float32)
    for step in range(tl.cdiv(inputs, DEPTH)):
        inner = step * DEPTH + tl.arange(0, DEPTH)
        is_inner = inner < inputs
        at = weight + feature[:, None] * inputs + inner[None, :]
        codes = tl.load(at, mask=is_feature[:, None] & is_inner[None, :], other=0.0)
        at = source + row[None, :] * inputs + inner[:, None]
        rounded = tl.load(at, mask=is_row[None, :] & is_inner[:, None], other=0.0)
        if IS_EXACT:
            product = tl.dot(codes, rounded, product, out_dtype=tl.int32)
        else:
            part = tl.dot(codes, rounded).to(tl.float32)
            if GROUPED:
                part *= tl.load(x_scales + row * groups + step, mask=is_row, other=0.0)[None, :]
                part *= tl.load(scales + feature * groups + step, mask=is_feature, other=0.0)[:, None]
            product += part
    product = product.to(tl.float32)
    if not GROUPED:
        product *= tl.load(x_scales + row, mask=is_row, other=0.0)[None, :]
        product *= tl.load(scales + feature, mask=is_feature, other=0.0)[:, None]
    return product


@triton.jit(do_not_specialize=["count"])
def _rounded_kernel(
    x,
    x_scales,
    weight,
    scales,
    bias,
    out,
    count,
    features,
    inputs,
    groups,
    GROUPED: tl.constexpr,
    BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    FEATURES: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Multiply a tile of rows by a tile of features."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    feature = tl.program_id(1).to(tl.int64) * FEATURES + tl.arange(0, FEATURES)
    is_row, is_feature = row < count, feature < features
    product = _product(
        *(x, row, is_row, x_scales, weight, scales, feature, is_feature, inputs, groups),
        *(GROUPED, ROWS, FEATURES, DEPTH),
    )
    if BIAS:
        product += tl.load(bias + feature, mask=is_feature, other=0.0).to(tl.float32)[:, None]
    to = out + row[None, :] * features + feature[:, None]
    tl.store(to, product.to(out.dtype.element_ty), mask=is_row[None, :] & is_feature[:, None])


@triton.jit
def _rounded_grouped_kernel(
    x,
    x_scales,
    weight,
    scales,
    bias,
    out,
    pairs,
    blocks,
    features,
    inputs,
    groups,
    per_row,
    GROUPED: tl.constexpr,
    BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    FEATURES: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Multiply a block of an expert's rows, as `coded._coded_grouped_kernel` does."""
    block = blocks + 3 * tl.program_id(0)
    begin, end = tl.load(block + 1), tl.load(block + 2)
    if begin < end:
        expert = tl.load(block).to(tl.int64)
        place = begin + tl.arange(0, ROWS)
        is_row = place < end
        pair = tl.load(pairs + place, mask=is_row, other=0).to(tl.int64)
        feature = tl.program_id(1).to(tl.int64) * FEATURES + tl.arange(0, FEATURES)
        is_feature = feature < features
        own = expert * features
        product = _product(
            *(x, pair // per_row, is_row, x_scales, weight + own * inputs, scales + own * groups, feature, is_feature),
            *(inputs, groups, GROUPED, ROWS, FEATURES, DEPTH),
        )
        if BIAS:
            product += tl.load(bias + own + feature, mask=is_feature, other=0.0).to(tl.float32)[:, None]
        to = out + pair[None, :] * features + feature[:, None]
        tl.store(to, product.to(out.dtype.element_ty), mask=is_row[None, :] & is_feature[:, None])


def round_rows(x: Tensor, dtype: torch.dtype, groups: int = 1) -> tuple[Tensor, Tensor]:
    """See `coded_words`."""
    rows, inputs = x.shape
    x = x if x.stride(1) == 1 else x.contiguous()
    out, scales = rounded_rows(x, inputs, dtype, groups)
    size = DEPTH if groups > 1 else triton.next_power_of_2(inputs)
    if rows:
        _round_kernel[rows, groups](
            *(x, out, scales, x.stride(0), inputs, groups),
            GROUP=size,
            LARGEST=LARGEST[dtype],
            num_warps=min(16, max(1, size // 256)),
        )
    return out.view(dtype), scales


def rounded_matmul(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    bias: Tensor | None = None,
    x_scales: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """See `coded_words`. Products of float8_e4m3fn need compute capability 8.9."""
    (rows, inputs), (features, groups) = x.shape, scales.shape
    out = torch.empty((rows, features), dtype=dtype or x.dtype, device=x.device)
    rounded = x
    if x_scales is None:
        rounded, x_scales = round_rows(x, codes.dtype, groups)
    if not rows or not features:
        return out
    shape = _shape(rows, x.device, grouped=groups > 1, is_int8=codes.dtype == torch.int8)
    _rounded_kernel[triton.cdiv(rows, shape.rows), triton.cdiv(features, shape.features)](
        *(rounded, x_scales, codes, scales, codes if bias is None else bias, out, rows, features, inputs, groups),
        GROUPED=groups > 1,
        BIAS=bias is not None,
        ROWS=shape.rows,
        FEATURES=shape.features,
        DEPTH=shape.depth,
        num_warps=shape.warps,
        num_stages=shape.stages,
    )
    return out


def _shape(rows: int, device: torch.device, *, grouped: bool, is_int8: bool) -> Tile:
    """Tiles that were the fastest on an H200."""
    depth = DEPTH if grouped or limits.is_narrow(device) else 2 * DEPTH
    if rows <= 16:
        return Tile(16, 64, depth, 4, 5)
    if rows <= 32 or (grouped and rows <= 64):
        return Tile(32, 64, depth, 4, 4)
    if rows <= 64:
        return Tile(64, 64, depth, 4, 4)
    if rows <= 256 or not is_int8:
        return Tile(64, 128, DEPTH, 4, 3)
    return Tile(128, 128, DEPTH, 4, 3)


def rounded_fused_experts(
    x: Tensor,
    weights: Tensor,
    ids: Tensor,
    gate_up: Tensor,
    gate_up_scales: Tensor,
    down: Tensor,
    down_scales: Tensor,
    activation: str,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    x_scales: Tensor | None = None,
    dtype: torch.dtype | None = None,
    changes: ExpertChanges | None = None,
) -> Tensor:
    """See `coded_words`. Does not wait for the device."""
    if activation not in KINDS:
        raise KeyError(activation)
    experts, count, top_k, dtype = len(down), ids.numel(), ids.shape[1], dtype or x.dtype
    if not count or not experts:
        return torch.zeros_like(x, dtype=dtype)
    weights, ids = weights.contiguous(), ids.contiguous()
    rows = min(64, _block_rows(count, experts))
    pairs, blocks = sort_pairs(ids, experts, rows)

    def grouped(
        rounded: Tensor, x_scales: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None, per_row: int
    ) -> Tensor:
        features, groups = scales.shape[1:]
        out = x.new_empty(count, features, dtype=dtype)
        shape = _shape(rows, x.device, grouped=groups > 1, is_int8=codes.dtype == torch.int8)
        _rounded_grouped_kernel[len(blocks), triton.cdiv(features, shape.features)](
            *(rounded, x_scales, codes, scales, codes if bias is None else bias, out, pairs, blocks),
            *(features, rounded.shape[1], groups, per_row),
            GROUPED=groups > 1,
            BIAS=bias is not None,
            ROWS=rows,
            FEATURES=shape.features,
            DEPTH=shape.depth,
            num_warps=shape.warps,
            num_stages=shape.stages,
        )
        return out

    if x_scales is None:
        x, x_scales = round_rows(x, gate_up.dtype, gate_up_scales.shape[2])
    both = grouped(x, x_scales, gate_up, gate_up_scales, gate_up_bias, top_k)
    is_gated = gate_up.shape[1] > down.shape[2]
    if changes is not None:
        change(both, changes.x, changes.gate_up, changes)
    inner = act_mul_rounded(both, activation, down.dtype, down_scales.shape[2], is_gated)
    outer = grouped(*inner, down, down_scales, down_bias, 1)
    if changes is not None and changes.down is not None:
        plain = (act_mul if is_gated else reference.activate)(both, activation)
        change(outer, plain, changes.down, changes)
    return sum_pairs(outer, weights, ids, experts)
