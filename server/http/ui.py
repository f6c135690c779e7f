"""`/` and `/ui`: a page that shows the engine at work. `/ui/state`: the numbers that it draws.

The page polls the numbers once a second while it is visible, and computes rates from their differences. It needs
nothing from outside. With API keys, the page itself is open, and asks for a key: the numbers need one.
"""

from __future__ import annotations

import re
import time
from base64 import b64encode
from dataclasses import asdict
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec
from fastapi import APIRouter, FastAPI, Request, Response

from quire.engine.process import log
from quire.engine.protocol.stats import RankStats
from quire.server.client.metrics import HISTOGRAMS
from quire.server.client.replica import ReplicaInfo
from quire.server.http import in_process
from quire.server.http.errors import json_response
from quire.server.http.state import AppState, ServedModel

router = APIRouter(include_in_schema=False)

_DRAWN = ("time_to_first_token_seconds", "inter_token_latency_seconds")
"""The drawn ones of `HISTOGRAMS`."""


def add_page(app: FastAPI) -> set[str]:
    """Add the page, at `/` only if that is free. Returns its paths, which need no API key; "" redirects to `/`."""
    app.include_router(router)
    if in_process.serves(app, "GET", "/"):
        return {"/ui"}
    app.add_api_route("/", page, include_in_schema=False)
    return {"", "/", "/ui"}


@router.get("/ui")
async def page() -> Response:
    """The page, which contains no numbers, and asks for an API key if it needs one."""
    content, policy = _page()
    headers = {"Content-Security-Policy": policy, "Cache-Control": "no-cache"}
    return Response(content, media_type="text/html; charset=utf-8", headers=headers)


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
            "status": "draining" if frontend.is_draining else "ready" if frontend.is_ready else "unavailable",
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


@cache
def _page() -> tuple[bytes, str]:
    """The page, and the policy that lets a browser run its script, use its style, and ask this server; no more."""
    text = Path(__file__).with_name("ui.html").read_text("utf-8")
    own = {
        tag: " ".join(
            f"'sha256-{b64encode(sha256(each.encode()).digest()).decode()}'"
            for each in re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        )
        for tag in ("style", "script")
    }
    policy = (
        f"default-src 'none'; style-src {own['style']}; script-src {own['script']}; connect-src 'self'; img-src data:; "
        "frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
    )
    return text.encode(), policy


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
