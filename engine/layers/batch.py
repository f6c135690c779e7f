"""A step as the model sees it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.engine.distributed.communicator import Parallel
from quire.engine.layers.sending import send
from quire.kernels import AdapterRows, HostMetadata, RecurrentState, StateSegments
from quire.kernels.cache import LARGEST, QuantizedRows

Ints = npt.NDArray[np.int64]


class KVBlocks(NamedTuple):
    """A step's blocks in a KV cache group of attention layers, int64."""

    slot_mapping: Tensor
    """`[tokens]`, where each token's keys and values are stored: block * block_size + offset; negative: nowhere."""
    block_tables: Tensor
    """`[requests, max_blocks]`; blocks before the window of all queries of a request may have any value."""


class RecentTokens(NamedTuple):
    """Where a step's tokens are before their blocks are complete and stored in 4 bits: see `quire.kernels.int4_kv`."""

    slots: Tensor
    """`[tokens]`, as `KVBlocks.slot_mapping`, in `LayerCache.recent`."""
    moves: Tensor | None = None
    """`[2, moves]`, blocks there, and where their contents are moved before the tokens are stored; None: all tokens are
    in blocks of their request slots."""


class AttentionMetadata(NamedTuple):
    """A step as an attention layer sees it: the blocks of its KV cache group, and the tokens of each sequence.

    A sequence is a request of the batch, or a part of one that the queries of that part alone attend to.
    """

    slot_mapping: Tensor
    """Slots of all tokens, as in `KVBlocks`."""
    block_tables: Tensor
    """`[sequences, max_blocks]`"""
    sequence_lengths: Tensor
    """`[sequences]`, tokens of each sequence up to its last query."""
    query_starts: Tensor
    """`[sequences + 1]`, where the queries of each sequence start."""
    host: HostMetadata | None = None
    """As in `Batch`."""
    key_ends: Tensor | None = None
    """As in `Batch`, for all queries."""
    recent: RecentTokens | None = None
    """As in `Batch`, for all queries."""

    @property
    def paged(self) -> tuple[Tensor, Tensor, Tensor]:
        """Block tables, sequence lengths and query starts, which kernels that read a paged cache take together."""
        return self.block_tables, self.sequence_lengths, self.query_starts

    def last_tokens(self) -> AttentionMetadata:
        """The same with one query for each sequence: its last token."""
        starts = torch.arange(len(self.query_starts), device=self.query_starts.device)
        host = None if self.host is None else HostMetadata(np.ones_like(self.host.counts), self.host.lengths, {})
        last = self.query_starts[1:] - 1
        ends = None if self.key_ends is None else self.key_ends[last]
        recent = None if self.recent is None else self.recent._replace(slots=self.recent.slots[last])
        return self._replace(query_starts=starts, host=host, key_ends=ends, recent=recent)

    def sequences(self, begin: int, end: int, rows: slice) -> AttentionMetadata:
        """Only these sequences, whose tokens are `rows`."""
        counts, lengths, _ = self.host_metadata()
        starts = self.query_starts[begin : end + 1]
        return AttentionMetadata(
            self.slot_mapping[rows],
            self.block_tables[begin:end],
            self.sequence_lengths[begin:end],
            starts - starts[0],
            HostMetadata(counts[begin:end], lengths[begin:end]),
            None if self.key_ends is None else self.key_ends[rows],
            None if self.recent is None else self.recent._replace(slots=self.recent.slots[rows]),
        )

    def host_metadata(self) -> HostMetadata:
        """`host`, or the same read from the tensors."""
        return self.host or _read_from_device(self.query_starts, self.sequence_lengths)

    def runs(self, forms: npt.NDArray[np.generic]) -> Iterator[tuple[int, int, slice]]:
        """Successive sequences of the same form: from one to before another, and their tokens."""
        starts = [0, *self.host_metadata().counts.cumsum().tolist()]
        for first, last in pairwise((0, *(np.flatnonzero(forms[1:] != forms[:-1]) + 1).tolist(), len(forms))):
            yield first, last, slice(starts[first], starts[last])

    def sequence_of_tokens(self, count: int) -> Tensor:
        """The number of each token's sequence, `[count]`, for the step's number of tokens."""
        tokens = torch.arange(count, device=self.query_starts.device)
        if count == len(self.sequence_lengths):
            return tokens
        return torch.searchsorted(self.query_starts, tokens, right=True) - 1


