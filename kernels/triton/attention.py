"""Paged attention: prompts in tiles of queries, decodes split over their keys.

A program has the queries of some heads that share a KV head, so that keys and values are read once for all of them.
Softmax is taken online over tiles of keys (Milakov & Gimelshein 2018; Dao et al. 2022). A decode's keys are cut into as
many parts as its own length asks for, whatever is beside it (flash decoding, Dao et al. 2023), and joined in their
order: what comes out does not depend on the batch.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.cache import LARGEST

_PARTS, _PART_KEYS, _PART_GROWTH = 32, 128, 8
"""A decode is cut into so many parts at most, of so many keys at least, and of this times the root of their number."""
_PROGRAMS = 16 * 132
"""Of a decode kernel: some waves over an H100's multiprocessors. They share the parts, whatever their number."""
_LOG2E = 1.4426950408889634


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
def _load(at, is_row, FROM: tl.constexpr, WIDTH: tl.constexpr, HEAD_DIM: tl.constexpr, MASKED: tl.constexpr):
    """WIDTH features from number FROM on of the rows at `at`; zeros where MASKED rows are none, or behind the last."""
    column = FROM + tl.arange(0, WIDTH)
    if MASKED:
        return tl.load(at[:, None] + column, mask=is_row[:, None] & (column < HEAD_DIM), other=0.0)
    elif FROM + WIDTH > HEAD_DIM:
        return tl.load(at[:, None] + column, mask=(column < HEAD_DIM)[None, :], other=0.0)
    else:
        return tl.load(at[:, None] + column)


