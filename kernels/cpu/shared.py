"""Collectives over shared memory, for ranks that map the same segment. Needs the compiled library, and Linux.

`memory` `[bytes]` (uint8) starts as zeros. Every rank must make the same calls in the same order, with tensors of the
same shape and type. A rank that waits for longer than `timeout` seconds raises RuntimeError, and the segment must not
be used again. The GIL is released meanwhile.
"""

from __future__ import annotations

import torch
from torch import Tensor

SUMMED = (torch.float32, torch.bfloat16, torch.float16)
"""The types that `all_reduce` supports; the other collectives support any."""

_HEADER_BYTES = 256
_SLOT_BYTES = 1 << 18


def available() -> bool:
    """Whether this process has loaded the compiled library, and the host supports the collectives."""
    return hasattr(torch.ops.quire, "shared_all_reduce")


def segment_bytes(size: int, slot_bytes: int = _SLOT_BYTES) -> int:
    """The bytes that `size` ranks need for chunks of up to `slot_bytes`; longer tensors take several chunks."""
    return size * (_HEADER_BYTES + 2 * slot_bytes)


def all_reduce(memory: Tensor, rank: int, size: int, timeout: float, x: Tensor) -> None:
    """Replace contiguous `x` with its sum over ranks, in float32 and in rank order: the same bits on every rank."""
    torch.ops.quire.shared_all_reduce(memory, rank, size, timeout, x)


def all_gather(memory: Tensor, rank: int, size: int, timeout: float, x: Tensor) -> Tensor:
    """Concatenate every rank's contiguous `x` along the last dimension, in rank order."""
    out: Tensor = torch.ops.quire.shared_all_gather(memory, rank, size, timeout, x)
    return out


def broadcast(memory: Tensor, rank: int, size: int, timeout: float, x: Tensor) -> None:
    """Replace contiguous `x` with that of rank 0."""
    torch.ops.quire.shared_broadcast(memory, rank, size, timeout, x)
