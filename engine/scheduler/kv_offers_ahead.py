"""Blocks of requests that hand over, which are offered to the KV store before they are computed.

So they can be copied beside the steps that compute them. They are offered some rows ahead: as long as a place is
granted to one replica, the store grants none to others that compute the same, and who loads waits for this one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from quire.engine.protocol.kv_store import KVEntry
from quire.engine.scheduler.request import Request
from quire.engine.scheduler.request_blocks import RequestBlocks

_ROWS = 2
"""Rows of a request whose blocks are offered before they are planned: the store answers meanwhile."""
_MAX_AHEAD = 1024
"""Entries offered and not computed yet."""


@dataclass(slots=True)
class _Offered:
    """What has been offered of a request's prompt."""

    num_cached: int = 0
    """Links that were in the prefix cache when it started."""
    end: int = 0
    """Number of the first link that has not been offered."""
    entries: list[KVEntry] = field(default_factory=list)


class OffersAhead:
    """Owns the places that have been granted for blocks that are not there yet."""

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
        """A row has at most `row_tokens` tokens. `stays(kind, number of a link, tokens of the text)`: whether the
        prefix cache keeps such blocks; `is_cached(link, kind)`: whether it has them; `send` sends an offer with these
        entries and their parents."""
        self._blocks, self._kv, self._num_kinds, self._row_tokens = blocks, blocks.kv, num_kinds, row_tokens
        self._stays, self._is_cached, self._send = stays, is_cached, send
        self._offsets: dict[KVEntry, int | None] = {}
        """Places by entry; None: the offer is not answered."""
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
        """Note that a request starts, with so many links in the prefix cache."""
        self._requests.setdefault(request, _Offered()).num_cached = num_cached

    def advance(self, request: Request) -> None:
        """Offer the next blocks of a request that has been moved forward, if it has started here."""
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
        """Keep the place that was granted for an entry that is not there yet."""
        self._offsets[entry] = offset

    def take(self, entry: KVEntry) -> int | None:
        """Take the place of an entry, to write there; None: none has been granted."""
        if (offset := self._offsets.get(entry)) is not None:
            del self._offsets[entry]
        return offset

    def answered(self, entries: Iterable[KVEntry]) -> None:
        """Process that an offer was answered: what was not granted is there, or has no room."""
        for entry in entries:
            if self._offsets.get(entry, 0) is None:
                del self._offsets[entry]
        for request in self._requests:
            self._offer(request)

    def end(self, request: Request) -> list[tuple[KVEntry, int]]:
        """Forget a request that runs no longer; returns the places that the caller uses or abandons. What is granted
        later is not ahead."""
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
        """Assert that each place is some request's."""
        assert self._offsets.keys() <= {entry for each in self._requests.values() for entry in each.entries}
