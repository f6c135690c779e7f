"""Which blocks hold whose KV: a pool with reference counts, and a prefix cache of hash-chained full blocks.

Plain Python, no torch: the blocks themselves lie in the workers, this is the book that is kept about them.

Invariants (`check_integrity`):
- a block's reference count is the number of requests that list it;
- the free blocks are exactly those with count 0, in the order in which they will be taken;
- a published hash names one block, which keeps its content until it is taken again.

A block is published when the plan that fills it is made, not when it has run: every worker runs plans in order, and in
each layer writes all KV of a step before any row of the step attends. So a later row, of the same plan even, may
read what an earlier row writes.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable
from hashlib import blake2b


def extend_hashes(hashes: list[bytes], token_ids: list[int], block_size: int, salt: bytes = b"") -> None:
    """Append the missing links of the chain: one hash for each full block, over its tokens and all before it.

    The chain starts from `salt`, which is empty or as long as a hash, so that no chain meets one of another salt.
    """
    while (end := (len(hashes) + 1) * block_size) <= len(token_ids):
        parent = hashes[-1] if hashes else salt
        tokens = array("q", token_ids[end - block_size : end]).tobytes()
        hashes.append(blake2b(parent + tokens, digest_size=16).digest())


class KVCache:
    """The pool of `num_blocks` blocks of `block_size` tokens."""

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self._references = [0] * num_blocks
        self._hash_of: list[bytes | None] = [None] * num_blocks
        self._block_of: dict[bytes, int] = {}
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold so many tokens; none where the model keeps no KV."""
        return -(-num_tokens // self.block_size) if self.num_blocks else 0

    def match(self, hashes: list[bytes]) -> list[int]:
        """The published blocks of the longest cached prefix of this hash chain. Takes no references."""
        matched: list[int] = []
        if self.enable_prefix_caching:
            for digest in hashes:
                block = self._block_of.get(digest)
                if block is None:
                    break
                matched.append(block)
        return matched

    def can_take(self, count: int, *, beside: Iterable[int] = ()) -> bool:
        """Whether `count` new blocks are free, besides holding the blocks `beside` (free ones among them count)."""
        return count + sum(not self._references[block] for block in beside) <= len(self._free)

    def hold(self, blocks: Iterable[int]) -> None:
        """Take a reference to cached blocks."""
        for block in blocks:
            if not self._references[block]:
                del self._free[block]
            self._references[block] += 1

    def take(self, count: int) -> list[int]:
        """`count` blocks with new content; the least recently used lose what they cached."""
        taken: list[int] = []
        for _ in range(count):
            block, _ = self._free.popitem(last=False)
            digest = self._hash_of[block]
            if digest is not None:
                self._hash_of[block] = None
                del self._block_of[digest]
            self._references[block] = 1
            taken.append(block)
        return taken

    def publish(self, block: int, digest: bytes) -> None:
        """Let others find a full block. Of two blocks with the same content the first stays known."""
        if self.enable_prefix_caching and self._hash_of[block] is None and digest not in self._block_of:
            self._hash_of[block] = digest
            self._block_of[digest] = block

    def release(self, blocks: list[int]) -> None:
        """Drop a request's references. Its blocks stay cached, the last of the chain being the first to go."""
        for block in reversed(blocks):
            self._references[block] -= 1
            if not self._references[block]:
                self._free[block] = None
                if self._hash_of[block] is None:
                    self._free.move_to_end(block, last=False)

    def check_integrity(self, holders: Iterable[list[int]]) -> None:
        """Assert the invariants, given the block lists of all requests."""
        counts = Counter(block for blocks in holders for block in blocks)
        assert self._references == [counts[block] for block in range(self.num_blocks)], "reference counts are off"
        unreferenced = {block for block in range(self.num_blocks) if not self._references[block]}
        assert set(self._free) == unreferenced, "free blocks are not those without references"
        published = {block: digest for block, digest in enumerate(self._hash_of) if digest is not None}
        assert {digest: block for block, digest in published.items()} == self._block_of, "hashes are off"
