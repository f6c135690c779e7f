"""Routes for cloud platforms: `/ping` and `/invocations` (SageMaker), and the routes that Vertex AI configures.

SageMaker: https://docs.aws.amazon.com/sagemaker/latest/dg/your-algorithms-inference-code.html
Vertex AI: https://cloud.google.com/vertex-ai/docs/predictions/custom-container-requirements
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from fastapi import APIRouter, FastAPI, Request, Response
from starlette.types import Receive, Scope, Send

from quire.engine.config.pooling import Pooling
from quire.engine.protocol.errors import ConfigError, InvalidParameter
from quire.server.http import in_process, status
from quire.server.http.errors import json_response
from quire.server.http.large_bodies import BodyRoute
from quire.server.http.state import AppState
from quire.server.text.input_processor import InputProcessor

ROUTES = (
    ("messages", "/v1/chat/completions"),
    ("prompt", "/v1/completions"),
    ("task", "/pooling"),
    ("input", "/v1/embeddings"),
    ("query", "/rerank"),
    ("text_1", "/score"),
    ("data_1", "/score"),
    ("queries", "/score"),
)
"""Maps a field of the body to its route; the first match counts. Conversations and inputs of pooling models are pooled.
"""
HEALTH_ROUTE, PREDICT_ROUTE = "AIP_HEALTH_ROUTE", "AIP_PREDICT_ROUTE"
"""Vertex AI sets these environment variables in the container."""
ADAPTER_HEADER = "X-Amzn-SageMaker-Adapter-Identifier"
"""SageMaker names an adapter here."""
MAX_INSTANCES = 1024
MAX_COPIED_BYTES = 64 * 2**20
"""Maximum size of all copies of `parameters`, of which every instance gets one."""


async def _process_forwarded(body: Any, processor: InputProcessor, stored: bytes | None) -> Any:
    """Keep only the names of the fields, which select a route."""
    return dict.fromkeys(body) if isinstance(body, dict) else body


async def _process_prediction(body: Any, processor: InputProcessor, stored: bytes | None) -> Any:
    if isinstance(body, dict) and "instances" in body:
        return {"instances": _Instances(_instances(body, processor.pooling))}
    return await _process_forwarded(body, processor, stored)


class _ForwardRoute(BodyRoute):
    keeps_body = True
    process_large = staticmethod(_process_forwarded)


class _PredictRoute(BodyRoute):
    keeps_body = True
    process_large = staticmethod(_process_prediction)


@dataclass(frozen=True)
class _Instances:
    """The routes and bodies of instances that another process has read."""

    asked: list[tuple[str, bytes]]


router = APIRouter(route_class=_ForwardRoute)


@router.get("/ping")
@router.post("/ping")
async def ping(state: AppState) -> Response:
    """Same as `/health`."""
    return await status.health(state)


@router.post("/invocations")
async def invocations(body: dict[str, Any], request: Request, state: AppState) -> Response:
    """Forward to chat (with `messages`), completions (`prompt`), embeddings or a classifier (`input`, or `messages`;
    with `task` pooling), rerank (`query`) or score (`text_1`, `data_1` or `queries`). The header
    `X-Amzn-SageMaker-Adapter-Identifier` names an adapter, in place of `model`.
    """
    route, content = _route(body, "", state.frontend.input_processor.pooling), await request.body()
    if (adapter := request.headers.get(ADAPTER_HEADER)) is not None:
        content = _with_model(content, adapter)
    return _ForwardedResponse(request, route, content)


def add_vertex(app: FastAPI) -> set[str]:
    """Add the routes set by Vertex AI's environment variables, unless they exist already.

    Returns the paths of the routes that need no API key. Raises `ConfigError` for an invalid path.
    """
    routes = {name: os.environ.get(name, "") for name in (HEALTH_ROUTE, PREDICT_ROUTE)}
    for name, path in routes.items():
        if path and (not path.startswith("/") or "{" in path):
            raise ConfigError(f"environment variable {name}={path}: expected a path such as /predict")
    health, prediction = routes.values()
    if prediction and not in_process.serves(app, "POST", prediction):
        app.router.add_api_route(prediction, predict, methods=["POST"], route_class_override=_PredictRoute)
    if not health or in_process.serves(app, "GET", health):
        return set()
    app.add_api_route(health, ping, methods=["GET"])
    return {health}


async def predict(body: dict[str, Any], request: Request, state: AppState) -> Response:
    """Vertex AI's `{"instances": […], "parameters": {…}}`; each instance is a body as for `/invocations`.

    The response is `{"predictions": […]}`, or the first error. A body without instances is handled as by
    `/invocations`.
    """
    if "instances" not in body:
        return await invocations(body, request, state)
    found = body["instances"]
    pooling = state.frontend.input_processor.pooling
    asked = found.asked if isinstance(found, _Instances) else _instances(body, pooling)
    replies = await asyncio.gather(
        *(in_process.post(request.app, *each, like=request.scope, receive=request.receive) for each in asked)
    )
    if failed := next((reply for reply in replies if reply.status != 200), None):
        return Response(bytes(failed.body), failed.status, media_type="application/json")
    return json_response({"predictions": [msgspec.Raw(reply.body) for reply in replies]})


def _with_model(content: bytes, model: str) -> bytes:
    """An object's JSON with another `model`: of a name that occurs twice, the last one counts."""
    if b"\0" in content[:4]:
        raise InvalidParameter("the body must be UTF-8", None)
    return b'%b,"model":%b}' % (content.rstrip().removesuffix(b"}"), json.dumps(model).encode())


