"""`/replicas`: the replicas of the engine, and their number."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

from fastapi import APIRouter, Response
from pydantic import Field

from quire.engine.config.parallel_config import MAX_REPLICAS
from quire.server.http.errors import ApiError, json_response
from quire.server.http.large_bodies import BodyRoute
from quire.server.http.request_body import Admit, RequestBody
from quire.server.http.roles import AdminOnly
from quire.server.http.state import AppState, ServedModel

MAX_DRAIN_SECONDS = 86_400

router = APIRouter(route_class=BodyRoute)


class ResizeRequest(RequestBody):
    """The number of replicas."""

    data_parallel_size: Annotated[int, Field(ge=1, le=MAX_REPLICAS)]
    """Total number of replicas, including other hosts'."""
    drain_timeout_seconds: Annotated[float, Field(ge=0, le=MAX_DRAIN_SECONDS)] | None = None
    """Time for requests on a replica that is removed to end there; then they go on elsewhere. Default:
    `--shutdown-timeout`, or 30.
    """

    async def process_here(self, admit: Admit) -> None:
        """Do nothing: it is small."""


@router.get("/replicas")
async def replicas(state: AppState) -> Response:
    """The replicas of the engine: number, host, state (`loading`, `up`, `unresponsive`, `draining`, `restarting`,
    `dead`), requests, and the last death."""
    return _response(state)


@router.post("/replicas", status_code=202, dependencies=[AdminOnly])
async def resize(body: ResizeRequest, state: AppState) -> Response:
    """Start replicas on this host, or drain and stop some of them. Responds at once; `GET /replicas` shows the
    progress.

    Needs an admin key.
    """
    if state.keys is None:
        raise ApiError(
            403,
            "the number of replicas can be changed only on a server with an admin key: start it with --admin-key or "
            "QUIRE_ADMIN_KEY",
            "admin_key_required",
        )
    body.check_fields()
    seconds = state.drain_seconds if body.drain_timeout_seconds is None else body.drain_timeout_seconds
    await state.frontend.resize(body.data_parallel_size, seconds)
    return _response(state, 202)


def _response(state: ServedModel, status: int = 200) -> Response:
    found = state.frontend.client.replicas
    size = sum(replica.state != "draining" for replica in found)
    return json_response({"data_parallel_size": size, "replicas": list(map(asdict, found))}, status)
