"""Low-rank changes by adapters."""

from __future__ import annotations

from itertools import pairwise

import torch.nn.functional as F
from torch import Tensor

from quire.kernels.low_rank import AdapterRows, LowRankPool


def add_low_rank(out: Tensor, x: Tensor, pool: LowRankPool, rows: AdapterRows) -> None:
    """Add the changes by each row's adapter to the product of a linear layer, in place, with float32 sums:
    `out = scale * (out + x A^T B^T) + bias`, for the parts of `pool`. Of bfloat16, the sums `x A^T` may be rounded to
    bfloat16 before B multiplies them (with AVX-512 BF16, and in Triton); of float16 they are not: they may exceed it.

    `x` is `[rows, in]` and `out` `[rows, out]`, of the type of `x` or float32. Rows without an adapter do not change.
    If `out` has a multiple of the rows of `x`, as many of its rows, one after another, have the same inputs; `rows` are
    those of `out`.
    """
    x = x if len(x) == len(out) else x.repeat_interleave(len(out) // len(x), dim=0)
    *starts, all_end = rows.starts.tolist()
    if all_end != len(x):
        raise RuntimeError(f"row {int(rows.order[all_end])} has a slot that does not exist")
    slots = pool.slots.tolist()
    for slot, (begin, end) in enumerate(pairwise(starts)):
        if begin == end:
            continue
        own = rows.order[begin:end]
        changed, inputs = out[own].float(), x[own].float()
        for part, (first, rank) in zip(changed.split_with_sizes(pool.widths, dim=1), slots[slot], strict=True):
            if rank:  # otherwise even zeros keep their signs
                a, b = (each[first : first + rank].float() for each in (pool.a, pool.b))
                part.add_(F.linear(inputs, a) @ b[:, : part.shape[1]])
        if (vector := int(pool.vectors[slot])) >= 0:
            changed = changed if pool.scale is None else changed * pool.scale[vector]
            changed = changed if pool.bias is None else changed + pool.bias[vector]
        out[own] = changed.to(out.dtype)
