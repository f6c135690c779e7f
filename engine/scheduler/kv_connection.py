"""The engine core's connection to the KV store of its host."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

from quire.engine.config.kv_layout import KVKind
from quire.engine.protocol.kv_store import KVStoreOpened, OpenKVStore, RemoteArena, ToStore

SILENCE_SECONDS = 3.0
"""Time without a message after which the store counts as gone. It sends its stats every second."""
_OPEN_SECONDS = 1.0
"""Interval between attempts to open the store."""


class KVStoreConnection:
    """Whether a store answers, and which one: each store has an arena with its own path."""

    def __init__(self, kinds: Sequence[KVKind]) -> None:
        """`kinds` are the kinds of entries; empty: there is never a store."""
        self.kinds = kinds
        self.send: Callable[[ToStore], None] = lambda message: None
        self.is_open = False
        """Whether there is a store that answers."""
        self.is_late = False
        """Whether a look-up was not answered in time, and the store has been silent since."""
        self.arena, self.arena_size = "", 0
        self.remote: RemoteArena | None = None
        """How ranks on other hosts reach the arena."""
        self._opening: OpenKVStore | None = None
        """None: there is no store."""
        self._heard_at = self._opened_at = -math.inf
        """Times (`time.monotonic`) of the last message, and of the last attempt to open."""
        self._last_number = 0

    def connect(
        self, send: Callable[[ToStore], None], replica: int, incarnation: int, *, has_events: bool = False
    ) -> None:
        """Use a store. `send` must not block; `has_events` as in `OpenKVStore`."""
        self.send, self._opening = send, OpenKVStore(replica, incarnation, has_events)

    @property
    def has_store(self) -> bool:
        return self._opening is not None

    def use(self, arena: KVStoreOpened) -> None:
        """Use another arena."""
        assert self._opening is not None
        self.arena, self.arena_size = arena.path, arena.size
        own = self._opening.replica, self._opening.incarnation
        self.remote = RemoteArena(arena.address, *own) if arena.address else None

    def number(self) -> int:
        """Return a number for a call or copy."""
        self._last_number += 1
        return self._last_number

    def hear(self) -> None:
        """Note that a message has arrived."""
        self._heard_at, self.is_late = time.monotonic(), False

    def open(self, now: float) -> None:
        """Try to open the store."""
        if self._opening is not None:
            self._opened_at = now
            self.send(self._opening)

    def open_again(self, now: float) -> None:
        """Try to open the store again, if the last attempt was long enough ago."""
        if now - self._opened_at >= _OPEN_SECONDS:
            self.open(now)

    def is_silent(self, now: float) -> bool:
        """Whether no message has arrived for too long."""
        return now - self._heard_at > SILENCE_SECONDS

    @property
    def due(self) -> float:
        """When the store counts as silent, or the next attempt to open it is due (`time.monotonic`)."""
        return self._heard_at + SILENCE_SECONDS if self.is_open else self._opened_at + _OPEN_SECONDS

    def has_place(self, kind: int, offset: int) -> bool:
        """Whether an entry of this kind may be at this offset of the arena."""
        is_known = 0 <= kind < len(self.kinds) and bool(self.arena)
        return is_known and 0 <= offset <= self.arena_size - self.kinds[kind].size
