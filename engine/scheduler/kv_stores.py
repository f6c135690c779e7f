"""Copies from the devices to the KV store.

Full blocks whose step has run are offered to the store, in prefixes of at least `min_tokens` tokens. An entry that it
grants is copied if its blocks are still in the prefix cache. Their pages are held meanwhile, at most an eighth of all.
The blocks of requests that hand over are also offered before they are computed (`OffersAhead`): entries that have been
granted when a row is planned are copied from the request's blocks beside its step, and count as stored when the result
has come. Recurrent states, and windows whose blocks fill pages, are offered only at places where the prefix cache keeps
them for good; those of a decode replace each other, and are offered when the request stops running. Blocks that a
request finds in the prefix cache are offered again now and then (`_KnownLinks`), because the store may have lost or
refused them.
"""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator
from itertools import chain
from typing import NamedTuple

from quire.engine.config.engine_config import EngineConfig
from quire.engine.protocol.kv_store import GrantedKV, KVCopy, KVEntry, OfferKV, StoredKV
from quire.engine.protocol.stats import EngineStats
from quire.engine.scheduler.kv_cache_manager import FREED, block_hash
from quire.engine.scheduler.kv_connection import KVStoreConnection
from quire.engine.scheduler.kv_copies_in_flight import CopiesInFlight, CopyInFlight
from quire.engine.scheduler.kv_load_choice import PrefixLoad
from quire.engine.scheduler.kv_offers_ahead import OffersAhead
from quire.engine.scheduler.plans_in_flight import PlansInFlight
from quire.engine.scheduler.request import Request
from quire.engine.scheduler.request_blocks import RequestBlocks

_OFFER_SECONDS = 0.1
"""Minimum interval between offers of decodes, which fill few blocks, so that few of their steps have copies."""
_OFFER_AGAIN_SECONDS = 60.0
"""Time after which blocks that a request finds in the prefix cache are offered again: the store may have had no room
for them."""
_OFFERED_TOGETHER = 256
"""Maximum links of such blocks in an offer."""
_MAX_OFFERED = 1024
"""Maximum entries that are offered and not copied yet."""
_MAX_BACKLOG = 4096
"""Maximum rows whose full blocks wait to be offered. Blocks of further rows are not offered."""
_HELD_SHARE = 8
"""Copies to the store hold at most one in this many pages."""


class _KnownLinks:
    """Links that were recently offered to the store or loaded from it, and need not be offered again."""

    def __init__(self, max_links: int) -> None:
        self._new, self._old, self._max_links = set[bytes](), set[bytes](), max_links
        self._changed_at = -math.inf

    def __contains__(self, link: bytes) -> bool:
        return link in self._new or link in self._old

    def add(self, links: Iterable[bytes]) -> None:
        self._new.update(links)

    def age(self) -> None:
        """Forget links after one to two times `_OFFER_AGAIN_SECONDS`, or when there are too many."""
        now = time.monotonic()
        if len(self._new) >= self._max_links or now - self._changed_at >= _OFFER_AGAIN_SECONDS:
            self._new, self._old, self._changed_at = set(), self._new, now

    def clear(self) -> None:
        self._new.clear()
        self._old.clear()


class _Full(NamedTuple):
    """Full blocks of a request that are to be offered."""

    step: int
    """The step after which all of them are written."""
    start: int
    """Number of the first link."""
    parent: bytes
    """The link before it; empty: there is none."""
    links: list[bytes]
    num_tokens: int
    """Tokens of the text for which states stay where they are (`KVCacheManager.is_kept`)."""
    kinds: Collection[int]
    kept: list[int]
    """Blocks of scarce kinds, of which the prefix cache keeps few. They are held until the store has answered."""


class _Offer(NamedTuple):
    """An offer that has not been answered."""

    entries: list[KVEntry]
    kept: list[int]
    """As in `_Full`."""


