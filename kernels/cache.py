"""The memory behind the paged KV cache.

A *row* holds one token's keys or values of one head: head_dim numbers of the cache's type. In a quantized cache (int8,
or 8-bit floats: e4m3, Micikevicius et al. 2022) every row has a float32 scale, and a value is the stored number times
the scale; the row's largest magnitude maps to the type's largest number (127 or 448). The scales of a block's head
follow all of its numbers, so that the rows of numbers and the scales are each aligned for vector loads.

A cache of 4-bit numbers has bytes, and other blocks: see `quire.kernels.int4_kv`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
"""Type of a quantized cache → the number that the largest magnitude of a row maps to."""
INT4 = torch.uint8
"""Type of a cache of 4-bit numbers."""
SCALE_BYTES = 4
FP8_CAPABILITY = (8, 9)
"""The lowest compute capability of NVIDIA GPUs with instructions for 8-bit floats."""


def kv_cache_dtype(name: str) -> torch.dtype:
    """The element type of a cache by name: a torch float type, int8, fp8 or int4."""
    dtype: torch.dtype = {"fp8": torch.float8_e4m3fn, "int4": INT4}.get(name) or getattr(torch, name)
    return dtype


def row_size(head_dim: int, dtype: torch.dtype) -> int:
    """Elements of a row of the cache, including its scale."""
    return head_dim + SCALE_BYTES if dtype in LARGEST else head_dim


def int4_row_size(head_dim: int, block_size: int) -> int:
    """Bytes of a token's keys and values of one head in a cache of 4-bit numbers, with its share of the scales and
    offsets of its block. Both numbers are even, and block_size divides 4 * head_dim."""
    assert head_dim % 2 == block_size % 2 == 4 * head_dim % block_size == 0
    return head_dim + 4 * head_dim // block_size + 4


class QuantizedRows(NamedTuple):
    """Views of a quantized cache `[…, block_size, row]`, both of the cache's type."""

    values: Tensor
    """`[…, block_size, head_dim]`"""
    scales: Tensor
    """`[…, block_size, 4]`: each row's float32 scale as bytes, in the host's byte order."""

    @classmethod
    def of(cls, cache: Tensor) -> QuantizedRows:
        block_size, row = cache.shape[-2:]
        memory, head_dim = cache.flatten(-2), row - SCALE_BYTES
        values, scales = memory.split_with_sizes((block_size * head_dim, block_size * SCALE_BYTES), dim=-1)
        return cls(
            torch.unflatten(values, -1, (block_size, head_dim)), torch.unflatten(scales, -1, (block_size, SCALE_BYTES))
        )


