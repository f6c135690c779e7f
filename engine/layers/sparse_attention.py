"""Attention to the tokens that an indexer selects."""

from __future__ import annotations

import torch
from torch import Tensor

from quire import kernels
from quire.engine.architecture.attention_spec import AttentionSpec, BlockIndexerSpec
from quire.engine.distributed.communicator import Parallel
from quire.engine.layers.attention import Attention
from quire.engine.layers.batch import AttentionMetadata, Batch
from quire.engine.layers.block_indexer import BlockIndexer
from quire.engine.layers.from_spec import FromSpec
from quire.engine.layers.group_indexer import GroupIndexer
from quire.engine.layers.kv_cache import LayerCache


class SparseAttention(Attention):
    """Queries of requests that are longer than the selection attend to it, all others to all tokens."""

    def __init__(self, spec: AttentionSpec, hidden_size: int, parallel: Parallel) -> None:
        super().__init__(spec, hidden_size, parallel)
        assert spec.indexer is not None
        own, self._top_k = FromSpec(spec.parameters(hidden_size), parallel), spec.indexer.top_k
        self.indexer: BlockIndexer | GroupIndexer
        if isinstance(spec.indexer, BlockIndexerSpec):
            self.indexer = BlockIndexer(spec.indexer, own)
        else:
            self.indexer = GroupIndexer(spec.indexer, spec.rope, own)

    @property
    def reads_input(self) -> None:
        """None: the indexer reads it, too."""

    def forward(
        self,
        x: Tensor | kernels.RoundedRows,
        batch: Batch,
        cos_sin: Tensor,
        cache: LayerCache,
        last_tokens: Tensor | None = None,
    ) -> Tensor:
        """See `Attention`; also writes the tokens' keys of the indexer."""
        assert isinstance(x, Tensor)
        index_query = self.indexer(x, batch, cos_sin, cache)
        query, gate = self._write(self.qkv(x, batch.adapters_of()), batch, cos_sin, cache)
        if last_tokens is not None:
            query, index_query = query[last_tokens], index_query[last_tokens]
            gate = None if gate is None else gate[last_tokens]
        metadata = self._metadata(batch, cache, last_tokens)
        mixed = self._attend_sparsely(query, index_query, metadata, cache)
        return self._result(mixed, gate, batch.adapters_of(last_tokens))

    def _attend_sparsely(
        self, query: Tensor, index_query: Tensor, metadata: AttentionMetadata, cache: LayerCache
    ) -> Tensor:
        """`[tokens, heads, head_dim]` → the same."""
        is_long = metadata.host_metadata().lengths > self._top_k
        if not is_long.any():
            return self._attend(query, metadata, cache)
        mixed = torch.empty_like(query)
        for first, last, rows in metadata.runs(is_long):
            part = metadata.sequences(first, last, rows)
            if is_long[first]:
                mixed[rows] = self.indexer.attend(query[rows], index_query[rows], part, cache, self._spec.scale)
            else:
                mixed[rows] = self._attend(query[rows], part, cache)
        return mixed
