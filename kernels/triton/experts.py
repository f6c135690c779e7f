"""The feed-forward layers of a mixture of experts: sort rows by expert, then two grouped matmuls over blocks of rows.

The last block of an expert is padded; an upper bound of the number of blocks is known on the host. Each (token, expert)
pair has its own row of the result, and a token's rows are summed in the order of its experts: there are no atomics, and
a result does not depend on the other tokens.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.low_rank import ExpertChanges, LowRankPool
from quire.kernels.triton import limits
from quire.kernels.triton.elementwise import KINDS, act_mul, activated, gated
from quire.kernels.triton.limits import Tile
from quire.kernels.triton.low_rank import add_low_rank

_SORTED_AT_ONCE, _SUMMED_AT_ONCE = 1024, 1024


def _block_rows(pairs: int, experts: int) -> int:
    """Rows of a block: about the rows per expert, to limit padding."""
    return min(128, max(16, triton.next_power_of_2(pairs // max(1, experts))))


def _shape(rows: int, blocks: int, columns: int, dtype: torch.dtype) -> Tile:
    """With few rows, the matmul is bound by loads in flight and busy processors; with many, by the tensor cores."""
    if dtype == torch.float32:
        return Tile(rows, 64, 32, 4, 3)
    if rows >= 64:
        return Tile(rows, 128, 64, rows // 16, 3)
    return Tile(rows, 64 if blocks * columns >= 64 * limits.PROCESSORS else 32, 128, 4, 5)


@triton.jit(do_not_specialize=["count", "most"])
def _sort_kernel(
    ids,
    pairs,
    blocks,
    count,
    experts,
    most,
    ROWS: tl.constexpr,
    EXPERTS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Store the pairs of one expert in ascending order after those of the experts before it, and likewise its blocks.

    A block is `[3]`: the expert, the index of the block's first pair in `pairs`, and the end of the expert's pairs.
    `ids` of experts on other ranks are skipped; unused blocks have no pairs.
    """
    expert = tl.program_id(0)
    number, lane = tl.arange(0, EXPERTS), tl.arange(0, CHUNK)
    counts = tl.zeros([EXPERTS], tl.int32)
    for start in range(0, count, CHUNK):
        of = tl.load(ids + start + lane, mask=start + lane < count, other=-1).to(tl.int32)
        counts += tl.histogram(of, EXPERTS, mask=(of >= 0) & (of < experts))
    in_blocks = (counts + ROWS - 1) // ROWS
    first = tl.sum(tl.where(number < expert, counts, 0), axis=0)
    block = tl.sum(tl.where(number < expert, in_blocks, 0), axis=0)
    place, last = first, first + tl.sum(tl.where(number == expert, counts, 0), axis=0)
    if last > first:
        for start in range(0, count, CHUNK):
            of = tl.load(ids + start + lane, mask=start + lane < count, other=-1).to(tl.int32)
            is_own = of == expert
            to = place + tl.cumsum(is_own.to(tl.int32), axis=0) - 1
            tl.store(pairs + to, start + lane, mask=is_own)
            place += tl.sum(is_own.to(tl.int32), axis=0)
    for begin in range(first, last, ROWS):
        tl.store(blocks + 3 * block, expert)
        tl.store(blocks + 3 * block + 1, begin)
        tl.store(blocks + 3 * block + 2, last)
        block += 1
    if expert == experts - 1:
        for rest in range(block, most):
            tl.store(blocks + 3 * rest + 1, 0)
            tl.store(blocks + 3 * rest + 2, 0)


