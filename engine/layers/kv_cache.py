"""A layer's caches of tokens and requests."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

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
