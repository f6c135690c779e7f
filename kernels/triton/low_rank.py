"""The low-rank changes of a linear layer by adapters: a launch for the products with A, and one for those with B.

A block is rows of one adapter. The number of blocks depends on the adapters, and an upper bound of it on the numbers of
rows and slots alone: each program finds its own block in the starts of the slots' rows, and ends at once if there is
none. So a captured step has the same launches whatever adapters its rows have. Long rows are multiplied by A in
splits, whose sums the second launch adds up in order: there are no atomics, and a result does not depend on other rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.low_rank import AdapterRows, LowRankPool

_FEW_ROWS = 256
"""Up to so many, blocks are the smallest that tensor cores multiply: most adapters have a row or two."""
_SPLIT = 1024
"""Inputs of a split."""
_MOST_SLOTS = 256
"""Whose starts each program looks at. Experts have a slot for each adapter and expert."""
_MOST_SUMS = 1 << 26
"""Sums of products with A that two launches keep, which is 256 MiB. Ranks of whole matrices are large: then, steps with
many rows are divided."""


@triton.jit
def _find_block(starts, count, number, COUNT: tl.constexpr, SIZE: tl.constexpr):
    """The place of block `number` in `count` groups, which are divided into blocks of SIZE each: the group, the block's
    begin, and the end of the group. Begin and end are equal if there are fewer blocks."""
    group = tl.arange(0, COUNT)
    begin = tl.load(starts + group, mask=group < count, other=0).to(tl.int32)
    end = tl.load(starts + group + 1, mask=group < count, other=0).to(tl.int32)
    blocks = (end - begin + SIZE - 1) // SIZE
    after = tl.cumsum(blocks, axis=0)
    is_own = (number >= after - blocks) & (number < after)
    first = tl.where(is_own, begin + (number - after + blocks) * SIZE, 0)
    own_end = tl.where(is_own, end, 0)
    return tl.sum(tl.where(is_own, group, 0), axis=0), tl.sum(first, axis=0), tl.sum(own_end, axis=0)


@triton.jit
def _find_rows(starts, slot_of, num_slots, number, SLOTS: tl.constexpr, ROWS: tl.constexpr):
    """A block of rows of one slot, as `_find_block` does. If SLOTS is 0, the slots are too many to be looked at by each
    program: the block is the one that begins with row `number` in order, whose slot is in `slot_of`."""
    if SLOTS > 0:
        slot, begin, end = _find_block(starts, num_slots, number, SLOTS, ROWS)
    else:
        slot = tl.load(slot_of + number).to(tl.int32)
        first, end = tl.load(starts + slot).to(tl.int32), tl.load(starts + slot + 1).to(tl.int32)
        begin = number
        end = tl.where((slot < num_slots) & ((begin - first) % ROWS == 0), end, begin)
    return slot, begin, end


@triton.jit(do_not_specialize=["num_rows"])
def _shrink_kernel(
    x,
    a,
    inner,
    slots,
    order,
    starts,
    slot_of,
    num_rows,
    num_slots,
    depth,
    x_row,
    per_row,
    largest,
    SLOTS: tl.constexpr,
    ROWS: tl.constexpr,
    RANKS: tl.constexpr,
    SPLIT: tl.constexpr,
    DEPTH: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Multiply a block of rows by A of a part, for a split of the inputs, into `inner`
    `[parts, splits, rows in order, largest]`. `per_row` rows one after another have the inputs of one row of `x`."""
    slot, begin, end = _find_rows(starts, slot_of, num_slots, tl.program_id(0), SLOTS, ROWS)
    if begin < end:
        split, part = tl.program_id(1), tl.program_id(2)
        span = slots + (slot * tl.num_programs(2) + part) * 2
        first, ranks = tl.load(span), tl.minimum(tl.load(span + 1), largest)
        row = begin + tl.arange(0, ROWS)
        is_row = row < end
        source = x + tl.load(order + row, mask=is_row, other=0) // per_row * x_row
        to = inner + ((part * tl.num_programs(1) + split) * num_rows + row.to(tl.int64)) * largest
        for rank in range(0, ranks, RANKS):
            number = rank + tl.arange(0, RANKS)
            is_rank = number < ranks
            matrix = a + (first + number) * depth
            product = tl.zeros([ROWS, RANKS], tl.float32)
            for start in range(split * SPLIT, tl.minimum(depth, (split + 1) * SPLIT), DEPTH):
                column = start + tl.arange(0, DEPTH)
                is_column = column < depth
                values = tl.load(source[:, None] + column, mask=is_row[:, None] & is_column, other=0.0)
                weights = tl.load(matrix + column[:, None], mask=is_column[:, None] & is_rank, other=0.0)
                product = tl.dot(values, weights.to(values.dtype), product, input_precision=PRECISION)
            tl.store(to[:, None] + number, product, mask=is_row[:, None] & is_rank)


