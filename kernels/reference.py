"""Every operation in plain torch: correct on any device, and the oracle for the faster implementations.

Operations on weights packed for a CPU are in `quire.kernels.packed`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Literal, Protocol, Self, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.cache import LARGEST, QuantizedRows, StateSegments, dequantize, quantize
from quire.kernels.low_rank import AdapterRows, ExpertChanges, LowRankPool
from quire.kernels.noise import gumbel_noise, uniform_noise
from quire.kernels.sequences import SequenceKV

__all__ = [
    "act_mul",
    "activate",
    "add_low_rank",
    "add_rms_norm",
    "attention",
    "by_expert",
    "compress_tokens",
    "fused_experts",
    "gumbel_noise",
    "mhc_post",
    "mhc_pre",
    "paged_attention",
    "penalize",
    "read_kv",
    "rms_norm",
    "rotary",
    "rotary_write_kv",
    "route",
    "sample",
    "score_tokens",
    "select_blocks",
    "select_tokens",
    "sparse_attention",
    "uniform_noise",
]

LOWEST_EXPONENT = -1e38
"""The largest exponent before the first token (`wkv`)."""


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """RMSNorm (Zhang & Sennrich 2019) over the last dimension of `x`, with float32 sums.

    With an `offset` (1 for Gemma), the factor is `weight + offset`, and everything but the result is float32.
    """
    if offset == 0.0:
        return F.rms_norm(x, weight.shape, weight, eps)
    return F.rms_norm(x.float(), weight.shape, weight.float() + offset, eps).to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> tuple[Tensor, Tensor]:
    """Return `(rms_norm(residual + x), residual + x)`."""
    residual = residual + x
    return rms_norm(residual, weight, eps, offset), residual


def rotary(query: Tensor, key: Tensor, cos_sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotary position embedding (Su et al. 2021), in the layout that pairs the first half with the second half.

    `query` and `key` are `[tokens, heads, head_dim]`; `cos_sin` is float32 `[tokens, rotary_dim]`: the cosines of
    each token's rotary_dim / 2 angles, then their sines. The first rotary_dim features of a head are rotated;
    rotary_dim may be 0.
    """
    cos, sin = cos_sin.unsqueeze(1).tensor_split(2, dim=-1)  # [tokens, 1, rotary_dim / 2]
    return _rotate(query, cos, sin), _rotate(key, cos, sin)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = cos.shape[-1]
    first, second, rest = x.tensor_split((half, 2 * half), dim=-1)
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return torch.cat((rotated.to(x.dtype), rest), dim=-1)


_LIMITED = {"silu_7": 7.0, "silu_16": 16.0}
_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
}


def activate(x: Tensor, activation: str) -> Tensor:
    """Apply "silu", "gelu" (exact), "gelu_tanh" (tanh approximation), "quick_gelu" (logistic approximation, without
    gates only), "relu" or "relu2" (relu squared) to `x`."""
    return _ACTIVATIONS[activation](x)


def act_mul(x: Tensor, activation: str) -> Tensor:
    """A gated activation (Shazeer 2020): `activate(gate, activation) * up` for `x = [..., gate ‖ up]`.

    "swiglu_oai" (gpt-oss) is `gate * sigmoid(1.702 * gate) * (up + 1)`, with gates clamped to at most 7 and ups to
    [-7, 7]. "silu_7" and "silu_16" (Step 3.5) are "silu" with the activated gates clamped to at most the number, and
    ups in both directions; "silu_clamped" (DeepSeek-V4) is "silu" with gates clamped to at most 10 before it, and ups
    to [-10, 10].
    """
    gate, up = x.chunk(2, dim=-1)
    if activation in _LIMITED:
        limit = _LIMITED[activation]
        return (F.silu(gate.float()).clamp(max=limit) * up.float().clamp(-limit, limit)).to(x.dtype)
    if activation == "silu_clamped":
        return F.silu(gate.clamp(max=10.0)) * up.clamp(-10.0, 10.0)
    if activation == "swiglu_oai":
        gate, up = gate.float().clamp(max=7.0), up.float().clamp(-7.0, 7.0)
        return (gate * torch.sigmoid(1.702 * gate) * (up + 1)).to(x.dtype)
    return activate(gate, activation) * up


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


