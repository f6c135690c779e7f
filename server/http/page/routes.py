"""`/` and `/ui`: a page that shows the engine at work, and a chat. `/ui/state`, `/ui/history`: what it shows.

The page needs nothing from outside. With API keys, its files are open, and it asks for a key: the numbers need one.
"""

from __future__ import annotations

import asyncio
import gzip
import logging
import time
from dataclasses import asdict
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

import msgspec
from fastapi import APIRouter, FastAPI, Request, Response

from quire.engine.process import log
from quire.engine.protocol.errors import InvalidParameter
from quire.engine.protocol.stats import RankStats
from quire.server.client.history import INTERVAL, History, RankActivity
from quire.server.client.output_stream import EngineUnavailable
from quire.server.client.replica import ReplicaInfo
from quire.server.http import in_process
from quire.server.http.api_keys import Key
from quire.server.http.errors import ApiError, encode_json, json_response
from quire.server.http.roles import SCOPE_KEY, AdminOrLocal, may_administrate
from quire.server.http.state import AppState, ServedModel
from quire.server.serving.frontend import Frontend
from quire.server.serving.open_requests import abort_request, list_requests

logger = logging.getLogger(__name__)
router = APIRouter(include_in_schema=False)

NUMBERS = ("/ui/state", "/ui/history")
"""Paths that metrics keys may read, too. They contain no text of requests."""
_STORE = ("memory_bytes", "memory_capacity", "disk_bytes", "disk_capacity", "disk_error")
_STATS = ("kv_blocks", "kv_blocks_used", "prefilling", "generated_tokens")
_GPU = ("utilization", "memory_used", "memory_total", "power")
_MAX_TIME = 1e12
_LONG = 16_384
"""Bytes of a history above which it is compressed, with `_LEVEL`."""
_LEVEL = 1
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
_NO_SNIFF = {"X-Content-Type-Options": "nosniff"}
"""Keeps a browser from taking data, which may contain texts of clients, for anything else."""


def add_page(app: FastAPI) -> set[str]:
    """Add the page, at `/` only if that is free. Returns its paths, which need no API key; "" redirects to `/`."""
    app.router.routes += router.routes
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
    headers = _NO_SNIFF | {"Content-Security-Policy": _POLICY, "Cache-Control": "no-cache", "ETag": found.tag}
    if found.tag in request.headers.get("If-None-Match", ""):
        return Response(status_code=304, headers=headers)
    return Response(found.content, media_type=found.media_type, headers=headers)


@router.get("/ui/state")
async def numbers(state: AppState, request: Request) -> Response:
    """The present state of the server: gauges, rates of the last seconds, the plan, and the last warnings."""
    frontend = state.frontend
    model = frontend.config.model
    status, reason = frontend.problem or ("ready", None)
    key: Key | None = request.scope.get(SCOPE_KEY)
    warnings = sorted(log.RECENT.records.copy(), key=lambda each: each.time)
    return json_response(
        {
            "model": state.model_names[0],
            "version": request.app.version,
            "time": time.time(),
            "created": state.created,
            "status": status,
            "reason": reason,
            "media": {"kinds": _kinds(frontend), "problem": frontend.media_problem},
            "max_model_len": model.max_model_len,
            "generates": model.pooling is None,
            "capabilities": _capabilities(frontend),
            "adapters": _adapters(frontend),
            "role": None if key is None else key.role,
            "can_abort": may_administrate(request, state),
            "has_admin_key": state.keys is not None and "admin" in state.keys.roles,
            "replicas": [_replica(state, each) for each in frontend.client.replicas],
            "kv_stores": [
                {"host": host, "is_up": is_up, **{name: getattr(stats, name) for name in _STORE}}
                for host, (stats, is_up) in frontend.metrics.stores_by_host().items()
            ],
            "plan": state.plan,
            "warnings": [msgspec.structs.asdict(each) for each in warnings[-20:]],
        },
        headers=_NO_SNIFF,
    )


