"""Triton kernels for GPUs, named and meant as those of `quire.kernels.reference`; what is not here stays there."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels import reference
from quire.kernels.triton import attention as _attention
from quire.kernels.triton import elementwise as _elementwise
from quire.kernels.triton.elementwise import act_mul, add_rms_norm, rms_norm
from quire.kernels.triton.experts import fused_experts
from quire.kernels.triton.sampling import sample

__all__ = ["act_mul", "add_rms_norm", "fused_experts", "paged_attention", "rms_norm", "rotary_write_kv", "sample"]


def rotary_write_kv(
    query: Tensor, key: Tensor, value: Tensor | None, rotations: Tensor, cache: Tensor, slots: Tensor
) -> Tensor:
    """An int8 cache is the reference's."""
    platform = reference if cache.dtype == torch.int8 else _elementwise
    return platform.rotary_write_kv(query, key, value, rotations, cache, slots)


def paged_attention(
    query: Tensor,
    cache: Tensor,
    block_tables: Tensor,
    sequence_lengths: Tensor,
    query_starts: Tensor,
    scale: float,
    *,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    slopes: Tensor | None = None,
) -> Tensor:
    """An int8 cache is the reference's."""
    platform = reference if cache.dtype == torch.int8 else _attention
    return platform.paged_attention(
        *(query, cache, block_tables, sequence_lengths, query_starts, scale),
        window=window,
        softcap=softcap,
        sinks=sinks,
        slopes=slopes,
    )
