"""Operations on rows of logits other than sampling: log-probabilities and penalties."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE, _CHUNK = 4096, 4096
"""Logits per program, and tokens counted at a time."""
_WARPS = 8


@triton.jit
def _score_kernel(logits, row_stride, tokens, tiles_of, width, TILE: tl.constexpr):
    """Store a tile's largest logit, the sum of exponentials relative to it, and how many logits exceed the token's."""
    row, tile, tiles = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    x_row = logits + row * row_stride
    chosen = tl.load(x_row + tl.load(tokens + row))
    ids = tile * TILE + tl.arange(0, TILE)
    x = tl.load(x_row + ids, mask=ids < width, other=float("-inf"))
    greatest = tl.max(x, axis=0)
    base = tl.where(greatest == float("-inf"), 0.0, greatest)
    to = tiles_of + (row * tiles + tile) * 3
    tl.store(to, greatest)
    tl.store(to + 1, tl.sum(tl.exp(x - base), axis=0))
    tl.store(to + 2, tl.sum((x > chosen).to(tl.float32), axis=0))  # integers far below 2^24


@triton.jit
def _total_kernel(logits, row_stride, tokens, tiles_of, tiles, logprobs, ranks, totals, TILES: tl.constexpr):
    """Combine the tiles of a row; `totals` receives the logarithm of the row's sum."""
    row, number = tl.program_id(0).to(tl.int64), tl.arange(0, TILES)
    at, inside = tiles_of + (row * tiles + number) * 3, number < tiles
    of_tiles = tl.load(at, mask=inside, other=float("-inf"))
    greatest = tl.max(of_tiles, axis=0)
    base = tl.where(greatest == float("-inf"), 0.0, greatest)
    total = base + tl.log(tl.sum(tl.load(at + 1, mask=inside, other=0.0) * tl.exp(of_tiles - base), axis=0))
    above = tl.sum(tl.load(at + 2, mask=inside, other=0.0).to(tl.int32), axis=0)
    tl.store(logprobs + row, tl.load(logits + row * row_stride + tl.load(tokens + row)) - total)
    tl.store(ranks + row, above + 1)
    tl.store(totals + row, total)


def score_tokens(logits: Tensor, tokens: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `quire.kernels.reference`. The most likely tokens are computed by torch."""
    if logits.stride(-1) != 1:
        logits = logits.contiguous()
    rows, width = logits.shape
    logprobs, totals = (torch.empty(rows, device=logits.device) for _ in range(2))
    ranks = torch.empty(rows, dtype=torch.int32, device=logits.device)
    tiles = triton.cdiv(width, _TILE)
    tiles_of = torch.empty((rows, tiles, 3), device=logits.device)
    if rows:
        source = (logits, logits.stride(0), tokens, tiles_of)
        _score_kernel[(rows, tiles)](*source, width, TILE=_TILE, num_warps=_WARPS)
        _total_kernel[(rows,)](
            *source, tiles, logprobs, ranks, totals, TILES=triton.next_power_of_2(tiles), num_warps=1
        )
    top = logits.topk(min(num_top, width), dim=-1)
    return logprobs, ranks, top.indices.int(), top.values - totals[:, None]


@triton.jit
def _penalize_kernel(logits, row_stride, tokens, rows, spans, factors, width, TILE: tl.constexpr, CHUNK: tl.constexpr):
    """Count the request's tokens in one tile of a row, and penalize its logits."""
    request, low = tl.program_id(0), tl.program_id(1) * TILE
    lane = tl.arange(0, CHUNK)
    begin, middle = tl.load(spans + 3 * request), tl.load(spans + 3 * request + 1)
    count = (tl.load(spans + 3 * request + 2) - begin).to(tl.int32)
    prompt = (middle - begin).to(tl.int32)
    in_prompt, in_output = tl.zeros([TILE], tl.int32), tl.zeros([TILE], tl.int32)
    for start in range(0, count, CHUNK):
        place = start + lane
        bins = tl.load(tokens + begin + place, mask=place < count, other=-1).to(tl.int32) - low
        inside = (bins >= 0) & (bins < TILE) & (place < count)
        bins = tl.where(inside, bins, 0)
        in_prompt += tl.histogram(bins, TILE, mask=inside & (place < prompt))
        in_output += tl.histogram(bins, TILE, mask=inside & (place >= prompt))
    column = low + tl.arange(0, TILE)
    changed = (in_prompt + in_output > 0) & (column < width)
    at = logits + tl.load(rows + request) * row_stride + column
    repetition = tl.load(factors + 3 * request)
    frequency, presence = tl.load(factors + 3 * request + 1), tl.load(factors + 3 * request + 2)
    x = tl.load(at, mask=changed, other=0.0)
    x = tl.where(x > 0.0, x / repetition, x * repetition)
    x -= frequency * in_output.to(tl.float32)
    x -= tl.where(in_output > 0, presence, 0.0)
    tl.store(at, x, mask=changed)


def penalize(logits: Tensor, tokens: Tensor, rows: Tensor, spans: Tensor, factors: Tensor, longest: int) -> None:
    """See `quire.kernels.reference`. Allocates no tensor of the size of the vocabulary."""
    assert logits.stride(-1) == 1
    width = logits.shape[1]
    if len(rows):
        _penalize_kernel[(len(rows), triton.cdiv(width, _TILE))](
            *(logits, logits.stride(0), tokens, rows, spans.contiguous(), factors.contiguous(), width),
            TILE=_TILE,
            CHUNK=min(_CHUNK, max(32, triton.next_power_of_2(longest))),
            num_warps=_WARPS,
        )
