"""The blocks that a replica has announced to routers. Only the thread that publishes events uses this."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import NamedTuple

import msgspec

from quire.engine.protocol.kv_events import CPU, GPU, STORAGE, AllBlocksCleared, BlockRemoved, BlockStored, KVEvent
from quire.engine.protocol.kv_store import DescribedBlock

_SLICE = 2048
"""Maximum blocks that are withdrawn at once, and that one event announces."""


class DeviceCleared:
    """All blocks have left the prefix cache. Published as `AllBlocksCleared` if the tiers have no blocks."""


class TierNews(NamedTuple):
    """News of the KV store. They become events on the publisher's thread, because they may be many."""

    is_first: bool
    """Earlier news of the tiers are void."""
    events: Callable[[KVEventsView], list[KVEvent]]
    """Returns the events, given the announced blocks."""


class KVEventsView:
    """The blocks that events have announced."""

    def __init__(self) -> None:
        self._blocks: dict[tuple[str | None, int | None], dict[int, bytes]] = {}
        """By medium and group, then by hash: a `DescribedBlock` in msgpack, as bytes, because the garbage collector
        stops all threads while it visits objects, and there may be millions."""
        self._groups: dict[int | None, tuple[int, str | None, int | None]] = {}
        """By group: tokens of a block, kind of the group, and its window."""
        self._encode = msgspec.msgpack.Encoder().encode

    def holds(self, medium: str, group: int, number: int) -> bool:
        """Whether a block is announced."""
        return number in self._blocks.get((medium, group), ())

    def take(self, news: Iterable[KVEvent | DeviceCleared]) -> list[KVEvent]:
        """Return the events of the device to be published next, and count them as announced."""
        found: list[KVEvent] = []
        for each in news:
            if not isinstance(each, DeviceCleared):
                self.apply([each])
                found.append(each)
            elif any(blocks for (medium, _), blocks in self._blocks.items() if medium != GPU):
                found += iter(lambda: self._withdraw((GPU,), math.inf), None)
            else:
                self._blocks.clear()
                found.append(AllBlocksCleared())
        return found

    def take_tiers(self, news: TierNews) -> tuple[list[KVEvent], bool]:
        """Return the next events to publish for news of the tiers, and whether these are the last ones for it. They
        count as announced from now on."""
        if news.is_first and (event := self._withdraw((CPU, STORAGE), _SLICE)) is not None:
            return [event], False
        self.apply(events := news.events(self))
        return events, True

    def _withdraw(self, media: Collection[str], limit: float) -> BlockRemoved | None:
        """Withdraw up to `limit` blocks of these media, all in one group; None: there are none."""
        for (medium, group), blocks in self._blocks.items():
            if medium in media and blocks:
                numbers = [blocks.popitem()[0] for _ in range(int(min(limit, len(blocks))))]
                return BlockRemoved(numbers, medium, group)
        return None

    def apply(self, events: Iterable[KVEvent]) -> None:
        """Count events as announced."""
        for event in events:
            match event:
                case BlockStored():
                    size, parent, group = event.block_size, event.parent_block_hash, event.group_idx
                    keys = event.extra_keys or [None] * len(event.block_hashes)
                    blocks = self._blocks.setdefault((event.medium, group), {})
                    self._groups[group] = size, event.kv_cache_spec_kind, event.kv_cache_spec_sliding_window
                    for at, (number, extra_keys) in enumerate(zip(event.block_hashes, keys, strict=True)):
                        tokens = event.token_ids[at * size : (at + 1) * size]
                        blocks[number] = self._encode(DescribedBlock(parent, tokens, event.lora_name, extra_keys))
                        parent = number
                case BlockRemoved():
                    for number in event.block_hashes:
                        del self._blocks[event.medium, event.group_idx][number]
                case AllBlocksCleared():
                    self._blocks.clear()

    def hashes(self, count: int, *, has_tiers: bool) -> Iterator[BlockStored]:
        """Yield events that announce all blocks, at most `count` in each, without tokens and parents. The blocks are
        those announced when the first event is requested."""
        found = [(key, [*own]) for key, own in self._blocks.items() if has_tiers or key[0] == GPU]
        for (medium, group), numbers in found:
            for start in range(0, len(numbers), count):
                yield BlockStored(numbers[start : start + count], None, [], 0, None, medium, None, None, group)

    def events(self) -> Iterator[BlockStored]:
        """Yield events that announce all blocks, parents before their children."""
        last: BlockStored | None = None
        decode = msgspec.msgpack.Decoder(DescribedBlock).decode
        for (medium, group), blocks in self._blocks.items():
            done: set[int] = set()
            size, kind, window = self._groups[group]
            for first in blocks:
                number: int | None = first
                chain: list[BlockStored] = []
                while number is not None and number in blocks and number not in done:
                    parent, tokens, lora_name, keys = msgspec.structs.astuple(decode(blocks[number]))
                    event = BlockStored([number], parent, tokens, size, None, medium, lora_name, [keys])
                    event.group_idx, event.kv_cache_spec_kind, event.kv_cache_spec_sliding_window = group, kind, window
                    chain.append(event)
                    done.add(number)
                    number = parent
                for event in reversed(chain):
                    if last is None or len(last.block_hashes) >= _SLICE or not last.append(event):
                        if last is not None:
                            yield last
                        last = event
        if last is not None:
            yield last
