"""Every operation in plain torch: right on any device, and the oracle of the faster ones.

Those by weights that are packed for a CPU are in `quire.kernels.packed`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.cache import LARGEST, QuantizedRows, dequantize, quantize
from quire.kernels.noise import gumbel_noise, uniform_noise

__all__ = [
    "act_mul",
    "activate",
    "add_rms_norm",
    "attention",
    "by_expert",
    "fused_experts",
    "gumbel_noise",
    "paged_attention",
    "penalize",
    "read_kv",
    "rms_norm",
    "rotary_write_kv",
    "route",
    "sample",
    "score_tokens",
    "uniform_noise",
]


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """RMSNorm (Zhang & Sennrich 2019) over the last dimension of `x`; sums are float32.

    With an `offset` (Gemma's is 1) the factor is `weight + offset`, and all but the result is float32.
    """
    if offset == 0.0:
        return F.rms_norm(x, weight.shape, weight, eps)
    return F.rms_norm(x.float(), weight.shape, weight.float() + offset, eps).to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> tuple[Tensor, Tensor]:
    """`residual + x`, normalized and as it is: `(rms_norm(residual + x), residual + x)`."""
    residual = residual + x
    return rms_norm(residual, weight, eps, offset), residual


def rotary(query: Tensor, key: Tensor, rotations: Tensor) -> tuple[Tensor, Tensor]:
    """Rotary position embedding (Su et al. 2021), first half of the turned features against the second half.

    `query` and `key` are `[tokens, heads, head_dim]`, `rotations` is `[tokens, rotary_dim]` in float32: the cosines of
    each token's rotary_dim / 2 angles, then their sines. The first rotary_dim features of a head are turned; it may
    be 0.
    """
    cos, sin = rotations.unsqueeze(1).tensor_split(2, dim=-1)  # [tokens, 1, rotary_dim / 2]
    return _rotate(query, cos, sin), _rotate(key, cos, sin)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = cos.shape[-1]
    first, second, passed = x.tensor_split((half, 2 * half), dim=-1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return torch.cat((turned.to(x.dtype), passed), dim=-1)


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
}


def activate(x: Tensor, activation: str) -> Tensor:
    """`x` through "silu", "gelu" (by the error function), "gelu_tanh" (nearly that), "relu" or "relu2" (its square)."""
    return _ACTIVATIONS[activation](x)


def act_mul(x: Tensor, activation: str) -> Tensor:
    """A gated feed-forward's middle (Shazeer 2020): `activate(gate, activation) * up` for `x = [..., gate ‖ up]`.

    "swiglu_oai" is gpt-oss's: `gate * sigmoid(1.702 * gate) * (up + 1)`, gates at most 7, ups from -7 to 7.
    """
    gate, up = x.chunk(2, dim=-1)
    if activation == "swiglu_oai":
        gate, up = gate.float().clamp(max=7.0), up.float().clamp(-7.0, 7.0)
        return (gate * torch.sigmoid(1.702 * gate) * (up + 1)).to(x.dtype)
    return activate(gate, activation) * up


def rotary_write_kv(
    query: Tensor, key: Tensor, value: Tensor | None, rotations: Tensor, cache: Tensor, slots: Tensor
) -> Tensor:
    """Turn queries and keys as `rotary` does, store keys and values as `write_kv` does, and return the queries.

    A token whose slot is -1 is not stored.

    Keys may be wider than queries: what is behind the turned features only passes.
    """
    query, key = rotary(query, key, rotations)
    write_kv(key, value, cache, slots)
    return query


def read_kv(side: Tensor, table: Tensor, length: int, dtype: torch.dtype) -> Tensor:
    """The first `length` rows of the blocks `table`, `[length, kv_heads, head_dim]` of `dtype`.

    `side` is the keys or the values of one layer's cache, `[blocks, kv_heads, block_size, row]`.
    """
    blocks = _taken(side, table[: -(-length // side.shape[2])])
    rows = (dequantize(blocks) if side.dtype in LARGEST else blocks).transpose(1, 2)
    return rows.flatten(0, 1)[:length].to(dtype)


def write_kv(key: Tensor, value: Tensor | None, cache: Tensor, slots: Tensor) -> None:
    """Store keys and values `[tokens, kv_heads, head_dim]` into one layer's `cache`, in place.

    `cache` is `[2, blocks, kv_heads, block_size, row]` (see `quire.kernels.cache`), or has one side for keys that are
    the values, too (None); `slots` `[tokens]` is block * block_size + offset, or -1 for a token that is not stored.
    """
    if not len(slots):
        return
    block_size, is_stored = cache.shape[3], slots >= 0
    # Without reading from the device which are stored: the others store what the first of these does once more, and
    # where there are none, what is there already.
    source = torch.where(is_stored, torch.arange(len(slots), device=slots.device), is_stored.int().argmax())
    slots = slots[source]
    blocks, offsets, is_new = slots.clamp(min=0) // block_size, slots.clamp(min=0) % block_size, slots >= 0
    for side, rows in zip(cache, (key,) if value is None else (key, value), strict=True):
        if cache.dtype in LARGEST:  # as bytes: torch cannot index 8-bit floats
            to = [each.view(torch.uint8) for each in QuantizedRows.of(side)]
            new = [each.view(torch.uint8) for each in quantize(rows, cache.dtype)]
        else:
            to, new = [side], [rows.to(cache.dtype)]
        for old, part in zip(to, new, strict=True):
            old[blocks, :, offsets] = part[source].where(is_new[:, None, None], old[blocks, :, offsets])


def _taken(blocks: Tensor, numbers: Tensor) -> Tensor:
    """Those blocks, in any type of cache."""
    if blocks.dtype in LARGEST:
        return blocks.view(torch.uint8).index_select(0, numbers).view(blocks.dtype)
    return blocks.index_select(0, numbers)


def _widened(cache: Tensor) -> Tensor:
    """A cache of any type `[…, block_size, row]` in float32 `[…, block_size, head_dim]`."""
    return dequantize(cache) if cache.dtype in LARGEST else cache.float()


_GATHER_ELEMENTS = 1 << 19
_SCORE_ELEMENTS = 1 << 22
"""Keys gathered, and scores computed, at once: few enough to stay in a CPU's cache, and to bound memory."""


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
    """Causal attention over a paged KV cache (Kwon et al. 2023), prefill chunks and decodes in one batch.

    `query` is `[tokens, heads, head_dim]`: the requests' tokens one after the other, request `r` in rows
    `query_starts[r]:query_starts[r + 1]`, never none. They are the last tokens of its `sequence_lengths[r]`, all of
    whose keys and values stand in `cache` `[2, blocks, kv_heads, block_size, row]`, in the blocks `block_tables[r]`
    (`[requests, max_blocks]`; entries beyond the sequence are any valid block). Query head `h` reads KV head
    `h // (heads // kv_heads)`. Scores are scaled by `scale` and summed in float32. Returns the shape of `query`.
    Keys and values may be the same memory (`cache` expanded from one side, as for multi-head latent attention).

    - `window` above 0: a query sees that many keys, the last its own. Blocks that no query of a request sees any more
      are not read; their entries in `block_tables` are any valid block.
    - `softcap` above 0: a score s becomes `softcap * tanh(s / softcap)` (Gemma 2).
    - `slopes` float32 `[heads]`: ALiBi (Press et al. 2022), adds `slope * (key's position - query's position)`, after
      the cap.
    - `sinks` float32 `[heads]`: one more score for each query, whose value is 0 (gpt-oss).
    """
    kv_heads, block_size = cache.shape[2:4]
    output = torch.empty_like(query)
    counts = query_starts.diff()  # [requests]
    firsts = sequence_lengths - counts  # [requests], the first query's position
    begins = (firsts - window + 1).clamp_(min=0) // block_size if window else torch.zeros_like(counts)
    blocks = (sequence_lengths + block_size - 1) // block_size - begins  # [requests], from number `begins` on
    for requests, count, width in _alike(counts, blocks, kv_heads * block_size * query.shape[2]):
        step = torch.arange(count, device=query.device)
        rows = query_starts[requests, None] + step  # [requests, count]
        columns = begins[requests, None] + torch.arange(width, device=query.device)  # [requests, width]
        tables = block_tables[requests[:, None], columns.clamp(max=block_tables.shape[1] - 1)]
        keys, values = _gather(cache, tables)
        place = torch.arange(block_size, device=query.device)
        positions = (columns[..., None] * block_size + place).flatten(1)  # [requests, tokens], of the keys
        # What lies behind a sequence's end is another's or old: it weighs 0, and 0 times a NaN would be NaN.
        behind = positions >= sequence_lengths[requests, None]
        values.masked_fill_(behind[:, None, :, None], 0.0)
        piece = max(1, _SCORE_ELEMENTS // (query.shape[1] * keys.shape[2] * len(rows)))
        for part, steps in zip(torch.split(rows, piece, dim=1), torch.split(step, piece), strict=True):
            distances = positions[:, None] - (firsts[requests, None] + steps)[..., None]  # [requests, count, tokens]
            mixed = _attend(query[part].float(), keys, values, distances, scale, window, softcap, sinks, slopes)
            output[part] = mixed.to(query.dtype)
    return output


def _alike(counts: Tensor, blocks: Tensor, block_elements: int) -> Iterator[tuple[Tensor, int, int]]:
    """Requests that fit one dense computation: `(requests, their query count, blocks of the longest)`.

    They have the same number of queries, and contexts within a factor of two, so that padding stays small.
    """
    host = torch.stack((counts, blocks)).cpu().numpy()
    order = np.lexsort((host[1], host[0]))
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
    """Keys and values of `tables` `[requests, blocks]`, float32 `[requests, kv_heads, tokens, head_dim]` each."""
    kv_heads = cache.shape[2]
    heads = torch.arange(kv_heads, device=cache.device)
    runs = (tables[:, None] * kv_heads + heads[:, None]).flatten()  # one head's part of one block each
    keys, values = (_widened(_taken(side.flatten(0, 1), runs)) for side in cache)  # [runs, block_size, head_dim]
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
) -> Tensor:
    """Dense attention; `query` is `[requests, count, heads, head_dim]`, `distances` `[requests, count, tokens]`."""
    requests, count, heads, head_dim = query.shape
    kv_heads, tokens = keys.shape[1:3]
    grouped = query.transpose(1, 2).reshape(requests, kv_heads, -1, head_dim)
    scores = (grouped @ keys.transpose(2, 3) * scale).view(requests, heads, count, tokens)
    if softcap:
        scores = (scores / softcap).tanh_() * softcap
    if slopes is not None:
        scores += slopes[:, None, None] * distances[:, None]
    hidden = (distances > 0) | (distances <= -window) if window else distances > 0
    scores.masked_fill_(hidden[:, None], -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks[:, None, None].expand(requests, heads, count, 1)), dim=-1)
    weights = scores.softmax(dim=-1)[..., :tokens]
    mixed = weights.reshape(requests, kv_heads, -1, tokens) @ values
    return mixed.view(requests, heads, count, head_dim).transpose(1, 2)


