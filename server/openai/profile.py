"""`/start_profile`, `/stop_profile`: traces of all ranks, with vLLM's routes."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from typing import IO, Annotated, ClassVar

from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import StreamingResponse
from pydantic import Field

from quire.server.client.profiler import MAX_PROFILE_SECONDS, ProfileConflict, trace_name
from quire.server.http.errors import ApiError, json_response
from quire.server.http.large_bodies import check_type
from quire.server.http.request_model import ExtraField, RequestModel, hint
from quire.server.http.roles import AdminOnly, is_local
from quire.server.http.state import AppState, ServedModel

_CHUNK_BYTES = 1 << 18

router = APIRouter()


class StartProfileRequest(RequestModel):
    """The contents of the recording; everything has a default."""

    seconds: Annotated[float, Field(gt=0, le=MAX_PROFILE_SECONDS)] = MAX_PROFILE_SECONDS
    """The recording ends after this time, even if it is not stopped. The trace is kept until `/stop_profile`."""
    with_stack: bool = False
    """Record Python calls, too, which makes steps much slower."""
    record_shapes: bool = False
    """Record the shapes of the operations' inputs, too."""
    profile_memory: bool = False
    """Record the memory that operations allocate and free, too."""
    unknown_fields: ClassVar[ExtraField] = hint()
    """Older releases of `vllm bench serve --profile` send their test request."""


@router.post("/start_profile", dependencies=[AdminOnly, Depends(check_type)])
async def start_profile(state: AppState, request: Request, body: StartProfileRequest | None = None) -> Response:
    """Start recording the operations of all ranks, while they serve, with torch's profiler. The body may be empty.

    Needs an admin key. A server without keys needs `--torch-profiler-dir`; then clients must be on its host, and no
    other web pages.
    """
    _check(state, request)
    body = body or StartProfileRequest()
    state.frontend.input_processor.ignore(body.check_fields())
    try:
        await state.frontend.profiler.start(
            body.seconds,
            with_stack=body.with_stack,
            record_shapes=body.record_shapes,
            profile_memory=body.profile_memory,
        )
    except ProfileConflict as conflict:
        raise ApiError(409, str(conflict), "profile_conflict") from None
    return json_response({"seconds": body.seconds})


@router.post("/stop_profile", response_class=Response, dependencies=[AdminOnly])
async def stop_profile(state: AppState, request: Request) -> Response:
    """Stop recording. Responds with the trace of all ranks, in the format of Chrome and Perfetto, as `.json.gz`.

    With `--torch-profiler-dir` the trace is written there instead, and the response is JSON with its `path`.
    """
    _check(state, request)
    folder = state.torch_profiler_dir
    try:
        if folder is not None:
            path, report = await state.frontend.profiler.save(folder)
            return json_response({"path": path, "events": report.num_events, "cut_off": report.is_cut})
        with contextlib.ExitStack() as opened:
            file: IO[bytes] = opened.enter_context(tempfile.TemporaryFile())  # nameless: nothing is left behind
            await state.frontend.profiler.stop(file)
            file.flush()
            opened.pop_all()
    except ProfileConflict as conflict:
        raise ApiError(409, str(conflict), "profile_conflict") from None
    except OSError as error:
        text = f"the trace cannot be written to {folder or tempfile.gettempdir()}: {error.strerror}"
        raise ApiError(500, text, "profile_not_written") from None
    headers = {"Content-Disposition": f'attachment; filename="{trace_name()}"', "Content-Length": str(file.tell())}
    file.seek(0)
    return StreamingResponse(_chunks(file), media_type="application/gzip", headers=headers)


def _chunks(file: IO[bytes]) -> Iterator[bytes]:
    with file:
        while chunk := file.read(_CHUNK_BYTES):
            yield chunk


def _check(state: ServedModel, request: Request) -> None:
    """Raise `ApiError` if the server has no keys, and may not be profiled without."""
    if state.keys is not None:
        return
    if state.torch_profiler_dir is None:
        raise ApiError(
            403,
            "the server can be profiled only with an admin key, or if it has a folder for traces: start it with "
            "--admin-key, QUIRE_ADMIN_KEY or --torch-profiler-dir",
            "admin_key_required",
        )
    if not is_local(request):
        raise ApiError(
            403,
            "without keys the server can be profiled only from its own host, as localhost, not by other web pages "
            "and not through a proxy: start it with --admin-key or QUIRE_ADMIN_KEY",
            "admin_key_required",
        )
