"""Attention to the tokens of a query's own chunk (Llama 4)."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from quire.engine.architecture.attention_spec import AttentionSpec
from quire.engine.distributed.communicator import Parallel
from quire.engine.layers.attention import Attention
from quire.engine.layers.batch import AttentionMetadata, Batch
from quire.engine.layers.kv_cache import LayerCache
from quire.kernels import HostMetadata


class ChunkedAttention(Attention):
    """To the kernel, the queries of each chunk are a sequence of their own, which has no window."""

    def __init__(self, spec: AttentionSpec, hidden_size: int, parallel: Parallel) -> None:
        super().__init__(spec, hidden_size, parallel)
        assert spec.window is not None
        self._chunk, self._window = spec.window, 0

    def _metadata(self, batch: Batch, cache: LayerCache, last_tokens: Tensor | None) -> AttentionMetadata:
        assert cache.memory is not None
        block_size = cache.memory.shape[3]
        metadata = super()._metadata(batch, cache, last_tokens)
        if last_tokens is not None:
            return by_chunks(metadata, len(last_tokens), self._chunk, block_size)
        shared = batch.shared.chunks
        if cache.group not in shared:
            shared[cache.group] = by_chunks(metadata, len(batch.positions), self._chunk, block_size)
        return shared[cache.group]


def by_chunks(metadata: AttentionMetadata, num_queries: int, chunk: int, block_size: int) -> AttentionMetadata:
    """The same with the queries of each chunk of a request as a sequence of their own, which begins with the chunk.

    `chunk` is a multiple of `block_size`. With one query for each request, nothing is read from the device.
    """
    width, device = -(-chunk // block_size), metadata.block_tables.device
    if num_queries == len(metadata.sequence_lengths):
        rows, host, query_starts = metadata.block_tables, metadata.host, metadata.query_starts
        chunks = (metadata.sequence_lengths - 1).clamp(min=0) // chunk
        lengths = metadata.sequence_lengths - chunks * chunk
        if host is not None:  # with plans, the lengths are exact, else at least the true ones
            starts = (host.lengths - 1).clip(0) // chunk * chunk
            shorter = np.minimum(host.lengths, chunk) if host.plans is None else host.lengths - starts
            host = HostMetadata(host.counts, shorter, None if host.plans is None else {})
    else:
        counts, ends, plans = metadata.host_metadata()
        begins = ends - counts
        number = (ends - 1) // chunk - begins // chunk + 1  # chunks of each request
        request = np.repeat(np.arange(len(counts)), number)
        first = np.repeat(begins // chunk - number.cumsum() + number, number)
        chunk_numbers = first + np.arange(len(request))
        own_ends = np.minimum(ends[request], (chunk_numbers + 1) * chunk)
        own_counts = own_ends - np.maximum(begins[request], chunk_numbers * chunk)
        host = HostMetadata(own_counts, own_ends - chunk_numbers * chunk, None if plans is None else {})
        rows = metadata.block_tables[torch.from_numpy(request).to(device)]
        chunks = torch.from_numpy(chunk_numbers).to(device)
        lengths = torch.from_numpy(host.lengths).to(device)
        query_starts = F.pad(torch.from_numpy(own_counts.cumsum()), (1, 0)).to(device)
    columns = chunks[:, None] * (chunk // block_size) + torch.arange(width, device=device)
    tables = rows.gather(1, columns.clamp(max=rows.shape[1] - 1))
    return metadata._replace(block_tables=tables, sequence_lengths=lengths, query_starts=query_starts, host=host)
