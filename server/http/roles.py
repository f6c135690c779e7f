"""What a request may do: dependencies of the routes that not every key opens.

They run behind the router, which alone decides which route a path is.
"""

from __future__ import annotations

from urllib.parse import urlsplit

from fastapi import Depends, Request

from quire.engine.cluster.network import is_loopback
from quire.server.http.api_keys import Key
from quire.server.http.errors import ApiError
from quire.server.http.state import AppState

SCOPE_KEY = "quire.key"
"""Key in an ASGI scope: the `Key` of the request, or None."""
_FOREIGN = frozenset(("origin", "forwarded", "via", "x-forwarded-for", "x-forwarded-host", "x-real-ip"))
"""Headers of browsers, which add `Origin` to each POST, and of proxies."""


def key_required(what: str = "a valid API key") -> ApiError:
    """Return the error for a request without a valid key."""
    text = f"{what} is required, as `Authorization: Bearer KEY`"
    return ApiError(401, text, "invalid_api_key", {"WWW-Authenticate": "Bearer"})


def wrong_role(text: str) -> ApiError:
    """Return the error for a request whose key may do other things."""
    return ApiError(403, text, "permission_denied")


async def _admin(request: Request, state: AppState) -> None:
    key: Key | None = request.scope.get(SCOPE_KEY)
    if state.keys is None or (key is not None and key.role == "admin"):
        return
    if "admin" not in state.keys.roles:
        text = "this needs an admin key, and the server has none: start it with --admin-key or QUIRE_ADMIN_KEY"
        raise ApiError(403, text, "admin_key_required")
    raise key_required("an admin key") if key is None else wrong_role("this needs an admin key (--admin-key)")


async def _metrics(request: Request, state: AppState) -> None:
    key: Key | None = request.scope.get(SCOPE_KEY)
    if state.keys is None or state.has_public_metrics or "metrics" not in state.keys.roles:
        return
    if key is None:
        raise key_required("a metrics key")
    if key.role == "api":
        raise wrong_role("metrics need a metrics key (--metrics-key)")


AdminOnly = Depends(_admin)
"""Dependency of routes that need an admin key. If the server has no keys at all, the routes decide themselves."""
MetricsReader = Depends(_metrics)
"""Dependency of `/metrics`, which needs a metrics key if there are any."""


def is_local(request: Request) -> bool:
    """Return whether a program on this host has sent it, to a loopback address. A proxy that neither names itself or
    its client nor passes the `Host` on cannot be told from one.
    """
    if not _FOREIGN.isdisjoint(request.headers):
        return False
    client = None if request.client is None else request.client.host  # a Unix socket has none
    try:
        return all(map(_is_loopback, filter(None, (urlsplit(f"//{request.headers.get('host', '')}").hostname, client))))
    except ValueError:  # a malformed host
        return False


def _is_loopback(host: str) -> bool:
    return is_loopback(host.removeprefix("::ffff:"))