def quantize(rows: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Quantize `[…, head_dim]` to numbers of `dtype`, and scales `[…, 4]`: float32 viewed as `dtype`."""
    x, largest = rows.float(), LARGEST[dtype]
    scale = x.abs().amax(dim=-1, keepdim=True) / largest
    values = (x / scale.where(scale > 0, 1.0)).clamp(-largest, largest)
    if dtype == torch.int8:
        values = values.round()
    return values.to(dtype), scale.contiguous().view(dtype)


def dequantize(cache: Tensor) -> Tensor:
    """Dequantize a cache `[…, block_size, row]` to float32 `[…, block_size, head_dim]`."""
    values, scales = QuantizedRows.of(cache)
    return values.float() * scales.clone(memory_format=torch.contiguous_format).view(torch.float32)  # aligned


def allocate_kv_cache(
    layers: int,
    num_blocks: int,
    kv_heads: int,
    block_size: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
    num_tensors: int = 2,
) -> Tensor:
    """Allocate the KV cache of a rank, `[layers, num_tensors, blocks, kv_heads, block_size, row]`, filled with zeros.

    There are two tensors, keys and values, or a single one if these are the same. In memory the tensors of a block
    follow each other, so that consecutive blocks of a layer can hold something else (`recurrent_states`). The cache
    must not contain NaN, because attention reads whole blocks and multiplies masked values by 0. On CPU the pages are
    the operating system's zero pages: memory is committed when a block is first written.

    In a cache of 4-bit numbers, a single tensor has keys and values: `[layers, 1, blocks, kv_heads, block_size, row]`.
    """
    row = row_size(head_dim, dtype)
    if dtype == INT4:
        num_tensors, row = 1, int4_row_size(head_dim, block_size)
    shape = (layers, num_blocks, num_tensors, kv_heads, block_size, row)
    if device.type != "cpu":
        memory = torch.zeros(shape, dtype=torch.uint8 if dtype in LARGEST else dtype, device=device).view(dtype)
    else:
        pages = np.zeros(int(np.prod(shape)) * dtype.itemsize, dtype=np.uint8)
        memory = torch.from_numpy(pages).view(dtype).view(shape)
    return memory.transpose(1, 2)


def heads_as_blocks(cache: Tensor) -> tuple[Tensor, int]:
    """View a layer's cache `[num_tensors, blocks, kv_heads, …]` as one whose blocks have one KV head: head h of block b
    is block `b * step + h`. Returns the view and `step`."""
    tensors, blocks, heads, *row = cache.shape
    of_tensor, of_block, of_head, *strides = cache.stride()
    step = of_block // of_head
    assert step * of_head == of_block
    shape, stride = (tensors, (blocks - 1) * step + heads, 1, *row), (of_tensor, of_head, of_head, *strides)
    return cache.as_strided(shape, stride), step


class RecurrentState(NamedTuple):
    """The recurrent states of a layer: a page holds a request's state after some token."""

    matrices: Tensor
    """Float32 `[pages, heads, key_head_dim, value_head_dim]`."""
    inputs: Tensor
    """The last inputs of the causal convolution, `[pages, conv_size - 1, channels]`."""
    others: tuple[Tensor, ...] = ()
    """The last inputs of other convolutions in the layer."""


def recurrent_states(
    cache: Tensor,
    blocks_per_page: int,
    matrices: tuple[int, int, int],
    inputs: tuple[int, int],
    dtype: torch.dtype,
    others: Sequence[tuple[int, int]] = (),
) -> RecurrentState:
    """View the memory of a layer's `cache` `[num_tensors, blocks, …]` as pages of states.

    `matrices` are the heads and the sizes of each one's matrix. `inputs`, of type `dtype`, are the tokens and channels
    of the causal convolution, and `others` the tokens and channels of other convolutions.
    """
    memory = cache.transpose(0, 1).view(torch.uint8).flatten(1)
    pages = len(memory) // blocks_per_page
    rows = memory[: pages * blocks_per_page].view(pages, -1)
    end, found = 4 * math.prod(matrices), []
    kept = torch.unflatten(rows[:, :end].view(torch.float32), 1, matrices)
    for shape in (inputs, *others):
        start, end = end, end + math.prod(shape) * dtype.itemsize
        found.append(torch.unflatten(rows[:, start:end].view(dtype), 1, shape))
    return RecurrentState(kept, found[0], tuple(found[1:]))


def page_rows(cache: Tensor, blocks_per_page: int, first: int, count: int, width: int) -> Tensor:
    """View a part of each page of a layer's `cache` `[1, blocks, …]` as a cache of `count` rows of `width` elements,
    which begin with the page's element `first`: `[1, blocks, 1, count, width]`. A page has the number of its first
    block. Other blocks must not be used: their rows overlap."""
    _, blocks, *block = cache.shape
    size = math.prod(block)
    assert cache[0].is_contiguous()
    assert first + count * width <= blocks_per_page * size
    shape, strides = (1, max(0, blocks - blocks_per_page + 1), 1, count, width), (size, size, size, width, 1)
    return cache.as_strided(shape, strides, cache.storage_offset() + first)


class StateSegments(NamedTuple):
    """A step as layers with recurrent states see it: rows of one or several segments, at whose ends the state is
    stored. No row writes a page that another row reads, because rows run at the same time. All tensors are int64."""

    starts: Tensor
    """`[segments + 1]`, the first token of each segment."""
    rows: Tensor
    """`[rows + 1]`, the first segment of each row; the segments of a row follow each other."""
    read: Tensor
    """`[segments]`, the page with the state before each segment; -1: there is none, and the state is zero."""
    write: Tensor
    """`[segments]`, the page for the state after each segment; -1: it is not stored."""
