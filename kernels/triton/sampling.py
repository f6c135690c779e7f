"""Sampling without sorting the vocabulary: a program for each row, a few passes over its logits.

What the controls leave of a row is all that is above a bound. That of top-p is not computed: the token of the greatest
noisy logit is drawn among what may be left, and if the probability above it shows that it is not, everything from it
down is struck out and another is drawn. The first that holds is the greatest of those that are left.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.noise import _mix64
from quire.kernels.reference import GREEDY_BELOW

_BLOCK = 4096


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
    """`log(1 + x)` for x from -1 to 0, as exact near 0 as elsewhere (Goldberg 1991, theorem 4)."""
    whole = 1.0 + x
    return tl.where(whole == 1.0, x, tl.log(whole) * (x / tl.where(whole == 1.0, 1.0, whole - 1.0)))


@triton.jit
def _ordered(x):
    """The bits of a float32 as a uint32 of the same order."""
    bits = x.to(tl.uint32, bitcast=True)
    return tl.where(bits >> 31 == 1, bits ^ 0xFFFFFFFF, bits | 0x80000000)


@triton.jit
def _greatest(x_row, temperature, bound, width, k, BLOCK: tl.constexpr):
    """The k-th greatest logit that is at least `bound`, or `bound` where there are fewer: its bits, 8 at a time."""
    lane, digits = tl.arange(0, BLOCK), tl.arange(0, 256)
    known = tl.full([], 0, tl.uint32)
    left = k
    for step in tl.static_range(4):
        shift = 24 - 8 * step
        counts = tl.zeros([256], tl.int32)
        for start in range(0, width, BLOCK):
            inside = start + lane < width
            x = tl.load(x_row + start + lane, mask=inside, other=float("-inf")) / temperature
            key = _ordered(x)
            # The digits before this one are those that are known; the first has none before it.
            fits = (key >> shift) >> 8 == (known >> shift) >> 8
            counts += tl.histogram(((key >> shift) & 255).to(tl.int32), 256, mask=inside & fits & (x >= bound))
        reached = tl.cumsum(counts, axis=0, reverse=True)  # logits of this digit or a greater one
        digit = tl.max(tl.where(reached >= left, digits, -1), axis=0)
        left = tl.where(digit < 0, 0, left - tl.sum(tl.where(digits > digit, counts, 0), axis=0))  # 0: there are fewer
        known = known | (tl.maximum(digit, 0).to(tl.uint32) << shift)
    bits = tl.where(known >> 31 == 1, known ^ 0x80000000, known ^ 0xFFFFFFFF)
    kth = bits.to(tl.float32, bitcast=True)
    return tl.where(left > 0, tl.maximum(kth, bound), bound)


@triton.jit
def _sample_kernel(
    logits,
    row_stride,
    rows,
    temperatures,
    top_ks,
    top_ps,
    min_ps,
    keys,
    out,
    width,
    BLOCK: tl.constexpr,
):
    """Draw for the row `rows[program]`; the controls are by program, `keys` those of the noise `[programs, 2]`."""
    program = tl.program_id(0)
    row = tl.load(rows + program)
    x_row = logits + row * row_stride
    temperature, top_p = tl.load(temperatures + program), tl.load(top_ps + program)
    top_k, min_p = tl.load(top_ks + program).to(tl.int32), tl.load(min_ps + program)
    low, high = tl.load(keys + 2 * program), tl.load(keys + 2 * program + 1)
    lane = tl.arange(0, BLOCK)

    greatest = float("-inf")
    for start in range(0, width, BLOCK):
        x = tl.load(x_row + start + lane, mask=start + lane < width, other=float("-inf"))
        greatest = tl.maximum(greatest, tl.max(x, axis=0))
    greatest = greatest / temperature
    # Everything at least `bound` is left: that of min-p, then raised by top-k.
    bound = float("-inf")
    if min_p > 0.0:
        bound = greatest + tl.log(min_p)
    share = 0.0
    if (top_k > 0) & (top_k < width):
        bound = _greatest(x_row, temperature, bound, width, top_k, BLOCK)
    if top_p < 1.0:
        # The sum over the k likeliest: of the last one's equals, only so many as are among them.
        above = 0
        for start in range(0, width, BLOCK):
            x = tl.load(x_row + start + lane, mask=start + lane < width, other=float("-inf")) / temperature
            is_above = x > bound if bound > float("-inf") else x >= bound
            above += tl.sum((is_above & (start + lane < width)).to(tl.int32), axis=0)
            share += tl.sum(tl.where(is_above, tl.exp(x - greatest), 0.0), axis=0)
        if bound > float("-inf"):
            ties = 0
            for start in range(0, width, BLOCK):
                x = tl.load(x_row + start + lane, mask=start + lane < width, other=float("-inf")) / temperature
                ties += tl.sum((x == bound).to(tl.int32), axis=0)
            if (top_k > 0) & (top_k < width):
                ties = tl.minimum(ties, tl.maximum(top_k - above, 0))
            share += ties * tl.exp(bound - greatest)

    token = 0
    is_left = 0
    strict = 0  # whether the bound itself is struck out
    while is_left == 0:
        best, best_x = float("-inf"), float("-inf")
        token = 0
        for start in range(0, width, BLOCK):
            ids = start + lane
            inside = ids < width
            x = tl.load(x_row + ids, mask=inside, other=float("-inf")) / temperature
            noise = -tl.log(-_log1p(-_uniform(ids, low, high)))
            allowed = inside & (x >= bound) & ((x > bound) | (strict == 0))
            noisy = tl.where(allowed, x + noise, float("-inf"))
            top = tl.max(noisy, axis=0)
            if top > best:
                place = tl.min(tl.where(noisy == top, lane, BLOCK), axis=0)
                best, token = top, start + place
                best_x = tl.max(tl.where(lane == place, x, float("-inf")), axis=0)
        is_left = 1
        if (top_p < 1.0) & (best > float("-inf")):
            over = 0.0
            for start in range(0, width, BLOCK):
                x = tl.load(x_row + start + lane, mask=start + lane < width, other=float("-inf")) / temperature
                over += tl.sum(tl.where(x > best_x, tl.exp(x - greatest), 0.0), axis=0)
            if (over >= top_p * share) & (best_x < greatest):
                is_left = 0
                bound = best_x
                strict = 1
    tl.store(out + row, token)


def sample(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, seeds: Tensor, positions: Tensor
) -> Tensor:
    """See `quire.kernels.reference`."""
    tokens = logits.argmax(dim=-1)
    drawn = torch.nonzero(temperature >= GREEDY_BELOW)[:, 0]
    if not len(drawn):
        return tokens
    if logits.stride(-1) != 1:
        logits = logits.contiguous()
    key = _mix64(_mix64(seeds[drawn]) + positions[drawn] * (0x9E3779B97F4A7C15 - 2**64))
    keys = torch.stack((key.to(torch.int32), (key >> 32).to(torch.int32)), dim=1)
    controls = (drawn, temperature[drawn], top_k[drawn], top_p[drawn], min_p[drawn], keys)
    rows, *rest = (control.to(logits.device, non_blocking=True) for control in controls)
    _sample_kernel[(len(drawn),)](
        logits, logits.stride(0), rows, *rest, tokens, logits.shape[1], BLOCK=_BLOCK, num_warps=8
    )
    return tokens