def attention(
    query: Tensor, key: Tensor, value: Tensor, starts: Tensor, scale: float, biases: Tensor | None = None
) -> Tensor:
    """Attention without a cache or a mask: every token of a sequence sees all of it, and nothing of the others.

    `query`, `key` and `value` are `[tokens, heads, head_dim]`, sequence `s` in the rows `starts[s]:starts[s + 1]`.
    `biases` `[heads, 2 * reach + 1]` are added to the scaled scores, by the distance from the query to the key plus
    `reach`, which no distance exceeds. Returns the shape of `query`. A sequence is computed by itself, so that its
    result does not depend on those beside it.
    """
    output = torch.empty_like(query)
    ends = starts.tolist()
    for start, end in pairwise(ends):
        q, k, v = (x[start:end].transpose(0, 1)[None] for x in (query, key, value))  # [1, heads, count, head_dim]
        mask = None if biases is None else _by_distance(biases, end - start).to(query.dtype)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
        output[start:end] = mixed[0].transpose(0, 1)
    return output


def _by_distance(biases: Tensor, count: int) -> Tensor:
    """`[heads, count (queries), count (keys)]` of the `biases` `[heads, 2 * reach + 1]` of distances."""
    reach = biases.shape[1] // 2
    near = biases[:, reach - count + 1 : reach + count]  # what the last query sees first
    return near.unfold(1, count, 1).flip(1)  # a window for each query, one to the left for the next


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
    correction_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The `top_k` experts of each token, the best first: weights, float32, and numbers, int64, `[tokens, top_k]` each.

    `logits` are float32 `[tokens, experts]`. Experts are chosen by their scores, which are also the weights; by
    "topk_softmax" the weights are the softmax of the chosen ones' logits. `correction_bias` (float32 `[experts]`) is
    added for choosing only (Wang et al. 2024). With `groups`, an expert is eligible in the `top_groups` best ones, each
    as good as its best expert or its two best together (DeepSeek-V2 and V3). Of equal experts, and groups, the lower
    number comes first. `renormalize` makes weights sum to 1, before `scale`.
    """
    scores = logits.softmax(dim=-1) if scoring == "softmax" else logits.sigmoid() if scoring == "sigmoid" else logits
    choice = scores if correction_bias is None else scores + correction_bias
    if scoring == "softmax" and correction_bias is None and (groups == 1 or group_score == "max"):
        choice = logits  # which have the order of their softmax, where some that differ may have become equal
    if groups > 1:
        members = choice.view(len(choice), groups, choice.shape[1] // groups)
        best = members.topk(2 if group_score == "top2_sum" else 1, dim=-1).values.sum(dim=-1)
        closed = torch.ones_like(best, dtype=torch.bool).scatter_(-1, _highest(best, top_groups), False)
        choice = members.masked_fill(closed[..., None], -torch.inf).flatten(-2)
    ids = _highest(choice, top_k)
    weights = scores.gather(-1, ids)
    if scoring == "topk_softmax":
        weights = weights.softmax(dim=-1)
    if renormalize:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    return weights * scale, ids


def _highest(scores: Tensor, count: int) -> Tensor:
    """As torch.topk's indices, the lower of equal ones first."""
    return scores.sort(dim=-1, descending=True, stable=True).indices[..., :count]


