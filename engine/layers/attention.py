"""Self-attention over the paged KV cache, with the heads sharded over the ranks of a stage."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quire import kernels
from quire.engine.architecture import attention_spec, spec_parts
from quire.engine.config.engine_config import EngineConfig
from quire.engine.distributed.communicator import Parallel
from quire.engine.layers.batch import AttentionMetadata, Batch
from quire.engine.layers.from_spec import FromSpec
from quire.engine.layers.kv_cache import LayerCache
from quire.engine.layers.linear import Linear, divided
from quire.engine.layers.norm import AcrossHeadsNorm, PerHeadNorm, make_norm
from quire.engine.layers.rotary import Rotary
from quire.engine.layers.weight import Shard


class BlockIndexer(nn.Module):
    """Queries and keys of the selection that `quire.engine.architecture.attention_spec.BlockIndexerSpec` describes: a
    query for each of the rank's KV heads, and a key that all ranks have."""

    def __init__(self, spec: attention_spec.BlockIndexerSpec, own: FromSpec) -> None:
        """`own` has the parameters of the attention."""
        super().__init__()
        self._head_dim = spec.head_dim
        self.query = own.column_parallel("attention.indexer.query")
        self.key = own.column_parallel("attention.indexer.key")
        self.query_norm = make_norm(spec.norm, spec.head_dim)
        self.key_norm = make_norm(spec.norm, spec.head_dim)

    def forward(self, x: Tensor, slot_mapping: Tensor, cos_sin: Tensor, keys: Tensor) -> Tensor:
        """Write the tokens' keys to the cache `keys`; returns their queries `[tokens, kv_heads, head_dim]`."""
        query = self.query_norm(self.query(x).unflatten(-1, (-1, self._head_dim)))
        key = self.key_norm(self.key(x))[:, None]
        return kernels.rotary_write_kv(query, key, None, cos_sin, keys, slot_mapping)


class GroupIndexer(nn.Module):
    """Queries and keys of the selection that `quire.engine.architecture.attention_spec.GroupIndexerSpec` describes; all
    ranks have the same."""

    def __init__(self, spec: attention_spec.GroupIndexerSpec, rope: spec_parts.RopeSpec | None, own: FromSpec) -> None:
        """`own` has the parameters of the attention."""
        super().__init__()
        self._spec, self._rotary = spec, Rotary(rope, 0)
        self.inputs = own.column_parallel("attention.indexer.inputs")
        self.query_norm = make_norm(spec.norm, spec.head_dim)
        self.key_norm = make_norm(spec.norm, spec.head_dim)

    def forward(
        self, x: Tensor, positions: Tensor, metadata: AttentionMetadata, cos_sin: Tensor, keys: Tensor
    ) -> Tensor:
        """Write the tokens' keys, and those of groups that end with one of them, to the cache `keys`; returns the
        tokens' queries `[tokens, heads, head_dim]`."""
        spec, weight = self._spec, self.key_norm.weight
        assert isinstance(weight, Tensor)
        heads = torch.unflatten(self.inputs(x), -1, (-1, spec.head_dim))
        query, key = heads.split_with_sizes((spec.num_heads, 1), dim=1)
        query = self.query_norm(query)
        query, _ = kernels.rotary(query, query[:, :0], cos_sin)
        kernels.rotary_write_kv(key[:, :0], key, None, cos_sin[:, :0], keys, metadata.slot_mapping)
        places = torch.zeros(spec.size, spec.head_dim, dtype=torch.float32, device=x.device)  # all alike
        kernels.compress_tokens(
            *(keys, places, weight.float() + spec.norm.offset, spec.norm.eps),
            *(self._rotary(positions + 1 - spec.size), keys[:, :, :, spec.size - 1 :: spec.size]),
            *(metadata.slot_mapping, metadata.block_tables, metadata.sequence_lengths, metadata.query_starts),
            metadata.block_tables,
        )
        return query


