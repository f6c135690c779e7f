"""Attention to a window of tokens and to compressed entries (DeepSeek-V4, 2026), with the heads sharded over the ranks
of a stage.

A layer's plane of the KV cache has rows of one vector, which is key and value of all heads. In the blocks of a request
in the first group of layers, which are pages, each row belongs to a token, and the rows are followed by the
compressors' inputs for these tokens. In the blocks of the second group, each row belongs to an entry. So one list of
rows has everything that a query attends to: the tokens of its window, then its entries. The compressors' inputs are
kept as long as an entry may be computed from them, and are written again with a token that is computed again.

In the cache and in queries, a head's rotary features come first, with pairs in halves. Compressors and results have
them last, with pairs side by side, as in the checkpoint.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from quire import kernels
from quire.engine.architecture import attention_spec
from quire.engine.distributed.communicator import Parallel
from quire.engine.layers.batch import AttentionMetadata, Batch
from quire.engine.layers.from_spec import FromSpec
from quire.engine.layers.kv_cache import CompressedCache, LayerCache
from quire.engine.layers.linear import GroupedLinear, Linear
from quire.engine.layers.norm import make_norm
from quire.engine.layers.rotary import Rotary


class Compressor(nn.Module):
    """Computes entries of `head_dim` features, as described by
    `quire.engine.architecture.attention_spec.CompressorSpec`. Replicated on all ranks."""

    def __init__(self, spec: attention_spec.CompressorSpec, own: FromSpec, module: str, head_dim: int) -> None:
        """`own` has the parameters of the attention, and this is its module `module`."""
        super().__init__()
        self.inputs_width, self._eps = 2 * spec.width(head_dim), spec.norm.eps
        self.inputs = own.column_parallel(f"{module}.inputs")
        self.position_bias = own.weight(module, "position_bias")
        self.norm = make_norm(spec.norm, head_dim)

    def forward(
        self, inputs: Tensor, cos_sin: Tensor, cache: Tensor, windows: AttentionMetadata, entry_tables: Tensor
    ) -> None:
        """Write the entries of the groups that end with one of the step's tokens to `cache`, from the tokens' `inputs`
        in the KV cache. See `kernels.compress_tokens`."""
        weight = self.norm.weight
        assert isinstance(weight, Tensor)
        kernels.compress_tokens(
            inputs,
            self.position_bias,
            weight,
            self._eps,
            cos_sin,
            cache,
            windows.slot_mapping,
            *windows.paged,
            entry_tables,
        )


class EntryIndexer(nn.Module):
    """Selects the entries of each query, as described by `quire.engine.architecture.attention_spec.EntryIndexerSpec`.

    Its weights are replicated: all ranks select the same entries.
    """

    def __init__(self, spec: attention_spec.CompressedAttentionSpec, own: FromSpec) -> None:
        """`own` has the parameters of the attention."""
        super().__init__()
        assert spec.compressor is not None
        assert spec.indexer is not None
        self._spec, self._ratio = spec.indexer, spec.compressor.ratio
        self.compressor = Compressor(spec.compressor, own, "attention.indexer.compressor", spec.indexer.head_dim)
        self.query = own.column_parallel("attention.indexer.query")
        self.weights = own.replicated("attention.indexer.weights")
        self._scale = (spec.indexer.num_heads * spec.indexer.head_dim) ** -0.5

    def forward(self, x: Tensor, latent_query: Tensor, batch: Batch, cos_sin: Tensor, cache: LayerCache) -> Tensor:
        """The slots in `CompressedCache.keys` of the selected entries, `[tokens, top_k]`. The first ones are valid, up
        to the number of entries that a token sees."""
        assert cache.compressed is not None
        assert cache.compressed.keys is not None
        assert cache.entries_group is not None
        keys, entries = cache.compressed.keys, batch.attention(cache.entries_group)
        adapters = batch.adapters_of()
        query = self.query(latent_query, adapters).unflatten(-1, (self._spec.num_heads, -1))
        query, _ = kernels.rotary(query, query[:, :0], cos_sin)
        weights = self.weights.logits(x, adapters) * self._scale
        return kernels.select_tokens(query, weights, keys, *entries.paged, self._spec.top_k, self._ratio)


class CompressedAttention(nn.Module):
    """Attention as described by `quire.engine.architecture.attention_spec.CompressedAttentionSpec`."""

    def __init__(self, spec: attention_spec.CompressedAttentionSpec, hidden_size: int, parallel: Parallel) -> None:
        super().__init__()
        self._spec = spec
        self._heads, groups = spec.num_heads // parallel.size, spec.output_groups // parallel.size
        own = FromSpec(spec.parameters(hidden_size), parallel)
        self.down, self.query = own.column_parallel("attention.down"), own.column_parallel("attention.query")
        self.query_norm = make_norm(spec.norm, spec.q_lora_rank)
        self._head_norm = make_norm(spec.query_norm, spec.head_dim)
        self.key_norm = make_norm(spec.norm, spec.head_dim)
        self.sinks = own.weight("attention", "sinks")
        self.group_output = GroupedLinear(own.weight("attention.group_output"), groups)
        self.group_output.may_have_pool = False  # not even if this rank has only one of the groups
        self.output = own.row_parallel("attention.output")
        self.compressor = self.indexer = None
        if spec.compressor is not None:
            self.compressor = Compressor(spec.compressor, own, "attention.compressor", spec.head_dim)
        if spec.indexer is not None:
            self.indexer = EntryIndexer(spec, own)
        self._rotary = Rotary(spec.rope, 0)

    @property
    def reads_input(self) -> Linear | None:
        """The layer that alone multiplies the input, if there is one."""
        return self.down if self.compressor is None else None

    def forward(self, x: Tensor | kernels.RoundedRows, batch: Batch, cos_sin: Tensor, cache: LayerCache) -> Tensor:
        """`[tokens, hidden_size]` → the same; writes the tokens' rows, and the entries that they complete."""
        spec, kept, windows = self._spec, cache.compressed, batch.attention(cache.group)
        assert kept is not None
        adapters = batch.adapters_of()
        latent_query, key = self.down(x, adapters).split_with_sizes((spec.q_lora_rank, spec.head_dim), dim=-1)
        latent_query = self.query_norm(latent_query)
        query = self._head_norm(self.query(latent_query, adapters).unflatten(-1, (self._heads, spec.head_dim)))
        key = self.key_norm(key)[:, None]
        query = kernels.rotary_write_kv(query, key, None, cos_sin, kept.tokens, windows.slot_mapping)
        chosen = None
        if self.compressor is not None:
            assert isinstance(x, Tensor)
            self._compress(x, batch, cache)
            if self.indexer is not None:
                chosen = self.indexer(x, latent_query, batch, cos_sin, cache)
        mixed = self._attend(query, batch, cache, chosen)
        cos, sin = cos_sin.chunk(2, dim=-1)
        mixed, _ = kernels.rotary(mixed, mixed[:, :0], torch.cat((cos, -sin), dim=-1))
        out: Tensor = self.output(self.group_output(_rotary_last(mixed, spec.rope.dim).flatten(1)), adapters)
        return out

    def _compress(self, x: Tensor, batch: Batch, cache: LayerCache) -> None:
        """Write the compressors' inputs for the tokens, and the entries of the groups that end with one of them."""
        spec, kept, windows = self._spec, cache.compressed, batch.attention(cache.group)
        assert spec.compressor is not None
        assert self.compressor is not None
        assert kept is not None
        assert kept.inputs is not None
        compressors = [(self.compressor, kept.memory)]
        if self.indexer is not None:
            assert kept.keys is not None
            compressors.append((self.indexer.compressor, kept.keys))
        new = torch.cat([each.inputs(x, batch.adapters_of()) for each, _ in compressors], dim=-1)[:, None]
        nothing, no_turns = new[:, :0], new.new_empty(len(new), 0, dtype=torch.float32)
        kernels.rotary_write_kv(nothing, new, None, no_turns, kept.inputs, windows.slot_mapping)
        cos_sin = self._rotary(batch.positions + 1 - spec.compressor.ratio)
        inputs = kept.inputs.split_with_sizes([each.inputs_width for each, _ in compressors], dim=-1)
        assert cache.entries_group is not None
        entry_tables = batch.attention(cache.entries_group).block_tables
        for (compressor, memory), own in zip(compressors, inputs, strict=True):
            compressor(own, cos_sin, memory, windows, entry_tables)

    def _attend(self, query: Tensor, batch: Batch, cache: LayerCache, chosen: Tensor | None) -> Tensor:
        """`[tokens, heads, head_dim]` → the same. `chosen` are the slots of the selected entries, `[tokens, top_k]`."""
        spec, kept, windows, device = self._spec, cache.compressed, batch.attention(cache.group), query.device
        assert kept is not None
        size = kept.block_size
        most = 0 if spec.compressor is None else spec.max_entries(int(windows.host_metadata().lengths.max(initial=1)))
        requests, sides = windows.sequence_of_tokens(len(query)), kept.memory.expand(2, *kept.memory.shape[1:])
        sinks, mixed = self.sinks.float(), torch.empty_like(query)
        window, number = torch.arange(spec.window, device=device), torch.arange(most, device=device)
        places = torch.arange(spec.window + most, device=device)
        size_of_part = max(1, attention_spec.SCORES_AT_ONCE // len(places))
        for tokens in torch.split(torch.arange(len(query), device=device), size_of_part):
            at, owner = batch.positions[tokens, None], requests[tokens, None]
            seen = (at + 1).clamp(max=spec.window)  # tokens of the window, [tokens, 1]
            positions = (at - seen + 1 + window).clamp(max=at)
            slots = kept.rows_of(windows.block_tables[owner, positions // size] * size + positions % size)
            counts = seen
            if spec.compressor is not None and most:
                if chosen is None:
                    assert cache.entries_group is not None
                    tables = batch.attention(cache.entries_group).block_tables
                    ends = ((number + 1) * spec.compressor.ratio - 1).expand(len(tokens), -1)
                    columns = (ends // size).clamp(max=tables.shape[1] - 1)
                    entries = kept.entry_slots(tables[owner, columns], ends)
                else:
                    entries = kept.entries_of(chosen[tokens, :most])
                counts = seen + ((at + 1) // spec.compressor.ratio).clamp(max=most)
                slots = torch.cat((slots, entries), dim=1)
                following = (spec.window + places - seen).clamp(max=len(places) - 1)
                slots = slots.gather(1, torch.where(places < seen, places, following))
            mixed[tokens] = kernels.sparse_attention(query[tokens], sides, slots, counts[:, 0], spec.scale, sinks)
        return mixed


def compressed_cache(
    spec: attention_spec.CompressedAttentionSpec,
    memory: Tensor,
    keys: Tensor | None,
    block_size: int,
    blocks_per_page: int,
) -> CompressedCache:
    """The cache of a layer in a plane `memory`, and one for the keys of its indexer."""
    tokens = kernels.page_rows(memory, blocks_per_page, 0, block_size, spec.head_dim)
    inputs = None
    if spec.compressor is not None:
        first = block_size * spec.head_dim
        inputs = kernels.page_rows(memory, blocks_per_page, first, block_size, spec.inputs_width)
    return CompressedCache(memory, tokens, inputs, keys)


def _rotary_last(x: Tensor, rotary: int) -> Tensor:
    """Our features in the checkpoint's order."""
    first, second, plain = x.tensor_split((rotary // 2, rotary), dim=-1)
    return torch.cat((plain, torch.stack((first, second), dim=-1).flatten(-2)), dim=-1)
