"""Attention without a cache, within whole sequences."""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.reference.elementwise import rotary
from quire.kernels.sequences import SequenceKV


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts: Tensor,
    scale: float,
    biases: Tensor | None = None,
    cos_sin: Tensor | None = None,
) -> Tensor:
    """Bidirectional attention without a cache: every token attends to all tokens of its own sequence.

    `query` is `[tokens, heads, head_dim]`, `key` and `value` are `[tokens, kv_heads, head_dim]`, with sequence `s` in
    rows `starts[s]:starts[s + 1]`. `biases` `[heads, 2 * reach + 1]`, or with 1 for all heads, are added to the scaled
    scores, indexed by the distance from the query to the key plus `reach`, which no distance exceeds. With `cos_sin`,
    queries and keys are rotated first (`rotary`). Returns the shape of `query`. Sequences are computed one by one, so
    that a result does not depend on the other sequences.
    """
    if cos_sin is not None:
        query, key = rotary(query, key, cos_sin)
    group = query.shape[1] // key.shape[1]
    if group > 1:
        key, value = (each.repeat_interleave(group, dim=1) for each in (key, value))
    output = torch.empty_like(query)
    ends = starts.tolist()
    for start, end in pairwise(ends):
        q, k, v = (x[start:end].transpose(0, 1)[None] for x in (query, key, value))  # [1, heads, count, head_dim]
        mask = None if biases is None else _by_distance(biases, end - start).to(query.dtype)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
        output[start:end] = mixed[0].transpose(0, 1)
    return output


def _by_distance(biases: Tensor, count: int) -> Tensor:
    """Expand the `biases` of distances `[heads, 2 * reach + 1]` to `[heads, count (queries), count (keys)]`."""
    reach = biases.shape[1] // 2
    near = biases[:, reach - count + 1 : reach + count]  # ordered as for the last query
    return near.unfold(1, count, 1).flip(1)  # one window per query, shifted left by one for the next


class PlainSequenceKV(SequenceKV):
    """Keys and values in the order of the rows."""

    def __init__(self, like: Tensor, starts: Tensor, kv_heads: int, head_dim: int) -> None:
        """Keys and values have the type and the device of `like`."""
        self._starts = starts
        self._key, self._value = like.new_empty(2, int(starts[-1]), kv_heads, head_dim)

    def write(self, query: Tensor, key: Tensor, value: Tensor, first: int, cos_sin: Tensor | None) -> Tensor:
        if cos_sin is not None:
            query, key = rotary(query, key, cos_sin)
        self._key[first : first + len(key)], self._value[first : first + len(key)] = key, value
        return query

    def attend(self, query: Tensor, first: int, scale: float) -> Tensor:
        output = torch.empty_like(query)
        for start, end in pairwise(self._starts.tolist()):
            low, high = max(start, first), min(end, first + len(query))
            if low < high:
                k, v = (x[start:end].transpose(0, 1)[None] for x in (self._key, self._value))
                q = query[low - first : high - first].transpose(0, 1)[None]
                mixed = F.scaled_dot_product_attention(q, k, v, scale=scale, enable_gqa=True)
                output[low - first : high - first] = mixed[0].transpose(0, 1)
        return output


def sequence_kv(like: Tensor, starts: Tensor, kv_heads: int, head_dim: int) -> SequenceKV:
    """A `SequenceKV` of the device's kernels."""
    return PlainSequenceKV(like, starts, kv_heads, head_dim)