def fused_experts(
    x: Tensor,
    weights: Tensor,
    ids: Tensor,
    gate_up: Tensor,
    down: Tensor,
    activation: str,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
) -> Tensor:
    """The weighted sum of what each token's experts make of it: `[tokens, hidden]` → the same, summed in float32.

    An expert is `down(act_mul(gate_up(x), activation))`: `gate_up` is `[experts, 2 * size, hidden]`, gates before ups,
    and `down` `[experts, hidden, size]`; the biases are `[experts, 2 * size]` and `[experts, hidden]`. Expert
    `ids[t, i]` of token `t` weighs `weights[t, i]`, both `[tokens, top_k]`; an id below 0 or beyond the last expert
    adds nothing (it is another rank's).
    """

    def feed_forward(expert: int, rows: Tensor) -> Tensor:
        both = F.linear(rows, gate_up[expert], None if gate_up_bias is None else gate_up_bias[expert])
        return F.linear(act_mul(both, activation), down[expert], None if down_bias is None else down_bias[expert])

    return by_expert(x, weights, ids, len(gate_up), feed_forward)


def by_expert(
    x: Tensor, weights: Tensor, ids: Tensor, experts: int, feed_forward: Callable[[int, Tensor], Tensor]
) -> Tensor:
    """The weighted sum of `feed_forward(expert, rows)` over each token's experts, those without rows left out."""
    total = torch.zeros_like(x, dtype=torch.float32)
    for expert in torch.unique(ids).tolist():
        if 0 <= expert < experts:
            tokens, places = torch.nonzero(ids == expert, as_tuple=True)
            rows = feed_forward(expert, x[tokens])
            total.index_add_(0, tokens, rows.float() * weights[tokens, places, None])
    return total.to(x.dtype)


