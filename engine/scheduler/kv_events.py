"""The events that a replica sends to routers outside the server: blocks stored and removed, in vLLM's terms.

A block of the prefix cache is announced when the step that writes it has run, and withdrawn when it leaves the cache;
one that leaves before is never announced. At any moment, the announced blocks are those that a new request would find.
Blocks that the host's KV store has in memory and on disk are announced with their own medium, whichever replica stored
them: cores tell the store how events name the blocks that they store or load (`DescribeKV`), and it tells all cores
which entries it has (`KVTiersChanged`). There may be far more of these than on the device, so the scheduler only passes
the store's messages on; the publisher's thread turns them into events.

Internally, blocks have the hashes of `kv_cache_manager.extend_hashes`. Blocks with equal hashes are one block for
routers, too: two adapters with the same weights are announced under one of their names.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

import msgspec

from quire.engine.config.engine_config import KVEventsConfig
from quire.engine.protocol.kv_events import (
    CPU,
    GPU,
    STORAGE,
    BlockRemoved,
    BlockStored,
    KVEvent,
)
from quire.engine.protocol.kv_store import DISK, MEMORY, DescribedBlock, DescribeKV, KVTiersChanged
from quire.engine.scheduler.event_hashes import EventBlock, event_block, root_hash
from quire.engine.scheduler.kv_events_view import DeviceCleared, KVEventsView, TierNews
from quire.engine.scheduler.request import Request

_MEDIA = {MEMORY: CPU, DISK: STORAGE}


@dataclass(slots=True)
class _Unwritten:
    """A block in the prefix cache that a step in flight writes."""

    step: int
    block: EventBlock
    group: int


class KVEvents:
    """Collects the events of one replica, on the thread of the scheduler."""

    def __init__(self, config: KVEventsConfig, block_size: int) -> None:
        self._block_size, self._kinds = block_size, config.kinds
        self.groups_of: Sequence[Sequence[int]] = ()
        """The groups of each kind of entries of the KV store, if there is one."""
        self._root = root_hash(config.hash_seed)
        self._known: WeakValueDictionary[bytes, EventBlock] = WeakValueDictionary()
        """Blocks of running requests and of the cache, by their links."""
        self._announced: dict[bytes, tuple[EventBlock, int]] = {}
        """By the hash in the cache: the block and the group."""
        self._unwritten: dict[bytes, _Unwritten] = {}
        """The same for those that are not announced yet."""
        self._of_step: dict[int, list[bytes]] = {}
        self._loaded: list[bytes] = []
        """Links of loaded blocks, which may not have been described to the store yet."""
        self._news: list[KVEvent | DeviceCleared] = []
        self._tier_news: list[TierNews] = []

    def describe(self, request: Request, num_blocks: int, salt: bytes) -> None:
        """Describe the first blocks of a request, which have hashes. `salt` is what its hash chain starts from."""
        blocks, size = request.event_blocks, self._block_size
        for at in range(len(blocks), num_blocks):
            link = request.hashes[at * len(self._kinds)]
            if (block := self._known.get(link)) is None:
                parent, tokens = blocks[-1] if blocks else None, request.token_ids[at * size : (at + 1) * size]
                block = event_block(parent, self._root, request.core_request, tokens, at * size, salt)
                self._known[link] = block
            blocks.append(block)

    def stored(self, request: Request, index: int, step: int | None) -> None:
        """A described block was added to the prefix cache: number `index` of the request's blocks of all groups. `step`
        is the step that writes it, if it has not run yet."""
        at, group = divmod(index, len(self._kinds))
        digest, block = request.hashes[index], request.event_blocks[at]
        if step is None:
            self._announce([(digest, _Unwritten(-1, block, group))])
        else:
            self._unwritten[digest] = _Unwritten(step, block, group)
            self._of_step.setdefault(step, []).append(digest)

    def loaded(self, link: bytes) -> None:
        """A described block with this link has come from the KV store."""
        self._loaded.append(link)

    def written(self, step: int) -> None:
        """A step has run, or was given up: announce the blocks that it has written."""
        if (digests := self._of_step.pop(step, None)) is not None:
            unwritten = self._unwritten
            mine = dict.fromkeys(each for each in digests if each in unwritten and unwritten[each].step == step)
            self._announce([(each, unwritten.pop(each)) for each in mine])

    def removed(self, digest: bytes) -> None:
        """A block has left the prefix cache."""
        if self._unwritten.pop(digest, None) is None:
            block, group = self._announced.pop(digest)
            self._withdraw(block.number, group)

    def cleared(self) -> None:
        """All blocks have left the prefix cache."""
        self._news = [DeviceCleared()]
        self._announced.clear()
        self._unwritten.clear()
        self._of_step.clear()

    def take(self) -> tuple[list[KVEvent | DeviceCleared], list[TierNews]]:
        """Return the news of the device and of the tiers since the last call."""
        news, self._news, self._tier_news = (self._news, self._tier_news), [], []
        return news

    # --- the KV store -----------------------------------------------------------------------------------------

    def description(self, links: Iterable[bytes]) -> DescribeKV:
        """Describe the blocks with these links, and those loaded since the last call, for the store."""
        found = {link: block for link in (*links, *self._loaded) if (block := self._known.get(link)) is not None}
        self._loaded.clear()
        encode = msgspec.msgpack.Encoder().encode
        blocks = [
            encode(DescribedBlock(each.parent, each.token_ids, each.lora_name, each.extra_keys))
            for each in found.values()
        ]
        return DescribeKV([*found], [each.number for each in found.values()], blocks)

    @property
    def has_loaded(self) -> bool:
        """Whether blocks were loaded that have not been described to the store since."""
        return bool(self._loaded)

    def on_tiers_changed(self, message: KVTiersChanged) -> None:
        """The store reports which entries it has, and no longer has."""
        if message.is_first:
            self._tier_news.clear()
        self._tier_news.append(TierNews(message.is_first, partial(self._tier_events, message)))

    def on_tiers_lost(self) -> None:
        """There is no store at present."""
        self.on_tiers_changed(KVTiersChanged([], [], is_first=True))

    def _tier_events(self, message: KVTiersChanged, view: KVEventsView) -> list[KVEvent]:
        """Return the events for a message, given the announced blocks. Runs on the publisher's thread."""
        gone: dict[tuple[str, int], dict[int, None]] = {}
        for tier, kind, number in message.removed:
            for group in self.groups_of[kind]:
                if view.holds(_MEDIA[tier], group, number):
                    gone.setdefault((_MEDIA[tier], group), {})[number] = None
        events: list[KVEvent] = [BlockRemoved([*numbers], *place) for place, numbers in gone.items()]
        decode, last = msgspec.msgpack.Decoder(DescribedBlock).decode, dict[int, BlockStored]()
        new = {(tier, kind, number): description for tier, kind, number, description in message.stored}
        for (tier, kind, number), description in new.items():
            for group in self.groups_of[kind]:
                medium = _MEDIA[tier]
                if not view.holds(medium, group, number) or number in gone.get((medium, group), ()):
                    self._store(events, number, decode(description), medium, group, last)
        return events

    # --- events -----------------------------------------------------------------------------------------------

    def _announce(self, found: list[tuple[bytes, _Unwritten]]) -> None:
        last: dict[int, BlockStored] = {}
        for digest, new in sorted(found, key=lambda each: each[1].group):
            block = new.block
            self._announced[digest] = block, new.group
            described = DescribedBlock(block.parent, [*block.token_ids], block.lora_name, block.extra_keys)
            self._store(self._news, block.number, described, GPU, new.group, last)

    def _store(
        self,
        news: list[Any],
        number: int,
        block: DescribedBlock,
        medium: str,
        group: int,
        last: dict[int, BlockStored],
    ) -> None:
        """Announce a block: in the group's event in `last` if it continues that, otherwise in a new one."""
        kind, window = self._kinds[group]
        event = BlockStored(
            *([number], block.parent, block.token_ids, self._block_size, None, medium, block.lora_name),
            *([block.extra_keys], group, kind, window),
        )
        if group not in last or not last[group].append(event):
            news.append(event)
            last[group] = event

    def _withdraw(self, number: int, group: int) -> None:
        last = self._news[-1] if self._news else None
        if isinstance(last, BlockRemoved) and last.group_idx == group:
            last.block_hashes.append(number)
        else:
            self._news.append(BlockRemoved([number], GPU, group))

    def check_integrity(self, cached: Iterable[bytes]) -> None:
        """Assert that the announced and unwritten blocks are exactly the cached ones."""
        assert not self._announced.keys() & self._unwritten.keys(), "a block is announced before it is written"
        assert self._announced.keys() | self._unwritten.keys() == set(cached), "events differ from the cache"
        steps = {digest: step for step, digests in sorted(self._of_step.items()) for digest in digests}
        assert all(steps[each] >= new.step for each, new in self._unwritten.items()), "a block is never announced"
