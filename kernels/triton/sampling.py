"""Sampling without sorting the vocabulary: one program per tile of a row, and few passes over the logits.

The sampling parameters keep the logits of a row that are at least some bound.

- Top-k: the k-th largest of the maxima of many small groups is at most the k-th largest of all logits. Few more than k
  logits reach this bound; they are gathered, and the token is selected among them.
- Top-p: the bound is not computed. The token with the largest noisy logit is drawn among those that may be kept. If the
  probability above it shows that top-p excludes it, it and all less likely tokens are excluded and another is drawn.
  The first token that is accepted has the largest noisy logit of all tokens that top-p keeps.

Tiles do not depend on the other rows, and results of several tiles are combined in order, so a draw does not depend on
the batch. Nothing is read back from the device.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.reference.sampling import GREEDY_BELOW

_TILE, _GROUPS = 4096, 64
"""Logits per program, and the number of groups they are split into to take maxima for top-k."""
_GATHERED = 64
"""Most logits gathered from a tile for top-k; if there are more, a slower path is taken."""
_WARPS = 8


@triton.jit
def _mix64(x):
    """`quire.kernels.noise._mix64`."""
    x += 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _key(controls, row):
    """The key of a row's noise as two int32 halves."""
    seed = tl.load(controls + 8 * row).to(tl.uint32, bitcast=True).to(tl.uint64)
    seed |= tl.load(controls + 8 * row + 1).to(tl.uint32, bitcast=True).to(tl.uint64) << 32
    position = tl.load(controls + 8 * row + 2).to(tl.uint32, bitcast=True).to(tl.uint64)
    position |= tl.load(controls + 8 * row + 3).to(tl.uint32, bitcast=True).to(tl.uint64) << 32
    key = _mix64(_mix64(seed) + position * 0x9E3779B97F4A7C15)
    return key.to(tl.uint32).to(tl.int32, bitcast=True), (key >> 32).to(tl.uint32).to(tl.int32, bitcast=True)


@triton.jit
def _control(controls, row, place):
    return tl.load(controls + 8 * row + place).to(tl.float32, bitcast=True)


@triton.jit
def _temperature(controls, row, greedy_below):
    """A row's temperature (1 if greedy), and whether the row is sampled."""
    temperature = _control(controls, row, 4)
    return tl.where(temperature >= greedy_below, temperature, 1.0), temperature >= greedy_below


@triton.jit
def _uniform(ids, low, high):
    """`quire.kernels.noise.uniform_noise` of one row, bit for bit; all int32."""
    bits = (ids ^ low).to(tl.uint32)
    bits ^= bits >> 16
    bits *= 0x7FEB352D
    bits ^= high.to(tl.uint32)
    bits ^= bits >> 15
    bits *= 0x846CA68B
    bits ^= bits >> 16
    bits &= 0x7FFFFFFF
    return tl.minimum((bits.to(tl.float32) + 0.5) * 4.656612873077393e-10, 0.9999999403953552)


@triton.jit
def _log1p(x):
    """`log(1 + x)` for x from -1 to 0, accurate near 0 (Goldberg 1991, theorem 4)."""
    whole = 1.0 + x
    return tl.where(whole == 1.0, x, tl.log(whole) * (x / tl.where(whole == 1.0, 1.0, whole - 1.0)))


@triton.jit
def _gumbel(ids, low, high):
    return -tl.log(-_log1p(-_uniform(ids, low, high)))


@triton.jit
def _tile_of(x_row, tile, width, TILE: tl.constexpr):
    ids = tile * TILE + tl.arange(0, TILE)
    return tl.load(x_row + ids, mask=ids < width, other=float("-inf")), ids


@triton.jit
def _mass(x, greatest, temperature):
    """The probabilities of logits relative to that of the largest one."""
    return tl.exp2((x - greatest) * (1.4426950408889634 / temperature))


@triton.jit
def _ordered(x):
    """Map the bits of a float32 to a uint32 with the same order."""
    bits = x.to(tl.uint32, bitcast=True)
    return tl.where(bits >> 31 == 1, bits ^ 0xFFFFFFFF, bits | 0x80000000)


@triton.jit
def _from_ordered(bits):
    bits = tl.where(bits >> 31 == 1, bits ^ 0x80000000, bits ^ 0xFFFFFFFF)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _kth(x, k):
    """The k-th largest of `x`, found bit by bit; minus infinity if there are fewer."""
    keys = _ordered(x)
    known = tl.full([], 0, tl.uint32)
    for step in range(32):
        trial = known | (tl.full([], 1, tl.uint32) << (31 - step))
        known = tl.where(tl.sum((keys >= trial).to(tl.int32), axis=0) >= k, trial, known)
    return tl.where(known == 0, float("-inf"), _from_ordered(known))


