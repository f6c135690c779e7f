"""Paged attention: prefill in tiles of queries, decodes split over their keys.

A program computes the queries of several heads that share a KV head, so that keys and values are read once for all of
them. Softmax is computed online over tiles of keys (Milakov & Gimelshein 2018; Dao et al. 2022). A decode's keys are
split into parts (flash decoding, Dao et al. 2023) whose number depends only on its own length, and the parts are merged
in order, so a result does not depend on the batch.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.cache import LARGEST
from quire.kernels.triton import limits
from quire.kernels.triton.int4_kv import as_halves, int4_keys, int4_numbers, int4_values

_PARTS, _PART_KEYS, _PART_GROWTH = 32, 128, 8
"""A decode has at most _PARTS parts, each of at least max(_PART_KEYS, _PART_GROWTH * sqrt(keys)) keys."""
_PROGRAMS = 32 * limits.PROCESSORS
"""Programs of a decode kernel: several waves. They share any number of parts."""
_LOG2E = 1.4426950408889634


@triton.jit
def _request_of(starts, requests, place, size: tl.constexpr):
    """The request of query tile `place`: the last `r` with `starts[r] // size + r <= place`."""
    low, high = 0, requests
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(starts + middle) // size + middle <= place:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def _load(at, is_row, FROM: tl.constexpr, WIDTH: tl.constexpr, END: tl.constexpr, MASKED: tl.constexpr):
    """Load WIDTH features, starting with FROM, of the rows at `at`; zeros from END on and for MASKED rows."""
    column = FROM + tl.arange(0, WIDTH)
    if MASKED:
        return tl.load(at[:, None] + column, mask=is_row[:, None] & (column < END), other=0.0)
    elif FROM + WIDTH > END:
        return tl.load(at[:, None] + column, mask=(column < END)[None, :], other=0.0)
    else:
        return tl.load(at[:, None] + column)


@triton.jit
def _weigh(
    scores,
    greatest,
    total,
    place,
    is_key,
    positions,
    ends,
    slope,
    biases,
    terms,
    MASKED: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
):
    """A step of the online softmax, over the keys at `place`: their weights, the factor for what was summed before,
    the largest score and the sum of weights. If MASKED, only `is_key` before `ends` are seen. `slope` `[ROWS]` and
    `biases` `[ROWS]`, where each row's begin and which rows have some, or None; `terms` as in `_attend`."""
    scale, softcap, window, num_biases = terms
    scores *= scale
    if SOFTCAP:  # tanh(x) = 2 sigmoid(2 x) - 1
        scores = softcap * (2.0 * tl.sigmoid(scores) - 1.0)
    distance = place[None, :] - positions[:, None]
    if slope is not None:
        scores += slope[:, None] * distance.to(tl.float32)
    if biases is not None:
        number = distance + (num_biases - 1)
        has_bias = biases[1][:, None] & (number >= 0) & (distance <= 0)
        bias = tl.load(biases[0][:, None] + number, mask=has_bias, other=0.0)
        scores += bias.to(tl.float32) * 1.4426950408889634
    if MASKED:
        scores = tl.where((place[None, :] < ends[:, None]) & is_key[None, :], scores, float("-inf"))
    if WINDOW:
        scores = tl.where(distance > -window, scores, float("-inf"))
    news = tl.maximum(greatest, tl.max(scores, axis=1))
    base = news
    if MASKED or WINDOW:
        base = tl.where(news == float("-inf"), 0.0, news)  # no key seen yet
    weights, keep = tl.exp2(scores - base[:, None]), tl.exp2(greatest - base)
    return weights, keep, news, total * keep + tl.sum(weights, axis=1)


