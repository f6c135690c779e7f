"""The KV cache of 4-bit numbers (`quire.kernels.int4_kv`): its blocks are written here, and read in tiles.

The bytes of one head of a block are at `base` from the cache, and `base / 2` from the same memory as float16.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def int4_keys(
    cache,
    halves,
    base,
    place,
    is_key,
    FROM: tl.constexpr,
    WIDTH: tl.constexpr,
    END: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Features FROM to END of the keys at `place` `[KEYS]` of their blocks, and of those half a block later: bytes,
    scales and offsets `[WIDTH, KEYS]`, zeros beyond END and where there is no key."""
    feature = FROM + tl.arange(0, WIDTH)
    inside = (feature < END)[:, None] & is_key[None, :]
    both = tl.load(cache + base[None, :] + feature[:, None] * (BLOCK // 2) + place[None, :], mask=inside, other=0)
    scales = halves + HEAD_DIM * BLOCK // 4 + (base // 2)[None, :] + feature[:, None]
    return both, tl.load(scales, mask=inside, other=0.0), tl.load(scales + HEAD_DIM, mask=inside, other=0.0)


@triton.jit
def int4_values(cache, halves, base, offset, is_key, WIDTH: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr):
    """The values at `offset` `[KEYS]` of their blocks, a feature of each half in a byte: bytes `[KEYS, WIDTH]`, zeros
    beyond a half, and scales and offsets `[KEYS, 1]`; zeros where there is no key."""
    START: tl.constexpr = HEAD_DIM * BLOCK // 2 + 4 * HEAD_DIM
    column = tl.arange(0, WIDTH)
    at = START + base[:, None] + (offset * (HEAD_DIM // 2))[:, None] + column[None, :]
    both = tl.load(cache + at, mask=is_key[:, None] & (column < HEAD_DIM // 2)[None, :], other=0)
    scales = halves + (START + HEAD_DIM * BLOCK // 2) // 2 + base // 2 + offset
    scale, least = tl.load(scales, mask=is_key, other=0.0), tl.load(scales + BLOCK, mask=is_key, other=0.0)
    return both, scale[:, None], least[:, None]


@triton.jit
def int4_numbers(numbers, HIGH: tl.constexpr):
    """Float32 of the low or the high bits of bytes with scales and offsets."""
    codes = numbers[0] >> 4 if HIGH else numbers[0] & 15
    return codes.to(tl.float32) * numbers[1].to(tl.float32) + numbers[2].to(tl.float32)


@triton.jit
def _pack(first, second, inside):
    """Quantize the rows of two tiles `[rows, numbers]` together: bytes, float16 scales and offsets of rows."""
    first, second = (
        tl.clamp(first.to(tl.float32), -65504.0, 65504.0),
        tl.clamp(second.to(tl.float32), -65504.0, 65504.0),
    )
    low = tl.min(tl.where(inside, tl.minimum(first, second), float("inf")), axis=1)
    high = tl.max(tl.where(inside, tl.maximum(first, second), float("-inf")), axis=1)
    scale, offset = tl.div_rn(high - low, 15.0).to(tl.float16), low.to(tl.float16)
    step = tl.where(scale > 0.0, scale.to(tl.float32), 1.0)[:, None]
    least = offset.to(tl.float32)[:, None]
    first, second = tl.div_rn(first - least, step), tl.div_rn(second - least, step)
    # Adding and subtracting rounds to an integer, ties to even.
    first = tl.clamp(first + 12582912.0 - 12582912.0, 0.0, 15.0)
    second = tl.clamp(second + 12582912.0 - 12582912.0, 0.0, 15.0)
    return (first + second * 16.0).to(tl.int32).to(tl.uint8), scale, offset


@triton.jit(do_not_specialize=["recent_slots", "slots"])
def _quantize_kernel(
    recent,
    cache,
    halves,
    recent_slots,
    slots,
    recent_side,
    recent_block,
    recent_head,
    recent_row,
    cache_block,
    cache_head,
    HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    FEATURES: tl.constexpr,
    HALF_FEATURES: tl.constexpr,
    TOKENS: tl.constexpr,
    HALF_TOKENS: tl.constexpr,
):
    """Store one head of the block that a token completes, if it does."""
    slot, head = tl.load(slots + tl.program_id(0)), tl.program_id(1).to(tl.int64)
    if (slot >= 0) & (slot % BLOCK == BLOCK - 1):
        base = slot // BLOCK * cache_block + head * cache_head
        rows = recent + tl.load(recent_slots + tl.program_id(0)) // BLOCK * recent_block + head * recent_head

        feature, token = tl.arange(0, FEATURES), tl.arange(0, HALF_TOKENS)
        inside = (feature < HEAD_DIM)[:, None] & (token < BLOCK // 2)[None, :]
        at = rows + token[None, :] * recent_row + feature[:, None]
        first, second = (
            tl.load(at, mask=inside, other=0.0),
            tl.load(at + BLOCK // 2 * recent_row, mask=inside, other=0.0),
        )
        packed, scale, offset = _pack(first, second, inside)
        tl.store(cache + base + feature[:, None] * (BLOCK // 2) + token[None, :], packed, mask=inside)
        scales = halves + base // 2 + HEAD_DIM * BLOCK // 4 + feature
        tl.store(scales, scale, mask=feature < HEAD_DIM)
        tl.store(scales + HEAD_DIM, offset, mask=feature < HEAD_DIM)

        base += HEAD_DIM * BLOCK // 2 + 4 * HEAD_DIM
        token, feature = tl.arange(0, TOKENS), tl.arange(0, HALF_FEATURES)
        inside = (token < BLOCK)[:, None] & (feature < HEAD_DIM // 2)[None, :]
        at = rows + recent_side + token[:, None] * recent_row + feature[None, :]
        first, second = tl.load(at, mask=inside, other=0.0), tl.load(at + HEAD_DIM // 2, mask=inside, other=0.0)
        packed, scale, offset = _pack(first, second, inside)
        tl.store(cache + base + token[:, None] * (HEAD_DIM // 2) + feature[None, :], packed, mask=inside)
        scales = halves + base // 2 + HEAD_DIM * BLOCK // 4 + token
        tl.store(scales, scale, mask=token < BLOCK)
        tl.store(scales + BLOCK, offset, mask=token < BLOCK)


def quantize_kv(recent: Tensor, cache: Tensor, recent_slots: Tensor, slots: Tensor) -> None:
    """See `quire.kernels.int4_kv`."""
    _, _, kv_heads, block_size, head_dim = recent.shape
    if not len(slots):
        return
    _quantize_kernel[len(slots), kv_heads](
        *(recent, cache, as_halves(cache), recent_slots, slots, *recent.stride()[:4], *cache.stride()[1:3]),
        HEAD_DIM=head_dim,
        BLOCK=block_size,
        FEATURES=triton.next_power_of_2(head_dim),
        HALF_FEATURES=triton.next_power_of_2(head_dim // 2),
        TOKENS=triton.next_power_of_2(block_size),
        HALF_TOKENS=triton.next_power_of_2(block_size // 2),
    )


def as_halves(cache: Tensor) -> Tensor:
    """The memory of a layer's cache as float16 `[blocks, kv_heads, …]`."""
    return cache[0].flatten(-2).view(torch.float16)
