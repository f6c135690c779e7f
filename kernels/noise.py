"""Random numbers as a pure function of (seed, position, id): no generator, no state, the same bits on every device.

Each (seed, position) is hashed to a 64-bit key by the finalizer of SplitMix64 (Steele, Lea & Flood, "Fast splittable
pseudorandom number generators", OOPSLA 2014). Each id goes through the 32-bit finalizer `lowbias32` (Wellons,
"Prospecting for hash functions", https://nullprogram.com/blog/2018/07/31/) with one half of the key mixed in before
each of its two multiplications. Integers wrap; torch's `>>` extends the sign, hence the masks.
"""

from __future__ import annotations

import torch
from torch import Tensor

_GOLDEN_GAMMA = 0x9E3779B97F4A7C15 - 2**64
_CHUNK_ELEMENTS = 1 << 18
"""Elements computed at once, so that they stay in a CPU's cache."""


def uniform_noise(seeds: Tensor, positions: Tensor, ids: Tensor) -> Tensor:
    """Uniform numbers in the open interval (0, 1), float32 `[rows, ids]`, exact near 0 (multiples of 2⁻³²).

    `seeds` and `positions` are int64 `[rows]`, `ids` is int32 `[ids]`.
    """
    keys = _mix64(_mix64(seeds) + positions * _GOLDEN_GAMMA)
    low, high = keys.to(torch.int32)[:, None], (keys >> 32).to(torch.int32)[:, None]
    bits = ids ^ low  # [rows, ids]
    bits ^= (bits >> 16) & 0xFFFF
    bits *= 0x7FEB352D
    bits ^= high
    bits ^= (bits >> 15) & 0x1FFFF
    bits *= 0x846CA68B - 2**32
    bits ^= (bits >> 16) & 0xFFFF
    bits &= 0x7FFFFFFF
    return bits.float().add_(0.5).mul_(2.0**-31).clamp_(max=1 - 2.0**-24)


def gumbel_noise(seeds: Tensor, positions: Tensor, count: int) -> Tensor:
    """Standard Gumbel noise for the ids 0 to count - 1, float32 `[rows, count]`, all finite.

    The arg max of `logits + noise` is a sample from `softmax(logits)` (Gumbel 1954; Maddison et al. 2014).
    """
    ids = torch.arange(count, dtype=torch.int32, device=seeds.device)
    noise = torch.empty(len(seeds), count, device=seeds.device)
    rows = max(1, _CHUNK_ELEMENTS // count)
    for start in range(0, len(seeds), rows):
        part = slice(start, start + rows)
        exponential = uniform_noise(seeds[part], positions[part], ids).neg_().log1p_().neg_()
        noise[part] = exponential.log_().neg_()
    return noise


def _mix64(x: Tensor) -> Tensor:
    """SplitMix64's step and finalizer."""
    x = x + _GOLDEN_GAMMA
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * (0xBF58476D1CE4E5B9 - 2**64)
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * (0x94D049BB133111EB - 2**64)
    return x ^ ((x >> 31) & 0x1FFFFFFFF)
