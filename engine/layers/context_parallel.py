"""Decode context parallelism: ranks that would have copies of the same keys and values divide each block's tokens.

Every rank of such a group has the same KV heads, and one run of the tokens of every block: all have the same blocks, of
fewer rows. Each computes attention of the queries of the whole group to the keys that it has, and the results for parts
of the keys are combined by the logarithms of their sums (flash decoding, Dao et al. 2023).
"""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire import kernels
from quire.engine.distributed.communicator import Parallel
from quire.engine.layers.batch import AttentionMetadata, Batch
from quire.kernels import HostMetadata

Numbers = TypeVar("Numbers", Tensor, npt.NDArray[np.int64])


def own_metadata(batch: Batch, group: int, rows: int, context: Parallel) -> AttentionMetadata:
    """A KV cache group as this rank of `context` sees it, which has `rows` tokens of each block: the slots, lengths and
    ends count these alone. A single rank has all."""
    if context.size == 1:
        return batch.attention(group)
    key = group, batch.key_ends is None
    if (own := batch.shared.own_metadata.get(key)) is None:
        own = batch.shared.own_metadata[key] = _divide(batch.attention(group), rows, context)
    return own


def _divide(whole: AttentionMetadata, rows: int, context: Parallel) -> AttentionMetadata:
    block, first = rows * context.size, rows * context.rank

    def own(tokens: Numbers) -> Numbers:
        """How many of the first `tokens` tokens of sequences are on this rank."""
        counted: Numbers = tokens // block * rows + (tokens % block - first).clip(0, rows)
        return counted

    slots, lengths, count = whole.slot_mapping, whole.sequence_lengths, len(whole.slot_mapping)
    place = slots % block - first
    is_own = (slots >= 0) & (place >= 0) & (place < rows)
    if (ends := whole.key_ends) is None:
        sequence = whole.sequence_of_tokens(count)
        ends = torch.arange(1, count + 1, device=slots.device) + (lengths - whole.query_starts[1:])[sequence]
    return whole._replace(
        slot_mapping=(slots // block * rows + place).where(is_own, -1),
        sequence_lengths=own(lengths),
        host=None if whole.host is None else HostMetadata(whole.host.counts, own(whole.host.lengths)),
        key_ends=own(ends),
    )


def attend(
    query: Tensor,
    memory: Tensor,
    metadata: AttentionMetadata,
    scale: float,
    context: Parallel,
    *,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """Attention of this rank's queries `[tokens, heads, head_dim]` to the keys and values of all ranks of `context`.

    `memory` has this rank's own, and `metadata` is as of `own_metadata`. The options are those of
    `kernels.paged_attention`; several ranks support only these, and a window that hides no key.
    """
    if context.size == 1:
        options |= {"softcap": softcap, "sinks": sinks, "ends": metadata.key_ends, "host": metadata.host}
        return kernels.paged_attention(query, memory, *metadata.paged, scale, **options)
    assert options.get("slopes") is options.get("biases") is None
    everyones, logs = _gather_queries(query, context)
    mixed = kernels.paged_attention(
        everyones, memory, *metadata.paged, scale, softcap=softcap, ends=metadata.key_ends, logs=logs
    )
    return _combine(mixed, logs, context, sinks).to(query.dtype)


def attend_to_selected(
    query: Tensor,
    memory: Tensor,
    slots: Tensor,
    counts: Tensor,
    scale: float,
    context: Parallel,
    sinks: Tensor | None = None,
) -> Tensor:
    """As `kernels.sparse_attention`, with the `slots` of all tokens, whichever rank has them."""
    if context.size == 1:
        return kernels.sparse_attention(query, memory, slots, counts, scale, sinks)
    rows = memory.shape[3]
    block, place = slots // (rows * context.size), slots % (rows * context.size) - rows * context.rank
    is_own = (place >= 0) & (place < rows) & (torch.arange(slots.shape[1], device=slots.device) < counts[:, None])
    first = is_own.byte().argsort(dim=1, descending=True, stable=True)  # own ones come first, in order
    own_slots = (block * rows + place).where(is_own, 0).gather(1, first)
    everyones, logs = _gather_queries(query, context)
    mixed = kernels.sparse_attention(everyones, memory, own_slots, is_own.sum(dim=1), scale, None, logs)
    return _combine(mixed, logs, context, sinks).to(query.dtype)


def _gather_queries(query: Tensor, context: Parallel) -> tuple[Tensor, Tensor]:
    """The queries of all ranks `[tokens, heads of all ranks, head_dim]`, and an uninitialized logarithm for each."""
    tokens, heads, head_dim = query.shape
    everyones = context.all_gather(query.flatten(1)).view(tokens, context.size * heads, head_dim)
    return everyones, everyones.new_empty(tokens, context.size * heads, dtype=torch.float32)


def _combine(mixed: Tensor, logs: Tensor, context: Parallel, sinks: Tensor | None) -> Tensor:
    """This rank's heads of the results for all keys, float32, from the results of all heads for its own keys."""
    tokens, heads = logs.shape
    total = context.all_gather(logs).view(tokens, context.size, heads).logsumexp(dim=1)
    mixed = context.all_reduce(mixed.float().mul_((logs - total).exp()[..., None]))
    own = slice(context.rank * heads // context.size, (context.rank + 1) * heads // context.size)
    mixed = mixed[:, own]
    return mixed if sinks is None else mixed * (total[:, own] - sinks).sigmoid()[..., None]


def read_rows(memory: Tensor, table: Tensor, dtype: torch.dtype, context: Parallel) -> Tensor:
    """All rows of the blocks in `table`, in order, of one KV head and one tensor: `[tokens, head_dim]` of `dtype`.
    `memory` `[blocks, 1, rows, row]` has this rank's."""
    rows = memory.shape[2]
    own = kernels.read_kv(memory, table, len(table) * rows, dtype)[:, 0]
    if context.size == 1:
        return own
    gathered = context.all_gather(own).view(len(table), rows, context.size, own.shape[1])
    return gathered.transpose(1, 2).reshape(-1, own.shape[1])


def gather_rows(
    memory: Tensor, table: Tensor, slots: Tensor, dtype: torch.dtype, context: Parallel
) -> tuple[Tensor, Tensor]:
    """The rows of all ranks in the blocks of `table`, as a cache `[1, blocks, 1, block_size, row]` of `dtype`; and
    `slots` of tokens in these blocks as slots there, or any valid ones for others. `memory` `[1, blocks, 1, rows, row]`
    has this rank's."""
    size = memory.shape[3] * context.size
    whole = read_rows(memory[0], table, dtype, context).view(1, len(table), 1, size, -1)
    number = torch.zeros(memory.shape[1], dtype=torch.int64, device=table.device)
    number[table] = torch.arange(len(table), device=table.device)
    return whole, number[(slots // size).clamp(min=0)] * size + slots % size
