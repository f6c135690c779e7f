"""`/health`, `/metrics`, `/load`, `/version`, `/v1/models`."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST

from quire.engine.protocol.supervision import NamedAdapter
from quire.server.client.output_stream import EngineUnavailable
from quire.server.http.errors import json_response
from quire.server.http.roles import MetricsReader
from quire.server.http.state import AppState, ServedModel

router = APIRouter()

HEALTH_ROUTES = ("/health", "/health/live", "/health/ready")
"""For load balancers and orchestrators, which have no API key."""


@router.get("/health")
async def health(state: AppState) -> Response:
    """Check the engine: 200 if the engine loop and every rank of a replica respond, else 503 with the reason. `media`
    says why requests with images or videos wait, and fail after 15 s, while others do not.
    """
    try:
        await state.frontend.probe()
    except EngineUnavailable as error:
        return json_response({"status": "unavailable", "reason": str(error)}, 503)
    problem = state.frontend.media_problem
    return json_response({"status": "ok"} | ({} if problem is None else {"media": problem}))


@router.get("/health/live")
async def live() -> Response:
    """Check this process: 200 as long as it responds, also while the engine is loading or restarting."""
    return json_response({"status": "ok"})


@router.get("/health/ready")
async def ready(state: AppState) -> Response:
    """Check whether new requests should be sent here: 503 while the server is loading, restarting, unresponsive,
    draining or has failed, with this word as its status, and the reason.
    """
    if (problem := state.frontend.problem) is None:
        return json_response({"status": "ok"})
    status, reason = problem
    return json_response({"status": status, "reason": reason}, 503)


@router.get("/metrics", response_class=PlainTextResponse, dependencies=[MetricsReader])
async def metrics(state: AppState) -> Response:
    """Metrics in the Prometheus format."""
    return Response(state.frontend.metrics.exposition(), media_type=CONTENT_TYPE_LATEST)


@router.get("/load")
async def load(state: AppState) -> Response:
    """Number of requests in progress in this process, including waiting ones; as in vLLM."""
    return json_response({"server_load": state.frontend.client.num_open})


@router.get("/version")
async def version(request: Request) -> Response:
    """The version of Quire."""
    return json_response({"version": request.app.version})


@router.get("/v1/models")
async def models(state: AppState) -> Response:
    """The served model, under each of its names, and its adapters."""
    found = [_model(state, name) for name in state.model_names]
    found += [_adapter(state, each) for each in state.frontend.adapters.named.values()]
    return json_response({"object": "list", "data": found})


@router.get("/v1/models/{name:path}")
async def model(name: str, state: AppState) -> Response:
    """The served model or the adapter that has this name."""
    if (adapter := state.frontend.adapters.named.get(name)) is not None:
        return json_response(_adapter(state, adapter))
    if name not in state.model_names:
        raise state.not_found(name)
    return json_response(_model(state, name))


def _model(state: ServedModel, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": state.created,
        "owned_by": "quire",
        "root": state.model_names[0],
        "parent": None,
        "max_model_len": state.frontend.config.model.max_model_len,
    }


def _adapter(state: ServedModel, adapter: NamedAdapter) -> dict[str, Any]:
    """An adapter. `digest` is null until its weights have been read, for the first request."""
    return _model(state, adapter.name) | {
        "created": adapter.created,
        "root": adapter.path,
        "parent": adapter.parent or state.model_names[0],
        "digest": None if adapter.ref is None else adapter.ref.digest.hex(),
    }
