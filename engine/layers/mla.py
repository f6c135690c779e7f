"""Multi-head latent attention (DeepSeek-V2, 2024), with the heads sharded over the ranks of a stage.

A token's row in the cache holds its rotary key, which all heads share, and its latent, from which a matrix computes
every head's plain key and value. There are two forms. The *absorbed* form attends in the latent space: the matrix is
applied to queries and results, and all heads read one row of the cache; it is cheaper for few queries. The *plain* form
first computes keys and values of all heads; it is cheaper for many queries. Both give the same result except for
rounding.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from quire import kernels
from quire.engine.distributed.communicator import Parallel
from quire.engine.layers.attention import Batch, HostMetadata, scale_queries
from quire.engine.layers.linear import ColumnParallelLinear, Linear, Partition, RowParallelLinear, divided
from quire.engine.layers.norm import RMSNorm, make_norm
from quire.engine.models import model_spec

Ints = npt.NDArray[np.int64]


class PerHeadUp(ColumnParallelLinear):
    """Projects the latent to each head's plain key and value; never packed, as it is applied from both sides."""

    @property
    def may_be_quantized(self) -> bool:
        return False

    def pack(self, quantization: kernels.Quantization | None) -> None:
        """Do nothing: see above."""


class MLA(nn.Module):
    """Attention as described by `quire.engine.models.model_spec.MLASpec`."""

    def __init__(self, spec: model_spec.MLASpec, hidden_size: int, parallel: Parallel) -> None:
        super().__init__()
        self._spec = spec
        self._heads = spec.num_heads // parallel.size
        row = spec.kv_lora_rank + spec.rope.dim
        queries = divided("", spec.num_heads * spec.head_dim, parallel)
        keys_and_values = divided("", spec.num_heads * (spec.qk_nope_head_dim + spec.v_head_dim), parallel)
        parts = [Partition("kv", row, 0, row)]
        self.query_norm = None
        if spec.q_lora_rank is not None:
            parts.insert(0, Partition("q", spec.q_lora_rank, 0, spec.q_lora_rank))
            self.query_norm = make_norm(spec.norm, spec.q_lora_rank)
        self.down = ColumnParallelLinear(hidden_size, parts, bias=spec.bias)
        self.query = ColumnParallelLinear(spec.q_lora_rank or hidden_size, [queries], bias=False)
        if isinstance(self.query_norm, RMSNorm):
            self.query_norm.feed(self.query)
        self.latent_norm = make_norm(spec.norm, spec.kv_lora_rank)
        self.up = PerHeadUp(spec.kv_lora_rank, [keys_and_values], bias=False)
        self.gate = None
        if spec.output_gate:
            self.gate = ColumnParallelLinear(hidden_size, [divided("", spec.num_heads, parallel)], bias=False)
        self.output = RowParallelLinear(spec.num_heads * spec.v_head_dim, hidden_size, parallel, bias=spec.bias)
        # Saving of the plain form per query; each key costs the computation of its keys and values.
        cheaper = 2 * row - 2 * spec.head_dim
        self._plain_from = spec.kv_lora_rank * (spec.qk_nope_head_dim + spec.v_head_dim) // max(cheaper, 1)

    @property
    def reads_input(self) -> Linear | None:
        """The layer that alone multiplies the input, if there is one."""
        return None if self.query_norm is None else self.down

    def forward(self, x: Tensor | kernels.RoundedRows, batch: Batch, cos_sin: Tensor, cache: Tensor) -> Tensor:
        """`[tokens, hidden_size]` → the same; writes the tokens' rows to this layer's `cache`.

        `cache` is `[1, blocks, 1, block_size, row]`.
        """
        spec = self._spec
        gate = None if self.gate is None else self.gate(x).float().sigmoid().to(x.dtype)  # [tokens, heads]
        down = self.down(x)
        if self.query_norm is not None:
            latent_query, down = down.split((spec.q_lora_rank, down.shape[-1] - spec.q_lora_rank), dim=-1)
            x = self.query_norm(latent_query)
        query = self.query(x).unflatten(-1, (self._heads, spec.head_dim))  # a head's rotary features come first
        query = scale_queries(query, batch.positions, spec.query_scale)
        rotary_key, latent = down.split((spec.rope.dim, spec.kv_lora_rank), dim=-1)
        key = torch.cat((rotary_key, self.latent_norm(latent)), dim=-1)[:, None]
        query = kernels.rotary_write_kv(query, key, None, cos_sin, cache, batch.slot_mapping)
        mixed = self._attend(query, batch, cache)
        if gate is not None:
            mixed = mixed * gate.unsqueeze(-1)
        out: Tensor = self.output(mixed.flatten(1))
        return out

    def _attend(self, query: Tensor, batch: Batch, cache: Tensor) -> Tensor:
        """`[tokens, heads, head_dim]` → `[tokens, heads, value_dim]`, in the cheaper form for each request."""
        counts, lengths, _ = batch.host_metadata()
        is_plain = counts >= self._plain_from
        if not is_plain.any():
            return self.absorbed(query, batch, cache)
        starts = [0, *counts.cumsum().tolist()]
        mixed = query.new_empty(*query.shape[:2], self._spec.v_head_dim)
        for first, last in pairwise((0, *(np.flatnonzero(np.diff(is_plain)) + 1).tolist(), len(counts))):
            for begin, end in self._group_requests(lengths, first, last) if is_plain[first] else [(first, last)]:
                rows = slice(starts[begin], starts[end])
                form = self.plain if is_plain[first] else self.absorbed
                mixed[rows] = form(query[rows], _requests(batch, begin, end, rows), cache)
        return mixed

    def _group_requests(self, lengths: Ints, first: int, last: int) -> Iterator[tuple[int, int]]:
        """The requests from `first` to `last` in as few groups as possible whose keys and values fit in memory
        at once."""
        begin, total = first, 0
        for number in range(first, last):
            total += int(lengths[number])
            if number > begin and self._max_heads(total) < self._heads:
                yield begin, number
                begin, total = number, int(lengths[number])
        yield begin, last

    def _matrices(self) -> tuple[Tensor, Tensor]:
        """`[heads, plain_dim, latent_dim]` for the keys, `[heads, value_dim, latent_dim]` for the values."""
        spec = self._spec
        keys, values = self.up.weight.view(self._heads, -1, spec.kv_lora_rank).split_with_sizes(
            (spec.qk_nope_head_dim, spec.v_head_dim), dim=1
        )
        return keys, values

    def absorbed(self, query: Tensor, batch: Batch, cache: Tensor) -> Tensor:
        """Attend with one KV head whose keys and values are the rows of the cache."""
        spec, (keys, values) = self._spec, self._matrices()
        rotary, plain = query.split_with_sizes((spec.rope.dim, spec.qk_nope_head_dim), dim=-1)
        within = torch.einsum("thp,hpl->thl", plain, keys)
        mixed = kernels.paged_attention(
            torch.cat((rotary, within), dim=-1),
            cache.expand(2, *cache.shape[1:]),
            batch.block_tables,
            batch.sequence_lengths,
            batch.query_starts,
            spec.scale,
            host=batch.host,
        )
        return torch.einsum("thl,hvl->thv", mixed[..., spec.rope.dim :], values)

    def plain(self, query: Tensor, batch: Batch, cache: Tensor) -> Tensor:
        """Compute keys and values of some heads at a time from the cached rows of all the batch's requests, and attend
        to them.

        They are stored in blocks like those of the cache, one request after another.
        """
        spec, size, lengths = self._spec, cache.shape[3], batch.host_metadata().lengths
        blocks = -(-lengths // size)
        tables = [table[:count] for table, count in zip(batch.block_tables, blocks.tolist(), strict=True)]
        total = int(blocks.sum())
        rows = kernels.read_kv(cache[0], torch.cat(tables), total * size, query.dtype)[:, 0]  # [total * size, row]
        rotary, latent = rows.split_with_sizes((spec.rope.dim, spec.kv_lora_rank), dim=-1)
        of_each = (batch.sequence_lengths + size - 1) // size
        number = torch.arange(int(blocks.max()), device=query.device)
        expanded_tables = ((of_each.cumsum(0) - of_each)[:, None] + number).clamp(max=total - 1)
        width = max(spec.head_dim, spec.v_head_dim)
        padded_query = torch.nn.functional.pad(query, (0, width - spec.head_dim))
        mixed = query.new_empty(*query.shape[:2], spec.v_head_dim)
        for heads in self._head_slices(len(rows)):
            weight = self.up.weight.view(self._heads, -1, spec.kv_lora_rank)[heads]
            expanded = torch.nn.functional.linear(latent, weight.flatten(0, 1))
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
                batch.sequence_lengths,
                batch.query_starts,
                spec.scale,
            )
            mixed[:, heads] = out[..., : spec.v_head_dim]
        return mixed

    def _max_heads(self, length: int) -> int:
        return max(1, model_spec.KEYS_AND_VALUES_AT_ONCE // (2 * length * self._spec.head_dim))

    def _head_slices(self, length: int) -> Iterator[slice]:
        most = self._max_heads(length)
        for start in range(0, self._heads, most):
            yield slice(start, start + most)


def _requests(batch: Batch, begin: int, end: int, rows: slice) -> Batch:
    """A batch with only these requests, whose tokens are `rows`."""
    counts, lengths, _ = batch.host_metadata()
    starts = batch.query_starts[begin : end + 1]
    return Batch(
        token_ids=batch.token_ids[rows],
        positions=batch.positions[rows],
        slot_mapping=batch.slot_mapping[rows],
        block_tables=batch.block_tables[begin:end],
        sequence_lengths=batch.sequence_lengths[begin:end],
        query_starts=starts - starts[0],
        logits_indices=batch.logits_indices,
        host=HostMetadata(counts[begin:end], lengths[begin:end]),
    )
