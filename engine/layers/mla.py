"""Multi-head latent attention (DeepSeek-V2, 2024), with the heads sharded over the ranks of a stage.

A token's row in the cache holds its rotary key, which all heads share, and its latent, from which a matrix computes
every head's plain key and value. There are two forms. The *absorbed* form attends in the latent space: the matrix is
applied to queries and results, and all heads read one row of the cache; it is cheaper for few queries. The *plain* form
first computes keys and values of all heads; it is cheaper for many queries. Both give the same result except for
rounding.

With sparse attention (DeepSeek-V3.2, 2025), the queries of requests that are longer than the selection attend to the
selected rows, in the latent space. Shorter requests attend to all rows, as without it.

An indexer with a pool (GLM-5.3, 2026) keeps a token's key and gates until its group is complete. Then the group's key
replaces the last token's own, which nothing else needs: when a token of the group is computed again, so are the tokens
after it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quire import kernels
from quire.engine.architecture import attention_spec
from quire.engine.distributed.communicator import Parallel
from quire.engine.layers import context_parallel
from quire.engine.layers.batch import AttentionMetadata, Batch, Selection
from quire.engine.layers.from_spec import FromSpec
from quire.engine.layers.group_indexer import tokens_of_groups
from quire.engine.layers.head_changes import scale_queries
from quire.engine.layers.kv_cache import LayerCache
from quire.engine.layers.linear import ColumnParallelLinear, Linear
from quire.engine.layers.norm import RMSNorm, make_norm

Ints = npt.NDArray[np.int64]
_ABSORBED, _PLAIN, _SPARSE, _GATHERED = range(4)
"""How a request's attention is computed. `_GATHERED`: sparse attention to the rows of all ranks that divide them, which
are gathered."""


class PerHeadUp(ColumnParallelLinear):
    """Projects the latent to each head's plain key and value; never packed, as it is applied from both sides."""

    has_earlier_rows = True

    @property
    def may_be_quantized(self) -> bool:
        return False

    def pack(self, quantization: kernels.Quantization | None) -> None:
        """Do nothing: see above."""

    def slots(self, adapters: kernels.AdapterRows | None) -> Tensor | None:
        """The slot of each row; the number of slots: none. None: no adapter changes the product of any."""
        pool = self.pool
        if adapters is None or not adapters.has_adapters or pool is None or not len(pool.a):
            return None
        slots = adapters.slots()
        return torch.where(slots < 0, len(pool.slots), slots)

    def changes(self, slots: Tensor, heads: int, dtype: torch.dtype) -> Iterator[tuple[slice, UpChanges]]:
        """The changes by the adapters of rows, of some rows at a time. Nothing is read from the device."""
        pool = self.pool
        assert pool is not None
        number = torch.arange(pool.largest_rank, device=slots.device)
        size = max(1, attention_spec.KEYS_AND_VALUES_AT_ONCE // max(1, len(number) * pool.b.shape[1]))
        for start in range(0, len(slots), size):
            rows = slice(start, start + size)
            own, has_any = slots[rows].clamp(max=len(pool.slots) - 1), slots[rows, None] < len(pool.slots)
            first, ranks = pool.slots[own, 0, :, None].unbind(1)
            is_own = (number < ranks) & has_any
            places = torch.where(is_own, first + number, 0)
            vectors = pool.vectors[own]
            has_vector, vectors = has_any & (vectors >= 0)[:, None], vectors.clamp(min=0)
            scale, bias = (
                None
                if each is None
                else torch.unflatten(torch.where(has_vector, each[vectors], neutral).to(dtype), 1, (heads, -1))
                for each, neutral in ((pool.scale, 1.0), (pool.bias, 0.0))
            )
            a, b = (each[places].to(dtype) for each in (pool.a, pool.b))
            yield rows, UpChanges(a.where(is_own[..., None], 0.0), torch.unflatten(b, 2, (heads, -1)), scale, bias)

    def changed(self, x: Tensor, rows: Tensor, slots: Tensor, heads: slice, width: int) -> Tensor:
        """The product `x` of `rows` for these heads of `width` features each, changed in place."""
        assert self.pool is not None
        own, num_slots = slice(heads.start * width, heads.stop * width), len(self.pool.slots)
        b, scale, bias = (
            None if each is None else each[:, own].contiguous()
            for each in (self.pool.b, self.pool.scale, self.pool.bias)
        )
        assert b is not None
        bounds = self.pool.bounds.clamp(max=x.shape[1])
        pool = replace(self.pool, b=b, widths=(x.shape[1],), bounds=bounds, scale=scale, bias=bias)
        adapters = kernels.AdapterRows.of(torch.where(slots < num_slots, slots, -1), num_slots)
        kernels.add_low_rank(x, rows, pool, adapters)
        return x


class UpChanges(NamedTuple):
    """The changes of `PerHeadUp` by the adapter of each row."""

    a: Tensor
    """`[rows, ranks, latent_dim]`"""
    b: Tensor
    """`[rows, ranks, heads, plain_dim + value_dim]`"""
    scale: Tensor | None
    """`[rows, heads, plain_dim + value_dim]`, factors of the changed product."""
    bias: Tensor | None
    """The same shape: what is added in the end. Of keys it changes all scores of a query alike, so nothing."""


class Indexer(nn.Module):
    """Selects the tokens that queries attend to, as described by
    `quire.engine.architecture.attention_spec.IndexerSpec`.

    Its weights are replicated: all ranks select the same tokens.
    """

    def __init__(self, spec: attention_spec.IndexerSpec, own: FromSpec, top_k: int) -> None:
        """`own` has the parameters of the attention."""
        super().__init__()
        self._spec, self._top_k = spec, top_k
        self.query = own.column_parallel("attention.indexer.query")
        self.key = own.column_parallel("attention.indexer.key")
        self.gate = self.position_bias = None
        if spec.pool > 1:
            self.gate = own.replicated("attention.indexer.gate")
            self.position_bias = own.weight("attention.indexer", "position_bias")
        self.key_norm = make_norm(spec.norm, spec.head_dim)
        self.weights = own.replicated("attention.indexer.weights")
        self._scale = (spec.num_heads * spec.head_dim) ** -0.5

    def forward(self, x: Tensor, latent_query: Tensor, batch: Batch, cos_sin: Tensor, cache: LayerCache) -> Selection:
        """Write the tokens' rows to the cache, and select the tokens to attend to, if a request is longer than
        top_k."""
        pool, top_k, metadata, rows = self._spec.pool, self._top_k, batch.attention(cache.group), cache.keys
        assert rows is not None
        adapters = batch.adapters_of()
        query = self.query(latent_query, adapters).unflatten(-1, (self._spec.num_heads, -1))
        key = self.key_norm(self.key(x, adapters))
        key = key if self.gate is None else torch.cat((key, self.gate.logits(x, adapters).to(key.dtype)), dim=-1)
        query = kernels.rotary_write_kv(query, key[:, None], None, cos_sin, rows, metadata.slot_mapping)
        if batch.shares is not None:
            assert pool == 1
            batch.shares.exchange(rows, cache.group)
        keys = rows
        if self.position_bias is not None:
            keys = rows[:, :, :, pool - 1 :: pool, : self._spec.head_dim]
            kernels.compress_tokens(
                rows,
                self.position_bias,
                None,  # no norm
                0.0,
                cos_sin[:, :0],  # no rotation
                keys,
                metadata.slot_mapping,
                *metadata.paged,
                metadata.block_tables,
            )
        if metadata.host_metadata().lengths.max() <= top_k:
            return Selection()
        weights = self.weights.logits(x, adapters) * self._scale
        chosen = kernels.select_tokens(query, weights, keys, *metadata.paged, top_k // pool, pool)
        if pool > 1:
            return Selection(*tokens_of_groups(chosen, metadata, pool, rows.shape[3]))
        return Selection(chosen, (batch.positions + 1).clamp(max=top_k))


class MLA(nn.Module):
    """Attention as described by `quire.engine.architecture.attention_spec.MLASpec`."""

    def __init__(self, spec: attention_spec.MLASpec, hidden_size: int, parallel: Parallel) -> None:
        super().__init__()
        self._spec, self._heads, self._context = spec, spec.num_heads // parallel.size, parallel.context
        own = FromSpec(spec.parameters(hidden_size), parallel)
        self.query_norm = None if spec.q_lora_rank is None else make_norm(spec.norm, spec.q_lora_rank)
        self.down, self.query = own.column_parallel("attention.down"), own.column_parallel("attention.query")
        if isinstance(self.query_norm, RMSNorm) and spec.indexer is None and spec.output_gate != "queries":
            self.query_norm.feed(self.query)
        self.latent_norm = make_norm(spec.norm, spec.kv_lora_rank)
        self.rotary_norm = None if spec.rotary_norm is None else make_norm(spec.rotary_norm, spec.rope.dim)
        up = own.column_parallel("attention.up", PerHeadUp)
        assert isinstance(up, PerHeadUp)
        self.up = up
        self.up.may_have_new_bias = not spec.has_sinks  # of keys, it would change the weight of the sink
        self.gate = own.column_parallel("attention.gate") if spec.gate_dim else None
        self.sinks = own.weight("attention", "sinks") if spec.has_sinks else None
        self.output = own.row_parallel("attention.output")
        self.indexer = None
        if spec.indexer is not None:
            assert spec.top_k is not None
            self.indexer = Indexer(spec.indexer, own, spec.top_k)
        # Saving of the plain form per query; each key costs the computation of its keys and values.
        cheaper = 2 * (spec.kv_lora_rank + spec.rope.dim) - 2 * spec.head_dim
        self._plain_from = spec.kv_lora_rank * (spec.qk_nope_head_dim + spec.v_head_dim) // max(cheaper, 1)
        heads = self._heads * self._context.size
        gathered = attention_spec.GATHERED_AT_ONCE // (heads * (spec.kv_lora_rank + spec.rope.dim))
        self._absorbed_at_once = max(1, gathered) if self._context.size > 1 else sys.maxsize

    @property
    def reads_input(self) -> Linear | None:
        """The layer that alone multiplies the input, if there is one."""
        others = self.gate is not None or self.indexer is not None
        return None if self.query_norm is None or others else self.down

    def forward(self, x: Tensor | kernels.RoundedRows, batch: Batch, cos_sin: Tensor, cache: LayerCache) -> Tensor:
        """`[tokens, hidden_size]` → the same; writes the tokens' rows to this layer's `cache`, whose memory is
        `[1, blocks, 1, rows of a block, row]`."""
        spec, hidden, metadata, memory = self._spec, x, batch.attention(cache.group), cache.memory
        assert memory is not None
        kept = context_parallel.own_metadata(batch, cache.group, memory.shape[3], self._context)
        adapters = batch.adapters_of()
        gate = None if self.gate is None else self.gate(x, adapters).unflatten(-1, (self._heads, spec.gate_dim))
        down = self.down(x, adapters)
        if self.query_norm is not None:
            latent_query, down = down.split((spec.q_lora_rank, down.shape[-1] - spec.q_lora_rank), dim=-1)
            x = normed = self.query_norm(latent_query)
            if self.indexer is not None:
                assert isinstance(hidden, Tensor)
                batch.shared.selection = self.indexer(hidden, normed, batch, cos_sin, cache)
            if spec.output_gate == "queries":
                x = torch.cat((normed, latent_query), dim=-1)
        # A head's rotary features come first.
        query = self.query(x, adapters).unflatten(-1, (self._heads, spec.query_dim))
        if spec.output_gate == "queries":
            query, gate = query.split_with_sizes((spec.head_dim, spec.v_head_dim), dim=-1)
            query = query.contiguous()
        if spec.query_scale is not None:
            query = scale_queries(query, batch.positions, spec.query_scale)
        rotary_key, latent = down.split((spec.rope.dim, spec.kv_lora_rank), dim=-1)
        rotary_key = rotary_key if self.rotary_norm is None else self.rotary_norm(rotary_key)
        latent = self.latent_norm(latent)
        latent = latent if spec.latent_multiplier == 1.0 else latent * spec.latent_multiplier
        key = torch.cat((rotary_key, latent), dim=-1)[:, None]
        query = kernels.rotary_write_kv(query, key, None, cos_sin, memory, kept.slot_mapping)
        if batch.shares is not None:
            batch.shares.exchange(memory, cache.group)
        selection = Selection() if spec.top_k is None else batch.shared.selection
        mixed = self._attend(query, metadata, memory, selection, self.up.slots(adapters), kept)
        if gate is not None:
            mixed = mixed * gate.float().sigmoid().to(mixed.dtype)
        out: Tensor = self.output(mixed.flatten(1), adapters)
        return out

    def _attend(
        self,
        query: Tensor,
        metadata: AttentionMetadata,
        memory: Tensor,
        selection: Selection,
        adapters: Tensor | None = None,
        kept: AttentionMetadata | None = None,
    ) -> Tensor:
        """`[tokens, heads, head_dim]` → `[tokens, heads, value_dim]`, in the cheaper form for each request. `adapters`
        are the slots of the tokens as of `PerHeadUp.slots`. `kept`: the metadata of the rows that this rank has; None:
        it has all."""
        (counts, lengths, _), (slots, selected) = metadata.host_metadata(), selection
        kept = kept or metadata
        is_plain = (counts >= self._plain_from) & (self._spec.window is None)  # the plain form reads all rows
        forms = np.where(is_plain, _PLAIN, _ABSORBED)
        if slots is not None:
            is_long, sent = lengths > slots.shape[1], 3 * counts * self._heads * self._context.size
            forms[is_long] = _SPARSE
            if self._context.size > 1:  # queries and results of more tokens would be more than the rows
                forms[is_long & (counts > 1) & (sent > lengths)] = _GATHERED
        if not (forms != _ABSORBED).any() and len(query) <= self._absorbed_at_once:
            return self.absorbed(query, kept, memory, adapters)
        starts = [0, *counts.cumsum().tolist()]
        mixed = query.new_empty(*query.shape[:2], self._spec.v_head_dim)
        for first, last, rows in metadata.runs(forms):
            if slots is not None and forms[first] in (_SPARSE, _GATHERED):
                assert selected is not None
                of_rows = None if adapters is None else adapters[rows]
                if forms[first] == _SPARSE:
                    mixed[rows] = self.sparse(query[rows], slots[rows], selected[rows], memory, of_rows)
                    continue
                for number in range(first, last):
                    rows = slice(starts[number], starts[number + 1])
                    of_rows = None if adapters is None else adapters[rows]
                    blocks = -(-int(lengths[number]) // (memory.shape[3] * self._context.size))
                    given = memory, metadata.block_tables[number, :blocks], slots[rows], query.dtype, self._context
                    whole, own_slots = context_parallel.gather_rows(*given)
                    mixed[rows] = self.sparse(query[rows], own_slots, selected[rows], whole, of_rows, Parallel())
                continue
            is_plain = forms[first] == _PLAIN
            keys_at_once = attention_spec.KEYS_AND_VALUES_AT_ONCE // (2 * self._spec.head_dim * self._heads)
            sizes, most = (lengths, keys_at_once) if is_plain else (counts, self._absorbed_at_once)
            for begin, end in _group_requests(sizes, most, first, last):
                rows = slice(starts[begin], starts[end])
                form, own = (self.plain, metadata) if is_plain else (self.absorbed, kept)
                of_rows = None if adapters is None else adapters[rows]
                mixed[rows] = form(query[rows], own.sequences(begin, end, rows), memory, of_rows)
        return mixed

    def _matrices(self) -> tuple[Tensor, Tensor]:
        """`[heads, plain_dim, latent_dim]` for the keys, `[heads, value_dim, latent_dim]` for the values."""
        spec = self._spec
        keys, values = self.up.weight.view(self._heads, -1, spec.kv_lora_rank).split_with_sizes(
            (spec.qk_nope_head_dim, spec.v_head_dim), dim=1
        )
        return keys, values

    def _latent_query(self, query: Tensor, keys: Tensor, adapters: Tensor | None) -> Tensor:
        """`[tokens, heads, head_dim]` → `[tokens, heads, row]`: queries for the rows of the cache."""
        rotary, plain = query.split_with_sizes((self._spec.rope.dim, self._spec.qk_nope_head_dim), dim=-1)
        if adapters is None:
            return torch.cat((rotary, torch.einsum("thp,hpl->thl", plain, keys)), dim=-1)
        found, of_keys = [], slice(self._spec.qk_nope_head_dim)
        for rows, change in self.up.changes(adapters, self._heads, query.dtype):
            own = plain[rows] if change.scale is None else plain[rows] * change.scale[..., of_keys]
            inner = torch.einsum("thp,trhp->thr", own, change.b[..., of_keys])
            found.append(torch.einsum("thp,hpl->thl", own, keys) + torch.einsum("thr,trl->thl", inner, change.a))
        return torch.cat((rotary, torch.cat(found)), dim=-1)

    def _values(self, mixed: Tensor, values: Tensor, adapters: Tensor | None) -> Tensor:
        """Mixed rows of the cache `[tokens, heads, row]` → `[tokens, heads, value_dim]`"""
        latent = mixed[..., self._spec.rope.dim :]
        if adapters is None:
            return torch.einsum("thl,hvl->thv", latent, values)
        found, of_values = [], slice(self._spec.qk_nope_head_dim, None)
        for rows, change in self.up.changes(adapters, self._heads, mixed.dtype):
            inner = torch.einsum("thl,trl->thr", latent[rows], change.a)
            own = torch.einsum("thl,hvl->thv", latent[rows], values)
            own = own + torch.einsum("thr,trhv->thv", inner, change.b[..., of_values])
            own = own if change.scale is None else own * change.scale[..., of_values]
            found.append(own if change.bias is None else own + change.bias[..., of_values])
        return torch.cat(found)

    def sparse(
        self,
        query: Tensor,
        slots: Tensor,
        counts: Tensor,
        memory: Tensor,
        adapters: Tensor | None = None,
        context: Parallel | None = None,
    ) -> Tensor:
        """Like `absorbed`, but each query attends only to the rows in the first `counts` `[tokens]` of its `slots`
        `[tokens, top_k]`. The ranks of `context` have them; None: the layer's."""
        spec, (keys, values), context = self._spec, self._matrices(), context or self._context
        sinks = None if self.sinks is None else self.sinks.float()
        sides = memory.expand(2, *memory.shape[1:])
        mixed = query.new_empty(*query.shape[:2], spec.v_head_dim)
        heads = self._heads * context.size
        size = max(1, attention_spec.KEYS_AND_VALUES_AT_ONCE // (heads * (spec.rope.dim + spec.kv_lora_rank)))
        for start in range(0, len(query), size):
            rows = slice(start, start + size)
            of_rows = None if adapters is None else adapters[rows]
            latent = self._latent_query(query[rows], keys, of_rows)
            given = latent, sides, slots[rows], counts[rows], spec.scale, context, sinks
            found = context_parallel.attend_to_selected(*given)
            mixed[rows] = self._values(found, values, of_rows)
        return mixed

    def absorbed(
        self, query: Tensor, metadata: AttentionMetadata, memory: Tensor, adapters: Tensor | None = None
    ) -> Tensor:
        """Attend with one KV head whose keys and values are the rows of the cache."""
        spec, (keys, values) = self._spec, self._matrices()
        mixed = context_parallel.attend(
            self._latent_query(query, keys, adapters),
            memory.expand(2, *memory.shape[1:]),
            metadata,
            spec.scale,
            self._context,
            window=spec.window or 0,
            sinks=None if self.sinks is None else self.sinks.float(),
        )
        return self._values(mixed, values, adapters)

    def plain(
        self, query: Tensor, metadata: AttentionMetadata, memory: Tensor, adapters: Tensor | None = None
    ) -> Tensor:
        """Compute keys and values of some heads at a time from the cached rows of all the batch's requests, and attend
        to them.

        They are stored in blocks like the cache's, one request after another.
        """
        spec, size, lengths = self._spec, memory.shape[3] * self._context.size, metadata.host_metadata().lengths
        blocks = -(-lengths // size)
        tables = [table[:count] for table, count in zip(metadata.block_tables, blocks.tolist(), strict=True)]
        total = int(blocks.sum())
        rows = context_parallel.read_rows(
            memory[0], torch.cat(tables), query.dtype, self._context
        )  # [total * size, row]
        rotary, latent = rows.split_with_sizes((spec.rope.dim, spec.kv_lora_rank), dim=-1)
        of_each = (metadata.sequence_lengths + size - 1) // size
        number = torch.arange(int(blocks.max()), device=query.device)
        if adapters is not None:
            own = adapters[metadata.query_starts[:-1]]
            adapters = own.repeat_interleave(of_each * size, output_size=total * size)
        expanded_tables = ((of_each.cumsum(0) - of_each)[:, None] + number).clamp(max=total - 1)
        width = max(spec.head_dim, spec.v_head_dim)
        padded_query = F.pad(query, (0, width - spec.head_dim))
        mixed = query.new_empty(*query.shape[:2], spec.v_head_dim)
        for heads in self._head_slices(len(rows)):
            weight = self.up.weight.view(self._heads, -1, spec.kv_lora_rank)[heads]
            expanded = F.linear(latent, weight.flatten(0, 1))
            if adapters is not None:
                expanded = self.up.changed(expanded, latent, adapters, heads, weight.shape[1])
            expanded = expanded.view(-1, *weight.shape[:2]).transpose(0, 1)  # [heads, rows, plain_dim + value_dim]
            keys, values = expanded.split_with_sizes((spec.qk_nope_head_dim, spec.v_head_dim), dim=-1)
            key_value = query.new_empty(2, *expanded.shape[:2], width)
            key_value[0, ..., : spec.rope.dim] = rotary
            key_value[0, ..., spec.rope.dim : spec.head_dim] = keys
            key_value[0, ..., spec.head_dim :] = 0.0
            key_value[1, ..., : spec.v_head_dim] = values  # the rest may have any value: its results are dropped
            expanded_cache = key_value.view(2, -1, total, size, width).transpose(1, 2)
            out = kernels.paged_attention(
                padded_query[:, heads],
                expanded_cache,
                expanded_tables,
                metadata.sequence_lengths,
                metadata.query_starts,
                spec.scale,
                sinks=None if self.sinks is None else self.sinks[heads].float(),
            )
            mixed[:, heads] = out[..., : spec.v_head_dim]
        return mixed

    def _max_heads(self, length: int) -> int:
        return max(1, attention_spec.KEYS_AND_VALUES_AT_ONCE // (2 * length * self._spec.head_dim))

    def _head_slices(self, length: int) -> Iterator[slice]:
        most = self._max_heads(length)
        for start in range(0, self._heads, most):
            yield slice(start, start + most)


def _group_requests(sizes: Ints, most: int, first: int, last: int) -> Iterator[tuple[int, int]]:
    """The requests from `first` to `last` in as few groups as possible of `most` together, or of one request."""
    begin, total = first, 0
    for number in range(first, last):
        total += int(sizes[number])
        if number > begin and total > most:
            yield begin, number
            begin, total = number, int(sizes[number])
    yield begin, last
