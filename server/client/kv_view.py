"""The cached blocks of the replicas, known from their KV events: for the router inside the server.

Cores send the batches that they publish to each API process that asks for them (`FollowKVEvents`), over the connection
that carries the outputs: also from other hosts, and independent of the sockets of `--kv-events-config`. First come all
blocks that the replica has, in parts. A process that starts late, or misses a number, has the same view as the others
when all parts have arrived. Until then, the cache of the replica is estimated.

Blocks of this process's unfinished requests count as cached, even if they are not announced yet. Blocks that only the
KV store of a replica's host has count in part, because loading takes less time than computing. All replicas of a host
say the same about its store, which may have far more blocks than their devices, so only one of them is asked for these.

All of this runs on the event loop of the process: a message has at most a few thousand blocks, and no call takes longer
when more blocks are known.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable
from dataclasses import dataclass, field

import msgspec

from quire.engine.architecture.media_spec import MediaSpec
from quire.engine.config.engine_config import CacheConfig, KVEventsConfig
from quire.engine.protocol.engine_core import EngineCoreRequest
from quire.engine.protocol.kv_events import (
    BYTES_HEARD,
    CPU,
    GPU,
    NEWS_HEARD,
    STORAGE,
    FollowKVEvents,
    KVEventsNews,
)
from quire.engine.scheduler.event_hashes import chain_salt, event_number, extend_digests, root_hash
from quire.engine.scheduler.prefix_length import prefix_length, windows_of
from quire.server.client.prefix_caches import PrefixCaches

_SAVED = {CPU: 15 / 16, STORAGE: 1 / 2}
"""The part of a token's computing time that is saved by loading it from this medium."""
_FREED = 4096
"""How many void blocks are freed with each message, because freeing a large set at once takes long."""


class _Stored(msgspec.Struct, tag="BlockStored", gc=False):
    """The needed fields of `BlockStored`."""

    block_hashes: list[int]
    medium: str | None
    group_idx: int | None = None


class _Removed(msgspec.Struct, tag="BlockRemoved", gc=False):
    """The needed fields of `BlockRemoved`."""

    block_hashes: list[int]
    medium: str | None
    group_idx: int | None = None


class _Cleared(msgspec.Struct, tag="AllBlocksCleared", gc=False):
    """`AllBlocksCleared`."""


class _Batch(msgspec.Struct, array_like=True, gc=False):
    """The needed fields of `KVEventBatch`."""

    ts: float
    events: list[_Stored | _Removed | _Cleared]


@dataclass(eq=False, slots=True)
class _Store:
    """The blocks of the KV store of a host."""

    speaker: int | None = None
    """The replica that is asked for them; None: no replica of the host is up."""
    media: dict[str, set[int]] = field(default_factory=lambda: {CPU: set(), STORAGE: set()})
    """As `_KVView.device`."""


@dataclass(eq=False, slots=True)
class _KVView:
    """The blocks of one replica."""

    store_name: str = ""
    """Which KV store it uses; empty: not known yet."""
    store: _Store = field(default_factory=_Store)
    """The blocks of that store."""
    number: int | None = None
    """The number of the last news; None: none have arrived since it was asked."""
    is_known: bool = False
    """Whether all parts of its first answer have arrived."""
    num_news: int = 0
    num_bytes: int = 0
    """News, and bytes of them, that were taken and not acknowledged yet."""
    device: set[int] = field(default_factory=set)
    """The announced blocks: the hash of each times the number of groups, plus the number of its group."""
    placed: Counter[int] = field(default_factory=Counter)
    """For each block, how many unfinished requests that were sent to the replica use it."""

    def release(self, blocks: Iterable[int]) -> None:
        """A request no longer uses these blocks."""
        for block in blocks:
            self.placed[block] -= 1
            if self.placed[block] <= 0:
                del self.placed[block]


class _Any:
    """The union of several sets, without building it."""

    def __init__(self, *parts: Container[int]) -> None:
        self._parts = parts

    def __contains__(self, block: object) -> bool:
        return any(block in part for part in self._parts)