@triton.jit
def _grouped_kernel(
    x,
    weight,
    bias,
    out,
    pairs,
    blocks,
    columns,
    depth,
    x_row,
    weight_expert,
    weight_row,
    out_row,
    per_row,
    GATED: tl.constexpr,
    KIND: tl.constexpr,
    ACTIVATED: tl.constexpr,
    BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Multiply a block of an expert's rows by a tile of its columns into the pairs' rows of `out`.

    Each row of `x` is that of `per_row` pairs. If GATED, the columns are gates and ups. If ACTIVATED, `gated` of them,
    or else the activation, is applied.
    """
    block = blocks + 3 * tl.program_id(0)
    begin, end = tl.load(block + 1), tl.load(block + 2)
    if begin < end:
        expert = tl.load(block)
        row = begin + tl.arange(0, ROWS)
        is_row = row < end
        pair = tl.load(pairs + row, mask=is_row, other=0).to(tl.int64)
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        is_column = column < columns
        source = x + pair // per_row * x_row
        matrix = weight + expert.to(tl.int64) * weight_expert
        product, ups = tl.zeros([ROWS, COLUMNS], tl.float32), tl.zeros([ROWS, COLUMNS], tl.float32)
        for start in range(0, depth, DEPTH):
            inner = start + tl.arange(0, DEPTH)
            is_inner = inner < depth
            values = tl.load(source[:, None] + inner, mask=is_row[:, None] & is_inner, other=0.0)
            at = matrix + column[None, :] * weight_row + inner[:, None]
            inside = is_inner[:, None] & is_column[None, :]
            product = tl.dot(values, tl.load(at, mask=inside, other=0.0), product, input_precision=PRECISION)
            if GATED:
                second = tl.load(at + columns * weight_row, mask=inside, other=0.0)
                ups = tl.dot(values, second, ups, input_precision=PRECISION)
        if BIAS:
            biases = bias + expert * (2 * columns if GATED else columns) + column
            product += tl.load(biases, mask=is_column, other=0.0).to(tl.float32)[None, :]
            if GATED:
                ups += tl.load(biases + columns, mask=is_column, other=0.0).to(tl.float32)[None, :]
        if ACTIVATED:
            product = gated(product, ups, KIND) if GATED else activated(product, KIND)
        inside = is_row[:, None] & is_column[None, :]
        to = out + pair[:, None] * out_row + column[None, :]
        tl.store(to, product.to(out.dtype.element_ty), mask=inside)
        if GATED and not ACTIVATED:
            tl.store(to + columns, ups.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _sum_kernel(rows, weights, ids, out, experts, columns, TOP_K: tl.constexpr, BLOCK: tl.constexpr):
    """The weighted sum of a token's rows; experts on other ranks have none."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for place in tl.static_range(TOP_K):
        pair = token * TOP_K + place
        expert = tl.load(ids + pair)
        stored = tl.where((expert >= 0) & (expert < experts), columns, 0)
        row = tl.load(rows + pair * columns + column, mask=column < stored, other=0.0)
        total += row.to(tl.float32) * tl.load(weights + pair)
    tl.store(out + token * columns + column, total.to(out.dtype.element_ty), mask=column < columns)


def sort_pairs(ids: Tensor, experts: int, rows: int) -> tuple[Tensor, Tensor]:
    """The pairs of `ids` by expert, and blocks of up to `rows` of them: see `_sort_kernel`."""
    count = ids.numel()
    most = min(count, triton.cdiv(count, rows) + experts)
    pairs = torch.empty(count, dtype=torch.int32, device=ids.device)
    blocks = torch.empty((most, 3), dtype=torch.int32, device=ids.device)
    _sort_kernel[(experts,)](
        *(ids, pairs, blocks, count, experts, most),
        ROWS=rows,
        EXPERTS=max(32, triton.next_power_of_2(experts)),
        CHUNK=min(_SORTED_AT_ONCE, max(32, triton.next_power_of_2(count))),
        num_warps=4,
    )
    return pairs, blocks


def sum_pairs(rows: Tensor, weights: Tensor, ids: Tensor, experts: int) -> Tensor:
    """The weighted sums `[tokens, hidden]` of the rows `[pairs, hidden]` of each token."""
    (tokens, top_k), hidden = ids.shape, rows.shape[1]
    out = rows.new_empty(tokens, hidden)
    _sum_kernel[tokens, triton.cdiv(hidden, _SUMMED_AT_ONCE)](
        rows, weights, ids, out, experts, hidden, TOP_K=top_k, BLOCK=_SUMMED_AT_ONCE, num_warps=4
    )
    return out


def fused_experts(
    x: Tensor,
    weights: Tensor,
    ids: Tensor,
    gate_up: Tensor,
    down: Tensor,
    activation: str,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    changes: ExpertChanges | None = None,
) -> Tensor:
    """See `quire.kernels.reference`. Does not wait for the device; all shapes depend on the shapes of the arguments."""
    if activation not in KINDS:
        raise KeyError(activation)
    (experts, hidden, size), count, top_k = down.shape, ids.numel(), ids.shape[1]
    if not count or not experts:
        return torch.zeros_like(x)
    x, weights, ids = x.contiguous(), weights.contiguous(), ids.contiguous()
    rows = _block_rows(count, experts)
    pairs, blocks = sort_pairs(ids, experts, rows)
    is_gated, is_changed = gate_up.shape[1] > size, changes is not None

    def grouped(source: Tensor, matrices: Tensor, bias: Tensor | None, out: Tensor, is_first: bool) -> None:
        columns = size if is_first else hidden
        shape = _shape(rows, len(blocks), columns, x.dtype)
        _grouped_kernel[len(blocks), triton.cdiv(columns, shape.features)](
            *(source, matrices, matrices if bias is None else bias, out, pairs, blocks, columns, source.shape[1]),
            *(source.stride(0), matrices.stride(0), matrices.stride(1), out.stride(0), top_k if is_first else 1),
            GATED=is_gated and is_first,
            KIND=activation,
            ACTIVATED=is_first and not is_changed,
            BIAS=bias is not None,
            ROWS=rows,
            COLUMNS=shape.features,
            DEPTH=shape.depth,
            PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
            num_warps=shape.warps,
            num_stages=shape.stages,
        )

    if changes is None:
        inner = x.new_empty(count, size)
        grouped(x, gate_up, gate_up_bias, inner, True)
    else:
        both = x.new_empty(count, gate_up.shape[1], dtype=torch.float32)
        grouped(x, gate_up, gate_up_bias, both, True)
        change(both, changes.x, changes.gate_up, changes)
        inner = act_mul(both, activation, is_gated).to(x.dtype)  # as without changes, to the last bit
        del both  # it is large
    outer = x.new_empty(count, hidden)
    grouped(inner, down, down_bias, outer, False)
    if changes is not None:
        change(outer, inner, changes.down, changes)
    return sum_pairs(outer, weights, ids, experts)


def change(out: Tensor, x: Tensor, pool: LowRankPool | None, changes: ExpertChanges) -> None:
    """Make one of the `changes` to the products of all pairs; those of experts on other ranks may be anything."""
    if pool is not None:
        add_low_rank(out, x, pool, changes.pairs)
