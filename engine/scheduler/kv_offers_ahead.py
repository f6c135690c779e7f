"""Offers the blocks of requests that hand over to the KV store before they are computed, so that they can be copied
beside the steps that compute them.

They are offered only a few rows ahead: while an entry is granted to one replica, the store does not grant it to others
that compute the same block, and whoever loads it waits for this replica.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from quire.engine.protocol.kv_store import KVEntry
from quire.engine.scheduler.request import Request
from quire.engine.scheduler.request_blocks import RequestBlocks

_ROWS = 2
"""How many rows of a request are offered before they are planned, so that the store can answer in time."""
_MAX_AHEAD = 1024
"""Maximum entries that are offered and not computed yet."""


@dataclass(slots=True)
class _Offered:
    """The part of a request's prompt that has been offered."""

    num_cached: int = 0
    """Links that were in the prefix cache when it started."""
    end: int = 0
    """Number of the first link that has not been offered."""
    entries: list[KVEntry] = field(default_factory=list)


class OffersAhead:
    """Owns the places granted for blocks that are not computed yet."""

    def __init__(
        self,
        blocks: RequestBlocks,
        num_kinds: int,
        row_tokens: int,
        *,
        stays: Callable[[int, int, int], bool],
        is_cached: Callable[[bytes, int], bool],
        send: Callable[[list[KVEntry], list[bytes]], None],
    ) -> None:
        """A row has at most `row_tokens` tokens. `stays(kind, number of the link, tokens of the text)`: whether the
        prefix cache keeps such a block; `is_cached(link, kind)`: whether it has it. `send` sends an offer, given
        entries and their parents."""
        self._blocks, self._kv, self._num_kinds, self._row_tokens = blocks, blocks.kv, num_kinds, row_tokens
        self._stays, self._is_cached, self._send = stays, is_cached, send
        self._offsets: dict[KVEntry, int | None] = {}
        """Places by entry; None: the offer has not been answered."""
        self._requests: dict[Request, _Offered] = {}

    def __contains__(self, entry: KVEntry) -> bool:
        return entry in self._offsets

    def begin(self, request: Request) -> None:
        """Offer the first blocks of a request that will start soon."""
        if request not in self._requests and self._kv.enable_prefix_caching:
            self._blocks.reusable_hashes(request)  # extends `hashes`
            self._requests[request] = _Offered()
            self._offer(request)

    def start(self, request: Request, num_cached: int) -> None:
        """Note that a request starts, with `num_cached` links in the prefix cache."""
        self._requests.setdefault(request, _Offered()).num_cached = num_cached

    def advance(self, request: Request) -> None:
        """Offer the next blocks of a request that has advanced, if it is offered ahead."""
        if request in self._requests:
            self._offer(request)

    def _offer(self, request: Request) -> None:
        hashes, stride, num_prompt = request.hashes, self._kv.num_groups, request.num_prompt_tokens
        offered, entries, parents = self._requests[request], list[KVEntry](), list[bytes]()
        until = min(num_prompt, request.num_computed_tokens + _ROWS * self._row_tokens) // self._kv.block_size
        while offered.end < until and len(self._offsets) + len(entries) < _MAX_AHEAD:
            at = offered.end * stride
            link, parent = hashes[at], hashes[at - stride] if at else b""
            for kind in range(self._num_kinds):
                entry = KVEntry(link, kind)
                if entry in self._offsets or not self._stays(kind, offered.end, num_prompt):
                    continue
                if offered.end >= offered.num_cached or self._is_cached(link, kind):
                    entries.append(entry)
                    parents.append(parent)
            offered.end += 1
        if entries:
            offered.entries += entries
            self._offsets |= dict.fromkeys(entries)
            self._send(entries, parents)

    def grant(self, entry: KVEntry, offset: int) -> None:
        """Keep the place that was granted for an entry that is not computed yet."""
        self._offsets[entry] = offset

    def take(self, entry: KVEntry) -> int | None:
        """Take the place of an entry, to write to it; None: none was granted."""
        if (offset := self._offsets.get(entry)) is not None:
            del self._offsets[entry]
        return offset

    def answered(self, entries: Iterable[KVEntry]) -> None:
        """Note that an offer was answered. Entries that were not granted are already stored, or found no room."""
        for entry in entries:
            if self._offsets.get(entry, 0) is None:
                del self._offsets[entry]
        for request in self._requests:
            self._offer(request)

    def end(self, request: Request) -> list[tuple[KVEntry, int]]:
        """Forget a request that no longer runs; returns its places, which the caller must use or abandon. Places
        granted later are treated like those of other offers."""
        entries = [] if (offered := self._requests.pop(request, None)) is None else offered.entries
        places = [(entry, self._offsets.pop(entry, None)) for entry in entries]
        return [(entry, offset) for entry, offset in places if offset is not None]

    def clear(self) -> list[int]:
        """Forget everything; returns the places."""
        offsets = [offset for offset in self._offsets.values() if offset is not None]
        self._offsets.clear()
        self._requests.clear()
        return offsets

    def check_integrity(self) -> None:
        """Assert that each place belongs to a request."""
        assert self._offsets.keys() <= {entry for each in self._requests.values() for entry in each.entries}