@triton.jit(do_not_specialize=["num_rows"])
def _expand_kernel(
    out,
    inner,
    b,
    slots,
    bounds,
    vectors,
    scale,
    bias,
    order,
    starts,
    slot_of,
    num_rows,
    num_slots,
    num_parts,
    splits,
    features,
    widest,
    out_row,
    largest,
    LEAST: tl.constexpr,
    SCALED: tl.constexpr,
    BIASED: tl.constexpr,
    WIDE: tl.constexpr,
    SLOTS: tl.constexpr,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
    RANKS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Multiply a block of rows of `inner` by a block of the columns of a part of B, and change `out`, if the rank is at
    least LEAST. If WIDE, products are of float32 (TF32, if that is the precision), else of the type of `b`."""
    slot, begin, end = _find_rows(starts, slot_of, num_slots, tl.program_id(0), SLOTS, ROWS)
    part, left, right = _find_block(bounds, num_parts, tl.program_id(1), PARTS, COLUMNS)
    if (begin < end) & (left < right):
        span = slots + (slot * num_parts + part) * 2
        first, ranks = tl.load(span), tl.minimum(tl.load(span + 1), largest)
        if ranks >= LEAST:
            row, column = begin + tl.arange(0, ROWS), left + tl.arange(0, COLUMNS)
            is_row, is_column = row < end, column < right
            of_part = column - tl.load(bounds + part)
            first_row = part * splits * num_rows + row.to(tl.int64)
            product = tl.zeros([ROWS, COLUMNS], tl.float32)
            for rank in range(0, ranks, RANKS):
                number = rank + tl.arange(0, RANKS)
                is_rank = number < ranks
                values = tl.zeros([ROWS, RANKS], tl.float32)
                for split in range(splits):
                    source = inner + (first_row + split * num_rows)[:, None] * largest + number
                    values += tl.load(source, mask=is_row[:, None] & is_rank, other=0.0)
                weights = tl.load(
                    b + (first + number)[:, None] * widest + of_part, mask=is_rank[:, None] & is_column, other=0.0
                )
                if WIDE:
                    product = tl.dot(values, weights.to(tl.float32), product, input_precision=PRECISION)
                else:
                    product = tl.dot(values.to(weights.dtype), weights, product, input_precision=PRECISION)
            to = out + tl.load(order + row, mask=is_row, other=0)[:, None] * out_row + column
            inside = is_row[:, None] & is_column
            value = tl.load(to, mask=inside, other=0.0).to(tl.float32) + product
            if SCALED or BIASED:
                place = tl.load(vectors + slot) * features + column  # negative: the slot has no vector
                has_vector = is_column & (place >= 0)
                if SCALED:
                    value *= tl.load(scale + place, mask=has_vector, other=1.0)
                if BIASED:
                    value += tl.load(bias + place, mask=has_vector, other=0.0)
            tl.store(to, value.to(out.dtype.element_ty), mask=inside)


def add_low_rank(out: Tensor, x: Tensor, pool: LowRankPool, rows: AdapterRows) -> None:
    """See `quire.kernels.reference`. Does not wait for the device; all shapes depend on the shapes of the arguments."""
    if not len(out) or not len(pool.slots):
        return
    splits = triton.cdiv(x.shape[1], _SPLIT)
    size = max(1, _MOST_SUMS // (splits * pool.slots.shape[1] * max(1, pool.largest_rank)))
    for first in range(0, len(out), size):
        order = rows.order[first : first + size]
        starts = rows.starts if size >= len(out) else (rows.starts - first).clamp(0, len(order))
        _add_low_rank(out, x.contiguous(), pool, order, starts, splits)


def _add_low_rank(out: Tensor, x: Tensor, pool: LowRankPool, order: Tensor, starts: Tensor, splits: int) -> None:
    """Change the rows `order`."""
    count, depth, (num_slots, num_parts, _) = len(order), x.shape[1], pool.slots.shape
    is_wide = x.dtype == torch.float32
    block_rows, warps = (16, 4) if count <= _FEW_ROWS else (32 if is_wide else 64, 8)
    if num_slots <= _MOST_SLOTS:
        blocks = min(count, count // block_rows + num_slots)  # at least those of any division of the rows
        slot_group, slot_of = max(32, triton.next_power_of_2(num_slots)), starts
    else:
        blocks, slot_group = count, 0
        slot_of = torch.searchsorted(starts[1:-1], torch.arange(count, device=x.device), right=True)
    ranks = min(64, max(16, triton.next_power_of_2(pool.largest_rank)))
    columns = 64 if is_wide else 128
    inner = torch.empty(num_parts, splits, count, pool.largest_rank, dtype=torch.float32, device=x.device)
    precision = "ieee" if is_wide else "tf32"
    _shrink_kernel[blocks, splits, num_parts](
        *(x, pool.a, inner, pool.slots, order, starts, slot_of),
        *(count, num_slots, depth, x.stride(0), len(out) // len(x), pool.largest_rank),
        SLOTS=slot_group,
        ROWS=block_rows,
        RANKS=ranks,
        SPLIT=_SPLIT,
        DEPTH=32 if is_wide else 128,
        PRECISION=precision,
        num_warps=warps,
        num_stages=3,
    )
    scale, bias = (out if each is None else each for each in (pool.scale, pool.bias))
    _expand_kernel[blocks, sum(triton.cdiv(width, columns) for width in pool.widths)](
        *(out, inner, pool.b, pool.slots, pool.bounds, pool.vectors, scale, bias, order, starts, slot_of),
        *(count, num_slots, num_parts, splits, out.shape[1], pool.b.shape[1], out.stride(0), pool.largest_rank),
        LEAST=0 if pool.scale is not None or pool.bias is not None else 1,
        SCALED=pool.scale is not None,
        BIASED=pool.bias is not None,
        WIDE=x.dtype != torch.bfloat16,  # the products with A may exceed float16
        SLOTS=slot_group,
        PARTS=triton.next_power_of_2(num_parts),
        ROWS=block_rows,
        RANKS=ranks,
        COLUMNS=columns,
        PRECISION=precision,
        num_warps=warps,
        num_stages=2,
    )