def read_kv(side: Tensor, table: Tensor, length: int, dtype: torch.dtype) -> Tensor:
    """Read the first `length` rows of the blocks in `table`; returns `[length, kv_heads, head_dim]` of `dtype`.

    `side` is the keys or the values of one layer's cache, `[blocks, kv_heads, block_size, row]`.
    """
    blocks = _select_blocks(side, table[: -(-length // side.shape[2])])
    rows = (dequantize(blocks) if side.dtype in LARGEST else blocks).transpose(1, 2)
    return rows.flatten(0, 1)[:length].to(dtype)


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


def _select_blocks(blocks: Tensor, numbers: Tensor) -> Tensor:
    """`blocks[numbers]` for any type of cache."""
    if blocks.dtype in LARGEST:
        return blocks.view(torch.uint8).index_select(0, numbers).view(blocks.dtype)
    return blocks.index_select(0, numbers)


def _to_float(cache: Tensor) -> Tensor:
    """Convert a cache of any type `[…, block_size, row]` to float32 `[…, block_size, head_dim]`."""
    return dequantize(cache) if cache.dtype in LARGEST else cache.float()


_GATHER_ELEMENTS = 1 << 19
_SCORE_ELEMENTS = 1 << 22
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
        keys, values = _gather(cache, tables)
        place = torch.arange(block_size, device=query.device)
        positions = (columns[..., None] * block_size + place).flatten(1)  # [requests, tokens], of the keys
        # Rows beyond a sequence's end are stale or another's. Their weight is 0, but 0 times NaN would be NaN.
        is_beyond = positions >= sequence_lengths[requests, None]
        values.masked_fill_(is_beyond[:, None, :, None], 0.0)
        piece = max(1, _SCORE_ELEMENTS // (query.shape[1] * keys.shape[2] * len(rows)))
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


def select_tokens(
    query: Tensor,
    weights: Tensor,
    cache: Tensor,
    block_tables: Tensor,
    sequence_lengths: Tensor,
    query_starts: Tensor,
    top_k: int,
    tokens_per_key: int = 1,
) -> Tensor:
    """Choose the tokens that each query attends to (DeepSeek-V3.2, 2025); returns slots, int64 `[tokens, top_k]`.

    The score of a token up to the query's own is `sum(weights * relu(query @ key))` over the heads, in float32, NaN
    being the lowest. The `top_k` tokens with the highest scores are chosen, of equal ones the earlier. Their slots
    (block * block_size + offset) are in the order of the tokens. A query with fewer tokens has all of them, followed by
    the slot of the first again. `query` is `[tokens, heads, head_dim]`, `weights` float32 `[tokens, heads]`, and
    `cache` `[1, blocks, 1, block_size, row]` has the keys. The other arguments are as in `paged_attention`.

    With `tokens_per_key`, each key belongs to a group of so many tokens, and groups are chosen: a query sees the groups
    whose tokens are all up to its own, which may be none.
    """
    block_size, chosen = cache.shape[3], torch.empty(len(query), top_k, dtype=torch.int64, device=query.device)
    starts, lengths = query_starts.tolist(), sequence_lengths.tolist()
    for request, (start, end) in enumerate(pairwise(starts)):
        length, keys_seen = lengths[request], lengths[request] // tokens_per_key
        chosen[start:end] = block_tables[request, 0] * block_size
        if not keys_seen:
            continue
        count = min(top_k, keys_seen)
        keys = read_kv(cache[0], block_tables[request], keys_seen, torch.float32)[:, 0]
        places = torch.arange(keys_seen, device=query.device)
        slots = block_tables[request, places // block_size] * block_size + places % block_size
        piece = max(1, _SCORE_ELEMENTS // (keys_seen * query.shape[1]))
        for rows in torch.split(torch.arange(start, end, device=query.device), piece):
            seen = (rows + (length - end + 1))[:, None] // tokens_per_key
            products = F.relu(query[rows].float() @ keys.T)  # [queries, heads, keys]
            scores = torch.einsum("qhk,qh->qk", products, weights[rows])
            scores = scores.where(scores == scores, -torch.inf)
            scores.masked_fill_(places >= seen, -torch.inf)
            best = scores.sort(descending=True, stable=True).indices[:, :count]
            best = best.sort().values
            chosen[rows, :count] = slots[best.where(best < seen, 0)]
    return chosen


def select_blocks(
    query: Tensor,
    cache: Tensor,
    block_tables: Tensor,
    sequence_lengths: Tensor,
    query_starts: Tensor,
    size: int,
    count: int,
    local: int,
) -> Tensor:
    """Choose `count` blocks of `size` tokens for each head of a query to attend to (MiniMax-M3, 2026); returns their
    numbers in the request in ascending order, int64 `[tokens, heads, count]`.

    The query's own block and the `local` - 1 before it are chosen, from 1 to `count` of them; then the earlier blocks
    with the highest scores, of equal ones the earlier. The score of a block is the largest `query @ key` of its tokens,
    in float32, NaN being the lowest. A query with fewer blocks has all of them, followed by block 0 again. The other
    arguments are as in `select_tokens`.
    """
    chosen = torch.empty(*query.shape[:2], count, dtype=torch.int64, device=query.device)
    starts, lengths = query_starts.tolist(), sequence_lengths.tolist()
    for request, (start, end) in enumerate(pairwise(starts)):
        length, number = lengths[request], -(-lengths[request] // size)
        keys = read_kv(cache[0], block_tables[request], length, torch.float32)[:, 0]
        piece = max(1, _SCORE_ELEMENTS // (length * query.shape[1]))
        for rows in torch.split(torch.arange(start, end, device=query.device), piece):
            products = query[rows].float() @ keys.T  # [queries, heads, length]
            products = products.where(products == products, -torch.inf)
            products = F.pad(products, (0, number * size - length), value=-torch.inf)
            scores = torch.unflatten(products, -1, (number, size)).amax(-1)
            chosen[rows] = choose_blocks(scores, (rows + (length - end)) // size, count, local)
    return chosen


def choose_blocks(scores: Tensor, own: Tensor, count: int, local: int) -> Tensor:
    """The choice of `select_blocks` by the blocks' scores `[tokens, heads, blocks]`; the scores of blocks after the
    queries' `own` `[tokens]` may have any value."""
    numbers = torch.arange(scores.shape[-1], device=scores.device)
    is_after = numbers > own[:, None]
    is_local = (numbers > own[:, None] - local) & ~is_after
    scores = scores.masked_fill(is_local[:, None], torch.inf).masked_fill(is_after[:, None], -torch.inf)
    best = scores.sort(descending=True, stable=True).indices[..., :count].sort().values
    best = best.where(best <= own[:, None, None], 0)
    return F.pad(best, (0, count - best.shape[-1]))


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
        keys, values = (_read_slots(side, slots[rows]) for side in cache)
        is_beyond = place >= counts[rows, None]
        values.masked_fill_(is_beyond[:, None, :, None], 0.0)
        distances = is_beyond.to(torch.int64)[:, None]  # keys in the future are hidden
        mixed, sums = _attend(query[rows, None].float(), keys, values, distances, scale, 0, 0.0, sinks, None, None)
        output[rows] = mixed[:, 0].to(query.dtype)
        if logs is not None:
            logs[rows] = sums[:, 0]
    return output


def _read_slots(side: Tensor, slots: Tensor) -> Tensor:
    """The rows in `slots` `[queries, count]`, float32 `[queries, kv_heads, count, head_dim]`."""
    blocks, offsets = slots // side.shape[2], slots % side.shape[2]
    if side.dtype not in LARGEST:
        return side[blocks, :, offsets].float().transpose(1, 2)
    values, scales = (each.view(torch.uint8)[blocks, :, offsets].view(side.dtype) for each in QuantizedRows.of(side))
    return (values.float() * scales.contiguous().view(torch.float32)).transpose(1, 2)


def compress_tokens(
    inputs: Tensor,
    position_bias: Tensor,
    weight: Tensor | None,
    eps: float,
    cos_sin: Tensor,
    cache: Tensor,
    slots: Tensor,
    block_tables: Tensor,
    sequence_lengths: Tensor,
    query_starts: Tensor,
    entry_tables: Tensor,
) -> None:
    """Compress the groups of tokens that end with one of the step's tokens to entries (DeepSeek-V4, 2026), and store
    them.

    A group has `ratio` tokens, the last one at a position where `(position + 1) % ratio` is 0. An entry is the RMSNorm,
    with `weight` `[head_dim]` and `eps`, of a sum of the tokens' values; None: the sum itself. The weights of the sum
    are, for each feature, a softmax of the tokens' gates plus `position_bias`, float32 `[ratio, width]`, by the place
    in the group. If width is `2 * head_dim`, the first head_dim features are for the next group: the sum has the first
    features of the tokens of the group before, if there is one, and the last ones of the group's own. Everything but
    the result is float32.

    `inputs` `[1, blocks, 1, block_size, 2 * width]` has the values and then the gates of the tokens, in the blocks
    `block_tables`; without the gates, they are 0. The entry is stored in `cache` `[1, blocks, 1, rows, head_dim]`, of a
    float type, in the block of `entry_tables` that its last token is in; a row is for `block_size // rows` tokens.
    Before, its last rotary_dim features, which are pairs side by side, become the first ones, in halves, and are
    rotated as by `rotary`. `cos_sin` `[tokens, rotary_dim]` has the rotation of the entry that ends with each token.
    Nothing is stored for a token with -1 in `slots` `[tokens]`. A row of `cache` may be a part of the row in `inputs`
    of the last token of its group, if no other entry is computed from it. The other arguments are as in
    `paged_attention`.
    """
    assert cache.dtype not in LARGEST
    (ratio, width), block_size, (rows, head_dim) = position_bias.shape, inputs.shape[3], cache.shape[3:]
    parts = width // head_dim
    requests = torch.arange(len(sequence_lengths), device=slots.device).repeat_interleave(query_starts.diff())
    positions = torch.arange(len(slots), device=slots.device) + (sequence_lengths - query_starts[1:])[requests]
    ends = (((positions + 1) % ratio == 0) & (slots >= 0)).nonzero()[:, 0]
    before = torch.arange(1 - parts * ratio, 1, device=slots.device)
    for tokens in torch.split(ends, max(1, _SCORE_ELEMENTS // (2 * parts * ratio * width))):
        at, request, last = positions[tokens, None] + before, requests[tokens, None], positions[tokens]
        seen = at.clamp(min=0)
        found = inputs[0, block_tables[request, seen // block_size], 0, seen % block_size].float()
        values, gates = torch.unflatten(found, 1, (parts, ratio)).tensor_split((width,), dim=-1)
        gates = gates if gates.shape[-1] else torch.zeros_like(values)  # [groups, parts, ratio, width]
        gates = (gates + position_bias).masked_fill(torch.unflatten(at < 0, 1, (parts, ratio))[..., None], -torch.inf)
        values, gates = (
            torch.cat([x[:, part, :, part * head_dim : (part + 1) * head_dim] for part in range(parts)], dim=1)
            for x in (values, gates)
        )
        weights = gates.softmax(dim=1)
        entry = (values.where(weights > 0, 0.0) * weights).sum(dim=1)
        entry = entry if weight is None else F.rms_norm(entry, (head_dim,), weight.float(), eps)
        plain, pairs = entry.tensor_split((head_dim - cos_sin.shape[1],), dim=1)
        entry = torch.cat((pairs[:, ::2], pairs[:, 1::2], plain), dim=1)[:, None]
        entry, _ = rotary(entry, entry[:, :0], cos_sin[tokens])
        places = last % block_size // (block_size // rows)
        write_kv(entry, None, cache, entry_tables[requests[tokens], last // block_size] * rows + places)


def mhc_pre(
    x: Tensor,
    function: Tensor,
    base: Tensor,
    scale: Tensor,
    num_streams: int,
    norm_eps: float,
    eps: float,
    iterations: int = 0,
    magnitude: float = 2.0,
    output_eps: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """The input of a layer with manifold-constrained hyper-connections (Xie et al. 2026), computed from the residual
    streams `x` `[tokens, num_streams * hidden_size]`, and the weights with which `mhc_post` mixes them afterwards.

    Weights are `function`, `[num_streams * (2 + num_streams), num_streams * hidden_size]`, times the RMSNorm of the
    streams together, with `norm_eps`; each of their three parts is multiplied by one of `scale` `[3]`, and `base` is
    added. All of it is float32. With only two parts, or one, the results of the others are empty: `[tokens, 0, 0]`,
    streams that stay as they are, and `[tokens, 0]`, nothing that is written.

    - The layer's input, `[tokens, hidden_size]` like `x`: the sum of the streams, weighted by the sigmoids of the first
      `num_streams` weights plus `eps`.
    - Float32 `[tokens, num_streams]`, the weight of the layer's output in each stream: a sigmoid times
      `magnitude` plus `output_eps`.
    - Float32 `[tokens, num_streams, num_streams]`, the weight of each stream (first) in each stream (second): a softmax
      over the second plus `eps`, made doubly stochastic by dividing by the sums over the first and, `iterations` - 1
      times, by the sums over the second and then the first (Sinkhorn & Knopp 1967), with `eps` added to sums.
    """
    wide = x.float()
    weights = F.linear(F.rms_norm(wide, wide.shape[1:], None, norm_eps), function)
    sizes = (num_streams, num_streams, num_streams**2)[: len(scale)]
    parts = zip(weights.split_with_sizes(sizes, dim=1), scale, base.split_with_sizes(sizes), strict=True)
    inputs, *others = (part * factor + added for part, factor, added in parts)
    streams = torch.unflatten(wide, 1, (num_streams, -1))
    read = ((inputs.sigmoid() + eps)[..., None] * streams).sum(dim=1).to(x.dtype)
    outputs = magnitude * others[0].sigmoid() + output_eps if others else wide.new_empty(len(x), 0)
    if len(others) < 2:
        return read, outputs, wide.new_empty(len(x), 0, 0)
    mixed = torch.unflatten(others[1], 1, (num_streams, -1)).softmax(dim=2) + eps
    mixed = mixed / (mixed.sum(dim=1, keepdim=True) + eps)
    for _ in range(iterations - 1):
        mixed = mixed / (mixed.sum(dim=2, keepdim=True) + eps)
        mixed = mixed / (mixed.sum(dim=1, keepdim=True) + eps)
    return read, outputs, mixed


def mhc_post(x: Tensor, streams: Tensor, outputs: Tensor, mixed: Tensor) -> Tensor:
    """The residual streams after a layer with hyper-connections: `streams` `[tokens, num_streams * hidden_size]`, the
    streams before it, mixed, plus the layer's output `x` `[tokens, hidden_size]`. `outputs` and `mixed` are the weights
    that `mhc_pre` computes; if there are none for mixing, streams stay as they are. Sums are float32."""
    before = torch.unflatten(streams, 1, (outputs.shape[1], -1)).float()
    before = mixed.mT @ before if mixed.shape[1] else before
    return (outputs[..., None] * x.float()[:, None] + before).flatten(1).to(x.dtype)


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


def _gather(cache: Tensor, tables: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values of `tables` `[requests, blocks]`, each float32 `[requests, kv_heads, tokens, head_dim]`."""
    kv_heads = cache.shape[2]
    heads = torch.arange(kv_heads, device=cache.device)
    runs = (tables[:, None] * kv_heads + heads[:, None]).flatten()  # each is one head of one block
    keys, values = (
        _to_float(_select_blocks(side.flatten(0, 1), runs)) for side in cache
    )  # [runs, block_size, head_dim]
    shape = (len(tables), kv_heads, -1, keys.shape[-1])
    return keys.view(shape), values.view(shape)


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


def _by_distance(biases: Tensor, count: int) -> Tensor:
    """Expand the `biases` of distances `[heads, 2 * reach + 1]` to `[heads, count (queries), count (keys)]`."""
    reach = biases.shape[1] // 2
    near = biases[:, reach - count + 1 : reach + count]  # ordered as for the last query
    return near.unfold(1, count, 1).flip(1)  # one window per query, shifted left by one for the next


Scoring = Literal["softmax", "sigmoid", "topk_softmax"]
GroupScore = Literal["max", "top2_sum"]


def route(
    logits: Tensor,
    top_k: int,
    scoring: Scoring,
    *,
    renormalize: bool = False,
    scale: float = 1.0,
    groups: int = 1,
    top_groups: int = 1,
    group_score: GroupScore = "max",
    ineligible: float = -math.inf,
    correction_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Select the `top_k` experts of each token, best first; returns float32 weights and int64 ids, `[tokens, top_k]`.

    `logits` are float32 `[tokens, experts]`. Experts are selected by their scores, which are also the weights; with
    "topk_softmax" the weights are the softmax of the selected experts' logits. `correction_bias` (float32 `[experts]`)
    is added for selection only (Wang et al. 2024). With `groups`, only experts in the `top_groups` best groups are
    eligible; a group's score is its best expert's or the sum of its two best (DeepSeek-V2 and V3). In the choice,
    the others have the score `ineligible`. Ties, of experts and of groups, go to the lower number. `renormalize` makes
    weights sum to 1 before they are scaled by `scale`.
    """
    scores = logits.softmax(dim=-1) if scoring == "softmax" else logits.sigmoid() if scoring == "sigmoid" else logits
    choice = scores if correction_bias is None else scores + correction_bias
    in_order = groups == 1 or (group_score == "max" and ineligible == -math.inf)
    if scoring == "softmax" and correction_bias is None and in_order:
        choice = logits  # the same order as the softmax, where different logits may round to equal scores
    if groups > 1:
        members = choice.view(len(choice), groups, choice.shape[1] // groups)
        best = members.topk(2 if group_score == "top2_sum" else 1, dim=-1).values.sum(dim=-1)
        excluded = torch.ones_like(best, dtype=torch.bool).scatter_(-1, _highest(best, top_groups), False)
        choice = members.masked_fill(excluded[..., None], ineligible).flatten(-2)
    ids = _highest(choice, top_k)
    weights = scores.gather(-1, ids)
    if scoring == "topk_softmax":
        weights = weights.softmax(dim=-1)
    if renormalize:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    return weights * scale, ids


def _highest(scores: Tensor, count: int) -> Tensor:
    """The indices of torch.topk, with ties in ascending order."""
    return scores.sort(dim=-1, descending=True, stable=True).indices[..., :count]


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


def fused_experts(
    x: Tensor,
    weights: Tensor,
    ids: Tensor,
    gate_up: Tensor,
    down: Tensor,
    activation: str,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    changes: ExpertChanges | None = None,
) -> Tensor:
    """The weighted sum of each token's experts; `x` and the result are `[tokens, hidden]`, sums are float32.

    An expert is `down(act_mul(gate_up(x), activation))`: `gate_up` is `[experts, 2 * size, hidden]`, gates before ups,
    and `down` is `[experts, hidden, size]`; the biases are `[experts, 2 * size]` and `[experts, hidden]`. An expert
    without gates is `down(activate(gate_up(x), activation))`, with half as many rows of `gate_up`. `weights` and `ids`
    are `[tokens, top_k]`. An id that is negative or beyond the last expert adds nothing: the expert is on another
    rank.

    `changes` are made to the results of `gate_up` and `down` as by `add_low_rank`; tokens without an adapter have the
    results of a call without, to the last bit where a token does not depend on the others.
    """

    def gates_and_ups(expert: int, rows: Tensor) -> Tensor:
        return F.linear(rows, gate_up[expert], None if gate_up_bias is None else gate_up_bias[expert])

    def downs(expert: int, inner: Tensor) -> Tensor:
        return F.linear(inner, down[expert], None if down_bias is None else down_bias[expert])

    is_gated = gate_up.shape[1] > down.shape[2]
    return mix_experts(x, weights, ids, len(gate_up), gates_and_ups, downs, activation, is_gated, changes)


class Rows(Protocol):
    """A tensor of rows, or a stand-in for one."""

    @property
    def shape(self) -> torch.Size: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def __getitem__(self, rows: Tensor, /) -> Self: ...


R = TypeVar("R", bound=Rows)


def by_expert(x: R, weights: Tensor, ids: Tensor, experts: int, feed_forward: Callable[[int, R], Tensor]) -> Tensor:
    """The weighted sum of `feed_forward(expert, rows)` over each token's experts; skips experts without rows."""
    total = torch.zeros(x.shape, dtype=torch.float32, device=ids.device)
    for expert, tokens, places in _routed(ids, experts):
        rows = feed_forward(expert, x[tokens])
        total.index_add_(0, tokens, rows.float() * weights[tokens, places, None])
    return total.to(x.dtype)


def mix_experts(
    x: R,
    weights: Tensor,
    ids: Tensor,
    experts: int,
    gate_up: Callable[[int, R], Tensor],
    down: Callable[[int, Tensor], Tensor],
    activation: str,
    gated: bool,
    changes: ExpertChanges | None,
    act_mul: Callable[[Tensor, str], Tensor] = act_mul,
    add_low_rank: Callable[[Tensor, Tensor, LowRankPool, AdapterRows], None] = add_low_rank,
) -> Tensor:
    """`fused_experts` with products of an expert and its rows, which this changes in place. The last two may be other
    implementations."""
    total = torch.zeros(x.shape, dtype=torch.float32, device=ids.device)
    for expert, tokens, places in _routed(ids, experts):
        own = None if changes is None else changes.of_pairs(tokens * ids.shape[1] + places, ids.shape[1])
        both = gate_up(expert, x[tokens])
        if own is not None and own.gate_up is not None:
            add_low_rank(both, own.x, own.gate_up, own.pairs)
        inner = (act_mul if gated else activate)(both, activation).to(x.dtype)
        out = down(expert, inner)
        if own is not None and own.down is not None:
            add_low_rank(out, inner, own.down, own.pairs)
        total.index_add_(0, tokens, out.float() * weights[tokens, places, None])
    return total.to(x.dtype)


def _routed(ids: Tensor, experts: int) -> Iterator[tuple[int, Tensor, Tensor]]:
    """The experts that have rows: their numbers, tokens, and the places of these among the tokens' experts."""
    for expert in torch.unique(ids).tolist():
        if 0 <= expert < experts:
            yield expert, *torch.nonzero(ids == expert, as_tuple=True)


def apply_bitmask(logits: Tensor, rows: Tensor, masks: Tensor) -> None:
    """Set `logits[rows]` (float32 `[…, vocab]`) to minus infinity in place where the bit in `masks` is 0.

    `masks` is int32 `[rows, ⌈vocab / 32⌉]`; the bit of token `i` is bit `i % 32` of word `i // 32`. `rows` is int64.
    """
    bits = torch.arange(8, dtype=torch.uint8, device=logits.device)
    forbidden = (masks.view(torch.uint8)[..., None] >> bits & 1).flatten(1)[:, : logits.shape[1]] == 0
    logits[rows] = logits[rows].masked_fill_(forbidden, -torch.inf)


def score_tokens(logits: Tensor, tokens: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log-probabilities of `tokens` (int64 `[rows]`) and of the most likely tokens, by float32 `[rows, vocab]`
    `logits`.

    Returns the log-probabilities (float32 `[rows]`) and ranks (int32 `[rows]`, 1 for the most likely) of `tokens`, then
    the ids (int32 `[rows, num_top]`) of the most likely tokens in descending order, and their log-probabilities
    (float32, same shape).
    """
    total = logits.logsumexp(dim=-1, keepdim=True)
    chosen = logits.gather(1, tokens[:, None])
    ranks = (logits > chosen).sum(dim=-1) + 1
    top = logits.topk(min(num_top, logits.shape[1]), dim=-1)
    return (chosen - total)[:, 0], ranks.int(), top.indices.int(), top.values - total


def penalize(logits: Tensor, tokens: Tensor, rows: Tensor, spans: Tensor, factors: Tensor, longest: int) -> None:
    """Apply repetition, frequency and presence penalties to `logits[rows]` (float32 `[…, vocab]`), in place.

    `spans` int64 `[requests, 3]` are offsets in `tokens` `[…]`: the start of a request's prompt, the start of its
    output, and the end of its output; a request has at most `longest` tokens. `factors` is float32 `[requests, 3]`:

    - repetition (Keskar et al. 2019): the logits of tokens in the prompt or the output are divided by it if positive,
      else multiplied;
    - frequency (OpenAI): subtracted once for every occurrence in the output;
    - presence (OpenAI): subtracted once if the token occurs in the output.

    `rows` is int64 without duplicates.
    """
    begin, middle, end = spans[..., None].unbind(1)
    place = begin + torch.arange(longest, device=logits.device)  # [requests, longest]
    ids = tokens[torch.where(place < end, place, begin)].long()
    repetition, frequency, presence = factors[..., None].unbind(1)
    x = logits[rows]
    seen, counts = (
        torch.zeros_like(x).scatter_add_(1, ids, chosen.to(x.dtype))
        for chosen in (place < end, (place >= middle) & (place < end))
    )
    x = torch.where(seen > 0, torch.where(x > 0, x / repetition, x * repetition), x)
    x -= frequency * counts
    x -= presence * (counts > 0)
    logits[rows] = x


GREEDY_BELOW = 1e-5
"""Lower temperatures are treated as 0."""


def sample(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, seeds: Tensor, positions: Tensor
) -> Tensor:
    """Sample one token id per row of `logits` (float32 `[rows, vocab]`); returns int64 `[rows]` on the same device.

    The other arguments are `[rows]` on the host: int64 `top_k`, `seeds` and `positions` (which may also be on the
    device), float32 the others. At
    temperature 0 the result is the arg max, with ties going to the lowest id. Otherwise it is
    `argmax(logits / temperature + gumbel_noise)` over the tokens that min_p (if above 0), then top_k (if above 0), then
    top_p (if below 1) keep, which depends on the row alone. A filter that a row does not use costs it nothing.
    """
    tokens = logits.argmax(dim=-1)
    sampled = torch.nonzero(temperature >= GREEDY_BELOW)[:, 0]
    if not len(sampled):
        return tokens
    temperature, top_k, top_p, min_p = temperature[sampled], top_k[sampled], top_p[sampled], min_p[sampled]
    seeds, positions, rows = (host.to(logits.device) for host in (seeds[sampled], positions[sampled], sampled))
    x = logits[rows]
    x /= _column(temperature, x)
    filtered = torch.nonzero(min_p > 0.0)[:, 0]
    if len(filtered):
        part = filtered.to(x.device)
        x[part] = _keep_probable(x[part], min_p[filtered])
    filtered = torch.nonzero((top_k > 0) | (top_p < 1.0))[:, 0]
    if len(filtered):
        part = filtered.to(x.device)
        x[part] = _keep_top(x[part], top_k[filtered], top_p[filtered])
    x += gumbel_noise(seeds, positions, x.shape[1])
    tokens[rows] = x.argmax(dim=-1)
    return tokens


def _keep_probable(x: Tensor, min_p: Tensor) -> Tensor:
    """Min-p (Nguyen et al. 2024): drop tokens less than `min_p` times as probable as the most likely one."""
    return x.masked_fill_(x < x.amax(dim=-1, keepdim=True) + _column(min_p, x).log(), -torch.inf)


def _keep_top(x: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Keep the `top_k` most likely tokens, then the fewest of these that reach `top_p`; keep ties with the last one."""
    top_k = torch.where(top_k > 0, top_k.clamp(max=x.shape[1]), x.shape[1])
    top = x.topk(int(top_k.max()), dim=-1).values  # [rows, k], descending
    place = torch.arange(top.shape[1], device=x.device)
    top.masked_fill_(place >= _column(top_k, x), -torch.inf)
    probable = top.softmax(dim=-1)
    before = probable.cumsum(dim=-1) - probable
    kept = (top > -torch.inf) & (before < _column(torch.where(top_p < 1.0, top_p, 2.0), x))
    last = top.gather(1, kept.sum(dim=-1, keepdim=True).clamp(min=1) - 1)
    return x.masked_fill_(x < last, -torch.inf)


def _column(host: Tensor, other: Tensor) -> Tensor:
    return host.to(other.device)[:, None]


def causal_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, inputs: Tensor, segments: StateSegments, *, silu: bool = True
) -> Tensor:
    """Convolve each channel over its last tokens, then apply silu (if `silu`): `[tokens, channels]` → the same.

    `weight` is `[channels, conv_size]`, with the weight of the newest token last; `bias` is `[channels]`. `inputs` is
    as in `RecurrentState`, and is updated.
    """
    out, size = torch.empty_like(x, memory_format=torch.contiguous_format), weight.shape[1]
    starts, read, write = (each.tolist() for each in (segments.starts, segments.read, segments.write))
    for segment, (start, end) in enumerate(pairwise(starts)):
        before = x.new_zeros(size - 1, x.shape[1]) if read[segment] < 0 else inputs[read[segment]]
        seen = torch.cat((before, x[start:end]))
        windows = seen.float().unfold(0, size, 1)  # [tokens, channels, conv_size]
        total = (windows * weight.float()).sum(dim=-1)
        if bias is not None:
            total = total + bias.float()
        out[start:end] = (F.silu(total) if silu else total).to(x.dtype)
        if write[segment] >= 0:
            inputs[write[segment]] = seen[len(seen) - size + 1 :]
    return out


def linear_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    beta: Tensor | None,
    matrices: Tensor,
    segments: StateSegments,
    scale: float,
    eps: float = 0.0,
    *,
    is_delta: bool = True,
) -> Tensor:
    """Linear attention with a decaying state: `[tokens, heads, value_dim]` like `value`.

    For each token, the state S of a head becomes `exp(decay) * S + key ⊗ update`, and its output is
    `scale * S.T @ query`. `update` is `beta * value`, or the value without `beta`; with `is_delta` it is the gated
    delta rule's (Yang et al. 2024), `beta * (value - key @ (exp(decay) * S))`. `query` and `key` are
    `[tokens, key_heads, key_dim]`; a key head belongs to consecutive heads, and with `eps` is divided by its length.
    `decay` is float32 `[tokens, heads]`, or for each key feature `[tokens, heads, key_dim]`; `beta` is float32
    `[tokens, heads]`. `matrices` is as in `RecurrentState`, and is updated.
    """
    repeats, out = value.shape[1] // key.shape[1], torch.empty_like(value, memory_format=torch.contiguous_format)
    query, key = query.float(), key.float()
    if eps:
        query, key = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + eps) for x in (query, key))
    query, key = ((x * by).repeat_interleave(repeats, dim=1) for x, by in ((query, scale), (key, 1.0)))
    factors = (decay if decay.dim() == 3 else decay[..., None]).exp()[..., None]
    starts, read, write = (each.tolist() for each in (segments.starts, segments.read, segments.write))
    for segment, (start, end) in enumerate(pairwise(starts)):
        state = torch.zeros_like(matrices[0]) if read[segment] < 0 else matrices[read[segment]].clone()
        for token in range(start, end):
            state *= factors[token]
            update, row = value[token].float(), key[token].unsqueeze(-1)
            if is_delta:
                update = update - (row * state).sum(1)
            if beta is not None:
                update = beta[token, :, None] * update
            state += row * update.unsqueeze(1)
            out[token] = (query[token].unsqueeze(-1) * state).sum(1).to(value.dtype)
        if write[segment] >= 0:
            matrices[write[segment]] = state
    return out


def selective_scan(
    x: Tensor, step: Tensor, rates: Tensor, key: Tensor, query: Tensor, matrices: Tensor, segments: StateSegments
) -> Tensor:
    """The selective scan of Mamba (Gu & Dao 2023): `[tokens, channels]` like `x`.

    For each token, the state S `[state_size, channels]` becomes `exp(step * rates) * S + key ⊗ (step * x)`, and the
    output is `S.T @ query`: linear attention with a decay for each element of the state. `step` is float32
    `[tokens, channels]`, `rates` float32 `[state_size, channels]`, `key` and `query` are `[tokens, state_size]`.
    `matrices` is as in `RecurrentState` with one head, and is updated.
    """
    out, key, query = torch.empty_like(x, memory_format=torch.contiguous_format), key.float(), query.float()
    starts, read, write = (each.tolist() for each in (segments.starts, segments.read, segments.write))
    for segment, (start, end) in enumerate(pairwise(starts)):
        state = torch.zeros_like(matrices[0, 0]) if read[segment] < 0 else matrices[read[segment], 0].clone()
        for token in range(start, end):
            update = step[token] * x[token].float()
            state = (step[token] * rates).exp() * state + key[token, :, None] * update
            out[token] = (query[token, :, None] * state).sum(0).to(x.dtype)
        if write[segment] >= 0:
            matrices[write[segment], 0] = state
    return out


def wkv(key: Tensor, value: Tensor, decay: Tensor, bonus: Tensor, matrices: Tensor, segments: StateSegments) -> Tensor:
    """The weighted means of RWKV-4 (Peng et al. 2023): `[tokens, channels]` like `value`.

    A channel's output is the mean of its values so far, with weights `exp(key + bonus)` for the token's own value and
    `exp(key + n * decay)` for a value with n tokens in between. `key` and `value` are `[tokens, channels]`, `decay` and
    `bonus` float32 `[channels]`. `matrices` is as in `RecurrentState` with one head and three rows, and is updated: the
    weighted sum of values, the sum of weights, both divided by the exponential of the third row, which is the largest
    exponent so far.
    """
    out, keys, values = torch.empty_like(value, memory_format=torch.contiguous_format), key.float(), value.float()
    starts, read, write = (each.tolist() for each in (segments.starts, segments.read, segments.write))
    for segment, (start, end) in enumerate(pairwise(starts)):
        state = torch.zeros_like(matrices[0, 0]) if read[segment] < 0 else matrices[read[segment], 0].clone()
        total, weight, largest = state.unbind(0)
        if read[segment] < 0:
            largest = torch.full_like(largest, LOWEST_EXPONENT)
        for token in range(start, end):
            own = keys[token] + bonus
            top = torch.maximum(largest, own)
            before, own = (largest - top).exp(), (own - top).exp()
            out[token] = ((before * total + own * values[token]) / (before * weight + own)).to(value.dtype)
            top = torch.maximum(largest + decay, keys[token])
            before, own = (largest + decay - top).exp(), (keys[token] - top).exp()
            total, weight, largest = before * total + own * values[token], before * weight + own, top
        if write[segment] >= 0:
            matrices[write[segment], 0] = torch.stack((total, weight, largest))
    return out