class Selection(NamedTuple):
    """The tokens that the queries of a step attend to."""

    slots: Tensor | None = None
    """`[tokens, top_k]`, as of `kernels.select_tokens`; None: no context is longer than the selection."""
    counts: Tensor | None = None
    """`[tokens]`, how many of each token's slots are valid."""


@dataclass
class SharedResults:
    """Results that layers of a forward pass compute for later layers."""

    selection: Selection = field(default_factory=Selection)
    """Each layer of latent attention with an indexer replaces it."""
    chunks: dict[int, AttentionMetadata] = field(default_factory=dict)
    """For KV cache groups of layers with chunked attention, the metadata of all queries of the step."""
    own_metadata: dict[tuple[int, bool], AttentionMetadata] = field(default_factory=dict)
    """For KV cache groups whose tokens are divided among ranks, and whether queries attend to no later tokens, which
    layers of one group may differ in; see `engine.layers.context_parallel`."""


class BatchAdapters(NamedTuple):
    """A step's rows by their adapters."""

    tokens: AdapterRows
    """Of all tokens."""
    last_tokens: AdapterRows
    """Of each request's last token."""
    sampling: AdapterRows
    """Of the rows whose logits are computed: those of `Batch.logits_indices`."""

    def share(self, slots: Ints, last_tokens: Ints) -> BatchAdapters:
        """Those of tokens with these slots, of which `last_tokens` are their requests' last ones; with the same
        `sampling`."""
        num_slots, device = len(self.tokens.starts) - 2, self.tokens.order.device
        tokens, last = (
            AdapterRows(send(torch.from_numpy(order), device), send(torch.from_numpy(starts), device), True, starts)
            for order, starts in (by_slot(slots, num_slots), by_slot(slots[last_tokens], num_slots))
        )
        return BatchAdapters(tokens, last, self.sampling)


def by_slot(slots: Ints, num_slots: int) -> tuple[Ints, Ints]:
    """`AdapterRows.order` and `starts` of rows with these slots; negative: none."""
    groups = np.where(slots < 0, num_slots, slots)
    order = groups.argsort(kind="stable")
    return order, np.searchsorted(groups[order], np.arange(num_slots + 2))