def apply_bitmask(logits: Tensor, rows: Tensor, masks: Tensor) -> None:
    """Set `logits[rows]` (float32 `[…, vocab]`) to minus infinity where the bit of `masks` is 0, in place.

    `masks` is int32 `[rows, ⌈vocab / 32⌉]`; the bit of token `i` is bit `i % 32` of word `i // 32`. `rows` is int64.
    """
    bits = torch.arange(8, dtype=torch.uint8, device=logits.device)
    forbidden = (masks.view(torch.uint8)[..., None] >> bits & 1).flatten(1)[:, : logits.shape[1]] == 0
    logits[rows] = logits[rows].masked_fill_(forbidden, -torch.inf)


def score_tokens(logits: Tensor, tokens: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """How likely `tokens` (int64 `[rows]`) are by `logits` (float32 `[rows, vocab]`), and which are the likeliest.

    Returns the tokens' log-probabilities (float32 `[rows]`) and ranks (int32 `[rows]`; the likeliest one's is 1), then
    the ids (int32 `[rows, num_top]`) of the likeliest tokens, falling, and their log-probabilities (float32, alike).
    """
    total = logits.logsumexp(dim=-1, keepdim=True)
    chosen = logits.gather(1, tokens[:, None])
    ranks = (logits > chosen).sum(dim=-1) + 1
    top = logits.topk(min(num_top, logits.shape[1]), dim=-1)
    return (chosen - total)[:, 0], ranks.int(), top.indices.int(), top.values - total


def penalize(logits: Tensor, tokens: Tensor, rows: Tensor, spans: Tensor, factors: Tensor, longest: int) -> None:
    """Penalize in `logits[rows]` (float32 `[…, vocab]`) what requests' tokens have been, in place.

    `spans` int64 `[requests, 3]` are places in `tokens` `[…]`: a request's prompt begins at the first of them, its
    output at the second, and ends before the third, at most `longest` tokens in all. `factors` float32 `[requests, 3]`:
    a token of the prompt or the output has its logit divided by the first, if it is above 0, else multiplied
    (repetition, Keskar et al. 2019); the second is taken from it for every time that it is in the output (frequency),
    and the third if it is there at all (presence, both OpenAI's). `rows` is int64 and has nothing twice.
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
"""Lower temperatures are 0."""


def sample(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, seeds: Tensor, positions: Tensor
) -> Tensor:
    """One token id for each row of `logits` (float32 `[rows, vocab]`), int64 `[rows]` on the same device.

    The controls are `[rows]` each and on the host: float32, but for int64 `top_k`, `seeds` and `positions`. A row of
    no temperature takes the arg max; ties go to the lowest id. The others draw
    `argmax(logits / temperature + gumbel_noise)` over what min_p (above 0), then top_k (above 0), then top_p (below 1)
    leave: a function of the row's own numbers alone. What a row does without, it does not pay for.
    """
    tokens = logits.argmax(dim=-1)
    drawn = torch.nonzero(temperature >= GREEDY_BELOW)[:, 0]
    if not len(drawn):
        return tokens
    temperature, top_k, top_p, min_p = temperature[drawn], top_k[drawn], top_p[drawn], min_p[drawn]
    seeds, positions, rows = (host.to(logits.device) for host in (seeds[drawn], positions[drawn], drawn))
    x = logits[rows]
    x /= _column(temperature, x)
    some = torch.nonzero(min_p > 0.0)[:, 0]
    if len(some):
        part = some.to(x.device)
        x[part] = _keep_probable(x[part], min_p[some])
    some = torch.nonzero((top_k > 0) | (top_p < 1.0))[:, 0]
    if len(some):
        part = some.to(x.device)
        x[part] = _keep_top(x[part], top_k[some], top_p[some])
    x += gumbel_noise(seeds, positions, x.shape[1])
    tokens[rows] = x.argmax(dim=-1)
    return tokens


def _keep_probable(x: Tensor, min_p: Tensor) -> Tensor:
    """Min-p (Nguyen et al. 2024): drop what is less than `min_p` times as probable as the likeliest token."""
    return x.masked_fill_(x < x.amax(dim=-1, keepdim=True) + _column(min_p, x).log(), -torch.inf)


def _keep_top(x: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Keep the k likeliest tokens, then of these the fewest that reach `top_p`; ties with the last one stay."""
    top_k = torch.where(top_k > 0, top_k.clamp(max=x.shape[1]), x.shape[1])
    likeliest = x.topk(int(top_k.max()), dim=-1).values  # [rows, k], falling
    place = torch.arange(likeliest.shape[1], device=x.device)
    likeliest.masked_fill_(place >= _column(top_k, x), -torch.inf)
    probable = likeliest.softmax(dim=-1)
    before = probable.cumsum(dim=-1) - probable
    kept = (likeliest > -torch.inf) & (before < _column(torch.where(top_p < 1.0, top_p, 2.0), x))
    last = likeliest.gather(1, kept.sum(dim=-1, keepdim=True).clamp(min=1) - 1)
    return x.masked_fill_(x < last, -torch.inf)


def _column(host: Tensor, beside: Tensor) -> Tensor:
    return host.to(beside.device)[:, None]
