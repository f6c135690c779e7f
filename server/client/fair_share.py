"""Fair sharing (`--fair-share`): the share of the engine that a request belongs to, and turns of shares."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Mapping
from contextvars import ContextVar
from hashlib import blake2b
from typing import NamedTuple


class Share(NamedTuple):
    """A share, as the engine sees it."""

    key: bytes = b""
    """A hash of the client; empty without fair sharing, when all requests have one share."""
    weight: float = 1.0


_ONLY = Share()
SHARE: ContextVar[Share] = ContextVar("share", default=_ONLY)
"""The share of the current task's request."""
_BY_BODY: ContextVar[FairShare | None] = ContextVar("by_body", default=None)
"""Set if the request's body decides (`enter_user`, `enter_model`)."""


class FairShare:
    """Assigns requests to shares by their client's identity: `by` is `--fair-share`. `weights` has all weights other
    than 1.
    """

    def __init__(self, by: str, weights: Mapping[str, float]) -> None:
        self.by = by
        self._weights = weights

    def enter(self, name: str, weight: float | None = None) -> None:
        """Assign the current task's request to the share of this API key, user, address or model.

        The engine sees no text: a share has a hash.
        """
        key = blake2b(name.encode(errors="surrogatepass"), digest_size=16, person=b"fair share").digest()
        SHARE.set(Share(key, self._weights.get(name, 1.0) if weight is None else weight))
        if self.by in ("user", "adapter"):
            _BY_BODY.set(self)


class Overloaded(RuntimeError):
    """Too many tasks wait for the same thing."""


class FairSlots:
    """A limit on concurrent work. The shares of waiting tasks take turns. At most `max_waiting` tasks wait, and half of
    them of one share if there are several.
    """

    def __init__(self, count: int, max_waiting: float = math.inf) -> None:
        self._num_free = count
        self._max_waiting = max_waiting
        self._waiting: dict[Share, deque[asyncio.Future[None]]] = {}
        """The waiting tasks by share, in the order of turns."""

    async def __aenter__(self) -> None:
        """Wait for a slot in the turn of the current task's share. Raises `Overloaded` if too many wait."""
        if self._num_free:
            self._num_free -= 1
            return
        share = SHARE.get()
        waiting = {each: sum(not turn.done() for turn in turns) for each, turns in self._waiting.items()}
        if sum(waiting.values()) >= self._max_waiting or (
            share.key and waiting.get(share, 0) >= self._max_waiting // 2
        ):
            raise Overloaded(f"{sum(waiting.values())} tasks wait")
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(share, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # the slot had been given to this task
                self._give()
            raise

    async def __aexit__(self, *_: object) -> None:
        self._give()

    def _give(self) -> None:
        """Give a slot that has become free to the next waiting task."""
        while self._waiting:
            share, turns = next(iter(self._waiting.items()))
            del self._waiting[share]
            turn = turns.popleft()
            if turns:
                self._waiting[share] = turns
            if not turn.done():
                return turn.set_result(None)
        self._num_free += 1


def enter_user(user: object) -> None:
    """With `--fair-share user`, assign the current task's request to its user. Requests without a user have one
    share."""
    if isinstance(user, str) and (fair_share := _BY_BODY.get()) is not None and fair_share.by == "user":
        fair_share.enter(user)


def enter_model(name: str) -> None:
    """With `--fair-share adapter`, assign the current task's request to the share of an adapter, or of the base."""
    if (fair_share := _BY_BODY.get()) is not None and fair_share.by == "adapter":
        fair_share.enter(name)