@dataclass(frozen=True)
class Batch:
    """The scheduled tokens of all requests in a step, one request after another. All tensors are int64."""

    token_ids: Tensor
    """`[tokens]`"""
    positions: Tensor
    """`[tokens]`, each token's position in its request."""
    sequence_lengths: Tensor
    """`[requests]`, tokens of each request, including this step's."""
    query_starts: Tensor
    """`[requests + 1]`, where each request's tokens start in `token_ids`."""
    logits_indices: Tensor
    """`[sampling requests]`, indices in the last stage's output of the last token of each request that samples."""
    groups: Mapping[int, KVBlocks | StateSegments] = field(default_factory=dict)
    """The KV cache groups whose layers run in this step, by number (`engine.config.kv_cache_groups`): blocks of keys
    and values, or the recurrent states that are read and written."""
    host: HostMetadata | None = None
    """Counts and lengths on the host; None: they are read from the tensors."""
    replica_tokens: tuple[int, ...] = ()
    """Tokens of each replica in this step, if replicas share experts."""
    token_mask: Tensor | None = None
    """`[tokens]`, 0 for padding and else 1; None: there is no padding."""
    logits_indices_only: bool = False
    """The last stage's output has only each request's last token: it is `[requests, hidden_size]`."""
    token_types: Tensor | None = None
    """`[tokens]`, for encoders with token types: 1 in the second text of a pair; None: all are 0."""
    rope_positions: Tensor | None = None
    """`[3, tokens]`, positions along time, height and width for rotary embeddings with sections (with
    `MediaSpec.place_axes`, `[place_axes, tokens]`), or `[tokens]` if they are the same along all axes; None: they are
    `positions`."""
    media_tokens: Tensor | None = None
    """`[features]`, indices of the tokens whose embeddings are replaced by features of images and videos, ascending."""
    media_places: Ints | None = None
    """The same on the host; None: they are not known there."""
    media_features: Tensor | None = None
    """`[features, feature_width]`, for the first stage."""
    key_ends: Tensor | None = None
    """`[tokens]`, the position after the last token that each token attends to, which is further than its own where the
    tokens of a run of features attend to each other in both directions; None: each token's own is its last."""
    adapters: BatchAdapters | None = None
    """None: no row has an adapter."""
    adapter_slots: Ints | None = None
    """`[tokens]`, the slot of each token's adapter, on the host; negative: none. None: no row has one, or they are not
    known there."""
    recent: RecentTokens | None = None
    """None: the cache is not in 4 bits."""
    on_layer: Callable[[int], None] | None = None
    """Called when all of a layer's KV has been computed (on a GPU: launched), with its number in the stage, in order.
    `DecodeGraphs`, and models with recurrent states that transformers computes, do not call it."""
    shares: TokenShares | None = None
    """This is one of these shares of a step; None: it is the whole step."""
    shared: SharedResults = field(default_factory=SharedResults)
    """Each forward pass begins with new ones."""

    def host_metadata(self) -> HostMetadata:
        """`host`, or the same read from the tensors."""
        return self.host or _read_from_device(self.query_starts, self.sequence_lengths)

    def share(self, parallel: Parallel) -> Batch:
        """This rank's share of the tokens, which the ranks of `parallel` divide. `logits_indices`, and the adapters of
        their rows, stay those of the whole step."""
        assert self.key_ends is None, "tokens attend to later ones"
        assert self.recent is None, "blocks in 4 bits have one scale for several tokens"
        count, rank, size = len(self.token_ids), parallel.rank, share_size(len(self.token_ids), parallel.size)
        first = share_start(count, parallel.size, rank)
        last = first + size
        own, (counts, lengths, _) = slice(first, last), self.host_metadata()
        ends = counts.cumsum()
        begin, end = int(np.searchsorted(ends, first, "right")), int(np.searchsorted(ends, last, "left")) + 1
        requests, own_ends = slice(begin, end), ends[begin:end].clip(max=last)
        starts = self.query_starts[begin : end + 1]
        own_starts = starts.clamp(first, last)
        belonging = min(rank * size, count), min((rank + 1) * size, count)  # without what overlaps earlier shares
        ended = range(*np.searchsorted(ends, belonging, "right").tolist())
        adapters, adapter_slots = self.adapters, self.adapter_slots
        if adapters is not None:
            assert adapter_slots is not None
            adapter_slots = adapter_slots[own]
            adapters = adapters.share(adapter_slots, own_ends - first - 1)
        media_tokens, places, features = self.media_tokens, self.media_places, self.media_features
        if media_tokens is not None:
            assert places is not None
            of_media = slice(*np.searchsorted(places, (first, last)).tolist())
            media_tokens, places = media_tokens[of_media] - first, places[of_media] - first
            features = None if features is None else features[of_media]
        return replace(
            self,
            token_ids=self.token_ids[own],
            positions=self.positions[own],
            sequence_lengths=self.sequence_lengths[requests] - (starts - own_starts)[1:],
            query_starts=own_starts - first,
            groups={
                number: KVBlocks(each.slot_mapping[own], each.block_tables[requests])
                for number, each in self.groups.items()
                if isinstance(each, KVBlocks)
            },
            host=HostMetadata(np.diff(own_ends, prepend=first), lengths[requests] - (ends[requests] - own_ends), {}),
            rope_positions=None if self.rope_positions is None else self.rope_positions[..., own],
            media_tokens=media_tokens,
            media_places=places,
            media_features=features,
            adapters=adapters,
            adapter_slots=adapter_slots,
            shares=TokenShares(parallel, self, own, range(begin, end), ended),
        )

    def adapters_of(self, last_tokens: Tensor | None = None) -> AdapterRows | None:
        """The adapters of the rows of all tokens, or only of the `last_tokens` of requests where there are no others;
        None: no row has one."""
        if self.adapters is None:
            return None
        return self.adapters.tokens if last_tokens is None else self.adapters.last_tokens

    def attention(self, group: int) -> AttentionMetadata:
        """For the attention layers of this KV cache group."""
        blocks = self.groups[group]
        assert isinstance(blocks, KVBlocks)
        lengths, starts = self.sequence_lengths, self.query_starts
        return AttentionMetadata(*blocks, lengths, starts, self.host, self.key_ends, self.recent)

    def segments(self, group: int) -> StateSegments:
        """For the layers with a recurrent state of this KV cache group."""
        segments = self.groups[group]
        assert isinstance(segments, StateSegments)
        return segments


