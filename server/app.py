"""The HTTP application: endpoints, middleware, error handlers."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from quire.engine.process.version import version
from quire.server.anthropic import errors as anthropic_errors
from quire.server.anthropic import messages
from quire.server.config.server_options import ServerOptions, names
from quire.server.http import errors, sagemaker_vertex, status
from quire.server.http.access import AccessMiddleware, Recorder
from quire.server.http.api_keys import ApiKeys
from quire.server.http.large_bodies import BodyRoute
from quire.server.http.middleware import (
    MIB,
    ApiKeyMiddleware,
    FairShareMiddleware,
    LimitsMiddleware,
    RootPathMiddleware,
)
from quire.server.http.page import routes as page
from quire.server.http.response import DIRECT_SEND
from quire.server.http.state import ServedModel
from quire.server.media.uploads import Uploads
from quire.server.openai import (
    adapters,
    chat,
    completions,
    embeddings,
    files,
    kv_events,
    log_level,
    pooling,
    prefix_cache,
    profile,
    replicas,
    responses,
    scores,
    tokenize,
)

if TYPE_CHECKING:
    from quire.server.http.tracing import Tracing


def create_app(state: ServedModel, options: ServerOptions | None = None, tracing: Tracing | None = None) -> FastAPI:
    """Create the application for one model, with the middleware that `options` and `tracing` require. Without options
    there is none, for calls from inside the process only. Raises `ConfigError` for API keys that cannot be read.
    """
    app = _App(title="Quire", version=version())
    app.state.quire = state
    families = (
        *(chat, completions, embeddings, pooling, scores, messages, responses),
        *(files, tokenize, adapters, replicas, prefix_cache, kv_events, profile, log_level, sagemaker_vertex, status),
    )
    routers = [each.router for each in families]
    for router in routers:
        app.router.routes += router.routes  # `include_router` would build each one again for each application
    state.routes = [route for route in app.routes if isinstance(route, BodyRoute)]
    errors.install(app)
    if options is not None:
        state.drain_seconds = options.drain_seconds()
        state.has_request_times = options.enable_per_request_metrics
        state.forces_usage = options.enable_force_include_usage
        state.names_tokens_by_id = options.return_tokens_as_token_ids
        state.has_public_metrics = options.public_metrics
        if options.file_storage_path is not None:
            state.uploads = Uploads(options.file_storage_path, int(options.file_storage_gb * 2**30))
        if options.torch_profiler_dir is not None:
            state.torch_profiler_dir = os.path.abspath(options.torch_profiler_dir)
        open_paths = {*status.HEALTH_ROUTES, "/ping", *sagemaker_vertex.add_vertex(app)}
        if options.ui:
            open_paths |= page.add_page(app)
        if options.public_metrics:
            open_paths.add("/metrics")
        state.keys = _add_front(app, options, open_paths, None if tracing is None else (tracing, app.routes))
        if state.keys is not None and state.keys.file is not None:
            state.watched_files.append(state.keys.file)
        recorder = Recorder(state.frontend.metrics.http, options)
        app.front = partial(AccessMiddleware, recorder=recorder, routes=app.routes, root_path=options.root_path)
    return app


class _App(FastAPI):
    """Answers HEAD like GET, and passes on the server's own `send`, for streaming after the response has started (see
    `response.DIRECT_SEND`).

    Its OpenAPI document has the actual error responses instead of FastAPI's own (422).
    """

    front: Callable[[ASGIApp], ASGIApp] | None = None
    """The middleware in front of all others, and of the handling of errors."""

    def build_middleware_stack(self) -> ASGIApp:
        stack = super().build_middleware_stack()
        return stack if self.front is None else self.front(stack)

    def openapi(self) -> dict[str, Any]:
        document = super().openapi()
        schemas = document["components"]["schemas"]
        for name in ("HTTPValidationError", "ValidationError"):
            schemas.pop(name, None)
        schemas |= {"Error": errors.SCHEMA, "MessagesError": anthropic_errors.ERROR_SCHEMA}
        for path, operations in document["paths"].items():
            name = "MessagesError" if anthropic_errors.ROUTE in path else "Error"
            content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{name}"}}}
            for operation in operations.values():
                if operation["responses"].pop("422", None):
                    operation["responses"] |= {
                        "400": {"description": "Invalid request", "content": content},
                        "default": {"description": "Other errors", "content": content},
                    }
        return document

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[DIRECT_SEND] = send
        if scope.get("method") == "HEAD":  # the HTTP server omits the body
            scope = {**scope, "method": "GET"}
        await super().__call__(scope, receive, anthropic_errors.errors_in_shape(scope, send))


def _add_front(
    app: FastAPI, options: ServerOptions, open_paths: set[str], traced: tuple[Tracing, list[BaseRoute]] | None
) -> ApiKeys | None:
    """Add the middleware. The last one added is the outermost. Traces name requests by the routes in `traced`. Returns
    the keys.
    """
    app.add_middleware(LimitsMiddleware, max_body=int(options.max_body_mib * MIB), timeout=options.request_timeout)
    keys = ApiKeys.load(options)
    if options.fair_share != "off":
        app.add_middleware(FairShareMiddleware, by=options.fair_share, weights=options.share_weights)
    if keys is not None:
        open_paths = open_paths | {options.root_path + path for path in open_paths}
        metrics_paths = {root + path for root in ("", options.root_path) for path in ("/metrics", *page.NUMBERS)}
        app.add_middleware(ApiKeyMiddleware, keys=keys, open_paths=frozenset(open_paths), metrics_paths=metrics_paths)
    if options.allowed_origins is not None:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=names(options.allowed_origins),
            allow_methods=names(options.allowed_methods),
            allow_headers=names(options.allowed_headers),
            allow_credentials=options.allow_credentials,
            expose_headers=["X-Request-Id", "Retry-After", "X-Quire-Warning"],
        )
    if traced is not None:
        from quire.server.http.tracing import TracingMiddleware  # imports OpenTelemetry

        app.add_middleware(TracingMiddleware, tracing=traced[0], routes=traced[1])
    if options.root_path:
        app.add_middleware(RootPathMiddleware, path=options.root_path)
    return keys
