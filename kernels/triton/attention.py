"""Paged attention: prompts in tiles of queries, decodes split over their keys.

A program has the queries of some heads that share a KV head, so that keys and values are read once for all of them.
Softmax is taken online over tiles of keys (Milakov & Gimelshein 2018; Dao et al. 2022). A decode's keys are cut into as
many parts as its own length asks for, whatever is beside it (flash decoding, Dao et al. 2023), and joined in their
order: what comes out does not depend on the batch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_PARTS = 16
"""A decode is cut into so many parts at most, of at least so many keys:"""
_PART_KEYS = 512


@triton.jit
def _request_of(starts, requests, place, size: tl.constexpr):
    """The last request `r` with `starts[r] // size + r <= place`: the one that the tile `place` of queries is of."""
    low, high = 0, requests
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(starts + middle) // size + middle <= place:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def _attend(
    query,
    cache,
    table,
    slopes,
    rows_at,
    heads_at,
    positions,
    is_row,
    begin,
    end,
    scale,
    softcap,
    window,
    block_size,
    cache_side,
    cache_block,
    cache_row,
    head_dim,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SLOPES: tl.constexpr,
    FIRST: tl.constexpr,
    REST: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Queries `[ROWS]` against the keys from `begin` to `end`: greatest score, sum, and weighted values.

    The features are taken in two pieces, FIRST and REST of them (a power of two each, padded), as no head size is to
    be padded to nearly twice what it is.
    """
    first, rest = tl.arange(0, FIRST), FIRST + tl.arange(0, REST)
    q_first = tl.load(query + rows_at[:, None] + first, mask=is_row[:, None] & (first < head_dim), other=0.0)
    q_rest = tl.load(query + rows_at[:, None] + rest, mask=is_row[:, None] & (rest < head_dim), other=0.0)
    slope = tl.zeros([ROWS], tl.float32)
    if SLOPES:
        slope = tl.load(slopes + heads_at, mask=is_row, other=0.0)
    greatest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    out_first, out_rest = tl.zeros([ROWS, FIRST], tl.float32), tl.zeros([ROWS, REST], tl.float32)
    for start in range(begin, end, KEYS):
        place = start + tl.arange(0, KEYS)
        is_key = place < end
        block = tl.load(table + place // block_size, mask=is_key, other=0).to(tl.int64)
        at = cache + block * cache_block + place % block_size * cache_row
        mask_first, mask_rest = is_key[:, None] & (first < head_dim), is_key[:, None] & (rest < head_dim)
        k_first = tl.load(at[:, None] + first, mask=mask_first, other=0.0).to(q_first.dtype)
        k_rest = tl.load(at[:, None] + rest, mask=mask_rest, other=0.0).to(q_first.dtype)
        scores = tl.dot(q_first, tl.trans(k_first), input_precision=PRECISION)
        scores = tl.dot(q_rest, tl.trans(k_rest), scores, input_precision=PRECISION) * scale
        if SOFTCAP:  # tanh(x) = 2 sigmoid(2 x) - 1
            scores = softcap * (2.0 * tl.sigmoid(2.0 * scores / softcap) - 1.0)
        distance = place[None, :] - positions[:, None]
        if SLOPES:
            scores += slope[:, None] * distance.to(tl.float32)
        seen = (distance <= 0) & is_key[None, :]
        if WINDOW:
            seen = seen & (distance > -window)
        scores = tl.where(seen, scores, float("-inf"))
        news = tl.maximum(greatest, tl.max(scores, axis=1))
        base = tl.where(news == float("-inf"), 0.0, news)  # a row that has seen no key yet
        weights = tl.exp(scores - base[:, None])
        keep = tl.exp(greatest - base)
        total = total * keep + tl.sum(weights, axis=1)
        v_first = tl.load(at[:, None] + cache_side + first, mask=mask_first, other=0.0).to(q_first.dtype)
        v_rest = tl.load(at[:, None] + cache_side + rest, mask=mask_rest, other=0.0).to(q_first.dtype)
        halves = weights.to(q_first.dtype)
        out_first = tl.dot(halves, v_first, out_first * keep[:, None], input_precision=PRECISION)
        out_rest = tl.dot(halves, v_rest, out_rest * keep[:, None], input_precision=PRECISION)
        greatest = news
    return greatest, total, out_first, out_rest


@triton.jit
def _with_sink(greatest, total, sinks, heads_at, is_row, SINKS: tl.constexpr):
    """What the weighted values are to be scaled by, once a head's sink is one more score, without a value."""
    if SINKS:
        sink = tl.load(sinks + heads_at, mask=is_row, other=float("-inf"))
        news = tl.maximum(greatest, sink)
        base = tl.where(news == float("-inf"), 0.0, news)
        keep = tl.exp(greatest - base)
        return keep / (total * keep + tl.exp(sink - base))
    else:
        return 1.0 / total


@triton.jit
def _prompts_kernel(
    query,
    cache,
    tables,
    lengths,
    starts,
    sinks,
    slopes,
    out,
    requests,
    group,
    scale,
    softcap,
    window,
    block_size,
    head_dim,
    query_token,
    query_head,
    out_token,
    out_head,
    table_row,
    cache_side,
    cache_block,
    cache_head,
    cache_row,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    SLOPES: tl.constexpr,
    FIRST: tl.constexpr,
    REST: tl.constexpr,
    HEADS: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """A tile of QUERIES tokens of one request, and HEADS of the heads of one KV head; decodes are left out."""
    tile, kv_head, piece = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    request = _request_of(starts, requests, tile, QUERIES)
    start, stop = tl.load(starts + request), tl.load(starts + request + 1)
    count = (stop - start).to(tl.int32)
    tile -= (start // QUERIES + request).to(tl.int32)
    if (count > 1) & (tile * QUERIES < count):
        length = tl.load(lengths + request).to(tl.int32)
        row = tl.arange(0, QUERIES * HEADS)
        number, head = tile * QUERIES + row // HEADS, piece * HEADS + row % HEADS
        is_row = (number < count) & (head < group)
        token, heads_at = start + number, kv_head * group + head
        positions = length - count + number
        last = tl.minimum(tile * QUERIES + QUERIES, count)
        begin = 0
        if WINDOW:
            begin = tl.maximum(0, length - count + tile * QUERIES - window + 1)
        greatest, total, out_first, out_rest = _attend(
            query,
            cache + kv_head.to(tl.int64) * cache_head,
            tables + request.to(tl.int64) * table_row,
            slopes,
            token * query_token + heads_at * query_head,
            heads_at,
            positions,
            is_row,
            begin,
            length - count + last,
            scale,
            softcap,
            window,
            block_size,
            cache_side,
            cache_block,
            cache_row,
            head_dim,
            WINDOW,
            SOFTCAP,
            SLOPES,
            FIRST,
            REST,
            QUERIES * HEADS,
            KEYS,
            PRECISION,
        )
        factor = _with_sink(greatest, total, sinks, heads_at, is_row, SINKS)
        first, rest = tl.arange(0, FIRST), FIRST + tl.arange(0, REST)
        to = out + token * out_token + heads_at * out_head
        kind = out.dtype.element_ty
        tl.store(to[:, None] + first, (out_first * factor[:, None]).to(kind), is_row[:, None] & (first < head_dim))
        tl.store(to[:, None] + rest, (out_rest * factor[:, None]).to(kind), is_row[:, None] & (rest < head_dim))


@triton.jit
def _part(length, begin, PARTS: tl.constexpr, PART_KEYS: tl.constexpr, KEYS: tl.constexpr):
    """Parts that the keys from `begin` to `length` are cut into, and keys of each: of their number alone."""
    keys = length - begin
    parts = tl.minimum(PARTS, tl.cdiv(keys, PART_KEYS))
    size = tl.cdiv(tl.cdiv(keys, parts), KEYS) * KEYS
    return tl.cdiv(keys, size), size


@triton.jit
def _decodes_kernel(
    query,
    cache,
    tables,
    lengths,
    starts,
    slopes,
    sums,
    partial,
    group,
    heads,
    scale,
    softcap,
    window,
    block_size,
    head_dim,
    query_token,
    query_head,
    table_row,
    cache_side,
    cache_block,
    cache_head,
    cache_row,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SLOPES: tl.constexpr,
    FIRST: tl.constexpr,
    REST: tl.constexpr,
    HEADS: tl.constexpr,
    KEYS: tl.constexpr,
    PARTS: tl.constexpr,
    PART_KEYS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One part of a decode's keys, HEADS of the heads of one KV head: values in `partial`; maxima, sums in `sums`."""
    request, part, pieces = tl.program_id(0), tl.program_id(2), tl.cdiv(group, HEADS)
    kv_head, piece = tl.program_id(1) // pieces, tl.program_id(1) % pieces
    start = tl.load(starts + request)
    length = tl.load(lengths + request).to(tl.int32)
    begin = 0
    if WINDOW:
        begin = tl.maximum(0, length - window)
    parts, size = _part(length, begin, PARTS, PART_KEYS, KEYS)
    if (tl.load(starts + request + 1) - start == 1) & (part < parts):
        row = tl.arange(0, HEADS)
        head = piece * HEADS + row
        is_row = head < group
        heads_at = kv_head * group + head
        greatest, total, out_first, out_rest = _attend(
            query,
            cache + kv_head.to(tl.int64) * cache_head,
            tables + request.to(tl.int64) * table_row,
            slopes,
            start * query_token + heads_at * query_head,
            heads_at,
            tl.zeros([HEADS], tl.int32) + length - 1,
            is_row,
            begin + part * size,
            tl.minimum(begin + part * size + size, length),
            scale,
            softcap,
            window,
            block_size,
            cache_side,
            cache_block,
            cache_row,
            head_dim,
            WINDOW,
            SOFTCAP,
            SLOPES,
            FIRST,
            REST,
            HEADS,
            KEYS,
            PRECISION,
        )
        first, rest = tl.arange(0, FIRST), FIRST + tl.arange(0, REST)
        at = (request.to(tl.int64) * heads + heads_at) * PARTS + part
        tl.store(sums + 2 * at, greatest, is_row)
        tl.store(sums + 2 * at + 1, total, is_row)
        to = partial + at * head_dim
        tl.store(to[:, None] + first, out_first, is_row[:, None] & (first < head_dim))
        tl.store(to[:, None] + rest, out_rest, is_row[:, None] & (rest < head_dim))


@triton.jit
def _join_kernel(
    sums,
    partial,
    lengths,
    starts,
    sinks,
    out,
    heads,
    window,
    head_dim,
    out_token,
    out_head,
    WINDOW: tl.constexpr,
    SINKS: tl.constexpr,
    KEYS: tl.constexpr,
    PARTS: tl.constexpr,
    PART_KEYS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The parts of one head of a decode."""
    request, head = tl.program_id(0), tl.program_id(1)
    start = tl.load(starts + request)
    if tl.load(starts + request + 1) - start == 1:
        length = tl.load(lengths + request).to(tl.int32)
        begin = 0
        if WINDOW:
            begin = tl.maximum(0, length - window)
        parts, _ = _part(length, begin, PARTS, PART_KEYS, KEYS)
        part, column = tl.arange(0, PARTS), tl.arange(0, BLOCK)
        at = (request.to(tl.int64) * heads + head) * PARTS + part
        is_part = part < parts
        maxima = tl.load(sums + 2 * at, mask=is_part, other=float("-inf"))
        totals = tl.load(sums + 2 * at + 1, mask=is_part, other=0.0)
        greatest = tl.max(maxima, axis=0)
        if SINKS:
            greatest = tl.maximum(greatest, tl.load(sinks + head))
        keep = tl.exp(maxima - greatest)
        total = tl.sum(totals * keep, axis=0)
        if SINKS:
            total += tl.exp(tl.load(sinks + head) - greatest)
        inside = is_part[:, None] & (column < head_dim)[None, :]
        values = tl.load(partial + (at * head_dim)[:, None] + column[None, :], mask=inside, other=0.0)
        mixed = tl.sum(values * keep[:, None], axis=0) / total
        to = out + start * out_token + head * out_head
        tl.store(to + column, mixed.to(out.dtype.element_ty), column < head_dim)


def _pieces(head_dim: int) -> tuple[int, int]:
    """`head_dim` in two powers of two of at least 16, which together are no more than needed."""
    first = max(16, 1 << (head_dim.bit_length() - 1))
    if first >= head_dim:
        return (max(16, first // 2), max(16, first // 2)) if first > 16 else (16, 16)
    return first, max(16, triton.next_power_of_2(head_dim - first))


def _tile(head_dim: int, width: int) -> tuple[int, int]:
    """Rows (queries × heads) and keys of a tile, of numbers of `width` bytes: what fits registers and shared memory."""
    return 64 if head_dim <= 256 else 16, 64 if head_dim * width <= 512 else 32 if head_dim * width <= 1152 else 16


def paged_attention(
    query: Tensor,
    cache: Tensor,
    block_tables: Tensor,
    sequence_lengths: Tensor,
    query_starts: Tensor,
    scale: float,
    *,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    slopes: Tensor | None = None,
) -> Tensor:
    """See `quire.kernels.reference`; caches of floats. Nothing is read back from the device."""
    if query.stride(-1) != 1:
        query = query.contiguous()
    tokens, heads, head_dim = query.shape
    kv_heads, block_size = cache.shape[2:4]
    requests, group = len(sequence_lengths), heads // kv_heads
    out = torch.empty((tokens, heads, head_dim), dtype=query.dtype, device=query.device)
    first, rest = _pieces(head_dim)
    most_rows, keys = _tile(head_dim, query.element_size())
    of_heads = min(triton.next_power_of_2(group), most_rows)
    precision = "ieee" if query.dtype == torch.float32 else "tf32"
    options = {"WINDOW": window > 0, "SOFTCAP": softcap > 0, "SLOPES": slopes is not None, "FIRST": first, "REST": rest}
    none = query  # for what the options leave unread
    sinks_, slopes_ = none if sinks is None else sinks, none if slopes is None else slopes
    common = (group, heads, scale, softcap, window, block_size, head_dim)
    strides = (block_tables.stride(0), *cache.stride()[:4])
    if tokens > requests:  # no request has none, so some have several
        queries = most_rows // of_heads
        grid = (tokens // queries + requests, kv_heads, triton.cdiv(group, of_heads))
        _prompts_kernel[grid](
            *(query, cache, block_tables, sequence_lengths, query_starts, sinks_, slopes_, out, requests),
            *(group, scale, softcap, window, block_size, head_dim),
            *(query.stride(0), query.stride(1), out.stride(0), out.stride(1)),
            *strides,
            **options,
            SINKS=sinks is not None,
            HEADS=of_heads,
            QUERIES=queries,
            KEYS=keys,
            PRECISION=precision,
            num_warps=8 if most_rows > 16 else 4,
        )
    rows = max(16, of_heads)
    sums = torch.empty((requests, heads, _PARTS, 2), dtype=torch.float32, device=query.device)
    partial = torch.empty((requests, heads, _PARTS, head_dim), dtype=torch.float32, device=query.device)
    parts = min(_PARTS, triton.cdiv(block_tables.shape[1] * block_size, _PART_KEYS))
    _decodes_kernel[(requests, kv_heads * triton.cdiv(group, rows), parts)](
        *(query, cache, block_tables, sequence_lengths, query_starts, slopes_, sums, partial, *common),
        *(query.stride(0), query.stride(1)),
        *strides,
        **options,
        HEADS=rows,
        KEYS=keys,
        PARTS=_PARTS,
        PART_KEYS=_PART_KEYS,
        PRECISION=precision,
        num_warps=4,
    )
    _join_kernel[(requests, heads)](
        *(sums, partial, sequence_lengths, query_starts, sinks_, out, heads, window, head_dim),
        *(out.stride(0), out.stride(1)),
        WINDOW=window > 0,
        SINKS=sinks is not None,
        KEYS=keys,
        PARTS=_PARTS,
        PART_KEYS=_PART_KEYS,
        BLOCK=triton.next_power_of_2(head_dim),
        num_warps=4,
    )
    return out