@dataclass(frozen=True)
class TokenShares:
    """How ranks with the same weights and the same whole KV cache divide the tokens of a step (prefill context
    parallelism).

    Each rank computes a run of them, whatever they are: parts of prompts, drafts or decodes. A layer of attention
    writes the keys and values of its rank's tokens, and gets the rows that the other ranks have written before any rank
    attends. A recurrent layer gets the inputs of all tokens, which each rank computes. Everything else in a layer
    concerns single tokens.

    All shares have the same size, so that collectives need no padding, and no rank is without tokens: where a step
    cannot be divided evenly, shares overlap at its end. A token belongs to the first share that has it.
    """

    parallel: Parallel
    whole: Batch
    """The step."""
    own: slice
    """The tokens of this rank's share."""
    requests: range
    """Those with tokens in this rank's share."""
    ended: range
    """Those whose last token belongs to it."""
    places: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """By KV cache group: the blocks of all tokens and their offsets there, which the group's first layer computes."""

    def gather(self, x: Tensor) -> Tensor:
        """Each rank's `[tokens of its share, width]` → `[tokens of the step, width]`"""
        size, ranks, end = len(x), self.parallel.size, len(self.whole.token_ids)
        shares = self.parallel.all_gather(x.reshape(-1)).view(ranks, size, -1)
        if size * ranks == end:
            return shares.view(end, -1)
        owned = [(min(number * size, end), min((number + 1) * size, end)) for number in range(ranks)]
        firsts = [share_start(end, ranks, number) for number in range(ranks)]
        parts = zip(shares.unbind(), firsts, owned, strict=True)
        return torch.cat([share[begin - first : stop - first] for share, first, (begin, stop) in parts])

    def gather_last(self, x: Tensor) -> Tensor:
        """Each rank's `[requests with tokens in its share, width]`, of their last tokens there → `[requests of the
        step, width]`"""
        out, first = x.new_zeros(len(self.whole.sequence_lengths), x.shape[1]), self.requests.start
        out[self.ended.start : self.ended.stop] = x[self.ended.start - first : self.ended.stop - first]
        return self.parallel.all_reduce(out)

    def recur(self, layer: Callable[..., Tensor], x: Tensor, group: int, state: RecurrentState | None) -> Tensor:
        """The results of a recurrent layer for this rank's tokens. Each rank computes those of all tokens of the step,
        as the state passes from token to token: `x` has the inputs of this rank's."""
        whole = self.whole
        return layer(self.gather(x), whole.positions, whole.segments(group), state, whole.adapters_of())[self.own]

    def exchange(self, memory: Tensor, group: int) -> None:
        """Copy the rows of all tokens of the step to `memory` of a layer, `[num_tensors, blocks, kv_heads, block_size,
        row]`, which has those of this rank's tokens."""
        views, block_size, slots = [memory], memory.shape[3], self.whole.attention(group).slot_mapping
        if group not in self.places:
            self.places[group] = slots // block_size, slots % block_size
        blocks, offsets = self.places[group]
        if memory.dtype in LARGEST:  # as bytes: torch cannot index 8-bit floats
            views = [each.view(torch.uint8) for each in QuantizedRows.of(memory)]
        found = [view[:, blocks[self.own], :, offsets[self.own]].flatten(1) for view in views]
        gathered = self.gather(torch.cat(found, dim=1))
        parts = gathered.split_with_sizes([part.shape[1] for part in found], dim=1)
        for view, part in zip(views, parts, strict=True):
            rows = part.view(len(slots), view.shape[0], view.shape[2], view.shape[4])
            view[:, blocks, :, offsets] = rows


def share_size(num_tokens: int, ranks: int) -> int:
    """Tokens of each rank in a step."""
    return -(-num_tokens // ranks)


def share_start(num_tokens: int, ranks: int, rank: int) -> int:
    """The first token of a rank's share."""
    size = share_size(num_tokens, ranks)
    return min(rank * size, num_tokens - size)


def _read_from_device(query_starts: Tensor, sequence_lengths: Tensor) -> HostMetadata:
    return HostMetadata(query_starts.diff().cpu().numpy(), sequence_lengths.cpu().numpy())
