"""The KV blocks of requests: the blocks that a request needs, the blocks that it gets, and its blocks in the prefix
cache.

`quire.engine.scheduler.kv_cache_manager` knows blocks, and this module knows whose they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain

from quire.engine.architecture.media_spec import MediaSpec
from quire.engine.scheduler.drafts_in_flight import DraftsInFlight
from quire.engine.scheduler.event_hashes import chain_salt
from quire.engine.scheduler.kv_cache_manager import KVCacheManager, extend_hashes
from quire.engine.scheduler.plans_in_flight import PlansInFlight
from quire.engine.scheduler.request import Request


class RequestBlocks:
    """Owns `block_ids`, `hashes` and `num_published` of all requests."""

    def __init__(
        self, kv: KVCacheManager, in_flight: PlansInFlight, drafts: DraftsInFlight, *, media: MediaSpec | None = None
    ) -> None:
        """`media`: how the model takes images; None: it takes none."""
        self.kv, self._in_flight, self._drafts, self._media = kv, in_flight, drafts, media
        self.on_published: Callable[[Request], None] | None = None
        """Called when full blocks of a request are published."""
        self.on_advanced: Callable[[Request, int], None] | None = None
        """Called when a request that hands over has been moved forward, with the token where the row begins."""
        self.on_free: Callable[[Request], None] | None = None
        """Called before the blocks of a request are taken."""

    def reusable_hashes(self, request: Request) -> list[bytes]:
        """The hashes of the blocks of a waiting request that may come from the prefix cache."""
        if not self.kv.enable_prefix_caching:
            return []
        self._extend_hashes(request)
        # At least one token is computed, because the logits of the last token are not cached.
        return request.hashes[: self.kv.num_full_blocks(request.num_reusable_tokens)]

    def find_prefix(self, request: Request, row_tokens: int, num_reserved: int = 0) -> list[int] | None:
        """Return the blocks of a waiting request's cached prefix, or None if it cannot be admitted now.

        A request is admitted only if there are free blocks for all its known tokens, in chunks of up to `row_tokens`,
        beside `num_reserved` pages. Otherwise it would be preempted at once.
        """
        kv = self.kv
        cached = kv.match(self.reusable_hashes(request))
        for prefix in (cached, []) if kv.states else (cached,):  # pages that are not full may hold a prefix
            needed = kv.max_pages_needed(len(request.token_ids), row_tokens, prefix) + num_reserved
            if kv.can_allocate(needed, cached_blocks=kv.without_freed(prefix)):
                return prefix
        return None

    def start(self, request: Request, prefix: list[int]) -> None:
        """Give an admitted request the blocks of its cached prefix."""
        self.kv.touch(self.kv.without_freed(prefix))
        request.block_ids, request.num_published = prefix, len(prefix)

    def free(self, request: Request) -> None:
        """Take all blocks of a request. Those that are full stay in the prefix cache."""
        self._publish(request)
        if self.on_free is not None:
            self.on_free(request)
        self.kv.free(self.kv.without_freed(request.block_ids))
        request.block_ids, request.num_published = [], 0

    def pages_needed(self, request: Request, count: int) -> int:
        """Return the pages to allocate for `count` more tokens."""
        return self.kv.pages_needed(request.block_ids, request.num_computed_tokens + count)

    def extend(self, request: Request, end: int) -> list[int]:
        """Give a request the blocks that it lacks for `end` tokens, which must be free; returns them."""
        start, known = request.num_computed_tokens, len(request.token_ids)
        return self.kv.extend(request.block_ids, request.hashes, start, end, known, request.num_prompt_tokens)

    def advance(self, request: Request, count: int) -> list[int]:
        """Move a request forward by `count` tokens in the next plan; returns the blocks allocated for them, which must
        be free."""
        start, end = request.num_computed_tokens, request.num_computed_tokens + count
        new_blocks = self.extend(request, end)
        request.num_computed_tokens, request.last_step = end, self._in_flight.next_step
        if not self.kv.states:  # in a step, rows read states before others are written
            self._publish(request)
        if request.core_request.hands_over and self.on_advanced is not None:
            self.on_advanced(request, start)
        return new_blocks

    def decode_until(self, request: Request) -> int:
        """Return `Request.decode_until` of a decode."""
        size = self.kv.block_size
        return min(-(-request.num_computed_tokens // size) * size, request.max_tokens - 1)

    def free_out_of_window(self, request: Request) -> None:
        """Free the blocks outside the request's windows. The request must not have a row in the current plan.

        All rows of a step write KV before any row attends, so a later row could overwrite KV that this one still reads.
        """
        if self.kv.windows:
            num_published = request.num_published
            self._publish(request)
            position = request.num_computed_tokens - self._drafts.num_drafts(request)
            self.kv.free_out_of_window(request.block_ids, position, num_published)

    def _publish(self, request: Request) -> None:
        """Add the request's full blocks of known, scheduled tokens to the prefix cache."""
        kv = self.kv
        if not kv.enable_prefix_caching:
            return
        full = min(request.num_computed_tokens, len(request.token_ids)) // kv.block_size * kv.num_groups
        if full > request.num_published:
            self._extend_hashes(request)
            step = request.last_step if self._in_flight.contains(request) else None
            known = max(len(request.token_ids), request.num_computed_tokens)
            for index in range(request.num_published, full):
                block, boundary = request.block_ids[index], kv.num_tokens_in(index) + kv.block_size
                if block >= 0 and kv.is_kept(index % kv.num_groups, boundary, known):
                    self._add(request, index, block, step)
            request.num_published = full
            if self.on_published is not None:
                self.on_published(request)

    def publish_loaded(self, request: Request, index: int, block: int) -> None:
        """Add a block to the prefix cache that was loaded, whose hash is `request.hashes[index]`."""
        self._add(request, index, block, None)
        if self.kv.listener is not None:
            self.kv.listener.loaded(request.hashes[index // self.kv.num_groups * self.kv.num_groups])

    def _add(self, request: Request, index: int, block: int, step: int | None) -> None:
        """Add a block with the request's hash number `index` to the prefix cache, and tell routers."""
        kv = self.kv
        if kv.publish(block, request.hashes[index], step) and kv.listener is not None:
            salt = b"" if request.event_blocks else self._salt(request)
            kv.listener.describe(request, index // kv.num_groups + 1, salt)
            kv.listener.stored(request, index, step)

    def _extend_hashes(self, request: Request) -> None:
        known, kv = request.core_request, self.kv
        adapter, start = b"" if known.adapter is None else known.adapter.digest, known.adapter_start
        salt = b"" if request.hashes else self._salt(request)
        extend_hashes(
            request.hashes, request.token_ids, kv.block_size, salt, kv.num_groups, known.media, adapter, start
        )

    def _salt(self, request: Request) -> bytes:
        """What the hash chain of a request starts from."""
        return chain_salt(request.core_request, self._media)

    def check_integrity(self, running: Sequence[Request], max_row: int, others: Iterable[list[int]] = ()) -> None:
        """Assert that the running requests have the blocks that they need, if a row has at most `max_row` tokens, and
        that only they and `others` have blocks."""
        own = (self.kv.without_freed(request.block_ids) for request in running)
        self.kv.check_integrity(chain(own, others))
        for request in running:
            assert len(request.block_ids) >= self.kv.num_blocks_for(request.num_computed_tokens)
            self.kv.check_windows(
                request.block_ids, request.num_computed_tokens - self._drafts.num_drafts(request), max_row
            )
