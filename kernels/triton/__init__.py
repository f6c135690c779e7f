"""Triton kernels for GPUs, with the names and meaning of the operations in `quire.kernels.reference`,
`quire.kernels.coded_words` and `quire.kernels.fp4`.

Triton specializes a kernel, and recompiles it for a second or more, when an integer becomes 1 or a multiple of 16 or an
address a multiple of 16. Arguments that change like this from step to step, such as the number of requests and the
starts of their rows, are listed in `do_not_specialize`, so that no step waits for the compiler.
"""

from __future__ import annotations

import os
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from quire.kernels import reference
from quire.kernels.cache import FP8_CAPABILITY, LARGEST, SCALE_BYTES
from quire.kernels.triton import attention as _attention
from quire.kernels.triton import elementwise as _elementwise
from quire.kernels.triton import selection as _selection
from quire.kernels.triton.attention import int4_attention
from quire.kernels.triton.coded import coded_fused_experts, coded_matmul
from quire.kernels.triton.compression import compress_tokens
from quire.kernels.triton.elementwise import (
    act_mul,
    act_mul_rounded,
    add_rms_norm,
    add_rms_norm_rounded,
    rms_norm,
    rms_norm_rounded,
)
from quire.kernels.triton.experts import fused_experts
from quire.kernels.triton.fp4 import fp4_fused_experts, fp4_matmul, round_fp4
from quire.kernels.triton.hyper_connections import mhc_post, mhc_pre
from quire.kernels.triton.int4_kv import quantize_kv
from quire.kernels.triton.logits import penalize, score_tokens
from quire.kernels.triton.low_rank import add_low_rank
from quire.kernels.triton.recurrent import causal_conv, linear_attention, selective_scan, wkv
from quire.kernels.triton.rounded import round_rows, rounded_fused_experts, rounded_matmul
from quire.kernels.triton.routing import route
from quire.kernels.triton.sampling import sample

__all__ = [
    "act_mul",
    "act_mul_rounded",
    "add_low_rank",
    "add_rms_norm",
    "add_rms_norm_rounded",
    "causal_conv",
    "coded_fused_experts",
    "coded_matmul",
    "compress_tokens",
    "fp4_fused_experts",
    "fp4_matmul",
    "fused_experts",
    "int4_attention",
    "linear_attention",
    "mhc_post",
    "mhc_pre",
    "paged_attention",
    "penalize",
    "quantize_kv",
    "rms_norm",
    "rms_norm_rounded",
    "rotary_write_kv",
    "round_fp4",
    "round_rows",
    "rounded_fused_experts",
    "rounded_matmul",
    "route",
    "sample",
    "score_tokens",
    "select_blocks",
    "select_tokens",
    "selective_scan",
    "sparse_attention",
    "wkv",
]

# Fuse multiply and add, which was Triton's default before 3.10; 3.9 warns if this is not set.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")


def rotary_write_kv(
    query: Tensor, key: Tensor, value: Tensor | None, cos_sin: Tensor, cache: Tensor, slots: Tensor
) -> Tensor:
    return _of(cache, _elementwise, reads=False).rotary_write_kv(query, key, value, cos_sin, cache, slots)


def paged_attention(query: Tensor, cache: Tensor, *batch: Any, **options: Any) -> Tensor:
    return _of(cache, _attention).paged_attention(query, cache, *batch, **options)


def sparse_attention(query: Tensor, cache: Tensor, *batch: Any, **options: Any) -> Tensor:
    return _of(cache, _attention).sparse_attention(query, cache, *batch, **options)


def select_blocks(query: Tensor, cache: Tensor, *batch: Any, **options: Any) -> Tensor:
    return _of(cache, _selection).select_blocks(query, cache, *batch, **options)


def select_tokens(query: Tensor, weights: Tensor, cache: Tensor, *batch: Any, **options: Any) -> Tensor:
    return _of(cache, _selection).select_tokens(query, weights, cache, *batch, **options)


def _of(cache: Tensor, module: ModuleType, reads: bool = True) -> Any:
    """The module to use for a cache: the reference if the GPU cannot read it.

    Scales are read in place as float32, so they must be aligned; 8-bit floats need compute capability 8.9.
    """
    if cache.dtype in LARGEST and cache.shape[-1] % SCALE_BYTES:
        return reference
    is_fp8 = reads and cache.is_cuda and cache.dtype == torch.float8_e4m3fn
    return reference if is_fp8 and torch.cuda.get_device_capability(cache.device) < FP8_CAPABILITY else module
