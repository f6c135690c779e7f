"""Attention over a paged KV cache: to all tokens of a request, or to those that each query has chosen."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from quire.kernels.reference.kv_cache import gather_kv, read_slots

_GATHER_ELEMENTS = 1 << 19
SCORE_ELEMENTS = 1 << 22
"""Elements of keys gathered, and of scores computed, at once: they fit a CPU's cache and bound memory."""


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
    biases: Tensor | None = None,
    ends: Tensor | None = None,
    logs: Tensor | None = None,
) -> Tensor:
    """Causal attention over a paged KV cache (Kwon et al. 2023), with prefill chunks and decodes in one batch.

    `query` is `[tokens, heads, head_dim]`, with the tokens of request `r` in rows `query_starts[r]:query_starts[r + 1]`
    (there may be none). They are the last tokens of the request's `sequence_lengths[r]` tokens, whose keys and values
    are all in `cache` `[2, blocks, kv_heads, block_size, row]`, in the blocks `block_tables[r]` (`[requests,
    max_blocks]`; entries beyond the sequence may be any valid block). Query head `h` reads KV head `h // (heads //
    kv_heads)`. Scores are multiplied by `scale` and summed in float32. Returns the shape of `query`. Keys and values
    may share memory (`cache` expanded from one side, as for MLA).

    - `window` above 0: a query attends to that many keys, including its own. Blocks that no query of a request attends
      to are not read; their entries in `block_tables` may be any valid block.
    - `softcap` above 0: a score s becomes `softcap * tanh(s / softcap)` (Gemma 2).
    - `slopes` float32 `[heads]`: ALiBi (Press et al. 2022) adds `slope * (key position - query position)`, after
      soft-capping.
    - `biases` `[tokens, heads, keys]`, of the type of the query, are added in the same place to the scores of as many
      keys, the last of which is the query's own; earlier keys have no bias (Inkling).
    - `sinks` float32 `[heads]` (gpt-oss) or `[tokens, heads]`: one additional score per query, whose value is 0.
    - `ends` int64 `[tokens]`: a query also attends to the keys behind its own up to this position, which is within the
      sequence and does not decrease from one query of a request to the next (Gemma 3).
    - `logs` float32 `[tokens, heads]` is filled with the logarithms of the sums of the exponentials of scores, by which
      results for parts of the keys are combined. The cache then has only some of the keys: positions count these, and
      `ends`, which must be given, may also be before a query. Without any keys, a result is 0, and its logarithm -inf.
    """
    kv_heads, block_size = cache.shape[2:4]
    output = torch.empty_like(query)
    counts = query_starts.diff()  # [requests]
    firsts = sequence_lengths - counts  # [requests], the first query's position
    begins = (firsts - window + 1).clamp_(min=0) // block_size if window else torch.zeros_like(counts)
    blocks = (sequence_lengths + block_size - 1) // block_size - begins  # [requests], starting with number `begins`
    blocks.clamp_(min=1)
    for requests, count, width in _group_requests(counts, blocks, kv_heads * block_size * query.shape[2]):
        step = torch.arange(count, device=query.device)
        rows = query_starts[requests, None] + step  # [requests, count]
        columns = begins[requests, None] + torch.arange(width, device=query.device)  # [requests, width]
        tables = block_tables[requests[:, None], columns.clamp(max=block_tables.shape[1] - 1)]
        keys, values = gather_kv(cache, tables)
        place = torch.arange(block_size, device=query.device)
        positions = (columns[..., None] * block_size + place).flatten(1)  # [requests, tokens], of the keys
        # Rows beyond a sequence's end are stale or another's. Their weight is 0, but 0 times NaN would be NaN.
        is_beyond = positions >= sequence_lengths[requests, None]
        values.masked_fill_(is_beyond[:, None, :, None], 0.0)
        piece = max(1, SCORE_ELEMENTS // (query.shape[1] * keys.shape[2] * len(rows)))
        for part, steps in zip(torch.split(rows, piece, dim=1), torch.split(step, piece), strict=True):
            distances = positions[:, None] - (firsts[requests, None] + steps)[..., None]  # [requests, count, tokens]
            own_sinks = sinks[part] if sinks is not None and sinks.ndim == 2 else sinks
            own_biases = None if biases is None else biases[part].float()
            ahead = None if ends is None else (ends[part] - 1 - firsts[requests, None] - steps)[..., None]
            options = scale, window, softcap, own_sinks, slopes, own_biases, ahead
            mixed, sums = _attend(query[part].float(), keys, values, distances, *options)
            output[part] = mixed.to(query.dtype)
            if logs is not None:
                logs[part] = sums
    return output


def sparse_attention(
    query: Tensor,
    cache: Tensor,
    slots: Tensor,
    counts: Tensor,
    scale: float,
    sinks: Tensor | None = None,
    logs: Tensor | None = None,
) -> Tensor:
    """Attention of each query to its own tokens of a paged KV cache, which are in the first `counts` of its `slots`.

    `query` is `[tokens, heads, head_dim]`, `slots` int64 `[tokens, top_k]`, and `counts` int64 `[tokens]` from 1 to
    top_k. `cache`, `scale`, `sinks` `[heads]` and `logs` are as in `paged_attention`, with `logs` counts may be 0. The
    result is as for a decode with these tokens.
    """
    output, top_k = torch.empty_like(query), slots.shape[1]
    place = torch.arange(top_k, device=query.device)
    piece = max(1, _GATHER_ELEMENTS // (top_k * cache.shape[2] * query.shape[2]))
    for rows in torch.split(torch.arange(len(query), device=query.device), piece):
        keys, values = (read_slots(side, slots[rows]) for side in cache)
        is_beyond = place >= counts[rows, None]
        values.masked_fill_(is_beyond[:, None, :, None], 0.0)
        distances = is_beyond.to(torch.int64)[:, None]  # keys in the future are hidden
        mixed, sums = _attend(query[rows, None].float(), keys, values, distances, scale, 0, 0.0, sinks, None, None)
        output[rows] = mixed[:, 0].to(query.dtype)
        if logs is not None:
            logs[rows] = sums[:, 0]
    return output


def _group_requests(counts: Tensor, blocks: Tensor, block_elements: int) -> Iterator[tuple[Tensor, int, int]]:
    """Group requests for dense computation; yields `(requests, queries of each, blocks of the longest)`.

    A group has the same number of queries, and contexts within a factor of two, to limit padding. Requests without
    queries are in none.
    """
    host = torch.stack((counts, blocks)).cpu().numpy()
    order = np.lexsort((host[1], host[0]))
    order = order[host[0, order] > 0]
    host = host[:, order]
    bucket = np.frexp(host[1])[1]
    edges = np.flatnonzero(np.diff(host[0], prepend=-1) | np.diff(bucket, prepend=-1))
    for start, stop in zip(edges, [*edges[1:], len(order)], strict=True):
        size = max(1, _GATHER_ELEMENTS // (int(host[1, stop - 1]) * block_elements))
        for low in range(start, stop, size):
            high = min(low + size, stop)
            requests = torch.from_numpy(order[low:high]).to(counts.device)
            yield requests, int(host[0, low]), int(host[1, high - 1])


def _attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    distances: Tensor,
    scale: float,
    window: int,
    softcap: float,
    sinks: Tensor | None,
    slopes: Tensor | None,
    biases: Tensor | None,
    ahead: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Dense attention; `query` is `[requests, count, heads, head_dim]`, `distances` `[requests, count, tokens]`,
    `sinks` `[heads]` or `[requests, count, heads]`, and `biases` `[requests, count, heads, keys]`. Queries see
    as many keys `ahead`, `[requests, count, 1]`; None: none. Also returns the logarithms of the sums of the
    exponentials of scores, `[requests, count, heads]`; without any keys, the result is 0."""
    requests, count, heads, head_dim = query.shape
    kv_heads, tokens = keys.shape[1:3]
    grouped = query.transpose(1, 2).reshape(requests, kv_heads, -1, head_dim)
    scores = (grouped @ keys.transpose(2, 3) * scale).view(requests, heads, count, tokens)
    if softcap:
        scores = (scores / softcap).tanh_() * softcap
    if slopes is not None:
        scores += slopes[:, None, None] * distances[:, None]
    if biases is not None:
        number = (distances + biases.shape[-1] - 1)[:, None].expand_as(scores)
        found = biases.transpose(1, 2).gather(-1, number.clamp(0, biases.shape[-1] - 1))
        scores += found.masked_fill_((number < 0) | (number >= biases.shape[-1]), 0.0)
    hidden = distances > (0 if ahead is None else ahead)
    if window:
        hidden |= distances <= -window
    scores.masked_fill_(hidden[:, None], -torch.inf)
    if sinks is not None:
        by_query = sinks.expand(requests, count, heads).transpose(1, 2)[..., None]
        scores = torch.cat((scores, by_query), dim=-1)
    weights = scores.softmax(dim=-1)[..., :tokens].masked_fill_(hidden[:, None], 0.0)
    mixed = weights.reshape(requests, kv_heads, -1, tokens) @ values
    return mixed.view(requests, heads, count, head_dim).transpose(1, 2), scores.logsumexp(dim=-1).transpose(1, 2)
