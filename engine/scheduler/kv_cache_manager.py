"""The KV cache manager: a block pool with reference counts, and a prefix cache of hash-chained full blocks.

Plain Python, no torch: the blocks themselves are in the workers, and this module only does the bookkeeping.

A request has a block in each group of layers (`options.KVCacheGroup`) for every `block_size` of its tokens. All its
blocks are in one list in token order: the block of group `g` for the tokens from `i * block_size` on has index
`i * groups + g`. `FREED` replaces a block that is outside the group's window. The hashes of full blocks are in a list
in the same order.

Invariants (`check_integrity`):
- a block's reference count is the number of requests, loads and copies that list it
  (`quire.engine.scheduler.kv_transfers`);
- the free blocks are exactly those with count 0, in the order in which they will be allocated;
- a published hash maps to one block, which keeps its content until it is allocated again.

Blocks are allocated in pages, which are the unit of reference counts and eviction. The blocks of a page are contiguous,
and belong to one request until another one finds them in the prefix cache. In groups that fill pages, a block takes a
whole page, represented by the page's first block. Without recurrent states and such groups, a page is a block.

A recurrent state takes a page, represented in the list by the page's first block, at the index of the last block that
the state includes. A row reads the state at its start, and writes the state at its end and at each place in between
that has a page. States stay in the prefix cache at multiples of `STATE_INTERVAL` tokens, at the last boundary of a
prompt, and at the last boundary of the tokens sampled so far; at other places, the page is reused for the next state.
In groups whose blocks fill pages, the blocks in the windows before these places stay.

A block outside a window is freed before the row that no longer sees it is scheduled, while rows in flight may still
read it. Workers run plans in order, so these rows run before the block is written again.

A block is published when the plan that fills it is made, not when the plan has run: every worker runs plans in order,
and in each layer writes all KV of a step before any row of the step attends. A later row, even of the same plan, can
therefore read the KV that an earlier row writes. If the plan fails, the blocks that it and later plans published are
unpublished.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections import Counter, OrderedDict
from collections.abc import Container, Iterable, Sequence
from hashlib import blake2b
from itertools import chain, takewhile
from operator import attrgetter

from quire.engine.config.engine_config import KVCacheGroup
from quire.engine.protocol.kv_store import LINK_BYTES
from quire.engine.protocol.media import MediaItem
from quire.engine.scheduler.kv_events import KVEvents
from quire.engine.scheduler.prefix_length import first_visible_block, prefix_length, windows_of

FREED = -1
STATE_INTERVAL = 1024
"""Tokens between the recurrent states of a long text that stay in the prefix cache; a multiple of every block size up
to this."""
_END = attrgetter("end")


def block_hash(link: bytes, group: int) -> bytes:
    """Return the hash of a group's block with this link of the chain."""
    return link + group.to_bytes(2) if group else link


