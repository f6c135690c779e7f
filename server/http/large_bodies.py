"""Large bodies are processed in other processes, which can be stopped.

Parsing, validating, rendering and tokenizing hold the interpreter lock for a long time, or take much memory, if a body
is large or hostile. So a body above `LARGE_BODY` is not even parsed here. A fork of a helper process (`Sandbox`) does
everything up to the engine's input, within limits of time and memory, and returns the request without the processed
parts (`RequestBody.reduced`), or a response. It is killed when the client leaves. So is the fork for a request that may
bring its own chat template. A body that is large only because of its pictures is parsed here without them
(`quire.server.http.cut_files`).
"""

from __future__ import annotations

import asyncio
import io
import json
import mmap
import os
import pickle
import re
import sys
import traceback
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Coroutine, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException

from quire.engine.config.engine_config import ModelConfig
from quire.engine.process import log
from quire.server.client.fair_share import SHARE, FairSlots, Share
from quire.server.client.request_record import RECORD, current_key
from quire.server.http.cut_files import MAX_CUT_BODY, cut
from quire.server.http.errors import ApiError, reason_of_status, respond
from quire.server.http.response import cancelled_without_client, while_connected
from quire.server.http.response_store import ResponseStore
from quire.server.media.data_urls import CUT_FILES
from quire.server.text.adapter import OWN_TEMPLATE
from quire.server.text.chat_formats import ChatFormats
from quire.server.text.input_processor import InputProcessor
from quire.server.text.media_input import MediaAccess, MediaDeferred
from quire.server.text.sandbox import Answer, Sandbox, SandboxStopped
from quire.server.text.structured_outputs import SizeCheck
from quire.server.text.tokenizer import TokenizerFailed

LARGE_BODY = 64 * 2**10
"""Bytes of a large body. A smaller one is processed in the API process."""
BODY_SECONDS = 10.0
"""Processor time limit of processing a large body."""
BODY_MEMORY = 2**30
"""Memory limit of processing a large body, in bytes."""
MAX_BODIES_BYTES = 256 * 2**20
"""Bytes of all large bodies that an API process holds; further ones get status 503."""

_TEMPLATE_MARKS = re.compile(rb"chat_template|\\u|\x00")
"""A body with a chat template has one of these: an escape may hide the name, and so may UTF-16."""
_GZIP = b"\x1f\x8b"
_WAITING_BODIES = 8
"""Bodies that wait for files to be fetched and decoded, for each one that is worked on."""
_DEFERRED = pickle.dumps(None)
"""The answer for a body that must wait for files."""
_NICENESS = 10
"""Lowers the scheduling priority: streams come first."""

ProcessLarge = Callable[[Any, InputProcessor, bytes | None], Coroutine[Any, Any, Any]]
"""Turns parsed JSON into the body that the route receives (`RequestBody.process_large`). The bytes are the items of the
stored responses that the request refers to, as `ResponseStore.items_of` returns them; None at first.
"""


