"""A layer's caches of tokens and requests."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from quire import kernels
from quire.engine.distributed.communicator import Parallel
from quire.engine.layers import context_parallel
from quire.engine.layers.batch import AttentionMetadata, Batch, RecentTokens
from quire.kernels import RecurrentState


class CompressedCache(NamedTuple):
    """The cache of a layer with compressed attention (see `quire.engine.layers.compressed`)."""

    memory: Tensor
    """`[1, blocks, 1, rows of a block, head_dim]`, of tokens and of entries. A block of tokens is a page, whose first
    rows belong to the tokens."""
    tokens: Tensor
    """The same rows of tokens, `[1, blocks, 1, block_size, head_dim]`."""
    inputs: Tensor | None = None
    """`[1, blocks, 1, block_size, features]`, the compressors' inputs for tokens; None: there are no entries."""
    keys: Tensor | None = None
    """The indexer's keys of entries, `[1, blocks, 1, rows of a block, row]`."""

    @property
    def block_size(self) -> int:
        """Tokens."""
        return self.tokens.shape[3]

    def rows_of(self, slots: Tensor) -> Tensor:
        """The rows in `memory` of tokens, by their slots."""
        return slots // self.block_size * self.memory.shape[3] + slots % self.block_size

    def entry_slots(self, blocks: Tensor, ends: Tensor) -> Tensor:
        """The rows in `memory` of entries whose last tokens are at positions `ends` and in `blocks`."""
        rows = self.memory.shape[3]
        return blocks * rows + ends % self.block_size // (self.block_size // rows)

    def entries_of(self, slots: Tensor) -> Tensor:
        """The rows in `memory` of entries with these slots in `keys`."""
        assert self.keys is not None
        (of_keys, rows), size = (self.keys.shape[3], self.memory.shape[3]), self.block_size
        last = (slots % of_keys + 1) * (size // of_keys) - 1  # the token in its block
        return slots // of_keys * rows + last // (size // rows)


class RecentCache(NamedTuple):
    """The newest tokens of a layer whose cache is in 4 bits, beside those of other layers (`quire.kernels.int4_kv`)."""

    memory: Tensor
    """`[2, blocks, kv_heads, block_size, head_dim]`: blocks that layers use one after another, then those of each layer
    and request slot. Slots and moves of a batch are those of the first layer."""
    others: int
    """Blocks that layers use one after another."""
    first: int = 0
    """Blocks of the layers before this one."""

    def move(self, moves: Tensor) -> None:
        """Move blocks of request slots to `others`: see `RecentTokens.moves`."""
        self.memory.index_copy_(1, moves[1], self.memory.index_select(1, moves[0] + self.first))

    def places(self, tokens: RecentTokens) -> tuple[Tensor, Tensor]:
        """Memory, and the slots of the tokens in it."""
        if not self.first:
            return self.memory, tokens.slots
        if tokens.moves is None:  # the same slots, of memory that begins later
            return self.memory[:, self.first :], tokens.slots
        size = self.memory.shape[3]
        is_own = tokens.slots >= self.others * size
        return self.memory, tokens.slots + is_own * (self.first * size)


class LayerCache(NamedTuple):
    """The KV cache of a layer."""

    memory: Tensor | None = None
    """`[num_tensors, blocks, kv_heads, block_size, row]`, as in `quire.kernels.cache`; None: there is no attention."""
    group: int = 0
    """The KV cache group whose slot mapping and block tables the attention uses."""
    state: RecurrentState | None = None
    """The pages of a recurrent state."""
    state_group: int = 0
    """The KV cache group whose segments the recurrent state uses."""
    keys: Tensor | None = None
    """An indexer's keys, in the same slots as `memory`: `[1, blocks, 1, block_size, row]`."""
    compressed: CompressedCache | None = None
    """With compressed attention, instead of `memory` and `keys`."""
    entries_group: int | None = None
    """The KV cache group of its entries."""
    recent: RecentCache | None = None
    """If `memory` is in 4 bits, the keys and values of the newest tokens."""

    def own_metadata(self, batch: Batch, context: Parallel) -> AttentionMetadata:
        """A step as attention sees it: the keys and values that this rank of `context` has."""
        assert self.memory is not None
        return context_parallel.own_metadata(batch, self.group, self.memory.shape[3], context)

    def write(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cos_sin: Tensor,
        batch: Batch,
        context: Parallel = Parallel.context,
    ) -> Tensor:
        """Store the keys and values of a step's tokens, with keys rotated; returns the rotated queries. Ranks of
        `context` store their own tokens."""
        assert self.memory is not None
        slots = self.own_metadata(batch, context).slot_mapping
        if self.recent is None:
            query = kernels.rotary_write_kv(query, key, value, cos_sin, self.memory, slots)
            if batch.shares is not None:
                batch.shares.exchange(self.memory, self.group)
            return query
        assert batch.recent is not None
        if batch.recent.moves is not None:
            self.recent.move(batch.recent.moves)
        recent, places = self.recent.places(batch.recent)
        query = kernels.rotary_write_kv(query, key, value, cos_sin, recent, places)
        kernels.quantize_kv(recent, self.memory, places, slots)
        return query

    def attend(
        self,
        query: Tensor,
        metadata: AttentionMetadata,
        scale: float,
        context: Parallel = Parallel.context,
        **options: Any,
    ) -> Tensor:
        """Causal attention of queries `[tokens, heads, head_dim]`, with options of `kernels.paged_attention`."""
        assert self.memory is not None
        if self.recent is None:
            return context_parallel.attend(query, self.memory, metadata, scale, context, **options)
        assert metadata.recent is not None
        assert metadata.key_ends is None
        own = self.recent.places(metadata.recent)
        return kernels.int4_attention(query, self.memory, *metadata.paged, scale, *own, **options)
