"""Serves the entries of a store to the stores of other hosts (`quire.engine.protocol.kv_peers`).

To the store, a reader looks like a core that only loads, so entries for it are read from disk, checked and pinned in
the same way. Readers take turns, and bytes leave as fast as the bandwidth limit and the reader's connection allow. A
reader that does not read holds the entries of `MAX_FETCHES` calls, and a few messages in its connection. Further calls
are refused, and so are readers for which the bandwidth does not suffice, so that they compute at once.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import msgspec

from quire.engine.cluster.security import Dropped, join
from quire.engine.kv_store.checksum import bind
from quire.engine.kv_store.peers import PeerTier
from quire.engine.protocol.errors import UNDECODABLE
from quire.engine.protocol.kv_peers import (
    FETCH_BYTES,
    GRANT_SECONDS,
    LEAST_RATE,
    MAX_FETCHES,
    PIECE_BYTES,
    AskPeer,
    FetchKV,
    FromPeer,
    HelloPeer,
    PeerHas,
    PeerLacks,
    PeerPiece,
    PeerReady,
    ToPeer,
)
from quire.engine.protocol.kv_store import (
    LINK_BYTES,
    FromStore,
    KVEntry,
    LoadedKV,
    LoadKV,
    OpenKVStore,
    ReleaseKV,
    SettleKV,
    ToStore,
)

FORGET_SECONDS = 30.0
"""A reader that has been silent, or has taken nothing of what it asked for, for this long is gone."""
_BURST_SECONDS = 0.1
"""The bandwidth of this much time may be used at once."""
_AT_ONCE = 8 << 20
"""Bytes that are sent before messages get their turn."""
_MAX_READERS = 64
_MAX_UNTOLD = 64
"""Maximum messages without content that wait for a connection; further ones are dropped."""
_FULL_SECONDS = 0.005
"""Time after which a full connection is tried again."""

_decode = msgspec.msgpack.Decoder[ToPeer](ToPeer).decode
_PREFIX = b"peer:"
"""Prefix of the names of clients that are readers."""


@dataclass(eq=False)
class _ReadCall:
    """A `FetchKV`."""

    reader: _PeerReader
    call_id: int
    """The reader's number of the call."""
    number: int
    """The store's number of the call."""
    entries: list[KVEntry]
    left: set[int]
    """Numbers of the entries that have neither been sent nor failed."""
    settles_at: float
    """When what cores are writing is waited for no longer."""


@dataclass(eq=False)
class _PeerReader:
    """Another store that reads from this one."""

    name: bytes
    """Of its connection."""
    replica: int
    """By which the store knows it; below 0."""
    heard_at: float = 0.0
    moved_at: float = 0.0
    """When it had no call, or last took something."""
    calls: dict[int, _ReadCall] = field(default_factory=dict)
    """By the store's number."""
    loaded: deque[tuple[_ReadCall, int, int]] = field(default_factory=deque)
    """Entries to be sent: call, number in it, offset."""
    sent: int = 0
    """Bytes of the first of them that have been sent."""
    untold: deque[FromPeer] = field(default_factory=lambda: deque(maxlen=_MAX_UNTOLD))
    """Messages without content to be sent before."""
    retry_at: float = 0.0
    """Nothing is sent before this time, as its connection takes no more."""

    @property
    def client(self) -> bytes:
        return _PREFIX + self.name