@triton.jit
def _kth_of_row(x_row, bound, width, tiles, k, TILE: tl.constexpr):
    """The k-th largest logit that is at least `bound`, found 8 bits at a time; `bound` if there are fewer."""
    digits = tl.arange(0, 256)
    known = tl.full([], 0, tl.uint32)
    left = k
    for step in tl.static_range(4):
        shift = 24 - 8 * step
        counts = tl.zeros([256], tl.int32)
        for tile in range(tiles):
            x, ids = _tile_of(x_row, tile, width, TILE)
            key = _ordered(x)
            # Compare the digits before this one, which are known; the first digit has none.
            fits = (key >> shift) >> 8 == (known >> shift) >> 8
            counts += tl.histogram(((key >> shift) & 255).to(tl.int32), 256, mask=(ids < width) & fits & (x >= bound))
        reached = tl.cumsum(counts, axis=0, reverse=True)  # logits with this digit or a larger one
        digit = tl.max(tl.where(reached >= left, digits, -1), axis=0)
        left = tl.where(digit < 0, 0, left - tl.sum(tl.where(digits > digit, counts, 0), axis=0))  # 0: there are fewer
        known = known | (tl.maximum(digit, 0).to(tl.uint32) << shift)
    return tl.where(left > 0, tl.maximum(_from_ordered(known), bound), bound)


