"""`/v1/files`: files that later requests name by their ids (https://platform.openai.com/docs/api-reference/files)."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import FileResponse

from quire.engine.protocol.errors import InvalidParameter
from quire.server.client.request_record import current_key
from quire.server.http.errors import ApiError, json_response
from quire.server.http.file_parts import type_of_name
from quire.server.http.forms import form_boundary, form_parts
from quire.server.http.request_model import only_one
from quire.server.http.state import AppState, ServedModel
from quire.server.media.uploads import ArrivingFile, Upload, UploadNotFound, Uploads, UploadsStalled

router = APIRouter()
PURPOSES = ("user_data", "vision", "assistants")
_MAX_PURPOSE_BYTES = 1024
MAX_UPLOADS, MAX_UPLOADS_OF_KEY = 32, 8
"""Files that an API process receives at the same time, of all keys and of one."""
UPLOAD_SECONDS = 600.0
"""Time for a file to arrive."""
_ANTHROPIC_LIMIT = 20
_LIST_PARAMETERS = {"purpose", "after", "after_id", "page", "before_id", "limit", "order"}

logger = logging.getLogger(__name__)


@router.post("/v1/files")
async def upload_file(request: Request, state: AppState) -> Response:
    """Store a file, which is sent as the part `file` of a form (`multipart/form-data`).

    Requests of the same API key may then name it by its id. The form's `purpose` must be `user_data`, `vision` or
    `assistants`. The server needs `--file-storage-path`.
    """
    uploads, boundary = _of(state), form_boundary(request.headers.get("content-type", ""))
    with _errors(), _place(uploads, current_key()):
        try:
            async with asyncio.timeout(UPLOAD_SECONDS):
                added = await _receive(uploads, request, boundary)
        except TimeoutError:
            text = f"the file did not arrive within {UPLOAD_SECONDS:g} seconds"
            raise ApiError(408, text, "request_timeout", {"Connection": "close"}) from None
    return json_response(_object(added, request))


async def _receive(uploads: Uploads, request: Request, boundary: bytes) -> Upload:
    """Store the file of a form as it arrives. Raises `InvalidParameter`."""
    file: ArrivingFile | None = None
    filename, purpose = "", ""
    names = set[str]()
    length = request.headers.get("content-length", "")
    try:
        async for part in form_parts(request.stream(), boundary):
            if part.name in names:
                raise InvalidParameter(f"the form has {part.name} twice", part.name)
            names.add(part.name)
            if part.name == "purpose":
                purpose = await part.text(_MAX_PURPOSE_BYTES)
            elif part.name != "file":
                raise InvalidParameter(f"{part.name[:100]} is not supported", part.name[:100])
            elif not part.filename:
                raise InvalidParameter("file has no name", "file")
            else:
                filename = part.filename
                file = await uploads.run(uploads.begin, current_key(), int(length) if length.isdecimal() else 0)
                async for piece in part.content:
                    await uploads.run(file.write, piece)
        if file is None:
            raise InvalidParameter("file is missing", "file")
        purpose = purpose or PURPOSES[0]
        if purpose not in PURPOSES:
            expected = ", ".join(PURPOSES)
            raise InvalidParameter(f"purpose: {purpose!r} is not supported, only {expected}", "purpose")
        return await uploads.run(file.finish, filename, purpose)
    finally:
        if file is not None:
            await uploads.run(file.close)


@contextlib.contextmanager
def _place(uploads: Uploads, owner: str) -> Iterator[None]:
    """Count an upload while it arrives. Raises `ApiError` if there are too many."""
    if uploads.arriving.total() >= MAX_UPLOADS or (owner and uploads.arriving[owner] >= MAX_UPLOADS_OF_KEY):
        text = f"too many files are being uploaded (at most {MAX_UPLOADS}, {MAX_UPLOADS_OF_KEY} of a key); try again"
        raise ApiError(503, text, "overloaded", {"Retry-After": "2", "Connection": "close"})
    uploads.arriving[owner] += 1
    try:
        yield
    finally:
        uploads.arriving[owner] -= 1
        uploads.arriving += Counter()  # keys that upload nothing are dropped


@contextlib.contextmanager
def _errors() -> Iterator[None]:
    """Raise `ApiError` for what the folder of files raises."""
    try:
        yield
    except UploadNotFound as error:
        raise ApiError(404, str(error), "not_found") from None
    except UploadsStalled as error:
        raise ApiError(503, f"{error}; try again", "overloaded") from None
    except OSError as error:
        logger.error("the folder of uploaded files (--file-storage-path) cannot be used: %s", error)
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise ApiError(507, "there is no space on the server for files", "insufficient_storage") from None
        raise ApiError(503, "files cannot be stored at the moment", "overloaded") from None


@router.get("/v1/files")
async def list_files(
    request: Request,
    state: AppState,
    purpose: str | None = None,
    after: str | None = None,
    after_id: str | None = None,
    page: str | None = None,
    before_id: str | None = None,
    limit: Annotated[int | None, Query(ge=1, le=10_000)] = None,
    order: Literal["asc", "desc"] = "desc",
) -> Response:
    """Return the files of the request's API key, in pages that begin behind the id `after` (OpenAI's clients), or
    `page` or `after_id` (Anthropic's), or end before `before_id`.
    """
    if unknown := sorted(request.query_params.keys() - _LIST_PARAMETERS):
        raise InvalidParameter(f"{unknown[0][:100]} is not supported", unknown[0][:100])
    cursor = only_one({"after": after, "after_id": after_id, "page": page, "before_id": before_id})
    uploads = _of(state)
    with _errors():
        found = await uploads.run(uploads.all, current_key())
    found = [each for each in (found if order == "desc" else found[::-1]) if purpose in (None, each.purpose)]
    limit = limit or (_ANTHROPIC_LIMIT if _is_anthropic(request) else 10_000)
    if cursor is not None:
        ids = [each.id for each in found]
        if cursor not in ids:
            raise ApiError(404, f"there is no file with the id {cursor[:100]!r}", "not_found")
        at = ids.index(cursor)
        found = found[at + 1 :] if before_id is None else found[:at]
    has_more = len(found) > limit
    shown = found[:limit] if before_id is None else found[-limit:]
    first, last = (shown[0].id, shown[-1].id) if shown else (None, None)
    made = {"data": [_object(each, request) for each in shown], "first_id": first, "last_id": last}
    if _is_anthropic(request):
        made["next_page"] = last if has_more and before_id is None else None
    else:
        made["object"] = "list"
    return json_response({**made, "has_more": has_more})


@router.get("/v1/files/{file_id}")
async def get_file(file_id: str, request: Request, state: AppState) -> Response:
    """Return what is known of a file."""
    uploads = _of(state)
    with _errors():
        return json_response(_object(await uploads.run(uploads.get, current_key(), file_id), request))


@router.get("/v1/files/{file_id}/content")
async def get_file_content(file_id: str, state: AppState) -> Response:
    """Return a file."""
    uploads = _of(state)
    with _errors():
        found = await uploads.run(uploads.get, current_key(), file_id)
    path = uploads.path(current_key(), found.id)
    return FileResponse(path, media_type="application/octet-stream", filename=found.filename)


@router.delete("/v1/files/{file_id}")
async def delete_file(file_id: str, request: Request, state: AppState) -> Response:
    """Delete a file. Requests that name it later are rejected."""
    uploads = _of(state)
    with _errors():
        await uploads.run(uploads.delete, current_key(), file_id)
    if _is_anthropic(request):
        return json_response({"id": file_id, "type": "file_deleted"})
    return json_response({"id": file_id, "object": "file", "deleted": True})


def _of(state: ServedModel) -> Uploads:
    if state.uploads is None:
        raise ApiError(404, "files are not stored on this server (--file-storage-path)", "not_found")
    return state.uploads


def _is_anthropic(request: Request) -> bool:
    """Whether the client speaks Anthropic's API, which has these routes with other shapes."""
    return "anthropic-version" in request.headers


def _object(upload: Upload, request: Request) -> dict[str, Any]:
    """The file as the client's API has it."""
    if _is_anthropic(request):
        return {
            "id": upload.id,
            "type": "file",
            "filename": upload.filename,
            "mime_type": type_of_name(upload.filename) or "application/octet-stream",
            "size_bytes": upload.num_bytes,
            "created_at": f"{datetime.fromtimestamp(upload.created_at, UTC):%Y-%m-%dT%H:%M:%SZ}",
            "expires_at": None,
            "downloadable": True,
        }
    return {
        "id": upload.id,
        "object": "file",
        "bytes": upload.num_bytes,
        "created_at": upload.created_at,
        "expires_at": None,
        "filename": upload.filename,
        "purpose": upload.purpose,
        "status": "processed",
    }
