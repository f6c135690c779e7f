"""An encoder of text (BERT): every token of a prompt attends to all others. Family differences are in `EncoderSpec`."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from itertools import pairwise, repeat

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quire import kernels
from quire.engine.architecture import encoder_spec, feed_forward_spec, model_spec, spec_parts
from quire.engine.architecture.tower_spec import FINE
from quire.engine.distributed.communicator import Parallel
from quire.engine.layers.attention import head_norm
from quire.engine.layers.batch import Batch
from quire.engine.layers.clipped import ClippedColumnParallelLinear, ClippedRowParallelLinear
from quire.engine.layers.embedding import VocabParallelEmbedding
from quire.engine.layers.from_spec import FromSpec, if_divisible
from quire.engine.layers.linear import ColumnParallelLinear, RowParallelLinear
from quire.engine.layers.mlp import MLP
from quire.engine.layers.norm import Norm, make_norm, normed
from quire.engine.layers.rotary import Rotary
from quire.engine.layers.weight import Weight, whole


class EmbeddingTable(nn.Module):
    """An embedding that is replicated on every rank."""

    def __init__(self, rows: int, size: int) -> None:
        super().__init__()
        self.weight = Weight((rows, size), whole(rows, size))


class DistanceBias(nn.Module):
    """The bias that each of this rank's heads adds to scores, by the distance from query to key (Raffel et al.
    2020)."""

    def __init__(self, arch: encoder_spec.EncoderSpec, parallel: Parallel) -> None:
        super().__init__()
        self.weight = FromSpec(arch.parameters_after(), parallel).weight("distance_bias")
        distances = torch.arange(1 - arch.max_position, arch.max_position, device="cpu")
        self._buckets = _buckets(distances, arch.relative_buckets)

    def forward(self) -> Tensor:
        """`[heads, distances]`, starting with the distance from the last query to the first key."""
        return self.weight[self._buckets.to(self.weight.device)].T.contiguous()


def _near(reach: int | None, longest: int, like: Tensor) -> Tensor | None:
    """Biases for all heads `[1, distances]` that exclude keys beyond `reach`; None: no prompt has such keys."""
    if reach is None or longest <= reach + 1:
        return None
    distances = torch.arange(1 - longest, longest, device=like.device).abs()
    return torch.zeros(1, len(distances), dtype=like.dtype, device=like.device).masked_fill_(
        distances > reach, -torch.inf
    )


def _buckets(distances: Tensor, count: int, furthest: int = 128) -> Tensor:
    """T5's buckets: half of them for keys after the query; small distances have their own, larger ones are
    logarithmic."""
    half = count // 2
    near = half // 2
    far = distances.abs().clamp(min=1)
    by_logarithm = near + (torch.log(far.float() / near) / math.log(furthest / near) * (half - near)).long()
    return half * (distances > 0) + torch.where(
        distances.abs() < near, distances.abs(), by_logarithm.clamp(max=half - 1)
    )


class EncoderAttention(nn.Module):
    """Attention of every token to the tokens of its prompt, with the heads sharded over the ranks."""

    def __init__(self, spec: encoder_spec.EncoderAttentionSpec, hidden_size: int, parallel: Parallel) -> None:
        super().__init__()
        self.spec = spec
        own = FromSpec(spec.parameters(hidden_size), parallel)
        query, key, _ = own.shards("attention.qkv")
        self._widths = own.widths("attention.qkv")
        columns, rows = ColumnParallelLinear, RowParallelLinear
        if spec.is_clipped:
            columns, rows = ClippedColumnParallelLinear, ClippedRowParallelLinear
        self.qkv = own.column_parallel("attention.qkv", columns)
        self.output = own.row_parallel("attention.output", rows)
        self.query_norm, self.key_norm = head_norm(spec, query, parallel), head_norm(spec, key, parallel)
        self.value_norm = None if spec.value_norm is None else make_norm(spec.value_norm, spec.head_dim)

    def forward(
        self,
        x: Tensor,
        starts: Tensor,
        cos_sin: Tensor | None,
        biases: Tensor | None,
        adapters: kernels.RowAdapters | None = None,
    ) -> Tensor:
        """`[tokens, hidden_size]` → the same."""
        turns = None if self.spec.rope is None else cos_sin
        mixed = self.mix(*self.project(x, adapters), starts, biases, turns)
        out: Tensor = self.output(mixed.flatten(1), adapters)
        return out

    @property
    def num_heads(self) -> int:
        """This rank's."""
        return self._widths[0] // self.spec.head_dim

    @property
    def num_kv_heads(self) -> int:
        """This rank's."""
        return self._widths[1] // self.spec.head_dim

    def project(self, x: Tensor, adapters: kernels.RowAdapters | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """`[tokens, hidden_size]` → queries, keys and values, `[tokens, heads, head_dim]` each."""
        spec = self.spec
        parts = self.qkv(x, adapters).split_with_sizes(self._widths, dim=-1)
        query, key, value = (torch.unflatten(part, -1, (-1, spec.head_dim)) for part in parts)
        query = normed(self.query_norm, query, adapters)
        key = normed(self.key_norm, key, adapters)
        value = normed(self.value_norm, value, adapters)
        return query, key, value

    def sequence_kv(self, x: Tensor, starts: Tensor) -> kernels.SequenceKV:
        """For the keys and values of an input `[tokens, hidden_size]`."""
        return kernels.sequence_kv(x, starts, self.num_kv_heads, self.spec.head_dim)

    def mix(
        self, query: Tensor, key: Tensor, value: Tensor, starts: Tensor, biases: Tensor | None, cos_sin: Tensor | None
    ) -> Tensor:
        """`[tokens, heads, head_dim]` → the same. See `kernels.reference.attention`."""
        return kernels.attention(query, key, value, starts, self.spec.scale, biases, cos_sin)


class EncoderLayer(nn.Module):
    """Attention and feed-forward, each added to the residual stream, with norms before them or after the addition. Each
    rank has those whole that ranks cannot divide evenly."""

    replay: Callable[[Tensor, Tensor, Tensor | None], bool] | None = None
    """Computes `forward` of a tower's layer in place, given `x`, `starts` and `cos_sin`, if it has been captured for so
    many rows; returns whether it has."""

    def __init__(
        self,
        spec: model_spec.LayerSpec,
        hidden_size: int,
        parallel: Parallel,
        *,
        is_post_norm: bool = True,
        attention: type[EncoderAttention] = EncoderAttention,
    ) -> None:
        super().__init__()
        assert isinstance(spec.attention, encoder_spec.EncoderAttentionSpec)
        assert isinstance(spec.feed_forward, feed_forward_spec.MLPSpec)
        self._is_post_norm = is_post_norm
        self.attention_norm = _norm(spec.attention_norm, hidden_size)
        heads, inner = spec.attention.num_heads, spec.feed_forward.intermediate_size
        self.attention = attention(spec.attention, hidden_size, if_divisible(parallel, heads))
        self.attention_post_norm = _norm(spec.attention_post_norm, hidden_size)
        self.feed_forward_norm = _norm(spec.feed_forward_norm, hidden_size)
        self.feed_forward = MLP(spec.feed_forward, hidden_size, if_divisible(parallel, inner))
        self.feed_forward_post_norm = _norm(spec.feed_forward_post_norm, hidden_size)

    def forward(
        self,
        x: Tensor,
        starts: Tensor,
        cos_sin: Tensor | None,
        biases: Tensor | None,
        adapters: kernels.RowAdapters | None = None,
    ) -> Tensor:
        """`[tokens, hidden_size]` → the same."""
        return self.feed(self.attend(x, starts, cos_sin, biases, adapters), adapters)

    def attend(
        self,
        x: Tensor,
        starts: Tensor,
        cos_sin: Tensor | None,
        biases: Tensor | None,
        adapters: kernels.RowAdapters | None = None,
    ) -> Tensor:
        """The first half of `forward`."""
        mixed = self.attention(normed(self.attention_norm, x, adapters), starts, cos_sin, biases, adapters)
        return self._add(x, mixed, self.attention_post_norm, adapters)

    def feed(self, x: Tensor, adapters: kernels.RowAdapters | None = None) -> Tensor:
        """The second half of `forward`."""
        out = self.feed_forward(normed(self.feed_forward_norm, x, adapters), adapters)
        return self._add(x, out, self.feed_forward_post_norm, adapters)

    def forward_with(self, x: Tensor, kv: kernels.SequenceKV, cos_sin: Tensor | None) -> Tensor:
        """`forward`, without biases, with `kv` for the sequences of `x`."""
        attention, turns = self.attention, None if self.attention.spec.rope is None else cos_sin
        query = kv.write(*attention.project(normed(self.attention_norm, x, None)), 0, turns)
        mixed = attention.output(kv.attend(query, 0, attention.spec.scale).flatten(1))
        return self.feed(self._add(x, mixed, self.attention_post_norm, None))

    def sequence_steps(
        self,
        x: Tensor,
        starts: Tensor,
        cos_sin: Tensor | None,
        num_slices: int,
        num_query_slices: int,
        adapter: kernels.OneAdapter | None = None,
    ) -> Generator[None]:
        """`steps` for sequences that begin at `starts`, which are on the host. A captured layer is replayed in the
        first one, as it is a small part of a picture's time; it knows of no adapter."""
        if adapter is None and self.replay is not None and self.replay(x, starts, cos_sin):
            yield from repeat(None, num_slices + num_query_slices + FINE * num_slices)
        else:
            kv = self.attention.sequence_kv(x, starts)
            yield from self.steps(x, kv, cos_sin, num_slices, num_query_slices, adapter)

    def steps(
        self,
        x: Tensor,
        kv: kernels.SequenceKV,
        cos_sin: Tensor | None,
        num_slices: int,
        num_query_slices: int,
        adapter: kernels.OneAdapter | None = None,
    ) -> Generator[None]:
        """Compute `forward`, without biases, in place and slice by slice, with `kv` for the sequences of `x`. Pauses
        after each of `num_slices` of queries, keys and values, each of `num_query_slices` of attention, and each of the
        feed-forward layer."""
        attention, spec = self.attention, self.attention.spec
        query = x.new_empty(len(x), attention.num_heads, spec.head_dim)
        for begin, end in slices(len(x), num_slices):
            parts = attention.project(normed(self.attention_norm, x[begin:end], adapter), adapter)
            turns = None if spec.rope is None or cos_sin is None else cos_sin[begin:end]
            query[begin:end] = kv.write(*parts, begin, turns)
            yield
        del parts
        for begin, end in slices(len(x), num_query_slices):
            mixed = kv.attend(query[begin:end], begin, spec.scale)
            out = attention.output(mixed.flatten(1), adapter)
            x[begin:end] = self._add(x[begin:end], out, self.attention_post_norm, adapter)
            yield
        del query, kv
        for begin, end in slices(len(x), FINE * num_slices):
            x[begin:end] = self.feed(x[begin:end], adapter)
            yield

    def _add(self, x: Tensor, more: Tensor, norm: Norm | None, adapters: kernels.RowAdapters | None) -> Tensor:
        return normed(norm, x + more, adapters) if self._is_post_norm else x + normed(norm, more, adapters)


def slices(rows: int, count: int, unit: int = 1) -> Sequence[tuple[int, int]]:
    """Divide rows, a multiple of `unit`, into `count` ranges of about as many units, some of which may be empty."""
    return [*pairwise(rows // unit * number // count * unit for number in range(count + 1))]


def by_slices(
    compute: Callable[[Tensor], Tensor], x: Tensor, count: int, unit: int = 1
) -> Generator[None, None, Tensor]:
    """Return `compute(x)`, of which no row depends on another unit of rows. Pauses after each of `count` slices."""
    assert count <= max(FINE, len(x) // unit)  # else steps would cost nothing
    parts = []
    for begin, end in slices(len(x), count, unit):
        if begin < end:
            parts.append(compute(x[begin:end]))
        yield
    return torch.cat(parts)


def _norm(spec: spec_parts.NormSpec | None, hidden_size: int) -> Norm | None:
    return None if spec is None else make_norm(spec, hidden_size)


class Encoder(nn.Module):
    """The complete model, with the interface of `Decoder`. It has no KV cache. Parameters are uninitialized."""

    def __init__(self, arch: encoder_spec.EncoderSpec, parallel: Parallel) -> None:
        super().__init__()
        width = arch.hidden_size
        self._padding_id, self._multiplier = arch.padding_id, arch.embedding_multiplier
        attentions = [layer.attention for layer in arch.layers if layer.attention is not None]
        self._rotary = {rope: Rotary(rope, arch.max_position) for rope in {each.rope for each in attentions}}
        self.embedding = VocabParallelEmbedding(arch.vocab_size, width, parallel)
        self.positions = EmbeddingTable(arch.position_embeddings, width) if arch.position_embeddings else None
        self.token_types = EmbeddingTable(arch.token_types, width) if arch.token_types else None
        self.embedding_norm = _norm(arch.embedding_norm, width)
        self.distance_bias = DistanceBias(arch, parallel) if arch.relative_buckets else None
        self.layers = nn.ModuleDict(
            {
                str(number): EncoderLayer(layer, width, parallel, is_post_norm=arch.is_post_norm)
                for number, layer in enumerate(arch.layers)
            }
        )
        self.norm = _norm(arch.norm, width)

    def forward(self, x: Tensor | None, batch: Batch, caches: Sequence[Tensor] = ()) -> Tensor:
        """Hidden states `[tokens, hidden_size]`. The batch must contain whole prompts."""
        assert x is None
        x = self.embedding(batch.token_ids, batch.adapters_of())
        if self._multiplier != 1.0:
            x = x * x.new_full((), self._multiplier)  # rounded to the type of `x`
        if self.positions is not None:
            x = x + F.embedding(self._positions(batch), self.positions.weight)
        if self.token_types is not None:
            types = batch.token_types
            x = x + (self.token_types.weight[0] if types is None else F.embedding(types, self.token_types.weight))
        x = normed(self.embedding_norm, x, None)
        cos_sin = {rope: rotary(batch.positions) for rope, rotary in self._rotary.items()}
        longest = int(batch.host_metadata().lengths.max())
        biases: dict[int | None, Tensor | None] = {
            None: self.distance_bias() if self.distance_bias is not None else None
        }
        for layer in self.layers.values():
            assert isinstance(layer, EncoderLayer)
            spec = layer.attention.spec
            if spec.reach not in biases:
                biases[spec.reach] = _near(spec.reach, longest, x)
            x = layer(x, batch.query_starts, cos_sin[spec.rope], biases[spec.reach], batch.adapters_of())
        return normed(self.norm, x, None)

    def features(self, x: Tensor) -> Tensor:
        """The input of pooling: hidden states are already normalized."""
        return x

    def _positions(self, batch: Batch) -> Tensor:
        """The row of `positions` for each token."""
        padding = self._padding_id
        if padding is None:
            return batch.positions
        counted = batch.token_ids != padding
        ends = counted.cumsum(0)  # counted tokens up to and with each
        before = (ends - counted.long())[batch.query_starts[:-1]]  # tokens of other prompts
        ends = ends - before.repeat_interleave(batch.query_starts.diff())
        return ends * counted + padding