@triton.jit
def _tiles_kernel(
    logits,
    row_stride,
    controls,
    greedy_below,
    width,
    sums,
    groups,
    GROUPED: tl.constexpr,
    TILE: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """Store a tile's largest logit, its index, and the sum of probabilities relative to it."""
    row, tile, tiles = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    x, _ids = _tile_of(logits + row * row_stride, tile, width, TILE)
    temperature, _is_drawn = _temperature(controls, row, greedy_below)
    greatest, place = tl.max(x, axis=0, return_indices=True)
    base = tl.where(greatest == float("-inf"), 0.0, greatest)
    to = sums + (row * tiles + tile) * 3
    tl.store(to, greatest)
    tl.store(to + 1, tl.sum(_mass(x, base, temperature), axis=0))
    tl.store(to + 2, (tile * TILE + place).to(tl.float32))
    if GROUPED:
        of_groups = tl.max(tl.reshape(x, [GROUPS, TILE // GROUPS]), axis=1)
        tl.store(groups + (row * tiles + tile) * GROUPS + tl.arange(0, GROUPS), of_groups)


@triton.jit
def _begin_kernel(
    logits,
    row_stride,
    controls,
    greedy_below,
    width,
    tiles,
    sums,
    groups,
    facts,
    states,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """Initialize a row's facts: its largest logit, the sum that top-p refers to, and a lower bound of the k largest.

    Also initializes its state: the bound, whether the bound itself is excluded, whether the token is known, and the
    token.
    """
    row = tl.program_id(0).to(tl.int64)
    number = tl.arange(0, TILES)
    at, inside = sums + (row * tiles + number) * 3, number < tiles
    of_tiles = tl.load(at, mask=inside, other=float("-inf"))
    greatest, first = tl.max(of_tiles, axis=0, return_indices=True)
    token = tl.load(sums + (row * tiles + first) * 3 + 2)
    temperature, is_drawn = _temperature(controls, row, greedy_below)
    top_p, min_p = _control(controls, row, 5), _control(controls, row, 6)
    top_k = tl.load(controls + 8 * row + 7)
    base = tl.where(greatest == float("-inf"), 0.0, greatest)
    share = tl.sum(tl.load(at + 1, mask=inside, other=0.0) * _mass(of_tiles, base, temperature), axis=0)
    bound = float("-inf")
    if min_p > 0.0:
        bound = greatest + temperature * tl.log(min_p)
    is_top_k = (top_k > 0) & (top_k < width)
    if is_drawn & (min_p > 0.0) & (top_p < 1.0) & (is_top_k == 0):
        share = 0.0
        for tile in range(tiles):
            x, _ids = _tile_of(logits + row * row_stride, tile, width, TILE)
            share += tl.sum(tl.where(x >= bound, _mass(x, base, temperature), 0.0), axis=0)
    floor = bound
    if is_drawn & is_top_k:
        group = tl.arange(0, TILES * GROUPS)
        is_group = group < tiles * GROUPS
        of_groups = tl.load(groups + row * tiles * GROUPS + group, mask=is_group, other=float("-inf"))
        floor = tl.maximum(bound, _kth(of_groups, top_k))
    tl.store(facts + 3 * row, base)
    tl.store(facts + 3 * row + 1, share)
    tl.store(facts + 3 * row + 2, floor)
    tl.store(states + 4 * row, bound)
    tl.store(states + 4 * row + 1, 0.0)
    tl.store(states + 4 * row + 2, tl.where(is_drawn, 0.0, 1.0))
    tl.store(states + 4 * row + 3, token)


@triton.jit
def _gather_kernel(
    logits,
    row_stride,
    controls,
    greedy_below,
    width,
    facts,
    states,
    gathered,
    places,
    counts,
    TILE: tl.constexpr,
    GATHERED: tl.constexpr,
):
    """Gather the logits of a tile that may be among a row's k largest, and their ids, in ascending order."""
    row, tile, tiles = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    top_k = tl.load(controls + 8 * row + 7)
    if (tl.load(states + 4 * row + 2) == 0.0) & (top_k > 0) & (top_k < width):
        x, ids = _tile_of(logits + row * row_stride, tile, width, TILE)
        is_in = (ids < width) & (x >= tl.load(facts + 3 * row + 2))
        place = tl.cumsum(is_in.to(tl.int32), axis=0) - 1
        to = (row * tiles + tile) * GATHERED + place
        tl.store(gathered + to, x, mask=is_in & (place < GATHERED))
        tl.store(places + to, ids, mask=is_in & (place < GATHERED))
        tl.store(counts + row * tiles + tile, tl.sum(is_in.to(tl.int32), axis=0))


@triton.jit
def _choose_kernel(
    logits,
    row_stride,
    controls,
    greedy_below,
    width,
    tiles,
    facts,
    states,
    gathered,
    places,
    counts,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    GATHERED: tl.constexpr,
):
    """Select the token of a row with top-k from the gathered logits; if these are too many, only its bound and sum."""
    row = tl.program_id(0).to(tl.int64)
    top_k = tl.load(controls + 8 * row + 7)
    if (tl.load(states + 4 * row + 2) == 0.0) & (top_k > 0) & (top_k < width):
        temperature, _is_drawn = _temperature(controls, row, greedy_below)
        top_p, greatest, bound = _control(controls, row, 5), tl.load(facts + 3 * row), tl.load(states + 4 * row)
        number = tl.arange(0, TILES)
        most = tl.max(tl.load(counts + row * tiles + number, mask=number < tiles, other=0), axis=0)
        if most <= GATHERED:
            place = tl.arange(0, TILES * GATHERED)
            of = place // GATHERED
            count = tl.load(counts + row * tiles + of, mask=of < tiles, other=0)
            is_in = place % GATHERED < count
            x = tl.load(gathered + row * tiles * GATHERED + place, mask=is_in, other=float("-inf"))
            ids = tl.load(places + row * tiles * GATHERED + place, mask=is_in, other=0)
            bound = tl.maximum(bound, _kth(x, top_k))
            # The sum over the k most likely tokens: of those tied with the last one, only as many as belong to the k.
            above = tl.sum((x > bound).to(tl.int32), axis=0)
            ties = tl.minimum(tl.sum((is_in & (x == bound)).to(tl.int32), axis=0), top_k - above)
            share = tl.sum(tl.where(x > bound, _mass(x, greatest, temperature), 0.0), axis=0)
            share += tl.where(ties > 0, ties * _mass(bound, greatest, temperature), 0.0)
            low, high = _key(controls, row)
            noisy = tl.where(x >= bound, x / temperature + _gumbel(ids, low, high), float("-inf"))
            is_left = 0
            token = tl.full([], 0, tl.int32)
            while is_left == 0:
                best, at = tl.max(noisy, axis=0, return_indices=True)
                best_x = tl.max(tl.where(place == at, x, float("-inf")), axis=0)
                token = tl.max(tl.where(place == at, ids, 0), axis=0)
                is_left = 1
                if (top_p < 1.0) & (best_x < greatest) & (best > float("-inf")):
                    over = tl.sum(tl.where(x > best_x, _mass(x, greatest, temperature), 0.0), axis=0)
                    if over >= top_p * share:
                        is_left = 0
                        noisy = tl.where(x > best_x, noisy, float("-inf"))
            tl.store(states + 4 * row + 2, 1.0)
            tl.store(states + 4 * row + 3, token.to(tl.float32))
        else:
            x_row = logits + row * row_stride
            bound = _kth_of_row(x_row, bound, width, tiles, top_k, TILE)
            share = 0.0
            above, ties = 0, 0
            for tile in range(tiles):
                x, _ids = _tile_of(x_row, tile, width, TILE)
                share += tl.sum(tl.where(x > bound, _mass(x, greatest, temperature), 0.0), axis=0)
                above += tl.sum((x > bound).to(tl.int32), axis=0)
                ties += tl.sum((x == bound).to(tl.int32), axis=0)
            if bound > float("-inf"):
                share += tl.minimum(ties, tl.maximum(top_k - above, 0)) * _mass(bound, greatest, temperature)
            tl.store(states + 4 * row, bound)
            tl.store(facts + 3 * row + 1, share)


@triton.jit
def _draw(x_row, tile, width, bound, strict, temperature, low, high, TILE: tl.constexpr):
    """The largest noisy logit of a tile among those that may be kept, its logit and its id; ties go to the lowest id.

    No noise is computed for logits that cannot win: noise is at most `-log(u)` of the uniform number u, and the bits of
    a float give a lower bound of its logarithm.
    """
    x, ids = _tile_of(x_row, tile, width, TILE)
    allowed = ((x > bound) | (x == tl.where(strict == 0.0, bound, float("inf")))) & (x > float("-inf"))
    scaled = tl.where(allowed, x, 0.0) / temperature
    low_log2 = _uniform(ids, low, high).to(tl.int32, bitcast=True).to(tl.float32) * 1.1920928955078125e-07 - 127.0
    upper = scaled - 0.6931471805599453 * low_log2 + (1e-6 * tl.abs(scaled) + 1e-4)
    upper = tl.where(allowed, upper, float("-inf"))
    best, best_x, token = float("-inf"), float("-inf"), tl.full([], 0, tl.int32)
    most, place = tl.max(upper, axis=0, return_indices=True)
    while most > best:
        this = tile * TILE + place
        this_x = tl.load(x_row + this)
        noisy = this_x / temperature + _gumbel(this, low, high)
        is_better = (noisy > best) | ((noisy == best) & (this < token))
        best, best_x = tl.where(is_better, noisy, best), tl.where(is_better, this_x, best_x)
        token = tl.where(is_better, this, token)
        upper = tl.where(ids == this, float("-inf"), upper)
        most, place = tl.max(upper, axis=0, return_indices=True)
    return best, best_x, token


@triton.jit
def _drawn(draws, row, tiles, TILES: tl.constexpr):
    """The draw of a row: noisy logit, logit and id; ties go to the lowest id."""
    number = tl.arange(0, TILES)
    noisy = tl.load(draws + (row * tiles + number) * 3, mask=number < tiles, other=float("-inf"))
    best, first = tl.max(noisy, axis=0, return_indices=True)
    at = draws + (row * tiles + first) * 3
    return best, tl.load(at + 1), tl.load(at + 2)


@triton.jit
def _after(states, draws, masses, facts, controls, row, tiles, TILES: tl.constexpr):
    """A row's state after a round: the token is accepted unless top-p excludes it."""
    bound, strict = tl.load(states + 4 * row), tl.load(states + 4 * row + 1)
    is_known, token = tl.load(states + 4 * row + 2), tl.load(states + 4 * row + 3)
    if is_known == 0.0:
        best, best_x, drawn = _drawn(draws, row, tiles, TILES)
        top_p, greatest, share = _control(controls, row, 5), tl.load(facts + 3 * row), tl.load(facts + 3 * row + 1)
        over = 0.0
        if top_p < 1.0:
            number = tl.arange(0, TILES)
            over = tl.sum(tl.load(masses + row * tiles + number, mask=number < tiles, other=0.0), axis=0)
        is_out = (top_p < 1.0) & (best > float("-inf")) & (over >= top_p * share) & (best_x < greatest)
        bound, strict = tl.where(is_out, best_x, bound), tl.where(is_out, 1.0, strict)
        is_known = tl.where(is_out, 0.0, 1.0)
        token = tl.where(best > float("-inf"), drawn, 0.0)
    return bound, strict, is_known, token


@triton.jit(do_not_specialize=["round_"])
def _draw_kernel(
    logits,
    row_stride,
    controls,
    greedy_below,
    width,
    facts,
    states,
    draws,
    masses,
    round_,
    FIRST: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
):
    """Draw from a tile in one round, after computing the state that the previous round left (in every tile)."""
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    rows, tiles = tl.num_programs(0), tl.num_programs(1)
    states += 4 * rows * round_
    draws += 3 * rows * tiles * round_
    masses += rows * tiles * round_
    if FIRST:
        bound, strict = tl.load(states + 4 * row), tl.load(states + 4 * row + 1)
        is_known = tl.load(states + 4 * row + 2)
    else:
        bound, strict, is_known, token = _after(
            states - 4 * rows, draws - 3 * rows * tiles, masses - rows * tiles, facts, controls, row, tiles, TILES
        )
        if tile == 0:
            tl.store(states + 4 * row, bound)
            tl.store(states + 4 * row + 1, strict)
            tl.store(states + 4 * row + 2, is_known)
            tl.store(states + 4 * row + 3, token)
    if is_known == 0.0:
        temperature, _is_drawn = _temperature(controls, row, greedy_below)
        low, high = _key(controls, row)
        best, best_x, drawn = _draw(logits + row * row_stride, tile, width, bound, strict, temperature, low, high, TILE)
        to = draws + (row * tiles + tile) * 3
        tl.store(to, best)
        tl.store(to + 1, best_x)
        tl.store(to + 2, drawn.to(tl.float32))


@triton.jit(do_not_specialize=["round_"])
def _weigh_kernel(
    logits,
    row_stride,
    controls,
    greedy_below,
    width,
    facts,
    states,
    draws,
    masses,
    round_,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
):
    """The probability in a tile above that of this round's draw, for rows with top-p."""
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    rows, tiles = tl.num_programs(0), tl.num_programs(1)
    if (tl.load(states + 4 * (rows * round_ + row) + 2) == 0.0) & (_control(controls, row, 5) < 1.0):
        x, _ids = _tile_of(logits + row * row_stride, tile, width, TILE)
        temperature, _is_drawn = _temperature(controls, row, greedy_below)
        _noisy, best_x, _token = _drawn(draws + 3 * rows * tiles * round_, row, tiles, TILES)
        over = tl.sum(tl.where(x > best_x, _mass(x, tl.load(facts + 3 * row), temperature), 0.0), axis=0)
        tl.store(masses + rows * tiles * round_ + row * tiles + tile, over)


@triton.jit(do_not_specialize=["rounds"])
def _finish_kernel(
    logits,
    row_stride,
    controls,
    greedy_below,
    width,
    tiles,
    facts,
    states,
    draws,
    masses,
    out,
    rounds,
    DRAWN: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
):
    """Store the tokens. A row whose token is not known after all rounds continues in this program."""
    row, rows = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    if DRAWN:
        last = rounds - 1
        bound, strict, is_known, token = _after(
            *(states + 4 * rows * last, draws + 3 * rows * tiles * last, masses + rows * tiles * last),
            *(facts, controls, row, tiles, TILES),
        )
    else:
        bound, strict = tl.load(states + 4 * row), tl.load(states + 4 * row + 1)
        is_known, token = tl.load(states + 4 * row + 2), tl.load(states + 4 * row + 3)
    if is_known == 0.0:
        x_row = logits + row * row_stride
        temperature, _is_drawn = _temperature(controls, row, greedy_below)
        low, high = _key(controls, row)
        top_p, greatest, share = _control(controls, row, 5), tl.load(facts + 3 * row), tl.load(facts + 3 * row + 1)
        number = tl.arange(0, TILES)
        while is_known == 0.0:
            best, best_x, drawn = float("-inf"), float("-inf"), tl.full([], 0, tl.int32)
            for tile in range(tiles):
                noisy, noisy_x, place = _draw(x_row, tile, width, bound, strict, temperature, low, high, TILE)
                best_x, drawn = tl.where(noisy > best, noisy_x, best_x), tl.where(noisy > best, place, drawn)
                best = tl.maximum(best, noisy)
            over = tl.zeros([TILES], tl.float32)
            if top_p < 1.0:
                for tile in range(tiles):
                    x, _ids = _tile_of(x_row, tile, width, TILE)
                    of_tile = tl.sum(tl.where(x > best_x, _mass(x, greatest, temperature), 0.0), axis=0)
                    over = tl.where(number == tile, of_tile, over)
            token = drawn.to(tl.float32)
            is_out = (top_p < 1.0) & (best > float("-inf")) & (best_x < greatest)
            is_out = is_out & (tl.sum(over, axis=0) >= top_p * share)
            bound, strict = tl.where(is_out, best_x, bound), tl.where(is_out, 1.0, strict)
            is_known = tl.where(is_out, 0.0, 1.0)
    tl.store(out + row, token.to(tl.int64))


def sample(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, seeds: Tensor, positions: Tensor
) -> Tensor:
    """See `quire.kernels.reference`."""
    # numpy on the host: a small torch operation takes several times as long.
    temperatures, ks, ps = temperature.numpy(), top_k.numpy(), top_p.numpy()
    drawn = temperatures >= GREEDY_BELOW
    if not drawn.any():
        return logits.argmax(dim=-1)
    if logits.stride(-1) != 1:
        logits = logits.contiguous()
    (rows, width), device = logits.shape, logits.device
    controls = _controls(temperature, top_k, top_p, min_p, seeds, positions, width, device)
    is_top_k = drawn & (ks > 0) & (ks < width)
    is_top_p = bool((ps[drawn] < 1.0).any())
    rest = ps[drawn & ~is_top_k]
    rounds = 0 if not len(rest) else _rounds(float(rest.min()))
    tiles = triton.cdiv(width, _TILE)
    by_row, by_tile, padded = (rows,), (rows, tiles), {"TILES": triton.next_power_of_2(tiles)}

    def floats(*shape: int) -> Tensor:
        return torch.empty(shape, device=device)

    def launch(kernel: Any, grid: tuple[int, ...], *own: Any, **sizes: Any) -> None:
        """Launch a kernel with the arguments that all kernels share, followed by its own."""
        common = (logits, logits.stride(0), controls, GREEDY_BELOW, width)
        kernel[grid](*common, *own, **sizes, TILE=_TILE, num_warps=_WARPS)

    sums, facts, states = floats(rows, tiles, 3), floats(rows, 3), floats(rounds + 1, rows, 4)
    draws, masses = floats(max(1, rounds), rows, tiles, 3), floats(max(1, rounds), rows, tiles)
    is_grouped = bool(is_top_k.any())
    groups = floats(rows, tiles, _GROUPS) if is_grouped else sums
    launch(_tiles_kernel, by_tile, sums, groups, GROUPED=is_grouped, GROUPS=_GROUPS)
    launch(_begin_kernel, by_row, tiles, sums, groups, facts, states, **padded, GROUPS=_GROUPS)
    if is_grouped:
        gathered, places = floats(rows, tiles, _GATHERED), torch.empty_like(groups, dtype=torch.int32)
        candidates = gathered, places, torch.empty((rows, tiles), dtype=torch.int32, device=device)
        launch(_gather_kernel, by_tile, facts, states, *candidates, GATHERED=_GATHERED)
        launch(_choose_kernel, by_row, tiles, facts, states, *candidates, **padded, GATHERED=_GATHERED)
    of_rounds = facts, states, draws, masses
    for number in range(rounds):
        launch(_draw_kernel, by_tile, *of_rounds, number, FIRST=number == 0, **padded)
        if is_top_p:
            launch(_weigh_kernel, by_tile, *of_rounds, number, **padded)
    tokens = torch.empty(rows, dtype=torch.int64, device=device)
    launch(_finish_kernel, by_row, tiles, *of_rounds, tokens, rounds, DRAWN=rounds > 0, **padded)
    return tokens


def _controls(
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
    width: int,
    device: torch.device,
) -> Tensor:
    """Copy the parameters of all rows to the device at once, as int32 `[rows, 8]`.

    Seed and position take two elements each, low half first; temperature, top-p and min-p are the bits of float32.
    """
    host = torch.empty((len(seeds), 8), dtype=torch.int32, pin_memory=device.type == "cuda")
    packed = host.numpy()
    packed.view(np.int64)[:, 0] = seeds.numpy()
    if not positions.is_cuda:
        packed.view(np.int64)[:, 1] = positions.numpy()
    for place, control in enumerate((temperature, top_p, min_p), start=4):
        packed.view(np.float32)[:, place] = control.numpy()
    packed[:, 7] = np.clip(top_k.numpy(), 0, width)
    controls = host.to(device, non_blocking=True)
    if positions.is_cuda:
        controls.view(torch.int64)[:, 1] = positions
    return controls


def _rounds(top_p: float) -> int:
    """Rounds after which nearly all rows have a token: the probability of n failures is about `(1 - top_p)^n / n!`."""
    return 1 if top_p >= 1.0 else 3 if top_p > 0.8 else 5
