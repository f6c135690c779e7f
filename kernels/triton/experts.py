"""The feed-forwards of a mixture of experts: rows sorted by expert, then two grouped matmuls over blocks of them.

The blocks of an expert are whole, padded with rows that do nothing; how many there can be at most is known without
asking the device. Each (token, expert) pair has a row of the result, which are summed in the order of the token's
experts: no atomics, and nothing depends on the other tokens.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.elementwise import KINDS, gated

_COLUMNS, _DEPTH = 64, 32
"""A tile of the result's columns, and of what is summed over."""


def _block_rows(pairs: int, experts: int) -> int:
    """Rows of a block: about what an expert gets, so that few are padding."""
    return min(128, max(16, triton.next_power_of_2(pairs // max(1, experts))))


def _sort(ids: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Pairs (token * top_k + place) in the order of their experts, and where each expert's begin, `[experts + 1]`.

    Those of other ranks come last, and belong to none.
    """
    flat = ids.flatten()
    flat = torch.where((flat >= 0) & (flat < experts), flat, experts)
    ordered, pairs = flat.sort(stable=True)
    begins = torch.searchsorted(ordered, torch.arange(experts + 1, device=ids.device, dtype=ordered.dtype))
    return pairs.to(torch.int32), begins.to(torch.int32)


@triton.jit
def _expert_of(blocks, experts, place):
    """The last expert whose blocks begin at or before `place`; `blocks` are the first of each, rising."""
    low, high = 0, experts
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(blocks + middle) <= place:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def _grouped_kernel(
    x,
    weight,
    bias,
    weights,
    out,
    pairs,
    begins,
    blocks,
    experts,
    columns,
    depth,
    x_row,
    weight_expert,
    weight_row,
    per_row,
    GATED: tl.constexpr,
    KIND: tl.constexpr,
    BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """A block of one expert's rows by a tile of its columns.

    GATED: rows of `x` by token (`per_row` pairs each), gates and ups, and `gated` of them to the pair's row of `out`.
    Else: rows of `x` by pair, and the product, weighted, to the pair's row.
    """
    place = tl.program_id(0)
    if place < tl.load(blocks + experts):
        expert = _expert_of(blocks, experts, place)
        row = tl.load(begins + expert) + (place - tl.load(blocks + expert)) * ROWS + tl.arange(0, ROWS)
        is_row = row < tl.load(begins + expert + 1)
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
        if GATED:
            product = gated(product, ups, KIND)
        else:
            product = product * tl.load(weights + pair, mask=is_row, other=0.0)[:, None]
        to = out + pair[:, None] * columns + column[None, :]
        tl.store(to, product.to(out.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])


def fused_experts(
    x: Tensor,
    weights: Tensor,
    ids: Tensor,
    gate_up: Tensor,
    down: Tensor,
    activation: str,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
) -> Tensor:
    """See `quire.kernels.reference`. Nothing is read back from the device."""
    if activation not in KINDS:
        raise KeyError(activation)
    (tokens, hidden), (experts, _, size), top_k = x.shape, down.shape, ids.shape[1]
    count = tokens * top_k
    if not count:
        return torch.zeros_like(x)
    rows = _block_rows(count, experts)
    pairs, begins = _sort(ids, experts)
    blocks = torch.zeros(experts + 1, dtype=torch.int32, device=x.device)
    blocks[1:] = (begins.diff() + rows - 1).div(rows, rounding_mode="floor").cumsum(0)
    most = min(count, triton.cdiv(count, rows) + experts)
    precision = "ieee" if x.dtype == torch.float32 else "tf32"
    inner = torch.empty((count, size), dtype=x.dtype, device=x.device)
    out = torch.zeros((count, hidden), dtype=torch.float32, device=x.device)  # others' pairs stay 0
    x, weights = x.contiguous(), weights.contiguous()
    for source, matrices, bias, result, per_row in (
        (x, gate_up, gate_up_bias, inner, top_k),
        (inner, down, down_bias, out, 1),
    ):
        columns = result.shape[1]
        _grouped_kernel[(most, triton.cdiv(columns, _COLUMNS))](
            *(source, matrices, matrices if bias is None else bias, weights, result, pairs, begins, blocks, experts),
            *(columns, source.shape[1], source.stride(0), matrices.stride(0), matrices.stride(1), per_row),
            GATED=result is inner,
            KIND=activation,
            BIAS=bias is not None,
            ROWS=rows,
            COLUMNS=_COLUMNS,
            DEPTH=_DEPTH,
            PRECISION=precision,
            num_warps=4,
        )
    return out.view(tokens, top_k, hidden).sum(dim=1).to(x.dtype)
