"""`/replicas`: the replicas of the engine, their number and their roles."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

from fastapi import APIRouter, Response
from pydantic import Field

from quire.engine.config.parallel_config import MAX_REPLICAS
from quire.engine.protocol.errors import ConfigError, InvalidParameter
from quire.engine.protocol.supervision import Resize
from quire.server.http.errors import ApiError, json_response
from quire.server.http.large_bodies import BodyRoute
from quire.server.http.request_body import Admit, RequestBody
from quire.server.http.roles import AdminOnly
from quire.server.http.state import AppState, ServedModel

MAX_DRAIN_SECONDS = 86_400
_NUMBERS = ("data_parallel_size", "prefill_replicas", "decode_replicas")

router = APIRouter(route_class=BodyRoute)


class ResizeRequest(RequestBody):
    """The number of replicas, or how many of them have each role. What is omitted stays as it is, or follows from the
    others."""

    data_parallel_size: Annotated[int, Field(ge=1, le=MAX_REPLICAS)] | None = None
    """Total number of replicas, including other hosts'."""
    prefill_replicas: Annotated[int, Field(ge=0, le=MAX_REPLICAS)] | None = None
    """Those for prompts; 0: no replica has a role."""
    decode_replicas: Annotated[int, Field(ge=1, le=MAX_REPLICAS)] | None = None
    """Those for decodes."""
    drain_timeout_seconds: Annotated[float, Field(ge=0, le=MAX_DRAIN_SECONDS)] | None = None
    """Time for requests on a replica that is removed to end there; then they go on elsewhere. Default:
    `--shutdown-timeout`, or 30.
    """

    async def process_here(self, admit: Admit) -> None:
        """Do nothing: it is small."""


@router.get("/replicas")
async def replicas(state: AppState) -> Response:
    """The replicas of the engine: number, host, role (`any`, `prefill`, `decode`), state (`loading`, `up`,
    `unresponsive`, `draining`, `restarting`, `dead`), requests, the last death, and the layout."""
    return _response(state)


@router.post("/replicas", status_code=202, dependencies=[AdminOnly])
async def resize(body: ResizeRequest, state: AppState) -> Response:
    """Start replicas on this host, or drain and stop some of them; or give replicas other roles, which restarts
    nothing. Responds at once; `GET /replicas` shows the progress.

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
    given = [name for name in _NUMBERS if getattr(body, name) is not None]
    if not given:
        text = "give data_parallel_size, or prefill_replicas and decode_replicas, or all of them"
        raise InvalidParameter(text, "data_parallel_size")
    seconds = state.drain_seconds if body.drain_timeout_seconds is None else body.drain_timeout_seconds
    asked = Resize(body.data_parallel_size, seconds, body.prefill_replicas, body.decode_replicas)
    try:
        await state.frontend.resize(asked)
    except ConfigError as error:
        raise InvalidParameter(str(error), given[0]) from None
    return _response(state, 202)


def _response(state: ServedModel, status: int = 200) -> Response:
    found = state.frontend.client.replicas
    size = sum(replica.state != "draining" for replica in found)
    return json_response({"data_parallel_size": size, "replicas": list(map(asdict, found))}, status)