class Attention(nn.Module):
    """Attention as described by `quire.engine.architecture.attention_spec.AttentionSpec`."""

    def __init__(self, spec: attention_spec.AttentionSpec, hidden_size: int, parallel: Parallel) -> None:
        super().__init__()
        self._spec = spec
        own = FromSpec(spec.parameters(hidden_size), parallel)
        self._widths = own.widths("attention.qkv")
        self.qkv, self.output = own.column_parallel("attention.qkv"), own.row_parallel("attention.output")
        query, *others = own.shards("attention.qkv")
        self.query_norm = head_norm(spec, query, parallel)
        self.key_norm = None if spec.kv_source is not None else head_norm(spec, others[0], parallel)
        self._value_norm = None if spec.value_norm is None else make_norm(spec.value_norm, spec.value_dim)
        self.sinks = own.weight("attention", "sinks") if spec.has_sinks else None
        self.indexer: BlockIndexer | GroupIndexer | None = None
        if isinstance(spec.indexer, attention_spec.BlockIndexerSpec):
            self.indexer = BlockIndexer(spec.indexer, own)
        elif spec.indexer is not None:
            self.indexer = GroupIndexer(spec.indexer, spec.rope, own)
        self._slopes = None
        if spec.alibi:
            heads = divided("", spec.num_heads, parallel)
            self._slopes = spec.alibi * alibi_slopes(spec.num_heads)[heads.start : heads.start + heads.length]

    @property
    def reads_input(self) -> Linear | None:
        """The layer that alone multiplies the input, if there is one."""
        return self.qkv if self.indexer is None else None

    def forward(
        self,
        x: Tensor | kernels.RoundedRows,
        batch: Batch,
        cos_sin: Tensor,
        cache: LayerCache,
        last_tokens: Tensor | None = None,
        added: Tensor | None = None,
    ) -> Tensor:
        """`[tokens, hidden_size]` → the same, or only the rows `last_tokens`, the last ones of the requests.

        `added` is added to queries, keys and values.

        Writes the keys and values of all tokens to this layer's `cache`, unless it is the cache of another layer.
        """
        spec, metadata, index_query = self._spec, batch.attention(cache.group), None
        memory, keys = cache.memory, cache.keys
        assert memory is not None
        if self.indexer is not None:
            assert isinstance(x, Tensor)
            assert keys is not None
            if isinstance(self.indexer, BlockIndexer):
                index_query = self.indexer(x, metadata.slot_mapping, cos_sin, keys)
            else:
                index_query = self.indexer(x, batch.positions, metadata, cos_sin, keys)
        qkv: Tensor = self.qkv(x)
        qkv = qkv if added is None else qkv + added
        query, *others = qkv.split_with_sizes(self._widths, dim=-1)
        if spec.kv_source is None:
            key = others.pop(0)
            value = torch.unflatten(key if spec.values_are_keys else others.pop(0), -1, (-1, spec.value_dim))
        else:
            key, value = query[:, :0], None  # no heads
        query, key = (torch.unflatten(part, -1, (-1, spec.head_dim)) for part in (query, key))
        gates = [torch.unflatten(part, -1, (-1, spec.gate_dim)) for part in others]
        if value is not None and self._value_norm is not None:
            value = self._value_norm(value)
        if value is not None and spec.value_dim < spec.head_dim:
            value = F.pad(value, (0, spec.head_dim - spec.value_dim))
        if spec.norm_after_rope:
            query, key = kernels.rotary(query, key, cos_sin)
            cos_sin = cos_sin[:, :0]
        query = query if self.query_norm is None else self.query_norm(query)
        key = key if self.key_norm is None else self.key_norm(key)
        if spec.clip:
            query, key = query.clamp(-spec.clip, spec.clip), key.clamp(-spec.clip, spec.clip)
            value = None if value is None else value.clamp(-spec.clip, spec.clip)
        query = scale_queries(query, batch.positions, spec.query_scale)
        if value is None:
            query, _ = kernels.rotary(query, key, cos_sin)
        else:
            query = kernels.rotary_write_kv(query, key, value, cos_sin, memory, metadata.slot_mapping)
        if last_tokens is not None:
            query, metadata = query[last_tokens], metadata.last_tokens()
            index_query = None if index_query is None else index_query[last_tokens]
            gates = [gate[last_tokens] for gate in gates]
        if spec.is_chunked and spec.window is not None:
            chunks = None if last_tokens is not None else batch.shared.chunks.get(cache.group)
            metadata = chunks or by_chunks(metadata, len(query), spec.window, memory.shape[3])
            if last_tokens is None:
                batch.shared.chunks[cache.group] = metadata
        if index_query is None:
            mixed = self._attend(query, metadata, memory)
        else:
            assert keys is not None
            mixed = self._attend_sparsely(query, index_query, metadata, memory, keys)
        if spec.value_dim < spec.head_dim:
            mixed = mixed[..., : spec.value_dim]
        for gate in gates:
            mixed = mixed * gate.sigmoid()
        out: Tensor = self.output(mixed.flatten(1))
        return out if spec.output_multiplier == 1.0 else out * spec.output_multiplier

    def _attend(self, query: Tensor, metadata: AttentionMetadata, memory: Tensor) -> Tensor:
        """`[tokens, heads, head_dim]` → the same."""
        spec = self._spec
        return kernels.paged_attention(
            query,
            memory,
            metadata.block_tables,
            metadata.sequence_lengths,
            metadata.query_starts,
            spec.scale,
            window=0 if spec.is_chunked else spec.window or 0,
            softcap=spec.softcap,
            sinks=None if self.sinks is None else self.sinks.float(),
            slopes=self._slopes,
            host=metadata.host,
        )

    def _attend_sparsely(
        self, query: Tensor, index_query: Tensor, metadata: AttentionMetadata, memory: Tensor, keys: Tensor
    ) -> Tensor:
        """Like `_attend`, but the queries of requests that are longer than the selection attend to it."""
        assert self._spec.indexer is not None
        attend = self._attend_to_blocks if isinstance(self.indexer, BlockIndexer) else self._attend_to_groups
        is_long = metadata.host_metadata().lengths > self._spec.indexer.top_k
        if not is_long.any():
            return self._attend(query, metadata, memory)
        mixed = torch.empty_like(query)
        for first, last, rows in metadata.runs(is_long):
            part = metadata.requests(first, last, rows)
            if is_long[first]:
                mixed[rows] = attend(query[rows], index_query[rows], part, memory, keys)
            else:
                mixed[rows] = self._attend(query[rows], part, memory)
        return mixed

    def _attend_to_blocks(
        self, query: Tensor, index_query: Tensor, metadata: AttentionMetadata, memory: Tensor, keys: Tensor
    ) -> Tensor:
        """Each KV head of a query attends to its own blocks. Nothing is read from the device."""
        spec, (tokens, heads), block_size = self._spec.indexer, index_query.shape[:2], memory.shape[3]
        assert isinstance(spec, attention_spec.BlockIndexerSpec)
        blocks = kernels.select_blocks(
            *(index_query, keys, metadata.block_tables, metadata.sequence_lengths, metadata.query_starts),
            *(spec.block_size, spec.num_blocks, spec.num_local_blocks),
        )
        number, request = torch.arange(tokens, device=query.device), metadata.request_of_tokens(tokens)
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
                *(grouped[rows].flatten(0, 1), by_head, slots.flatten(0, 1)),
                *(counts[rows].repeat_interleave(heads), self._spec.scale),
            )
            mixed[rows] = torch.unflatten(found, 0, (-1, heads)).flatten(1, 2)
        return mixed

    def _attend_to_groups(
        self, query: Tensor, index_query: Tensor, metadata: AttentionMetadata, memory: Tensor, keys: Tensor
    ) -> Tensor:
        """All heads of a query attend to the same groups. Nothing is read from the device."""
        spec = self._spec.indexer
        assert isinstance(spec, attention_spec.GroupIndexerSpec)
        weights = torch.ones(index_query.shape[:2], dtype=torch.float32, device=query.device)
        chosen = kernels.select_tokens(
            *(index_query, weights, keys[:, :, :, spec.size - 1 :: spec.size], metadata.block_tables),
            *(metadata.sequence_lengths, metadata.query_starts, spec.num_groups, spec.size),
        )
        slots, counts = tokens_of_groups(chosen, metadata, spec.size, memory.shape[3])
        return kernels.sparse_attention(query, memory, slots, counts, self._spec.scale)


