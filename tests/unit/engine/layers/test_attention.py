"""The attention layers' view of a batch."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from quire.engine.distributed.communicator import Parallel
from quire.engine.layers import context_parallel
from quire.engine.layers.batch import AttentionMetadata, Batch, KVBlocks
from quire.engine.layers.chunked_attention import by_chunks
from quire.kernels import HostMetadata, StateSegments

CHUNK, BLOCK = 8, 4


def requests(counts: list[int], lengths: list[int], *, has_host: bool) -> AttentionMetadata:
    """Requests with blocks `10 * request, 10 * request + 1, …`."""
    return AttentionMetadata(
        slot_mapping=torch.zeros(sum(counts), dtype=torch.int64),
        block_tables=10 * torch.arange(len(counts))[:, None] + torch.arange(-(-max(lengths) // BLOCK)),
        sequence_lengths=torch.tensor(lengths),
        query_starts=torch.tensor([0, *counts]).cumsum(0),
        host=HostMetadata(np.array(counts), np.array(lengths), {}) if has_host else None,
    )


def attended(metadata: AttentionMetadata) -> list[tuple[int, list[int]]]:
    """For each request, its number of queries, and the places in the cache that the last of them attends to."""
    counts, tables = metadata.query_starts.diff().tolist(), metadata.block_tables.tolist()
    found = [
        (count, [BLOCK * table[token // BLOCK] + token % BLOCK for token in range(length)])
        for count, length, table in zip(counts, metadata.sequence_lengths.tolist(), tables, strict=True)
    ]
    host = metadata.host
    assert host is None or (host.counts.tolist(), host.lengths.tolist()) == (counts, metadata.sequence_lengths.tolist())
    return found


def expected(counts: list[int], lengths: list[int]) -> list[tuple[int, list[int]]]:
    """As `attended`, query by query: each attends to the tokens of its chunk up to itself."""
    found = list[tuple[int, list[int]]]()
    for request, (count, length) in enumerate(zip(counts, lengths, strict=True)):
        for position in range(length - count, length):
            begin = position // CHUNK * CHUNK
            places = [10 * BLOCK * request + token for token in range(begin, position + 1)]
            if position > max(begin, length - count):
                found[-1] = (found[-1][0] + 1, places)
            else:
                found.append((1, places))
    return found


@pytest.mark.parametrize("has_host", [False, True])
@pytest.mark.parametrize(
    "counts", [[1, 1, 1, 1, 1, 1], [1, 5, 8, 1, 16, 17], [1, 2, 1, 9, 7, 1]], ids=["decodes", "prompts", "mixed"]
)
def test_a_query_attends_to_its_chunk(counts: list[int], has_host: bool) -> None:
    """Also the first and the last of a chunk."""
    lengths = [1, 7, 8, 9, 16, 17]
    found = by_chunks(requests(counts, lengths, has_host=has_host), sum(counts), CHUNK, BLOCK)
    assert attended(found) == expected(counts, lengths)


def test_layers_of_a_group_may_attend_to_later_tokens_or_not() -> None:
    """Ranks that divide the tokens of blocks count the keys of each layer's own queries."""
    tokens = torch.arange(6)
    blocks: dict[int, KVBlocks | StateSegments] = {0: KVBlocks(tokens, torch.tensor([[0, 1]]))}
    starts = torch.tensor([0, 6])
    both_ways = Batch(tokens, tokens, starts[1:], starts, starts[:1], blocks, key_ends=torch.tensor([1, 5, 5, 5, 5, 6]))
    causal = replace(both_ways, key_ends=None)  # as `Decoder` has it: with the same shared results
    context = Parallel()
    context.size = 2
    for batch, own in ((both_ways, [1, 3, 3, 3, 3, 4]), (causal, [1, 2, 2, 2, 3, 4])):
        ends = context_parallel.own_metadata(batch, 0, 2, context).key_ends
        assert ends is not None
        assert ends.tolist() == own
