"""`/` and `/ui`: a page that shows the engine at work, and a chat. `/ui/state`: the numbers that it shows.

The page needs nothing from outside. With API keys, its files are open, and it asks for a key: the numbers need one.
"""

from __future__ import annotations

import time
from dataclasses import asdict
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from fastapi import APIRouter, FastAPI, Request, Response

from quire.engine.process import log
from quire.engine.protocol.stats import RankStats
from quire.server.client.metrics import HISTOGRAMS
from quire.server.client.replica import ReplicaInfo
from quire.server.http import in_process
from quire.server.http.errors import ApiError, json_response
from quire.server.http.state import AppState, ServedModel

router = APIRouter(include_in_schema=False)

_DRAWN = ("time_to_first_token_seconds", "inter_token_latency_seconds")
"""The drawn ones of `HISTOGRAMS`."""
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
}
_POLICY = (
    "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; img-src data:; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
)
"""Lets a browser run the page's own files, and ask this server; no more."""


def add_page(app: FastAPI) -> set[str]:
    """Add the page, at `/` only if that is free. Returns its paths, which need no API key; "" redirects to `/`."""
    app.include_router(router)
    paths = {"/ui", *(f"/ui/files/{name}" for name in _files())}
    if in_process.serves(app, "GET", "/"):
        return paths
    app.add_api_route("/", page, include_in_schema=False)
    return {"", "/", *paths}


@router.get("/ui")
async def page(request: Request) -> Response:
    """The page, which contains no numbers, and asks for an API key if it needs one."""
    return await file("index.html", request)


@router.get("/ui/files/{name:path}")
async def file(name: str, request: Request) -> Response:
    """A file of the page. A browser asks each time, and gets it only if it has changed."""
    if (found := _files().get(name)) is None:
        raise ApiError(404, f"the page has no file {name!r}", "not_found")
    headers = {"Content-Security-Policy": _POLICY, "Cache-Control": "no-cache", "ETag": found.tag}
    if found.tag in request.headers.get("If-None-Match", ""):
        return Response(status_code=304, headers=headers)
    return Response(found.content, media_type=found.media_type, headers=headers)


@router.get("/ui/state")
async def numbers(state: AppState, request: Request) -> Response:
    """The data that the page draws: counters since the start, gauges, the plan, and the last warnings."""
    frontend = state.frontend
    parallel, model = frontend.config.parallel, frontend.config.model
    warnings = sorted(log.RECENT.records.copy(), key=lambda each: each.time)
    return json_response(
        {
            "model": state.model_names[0],
            "version": request.app.version,
            "time": time.time(),
            "monotonic": time.monotonic(),
            "created": state.created,
            "status": "draining" if frontend.is_draining else "ready" if frontend.problem is None else "unavailable",
            "max_model_len": model.max_model_len,
            "generates": model.pooling is None,
            "tensor_parallel_size": parallel.tensor_parallel_size,
            "stages": [[layers.start, layers.stop - 1] for layers in parallel.stages],
            "replicas": [_replica(state, each) for each in frontend.client.replicas],
            "bounds": {name: HISTOGRAMS[name][1] for name in _DRAWN},
            "plan": state.plan,
            "warnings": [msgspec.structs.asdict(each) for each in warnings[-20:]],
        }
    )


class _File(NamedTuple):
    content: bytes
    media_type: str
    tag: str


@cache
def _files() -> dict[str, _File]:
    """The files of the page, by their names."""
    folder, found = Path(__file__).with_name("files"), {}
    for path in folder.rglob("*.*"):
        if (media_type := _TYPES.get(path.suffix)) is not None:
            content = path.read_bytes()
            tag = f'"{sha256(content).hexdigest()[:16]}"'
            found[path.relative_to(folder).as_posix()] = _File(content, media_type, tag)
    return found


def _replica(state: ServedModel, replica: ReplicaInfo) -> dict[str, Any]:
    metrics = state.frontend.metrics
    stats = msgspec.structs.asdict(metrics.of(replica.index))
    del stats["iteration_tokens"], stats["accepted_per_position"]
    histograms = {name: metrics.histogram(replica.index, name) for name in _DRAWN}
    ranks = [_rank(each) for each in metrics.rank_stats.get(replica.index, [])]
    return {**asdict(replica), **stats, "histograms": histograms, "ranks": ranks}


def _rank(stats: RankStats) -> dict[str, Any]:
    gpu = stats.usage.gpu if stats.usage else None
    return {
        "busy": stats.busy,
        "waited": stats.waited,
        "steps": stats.steps,
        "is_straggler": stats.is_straggler,
        "gpu_utilization": gpu.utilization if gpu else None,
    }
