"""A step as the model sees it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.kernels import AdapterRows, HostMetadata, StateSegments


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
    """`[features]`, indices of the tokens whose embeddings are replaced by features of images and videos."""
    media_features: Tensor | None = None
    """`[features, feature_width]`, for the first stage."""
    key_ends: Tensor | None = None
    """`[tokens]`, the position after the last token that each token attends to, which is further than its own where the
    tokens of a run of features attend to each other in both directions; None: each token's own is its last."""
    adapters: BatchAdapters | None = None
    """None: no row has an adapter."""
    recent: RecentTokens | None = None
    """None: the cache is not in 4 bits."""
    on_layer: Callable[[int], None] | None = None
    """Called when a layer has been computed (on a GPU: launched), with its number in the stage. Only `Decoder` does."""
    shared: SharedResults = field(default_factory=SharedResults)
    """Each forward pass begins with new ones."""

    def host_metadata(self) -> HostMetadata:
        """`host`, or the same read from the tensors."""
        return self.host or _read_from_device(self.query_starts, self.sequence_lengths)

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


def _read_from_device(query_starts: Tensor, sequence_lengths: Tensor) -> HostMetadata:
    return HostMetadata(query_starts.diff().cpu().numpy(), sequence_lengths.cpu().numpy())