class KVStores:
    """Owns the blocks that are to be stored, and the pages that are held for them."""

    def __init__(
        self,
        config: EngineConfig,
        connection: KVStoreConnection,
        copies: CopiesInFlight,
        blocks: RequestBlocks,
        in_flight: PlansInFlight,
        stats: EngineStats,
    ) -> None:
        self._store, self._copies, self._in_flight, self._stats = connection, copies, in_flight, stats
        self._blocks, self._kv, self._kinds = blocks, blocks.kv, connection.kinds
        self._min_tokens = 0 if config.kv_store is None else config.kv_store.min_tokens
        windows = {kind: self._kv.windows.get(each.groups[0]) for kind, each in enumerate(self._kinds)}
        self._scarce = {kind: windows[kind] or 0 for kind in windows if self._kinds[kind].groups[0] in self._kv.scarce}
        """Kinds whose blocks are kept only at some places, and their windows."""
        self._row_tokens = config.scheduler.max_num_batched_tokens
        self._max_held = config.cache.num_blocks // config.cache.blocks_per_page // _HELD_SHARE
        self._offered_at = -math.inf
        """Time (`time.monotonic`) of the last offer."""
        self._backlog: deque[_Full] = deque()
        """Blocks that have not been offered yet, in the order of steps."""
        self._known = _KnownLinks(config.cache.num_blocks)
        """Links that are or were in the backlog. Empty for each new arena."""
        self._is_urgent = False
        """Whether the backlog has more than the blocks of decodes."""
        self._offered: deque[_Offer] = deque()
        """The offers that have not been answered."""
        self._num_kept = 0
        """Blocks held by the backlog and by unanswered offers."""
        self._granted: deque[tuple[KVEntry, int]] = deque()
        """Granted entries that are not being copied yet, and their offsets."""
        self._held: Counter[int] = Counter()
        """Pages that are being copied to the store, with the number of copies."""
        self._ahead = OffersAhead(
            blocks,
            len(self._kinds),
            config.scheduler.max_num_batched_tokens,
            stays=self._stays,
            is_cached=lambda link, kind: self._device_blocks(link, kind) is not None,
            send=lambda entries, parents: self._send_offer(entries, parents, []),
        )
        self._copied: list[CopyInFlight] = []
        """Copies that ended before the result of their step came."""
        if self._kinds:
            blocks.on_published, blocks.on_free = self._on_published, self._on_free
            blocks.on_advanced = self._on_advanced

    def _on_published(self, request: Request) -> None:
        """Add full blocks of a request to the backlog."""
        stride, start = self._kv.num_groups, request.num_offered
        end = request.num_published // stride
        if self._store.is_open and end * self._kv.block_size >= self._min_tokens and end > start:
            request.num_offered = end
            self._add_full(request, start, end, request.num_prompt_tokens, range(len(self._kinds)))

    def start(self, request: Request, load: PrefixLoad | None, length: int) -> None:
        """Add cached blocks of a starting request, `length` of each group, to the backlog, unless they were recently
        offered to the present store, or came from it by `load`. The store may have been restarted, or have had no room
        for them."""
        request.num_offered = length if length * self._kv.block_size >= self._min_tokens else 0
        if self._store.is_open and request.core_request.hands_over:
            self._ahead.start(request, length)
        if not self._store.is_open or not request.num_offered:
            return
        links = request.hashes[: length * self._kv.num_groups : self._kv.num_groups]
        self._known.age()
        if load is not None:
            self._known.add(links[load.num_cached : load.length])
            del links[load.num_cached :]
        start = len(links)
        while start and links[start - 1] not in self._known:
            start -= 1
        # The request has been admitted because it finds all its pages.
        needed = self._kv.max_pages_needed(len(request.token_ids), self._row_tokens, request.block_ids)
        for first in range(start, len(links), _OFFERED_TOGETHER):
            end = min(first + _OFFERED_TOGETHER, len(links))
            num_tokens = end * self._kv.block_size + 1
            self._add_full(request, first, end, num_tokens, range(len(self._kinds)), needed)

    def _on_free(self, request: Request) -> None:
        """Add the last blocks of scarce kinds to the backlog, now that no later ones replace them. Places granted ahead
        are used or abandoned, because nobody knows when the request will run again."""
        size, end = self._kv.block_size, request.num_published // self._kv.num_groups
        if self._store.is_open and self._scarce and end * size >= self._min_tokens:
            start = max(0, end - 1 - max(self._scarce.values()) // size)
            self._add_full(request, start, end, len(request.token_ids), self._scarce)
        self.finish(request)

    def _add_full(
        self, request: Request, start: int, end: int, num_tokens: int, kinds: Collection[int], num_needed: int = 0
    ) -> None:
        """Add links number `start` to `end` to the backlog, see `_Full`. Blocks are held only if `num_needed` pages
        stay free."""
        if len(self._backlog) < _MAX_BACKLOG:
            hashes, stride = request.hashes, self._kv.num_groups
            parent = hashes[(start - 1) * stride] if start else b""
            links = hashes[start * stride : end * stride : stride]
            step = max(request.last_step, self._in_flight.next_step - 1)  # others may be writing cached blocks
            kept = list[int]()
            for kind in self._scarce.keys() & kinds:
                found = (
                    self._device_blocks(link, kind)
                    for at, link in enumerate(links, start)
                    if self._stays(kind, at, num_tokens)
                )
                kept += chain.from_iterable(blocks for blocks in found if blocks is not None)
            if self._num_kept + len(kept) > self._max_held or not self._kv.can_allocate(num_needed, cached_blocks=kept):
                kept = []
            self._kv.touch(kept)
            self._num_kept += len(kept)
            self._backlog.append(_Full(step, start, parent, links, num_tokens, kinds, kept))
            if kinds is not self._scarce:
                self._known.add(links)
            self._is_urgent |= len(links) > 1 or kinds is self._scarce

    def offer_ahead(self, request: Request) -> None:
        """Offer the first blocks of a request that will start soon, if it hands over."""
        if request.core_request.hands_over and self._store.is_open:
            self._ahead.begin(request)

    def _on_advanced(self, request: Request, start: int) -> None:
        """Copy the granted blocks that the next step computes for a request that hands over, beside that step. The rest
        is offered like other blocks."""
        if not self._store.is_open:
            return
        stride, size = self._kv.num_groups, self._kv.block_size
        for index in range(start // size, min(request.num_computed_tokens, request.num_prompt_tokens) // size):
            for kind, each in enumerate(self._kinds):
                entry = KVEntry(request.hashes[index * stride], kind)
                blocks = [request.block_ids[index * stride + group] for group in each.groups]
                if FREED in blocks or not self._may_hold(blocks) or (offset := self._ahead.take(entry)) is None:
                    continue
                self._copies.plan.step_stores.append(self._begin_copy(entry, offset, blocks, request))
        self._ahead.advance(request)

    def finish(self, request: Request) -> None:
        """Use or abandon the places granted ahead for a request that no longer runs."""
        if places := self._ahead.end(request):
            self._granted.extend(places)
            self.copy_granted()

    def _offer(self) -> None:
        """Offer the oldest blocks of the backlog whose steps have run, if they are still in the prefix cache."""
        entries, parents, kept = list[KVEntry](), list[bytes](), list[int]()
        room = self._room
        while self._backlog and len(entries) < room and self._backlog[0].step <= self._in_flight.last_finished:
            full = self._backlog.popleft()
            kept += full.kept
            chained = zip((full.parent, *full.links), full.links, strict=False)
            for index, (parent, link) in enumerate(chained, full.start):
                for kind in full.kinds:
                    if not self._stays(kind, index, full.num_tokens) or self._device_blocks(link, kind) is None:
                        continue
                    entry = KVEntry(link, kind)
                    if (offset := self._ahead.take(entry)) is not None:  # it was not copied beside its step
                        self._granted.append((entry, offset))
                    else:
                        entries.append(entry)
                        parents.append(parent)
        self.copy_granted()
        self._is_urgent &= bool(self._backlog)
        if entries:
            if self._kv.listener is not None:
                self._store.send(self._kv.listener.description(entry.link for entry in entries))
            self._send_offer(entries, parents, kept)
        else:
            self._keep_no_more(kept)

    def _send_offer(self, entries: list[KVEntry], parents: list[bytes], kept: list[int]) -> None:
        self._offered.append(_Offer(entries, kept))
        self._store.send(OfferKV(entries, parents))

    def _keep_no_more(self, blocks: list[int]) -> None:
        self._kv.free(blocks)
        self._num_kept -= len(blocks)

    @property
    def _room(self) -> int:
        """Entries that may be offered."""
        return _MAX_OFFERED - sum(len(offer.entries) for offer in self._offered) - len(self._granted)

    def _may_hold(self, blocks: list[int]) -> bool:
        """Whether a copy may hold these blocks in addition to those that are held."""
        pages = self._kv.pages(blocks)
        return not self._held or len(self._held) + sum(page not in self._held for page in pages) <= self._max_held

    def _begin_copy(self, entry: KVEntry, offset: int, blocks: list[int], request: Request | None = None) -> KVCopy:
        self._kv.touch(blocks)
        self._held.update(self._kv.pages(blocks))
        copy = KVCopy(self._store.number(), entry.kind, offset, blocks)
        self._copies.by_number[copy.number] = CopyInFlight(copy, self._store.arena, self._copies.ranks, request=request)
        return copy

    def on_granted(self, message: GrantedKV) -> None:
        """Process the answer to an offer."""
        offered = self._offered.popleft() if self._offered else _Offer([], [])
        unwritten = self._kv.unwritten if any(entry in self._ahead for entry in message.entries) else set[int]()
        for entry, offset in zip(message.entries, message.offsets, strict=False):
            if not self._store.has_place(entry.kind, offset):
                continue
            blocks = self._device_blocks(entry.link, entry.kind)
            if entry in self._ahead and (blocks is None or not unwritten.isdisjoint(blocks)):
                self._ahead.grant(entry, offset)
            else:
                self._granted.append((entry, offset))
        self._ahead.answered(offered.entries)
        self.copy_granted()
        self._keep_no_more(offered.kept)

    def on_copied(self, ended: Collection[CopyInFlight]) -> None:
        """Free the blocks of copies that all ranks have answered, and tell the store what became of them. Copies of
        blocks that a step computes wait for the result of that step."""
        stored, abandoned, links = list[int](), list[int](), list[bytes]()
        for copy in ended:
            if copy.request is not None and copy.step > self._in_flight.last_finished:
                self._copied.append(copy)
                continue
            self._finish_copy(copy, has_failed=copy.has_failed)
            if copy.arena == self._store.arena:
                (abandoned if copy.has_failed else stored).append(copy.planned.offset)
                if (link := self._kv.link_of(copy.planned.blocks[0])) is not None:
                    links.append(link)
        if self._kv.listener is not None and links:  # offers ahead could not be described yet
            self._store.send(self._kv.listener.description(links))
        if stored or abandoned:
            self._store.send(StoredKV(stored, abandoned, self._store.arena))

    def on_finished(self) -> None:
        """Report the finished copies of steps whose result has come to the store."""
        if self._copied:
            copied, self._copied = self._copied, []
            self.on_copied(copied)

    def withdraw(self, request: Request) -> None:
        """Store nothing that the steps in flight compute for a request: it is wrong."""
        for copy in self._copies.by_number.values():
            copy.has_failed |= copy.request is request

    def on_failed(self, step: int) -> None:
        """Store nothing that this step and later ones in flight should have computed: it was not."""
        for copy in self._copies.by_number.values():
            copy.has_failed |= copy.request is not None and copy.step >= step

    def _finish_copy(self, copy: CopyInFlight, *, has_failed: bool) -> None:
        del self._copies.by_number[copy.planned.number]
        blocks = copy.planned.blocks
        for page in self._kv.pages(blocks):
            self._held[page] -= 1
            if not self._held[page]:
                del self._held[page]
        self._kv.free(blocks)
        self._stats.kv_stored_blocks += 0 if has_failed else len(blocks)

    def _stays(self, kind: int, index: int, num_tokens: int) -> bool:
        """Whether a block with link number `index` of a text of `num_tokens` stays in the prefix cache, and is not
        replaced by a later one."""
        boundary = (index + 1) * self._kv.block_size
        return kind not in self._scarce or self._kv.is_kept(self._kinds[kind].groups[0], boundary, num_tokens)

    def _device_blocks(self, link: bytes, kind: int) -> list[int] | None:
        """Return the blocks of an entry if all are in the prefix cache."""
        blocks = [self._kv.cached_block(block_hash(link, group)) for group in self._kinds[kind].groups]
        return None if FREED in blocks else blocks

    def copy_granted(self) -> None:
        """Copy granted entries, as far as their pages may be held. Entries that have left the prefix cache are
        abandoned."""
        unwritten, abandoned = self._kv.unwritten if self._granted else set[int](), list[int]()
        while self._granted:
            entry, offset = self._granted[0]
            blocks = self._device_blocks(entry.link, entry.kind)
            if blocks is None or not unwritten.isdisjoint(blocks):
                abandoned.append(offset)
            else:
                if not self._may_hold(blocks):
                    break
                self._copies.plan.stores.append(self._begin_copy(entry, offset, blocks))
            self._granted.popleft()
        if abandoned:
            self._store.send(StoredKV([], abandoned, self._store.arena))

    # --- time -------------------------------------------------------------------------------------------------

    def offer_due(self, now: float) -> None:
        """Offer blocks of the backlog, if it is time."""
        if self._backlog and (self._is_urgent or now - self._offered_at >= _OFFER_SECONDS):
            self._offered_at = now
            self._offer()

    @property
    def due(self) -> float:
        """When the next offer is due (`time.monotonic`)."""
        if self._backlog and self._store.is_open and self._room > 0:
            return self._offered_at + _OFFER_SECONDS * (not self._is_urgent)
        return math.inf

    @property
    def are_under_way(self) -> bool:
        """Whether there are blocks to offer or to copy."""
        return bool(self._backlog or self._offered or self._granted)

    def change_arena(self) -> None:
        """Forget what the earlier store granted."""
        self._granted.clear()
        self._ahead.clear()
        for planned in self._copies.plan.stores:
            self._finish_copy(self._copies.by_number[planned.number], has_failed=True)
        self._copies.plan.stores.clear()

    def close(self) -> None:
        """Offer nothing: there is no store."""
        for blocks in self.block_lists():
            self._keep_no_more(blocks)
        self._backlog.clear()
        self._known.clear()
        self._offered.clear()

    def reset(self) -> None:
        """Forget everything that is to be stored."""
        if granted := [*(offset for _, offset in self._granted), *self._ahead.clear()]:
            self._store.send(StoredKV([], granted, self._store.arena))
        for full in self._backlog:
            self._keep_no_more(full.kept)
        self._backlog.clear()
        self._known.clear()
        self._granted.clear()

    @property
    def keeps_blocks(self) -> bool:
        """Whether blocks are held until the store has answered."""
        return self._num_kept > 0

    def block_lists(self) -> Iterator[list[int]]:
        """The blocks that are held for offers."""
        yield from (full.kept for full in self._backlog)
        yield from (offer.kept for offer in self._offered)

    def check_integrity(self) -> None:
        """Assert that the pages of copies are held, within their limit."""
        copies = [copy for copy in self._copies.by_number.values() if type(copy) is CopyInFlight]
        stores = [self._kv.pages(copy.planned.blocks) for copy in copies]
        self._ahead.check_integrity()
        assert {copy.planned.number for copy in self._copied} <= self._copies.by_number.keys()
        assert self._num_kept == sum(map(len, self.block_lists())) <= self._max_held
        assert self._held == Counter(chain.from_iterable(stores))
        assert len(self._held) <= max(self._max_held, *map(len, stores)) if stores else not self._held
