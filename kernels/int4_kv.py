"""A KV cache of 4-bit numbers, after KIVI (Liu et al. 2024): the format of its blocks, and its operations in torch.

Keys have large features that stay large from token to token, so each feature of a block's keys has a scale and an
offset of its own. Values have none, and each token has a scale and an offset. A key's codes are known when its block
is complete; until then the block's keys and values are in `recent`, a paged cache of another type, in which each
request has a few blocks.

**The rule.** A query sees the tokens of its own block, up to its own, as they are in `recent`, and all tokens of the
blocks before it as 4-bit numbers. What it sees depends on its position alone: not on chunks, drafts, the prefix cache
or other requests.

The bytes of one head of a block, `block_size * int4_row_size(head_dim, block_size)`, have its keys and then its values:

| part | type | shape | |
|---|---|---|---|
| codes of keys | uint8 | `[head_dim, block_size / 2]` | low bits of byte i: token i; high: i + block_size / 2 |
| scales, offsets | float16 | `[head_dim]` each | of each feature |
| codes of values | uint8 | `[block_size, head_dim / 2]` | of feature i, and i + head_dim / 2 |
| scales, offsets | float16 | `[block_size]` each | of each token |

A number is `code * scale + offset`, in float32.
"""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quire.kernels import reference

_LARGEST_OFFSET = 65504.0
"""Of float16."""
_PIECE = 256
"""Tokens whose blocks are quantized at once."""


class Int4Blocks(NamedTuple):
    """Views of the blocks of a cache."""

    key_codes: Tensor
    """uint8 `[blocks, kv_heads, head_dim, block_size / 2]`"""
    key_scales: Tensor
    """float16 `[blocks, kv_heads, 2, head_dim]`: scales, then offsets."""
    value_codes: Tensor
    """uint8 `[blocks, kv_heads, block_size, head_dim / 2]`"""
    value_scales: Tensor
    """float16 `[blocks, kv_heads, 2, block_size]`: scales, then offsets."""

    @classmethod
    def of(cls, cache: Tensor) -> Int4Blocks:
        """Of a layer's cache, uint8 `[1, blocks, kv_heads, block_size, row]`."""
        block_size, row = cache.shape[-2:]
        size = (row - 4) * block_size // (block_size + 4)
        half = size * block_size // 2
        bounds = accumulate((half, 4 * size, half, 4 * block_size), initial=0)
        keys, of_keys, values, of_values = (cache[0].flatten(-2)[..., a:b] for a, b in pairwise(bounds))
        return cls(
            torch.unflatten(keys, -1, (size, block_size // 2)),
            torch.unflatten(of_keys.view(torch.float16), -1, (2, size)),
            torch.unflatten(values, -1, (block_size, size // 2)),
            torch.unflatten(of_values.view(torch.float16), -1, (2, block_size)),
        )

    def dequantize(self) -> Tensor:
        """Keys and values, float32 `[2, blocks, kv_heads, block_size, head_dim]`."""
        keys = _numbers(self.key_codes, self.key_scales).transpose(-1, -2)
        return torch.stack((keys, _numbers(self.value_codes, self.value_scales)))


def _numbers(codes: Tensor, scales: Tensor) -> Tensor:
    """`[…, rows, numbers]` of `codes` `[…, rows, numbers / 2]` and `scales` `[…, 2, rows]`."""
    both = torch.cat((codes & 15, codes >> 4), dim=-1).float()
    scale, offset = scales.float()[..., None].unbind(-3)
    return both * scale + offset


def _quantize(rows: Tensor) -> tuple[Tensor, Tensor]:
    """The inverse of `_numbers`, of float32 `[…, rows, numbers]`."""
    rows = rows.clamp(-_LARGEST_OFFSET, _LARGEST_OFFSET)
    low, high = rows.aminmax(dim=-1)
    scales = torch.stack(((high - low) / 15, low), dim=-2).half()
    scale, offset = scales.float()[..., None].unbind(-3)
    codes = ((rows - offset) / scale.where(scale > 0, 1.0)).round().clamp(0, 15).byte()
    first, second = codes.chunk(2, dim=-1)
    return first | second << 4, scales


def quantize_kv(recent: Tensor, cache: Tensor, recent_slots: Tensor, slots: Tensor) -> None:
    """Store the blocks that are complete with these tokens in a layer's `cache`, in place.

    `slots` `[tokens]` is block * block_size + offset in `cache` `[1, blocks, kv_heads, block_size, row]`, and
    `recent_slots` the same in `recent` `[2, blocks, kv_heads, block_size, head_dim]`, which has the tokens of the block
    already. A block is complete with the token at its end. Tokens with negative slots are not stored.
    """
    block_size, targets = cache.shape[3], Int4Blocks.of(cache)
    for own, to in zip(torch.split(recent_slots, _PIECE), torch.split(slots, _PIECE), strict=True):
        if not len(to):
            return
        is_end = (to >= 0) & (to % block_size == block_size - 1)
        # As in `reference.write_kv`: the host reads nothing, and every token writes something.
        numbers = torch.arange(len(to), device=to.device)
        source = torch.where(is_end, numbers, is_end.int().argmax())
        places, is_new = to[source].clamp(min=0) // block_size, is_end[source]
        blocks = recent[:, own[source].clamp(min=0) // block_size].float()
        parts = (*_quantize(blocks[0].transpose(-1, -2)), *_quantize(blocks[1]))
        for old, new in zip(targets, parts, strict=True):
            old[places] = new.where(is_new[:, None, None, None], old[places])


def int4_attention(
    query: Tensor,
    /,
    cache: Tensor,
    block_tables: Tensor,
    sequence_lengths: Tensor,
    query_starts: Tensor,
    scale: float,
    recent: Tensor,
    recent_slots: Tensor,
    **options: Any,
) -> Tensor:
    """`reference.paged_attention` by the rule above, with the same arguments and options, except `ends`.

    `recent_slots` `[tokens]` are where the queries' own tokens are in `recent`, as of `quantize_kv`; negative:
    somewhere.
    """
    block_size = cache.shape[3]
    tokens = torch.arange(len(query), device=query.device)
    owners = torch.searchsorted(query_starts, tokens, right=True) - 1
    positions = sequence_lengths[owners] - query_starts[owners + 1] + tokens
    own = positions // block_size
    # The queries of a block are a sequence of their own: of the pages before the block, and the block in `recent`.
    is_first = torch.ones_like(own, dtype=torch.bool)
    is_first[1:] = (owners.diff() != 0) | (own.diff() != 0)
    firsts = is_first.nonzero()[:, 0]
    starts = torch.cat((firsts, firsts.new_tensor([len(query)])))
    width = int(own.max()) + 1 if len(own) else 1
    last, columns = own[firsts, None], torch.arange(width, device=query.device)
    tables = block_tables[owners[firsts][:, None], columns.clamp(max=block_tables.shape[1] - 1)]
    pages = tables[columns < last].unique()  # type: ignore[no-untyped-call]
    memory = torch.cat(
        (
            Int4Blocks.of(cache[:, pages]).dequantize(),
            recent[:, recent_slots[firsts].clamp(min=0) // block_size].float(),
        ),
        dim=1,
    )
    tables = torch.searchsorted(pages, tables).clamp(max=memory.shape[1] - 1)
    tables.scatter_(1, last, len(pages) + torch.arange(len(firsts), device=query.device)[:, None])
    lengths = positions[starts[1:] - 1] + 1
    return reference.paged_attention(query, memory, tables, lengths, starts, scale, **options)
