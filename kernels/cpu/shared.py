"""Collectives over shared memory, for ranks that map the same segment. Needs the compiled library, and Linux.

`memory` `[bytes]` (uint8) starts as zeros. Every rank must make the same calls in the same order, with tensors of the
same shape and type. A rank that waits for longer than `timeout` seconds raises RuntimeError, and the segment must not
be used again. The GIL is released meanwhile.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

SUMMED = (torch.float32, torch.bfloat16, torch.float16)
"""The types that `all_reduce` supports; the other collectives support any."""

_LINE_BYTES = 128
_SLOT_BYTES = 1 << 18


class Header(ctypes.Structure):
    """A rank's part of the segment's beginning, as in all_reduce.cpp."""

    published: int
    """Progress within a step, modulo 2^32. A rank that waits has published more than the ranks for which it waits."""
    has_met: int
    """Whether this rank has met the others in the present step. Until then its waiting does not count."""
    waited: int
    """Nanoseconds for which this rank has waited for others, except in broadcasts."""
    spent: int
    """Nanoseconds for which this rank has been in collectives."""

    _fields_ = (
        ("published", ctypes.c_uint32),
        ("_others", ctypes.c_uint8 * (_LINE_BYTES - 4)),
        ("_safe", ctypes.c_uint32),
        ("_buffer", ctypes.c_uint32),
        ("has_met", ctypes.c_uint32),
        ("waited", ctypes.c_int64),
        ("spent", ctypes.c_int64),
        ("_unused", ctypes.c_uint8 * (_LINE_BYTES - 32)),
    )


def available() -> bool:
    """Whether this process has loaded the compiled library, and the host supports the collectives."""
    return hasattr(torch.ops.quire, "shared_all_reduce")


def segment_bytes(size: int, slot_bytes: int = _SLOT_BYTES) -> int:
    """The bytes that `size` ranks need for chunks of up to `slot_bytes`; longer tensors take several chunks."""
    return size * (ctypes.sizeof(Header) + 2 * slot_bytes)


def headers(memory: Tensor, size: int) -> list[Header]:
    """The headers of all ranks."""
    return list((Header * size).from_buffer(memory.numpy().data))


def all_reduce(memory: Tensor, rank: int, size: int, timeout: float, x: Tensor) -> None:
    """Replace contiguous `x` with its sum over ranks, in float32 and in rank order: the same bits on every rank."""
    torch.ops.quire.shared_all_reduce(memory, rank, size, timeout, x)


def all_gather(memory: Tensor, rank: int, size: int, timeout: float, x: Tensor) -> Tensor:
    """Concatenate every rank's contiguous `x` along the last dimension, in rank order."""
    out: Tensor = torch.ops.quire.shared_all_gather(memory, rank, size, timeout, x)
    return out


def broadcast(memory: Tensor, rank: int, size: int, timeout: float, x: Tensor) -> None:
    """Replace contiguous `x` with rank 0's `x`."""
    torch.ops.quire.shared_broadcast(memory, rank, size, timeout, x)
