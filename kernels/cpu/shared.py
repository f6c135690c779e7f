"""Collectives of ranks that have mapped one segment of memory; compiled only, and only on Linux.

`memory` `[bytes]` (uint8) starts as zeros. Every rank makes the same calls in the same order, with tensors of the same
shape and type. A rank that waits for longer than `timeout` seconds raises RuntimeError, and the segment is of no more
use. The interpreter is free for other threads meanwhile.
"""

from __future__ import annotations

import torch
from torch import Tensor

SUMMED = (torch.float32, torch.bfloat16, torch.float16)
"""The types that `all_reduce` takes; the others take any."""

_HEADER_BYTES = 256
_SLOT_BYTES = 1 << 18


def available() -> bool:
    """Whether this process has loaded the compiled library, and its host can."""
    return hasattr(torch.ops.quire, "shared_all_reduce")


def segment_bytes(size: int, slot_bytes: int = _SLOT_BYTES) -> int:
    """The memory that `size` ranks need for chunks of up to `slot_bytes`; longer tensors take several."""
    return size * (_HEADER_BYTES + 2 * slot_bytes)


def all_reduce(memory: Tensor, rank: int, size: int, timeout: float, x: Tensor) -> None:
    """Put the sum of every rank's contiguous `x` there: in float32 and in the order of ranks, the same bits on all."""
    torch.ops.quire.shared_all_reduce(memory, rank, size, timeout, x)


def all_gather(memory: Tensor, rank: int, size: int, timeout: float, x: Tensor) -> Tensor:
    """Every rank's contiguous `x`, joined along the last dimension in the order of ranks."""
    out: Tensor = torch.ops.quire.shared_all_gather(memory, rank, size, timeout, x)
    return out


def broadcast(memory: Tensor, rank: int, size: int, timeout: float, x: Tensor) -> None:
    """Put rank 0's contiguous `x` there."""
    torch.ops.quire.shared_broadcast(memory, rank, size, timeout, x)