@router.get("/ui/history")
async def history(state: AppState, request: Request, after: float = 0.0) -> Response:
    """The last hour, or what of it follows a time: a row every two seconds. Values that are unknown are null."""
    if not 0 <= after < _MAX_TIME:
        raise InvalidParameter("after: expected a time in seconds since 1970", "after")
    may_zip = "gzip" in request.headers.get("Accept-Encoding", "")
    return await asyncio.to_thread(
        _history, state.frontend.history, after, may_zip
    )  # an hour takes tens of milliseconds


@router.get("/ui/requests")
async def requests(state: AppState, request: Request) -> Response:
    """The oldest unfinished requests of all API processes, and the number of all of them. An API key sees its own, and
    a client without a key that may not abort them only the number: the id of a response is enough to read it.
    """
    key: Key | None = request.scope.get(SCOPE_KEY)
    own = None if key is None or key.role == "admin" else key.name
    found, total, silent = await list_requests(state.frontend.client, own)
    if own is None and not may_administrate(request, state):
        found = []
    body = {"requests": [asdict(each) for each in found], "total": total, "silent": silent}
    return json_response(body, headers=_NO_SNIFF)


@router.delete("/ui/requests/{handle}", dependencies=[AdminOrLocal], status_code=204)
async def abort(handle: str, state: AppState, request: Request) -> None:
    """Abort the request with this handle, with all of its sequences, whichever API process it belongs to."""
    if (found := await abort_request(state.frontend.client, handle)) is None:
        raise ApiError(404, f"there is no unfinished request with the handle {handle!r}", "request_not_found")
    name, owner = found
    key: Key | None = request.scope.get(SCOPE_KEY)
    of, by = f" of the key {owner}" if owner else "", "a local client" if key is None else f"the key {key.name}"
    logger.info("request %s%s was aborted by %s", name, of, by)


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


def _history(history: History, after: float, may_zip: bool) -> Response:
    now = time.time()
    content = encode_json({"interval": INTERVAL, "time": now, "columns": history.after(after, now)})
    headers = _NO_SNIFF | {"Vary": "Accept-Encoding"}
    if may_zip and len(content) > _LONG:
        content, headers["Content-Encoding"] = gzip.compress(content, _LEVEL), "gzip"
    return Response(content, headers=headers, media_type="application/json")


def _capabilities(frontend: Frontend) -> dict[str, bool]:
    try:
        processor = frontend.input_processor
    except EngineUnavailable:  # the templates tell
        return {"tools": False, "reasoning": False}
    return {"tools": processor.tool_format is not None, "reasoning": processor.reasoning_format is not None}


def _adapters(frontend: Frontend) -> int | None:
    """A number that changes with the adapters; it is the same in all API processes. None: there are none."""
    named = sorted(frontend.adapters.named.values(), key=lambda each: each.name)
    known = [(each.name, each.ref and each.ref.digest) for each in named]
    return crc32(repr(known).encode()) if known else None


def _kinds(frontend: Frontend) -> list[str]:
    """The kinds of media that requests may have."""
    media = frontend.config.media
    return [] if media is None else [kind for kind, count in media.max_items.items() if count]


def _replica(state: ServedModel, replica: ReplicaInfo) -> dict[str, Any]:
    metrics = state.frontend.metrics
    stats = metrics.of(replica.index)
    activity = state.frontend.history.activity(replica.index)
    known = metrics.rank_stats.get(replica.index, [])
    done = activity.ranks if len(activity.ranks) == len(known) else [RankActivity()] * len(known)
    ranks = [_rank(*each) for each in zip(known, done, strict=True)]
    return {
        **asdict(replica),
        **{name: getattr(stats, name) for name in _STATS},
        **activity._asdict(),
        "ranks": ranks,
    }


def _rank(stats: RankStats, activity: RankActivity) -> dict[str, Any]:
    usage = stats.usage
    gpu = None if usage is None else usage.gpu
    return {
        "is_straggler": stats.is_straggler,
        "resident_bytes": None if usage is None else usage.resident_bytes,
        **activity._asdict(),
        "gpu": None if gpu is None else {name: getattr(gpu, name) for name in _GPU},
    }
