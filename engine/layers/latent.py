"""Multi-head latent attention (DeepSeek-V2, 2024), its heads cut over the ranks of a stage.

A token's row in the cache is its rotary key, which all heads share, and then its latent, from which every head's plain
key and value come by a matrix. A few queries are asked in the latent's own space (*absorbed*: the matrix is applied to
query and result, and all heads read one row of the cache); for many it pays to make keys and values of all heads first
(*plain*). Both give the same but for rounding.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from quire import kernels
from quire.engine import architecture
from quire.engine.layers.attention import Batch
from quire.engine.layers.linear import ColumnParallelLinear, Part, RowParallelLinear, divided
from quire.engine.layers.norm import make_norm
from quire.engine.parallel import Parallel


class PerHeadUp(ColumnParallelLinear):
    """From the latent to each head's plain key and value; kept as it is, for it is applied from both sides."""

    def pack(self, quantization: kernels.Quantization | None) -> None:
        """Nothing: see above."""


class LatentAttention(nn.Module):
    """The attention that `quire.engine.architecture.LatentAttention` describes."""

    def __init__(self, spec: architecture.LatentAttention, hidden_size: int, parallel: Parallel) -> None:
        super().__init__()
        self._spec = spec
        self._heads = spec.num_heads // parallel.size
        row = spec.latent_dim + spec.rope.dim
        queries = divided("", spec.num_heads * spec.head_dim, parallel)
        keys_and_values = divided("", spec.num_heads * (spec.plain_dim + spec.value_dim), parallel)
        parts = [Part("kv", row, 0, row)]
        self.query_norm = None
        if spec.query_latent_dim is not None:
            parts.insert(0, Part("q", spec.query_latent_dim, 0, spec.query_latent_dim))
            self.query_norm = make_norm(spec.norm, spec.query_latent_dim)
        self.down = ColumnParallelLinear(hidden_size, parts, bias=spec.bias)
        self.query = ColumnParallelLinear(spec.query_latent_dim or hidden_size, [queries], bias=False)
        self.latent_norm = make_norm(spec.norm, spec.latent_dim)
        self.up = PerHeadUp(spec.latent_dim, [keys_and_values], bias=False)
        self.output = RowParallelLinear(spec.num_heads * spec.value_dim, hidden_size, parallel, bias=spec.bias)
        # One more query costs less in the plain form by this; one more key costs more by its keys and values.
        cheaper = 2 * row - 2 * spec.head_dim
        self._plain_from = spec.latent_dim * (spec.plain_dim + spec.value_dim) // max(cheaper, 1)

    def forward(self, x: Tensor, batch: Batch, turns: Tensor, cache: Tensor) -> Tensor:
        """`[tokens, hidden_size]` → the same; writes the tokens' rows into this layer's `cache`.

        `cache` is `[1, blocks, 1, block_size, row]`.
        """
        spec = self._spec
        down = self.down(x)
        if self.query_norm is not None:
            latent_query, down = down.split((spec.query_latent_dim, down.shape[-1] - spec.query_latent_dim), dim=-1)
            x = self.query_norm(latent_query)
        query = self.query(x).unflatten(-1, (self._heads, spec.head_dim))  # a head's rotary features come first
        rotary_key, latent = down.split((spec.rope.dim, spec.latent_dim), dim=-1)
        key = torch.cat((rotary_key, self.latent_norm(latent)), dim=-1)[:, None]
        query = kernels.rotary_write_kv(query, key, None, turns, cache, batch.slots)
        mixed = self._attend(query, batch, cache)
        out: Tensor = self.output(mixed.flatten(1))
        return out

    def _attend(self, query: Tensor, batch: Batch, cache: Tensor) -> Tensor:
        """`[tokens, heads, head_dim]` → `[tokens, heads, value_dim]`, each request in the form that costs it less."""
        if int(batch.rows().counts.max(initial=0)) < self._plain_from:
            return self.absorbed(query, batch, cache)
        counts = batch.query_starts.diff()
        is_plain = counts >= self._plain_from
        mixed = query.new_empty(*query.shape[:2], self._spec.value_dim)
        for number in is_plain.nonzero().flatten().tolist():
            rows = slice(*batch.query_starts[number : number + 2].tolist())
            mixed[rows] = self.plain(query[rows], batch.block_tables[number], batch.sequence_lengths[number], cache)
        rest = ~is_plain
        if bool(rest.any()):
            tokens = rest.repeat_interleave(counts)
            few = Batch(
                token_ids=batch.token_ids[tokens],
                positions=batch.positions[tokens],
                slots=batch.slots[tokens],
                block_tables=batch.block_tables[rest],
                sequence_lengths=batch.sequence_lengths[rest],
                query_starts=torch.cat((counts.new_zeros(1), counts[rest].cumsum(0))),
                sampled=batch.sampled,
            )
            mixed[tokens] = self.absorbed(query[tokens], few, cache)
        return mixed

    def _matrices(self) -> tuple[Tensor, Tensor]:
        """`[heads, plain_dim, latent_dim]` of the keys, `[heads, value_dim, latent_dim]` of the values."""
        spec = self._spec
        keys, values = self.up.weight.view(self._heads, -1, spec.latent_dim).split_with_sizes(
            (spec.plain_dim, spec.value_dim), dim=1
        )
        return keys, values

    def absorbed(self, query: Tensor, batch: Batch, cache: Tensor) -> Tensor:
        """As one KV head whose keys and values are the cache's rows."""
        spec, (keys, values) = self._spec, self._matrices()
        rotary, plain = query.split_with_sizes((spec.rope.dim, spec.plain_dim), dim=-1)
        within = torch.einsum("thp,hpl->thl", plain, keys)
        mixed = kernels.paged_attention(
            torch.cat((rotary, within), dim=-1),
            cache.expand(2, *cache.shape[1:]),
            batch.block_tables,
            batch.sequence_lengths,
            batch.query_starts,
            spec.scale,
        )
        return torch.einsum("thl,hvl->thv", mixed[..., spec.rope.dim :], values)

    def plain(self, query: Tensor, table: Tensor, length: Tensor, cache: Tensor) -> Tensor:
        """One request's queries, with keys and values of some heads at a time made of the whole sequence's rows."""
        spec, count = self._spec, int(length)
        rows = kernels.read_kv(cache[0], table, count, query.dtype)[:, 0]  # [length, row]
        rotary, latent = rows.split_with_sizes((spec.rope.dim, spec.latent_dim), dim=-1)
        starts = torch.tensor([0, len(query)], device=query.device)
        mixed = query.new_empty(*query.shape[:2], spec.value_dim)
        for heads in self._pieces(count):
            weight = self.up.weight.view(self._heads, -1, spec.latent_dim)[heads]
            made = torch.einsum("sl,hdl->hsd", latent, weight)
            keys, values = made.split_with_sizes((spec.plain_dim, spec.value_dim), dim=-1)
            sides = query.new_zeros(2, 1, len(weight), count, max(spec.head_dim, spec.value_dim))
            sides[0, 0, ..., : spec.rope.dim] = rotary
            sides[0, 0, ..., spec.rope.dim : spec.head_dim] = keys
            sides[1, 0, ..., : spec.value_dim] = values
            asked = torch.nn.functional.pad(query[:, heads], (0, sides.shape[-1] - spec.head_dim))
            table = starts[:1, None]
            out = kernels.paged_attention(asked, sides, table, length.view(1), starts, spec.scale)
            mixed[:, heads] = out[..., : spec.value_dim]
        return mixed

    def _pieces(self, length: int) -> Iterator[slice]:
        most = max(1, architecture.KEYS_AND_VALUES_AT_ONCE // (2 * length * self._spec.head_dim))
        for start in range(0, self._heads, most):
            yield slice(start, start + most)
