"""`/kv_event_sources` and `/kv_events/snapshot`: for routers that follow the KV events of the replicas."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Annotated

from fastapi import APIRouter, Query, Response
from fastapi.responses import StreamingResponse

from quire.engine.protocol.kv_events import KVEventsState
from quire.server.http.errors import ApiError, encode_json, json_response
from quire.server.http.large_bodies import BodyRoute
from quire.server.http.roles import AdminOrLocal
from quire.server.http.state import AppState

router = APIRouter(route_class=BodyRoute)


@router.get("/kv_event_sources", dependencies=[AdminOrLocal])
async def kv_event_sources(state: AppState) -> Response:
    """Where the replicas publish their KV events (`--kv-events-config`): for each data-parallel rank that is up, an
    object with the fields of vLLM's `KVEventsConfig`. Its endpoints are those of the rank, with addresses that other
    hosts can reach.

    Needs an admin key. On a server without keys, clients must be on its host, and no other web pages.
    """
    found = await state.frontend.client.calls.kv_events()
    return json_response({str(each.replica): each.source for each, _ in found if each.source is not None})


@router.get("/kv_events/snapshot", dependencies=[AdminOrLocal])
async def kv_events_snapshot(
    state: AppState, data_parallel_rank: Annotated[int | None, Query(ge=0)] = None
) -> Response:
    """The KV blocks that replicas have, for a router that starts late.

    For each data-parallel rank that is up, or only `data_parallel_rank`: `events` has `BlockStored` events of all
    blocks, parents before their children. They describe the state after the batch with number `sequence`, since the
    start of the rank that `incarnation` identifies. A router subscribes first, then requests this, and applies the
    batches with higher numbers.

    Needs an admin key. On a server without keys, clients must be on its host, and no other web pages.
    """
    found = await state.frontend.client.calls.kv_events(data_parallel_rank, has_blocks=True)
    if any(each.source is None for each, _ in found):
        text = "the server publishes no KV events: start it with --kv-events-config"
        raise ApiError(400, text, "kv_events_disabled")
    return StreamingResponse(_snapshots(found), media_type="application/json")


async def _snapshots(found: Sequence[tuple[KVEventsState, list[bytes]]]) -> AsyncIterator[bytes]:
    """The body in parts: it may have hundreds of megabytes."""
    start = b'{"snapshots":['
    for state, parts in found:
        known = {
            "data_parallel_rank": state.replica,
            "incarnation": state.incarnation,
            "sequence": state.sequence,
        }
        yield start + encode_json(known)[:-1] + b',"events":['
        for at, part in enumerate(parts):
            yield b"," * bool(at) + part
        start = b"]},"
    yield b"]}]}" if found else start + b"]}"
