"""The choice of the tokens, or the blocks of tokens, that a query attends to."""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.reference.kv_cache import read_kv
from quire.kernels.reference.paged import SCORE_ELEMENTS


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
        piece = max(1, SCORE_ELEMENTS // (keys_seen * query.shape[1]))
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
        piece = max(1, SCORE_ELEMENTS // (length * query.shape[1]))
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
