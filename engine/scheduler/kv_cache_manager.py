"""Which blocks hold whose KV: a pool with reference counts, and a prefix cache of hash-chained full blocks.

Plain Python, no torch: the blocks themselves lie in the workers, this is the book that is kept about them.

A request has a block in each group of layers (`config.CacheGroup`) for every `block_size` of its tokens. They stand in
one list, those of the first tokens first: the block of group `g` for the tokens from `i * block_size` on is number
`i * groups + g`. `FREED` stands for one that the group's window has left behind. The hashes under which full blocks are
published stand in a list in the same order.

Invariants (`check_integrity`):
- a block's reference count is the number of requests that list it;
- the free blocks are exactly those with count 0, in the order in which they will be taken;
- a published hash names one block, which keeps its content until it is taken again.

A block behind a window is given back before the row that no longer sees it is planned, while the workers may still have
rows to run that do. These come first, wherever the block goes.

A block is published when the plan that fills it is made, not when it has run: every worker runs plans in order, and in
each layer writes all KV of a step before any row of the step attends. So a later row, of the same plan even, may
read what an earlier row writes. If the plan fails, what it and those behind it published is published no more.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import blake2b

from quire.engine.config.options import CacheGroup

FREED = -1


def extend_hashes(
    hashes: list[bytes], token_ids: list[int], block_size: int, salt: bytes = b"", num_groups: int = 1
) -> None:
    """Append the missing links of the chain: one hash for each full block, over its tokens and all before it.

    The chain starts from `salt`, which is empty or as long as a hash, so that no chain meets one of another salt. The
    first group's hash is the link; those of the others are the same with their number behind.
    """
    while (end := (len(hashes) // num_groups + 1) * block_size) <= len(token_ids):
        parent = hashes[-num_groups] if hashes else salt
        tokens = array("q", token_ids[end - block_size : end]).tobytes()
        link = blake2b(parent + tokens, digest_size=16).digest()
        hashes.append(link)
        if num_groups > 1:
            hashes.extend(link + group.to_bytes(2) for group in range(1, num_groups))


class KVCacheManager:
    """The pool of `num_blocks` blocks, each of `block_size` tokens of a group."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        enable_prefix_caching: bool,
        groups: Sequence[CacheGroup] = (CacheGroup(),),
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.num_groups = len(groups)
        self.windows = {number: group.window for number, group in enumerate(groups) if group.window is not None}
        """Of the groups that have one, by number."""
        assert self.windows or self.num_groups == 1, "layers that keep all tokens need one group"
        self._groups = groups
        self._references = [0] * num_blocks
        self._hash_of: list[bytes | None] = [None] * num_blocks
        self._block_of: dict[bytes, int] = {}
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._unwritten: dict[int, list[int]] = {}
        """Blocks that are published although their content is not written before this step has run."""

    @property
    def num_free(self) -> int:
        return len(self._free)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks of all groups for so many tokens, if none is given back; none where the model keeps no KV."""
        return -(-num_tokens // self.block_size) * self.num_groups if self.num_blocks else 0

    def full_blocks(self, num_tokens: int) -> int:
        """Of these, the ones that are full."""
        return num_tokens // self.block_size * self.num_groups

    def tokens_in(self, num_blocks: int) -> int:
        """Tokens that so many blocks of all groups hold."""
        return num_blocks // self.num_groups * self.block_size

    def blocks_at_once(self, num_tokens: int, row_tokens: int, cached: list[int]) -> int:
        """Blocks to take at once at most for a request of `num_tokens`, in rows of `row_tokens`, beside its prefix."""
        if not self.windows:
            return self.blocks_for(num_tokens) - len(cached)
        computed, size, count = self.tokens_in(len(cached)), self.block_size, 0
        for number, group in enumerate(self._groups):
            behind = self._first_seen(number, computed)
            most = group.most_blocks(num_tokens - behind * size, min(row_tokens, num_tokens - computed), size)
            count += max(0, most - (computed // size - behind))
        return count

    def match(self, hashes: list[bytes]) -> list[int]:
        """The published blocks of the longest cached prefix of this hash chain. Takes no references.

        A prefix is cached if those blocks are that the token behind it sees; in place of others stands `FREED`.
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
        at, seen = length, self._seen_behind(length)
        while at > min(seen.values()):
            at -= 1
            if any(at >= first and hashes[at * stride + group] not in known for group, first in seen.items()):
                length, seen = at, self._seen_behind(at)
        matched = [FREED] * (length * stride)
        for group in range(stride):
            for place in range(seen.get(group, 0) * stride + group, length * stride, stride):
                matched[place] = known[hashes[place]]
        return matched

    def _seen_behind(self, length: int) -> dict[int, int]:
        """For each group with a window, the first block that the token behind `length` blocks sees."""
        return {group: self._first_seen(group, length * self.block_size) for group in self.windows}

    def _first_seen(self, group: int, position: int) -> int:
        """The first of the group's blocks, counted in `block_size` tokens, that a query at `position` sees."""
        window = self.windows.get(group)
        return 0 if window is None else max(0, position + 1 - window) // self.block_size

    def give_back_behind(self, blocks: list[int], position: int) -> None:
        """Release those of a request's blocks that no query from `position` on sees; `blocks` then says `FREED`."""
        for group in self.windows:
            place = (self._first_seen(group, position) - 1) * self.num_groups + group
            while place >= 0 and blocks[place] >= 0:
                self.release(blocks[place : place + 1])
                blocks[place] = FREED
                place -= self.num_groups

    def can_take(self, count: int, *, beside: Iterable[int] = ()) -> bool:
        """Whether `count` new blocks are free, besides holding the blocks `beside` (free ones among them count)."""
        return count + sum(not self._references[block] for block in beside) <= len(self._free)

    def held(self, blocks: list[int]) -> list[int]:
        """A request's blocks without those that were given back."""
        return [block for block in blocks if block >= 0] if self.windows else blocks

    def table(self, blocks: list[int]) -> list[int]:
        """The same for workers: some block stands for those that were given back, which nobody reads any more."""
        return [max(block, 0) for block in blocks] if self.windows else list(blocks)

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

    def publish(self, block: int, digest: bytes, step: int | None = None) -> None:
        """Let others find a full block, which is written when this step has run, if one is given.

        Of two with the same content the first stays known.
        """
        if self.enable_prefix_caching and self._hash_of[block] is None and digest not in self._block_of:
            self._hash_of[block] = digest
            self._block_of[digest] = block
            if step is not None:
                self._unwritten.setdefault(step, []).append(block)

    def written(self, step: int) -> None:
        """This step is over: what was to be written in it is, or is published no more."""
        self._unwritten.pop(step, None)

    def unpublish_unwritten(self) -> None:
        """Let nobody find the blocks any more that never got the content that they were published for."""
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

    def release(self, blocks: list[int]) -> None:
        """Drop a request's references. Its blocks stay cached, the last of the chain being the first to go."""
        for block in reversed(blocks):
            self._references[block] -= 1
            if not self._references[block]:
                self._free[block] = None
                if self._hash_of[block] is None:
                    self._free.move_to_end(block, last=False)

    def check_windows(self, blocks: list[int], position: int, row_tokens: int) -> None:
        """Assert that a request has the blocks that its queries from `position` on see, and not many more."""
        assert len(blocks) >= self.blocks_for(position), "blocks are missing"
        for number, group in enumerate(self._groups):
            mine = blocks[number :: self.num_groups]
            held = [block for block in mine if block != FREED]
            assert mine == [FREED] * (len(mine) - len(held)) + held, "there are holes"
            assert len(mine) - len(held) <= self._first_seen(number, position), "a block in the window is given back"
            most = group.most_blocks(len(mine) * self.block_size, row_tokens, self.block_size)
            assert len(held) <= most, "blocks behind the window are kept"

    def check_integrity(self, holders: Iterable[list[int]]) -> None:
        """Assert the invariants, given the block lists of all requests."""
        counts = Counter(block for blocks in holders for block in blocks)
        assert self._references == [counts[block] for block in range(self.num_blocks)], "reference counts are off"
        unreferenced = {block for block in range(self.num_blocks) if not self._references[block]}
        assert set(self._free) == unreferenced, "free blocks are not those without references"
        published = {block: digest for block, digest in enumerate(self._hash_of) if digest is not None}
        assert {digest: block for block, digest in published.items()} == self._block_of, "hashes are off"
