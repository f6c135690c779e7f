"""`/log_level`: the lowest level of log messages to show, while the server runs."""

from __future__ import annotations

from fastapi import APIRouter, Response

from quire.engine.protocol.supervision import LogLevel
from quire.server.http.errors import json_response
from quire.server.http.large_bodies import BodyRoute
from quire.server.http.request_body import Admit, RequestBody
from quire.server.http.roles import AdminOrLocal
from quire.server.http.state import AppState

router = APIRouter(route_class=BodyRoute)


class LogLevelRequest(RequestBody):
    """The level of the logs."""

    level: LogLevel
    """The lowest level of messages to show."""

    async def process_here(self, admit: Admit) -> None:
        """Do nothing: it is small."""


@router.post("/log_level", dependencies=[AdminOrLocal])
async def set_log_level(body: LogLevelRequest, state: AppState) -> Response:
    """Set the lowest level of log messages to show, in all processes of the server: API processes, engine cores, ranks
    and their parents, on all hosts except those with an API of their own.

    It also applies to processes that are started later. Needs an admin key. On a server without keys, clients must be
    on its host, and no other web pages.
    """
    body.check_fields()
    state.frontend.set_log_level(body.level)
    return json_response({"level": body.level})