@triton.jit
def _attend(
    query,
    memory,
    kv_head,
    strides,
    token,
    heads_at,
    is_row,
    positions,
    ends,
    begin,
    seen_by_all,
    end,
    slopes,
    biases,
    terms,
    of_rows,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    SPLIT: tl.constexpr,
    FIRST: tl.constexpr,
    REST: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    BLOCK: tl.constexpr,
    RECENT_KEYS: tl.constexpr,
    QUANTIZED: tl.constexpr,
    INT4: tl.constexpr,
    ONE_SIDE: tl.constexpr,
    PRECISION: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """Queries `[ROWS]` against the keys from `begin` to `end`: largest score, sum of weights, and weighted values.

    Features are split into those before SPLIT and the others, padded to FIRST and REST (each a power of two; REST may
    be 0), so that no head size is padded to nearly twice its size. Every query sees the keys before `seen_by_all`,
    unless a window hides them, so these need no mask, and none sees keys beyond its own of `ends` `[ROWS]`. Scores are
    exponents of 2: the scale and the soft-cap include that factor; with a cap, the scale is multiplied by `2 / cap`.

    With INT4, a query sees its own block, up to itself, among the recent ones, and those before it as 4-bit numbers.
    The first query is at `seen_by_all - 1`; the last one at `end - 1`, or `end` is in a block before the first one's.
    Keys of a block are taken in the order of their bytes, two from each: those of a tile of bytes, and then those half
    a block later. So `begin` is where a block begins, or tiles after that.

    `memory` is the cache, its scales, the recent blocks, the slots there of the queries from the first one on, and the
    table; `strides` are of the cache (of tensors, blocks, heads, rows) and of the recent blocks; `terms` are the scale,
    the soft-cap, the window and the number of biases; `of_rows` are the strides of the query and of biases, from one
    token's, and one head's, to the next one's.
    """
    cache, scales, recent, recent_slots, table = memory
    cache_side, cache_block, cache_head, cache_row, recent_side, recent_block, recent_head, recent_row = strides
    query_token, query_head, biases_token, biases_head = of_rows
    cache += kv_head.to(tl.int64) * cache_head
    scales += kv_head.to(tl.int64) * (cache_head // (2 if INT4 else 4))
    rows = query + token * query_token + heads_at * query_head
    q_first, q_rest = _load(rows, is_row, 0, FIRST, SPLIT, True), 0.0
    kind: tl.constexpr = q_first.dtype
    out_first, out_rest = tl.zeros([ROWS, FIRST], tl.float32), 0.0
    if REST:
        q_rest = _load(rows, is_row, SPLIT, REST, HEAD_DIM, True)
        out_rest = tl.zeros([ROWS, REST], tl.float32)
    slope, bias = None, None
    if slopes is not None:
        slope = tl.load(slopes + heads_at, mask=is_row, other=0.0) * 1.4426950408889634
    if biases is not None:
        bias = biases + token * biases_token + heads_at * biases_head, is_row
    greatest, total = tl.full([ROWS], float("-inf"), tl.float32), tl.zeros([ROWS], tl.float32)
    unit = tl.full([], 1e-30, tl.float32)  # unit of float16 sums: the largest scale so far, to avoid underflow
    first, stop = seen_by_all - 1, end
    own, own_blocks = first // BLOCK * BLOCK, positions // BLOCK * BLOCK
    if INT4:
        recent += kv_head.to(tl.int64) * recent_head
        seen_by_all, end = own, tl.maximum(tl.minimum(own, end), (end - 1) // BLOCK * BLOCK)
    whole = begin + tl.maximum(tl.minimum(seen_by_all, end) - begin, 0) // KEYS * KEYS
    # Keys that all queries see; those that need masks; with INT4, the queries' own blocks, one by one.
    for PASS in tl.static_range(3 if INT4 else 2):
        for start in range(
            begin if PASS == 0 else whole if PASS == 1 else own,
            whole if PASS == 0 else end if PASS == 1 else stop,
            BLOCK if PASS == 2 else KEYS,
        ):
            if INT4 and PASS < 2:
                pair = start // 2 + tl.arange(0, KEYS // 2)
                is_key = pair < end // 2
                block, offset = pair // (BLOCK // 2), pair % (BLOCK // 2)
                # Triton 3.9 does not compile copies of 16 bytes here. Bytes of small blocks are loaded one by one.
                offset = tl.max_contiguous(offset, 8 if BLOCK % 16 == 0 else 1)
                base = tl.load(table + block, mask=is_key, other=0).to(tl.int64) * cache_block
                both_first = int4_keys(cache, scales, base, offset, is_key, 0, FIRST, SPLIT, HEAD_DIM, BLOCK)
                both_rest = int4_keys(cache, scales, base, offset, is_key, SPLIT, REST, HEAD_DIM, HEAD_DIM, BLOCK)
            elif INT4:
                column = tl.arange(0, RECENT_KEYS)
                place = start + column
                is_key = (column < BLOCK) & (place < stop)
                slot = tl.maximum(tl.load(recent_slots + tl.maximum(start - first, 0)), 0)
                at, side = recent + slot // BLOCK * recent_block + column * recent_row, recent_side
            else:
                place = start + tl.arange(0, KEYS)
                is_key = place < end
                if SLOTS:  # the table has the slot of each key
                    slot = tl.load(table + place, mask=is_key, other=0)
                    block, offset = (slot // BLOCK).to(tl.int64), (slot % BLOCK).to(tl.int32)
                else:
                    block = tl.load(table + place // BLOCK, mask=is_key, other=0).to(tl.int64)
                    offset = place % BLOCK
                at, side = cache + block * cache_block + offset * cache_row, cache_side
            for LATER in tl.static_range(2 if INT4 and PASS < 2 else 1):
                if INT4 and PASS < 2:
                    later = offset + LATER * (BLOCK // 2)
                    place = block * BLOCK + later
                    scores = tl.dot(q_first, int4_numbers(both_first, LATER).to(kind), input_precision=PRECISION)
                    scores = tl.dot(q_rest, int4_numbers(both_rest, LATER).to(kind), scores, input_precision=PRECISION)
                else:
                    k_first = _load(at, is_key, 0, FIRST, SPLIT, PASS > 0).to(kind)
                    scores, k_rest = tl.dot(q_first, tl.trans(k_first), input_precision=PRECISION), k_first
                    if REST:
                        k_rest = _load(at, is_key, SPLIT, REST, HEAD_DIM, PASS > 0).to(kind)
                        scores = tl.dot(q_rest, tl.trans(k_rest), scores, input_precision=PRECISION)
                if QUANTIZED:
                    scale_at = scales + block * (cache_block // 4) + BLOCK * HEAD_DIM // 4 + offset
                    scores *= tl.load(scale_at, mask=is_key, other=0.0)[None, :]
                weights, keep, greatest, total = _weigh(
                    *(scores, greatest, total, place, is_key, positions),
                    ends if not INT4 else own_blocks if PASS < 2 else tl.where(own_blocks == start, ends, 0),
                    slope,
                    bias,
                    *(terms, PASS > 0, WINDOW, SOFTCAP),
                )
                if QUANTIZED:
                    of_value = tl.load(scale_at + cache_side // 4, mask=is_key, other=0.0)
                    if kind == tl.float16:
                        units = tl.maximum(unit, tl.max(of_value, axis=0))
                        of_value, keep, unit = of_value / units, keep * (unit / units), units
                    weights *= of_value[None, :]
                if INT4 and PASS < 2:
                    values = int4_values(cache, scales, base, later, is_key, FIRST, HEAD_DIM, BLOCK)
                    v_first, v_rest = int4_numbers(values, 0).to(kind), int4_numbers(values, 1).to(kind)
                elif ONE_SIDE:
                    v_first, v_rest = k_first, k_rest
                else:
                    v_first, v_rest = _load(at + side, is_key, 0, FIRST, SPLIT, PASS > 0).to(kind), 0.0
                weights = weights.to(kind)
                out_first = tl.dot(weights, v_first, out_first * keep[:, None], input_precision=PRECISION)
                if REST:
                    if not (ONE_SIDE or (INT4 and PASS < 2)):
                        v_rest = _load(at + side, is_key, SPLIT, REST, HEAD_DIM, PASS > 0).to(kind)
                    out_rest = tl.dot(weights, v_rest, out_rest * keep[:, None], input_precision=PRECISION)
    if QUANTIZED and kind == tl.float16:
        out_first, out_rest = out_first * unit, out_rest * unit
    return greatest, total, out_first, out_rest


@triton.jit
def _store(at, values, is_row, FROM: tl.constexpr, WIDTH: tl.constexpr, END: tl.constexpr):
    """Store the features from FROM to END of the rows at `at`."""
    column = FROM + tl.arange(0, WIDTH)
    tl.store(at[:, None] + column, values.to(at.dtype.element_ty), mask=is_row[:, None] & (column < END))


@triton.jit
def _without_keys(greatest, total):
    """The factor that normalizes the weighted values, 0 for rows without keys, and the logarithm of the sum of the
    exponentials of scores."""
    factor = tl.where(total > 0.0, 1.0 / total, 0.0)
    return factor, (greatest + tl.log2(total)) / 1.4426950408889634


@triton.jit
def _with_sink(greatest, total, sinks, sinks_at, is_row):
    """The factor that normalizes the weighted values; a row's sink is one more score, without a value."""
    if sinks is not None:
        sink = tl.load(sinks + sinks_at, mask=is_row, other=float("-inf")) * 1.4426950408889634
        news = tl.maximum(greatest, sink)
        base = tl.where(news == float("-inf"), 0.0, news)
        keep = tl.exp2(greatest - base)
        return keep / (total * keep + tl.exp2(sink - base))
    else:
        return 1.0 / total


@triton.jit(do_not_specialize=["recent_slots", "tables", "lengths", "starts", "requests", "table_row"])
def _prompts_kernel(
    query,
    cache,
    row_scales,
    recent,
    recent_slots,
    tables,
    lengths,
    starts,
    sinks,
    slopes,
    biases,
    ends,
    out,
    logs,
    requests,
    group,
    scale,
    softcap,
    window,
    num_biases,
    sinks_token,
    biases_token,
    biases_head,
    query_token,
    query_head,
    out_token,
    out_head,
    table_row,
    cache_side,
    cache_block,
    cache_head,
    cache_row,
    recent_side,
    recent_block,
    recent_head,
    recent_row,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    SPLIT: tl.constexpr,
    FIRST: tl.constexpr,
    REST: tl.constexpr,
    HEADS: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    BLOCK: tl.constexpr,
    RECENT_KEYS: tl.constexpr,
    QUANTIZED: tl.constexpr,
    INT4: tl.constexpr,
    ONE_SIDE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute a tile of QUERIES tokens of one request, for HEADS heads of one KV head; skips decodes.

    The last tiles run first, because they have the most keys.
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
        own_ends, end, seen_by_all = positions + 1, length - count + last, length - count + tile * QUERIES + 1
        if ends is not None:
            own_ends = tl.load(ends + token, mask=is_row, other=0).to(tl.int32)
            end = tl.load(ends + start + last - 1).to(tl.int32)
            seen_by_all = tl.load(ends + start + tile * QUERIES).to(tl.int32)
        if INT4:
            begin = begin // BLOCK * BLOCK
        table = tables + request.to(tl.int64) * table_row
        greatest, total, out_first, out_rest = _attend(
            query,
            (cache, row_scales, recent, recent_slots + start + tile * QUERIES, table),
            kv_head,
            (cache_side, cache_block, cache_head, cache_row, recent_side, recent_block, recent_head, recent_row),
            *(token, heads_at, is_row, positions, own_ends, begin, seen_by_all, end, slopes, biases),
            (scale, softcap, window, num_biases),
            (query_token, query_head, biases_token, biases_head),
            *(WINDOW, SOFTCAP, HEAD_DIM, SPLIT, FIRST, REST, QUERIES * HEADS, KEYS, BLOCK, RECENT_KEYS),
            *(QUANTIZED, INT4, ONE_SIDE, PRECISION, False),
        )
        if logs is not None:
            factor, log = _without_keys(greatest, total)
            tl.store(logs + token * (tl.num_programs(1) * group) + heads_at, log, is_row)
        else:
            factor = _with_sink(greatest, total, sinks, token * sinks_token + heads_at, is_row)
        to = out + token * out_token + heads_at * out_head
        _store(to, out_first * factor[:, None], is_row, 0, FIRST, SPLIT)
        if REST:
            _store(to, out_rest * factor[:, None], is_row, SPLIT, REST, HEAD_DIM)


@triton.jit
def _part(length, begin, KEYS: tl.constexpr, PARTS: tl.constexpr, PART_KEYS: tl.constexpr, GROWTH: tl.constexpr):
    """The number of parts for the keys from `begin` to `length`, and the keys of each; depends on their number only."""
    keys = length - begin
    size = tl.maximum((GROWTH * tl.sqrt(keys.to(tl.float32))).to(tl.int32), PART_KEYS)
    size = tl.cdiv(tl.maximum(size, tl.cdiv(keys, PARTS)), KEYS) * KEYS
    return tl.cdiv(keys, size), size


def _most_parts(keys: int) -> int:
    """An upper bound of the parts that `_part` returns for up to this many keys."""
    return min(_PARTS, 1 + keys // _PART_KEYS, 2 + int(keys**0.5 / _PART_GROWTH))


@triton.jit(do_not_specialize=["recent_slots", "tables", "lengths", "starts", "room", "table_row"])
def _decodes_kernel(
    query,
    cache,
    row_scales,
    recent,
    recent_slots,
    tables,
    lengths,
    starts,
    slopes,
    biases,
    sums,
    partial,
    group,
    heads,
    room,
    scale,
    softcap,
    window,
    num_biases,
    biases_token,
    biases_head,
    query_token,
    query_head,
    table_row,
    cache_side,
    cache_block,
    cache_head,
    cache_row,
    recent_side,
    recent_block,
    recent_head,
    recent_row,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    SPLIT: tl.constexpr,
    FIRST: tl.constexpr,
    REST: tl.constexpr,
    HEADS: tl.constexpr,
    KEYS: tl.constexpr,
    PARTS: tl.constexpr,
    PART_KEYS: tl.constexpr,
    GROWTH: tl.constexpr,
    BLOCK: tl.constexpr,
    RECENT_KEYS: tl.constexpr,
    QUANTIZED: tl.constexpr,
    INT4: tl.constexpr,
    ONE_SIDE: tl.constexpr,
    PRECISION: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """Compute a strided subset of a decode's parts, for HEADS heads of one KV head.

    Writes values to `partial` `[requests, heads, room, HEAD_DIM]`, and maxima and sums to `sums`
    `[requests, heads, room, 2]`.
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
        table = tables + request.to(tl.int64) * table_row
        if INT4:
            begin = begin // BLOCK * BLOCK
        for part in range(tl.program_id(2), parts, tl.num_programs(2)):
            end = tl.minimum(begin + part * size + size, length)
            if INT4:  # the last part has the query's own block
                end = tl.where(part == parts - 1, length, tl.minimum(end, (length - 1) // BLOCK * BLOCK))
            greatest, total, out_first, out_rest = _attend(
                query,
                (cache, row_scales, recent, recent_slots + start, table),
                kv_head,
                (cache_side, cache_block, cache_head, cache_row, recent_side, recent_block, recent_head, recent_row),
                *(start, heads_at, is_row, tl.zeros([HEADS], tl.int32) + length - 1),
                *(tl.zeros([HEADS], tl.int32) + length, begin + part * size, length, end, slopes, biases),
                (scale, softcap, window, num_biases),
                (query_token, query_head, biases_token, biases_head),
                *(WINDOW and INT4, SOFTCAP, HEAD_DIM, SPLIT, FIRST, REST, HEADS, KEYS, BLOCK, RECENT_KEYS),
                *(QUANTIZED, INT4, ONE_SIDE, PRECISION, SLOTS),
            )
            at = (request.to(tl.int64) * heads + heads_at) * room + part
            tl.store(sums + 2 * at, greatest, is_row)
            tl.store(sums + 2 * at + 1, total, is_row)
            _store(partial + at * HEAD_DIM, out_first, is_row, 0, FIRST, SPLIT)
            if REST:
                _store(partial + at * HEAD_DIM, out_rest, is_row, SPLIT, REST, HEAD_DIM)


@triton.jit(do_not_specialize=["lengths", "starts", "room"])
def _join_kernel(
    sums,
    partial,
    lengths,
    starts,
    sinks,
    out,
    logs,
    heads,
    room,
    window,
    head_dim,
    sinks_token,
    out_token,
    out_head,
    WINDOW: tl.constexpr,
    KEYS: tl.constexpr,
    PARTS: tl.constexpr,
    PART_KEYS: tl.constexpr,
    GROWTH: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Merge the parts of a decode, for WIDTH features of one head."""
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
        if sinks is not None:
            sink = tl.load(sinks + start * sinks_token + head) * 1.4426950408889634
            greatest = tl.maximum(greatest, sink)
        base = greatest
        if logs is not None:
            base = tl.where(greatest == float("-inf"), 0.0, greatest)
        keep = tl.exp2(maxima - base)
        total = tl.sum(totals * keep, axis=0)
        if sinks is not None:
            total += tl.exp2(sink - greatest)
        inside = is_part[:, None] & (column < head_dim)[None, :]
        values = tl.load(partial + (at * head_dim)[:, None] + column[None, :], mask=inside, other=0.0)
        mixed = tl.sum(values * keep[:, None], axis=0)
        if logs is not None:
            factor, log = _without_keys(base, total)
            mixed *= factor
            tl.store(logs + start * heads + head, log)
        else:
            mixed /= total
        to = out + start * out_token + head * out_head
        tl.store(to + column, mixed.to(out.dtype.element_ty), column < head_dim)


def _pieces(head_dim: int) -> tuple[int, int]:
    """Split `head_dim` into one or two powers of two of at least 16, with the least padding."""
    first = max(16, 1 << (head_dim.bit_length() - 1))
    rest = max(16, triton.next_power_of_2(head_dim - first)) if head_dim > first else 0
    return (2 * first, 0) if rest == first else (first, rest)


def _tile(head_dim: int, width: int, is_narrow: bool) -> tuple[int, int]:
    """Rows (queries × heads) and keys of a tile that fit registers and shared memory; elements have `width` bytes."""
    size = head_dim * width * (2 if is_narrow else 1)
    rows = 16 if size > 4096 else 32 if head_dim > 256 or width > 2 else 64 if head_dim > 128 else 128
    return rows, 64 if size <= 512 else 32 if size <= 1152 else 16


class _Terms(NamedTuple):
    """The terms that are added to scores or to their sum: see `reference.paged_attention`."""

    sinks: Tensor | None = None
    slopes: Tensor | None = None
    biases: Tensor | None = None
    num_biases: int = 0
    sinks_token: int = 0
    """Stride from one token's sinks to the next one's; 0: they are the same."""
    biases_strides: tuple[int, int] = (0, 0)
    """Strides from one token's, and one head's, biases to the next one's."""

    @staticmethod
    def of(sinks: Tensor | None, slopes: Tensor | None = None, biases: Tensor | None = None) -> _Terms:
        sinks, slopes, biases = (
            each if each is None or each.stride(-1) == 1 else each.contiguous() for each in (sinks, slopes, biases)
        )
        sinks_token = sinks.stride(0) if sinks is not None and sinks.ndim == 2 else 0
        if biases is None:
            return _Terms(sinks, slopes, None, 0, sinks_token)
        return _Terms(sinks, slopes, biases, biases.shape[2], sinks_token, (biases.stride(0), biases.stride(1)))


class _KVMemory(NamedTuple):
    """Where keys and values are, and how the kernels read them."""

    tensors: tuple[Tensor, ...]
    """The cache, its scales, the recent blocks and the queries' slots in them, and the block tables or the keys' slots.
    The query is a placeholder for those that are not read."""
    strides: tuple[int, ...]
    """Of the tables; of tensors, blocks, heads and rows in the cache, and in the recent blocks."""
    options: dict[str, Any]

    @staticmethod
    def of(query: Tensor, cache: Tensor, tables: Tensor, recent: tuple[Tensor, Tensor] | None = None) -> _KVMemory:
        head_dim, block_size, is_quantized = query.shape[2], cache.shape[3], cache.dtype in LARGEST
        first, rest = _pieces(head_dim)
        scales, split = cache[0].view(torch.float32) if is_quantized else query, first if rest else head_dim
        if recent is not None:  # a byte has numbers of both halves of a head
            scales, split = as_halves(cache), head_dim // 2
            first = rest = max(16, triton.next_power_of_2(split))
        others, row = (0,) * 4 if recent is None else recent[0].stride()[:4], cache.stride(3)
        options = {
            "HEAD_DIM": head_dim,
            "SPLIT": split,
            "FIRST": first,
            "REST": rest,
            "KEYS": _tile(head_dim, query.element_size(), limits.is_narrow(query.device))[1],
            "BLOCK": block_size,
            "RECENT_KEYS": max(16, triton.next_power_of_2(block_size)),
            "QUANTIZED": is_quantized,
            "INT4": recent is not None,
            "ONE_SIDE": cache.stride(0) == 0,
            "PRECISION": "ieee" if query.dtype == torch.float32 else "tf32",
        }
        return _KVMemory(
            (cache, scales, *(recent or (query, query)), tables),
            (tables.stride(0), *cache.stride()[:3], head_dim if is_quantized else row, *others),
            options,
        )


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
    biases: Tensor | None = None,
    ends: Tensor | None = None,
    logs: Tensor | None = None,
    recent: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """See `quire.kernels.reference`. Heads in a quantized cache must be a multiple of 4. Never waits for the device.

    `recent` are the recent blocks beside a cache of 4-bit numbers, and the queries' slots there: see `int4_attention`.
    """
    if query.stride(-1) != 1:
        query = query.contiguous()
    tokens, heads, head_dim = query.shape
    kv_heads, block_size = cache.shape[2:4]
    requests, group = len(sequence_lengths), heads // kv_heads
    out = torch.empty((tokens, heads, head_dim), dtype=query.dtype, device=query.device)
    most_rows, _ = _tile(head_dim, query.element_size(), limits.is_narrow(query.device))
    of_heads = min(triton.next_power_of_2(group), most_rows)
    terms, memory = _Terms.of(sinks, slopes, biases), _KVMemory.of(query, cache, block_tables, recent)
    scores = (2.0 * scale / softcap, softcap * _LOG2E, window) if softcap else (scale * _LOG2E, 0.0, window)
    options = memory.options | {"WINDOW": window > 0, "SOFTCAP": softcap > 0}
    if tokens > requests:  # every request has at least one token, so some have several
        queries = most_rows // of_heads
        # Triton 3.6 miscompiles tiles of 64 rows or more over 8-bit numbers in two pieces: on an H100, heads of 80 read
        # beyond shared memory or gave wrong sums.
        own = options
        if options["QUANTIZED"] and most_rows >= 64:
            own = options | {"SPLIT": head_dim, "FIRST": max(16, triton.next_power_of_2(head_dim)), "REST": 0}
        _prompts_kernel[tokens // queries + requests, kv_heads, triton.cdiv(group, of_heads)](
            *(query, *memory.tensors, sequence_lengths, query_starts, terms.sinks, terms.slopes, terms.biases),
            *(None if ends is None else ends.contiguous(), out, logs, requests, group),
            *(*scores, terms.num_biases, terms.sinks_token, *terms.biases_strides),
            *(*query.stride()[:2], *out.stride()[:2], *memory.strides),
            **own,
            HEADS=of_heads,
            QUERIES=queries,
            num_warps=8,
        )
    _decode(
        *(query, memory, sequence_lengths, query_starts, terms, out, kv_heads, scores, options),
        most=block_tables.shape[1] * block_size,
        has_slots=False,
        logs=logs,
    )
    return out


def _decode(
    query: Tensor,
    memory: _KVMemory,
    lengths: Tensor,
    starts: Tensor,
    terms: _Terms,
    out: Tensor,
    kv_heads: int,
    scores: tuple[float, float, int],
    options: dict[str, Any],
    *,
    most: int,
    has_slots: bool,
    logs: Tensor | None = None,
) -> None:
    """Compute the requests with one query, of up to `most` keys."""
    (_, heads, head_dim), requests, window = query.shape, len(lengths), scores[2]
    group = heads // kv_heads
    most_rows, keys = _tile(head_dim, query.element_size(), limits.is_narrow(query.device))
    rows, room = max(16, min(triton.next_power_of_2(group), most_rows)), _most_parts(most)
    columns = kv_heads * triton.cdiv(group, rows)
    sums = torch.empty((requests, heads, room, 2), dtype=torch.float32, device=query.device)
    partial = torch.empty((requests, heads, room, head_dim), dtype=torch.float32, device=query.device)
    cut = {"PARTS": _PARTS, "PART_KEYS": _PART_KEYS, "GROWTH": _PART_GROWTH}
    _decodes_kernel[requests, columns, max(1, min(room, _PROGRAMS // (requests * columns)))](
        *(query, *memory.tensors, lengths, starts, terms.slopes, terms.biases, sums, partial, group, heads, room),
        *(*scores, terms.num_biases, *terms.biases_strides, *query.stride()[:2], *memory.strides),
        **options,
        **cut,
        HEADS=rows,
        SLOTS=has_slots,
        num_warps=8 if head_dim > 128 else 4,
        num_stages=5 if head_dim <= 128 else 3,  # half of them load the block table: two tiles, or one, ahead
    )
    width = min(128, triton.next_power_of_2(head_dim))
    _join_kernel[requests, heads, triton.cdiv(head_dim, width)](
        *(sums, partial, lengths, starts, terms.sinks, out, logs),
        *(heads, room, window, head_dim),
        *(terms.sinks_token, out.stride(0), out.stride(1)),
        **cut,
        WINDOW=window > 0,
        KEYS=keys,
        WIDTH=width,
        num_warps=4,
    )


_PARTIALS = 1 << 25
"""Number of partial results of sparse attention in memory at once."""


def sparse_attention(
    query: Tensor,
    cache: Tensor,
    slots: Tensor,
    counts: Tensor,
    scale: float,
    sinks: Tensor | None = None,
    logs: Tensor | None = None,
) -> Tensor:
    """See `quire.kernels.reference`: a decode for each query. Heads in a quantized cache must be a multiple of 4. Never
    waits for the device."""
    if query.stride(-1) != 1:
        query = query.contiguous()
    tokens, heads, head_dim = query.shape
    out = torch.empty((tokens, heads, head_dim), dtype=query.dtype, device=query.device)
    size = max(1, _PARTIALS // (heads * _most_parts(slots.shape[1]) * head_dim))
    starts = torch.arange(min(size, tokens) + 1, device=query.device)
    for begin in range(0, tokens, size):
        rows = slice(begin, begin + size)
        part = query[rows]
        memory = _KVMemory.of(part, cache, slots[rows])
        _decode(
            *(part, memory, counts[rows], starts, _Terms.of(sinks), out[rows], cache.shape[2]),
            *((scale * _LOG2E, 0.0, 0), memory.options | {"WINDOW": False, "SOFTCAP": False}),
            most=slots.shape[1],
            has_slots=True,
            logs=None if logs is None else logs[rows],
        )
    return out


def int4_attention(
    query: Tensor,
    cache: Tensor,
    block_tables: Tensor,
    sequence_lengths: Tensor,
    query_starts: Tensor,
    scale: float,
    recent: Tensor,
    recent_slots: Tensor,
    **options: Any,
) -> Tensor:
    """See `quire.kernels.int4_kv`. Never waits for the device."""
    of_batch = block_tables, sequence_lengths, query_starts
    return paged_attention(query, cache, *of_batch, scale, recent=(recent, recent_slots), **options)