@triton.jit
def _attend(
    query,
    cache,
    row_scales,
    table,
    slopes,
    rows_at,
    heads_at,
    positions,
    is_row,
    begin,
    seen_by_all,
    end,
    scale,
    softcap,
    window,
    cache_side,
    cache_block,
    cache_row,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SLOPES: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    FIRST: tl.constexpr,
    REST: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    BLOCK: tl.constexpr,
    QUANTIZED: tl.constexpr,
    ONE_SIDE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Queries `[ROWS]` against the keys from `begin` to `end`: greatest score, sum, and weighted values.

    Features are taken in pieces of FIRST and REST (a power of two each; 0: one piece), as no head size is to be padded
    to nearly twice what it is. Keys before `seen_by_all` are, but for a window, and need no mask. Scores are powers of
    2: `scale` has the factor for it, and `softcap`; with a cap, `scale` is `2 / cap` of the plain one.
    """
    q_first, q_rest = _load(query + rows_at, is_row, 0, FIRST, HEAD_DIM, True), 0.0
    kind: tl.constexpr = q_first.dtype
    out_first, out_rest = tl.zeros([ROWS, FIRST], tl.float32), 0.0
    if REST:
        q_rest = _load(query + rows_at, is_row, FIRST, REST, HEAD_DIM, True)
        out_rest = tl.zeros([ROWS, REST], tl.float32)
    slope = tl.zeros([ROWS], tl.float32)
    if SLOPES:
        slope = tl.load(slopes + heads_at, mask=is_row, other=0.0) * 1.4426950408889634
    greatest, total = tl.full([ROWS], float("-inf"), tl.float32), tl.zeros([ROWS], tl.float32)
    unit = tl.full([], 1e-30, tl.float32)  # of float16 sums: the largest scale so far, or weights might vanish in it
    whole = begin + tl.maximum(seen_by_all - begin, 0) // KEYS * KEYS
    for MASKED in tl.static_range(2):
        for start in range(whole if MASKED else begin, end if MASKED else whole, KEYS):
            place = start + tl.arange(0, KEYS)
            is_key = place < end
            block = tl.load(table + place // BLOCK, mask=is_key, other=0).to(tl.int64)
            at = cache + block * cache_block + place % BLOCK * cache_row
            k_first = _load(at, is_key, 0, FIRST, HEAD_DIM, MASKED).to(kind)
            scores, k_rest = tl.dot(q_first, tl.trans(k_first), input_precision=PRECISION), k_first
            if REST:
                k_rest = _load(at, is_key, FIRST, REST, HEAD_DIM, MASKED).to(kind)
                scores = tl.dot(q_rest, tl.trans(k_rest), scores, input_precision=PRECISION)
            if QUANTIZED:
                scale_at = row_scales + block * (cache_block // 4) + BLOCK * HEAD_DIM // 4 + place % BLOCK
                scores *= tl.load(scale_at, mask=is_key, other=0.0)[None, :]
            scores *= scale
            if SOFTCAP:  # tanh(x) = 2 sigmoid(2 x) - 1
                scores = softcap * (2.0 * tl.sigmoid(scores) - 1.0)
            distance = place[None, :] - positions[:, None]
            if SLOPES:
                scores += slope[:, None] * distance.to(tl.float32)
            if MASKED:
                scores = tl.where((distance <= 0) & is_key[None, :], scores, float("-inf"))
            if WINDOW:
                scores = tl.where(distance > -window, scores, float("-inf"))
            news = tl.maximum(greatest, tl.max(scores, axis=1))
            base = news
            if MASKED or WINDOW:
                base = tl.where(news == float("-inf"), 0.0, news)  # a row that has seen no key yet
            weights, keep = tl.exp2(scores - base[:, None]), tl.exp2(greatest - base)
            total, greatest = total * keep + tl.sum(weights, axis=1), news
            if QUANTIZED:
                of_value = tl.load(scale_at + cache_side // 4, mask=is_key, other=0.0)
                if kind == tl.float16:
                    units = tl.maximum(unit, tl.max(of_value, axis=0))
                    of_value, keep, unit = of_value / units, keep * (unit / units), units
                weights *= of_value[None, :]
            v_first, v_rest = k_first, k_rest
            if not ONE_SIDE:
                v_first = _load(at + cache_side, is_key, 0, FIRST, HEAD_DIM, MASKED).to(kind)
            out_first = tl.dot(weights.to(kind), v_first, out_first * keep[:, None], input_precision=PRECISION)
            if REST:
                if not ONE_SIDE:
                    v_rest = _load(at + cache_side, is_key, FIRST, REST, HEAD_DIM, MASKED).to(kind)
                out_rest = tl.dot(weights.to(kind), v_rest, out_rest * keep[:, None], input_precision=PRECISION)
    if QUANTIZED and kind == tl.float16:
        out_first, out_rest = out_first * unit, out_rest * unit
    return greatest, total, out_first, out_rest


@triton.jit
def _store(at, values, is_row, FROM: tl.constexpr, WIDTH: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Features from number FROM on of the rows at `at`."""
    column = FROM + tl.arange(0, WIDTH)
    tl.store(at[:, None] + column, values.to(at.dtype.element_ty), mask=is_row[:, None] & (column < HEAD_DIM))


@triton.jit
def _with_sink(greatest, total, sinks, heads_at, is_row, SINKS: tl.constexpr):
    """What the weighted values are to be scaled by, once a head's sink is one more score, without a value."""
    if SINKS:
        sink = tl.load(sinks + heads_at, mask=is_row, other=float("-inf")) * 1.4426950408889634
        news = tl.maximum(greatest, sink)
        base = tl.where(news == float("-inf"), 0.0, news)
        keep = tl.exp2(greatest - base)
        return keep / (total * keep + tl.exp2(sink - base))
    else:
        return 1.0 / total


@triton.jit(do_not_specialize=["tables", "lengths", "starts", "requests", "table_row"])
def _prompts_kernel(
    query,
    cache,
    row_scales,
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
    HEAD_DIM: tl.constexpr,
    FIRST: tl.constexpr,
    REST: tl.constexpr,
    HEADS: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    BLOCK: tl.constexpr,
    QUANTIZED: tl.constexpr,
    ONE_SIDE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """A tile of QUERIES tokens of one request, and HEADS of the heads of one KV head; decodes are left out.

    The last tiles come first: they have the most keys.
    """
    tile, kv_head, piece = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1), tl.program_id(2)
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
            row_scales + kv_head.to(tl.int64) * (cache_head // 4),
            tables + request.to(tl.int64) * table_row,
            slopes,
            token * query_token + heads_at * query_head,
            heads_at,
            positions,
            is_row,
            begin,
            length - count + tile * QUERIES + 1,
            length - count + last,
            scale,
            softcap,
            window,
            cache_side,
            cache_block,
            cache_row,
            WINDOW,
            SOFTCAP,
            SLOPES,
            HEAD_DIM,
            FIRST,
            REST,
            QUERIES * HEADS,
            KEYS,
            BLOCK,
            QUANTIZED,
            ONE_SIDE,
            PRECISION,
        )
        factor = _with_sink(greatest, total, sinks, heads_at, is_row, SINKS)
        to = out + token * out_token + heads_at * out_head
        _store(to, out_first * factor[:, None], is_row, 0, FIRST, HEAD_DIM)
        if REST:
            _store(to, out_rest * factor[:, None], is_row, FIRST, REST, HEAD_DIM)


@triton.jit
def _part(length, begin, KEYS: tl.constexpr, PARTS: tl.constexpr, PART_KEYS: tl.constexpr, GROWTH: tl.constexpr):
    """Parts that the keys from `begin` to `length` are cut into, and keys of each: of their number alone."""
    keys = length - begin
    size = tl.maximum((GROWTH * tl.sqrt(keys.to(tl.float32))).to(tl.int32), PART_KEYS)
    size = tl.cdiv(tl.maximum(size, tl.cdiv(keys, PARTS)), KEYS) * KEYS
    return tl.cdiv(keys, size), size


def _most_parts(keys: int) -> int:
    """No fewer than `_part` makes of so many keys or less."""
    return min(_PARTS, 1 + keys // _PART_KEYS, 2 + int(keys**0.5 / _PART_GROWTH))


@triton.jit(do_not_specialize=["tables", "lengths", "starts", "room", "table_row"])
def _decodes_kernel(
    query,
    cache,
    row_scales,
    tables,
    lengths,
    starts,
    slopes,
    sums,
    partial,
    group,
    heads,
    room,
    scale,
    softcap,
    window,
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
    HEAD_DIM: tl.constexpr,
    FIRST: tl.constexpr,
    REST: tl.constexpr,
    HEADS: tl.constexpr,
    KEYS: tl.constexpr,
    PARTS: tl.constexpr,
    PART_KEYS: tl.constexpr,
    GROWTH: tl.constexpr,
    BLOCK: tl.constexpr,
    QUANTIZED: tl.constexpr,
    ONE_SIDE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Every so many parts of a decode's keys, HEADS of the heads of one KV head.

    Values go to `partial` `[requests, heads, room, HEAD_DIM]`; maxima and sums to `sums` `[requests, heads, room, 2]`.
    """
    request, pieces = tl.program_id(0), tl.cdiv(group, HEADS)
    kv_head, piece = tl.program_id(1) // pieces, tl.program_id(1) % pieces
    start = tl.load(starts + request)
    if tl.load(starts + request + 1) - start == 1:
        length = tl.load(lengths + request).to(tl.int32)
        begin = 0
        if WINDOW:
            begin = tl.maximum(0, length - window)
        parts, size = _part(length, begin, KEYS, PARTS, PART_KEYS, GROWTH)
        head = piece * HEADS + tl.arange(0, HEADS)
        is_row, heads_at = head < group, kv_head * group + head
        for part in range(tl.program_id(2), parts, tl.num_programs(2)):
            end = tl.minimum(begin + part * size + size, length)
            greatest, total, out_first, out_rest = _attend(
                query,
                cache + kv_head.to(tl.int64) * cache_head,
                row_scales + kv_head.to(tl.int64) * (cache_head // 4),
                tables + request.to(tl.int64) * table_row,
                slopes,
                start * query_token + heads_at * query_head,
                heads_at,
                tl.zeros([HEADS], tl.int32) + length - 1,
                is_row,
                begin + part * size,
                end,
                end,
                scale,
                softcap,
                window,
                cache_side,
                cache_block,
                cache_row,
                False,  # the keys are those that the one query sees
                SOFTCAP,
                SLOPES,
                HEAD_DIM,
                FIRST,
                REST,
                HEADS,
                KEYS,
                BLOCK,
                QUANTIZED,
                ONE_SIDE,
                PRECISION,
            )
            at = (request.to(tl.int64) * heads + heads_at) * room + part
            tl.store(sums + 2 * at, greatest, is_row)
            tl.store(sums + 2 * at + 1, total, is_row)
            _store(partial + at * HEAD_DIM, out_first, is_row, 0, FIRST, HEAD_DIM)
            if REST:
                _store(partial + at * HEAD_DIM, out_rest, is_row, FIRST, REST, HEAD_DIM)


@triton.jit(do_not_specialize=["lengths", "starts", "room"])
def _join_kernel(
    sums,
    partial,
    lengths,
    starts,
    sinks,
    out,
    heads,
    room,
    window,
    head_dim,
    out_token,
    out_head,
    WINDOW: tl.constexpr,
    SINKS: tl.constexpr,
    KEYS: tl.constexpr,
    PARTS: tl.constexpr,
    PART_KEYS: tl.constexpr,
    GROWTH: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """The parts of WIDTH features of one head of a decode."""
    request, head = tl.program_id(0), tl.program_id(1)
    start = tl.load(starts + request)
    if tl.load(starts + request + 1) - start == 1:
        length = tl.load(lengths + request).to(tl.int32)
        begin = 0
        if WINDOW:
            begin = tl.maximum(0, length - window)
        parts, _ = _part(length, begin, KEYS, PARTS, PART_KEYS, GROWTH)
        part, column = tl.arange(0, PARTS), tl.program_id(2) * WIDTH + tl.arange(0, WIDTH)
        at = (request.to(tl.int64) * heads + head) * room + part
        is_part = part < parts
        maxima = tl.load(sums + 2 * at, mask=is_part, other=float("-inf"))
        totals = tl.load(sums + 2 * at + 1, mask=is_part, other=0.0)
        greatest = tl.max(maxima, axis=0)
        if SINKS:
            sink = tl.load(sinks + head) * 1.4426950408889634
            greatest = tl.maximum(greatest, sink)
        keep = tl.exp2(maxima - greatest)
        total = tl.sum(totals * keep, axis=0)
        if SINKS:
            total += tl.exp2(sink - greatest)
        inside = is_part[:, None] & (column < head_dim)[None, :]
        values = tl.load(partial + (at * head_dim)[:, None] + column[None, :], mask=inside, other=0.0)
        mixed = tl.sum(values * keep[:, None], axis=0) / total
        to = out + start * out_token + head * out_head
        tl.store(to + column, mixed.to(out.dtype.element_ty), column < head_dim)


def _pieces(head_dim: int, *, in_one: bool = False) -> tuple[int, int]:
    """`head_dim` in one or two powers of two of at least 16, which together are no more than needed; or `in_one`."""
    if in_one:
        return max(16, triton.next_power_of_2(head_dim)), 0
    first = max(16, 1 << (head_dim.bit_length() - 1))
    rest = max(16, triton.next_power_of_2(head_dim - first)) if head_dim > first else 0
    return (2 * first, 0) if rest == first else (first, rest)


def _tile(head_dim: int, width: int, is_narrow: bool) -> tuple[int, int]:
    """Rows (queries × heads) and keys of a tile, of numbers of `width` bytes: what fits registers and shared memory."""
    size = head_dim * width * (2 if is_narrow else 1)
    rows = 16 if size > 4096 else 32 if head_dim > 256 or width > 2 else 64 if head_dim > 128 else 128
    return rows, 64 if size <= 512 else 32 if size <= 1152 else 16


@functools.cache
def _is_narrow(device: torch.device) -> bool:
    """Whether a block of threads may have 99 KiB of shared memory, as on most GPUs but those of data centers.

    On a CPU it is as on an H100, for which kernels are compiled ahead there.
    """
    if device.type != "cuda":
        return False
    return bool(triton.runtime.driver.active.utils.get_device_properties(device.index)["max_shared_mem"] < 160 << 10)


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
    """See `quire.kernels.reference`; heads in a quantized cache are of a multiple of 4. Reads nothing back."""
    if query.stride(-1) != 1:
        query = query.contiguous()
    tokens, heads, head_dim = query.shape
    kv_heads, block_size = cache.shape[2:4]
    requests, group, is_quantized = len(sequence_lengths), heads // kv_heads, cache.dtype in LARGEST
    out = torch.empty((tokens, heads, head_dim), dtype=query.dtype, device=query.device)
    first, rest = _pieces(head_dim)
    most_rows, keys = _tile(head_dim, query.element_size(), _is_narrow(query.device))
    of_heads = min(triton.next_power_of_2(group), most_rows)
    none = query  # for what the options leave unread
    sinks_, slopes_ = none if sinks is None else sinks, none if slopes is None else slopes
    memory = query, cache, cache[0].view(torch.float32) if is_quantized else none, block_tables
    scores = (2.0 * scale / softcap, softcap * _LOG2E, window) if softcap else (scale * _LOG2E, 0.0, window)
    cache_row = head_dim if is_quantized else cache.stride(3)
    strides = query.stride()[:2], (block_tables.stride(0), *cache.stride()[:3], cache_row)
    options = {
        "WINDOW": window > 0,
        "SOFTCAP": softcap > 0,
        "SLOPES": slopes is not None,
        "HEAD_DIM": head_dim,
        "FIRST": first,
        "REST": rest,
        "KEYS": keys,
        "BLOCK": block_size,
        "QUANTIZED": is_quantized,
        "ONE_SIDE": cache.stride(0) == 0,
        "PRECISION": "ieee" if query.dtype == torch.float32 else "tf32",
    }
    if tokens > requests:  # no request has none, so some have several
        queries = most_rows // of_heads
        # Triton 3.6 miscompiles the products of warp groups (64 rows or more) with 8-bit numbers in two pieces: on an
        # H100 they read past the shared memory, or add up wrong.
        whole = _pieces(head_dim, in_one=is_quantized and most_rows >= 64)
        _prompts_kernel[tokens // queries + requests, kv_heads, triton.cdiv(group, of_heads)](
            *(*memory, sequence_lengths, query_starts, sinks_, slopes_, out, requests, group, *scores),
            *(*strides[0], out.stride(0), out.stride(1), *strides[1]),
            **(options | dict(zip(("FIRST", "REST"), whole, strict=True))),
            SINKS=sinks is not None,
            HEADS=of_heads,
            QUERIES=queries,
            num_warps=8,
        )
    rows, room = max(16, of_heads), _most_parts(block_tables.shape[1] * block_size)
    columns = kv_heads * triton.cdiv(group, rows)
    sums = torch.empty((requests, heads, room, 2), dtype=torch.float32, device=query.device)
    partial = torch.empty((requests, heads, room, head_dim), dtype=torch.float32, device=query.device)
    cut = {"PARTS": _PARTS, "PART_KEYS": _PART_KEYS, "GROWTH": _PART_GROWTH}
    _decodes_kernel[requests, columns, max(1, min(room, _PROGRAMS // (requests * columns)))](
        *(*memory, sequence_lengths, query_starts, slopes_, sums, partial, group, heads, room, *scores),
        *(*strides[0], *strides[1]),
        **options,
        **cut,
        HEADS=rows,
        num_warps=8 if head_dim > 128 else 4,
        num_stages=5 if head_dim <= 128 else 3,  # every second one for the block table: two tiles, or one, to come
    )
    width = min(128, triton.next_power_of_2(head_dim))
    _join_kernel[requests, heads, triton.cdiv(head_dim, width)](
        *(sums, partial, sequence_lengths, query_starts, sinks_, out, heads, room, window, head_dim),
        *(out.stride(0), out.stride(1)),
        **cut,
        WINDOW=window > 0,
        SINKS=sinks is not None,
        KEYS=keys,
        WIDTH=width,
        num_warps=4,
    )
    return out
