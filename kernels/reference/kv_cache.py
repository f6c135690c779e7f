"""Writes to a paged KV cache of any type, and reads from it."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels.cache import LARGEST, QuantizedRows, dequantize, quantize
from quire.kernels.reference.elementwise import rotary


def rotary_write_kv(
    query: Tensor, key: Tensor, value: Tensor | None, cos_sin: Tensor, cache: Tensor, slots: Tensor
) -> Tensor:
    """Rotate queries and keys as `rotary` does, store keys and values as `write_kv` does, and return the queries.

    A token whose slot is -1 is not stored. Keys may be wider than queries: features after the rotated ones are stored
    unchanged.
    """
    query, key = rotary(query, key, cos_sin)
    write_kv(key, value, cache, slots)
    return query


def write_kv(key: Tensor, value: Tensor | None, cache: Tensor, slots: Tensor) -> None:
    """Store keys and values `[tokens, kv_heads, head_dim]` in one layer's `cache`, in place.

    `cache` is `[2, blocks, kv_heads, block_size, row]` (see `quire.kernels.cache`), or has one side if keys and values
    are the same (`value` is None). `slots` `[tokens]` is block * block_size + offset, or -1 for a token that is not
    stored.
    """
    if not len(slots):
        return
    block_size, is_stored = cache.shape[3], slots >= 0
    # The host does not read which tokens are stored, which would wait for the device. A token that is not stored
    # repeats the write of the first stored one or, if there is none, rewrites what the cache holds.
    source = torch.where(is_stored, torch.arange(len(slots), device=slots.device), is_stored.int().argmax())
    slots = slots[source]
    blocks, offsets, is_new = slots.clamp(min=0) // block_size, slots.clamp(min=0) % block_size, slots >= 0
    for side, rows in zip(cache, (key,) if value is None else (key, value), strict=True):
        if cache.dtype in LARGEST:  # as bytes: torch cannot index 8-bit floats
            targets = [each.view(torch.uint8) for each in QuantizedRows.of(side)]
            sources = [each.view(torch.uint8) for each in quantize(rows, cache.dtype)]
        else:
            targets, sources = [side], [rows.to(cache.dtype)]
        for old, new in zip(targets, sources, strict=True):
            old[blocks, :, offsets] = new[source].where(is_new[:, None, None], old[blocks, :, offsets])


def read_kv(side: Tensor, table: Tensor, length: int, dtype: torch.dtype) -> Tensor:
    """Read the first `length` rows of the blocks in `table`; returns `[length, kv_heads, head_dim]` of `dtype`.

    `side` is the keys or the values of one layer's cache, `[blocks, kv_heads, block_size, row]`.
    """
    blocks = _select_blocks(side, table[: -(-length // side.shape[2])])
    rows = (dequantize(blocks) if side.dtype in LARGEST else blocks).transpose(1, 2)
    return rows.flatten(0, 1)[:length].to(dtype)


def gather_kv(cache: Tensor, tables: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values of `tables` `[requests, blocks]`, each float32 `[requests, kv_heads, tokens, head_dim]`."""
    kv_heads = cache.shape[2]
    heads = torch.arange(kv_heads, device=cache.device)
    runs = (tables[:, None] * kv_heads + heads[:, None]).flatten()  # each is one head of one block
    keys, values = (
        _to_float(_select_blocks(side.flatten(0, 1), runs)) for side in cache
    )  # [runs, block_size, head_dim]
    shape = (len(tables), kv_heads, -1, keys.shape[-1])
    return keys.view(shape), values.view(shape)


def read_slots(side: Tensor, slots: Tensor) -> Tensor:
    """The rows in `slots` `[queries, count]`, float32 `[queries, kv_heads, count, head_dim]`."""
    blocks, offsets = slots // side.shape[2], slots % side.shape[2]
    if side.dtype not in LARGEST:
        return side[blocks, :, offsets].float().transpose(1, 2)
    values, scales = (each.view(torch.uint8)[blocks, :, offsets].view(side.dtype) for each in QuantizedRows.of(side))
    return (values.float() * scales.contiguous().view(torch.float32)).transpose(1, 2)


def _select_blocks(blocks: Tensor, numbers: Tensor) -> Tensor:
    """`blocks[numbers]` for any type of cache."""
    if blocks.dtype in LARGEST:
        return blocks.view(torch.uint8).index_select(0, numbers).view(blocks.dtype)
    return blocks.index_select(0, numbers)


def _to_float(cache: Tensor) -> Tensor:
    """Convert a cache of any type `[…, block_size, row]` to float32 `[…, block_size, head_dim]`."""
    return dequantize(cache) if cache.dtype in LARGEST else cache.float()