class PeerServer:
    """Answers the stores of other hosts."""

    def __init__(
        self,
        signature: bytes,
        sizes: Sequence[int],
        handle: Callable[[bytes, ToStore], None],
        find: Callable[[list[bytes], bool], list[bytes]],
        locate: Callable[[int, int], tuple[memoryview, bytes]],
        forget: Callable[[int], None],
        tier: PeerTier,
        own: str,
        send: Callable[[bytes, FromPeer, memoryview | None], bool],
        bandwidth: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`handle`, `find` and `forget` (a replica) are the store's. `locate` returns the bytes and the checksum of a
        loaded entry, given kind and offset. `tier` reads from others; readers connect to the address `own`. `send`
        sends a message with content, and returns False if the connection is full. `bandwidth`: bytes per second; 0: no
        limit."""
        self._signature, self._sizes, self._clock = signature, sizes, clock
        self._handle, self._find, self._locate, self._forget = handle, find, locate, forget
        self._tier, self._own, self._send = tier, own, send
        self._bandwidth, self._rubbish = bandwidth, Dropped("dropped a message of another KV store")
        self._readers: dict[bytes, _PeerReader] = {}
        """By name, the least recently served first."""
        self._last_number = 0
        self._next_piece = 0.0
        """No piece leaves before this time."""
        self.sent_bytes = 0

    @staticmethod
    def is_reader(client: bytes) -> bool:
        return client.startswith(_PREFIX)

    def receive(self, name: bytes, frames: Sequence[bytes]) -> None:
        """Take a message of the reader whose connection has that name. An invalid one is dropped."""
        try:
            message = _decode(join(frames))
        except UNDECODABLE as reason:
            return self._rubbish.add(reason)
        tell = partial(self._tell, name)
        error = "" if message.signature == self._signature else "it has another model, version or cache type"
        if isinstance(message, HelloPeer):
            if name in self._readers:
                self._readers[name].heard_at = self._clock()
            return tell(PeerReady(self._tier.store, error, self._own))
        if isinstance(message, AskPeer):
            has = (
                [bytes(len(message.links))] * len(self._sizes)
                if error
                else self._find(message.links, message.counts_granted)
            )
            return tell(PeerHas(message.call_id, has))
        reader = self._readers.get(name)
        if error or not self._is_valid(message) or not self._has_room(reader):
            return tell(PeerLacks(message.call_id, [*range(len(message.entries))]))
        if reader is None:
            self._last_number += 1
            reader = self._readers[name] = _PeerReader(name, -self._last_number)
            self._handle(reader.client, OpenKVStore(reader.replica, 1))
        reader.heard_at = self._clock()
        if not reader.calls:
            reader.moved_at = reader.heard_at
        self._last_number += 1
        entries, left = message.entries, {*range(len(message.entries))}
        settles_at = self._clock() + GRANT_SECONDS
        reader.calls[self._last_number] = _ReadCall(
            reader, message.call_id, self._last_number, entries, left, settles_at
        )
        self._handle(reader.client, LoadKV(self._last_number, entries))

    def _has_room(self, reader: _PeerReader | None) -> bool:
        """Whether a reader can have another call. The bandwidth must suffice for twice `LEAST_RATE` for each active
        reader."""
        if reader is None and len(self._readers) >= _MAX_READERS:
            return False
        if reader is not None and reader.calls:
            return len(reader.calls) < MAX_FETCHES
        others = sum(bool(each.calls) for each in self._readers.values())
        return not others or not self._bandwidth or (others + 1) * 2 * LEAST_RATE <= self._bandwidth

    def _tell(self, name: bytes, message: FromPeer) -> None:
        """Send a message without content, now or when the connection takes it."""
        reader = self._readers.get(name)
        if (reader is None or not reader.untold) and self._send(name, message, None):
            return
        if reader is not None:
            reader.untold.append(message)

    def _is_valid(self, message: FetchKV) -> bool:
        entries = message.entries
        if not entries:
            return False
        if any(not 0 <= each.kind < len(self._sizes) or len(each.link) != LINK_BYTES for each in entries):
            return False
        return len(entries) == 1 or sum(self._sizes[each.kind] for each in entries) <= FETCH_BYTES

    def deliver(self, client: bytes, message: FromStore) -> None:
        """Take an answer of the store."""
        reader = self._readers.get(client.removeprefix(_PREFIX))
        if reader is None or not isinstance(message, LoadedKV):
            return
        if (call := reader.calls.get(message.call_id)) is None:
            return
        reader.loaded.extend((call, *each) for each in zip(message.numbers, message.offsets, strict=True))
        if message.failed:
            self._tell(reader.name, PeerLacks(call.call_id, message.failed))
            self._let_go(call, message.failed)

    def _let_go(self, call: _ReadCall, numbers: list[int]) -> None:
        """Release entries of a call, which ends with the last of them."""
        call.left.difference_update(numbers)
        if not call.left:
            del call.reader.calls[call.number]
        self._handle(call.reader.client, ReleaseKV(call.number, numbers if call.left else []))

    def seconds_left(self) -> float:
        """Seconds until `pump` has something to do."""
        times = [call.settles_at for reader in self._readers.values() for call in reader.calls.values()]
        times += [reader.retry_at for reader in self._readers.values() if reader.untold]
        times += [max(each.retry_at, self._next_piece) for each in self._readers.values() if each.loaded]
        return max(0.0, min(times, default=math.inf) - self._clock())

    def pump(self) -> None:
        """Send as much as the bandwidth and the connections allow."""
        now, left = self._clock(), _AT_ONCE
        for call in [call for reader in self._readers.values() for call in reader.calls.values()]:
            if call.settles_at <= now:
                call.settles_at = math.inf
                self._handle(call.reader.client, SettleKV(call.number, gives_up=True))
        self._next_piece = max(self._next_piece, now - _BURST_SECONDS)
        ready = deque(reader for reader in self._readers.values() if reader.retry_at <= now)
        for reader in ready:
            while reader.untold and self._send(reader.name, reader.untold[0], None):
                reader.untold.popleft()
            if reader.untold:
                reader.retry_at = now + _FULL_SECONDS
        ready = deque(reader for reader in ready if reader.loaded and not reader.untold)
        most = PIECE_BYTES
        if self._bandwidth:  # several pieces for each before it finds this store late
            most = min(most, max(1, int(self._bandwidth / (8 * max(1, len(ready))))))
        while ready and left > 0 and self._next_piece <= now:
            reader = ready.popleft()
            if not (size := self._send_piece(reader, most)):
                reader.retry_at = now + _FULL_SECONDS
                continue
            self._readers[reader.name] = self._readers.pop(reader.name)  # to the end of the order
            reader.moved_at = now
            left -= size
            self.sent_bytes += size
            if self._bandwidth:
                self._next_piece += size / self._bandwidth
            if reader.loaded:
                ready.append(reader)
        for reader in [*self._readers.values()]:
            if now - (min(reader.moved_at, reader.heard_at) if reader.calls else reader.heard_at) > FORGET_SECONDS:
                del self._readers[reader.name]
                self._forget(reader.replica)

    def _send_piece(self, reader: _PeerReader, most: int) -> int:
        """Send the next piece; returns the number of its bytes, 0 if the connection is full."""
        call, number, offset = reader.loaded[0]
        entry = call.entries[number]
        view, checksum = self._locate(entry.kind, offset)
        piece = view[reader.sent : reader.sent + most]
        bound = bind(checksum, entry.link, entry.kind)
        if not self._send(reader.name, PeerPiece(call.call_id, number, reader.sent, bound), piece):
            return 0
        reader.sent += len(piece)
        if reader.sent == len(view):
            reader.loaded.popleft()
            reader.sent = 0
            self._let_go(call, [number])
        return len(piece)
