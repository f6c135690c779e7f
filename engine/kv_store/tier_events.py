"""Tells cores which entries the tiers of a KV store have, for their KV events (`quire.engine.scheduler.kv_events`).

Entries are announced by the numbers of their blocks in events, which some core must have described. Blocks that no core
has described, such as those that an earlier server left on disk, are announced once a core has loaded them. A
description is kept as long as a tier has an entry of the block.

Possible changes are noted once for all cores, which are then told the current state: an entry that comes and goes in
between costs nothing more. Cores that have not heard of all entries since they opened the store are told together, by a
*hand* that goes round the descriptions like that of a clock. No call takes longer when there are more entries: `tell`
does at most `_SLICE` steps of each kind of work, and says whether it must be called again soon.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from quire.engine.protocol.kv_store import DISK, MEMORY, DescribeKV, FromStore, KVEntry, KVTiersChanged

_SLICE = 256
"""Steps of each kind of work in one call of `tell`."""
_AHEAD = 128
"""Maximum messages for a core that it has not acknowledged."""
_TIERS = (MEMORY, DISK)


class _Description(NamedTuple):
    number: int
    """The block's number in events."""
    block: bytes
    place: int
    """Its index in `TierEvents._links`."""


@dataclass(eq=False)
class _Follower:
    """A core that is told."""

    client: bytes
    until: tuple[int, int] | None
    """The round and place of the hand at which it will have heard of all descriptions; None: it has."""
    has_been_told: bool = False
    number: int = 0
    """The number of the last message sent."""
    heard: int = 0
    """The number of the last message that it has acknowledged."""
    is_behind: bool = False
    """It has so many unacknowledged messages that it gets no more for now."""


class TierEvents:
    """Descriptions, and the changes that cores have not been told."""

    def __init__(
        self,
        num_kinds: int,
        has_entry: Callable[[int, bytes, int], bool],
        has_block: Callable[[bytes], bool],
        send: Callable[[bytes, FromStore], None],
    ) -> None:
        """`has_entry(tier, link, kind)` says whether a tier has an entry; `has_block(link)` whether some tier has an
        entry of the block, or will have one. `send` sends a message to a client."""
        self._num_kinds, self._has_entry, self._has_block, self._send = num_kinds, has_entry, has_block, send
        self._described: dict[bytes, _Description] = {}
        """By link."""
        self._links: list[bytes | None] = []
        """The described links, which the hand goes round; None: a free place."""
        self._free: list[int] = []
        self._hand = (0, 0)
        """Its round, and the next place."""
        self._untold: OrderedDict[tuple[int, bytes, int, int], None] = OrderedDict()
        """Entries that may have changed: tier, link, kind, and number in events. A block that was described again since
        may have another number."""
        self._turn = 0
        self._unsure: OrderedDict[bytes, int] = OrderedDict()
        """Links that may have no entry any more, with the turn since when."""
        self._followers: dict[int, _Follower] = {}
        """By replica."""

    @property
    def num_described(self) -> int:
        return len(self._described)

    def follow(self, replica: int, client: bytes) -> None:
        """Begin to tell a core of all entries, and then of changes."""
        turn, place = self._hand
        self._followers[replica] = _Follower(client, (turn + 1, place))

    def hear(self, replica: int, number: int) -> None:
        """A core has acknowledged the messages up to this number."""
        if (follower := self._followers.get(replica)) is not None:
            follower.heard = min(number, follower.number)
            if follower.is_behind and follower.number - follower.heard < _AHEAD // 2:
                turn, place = self._hand
                follower.until, follower.has_been_told, follower.is_behind = (turn + 1, place), False, False

    def forget(self, replica: int) -> None:
        """Tell a core nothing more."""
        self._followers.pop(replica, None)

    def describe(self, message: DescribeKV) -> None:
        """Remember how events describe blocks."""
        for link, number, block in zip(message.links, message.numbers, message.blocks, strict=True):
            if link not in self._described:
                place = self._free.pop() if self._free else len(self._links)
                self._links[place : place + 1] = [link]
                self._described[link] = _Description(number, block, place)
                for tier, kind in self._tiers_of(link):
                    self.note(tier, link, kind)
                self._doubt(link)

    def note(self, tier: int, link: bytes, kind: int) -> None:
        """An entry may have come to a tier, or left it."""
        if (found := self._described.get(link)) is not None:
            if self._followers:
                self._untold[tier, link, kind, found.number] = None
            self._doubt(link)

    def _tiers_of(self, link: bytes) -> list[tuple[int, int]]:
        """The tier and kind of each existing entry of a link."""
        return [(tier, kind) for tier in _TIERS for kind in range(self._num_kinds) if self._has_entry(tier, link, kind)]

    def _doubt(self, link: bytes) -> None:
        self._unsure[link] = self._turn
        self._unsure.move_to_end(link)

    def begin_turn(self) -> None:
        """Must be called about once a second. A description without entries is kept for a turn: they may still come."""
        self._turn += 1

    def tell(self, changed_on_disk: deque[KVEntry]) -> bool:
        """Tell the cores some of the entries and changes that they do not know; takes entries that may have changed out
        of `changed_on_disk`. Returns whether there is more."""
        for _ in range(min(len(changed_on_disk), _SLICE)):
            entry = changed_on_disk.popleft()
            self.note(DISK, entry.link, entry.kind)
        self._tell_all()
        self._tell_changes()
        for _ in range(min(len(self._unsure), _SLICE)):
            link, turn = self._unsure.popitem(last=False)
            if turn + 1 >= self._turn:
                self._unsure[link] = turn
                self._unsure.move_to_end(link, last=False)
                break
            if not self._has_block(link):
                place = self._described.pop(link).place
                self._links[place] = None
                self._free.append(place)
        is_behind = any(each.until is not None for each in self._told)
        is_unsure = next(iter(self._unsure.values()), self._turn) + 1 < self._turn
        return is_behind or is_unsure or bool(self._untold) or bool(changed_on_disk)

    def _tell_all(self) -> None:
        """Move the hand, and tell the cores that have not heard of all entries."""
        if not (behind := [each for each in self._told if each.until is not None]):
            return
        turn, place = self._hand
        stored: list[tuple[int, int, int, bytes]] = []
        for link in self._links[place : place + _SLICE]:
            if link is not None:
                number, block, _ = self._described[link]
                stored += [(*entry, number, block) for entry in self._tiers_of(link)]
        place += _SLICE
        self._hand = (turn, place) if place < len(self._links) else (turn + 1, 0)
        for follower in behind:
            if stored or not follower.has_been_told:
                self._send_to(follower, KVTiersChanged(stored, [], not follower.has_been_told))
            follower.has_been_told = True
            if follower.until is not None and self._hand >= follower.until:
                follower.until = None

    def _tell_changes(self) -> None:
        message = KVTiersChanged([], [])
        for _ in range(min(len(self._untold), _SLICE)):
            (tier, link, kind, number), _ = self._untold.popitem(last=False)
            described = self._described.get(link)
            if described is not None and described.number == number and self._has_entry(tier, link, kind):
                message.stored.append((tier, kind, number, described.block))
            else:
                message.removed.append((tier, kind, number))
        if message.stored or message.removed:
            for follower in self._told:
                self._send_to(follower, message)

    @property
    def _told(self) -> list[_Follower]:
        return [each for each in self._followers.values() if not each.is_behind]

    def _send_to(self, follower: _Follower, message: KVTiersChanged) -> None:
        follower.is_behind = follower.number - follower.heard >= _AHEAD
        if not follower.is_behind:
            follower.number += 1
            self._send(follower.client, msgspec.structs.replace(message, number=follower.number))
