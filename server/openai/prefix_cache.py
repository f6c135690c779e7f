"""`/reset_prefix_cache`, vLLM's route."""

from __future__ import annotations

from fastapi import APIRouter, Response

from quire.server.http.errors import json_response
from quire.server.http.roles import AdminOrLocal
from quire.server.http.state import AppState

router = APIRouter()


@router.post("/reset_prefix_cache", dependencies=[AdminOrLocal])
async def reset_prefix_cache(
    state: AppState, reset_running_requests: bool = False, reset_external: bool = False
) -> Response:
    """Empty the prefix caches of all replicas for later requests, and with `reset_external=true` also the [KV
    stores](../guides/kv-tiers.md) of their hosts, in memory and on disk. Running requests continue and do not prevent
    it: `reset_running_requests` has no effect.

    Needs an admin key. On a server without keys, clients must be on its host, and no other web pages. If something
    could not be emptied, `success` is false and `error` says why.
    """
    error = await state.frontend.reset_prefix_cache(resets_stores=reset_external)
    return json_response({"success": not error} | ({"error": error} if error else {}))