class KVViews(PrefixCaches):
    """The views of all replicas."""

    def __init__(self, cache: CacheConfig, events: KVEventsConfig, media: MediaSpec | None, client: int = 0) -> None:
        """`media`: how the model takes images; None: it takes none. `client` is the number of this API process."""
        super().__init__(cache)
        self._media, self._root, self._client = media, root_hash(events.hash_seed), client
        self._windows = windows_of(cache.groups)
        self._views: dict[int, _KVView] = {}
        self._stores: dict[str, _Store] = {}
        """By name."""
        self._decoder = msgspec.msgpack.Decoder(_Batch)
        self._freed: list[set[int]] = []

    def follow(self, replica: int, store_name: str = "") -> FollowKVEvents:
        """Return the question to a replica that is up and uses this store. Its blocks are not known until it has
        answered."""
        view = self._view(replica)
        view.number, view.is_known = None, False
        if view.store_name != store_name:
            view.store_name, view.store = store_name, self._stores.setdefault(store_name, _Store())
        if view.store.speaker is None:
            view.store.speaker = replica
        return FollowKVEvents(self._client, view.store.speaker == replica)

    def take(self, news: KVEventsNews) -> FollowKVEvents | None:
        """Take news of a replica; returns the message to send to it, if any."""
        view = self._view(news.replica)
        self._free()
        if not news.is_first:
            if view.number is None:
                return None  # all of its blocks are on their way
            if news.number != view.number + 1:
                return self.follow(news.replica, view.store_name)
        else:
            view.num_news = view.num_bytes = 0
            self._clear(news.replica, view)
        for event in self._decoder.decode(news.batch).events:
            match event:
                case _Stored(hashes, medium, group):
                    if (known := self._known(news.replica, view, medium or GPU)) is not None:
                        known.update(self._keys(hashes, group or 0))
                case _Removed(hashes, medium, group):
                    if (known := self._known(news.replica, view, medium or GPU)) is not None:
                        known.difference_update(self._keys(hashes, group or 0))
                case _Cleared():
                    self._clear(news.replica, view)
        view.number, view.is_known = news.number, not news.has_more
        view.num_news, view.num_bytes = view.num_news + 1, view.num_bytes + len(news.batch)
        if view.num_news < NEWS_HEARD and view.num_bytes < BYTES_HEARD:
            return None
        view.num_news = view.num_bytes = 0
        return FollowKVEvents(self._client, view.store.speaker == news.replica, news.number)

    def _known(self, replica: int, view: _KVView, medium: str) -> set[int] | None:
        """The known blocks of a replica on a medium; None: another replica is asked for this medium."""
        if medium == GPU:
            return view.device
        return view.store.media[medium] if view.store.speaker == replica else None

    def _clear(self, replica: int, view: _KVView) -> None:
        """Forget the blocks that a replica has announced."""
        self._freed.append(view.device)
        view.device = set()
        if view.store.speaker == replica:
            self._freed += view.store.media.values()
            view.store.media = {CPU: set(), STORAGE: set()}

    def _free(self) -> None:
        for _ in range(_FREED):
            while self._freed and not self._freed[-1]:
                self._freed.pop()
            if not self._freed:
                break
            self._freed[-1].pop()

    def blocks_of(self, replica: int) -> set[tuple[str, int, int]] | None:
        """Return the blocks of a replica and of its host's store as (medium, hash, group); None: they are not known."""
        view, count = self._view(replica), self.num_groups
        if not view.is_known:
            return None
        media = {GPU: view.device, **view.store.media}
        return {(medium, *divmod(block, count)) for medium, blocks in media.items() for block in blocks}

    def hashes(self, request: EngineCoreRequest) -> list[int]:
        """Return the blocks of a request in all groups, as `_KVView` has them, in order."""
        digests, tokens = list[bytes](), request.prompt_token_ids + request.output_token_ids
        extend_digests(digests, self._root, request, tokens, self.block_size, chain_salt(request, self._media))
        count = self.num_groups
        firsts = [event_number(digest) * count for digest in digests]
        return firsts if count == 1 else [first + group for first in firsts for group in range(count)]

    def num_cached(self, replica: int, hashes: list[int]) -> int:
        view = self._view(replica)
        if not view.is_known:
            return super().num_cached(replica, hashes[:: self.num_groups])
        return self._length(hashes, _Any(view.device, view.placed)) * self.block_size

    def num_saved(self, replica: int, hashes: list[int], num_cached: int) -> int:
        view, start = self._view(replica), num_cached // self.block_size * self.num_groups
        memory, disk = view.store.media[CPU], view.store.media[STORAGE]
        if not view.is_known or not (memory or disk) or start == len(hashes):
            return num_cached
        end = self._length(hashes, _Any(view.device, view.placed, memory, disk)) * self.num_groups
        firsts = hashes[start : end : self.num_groups]
        in_memory = sum(block in memory for block in firsts)
        blocks = in_memory * _SAVED[CPU] + (len(firsts) - in_memory) * _SAVED[STORAGE]
        return num_cached + int(blocks * self.block_size)

    def _length(self, blocks: list[int], known: Container[int]) -> int:
        return prefix_length(blocks, known, self.num_groups, self._windows, self.block_size)

    def on_placed(self, replica: int, hashes: list[int], num_blocks: int) -> None:
        if not (view := self._view(replica)).is_known:
            super().on_placed(replica, hashes[:: self.num_groups], num_blocks)
        view.placed.update(hashes)

    def on_finished(self, replica: int, request: EngineCoreRequest, hashes: list[int], output: list[int]) -> None:
        self._view(replica).release(hashes)

    def forget(self, replica: int) -> None:
        super().forget(replica)
        if (view := self._views.pop(replica, None)) is None:
            return
        self._freed.append(view.device)
        if view.store.speaker == replica:
            view.store.speaker = None
        if all(each.store is not view.store for each in self._views.values()):
            self._freed += view.store.media.values()
            self._stores.pop(view.store_name, None)

    def silent_stores(self) -> set[str]:
        """Return the names of stores for whose blocks no replica is asked."""
        return {view.store_name for view in self._views.values() if view.store_name and view.store.speaker is None}

    def _view(self, replica: int) -> _KVView:
        return self._views.setdefault(replica, _KVView())

    def _keys(self, numbers: list[int], group: int) -> list[int]:
        return [number * self.num_groups + group for number in numbers]