def _instances(body: Mapping[str, Any], pooling: Pooling | None) -> list[tuple[str, bytes]]:
    """Return route and body of each instance."""
    instances = body["instances"]
    parameters = {} if body.get("parameters") is None else body["parameters"]
    if not isinstance(instances, list) or not 1 <= len(instances) <= MAX_INSTANCES:
        raise InvalidParameter(f"instances must be a list of 1 to {MAX_INSTANCES} objects", "instances")
    if not isinstance(parameters, dict):
        raise InvalidParameter("parameters must be an object", "parameters")
    if (copied := len(json.dumps(parameters)) * len(instances)) > MAX_COPIED_BYTES:
        raise InvalidParameter(
            f"parameters: {copied} bytes for {len(instances)} instances exceed the {MAX_COPIED_BYTES} "
            "allowed; send fewer instances, or put long values into the instances that need them",
            "parameters",
        )
    return [_instance(instance, parameters, f"instances[{at}]", pooling) for at, instance in enumerate(instances)]


def _instance(instance: Any, parameters: Mapping[str, Any], where: str, pooling: Pooling | None) -> tuple[str, bytes]:
    """Return route and body of an instance."""
    if not isinstance(instance, dict):
        raise InvalidParameter(f"{where} must be an object", where)
    body = {**parameters, **instance}
    if body.get("stream"):
        raise InvalidParameter(f"{where}: predictions cannot be streamed; omit `stream`", where)
    return _route(body, f"{where}: ", pooling), json.dumps(body).encode()


def _route(body: Mapping[str, Any], where: str, pooling: Pooling | None) -> str:
    for name, path in ROUTES:
        if name in body:
            if pooling is None or name not in ("input", "messages"):
                return path
            if "task" in body or pooling.is_multi_vector:
                return "/pooling"
            return "/v1/embeddings" if pooling.classes is None else "/classify"
    fields = ", ".join(f"`{name}`" for name, _ in ROUTES)
    raise InvalidParameter(f"{where}expected one of {fields}, which selects the route")


class _ForwardedResponse(Response):
    """The response of another route to this body, streamed if the route streams it."""

    def __init__(self, request: Request, path: str, body: bytes) -> None:
        super().__init__()
        self._app = request.app
        self._path = path
        self._content = body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        asked = in_process.post_scope(self._path, self._content, scope)
        await self._app(asked, in_process.body_before(self._content, receive), send)