class LargeBodies:
    """The processes for the large bodies of one API process. They have imported `routes`; a request may continue one
    of the `responses`.
    """

    def __init__(
        self,
        model: ModelConfig,
        formats: ChatFormats,
        routes: Sequence[BodyRoute],
        responses: ResponseStore,
        max_model_len: Callable[[], int],
        media: MediaAccess | None = None,
        names: Sequence[str] = (),
        own_template: Callable[[str], Awaitable[str]] | None = None,
    ) -> None:
        """`max_model_len` returns the model's present length, and `media` is as in `InputProcessor.load`. The adapter
        whose name `own_template` gets, none of the model's `names`, has the chat template that it returns, if any.
        """
        self.responses, self._max_model_len, self._own_template = responses, max_model_len, own_template
        processes = [route.process_large for route in routes if route.body_field is not None]
        argument = model, formats, processes, media, names
        self._sandbox = Sandbox(_make, argument, BODY_SECONDS, BODY_MEMORY, _NICENESS)
        slots = max(2, len(os.sched_getaffinity(0)) // 2)
        self._slots, self._waiting_slots = FairSlots(slots), FairSlots(_WAITING_BODIES * slots)
        self.trusts_templates = formats.trust_request_chat_template
        """Whether requests may have chat templates."""
        self._held: Counter[Share] = Counter()
        """Bytes of the large bodies that are held now, by share."""
        asyncio.get_running_loop().run_in_executor(None, self._sandbox.start)  # in the background

    async def process(self, process_large: ProcessLarge, body: bytes | memoryview, stored: bytes | None = None) -> Any:
        """Return the result of `process_large`; raises `HTTPException`, and `Answered` with a complete response."""
        result = await self._ask(process_large, body, stored, "" if self._own_template is None else None)
        if isinstance(result, _OfAdapter):  # only the parser knows its name
            assert self._own_template is not None
            result = await self._ask(process_large, body, stored, await self._own_template(result.name))
        return result

    async def _ask(
        self, process_large: ProcessLarge, body: bytes | memoryview, stored: bytes | None, template: str | None
    ) -> Any:
        header = pickle.dumps((process_large, stored, self._max_model_len(), current_key(), template))
        try:
            async with self._slots:
                answer = await self._sandbox.ask_async(pickle.dumps(False), header, body)
            if answer == _DEFERRED:  # again, where it keeps no text waiting
                async with self._waiting_slots:
                    answer = await self._sandbox.ask_async(pickle.dumps(True), header, body)
        except SandboxStopped:
            limits = f"{BODY_SECONDS:g} s of processor time or {BODY_MEMORY >> 20} MiB of memory"
            text = f"the body takes more than {limits} to process; shorten it, or simplify its chat template"
            raise ApiError(400, text, "body_too_large") from None
        except OSError as error:
            raise ApiError(503, f"large bodies cannot be processed now: {error}", "overloaded") from None
        result = pickle.loads(answer)
        if isinstance(result, TokenizerFailed):
            raise result
        if isinstance(result, _Raised):
            raise HTTPException(result.status, result.detail)
        if isinstance(result, Response):
            raise Answered(result)
        return result

    async def process_with_stored(
        self, process_large: ProcessLarge, body: bytes | memoryview, stored: bytes, held: int = 0
    ) -> Any:
        """Like `process`, with the items of stored responses. They count as well as the `held` bytes of the body."""
        share = SHARE.get()
        self.hold(share, len(stored), held)
        try:
            return await self.process(process_large, body, stored)
        finally:
            self.release(share, len(stored))

    @property
    def num_bytes(self) -> int:
        """Bytes of the large bodies that are held now."""
        return self._held.total()

    def hold(self, share: Share, count: int, held: int) -> None:
        """Count bytes of a body that has `held` already.

        Raises `ApiError` if all bodies together have too many; with fair sharing, also if a share's bodies have more
        than half of that. A body may have more if it is the only one.
        """
        text = ""
        if self.num_bytes > held and self.num_bytes + count > MAX_BODIES_BYTES:
            text = f"the bodies of all requests together have more than {MAX_BODIES_BYTES >> 20} MiB; try again"
        elif share.key and self._held[share] > held and self._held[share] + count > MAX_BODIES_BYTES // 2:
            text = f"the bodies of your requests together have more than {MAX_BODIES_BYTES >> 21} MiB; try again"
        if text:
            raise ApiError(503, text, "overloaded", {"Retry-After": "2", "Connection": "close"})
        self._held[share] += count

    def release(self, share: Share, count: int) -> None:
        """Stop counting the bytes of a body."""
        self._held[share] -= count
        self._held += Counter()  # shares that hold nothing are dropped


class Answered(Exception):
    """Not an error: the response to a request whose route need not be called."""

    def __init__(self, response: Response) -> None:
        self.response = response


@dataclass(frozen=True)
class Continued:
    """The request refers to stored responses, whose items `process_large` needs."""

    response_ids: Collection[str]


@dataclass(frozen=True)
class _OfAdapter:
    """The request names an adapter, whose chat template must be known first."""

    name: str


@dataclass(frozen=True)
class _Raised:
    """An `HTTPException` of the other process."""

    status: int
    detail: str


async def check_type(request: Request) -> None:
    """Raise `ApiError` for a body of another type than JSON, such as `curl -d` sends it, or a compressed one."""
    headers = request.headers
    if headers.get("content-length", "0") == "0" and "transfer-encoding" not in headers:
        return
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    coding = headers.get("content-encoding", "identity").strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        text = f"its type is {kind}" if kind else "it has no type"
        problem = f"{text}; send the header Content-Type: application/json"
    elif coding != "identity":
        problem = f"it is compressed ({coding}); send it as it is, without the header Content-Encoding"
    else:
        return
    raise ApiError(415, f"the body is not read, as {problem}", "unsupported_media_type")


class BodyRoute(APIRoute):
    """A route whose body, a `RequestBody`, is processed elsewhere if it is large."""

    keeps_body = False
    """Whether the route reads the bytes of the body."""

    @property
    def process_large(self) -> ProcessLarge:
        """Processes a large body, in another process."""
        process_large: ProcessLarge = self._kind.process_large
        return process_large

    @property
    def needs_engine(self) -> bool:
        """Whether the body is a request to the engine."""
        return getattr(self._kind, "needs", None) is not None

    @property
    def has_files(self) -> bool:
        """Whether files may be cut out of the body."""
        return getattr(self._kind, "has_files", False)

    @property
    def _kind(self) -> Any:
        return self.dependant.body_params[0].field_info.annotation

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        if self.body_field is None:
            return handle

        async def handle_body(request: Request) -> Response:
            await check_type(request)
            body, before = _BodyRequest(request, self), CUT_FILES.set(None)
            try:
                await body.body()  # not by FastAPI, which treats every error as a parsing error
                with cancelled_without_client(request.receive):
                    try:
                        return await handle(body)
                    except Exception:
                        # Names of files that are left stand in other fields, so this error may be about the names.
                        if (files := CUT_FILES.get()) is None or files.all_read:
                            raise
                    CUT_FILES.set(None)
                    await body.process_elsewhere()
                    return await handle(body)
            except Answered as answered:
                if (record := RECORD.get()) is not None and (status := answered.response.status_code) >= 400:
                    record.reason = reason_of_status(status)
                return answered.response
            finally:
                CUT_FILES.reset(before)
                if body.large is not None:
                    body.release()

        return handle_body


class _BodyRequest(Request):
    """A request of a `BodyRoute`. If its body is processed elsewhere, its JSON is the result."""

    def __init__(self, request: Request, route: BodyRoute) -> None:
        super().__init__(request.scope, request.receive)
        self._route = route
        self.large: _LargeBody | None = None

    async def body(self) -> bytes:
        if not hasattr(self, "_body"):
            bodies: LargeBodies = self.app.state.quire.bodies
            body = b""
            async for chunk in self.stream():
                if self.large is None and len(body) + len(chunk) <= LARGE_BODY:
                    body += chunk
                    continue
                if self.large is None:
                    self.large = _LargeBody(bodies, body)
                self.large.add(chunk)
            if self.large is not None and self._cut(self.large):
                return self._body
            if self.large is not None or (bodies.trusts_templates and _TEMPLATE_MARKS.search(body)):
                if self._route.needs_engine:
                    self.app.state.quire.frontend.client.admit()
                self._json = await while_connected(self.receive, self._process(bodies, body))
                if self.large is not None:
                    body = self.large.content() if self._route.keeps_body else b"{}"
                    self.release()
            self._body = body
        return self._body

    def _cut(self, large: _LargeBody) -> bool:
        """Return whether what is left of a large body without its files is processed here; it is `_body` then."""
        if not self._route.has_files or len(view := large.view()) > MAX_CUT_BODY:
            return False
        if (found := cut(bytes(view), LARGE_BODY, self.release)) is None:
            return False
        if self.app.state.quire.bodies.trusts_templates and _TEMPLATE_MARKS.search(found[0]):
            return False
        self._body, files = found
        CUT_FILES.set(files)
        return True

    async def process_elsewhere(self) -> None:
        """Process a large body by its original bytes, although its files could be cut out."""
        if self._route.needs_engine:
            self.app.state.quire.frontend.client.admit()
        self._json = await self._process(self.app.state.quire.bodies, b"")
        self._body = b"{}"
        self.release()

    async def json(self) -> Any:
        if not hasattr(self, "_json"):
            self._json = _parsed(await self.body())
        return self._json

    async def _process(self, bodies: LargeBodies, small: bytes) -> Any:
        process_large = self._route.process_large
        with memoryview(small) if self.large is None else self.large.view() as body:
            found = await bodies.process(process_large, body)
            if isinstance(found, Continued):
                stored = bodies.responses.items_of(found.response_ids)
                held = 0 if self.large is None else len(body)
                found = await bodies.process_with_stored(process_large, body, stored, held)
        return found

    def release(self) -> None:
        """Release the memory of a large body."""
        if self.large is not None:
            self.large.close()
            self.large = None


class _LargeBody:
    """A buffer that grows, and returns its memory to the system; malloc would keep a Python object's."""

    def __init__(self, bodies: LargeBodies, begin: bytes) -> None:
        self._bodies, self._share = bodies, SHARE.get()
        self._map = mmap.mmap(-1, 2**20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._size = 0
        self.add(begin)

    def add(self, chunk: bytes) -> None:
        """Add bytes; raises `ApiError` if all bodies have too many together."""
        self._bodies.hold(self._share, len(chunk), self._size)
        self._size += len(chunk)
        if self._size > len(self._map):
            self._map.resize(2 * max(self._size, len(self._map)))
        self._map.write(chunk)

    def view(self) -> memoryview:
        """The body."""
        return memoryview(self._map)[: self._size]

    def content(self) -> bytes:
        """A copy of the body."""
        return self._map[: self._size]

    def close(self) -> None:
        """Stop counting it. Its memory is freed when the last reader has dropped it."""
        self._bodies.release(self._share, self._size)


def _make(
    argument: tuple[ModelConfig, ChatFormats, Sequence[ProcessLarge], MediaAccess | None, Sequence[str]],
) -> Answer:
    """Make the sandbox's function. Unpickling the argument has imported the routes."""
    model, formats, _, media, names = argument
    processor = InputProcessor.load(model, formats, SizeCheck(), media)
    _ = processor.tokenizer.max_characters  # not in each fork again

    def answer(question: bytes) -> bytes:
        stream = io.BytesIO(question)
        may_wait = pickle.load(stream)
        process_large, stored, max_model_len, key, template = pickle.load(stream)
        processor.limit(max_model_len)
        if processor.media is not None:
            processor.media.owner, processor.media.may_wait = key, may_wait
        return pickle.dumps(_process(process_large, stream.read(), processor, stored, names, template))

    return answer


def _process(
    process_large: ProcessLarge,
    body: bytes,
    processor: InputProcessor,
    stored: bytes | None,
    names: Sequence[str],
    template: str | None,
) -> Any:
    """The route's input from this body, or `_Raised`, or a response. Errors are the same as FastAPI's. The process that
    asks logs a `TokenizerFailed`. With no `template`, the body of a request to a model without one of the `names` is
    not processed, but `_OfAdapter`.
    """
    try:
        value = _parsed(body)
    except json.JSONDecodeError as error:
        problem = {"type": "json_invalid", "loc": ("body",), "msg": error.msg}
        return respond(RequestValidationError([problem]))
    name = value.get("model") if isinstance(value, dict) else None
    if template is None and isinstance(name, str) and name not in names:
        return _OfAdapter(name)
    OWN_TEMPLATE.set(template or "")
    try:
        return asyncio.run(process_large(value, processor, stored))
    except MemoryError:
        raise
    except TokenizerFailed as error:
        return error
    except MediaDeferred:
        return None
    except HTTPException as error:
        return _Raised(error.status_code, error.detail)
    except Exception as error:
        response = respond(error)
        if response.status_code == HTTPStatus.INTERNAL_SERVER_ERROR:
            log.print_error(f"cannot process a large body\n{traceback.format_exc()}")
        return response


def _parsed(body: bytes) -> Any:
    """Parse JSON; raises `json.JSONDecodeError` for every problem, with a message for the client."""
    try:
        return json.loads(body)
    except RecursionError:
        problem = "it is nested too deeply"
    except UnicodeDecodeError as error:
        problem = f"byte {error.start} is not {error.encoding.upper()}"
    except json.JSONDecodeError as error:
        problem = error.msg
    except ValueError:
        problem = f"it has an integer of more than {sys.get_int_max_str_digits()} digits"
    if body.startswith(_GZIP):
        problem = "it is compressed with gzip"
    raise json.JSONDecodeError(problem, "", 0)
