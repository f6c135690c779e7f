"""The KV cache manager: a block pool with reference counts, and a prefix cache of hash-chained full blocks.

Plain Python, no torch: the blocks themselves are in the workers, and this module only does the bookkeeping.

A request has a block in each group of layers (`options.KVCacheGroup`) for every `block_size` of its tokens. All its
blocks are in one list in token order: the block of group `g` for the tokens from `i * block_size` on has index
`i * groups + g`. `FREED` replaces a block that is outside the group's window. The hashes of full blocks are in a list
in the same order.

Invariants (`check_integrity`):
- a block's reference count is the number of requests that list it;
- the free blocks are exactly those with count 0, in the order in which they will be allocated;
- a published hash maps to one block, which keeps its content until it is allocated again.

A block outside a window is freed before the row that no longer sees it is scheduled, while rows in flight may still
read it. Workers run plans in order, so these rows run before the block is written again.

A block is published when the plan that fills it is made, not when the plan has run: every worker runs plans in order,
and in each layer writes all KV of a step before any row of the step attends. A later row, even of the same plan, can
therefore read what an earlier row writes. If the plan fails, the blocks that it and later plans published are
unpublished.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import blake2b

from quire.engine.config.engine_config import KVCacheGroup

FREED = -1


def extend_hashes(
    hashes: list[bytes], token_ids: list[int], block_size: int, salt: bytes = b"", num_groups: int = 1
) -> None:
    """Append the missing hashes of the chain: one for each full block, over its tokens and all previous tokens.

    The chain starts from `salt`, which is empty or as long as a hash, so that chains of different salts never match.
    The first group's hash is the link of the chain; the hash of another group is the link followed by its number.
    """
    while (end := (len(hashes) // num_groups + 1) * block_size) <= len(token_ids):
        parent = hashes[-num_groups] if hashes else salt
        tokens = array("q", token_ids[end - block_size : end]).tobytes()
        link = blake2b(parent + tokens, digest_size=16).digest()
        hashes.append(link)
        if num_groups > 1:
            hashes.extend(link + group.to_bytes(2) for group in range(1, num_groups))


class KVCacheManager:
    """A pool of `num_blocks` blocks, each for `block_size` tokens in one group of layers."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        enable_prefix_caching: bool,
        groups: Sequence[KVCacheGroup] = (KVCacheGroup(),),
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.num_groups = len(groups)
        self.windows = {number: group.window for number, group in enumerate(groups) if group.window is not None}
        """Window of each group that has one, by group number."""
        assert self.windows or self.num_groups == 1, "layers that keep all tokens need one group"
        self._groups = groups
        self._references = [0] * num_blocks
        self._hash_of: list[bytes | None] = [None] * num_blocks
        self._block_of: dict[bytes, int] = {}
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._unwritten: dict[int, list[int]] = {}
        """By step: published blocks whose content is written when the step has run."""

    @property
    def num_free(self) -> int:
        return len(self._free)

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks of all groups for this many tokens, if none is freed; 0 if the model keeps no KV."""
        return -(-num_tokens // self.block_size) * self.num_groups if self.num_blocks else 0

    def num_full_blocks(self, num_tokens: int) -> int:
        """Full blocks of all groups in this many tokens."""
        return num_tokens // self.block_size * self.num_groups

    def num_tokens_in(self, num_blocks: int) -> int:
        """Tokens in this many blocks of all groups."""
        return num_blocks // self.num_groups * self.block_size

    def max_blocks_needed(self, num_tokens: int, row_tokens: int, cached: list[int]) -> int:
        """Maximum new blocks in use at once by a request of `num_tokens`, in rows of `row_tokens`, after its prefix."""
        if not self.windows:
            return self.num_blocks_for(num_tokens) - len(cached)
        computed, size, count = self.num_tokens_in(len(cached)), self.block_size, 0
        for number, group in enumerate(self._groups):
            behind = self._first_visible_block(number, computed)
            max_blocks = group.max_blocks(num_tokens - behind * size, min(row_tokens, num_tokens - computed), size)
            count += max(0, max_blocks - (computed // size - behind))
        return count

    def match(self, hashes: list[bytes]) -> list[int]:
        """Return the published blocks of the longest cached prefix of this hash chain, without taking references.

        A prefix is cached if the blocks that the next token sees are cached; the others are `FREED` in the result.
        """
        if self.windows:
            return self._match_windows(hashes)
        matched: list[int] = []
        if self.enable_prefix_caching:
            for digest in hashes:
                block = self._block_of.get(digest)
                if block is None:
                    break
                matched.append(block)
        return matched

    def _match_windows(self, hashes: list[bytes]) -> list[int]:
        stride, known = self.num_groups, self._block_of
        length = len(hashes) // stride if self.enable_prefix_caching else 0
        for group in range(stride):
            if group not in self.windows:
                missing = (at for at in range(length) if hashes[at * stride + group] not in known)
                length = next(missing, length)
        at, seen = length, self._first_visible_blocks(length)
        while at > min(seen.values()):
            at -= 1
            if any(at >= first and hashes[at * stride + group] not in known for group, first in seen.items()):
                length, seen = at, self._first_visible_blocks(at)
        matched = [FREED] * (length * stride)
        for group in range(stride):
            for place in range(seen.get(group, 0) * stride + group, length * stride, stride):
                matched[place] = known[hashes[place]]
        return matched

    def _first_visible_blocks(self, length: int) -> dict[int, int]:
        """For each group with a window, the first block that the token after `length` blocks sees."""
        return {group: self._first_visible_block(group, length * self.block_size) for group in self.windows}

    def _first_visible_block(self, group: int, position: int) -> int:
        """Index, in units of `block_size` tokens, of the group's first block that a query at `position` sees."""
        window = self.windows.get(group)
        return 0 if window is None else max(0, position + 1 - window) // self.block_size

    def free_out_of_window(self, blocks: list[int], position: int) -> None:
        """Free the blocks of a request that no query from `position` on sees, and replace them by `FREED`."""
        for group in self.windows:
            place = (self._first_visible_block(group, position) - 1) * self.num_groups + group
            while place >= 0 and blocks[place] >= 0:
                self.free(blocks[place : place + 1])
                blocks[place] = FREED
                place -= self.num_groups

    def can_allocate(self, count: int, *, cached_blocks: Iterable[int] = ()) -> bool:
        """Whether `count` blocks are free in addition to `cached_blocks`, of which some may be free."""
        return count + sum(not self._references[block] for block in cached_blocks) <= len(self._free)

    def without_freed(self, blocks: list[int]) -> list[int]:
        """Return a request's blocks without those that were freed."""
        return [block for block in blocks if block >= 0] if self.windows else blocks

    def block_table(self, blocks: list[int]) -> list[int]:
        """Return a request's block table for the workers. Freed blocks, which are never read, become block 0."""
        return [max(block, 0) for block in blocks] if self.windows else list(blocks)

    def touch(self, blocks: Iterable[int]) -> None:
        """Take a reference to each of these cached blocks."""
        for block in blocks:
            if not self._references[block]:
                del self._free[block]
            self._references[block] += 1

    def allocate(self, count: int) -> list[int]:
        """Allocate `count` blocks; evicts the least recently used cached blocks."""
        allocated: list[int] = []
        for _ in range(count):
            block, _ = self._free.popitem(last=False)
            digest = self._hash_of[block]
            if digest is not None:
                self._hash_of[block] = None
                del self._block_of[digest]
            self._references[block] = 1
            allocated.append(block)
        return allocated

    def publish(self, block: int, digest: bytes, step: int | None = None) -> None:
        """Add a full block to the prefix cache. `step` is the step that writes it, if it has not run yet.

        Of two blocks with the same content the first stays in the cache.
        """
        if self.enable_prefix_caching and self._hash_of[block] is None and digest not in self._block_of:
            self._hash_of[block] = digest
            self._block_of[digest] = block
            if step is not None:
                self._unwritten.setdefault(step, []).append(block)

    def mark_written(self, step: int) -> None:
        """Record that this step has run: the blocks published for it are written, or were unpublished."""
        self._unwritten.pop(step, None)

    def unpublish_unwritten(self) -> None:
        """Remove from the prefix cache the published blocks that were never written."""
        for blocks in self._unwritten.values():
            for block in blocks:
                self._unpublish(block)
        self._unwritten.clear()

    def _unpublish(self, block: int) -> None:
        digest = self._hash_of[block]
        if digest is not None:
            self._hash_of[block] = None
            del self._block_of[digest]
            if block in self._free:
                self._free.move_to_end(block, last=False)

    def free(self, blocks: list[int]) -> None:
        """Drop a request's references. Its blocks stay cached; the last of the chain is evicted first."""
        for block in reversed(blocks):
            self._references[block] -= 1
            if not self._references[block]:
                self._free[block] = None
                if self._hash_of[block] is None:
                    self._free.move_to_end(block, last=False)

    def check_windows(self, blocks: list[int], position: int, row_tokens: int) -> None:
        """Assert that a request has the blocks that its queries from `position` on see, and no more than the limit."""
        assert len(blocks) >= self.num_blocks_for(position), "blocks are missing"
        for number, group in enumerate(self._groups):
            group_blocks = blocks[number :: self.num_groups]
            without_freed = [block for block in group_blocks if block != FREED]
            assert group_blocks == [FREED] * (len(group_blocks) - len(without_freed)) + without_freed, (
                "freed blocks are not a prefix"
            )
            assert len(group_blocks) - len(without_freed) <= self._first_visible_block(number, position), (
                "a block in the window was freed"
            )
            max_blocks = group.max_blocks(len(group_blocks) * self.block_size, row_tokens, self.block_size)
            assert len(without_freed) <= max_blocks, "blocks outside the window are kept"

    def check_integrity(self, block_lists: Iterable[list[int]]) -> None:
        """Assert the invariants, given the block lists of all requests."""
        counts = [0] * self.num_blocks
        for blocks in block_lists:
            for block in blocks:
                counts[block] += 1
        assert self._references == counts, "reference counts are off"
        unreferenced = {block for block, count in enumerate(counts) if not count}
        assert self._free.keys() == unreferenced, "free blocks are not those without references"
        published = {digest: block for block, digest in enumerate(self._hash_of) if digest is not None}
        assert published == self._block_of, "hashes are off"
        assert len(published) == self.num_blocks - self._hash_of.count(None), "two blocks have one hash"
