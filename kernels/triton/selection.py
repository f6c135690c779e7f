"""Selection of the tokens that sparse attention attends to: scores, a program for each query and some of the keys; then
the tokens, a program for each query. Of blocks, the scores are computed here, and torch sorts them.

The scores of a tile of keys depend on the query and these keys alone, so a result does not depend on the batch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels import reference
from quire.kernels.cache import LARGEST
from quire.kernels.triton.sampling import _kth_of_row, _tile_of

_SCORES = 1 << 23
"""Number of scores in memory at once."""
_PROGRAMS = 16 * 132
"""Programs of the kernel for scores: several waves over an H100's multiprocessors. They share any number of tiles."""
_KEYS, _TILE = 64, 4096
"""Keys whose scores are computed together, and scores that are searched together."""


@triton.jit
def _place_of(starts, lengths, requests, token):
    """The request of a token, and the number of tokens that it sees."""
    low, high = tl.full([], 0, tl.int32), requests
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(starts + middle) <= token:
            low = middle
        else:
            high = middle
    seen = tl.load(lengths + low) - tl.load(starts + low + 1) + token + 1
    return low.to(tl.int64), seen.to(tl.int32)


@triton.jit(do_not_specialize=["tables", "lengths", "starts", "requests", "first", "table_row", "width"])
def _scores_kernel(
    query,
    weights,
    cache,
    row_scales,
    tables,
    lengths,
    starts,
    scores,
    requests,
    first,
    heads,
    top_k,
    query_token,
    query_head,
    weights_token,
    table_row,
    width,
    cache_block,
    cache_row,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    HEADS: tl.constexpr,
    KEYS: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    QUANTIZED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute a strided subset of the tiles of one query, if it sees more than `top_k` keys, each of GROUP tokens."""
    token = first + tl.program_id(0)
    request, seen = _place_of(starts, lengths, requests, token)
    seen = seen // GROUP
    if seen > top_k:
        row, to = token.to(tl.int64), scores + tl.program_id(0).to(tl.int64) * width
        column = tl.arange(0, WIDTH)
        is_column = (column < HEAD_DIM)[None, :]
        for tile in range(tl.program_id(1), tl.cdiv(seen, KEYS), tl.num_programs(1)):
            place = tile * KEYS + tl.arange(0, KEYS)
            is_key = place < seen
            block = tl.load(tables + request * table_row + place // BLOCK, mask=is_key, other=0).to(tl.int64)
            at = cache + block * cache_block + place % BLOCK * cache_row
            keys = tl.load(at[:, None] + column[None, :], mask=is_key[:, None] & is_column, other=0.0)
            total = tl.zeros([KEYS], tl.float32)
            for start in range(0, heads, HEADS):
                head = start + tl.arange(0, HEADS)
                is_head = head < heads
                rows = query + row * query_token + head * query_head
                part = tl.load(rows[:, None] + column[None, :], mask=is_head[:, None] & is_column, other=0.0)
                products = tl.dot(part, tl.trans(keys.to(part.dtype)), input_precision=PRECISION)
                factors = tl.load(weights + row * weights_token + head, mask=is_head, other=0.0)
                total += tl.sum(tl.maximum(products, 0.0) * factors[:, None], axis=0)
            if QUANTIZED:
                scale_at = row_scales + block * (cache_block // 4) + BLOCK * HEAD_DIM // 4 + place % BLOCK
                total *= tl.load(scale_at, mask=is_key, other=0.0)
            total = tl.where(total == 0.0, 0.0, total)  # not -0.0, which the choice would tell apart
            tl.store(to + place, tl.where(total == total, total, float("-inf")), mask=is_key)


@triton.jit(do_not_specialize=["tables", "lengths", "starts", "requests", "first", "table_row", "width"])
def _choose_kernel(
    scores,
    tables,
    lengths,
    starts,
    slots,
    requests,
    first,
    top_k,
    table_row,
    width,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
):
    """Write the slots of the `top_k` keys with the highest scores, in order; of equal ones the first."""
    token = first + tl.program_id(0)
    request, seen = _place_of(starts, lengths, requests, token)
    seen = seen // GROUP
    table, to = tables + request * table_row, slots + token.to(tl.int64) * top_k
    if seen <= top_k:
        for start in range(0, top_k, TILE):
            number = start + tl.arange(0, TILE)
            place = tl.where(number < seen, number, 0)
            block = tl.load(table + place // BLOCK).to(tl.int64)
            tl.store(to + number, block * BLOCK + place % BLOCK, mask=number < top_k)
    else:
        row, tiles = scores + tl.program_id(0).to(tl.int64) * width, tl.cdiv(seen, TILE)
        least = _kth_of_row(row, float("-inf"), seen, tiles, top_k, TILE)
        left = top_k  # of the tokens whose score is the least one
        for tile in range(tiles):
            x, ids = _tile_of(row, tile, seen, TILE)
            left -= tl.sum(((x > least) & (ids < seen)).to(tl.int32), axis=0)
        written = 0
        for tile in range(tiles):
            x, ids = _tile_of(row, tile, seen, TILE)
            equal = (x == least) & (ids < seen)
            is_early = tl.cumsum(equal.to(tl.int32), axis=0) <= left
            chosen = ((x > least) & (ids < seen)) | (equal & is_early)
            at = written + tl.cumsum(chosen.to(tl.int32), axis=0) - 1
            block = tl.load(table + ids // BLOCK, mask=chosen, other=0).to(tl.int64)
            tl.store(to + at, block * BLOCK + ids % BLOCK, mask=chosen)
            left -= tl.sum(equal.to(tl.int32), axis=0)
            written += tl.sum(chosen.to(tl.int32), axis=0)


def select_tokens(
    query: Tensor,
    weights: Tensor,
    cache: Tensor,
    block_tables: Tensor,
    sequence_lengths: Tensor,
    query_starts: Tensor,
    top_k: int,
    tokens_per_key: int = 1,
) -> Tensor:
    """See `quire.kernels.reference`. Rows of a quantized cache must be a multiple of 4. Never waits for the device."""
    tokens, heads, head_dim = query.shape
    block_size, is_quantized, requests = cache.shape[3], cache.dtype in LARGEST, len(sequence_lengths)
    query = query if query.stride(-1) == 1 else query.contiguous()
    slots = torch.empty((tokens, top_k), dtype=torch.int64, device=query.device)
    width = block_tables.shape[1] * block_size
    size = min(tokens, max(1, _SCORES // width))
    scores = torch.empty((size, width), dtype=torch.float32, device=query.device)
    batch = block_tables, sequence_lengths, query_starts
    for first in range(0, tokens, size):
        count = min(size, tokens - first)
        _scores_kernel[count, max(1, min(triton.cdiv(width, _KEYS), _PROGRAMS // count))](
            *(query, weights, cache, cache[0].view(torch.float32) if is_quantized else query, *batch, scores),
            *(requests, first, heads, top_k, *query.stride()[:2], weights.stride(0), block_tables.stride(0), width),
            *(cache.stride(1), head_dim if is_quantized else cache.stride(3)),
            HEAD_DIM=head_dim,
            WIDTH=max(16, triton.next_power_of_2(head_dim)),
            HEADS=min(64, max(16, triton.next_power_of_2(heads))),
            KEYS=_KEYS,
            BLOCK=block_size,
            GROUP=tokens_per_key,
            QUANTIZED=is_quantized,
            PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
            num_warps=4,
        )
        _choose_kernel[(count,)](
            *(scores, *batch, slots, requests, first, top_k, block_tables.stride(0), width),
            BLOCK=block_size,
            GROUP=tokens_per_key,
            TILE=_TILE,
            num_warps=8,
        )
    return slots


@triton.jit(do_not_specialize=["tables", "lengths", "starts", "requests", "first", "table_row", "blocks"])
def _block_scores_kernel(
    query,
    cache,
    row_scales,
    tables,
    lengths,
    starts,
    scores,
    own,
    requests,
    first,
    heads,
    query_token,
    query_head,
    table_row,
    blocks,
    cache_block,
    cache_row,
    SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    HEADS: tl.constexpr,
    KEYS: tl.constexpr,
    BLOCK: tl.constexpr,
    QUANTIZED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute the scores of a strided subset of the blocks before that of one query, whose number goes to `own`."""
    number = tl.program_id(0).to(tl.int64)
    token = first + tl.program_id(0)
    request, seen = _place_of(starts, lengths, requests, token)
    last = tl.maximum(seen - 1, 0) // SIZE
    if tl.program_id(1) == 0:
        tl.store(own + number, last.to(tl.int64))
    head, column = tl.arange(0, HEADS), tl.arange(0, WIDTH)
    is_head, is_column = head < heads, (column < HEAD_DIM)[None, :]
    rows = query + token.to(tl.int64) * query_token + head * query_head
    queries = tl.load(rows[:, None] + column[None, :], mask=is_head[:, None] & is_column, other=0.0)
    for block in range(tl.program_id(1), last, tl.num_programs(1)):
        most = tl.full([HEADS], float("-inf"), tl.float32)
        for start in range(0, SIZE, KEYS):
            offset = start + tl.arange(0, KEYS)
            is_key, place = offset < SIZE, block * SIZE + offset
            page = tl.load(tables + request * table_row + place // BLOCK, mask=is_key, other=0).to(tl.int64)
            at = cache + page * cache_block + place % BLOCK * cache_row
            keys = tl.load(at[:, None] + column[None, :], mask=is_key[:, None] & is_column, other=0.0)
            products = tl.dot(queries, tl.trans(keys.to(queries.dtype)), input_precision=PRECISION)
            if QUANTIZED:
                scale_at = row_scales + page * (cache_block // 4) + BLOCK * HEAD_DIM // 4 + place % BLOCK
                products *= tl.load(scale_at, mask=is_key, other=0.0)[None, :]
            is_number = (products == products) & is_key[None, :]
            most = tl.maximum(most, tl.max(tl.where(is_number, products, float("-inf")), axis=1))
        tl.store(scores + (number * heads + head) * blocks + block, most, mask=is_head)


def select_blocks(
    query: Tensor,
    cache: Tensor,
    block_tables: Tensor,
    sequence_lengths: Tensor,
    query_starts: Tensor,
    size: int,
    count: int,
    local: int,
) -> Tensor:
    """See `quire.kernels.reference`. Rows of a quantized cache must be a multiple of 4. Never waits for the device."""
    tokens, heads, head_dim = query.shape
    block_size, is_quantized, requests = cache.shape[3], cache.dtype in LARGEST, len(sequence_lengths)
    query = query if query.stride(-1) == 1 else query.contiguous()
    chosen = torch.empty((tokens, heads, count), dtype=torch.int64, device=query.device)
    blocks = -(-block_tables.shape[1] * block_size // size)
    pieces = min(tokens, max(1, _SCORES // (heads * blocks)))
    scores = torch.empty((pieces, heads, blocks), dtype=torch.float32, device=query.device)
    own = torch.empty(pieces, dtype=torch.int64, device=query.device)
    for first in range(0, tokens, pieces):
        some = min(pieces, tokens - first)
        _block_scores_kernel[some, max(1, min(blocks, _PROGRAMS // some))](
            *(query, cache, cache[0].view(torch.float32) if is_quantized else query, block_tables, sequence_lengths),
            *(query_starts, scores, own, requests, first, heads, *query.stride()[:2], block_tables.stride(0), blocks),
            *(cache.stride(1), head_dim if is_quantized else cache.stride(3)),
            SIZE=size,
            HEAD_DIM=head_dim,
            WIDTH=max(16, triton.next_power_of_2(head_dim)),
            HEADS=max(16, triton.next_power_of_2(heads)),
            KEYS=min(_KEYS, max(16, triton.next_power_of_2(size))),
            BLOCK=block_size,
            QUANTIZED=is_quantized,
            PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
            num_warps=4,
        )
        chosen[first : first + some] = reference.choose_blocks(scores[:some], own[:some], count, local)
    return chosen
