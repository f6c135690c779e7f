"""The compression of groups of tokens to entries: a program for each token, which ends at once unless a group does."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.cache import LARGEST
from quire.kernels.triton.selection import _place_of

_ROWS = 16
"""Tokens of a group that are read together."""


@triton.jit(
    do_not_specialize=["slots", "tables", "lengths", "starts", "entry_tables", "requests", "table_row", "entry_row"]
)
def _compress_kernel(
    inputs,
    bias,
    weight,
    cos_sin,
    cache,
    slots,
    tables,
    lengths,
    starts,
    entry_tables,
    requests,
    width,
    head_dim,
    half,
    inputs_block,
    inputs_row,
    cache_block,
    cache_row,
    table_row,
    entry_row,
    eps,
    RATIO: tl.constexpr,
    SPAN: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    ENTRIES: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    NORMALIZED: tl.constexpr,
    GATED: tl.constexpr,
):
    """Store the entry whose group ends with a token, if there is one. A block has BLOCK tokens, or ENTRIES entries."""
    token = tl.program_id(0)
    request, seen = _place_of(starts, lengths, requests, token)
    if (seen % RATIO == 0) & (tl.load(slots + token) >= 0):
        column = tl.arange(0, HEAD_DIM)
        inside = column < head_dim
        most = tl.full([HEAD_DIM], float("-inf"), tl.float32)
        weights, total = tl.zeros([HEAD_DIM], tl.float32), tl.zeros([HEAD_DIM], tl.float32)
        for start in range(0, SPAN, ROWS):
            row = start + tl.arange(0, ROWS)
            place = seen - SPAN + row
            is_row = (row < SPAN) & (place >= 0)
            block = tl.load(tables + request * table_row + place // BLOCK, mask=is_row, other=0).to(tl.int64)
            feature = (row // RATIO * head_dim)[:, None] + column[None, :]
            at = (inputs + block * inputs_block + place % BLOCK * inputs_row)[:, None] + feature
            mask = is_row[:, None] & inside[None, :]
            gates = tl.load(bias + (row % RATIO * width)[:, None] + feature, mask=mask, other=0.0)
            if GATED:
                gates += tl.load(at + width, mask=mask, other=0.0).to(tl.float32)
            gates = tl.where(mask, gates, float("-inf"))
            highest = tl.maximum(most, tl.max(gates, axis=0))
            finite = tl.where(highest == float("-inf"), 0.0, highest)
            kept, shares = tl.exp(most - finite), tl.exp(gates - finite[None, :])
            values = tl.load(at, mask=mask, other=0.0).to(tl.float32)
            weights, total = weights * kept + tl.sum(shares, axis=0), total * kept + tl.sum(shares * values, axis=0)
            most = highest
        entry = tl.where(inside, total / tl.where(inside, weights, 1.0), 0.0)
        if NORMALIZED:
            factor = tl.rsqrt(tl.sum(entry * entry, axis=0) / head_dim + eps)
            entry = entry * factor * tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
        first, second = tl.split(tl.reshape(entry, [HEAD_DIM // 2, 2]))
        pair = tl.arange(0, HEAD_DIM // 2)
        turn = pair - (head_dim // 2 - half)  # the last pairs are rotated
        is_pair = pair < head_dim // 2
        is_rotary = is_pair & (turn >= 0)
        angles = cos_sin + token.to(tl.int64) * 2 * half + turn
        cos = tl.load(angles, mask=is_rotary, other=1.0)
        sin = tl.load(angles + half, mask=is_rotary, other=0.0)
        block = tl.load(entry_tables + request * entry_row + (seen - 1) // BLOCK).to(tl.int64)
        to = cache + block * cache_block + (seen - 1) % BLOCK // (BLOCK // ENTRIES) * cache_row
        kind = cache.dtype.element_ty
        tl.debug_barrier()  # the row may be one of the inputs, which are all read by now
        plain = 2 * half + 2 * pair
        tl.store(to + tl.where(is_rotary, turn, plain), (first * cos - second * sin).to(kind), mask=is_pair)
        tl.store(to + tl.where(is_rotary, half + turn, plain + 1), (second * cos + first * sin).to(kind), mask=is_pair)


def compress_tokens(
    inputs: Tensor,
    position_bias: Tensor,
    weight: Tensor | None,
    eps: float,
    cos_sin: Tensor,
    cache: Tensor,
    slots: Tensor,
    block_tables: Tensor,
    sequence_lengths: Tensor,
    query_starts: Tensor,
    entry_tables: Tensor,
) -> None:
    """See `quire.kernels.reference`. Heads are even. Never waits for the device."""
    (ratio, width), head_dim = position_bias.shape, cache.shape[4]
    assert head_dim % 2 == 0
    assert cache.dtype not in LARGEST
    span = width // head_dim * ratio
    if not len(slots):
        return
    _compress_kernel[(len(slots),)](
        *(inputs, position_bias, position_bias if weight is None else weight, cos_sin.contiguous(), cache, slots),
        *(block_tables, sequence_lengths),
        *(query_starts, entry_tables, len(sequence_lengths), width, head_dim, cos_sin.shape[1] // 2),
        *(inputs.stride(1), inputs.stride(3), cache.stride(1), cache.stride(3)),
        *(block_tables.stride(0), entry_tables.stride(0), eps),
        RATIO=ratio,
        SPAN=span,
        ROWS=min(_ROWS, triton.next_power_of_2(span)),
        BLOCK=inputs.shape[3],
        ENTRIES=cache.shape[3],
        HEAD_DIM=triton.next_power_of_2(head_dim),
        NORMALIZED=weight is not None,
        GATED=inputs.shape[4] == 2 * width,
        num_warps=8 if head_dim > 128 else 4,
    )