def extend_hashes(
    hashes: list[bytes],
    token_ids: list[int],
    block_size: int,
    salt: bytes = b"",
    num_groups: int = 1,
    media: Sequence[MediaItem] = (),
    adapter: bytes = b"",
    adapter_start: int = 0,
) -> None:
    """Append the missing hashes of the chain: one for each full block, over its tokens and all previous tokens.

    The chain starts from `salt`, which is empty or as long as a hash, so that chains of different salts never match. A
    block that overlaps an item of `media` includes the item's digest and place. The one with token `adapter_start`
    includes the digest `adapter`, if there is one, and that place: what is before is as without it.
    The first group's hash is the link of the chain; the hash of another group is the link followed by its number.
    """
    while (end := (len(hashes) // num_groups + 1) * block_size) <= len(token_ids):
        parent = hashes[-num_groups] if hashes else salt
        content = array("q", token_ids[end - block_size : end]).tobytes()
        if media:
            start = end - block_size
            first = bisect_right(media, start, key=_END)
            for item in takewhile(lambda item: item.offset < end, media[first : first + block_size]):
                content += item.digest + (item.offset - start).to_bytes(8, signed=True)
        if adapter and end - block_size <= adapter_start < end:
            content += adapter + (adapter_start - end).to_bytes(8, signed=True)  # longer than what items add
        link = blake2b(parent + content, digest_size=16).digest()
        hashes.append(link)
        if num_groups > 1:
            hashes.extend(block_hash(link, group) for group in range(1, num_groups))


class KVCacheManager:
    """A pool of `num_blocks` blocks, each for `block_size` tokens in one group of layers."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        enable_prefix_caching: bool,
        groups: Sequence[KVCacheGroup] = (KVCacheGroup(),),
        blocks_per_page: int = 1,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.num_groups = len(groups)
        self.states = frozenset(number for number, group in enumerate(groups) if group.is_state)
        """Groups with recurrent states."""
        self._in_pages = frozenset(number for number, group in enumerate(groups) if group.fills_pages)
        self.scarce = self.states | self._in_pages
        """Groups whose blocks stay in the prefix cache only at some places (`is_kept`)."""
        self.windows = windows_of(groups)
        """Window of each group that has one, by group number."""
        assert self.windows or self.num_groups == 1, "layers that keep all tokens need one group"
        self._groups = groups
        self._blocks_per_page, num_pages = blocks_per_page, num_blocks // blocks_per_page
        self._num_used = [0] * num_pages
        """Blocks of each page that have been given to a request."""
        self._references = [0] * num_pages
        self._hash_of: list[bytes | None] = [None] * (num_pages * blocks_per_page)
        self._block_of: dict[bytes, int] = {}
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_pages))
        self._unwritten: dict[int, list[int]] = {}
        """By step: published blocks whose content is written when the step has run."""
        self.listener: KVEvents | None = None
        """Is told which blocks the prefix cache loses; `RequestBlocks` tells it which ones it gains."""

    @property
    def num_free(self) -> int:
        """Free pages."""
        return len(self._free)

    @property
    def num_free_blocks(self) -> int:
        return len(self._free) * self._blocks_per_page

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks of all groups for this many tokens, if none is freed; 0 if the model keeps no KV."""
        return -(-num_tokens // self.block_size) * self.num_groups if self.num_blocks else 0

    def num_full_blocks(self, num_tokens: int) -> int:
        """Full blocks of all groups in this many tokens."""
        return num_tokens // self.block_size * self.num_groups

    def num_tokens_in(self, num_blocks: int) -> int:
        """Tokens in this many blocks of all groups."""
        return num_blocks // self.num_groups * self.block_size

    def pages_needed(self, blocks: list[int], num_tokens: int) -> int:
        """Pages that `extend` must allocate for a request of `num_tokens`, given its `blocks`."""
        missing = self.num_blocks_for(num_tokens) - len(blocks)
        if self._blocks_per_page == 1 and not self.states:
            return missing
        missing //= self.num_groups
        if missing <= 0:
            return 0
        count = 0
        for group in range(self.num_groups):
            last = blocks[group - self.num_groups] if blocks else FREED
            if group in self.states:
                count += not self._is_own(last)
            elif group in self._in_pages:
                count += missing
            else:
                count += -(-max(0, missing - self._room_after(last)) // self._blocks_per_page)
        return count

    def max_pages_needed(self, num_tokens: int, row_tokens: int, cached: list[int]) -> int:
        """Maximum new pages in use at once by a request of `num_tokens`, in rows of `row_tokens`, after its prefix."""
        if not self.windows:
            return self.num_blocks_for(num_tokens) - len(cached)
        computed, size, count = self.num_tokens_in(len(cached)), self.block_size, 0
        for number, group in enumerate(self._groups):
            if group.is_state:
                count += 1
                continue
            behind = self._first_visible_block(number, computed)
            max_blocks = group.max_blocks(num_tokens - behind * size, min(row_tokens, num_tokens - computed), size)
            page = 1 if group.fills_pages else self._blocks_per_page
            count += -(-max(0, max_blocks - (computed // size - behind)) // page)
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
        known = self._block_of
        length = self.prefix_length(hashes, known) if self.enable_prefix_caching else 0
        matched = [FREED] * (length * self.num_groups)
        for place in self.visible_places(length):
            matched[place] = known[hashes[place]]
        return matched

    def prefix_length(self, hashes: list[bytes], known: Container[bytes]) -> int:
        """Return the length, in blocks of each group, of the longest prefix whose next token sees only blocks with
        `known` hashes."""
        return prefix_length(hashes, known, self.num_groups, self.windows, self.block_size)

    def visible_places(self, length: int) -> list[int]:
        """The indexes, in a request's list, of the blocks that the token after `length` blocks of each group sees."""
        stride, seen = self.num_groups, self._first_visible_blocks(length)
        return sorted(
            chain.from_iterable(
                range(seen.get(group, 0) * stride + group, length * stride, stride) for group in range(stride)
            )
        )

    def is_cached(self, block: int) -> bool:
        """Whether a block is in the prefix cache."""
        return self._hash_of[block] is not None

    def link_of(self, block: int) -> bytes | None:
        """Return the link of a block in the prefix cache; None: it is not there."""
        digest = self._hash_of[block]
        return None if digest is None else digest[:LINK_BYTES]

    def cached_block(self, digest: bytes) -> int:
        """Return the block in the prefix cache with this hash; `FREED` if there is none."""
        return self._block_of.get(digest, FREED)

    @property
    def unwritten(self) -> set[int]:
        """The blocks in the prefix cache that steps in flight are still writing."""
        return {block for blocks in self._unwritten.values() for block in blocks}

    def _first_visible_blocks(self, length: int) -> dict[int, int]:
        """For each group with a window, the first block that the token after `length` blocks sees."""
        return {group: self._first_visible_block(group, length * self.block_size) for group in self.windows}

    def _first_visible_block(self, group: int, position: int) -> int:
        """Index, in units of `block_size` tokens, of the group's first block that a query at `position` sees."""
        return first_visible_block(self.windows.get(group), position, self.block_size)

    def free_out_of_window(self, blocks: list[int], position: int, num_published: int = 0) -> None:
        """Free the blocks of a request that no query from `position` on sees, and replace them by `FREED`.

        States before the first `num_published` blocks but the last of them have been freed before.
        """
        for group in self.windows:
            end = self._first_visible_block(group, position) * self.num_groups + group
            if group in self.states:
                places = range(max(0, num_published - self.num_groups) + group, end, self.num_groups)
                visible = [place for place in places if blocks[place] >= 0]
            else:
                places = range(end - self.num_groups, -1, -self.num_groups)
                visible = list(takewhile(lambda place: blocks[place] >= 0, places))
            for place in visible:
                self.free(blocks[place : place + 1])
                blocks[place] = FREED

    def can_allocate(self, count: int, *, cached_blocks: Iterable[int] = ()) -> bool:
        """Whether `count` pages are free in addition to `cached_blocks`, some of which may be free themselves."""
        pages = self.pages(cached_blocks)
        return count + sum(not self._references[page] for page in pages) <= len(self._free)

    def pages(self, blocks: Iterable[int]) -> set[int]:
        """The pages that these blocks are in."""
        return {block // self._blocks_per_page for block in blocks}

    def without_freed(self, blocks: list[int]) -> list[int]:
        """Return a request's blocks without those that were freed."""
        return [block for block in blocks if block >= 0] if self.windows else blocks

    def block_table(self, blocks: list[int]) -> list[int]:
        """Return a request's block table for the workers. Freed blocks, which are never read, become block 0; where
        there is no recurrent state, there is none for the workers."""
        if not self.states:
            return [max(block, 0) for block in blocks] if self.windows else list(blocks)
        groups = self.num_groups
        return [block if at % groups in self.states else max(block, 0) for at, block in enumerate(blocks)]

    def touch(self, blocks: Iterable[int]) -> None:
        """Take a reference to each of these cached blocks."""
        for block in blocks:
            page = block // self._blocks_per_page
            if not self._references[page]:
                del self._free[page]
            self._references[page] += 1

    def extend(
        self, blocks: list[int], hashes: list[bytes], start: int, end: int, num_known: int, num_prompt: int
    ) -> list[int]:
        """Append the blocks that a row from token `start` to `end` needs to the request's blocks; returns them.

        `num_known` tokens of the request are known, of which `num_prompt` are its prompt. `pages_needed` are free.
        """
        new = self._blocks_missing(blocks, end)
        if new and self.states:
            self._extend_states(blocks, new, hashes, start, end, num_known, num_prompt)
        blocks += new
        return new

    def is_kept(self, group: int, boundary: int, num_known: int) -> bool:
        """Whether the block before `boundary` belongs in the prefix cache of a request with `num_known` tokens."""
        if group in self._in_pages:  # in the window of the tokens at the places where states are kept
            window = self.windows[group] + self.block_size
            return num_known - window < boundary or -boundary % STATE_INTERVAL < window
        if group not in self.states:
            return True
        newest = (num_known - 1) // self.block_size * self.block_size
        return self.enable_prefix_caching and (boundary == newest or boundary % STATE_INTERVAL == 0)

    def _blocks_missing(self, blocks: list[int], end: int) -> list[int]:
        """Allocate the blocks of keys and values that a request lacks for `end` tokens; states are `FREED`."""
        count = self.num_blocks_for(end) - len(blocks)
        if self._blocks_per_page == 1 and not self.states:
            return self.allocate(count)
        groups, new = self.num_groups, [FREED] * count
        for group in set(range(groups)) - self.states:
            last = blocks[group - groups] if blocks else FREED
            for place in range(group, count, groups):
                last = new[place] = self._allocate_after(group, last)
        return new

    def _allocate_after(self, group: int, last: int) -> int:
        """Allocate a block of a group: if possible the one after `last` in its page."""
        size = self._blocks_per_page
        if group in self.scarce:
            return self._allocate_page()
        if self._room_after(last):
            block = last + 1
            self._references[block // size] += 1
        else:
            block = self.allocate(1)[0] * size
        self._num_used[block // size] = block % size + 1
        return block

    def allocate_places(self, blocks: list[int], places: Iterable[int]) -> None:
        """Allocate the blocks at these indexes of a list, in order; `pages_for_places` pages must be free."""
        groups = self.num_groups
        for place in places:
            blocks[place] = self._allocate_after(place % groups, blocks[place - groups] if place >= groups else FREED)

    def pages_for_places(self, places: Iterable[int]) -> int:
        """Maximum pages that `allocate_places` takes."""
        groups, size, count, room = self.num_groups, self._blocks_per_page, 0, dict[int, int]()
        for place in places:
            group, left = place % groups, room.pop(place, 0)
            count += not left
            if group not in self.scarce:
                room[place + groups] = left - 1 if left else size - 1
        return count

    def _room_after(self, block: int) -> int:
        """Unused blocks of the page after this block, if it is the last used one."""
        page, offset = divmod(block, self._blocks_per_page)
        return self._blocks_per_page - 1 - offset if block >= 0 and self._num_used[page] == offset + 1 else 0

    def _extend_states(
        self,
        blocks: list[int],
        new: list[int],
        hashes: list[bytes],
        start: int,
        end: int,
        num_known: int,
        num_prompt: int,
    ) -> None:
        """Choose the pages for the states that a row writes."""
        size, groups, first = self.block_size, self.num_groups, len(blocks) // self.num_groups
        known = max(num_known, end)
        current = {group: blocks[(first - 1) * groups + group] if first else FREED for group in self.states}
        shared = [group for group, state in current.items() if not self._is_own(state)]
        for group in shared:
            new[group - groups] = self._allocate_page()
        # The state of sampled tokens that the one at `start` replaces in the prefix cache.
        before = start - size
        is_replaced = before >= num_prompt and before % STATE_INTERVAL > 0 and end - start == 1
        for group in self.states.difference(shared):
            state, page = current[group], FREED
            will_stay = start % size > 0 and self.is_kept(group, first * size, known)
            if self._hash_of[state] is not None or will_stay:
                if is_replaced:
                    page = self._take_back(hashes[(before // size - 1) * groups + group])
                if page == FREED and self._free:
                    page = self._allocate_page()
            if page == FREED:  # write over the state that the row reads
                self._unpublish(state)
                page, blocks[(first - 1) * groups + group] = state, FREED
            new[group - groups] = page
        for boundary in range((first + 1) * size, end, size):
            for group in self.states:
                if self._free and self.is_kept(group, boundary, known):
                    new[(boundary // size - 1 - first) * groups + group] = self._allocate_page()

    def _is_own(self, state: int) -> bool:
        """Whether a request has this state, and no other request uses it."""
        return state != FREED and self._references[state // self._blocks_per_page] == 1

    def _take_back(self, digest: bytes) -> int:
        """Allocate the page of a cached state, if no request uses it."""
        block = self._block_of.get(digest, FREED)
        page = block // self._blocks_per_page
        if block < 0 or self._references[page]:
            return FREED
        self._unpublish(block)
        del self._free[page]
        self._references[page] = 1
        return block

    def _allocate_page(self) -> int:
        page = self.allocate(1)[0]
        self._num_used[page] = self._blocks_per_page
        return page * self._blocks_per_page

    def allocate(self, count: int) -> list[int]:
        """Allocate `count` pages; evicts the least recently used cached ones."""
        allocated: list[int] = []
        size = self._blocks_per_page
        for _ in range(count):
            page, _ = self._free.popitem(last=False)
            for block in range(page * size, page * size + size):
                digest = self._hash_of[block]
                if digest is not None:
                    self._forget(block, digest)
            self._references[page] = 1
            allocated.append(page)
        return allocated

    def publish(self, block: int, digest: bytes, step: int | None = None) -> bool:
        """Add a full block to the prefix cache. `step` is the step that writes it, if it has not run yet.

        Of two blocks with the same content the first stays in the cache. Returns whether this one was added.
        """
        if self.enable_prefix_caching and self._hash_of[block] is None and digest not in self._block_of:
            self._hash_of[block] = digest
            self._block_of[digest] = block
            if step is not None:
                self._unwritten.setdefault(step, []).append(block)
            return True
        return False

    def mark_written(self, step: int) -> None:
        """Record that this step has run: the blocks published for it are written, unless they were unpublished."""
        self._unwritten.pop(step, None)
        if self.listener is not None:
            self.listener.written(step)

    def unpublish(self, hashes: Iterable[bytes]) -> None:
        """Remove the blocks with these hashes from the prefix cache: their content is not what the hashes say."""
        for digest in hashes:
            if (block := self._block_of.get(digest)) is not None:
                self._unpublish(block)

    def unpublish_unwritten(self) -> None:
        """Remove the published blocks that were never written from the prefix cache."""
        for blocks in self._unwritten.values():
            for block in blocks:
                self._unpublish(block)
        self._unwritten.clear()

    def unpublish_all(self) -> None:
        """Empty the prefix cache. Requests keep their blocks."""
        for block in [*self._block_of.values()]:
            self._unpublish(block)
        self._unwritten.clear()
        if self.listener is not None:
            self.listener.cleared()

    def _unpublish(self, block: int) -> None:
        digest, page = self._hash_of[block], block // self._blocks_per_page
        if digest is not None:
            self._forget(block, digest)
            if page in self._free and not self._is_cached(page):
                self._free.move_to_end(page, last=False)

    def _forget(self, block: int, digest: bytes) -> None:
        self._hash_of[block] = None
        del self._block_of[digest]
        if self.listener is not None:
            self.listener.removed(digest)

    def _is_cached(self, page: int) -> bool:
        """Whether a block of the page is in the prefix cache."""
        return self._num_cached(page) > 0

    def _num_cached(self, page: int) -> int:
        """Blocks of the page up to the last one in the prefix cache."""
        size = self._blocks_per_page
        own = range(size, 0, -1)
        return next((count for count in own if self._hash_of[page * size + count - 1] is not None), 0)

    def free(self, blocks: list[int]) -> None:
        """Drop references. Cached blocks stay cached; the last of a chain is evicted first."""
        for block in reversed(blocks):
            page = block // self._blocks_per_page
            self._references[page] -= 1
            if not self._references[page]:
                self._free[page] = None
                self._num_used[page] = self._num_cached(page)  # the next request of the chain continues after them
                if not self._num_used[page]:
                    self._free.move_to_end(page, last=False)

    def num_pages_only_in(self, blocks: Iterable[int]) -> int:
        """Return the pages that are free once a reference to each of these blocks has been dropped."""
        counts = Counter(block // self._blocks_per_page for block in blocks)
        return sum(self._references[page] == count for page, count in counts.items())

    def check_windows(self, blocks: list[int], position: int, row_tokens: int) -> None:
        """Assert that a request has the blocks that its queries from `position` on see, and no more than the limit."""
        assert len(blocks) >= self.num_blocks_for(position), "blocks are missing"
        for number, group in enumerate(self._groups):
            group_blocks = blocks[number :: self.num_groups]
            without_freed = [block for block in group_blocks if block != FREED]
            if group.is_state:
                assert not blocks or group_blocks[-1] != FREED, "the state is missing"
                assert all(block % self._blocks_per_page == 0 for block in without_freed), "a state is not a page"
                continue
            assert group_blocks == [FREED] * (len(group_blocks) - len(without_freed)) + without_freed, (
                "freed blocks are not a prefix"
            )
            assert len(group_blocks) - len(without_freed) <= self._first_visible_block(number, position), (
                "a block in the window was freed"
            )
            max_blocks = group.max_blocks(len(group_blocks) * self.block_size, row_tokens, self.block_size)
            assert len(without_freed) <= max_blocks, "blocks outside the window are kept"

    def check_integrity(self, block_lists: Iterable[list[int]]) -> None:
        """Assert the invariants, given the block lists of all requests, loads and copies."""
        size = self._blocks_per_page
        counts = [0] * len(self._references)
        used = [0] * len(self._references)
        for blocks in block_lists:
            for block in blocks:
                counts[block // size] += 1
                used[block // size] = max(used[block // size], block % size + 1)
        assert self._references == counts, "reference counts are off"
        unreferenced = {page for page, count in enumerate(counts) if not count}
        assert self._free.keys() == unreferenced, "free pages are not those without references"
        published = {digest: block for block, digest in enumerate(self._hash_of) if digest is not None}
        assert published == self._block_of, "hashes are off"
        assert len(published) == len(self._hash_of) - self._hash_of.count(None), "two blocks have one hash"
        if self.listener is not None:
            self.listener.check_integrity(published)
        if size > 1:
            assert all(map(int.__ge__, self._num_used, used)), "a block in use counts as unused"
