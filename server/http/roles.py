"""What a request may do: dependencies of the routes that not every key opens.

They run behind the router, which alone decides which route a path is.
"""

from __future__ import annotations

from urllib.parse import urlsplit

from fastapi import Depends, Request

from quire.engine.cluster.network import is_loopback
from quire.server.http.api_keys import Key
from quire.server.http.errors import ApiError
from quire.server.http.state import AppState, ServedModel

SCOPE_KEY = "quire.key"
"""Key in an ASGI scope: the `Key` of the request, or None."""
_FOREIGN = frozenset(("forwarded", "via", "x-forwarded-for", "x-forwarded-host", "x-real-ip"))
"""Headers of proxies."""


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


async def _admin_or_local(request: Request, state: AppState) -> None:
    await _admin(request, state)
    if not may_administrate(request, state):
        raise ApiError(
            403,
            "without keys this can be done only from the server's own host, as localhost, not by other web pages and "
            "not through a proxy: start the server with --admin-key or QUIRE_ADMIN_KEY",
            "admin_key_required",
        )


AdminOnly = Depends(_admin)
"""Dependency of routes that need an admin key. If the server has no keys at all, the routes decide themselves."""
AdminOrLocal = Depends(_admin_or_local)
"""Dependency of routes that need an admin key. On a server without keys, clients must be on its host, and no web pages
of others."""
MetricsReader = Depends(_metrics)
"""Dependency of `/metrics`, which needs a metrics key if there are any."""


def may_administrate(request: Request, state: ServedModel) -> bool:
    """Return whether the client of a request may do what routes with `AdminOrLocal` do."""
    key: Key | None = request.scope.get(SCOPE_KEY)
    return is_local(request) if state.keys is None else key is not None and key.role == "admin"


def is_local(request: Request) -> bool:
    """Return whether a program on this host has sent it, to a loopback address: no web page but this server's own. A
    proxy that neither names itself or its client nor passes the `Host` on cannot be told from one.
    """
    if not _FOREIGN.isdisjoint(request.headers):
        return False
    origin = request.headers.get("origin")  # browsers add it to all methods that change something
    if origin is not None and origin.partition("://")[2] != request.headers.get("host"):
        return False
    client = None if request.client is None else request.client.host  # a Unix socket has none
    try:
        return all(map(_is_loopback, filter(None, (urlsplit(f"//{request.headers.get('host', '')}").hostname, client))))
    except ValueError:  # a malformed host
        return False


def _is_loopback(host: str) -> bool:
    return is_loopback(host.removeprefix("::ffff:"))