def tokens_of_groups(chosen: Tensor, metadata: AttentionMetadata, size: int, block_size: int) -> tuple[Tensor, Tensor]:
    """The slots of the tokens of `chosen` groups `[tokens, groups]`, which are slots of groups of `size` tokens, and of
    those after the last complete group: `[tokens, (groups + 1) * size - 1]`; and how many of each token's are valid,
    `[tokens]`."""
    tokens, most = chosen.shape
    device, width = chosen.device, (most + 1) * size - 1
    number, owners = torch.arange(width, device=device), metadata.request_of_tokens(tokens)
    place = torch.arange(tokens, device=device)
    seen = (metadata.sequence_lengths[owners] - metadata.query_starts[owners + 1] + place + 1).clamp(min=1)
    in_groups = (seen // size).clamp(max=most) * size
    slots = chosen.new_empty(tokens, width)
    for rows in torch.split(place, max(1, attention_spec.SCORES_AT_ONCE // width)):
        of_groups = chosen[rows].repeat_interleave(size, dim=1) * size + number[: most * size] % size
        ends, counts = seen[rows, None], in_groups[rows, None]
        places = (ends - ends % size + number - counts).clamp(min=0).minimum(ends - 1)
        after = metadata.block_tables[owners[rows, None], places // block_size] * block_size + places % block_size
        slots[rows] = torch.where(number < counts, F.pad(of_groups, (0, size - 1)), after)
    return slots, in_groups + seen % size


def scale_queries(query: Tensor, positions: Tensor, spec: spec_parts.QueryScaleSpec | None) -> Tensor:
    """`[tokens, heads, head_dim]`, scaled by the tokens' positions `[tokens]`."""
    if spec is None:
        return query
    periods = (positions + spec.offset) // spec.every
    factors = 1 + spec.weight * torch.log1p(periods.float())
    return query * factors.to(query.dtype)[:, None, None]


def by_chunks(metadata: AttentionMetadata, num_queries: int, chunk: int, block_size: int) -> AttentionMetadata:
    """The same with the queries of each chunk of a request as a request of their own, which begins with the chunk.

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
            host = kernels.HostMetadata(host.counts, shorter, None if host.plans is None else {})
    else:
        counts, ends, plans = metadata.host_metadata()
        begins = ends - counts
        number = (ends - 1) // chunk - begins // chunk + 1  # chunks of each request
        request = np.repeat(np.arange(len(counts)), number)
        first = np.repeat(begins // chunk - number.cumsum() + number, number)
        chunk_numbers = first + np.arange(len(request))
        own_ends = np.minimum(ends[request], (chunk_numbers + 1) * chunk)
        own_counts = own_ends - np.maximum(begins[request], chunk_numbers * chunk)
        host = kernels.HostMetadata(own_counts, own_ends - chunk_numbers * chunk, None if plans is None else {})
        rows = metadata.block_tables[torch.from_numpy(request).to(device)]
        chunks = torch.from_numpy(chunk_numbers).to(device)
        lengths = torch.from_numpy(host.lengths).to(device)
        query_starts = F.pad(torch.from_numpy(own_counts.cumsum()), (1, 0)).to(device)
    columns = chunks[:, None] * (chunk // block_size) + torch.arange(width, device=device)
    tables = rows.gather(1, columns.clamp(max=rows.shape[1] - 1))
    return AttentionMetadata(metadata.slot_mapping, tables, lengths, query_starts, host)


def attention_config(config: EngineConfig) -> kernels.AttentionConfig:
    """What a rank requires of `kernels.paged_attention`: the kinds of the layers of the model, and of a drafter, that
    use it, with the rank's sizes."""
    kinds = (
        _kernel_layer(layer.attention, each.parallel.tensor_parallel_size)
        for each in (config.with_drafter if config.cache.num_blocks else ())
        for layer in each.model.architecture.layers
        if isinstance(layer.attention, attention_spec.AttentionSpec | attention_spec.MLASpec)
    )
    return kernels.AttentionConfig(
        tuple(dict.fromkeys(kinds)),
        config.cache.block_size,
        kernels.kv_cache_dtype(config.cache.dtype),
        config.model.attention_backend,
    )


def _kernel_layer(spec: attention_spec.AttentionSpec | attention_spec.MLASpec, tp: int) -> kernels.AttentionLayer:
    num_tensors, kv_heads, size = spec.kv_shape(tp)
    if isinstance(spec, attention_spec.MLASpec):
        heads, is_mla = spec.num_heads // tp, num_tensors == 1
        window = spec.window or 0
        return kernels.AttentionLayer(
            heads, kv_heads, size, spec.scale, window, is_mla=is_mla, has_sinks=spec.has_sinks
        )
    return kernels.AttentionLayer(
        *(spec.num_heads // tp, kv_heads, size, spec.scale, 0 if spec.is_chunked else spec.window or 0, spec.softcap),
        has_sinks=spec.has_sinks,
        has_own_sinks=spec.has_own_sinks,
        has_alibi=bool(spec.alibi),
        num_biases=spec.num_biases,
    )


def head_norm(spec: attention_spec.AttentionSpec, rows: Shard, parallel: Parallel) -> nn.Module | None:
    """The normalization of this rank's queries or keys, which are these rows of their matrix."""
    shard = Shard(rows.shape[:1], rows.start, rows.length, part=rows.part)
    if spec.qk_norm is None:
        return None
    match spec.qk_norm_over:
        case "head":
            return make_norm(spec.qk_norm, spec.head_dim)
        case "each head":
            return PerHeadNorm(spec.qk_norm, shard, spec.head_dim)
        case "all heads":
            return AcrossHeadsNorm(spec.qk_norm, shard, parallel)


def alibi_slopes(heads: int) -> Tensor:
    """Float32 `[heads]`: powers of 2^(-8/n) for the first n heads, n a power of 2; the remaining heads get values in
    between.

    Source: Press et al. 2022, and the authors' code for head counts that are not a power of 2.
    """
    even = 1 << (heads.bit_length() - 1)
    powers = torch.arange(1, even + 1, dtype=torch.float32) * (-8.0 / even)
    between = (2 * torch.arange(heads - even, dtype=torch.float32) + 1) * (-4.0 / even)
    return torch.cat((powers, between)).exp2()
