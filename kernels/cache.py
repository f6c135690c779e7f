"""The memory behind the paged KV cache."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def allocate_kv_cache(
    layers: int,
    num_blocks: int,
    kv_heads: int,
    block_size: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """The KV cache of a rank, `[layers, 2 (keys, values), blocks, kv_heads, block_size, head_dim]`, all zeros.

    Zeros, because attention reads whole blocks and weighs what is masked by 0, which must not meet a NaN. On CPU the
    pages are the kernel's own zero pages: memory is taken when a block is first written.
    """
    shape = (layers, 2, num_blocks, kv_heads, block_size, head_dim)
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    pages = np.zeros(int(np.prod(shape)) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(pages).view(dtype).view(shape)
