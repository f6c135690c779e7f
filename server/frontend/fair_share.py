"""Fair sharing: which share of the engine a request belongs to (`--fair-share`)."""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from hashlib import blake2b
from typing import NamedTuple


class Share(NamedTuple):
    """A share, as the engine sees it."""

    key: bytes = b""
    """Of all requests, without fair sharing."""
    weight: float = 1.0


_ONLY = Share()
SHARE: ContextVar[Share] = ContextVar("share", default=_ONLY)
"""The share of the current task's request."""
_BY_USER: ContextVar[FairShare | None] = ContextVar("by_user", default=None)
"""Set if the request's body decides (`enter_user`)."""


class FairShare:
    """Assigns requests to shares by what identifies their client: `by` is `--fair-share`. `weights` are those that are
    not 1.
    """

    def __init__(self, by: str, weights: Mapping[str, float]) -> None:
        self.by = by
        self._weights = weights

    def enter(self, name: str, weight: float | None = None) -> None:
        """Assign the current task's request to the share of this API key, user or address.

        The engine sees no text: a share has a hash.
        """
        key = blake2b(name.encode(errors="surrogatepass"), digest_size=16, person=b"fair share").digest()
        SHARE.set(Share(key, self._weights.get(name, 1.0) if weight is None else weight))
        if self.by == "user":
            _BY_USER.set(self)


def enter_user(user: object) -> None:
    """With `--fair-share user`, assign the current task's request to its user. Those without one share a share."""
    if isinstance(user, str) and (fair_share := _BY_USER.get()) is not None:
        fair_share.enter(user)
