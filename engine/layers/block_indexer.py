"""Attention to selected blocks of tokens (MiniMax-M3, 2026)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from quire import kernels
from quire.engine.architecture import attention_spec
from quire.engine.architecture.attention_spec import BlockIndexerSpec
from quire.engine.layers.batch import AttentionMetadata, Batch
from quire.engine.layers.from_spec import FromSpec
from quire.engine.layers.kv_cache import LayerCache
from quire.engine.layers.norm import make_norm


class BlockIndexer(nn.Module):
    """Queries and keys of the selection that `quire.engine.architecture.attention_spec.BlockIndexerSpec` describes: a
    query for each of the rank's KV heads, and a key that all ranks have."""

    def __init__(self, spec: BlockIndexerSpec, own: FromSpec) -> None:
        """`own` has the parameters of the attention."""
        super().__init__()
        self._spec = spec
        self.query = own.column_parallel("attention.indexer.query")
        self.key = own.column_parallel("attention.indexer.key")
        self.query_norm = make_norm(spec.norm, spec.head_dim)
        self.key_norm = make_norm(spec.norm, spec.head_dim)

    def forward(self, x: Tensor, batch: Batch, cos_sin: Tensor, cache: LayerCache) -> Tensor:
        """Write the tokens' keys to the cache; returns their queries `[tokens, kv_heads, head_dim]`."""
        assert cache.keys is not None
        adapters = batch.adapters_of()
        query = self.query_norm(self.query(x, adapters).unflatten(-1, (-1, self._spec.head_dim)))
        key = self.key_norm(self.key(x, adapters))[:, None]
        return kernels.rotary_write_kv(query, key, None, cos_sin, cache.keys, batch.attention(cache.group).slot_mapping)

    def attend(
        self, query: Tensor, index_query: Tensor, metadata: AttentionMetadata, cache: LayerCache, scale: float
    ) -> Tensor:
        """Each KV head of a query attends to its own blocks. Nothing is read from the device."""
        memory, keys = cache.memory, cache.keys
        assert memory is not None
        assert keys is not None
        spec, (tokens, heads), block_size = self._spec, index_query.shape[:2], memory.shape[3]
        blocks = kernels.select_blocks(
            index_query, keys, *metadata.paged, spec.block_size, spec.num_blocks, spec.num_local_blocks
        )
        number, request = torch.arange(tokens, device=query.device), metadata.sequence_of_tokens(tokens)
        positions = metadata.sequence_lengths[request] - metadata.query_starts[request + 1] + number
        before = (positions // spec.block_size + 1 - spec.num_blocks).clamp(min=0)  # blocks that are not selected
        counts = (positions + 1 - before * spec.block_size).clamp(min=1)
        offsets = torch.arange(spec.block_size, device=query.device)
        by_head, step = kernels.heads_as_blocks(memory)
        head = torch.arange(heads, device=query.device)[:, None]
        grouped, mixed = torch.unflatten(query, 1, (heads, -1)), torch.empty_like(query)
        size = max(1, attention_spec.SCORES_AT_ONCE // (heads * spec.top_k))
        for start in range(0, tokens, size):
            rows = slice(start, start + size)
            places = (blocks[rows, :, :, None] * spec.block_size + offsets).flatten(2)  # [rows, heads, top_k]
            places = places.clamp(max=metadata.block_tables.shape[1] * block_size - 1)
            pages = metadata.block_tables[request[rows, None, None], places // block_size]
            slots = (pages * step + head) * block_size + places % block_size
            found = kernels.sparse_attention(
                grouped[rows].flatten(0, 1), by_head, slots.flatten(0, 1), counts[rows].repeat_interleave(heads), scale
            )
            mixed[rows] = torch.unflatten(found, 0, (-1, heads)).flatten(1, 2)
        return mixed
