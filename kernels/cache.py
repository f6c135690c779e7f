"""The memory behind the paged KV cache.

A *row* holds one token's keys or values of one head: head_dim numbers of the cache's type. A row of an int8 cache is
head_dim integers and, in the four bytes behind them, a float32 scale (in the host's byte order, unaligned): a number is
its integer times the scale, which is the row's largest absolute number over 127.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def row_size(head_dim: int, dtype: torch.dtype) -> int:
    """Elements of a row of the cache."""
    return head_dim + 4 if dtype == torch.int8 else head_dim


def allocate_kv_cache(
    layers: int,
    num_blocks: int,
    kv_heads: int,
    block_size: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
    sides: int = 2,
) -> Tensor:
    """The KV cache of a rank, `[layers, sides, blocks, kv_heads, block_size, row]`, all zeros.

    The sides are keys and values; one side serves where these are the same.
    Zeros, because attention reads whole blocks and weighs what is masked by 0, which must not meet a NaN. On CPU the
    pages are the kernel's own zero pages: memory is taken when a block is first written.
    """
    shape = (layers, sides, num_blocks, kv_heads, block_size, row_size(head_dim, dtype))
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    pages = np.zeros(int(np.prod(shape)) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(pages).view(dtype).view(shape)
