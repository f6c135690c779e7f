"""The media process's work: sources of requests → items in shared memory, each fetched, decoded and processed once.

A file is known by a digest of its bytes, an item by what it is made of (file, kind, options) and by what comes out.
Requests for the same thing at the same time wait for one piece of work, which is cancelled when none of them is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import mmap
import os
import time
from codecs import getincrementaldecoder
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Coroutine, Hashable, MutableMapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from hashlib import blake2b
from typing import Any, Generic, Protocol, TypeVar
from weakref import WeakValueDictionary

import msgspec

from quire.engine.protocol.errors import InvalidParameter
from quire.engine.protocol.media import EMBEDS, MAX_ITEMS, MediaData, MediaKind
from quire.server.client.fair_share import SHARE, FairSlots, Overloaded, Share
from quire.server.client.media_metrics import MediaMetrics, MediaResult
from quire.server.media.addresses import parse_url
from quire.server.media.data_urls import decoded_base64
from quire.server.media.decoders import Decoders
from quire.server.media.decoding import Decoded, DecodeOrder, Refused
from quire.server.media.download import Fetched
from quire.server.media.fetcher import FetcherDied
from quire.server.media.store import Store
from quire.server.media.types import (
    DIGEST_BYTES,
    MIB,
    LoadedItem,
    LoadedMedia,
    MediaFormat,
    MediaSettings,
    MediaSource,
    MediaUnavailable,
)
from quire.server.media.uploads import Uploads, UploadsStalled
from quire.server.media.wire import (
    READ_BYTES,
    Adopt,
    Answer,
    AskFormat,
    Cancel,
    HandOver,
    Load,
    Message,
    Release,
    Renew,
)
from quire.server.media.wire import encode as encode_message
from quire.server.media.wire import receive as receive_message

T = TypeVar("T")
Loaded = tuple[list[list[bytes]], tuple[str | None, ...]]
"""The digests of the items of each source, and `LoadedMedia.texts`."""
ORPHAN_SECONDS = 10.0
"""Time for another process to adopt a lease that was handed over, when its process has disconnected."""
_MAX_URL_SECONDS = 600.0
"""Time for which the answer of a URL is used again, unless the server that it is from says less."""
MAX_PAGES = 100
"""Of a document."""
_MAX_NAMES = 2**16
"""URLs and uuids that are remembered."""
_FETCHES = 64
"""Files that are fetched at the same time, half of them from one host."""
_FETCHED_FILES = 16
"""Files of the maximum size that may have been fetched, and wait to be decoded."""
_MAX_WAITING = 4096
_MAX_ITEM_BYTES = 2**29
"""Of the arrays of an item."""
_OVERLOADED = "too many images and videos are being loaded; try again"

logger = logging.getLogger(__name__)
_decode_message = msgspec.msgpack.Decoder[Message](Message).decode


class FileFetcher(Protocol):
    """Fetches URLs (see `quire.server.media.fetcher`)."""

    async def fetch(self, url: str, max_bytes: int | None = None) -> Fetched: ...

    async def close(self) -> None: ...


class _Work(Generic[T]):
    """Work that several requests wait for."""

    def __init__(self, task: asyncio.Task[T]) -> None:
        self.task, self.num_waiting = task, 0


class _Shared(Generic[T]):
    """Does the same work once for all who ask for it at the same time."""

    def __init__(self, undo: Callable[[T], None] = lambda result: None) -> None:
        """`undo` gets the result when nobody who waited for it is left."""
        self._undo = undo
        self._running: dict[Hashable, _Work[T]] = {}

    @contextlib.asynccontextmanager
    async def result(self, key: Hashable, make: Callable[[], Coroutine[Any, Any, T]]) -> AsyncIterator[T]:
        """Yield the result; `undo` comes after the body."""
        if (work := self._running.get(key)) is None:
            work = self._running[key] = _Work(asyncio.create_task(make()))
        work.num_waiting += 1
        try:
            yield await asyncio.shield(work.task)
        finally:
            work.num_waiting -= 1
            if work.num_waiting == 0:
                if self._running.get(key) is work:
                    del self._running[key]
                if not work.task.done():
                    work.task.cancel()
                elif not work.task.cancelled() and work.task.exception() is None:
                    self._undo(work.task.result())


class _Names(Generic[T]):
    """What URLs and uuids stand for: those that were set last. With too many names, the owner of most loses one."""

    def __init__(self) -> None:
        self._values: dict[str, OrderedDict[bytes, tuple[T, float]]] = {}
        """By owner, and digest of the name."""
        self._count = 0

    def get(self, name: tuple[str, ...] | bytes, owner: str = "") -> T | None:
        values = self._values.get(owner) or OrderedDict[bytes, tuple[T, float]]()
        value, until = values.get(_digest_of(name), (None, 0.0))
        return value if time.monotonic() < until else None

    def set(self, name: tuple[str, ...] | bytes, value: T, seconds: float = math.inf, owner: str = "") -> None:
        values = self._values.setdefault(owner, OrderedDict())
        before = len(values)
        values[key := _digest_of(name)] = value, time.monotonic() + seconds
        values.move_to_end(key)
        self._count += len(values) - before
        if self._count > _MAX_NAMES:
            max(self._values.values(), key=len).popitem(last=False)
            self._count -= 1


class MediaServer:
    """Loads items, and keeps their files. All calls must be on one event loop."""

    def __init__(
        self, settings: MediaSettings, store: Store, fetcher: FileFetcher, metrics: MediaMetrics | None = None
    ) -> None:
        self.store = store
        self._metrics = metrics or MediaMetrics()
        self.decoders = Decoders(settings)
        self._settings, self._fetcher = settings, fetcher
        self._uploads = Uploads(settings.upload_folder) if settings.upload_folder else None
        self._fetch_slots = FairSlots(_FETCHES, _MAX_WAITING)
        self._num_decoders = settings.num_decoders or min(4, os.cpu_count() or 1)
        self._decode_slots = FairSlots(self._num_decoders + 1, _MAX_WAITING)
        """One more than an owner may have, so that items that take long do not stop those of others."""
        self._owner_slots: MutableMapping[bytes, FairSlots] = WeakValueDictionary()
        """By the key of their share."""
        self._host_slots: MutableMapping[str, FairSlots] = WeakValueDictionary()
        """Like `_owner_slots`, those that are in use."""
        self._space_turn = FairSlots(1, _MAX_WAITING)
        """Of the one request that may wait for space while it holds some."""
        self._fetched_bytes = 0
        """Bytes of files that have been fetched, and are not decoded yet."""
        self._file_forgotten = asyncio.Event()
        self._fetches = _Shared[tuple[bytes, bytes]](self._forget_file)
        self._decodes = _Shared[tuple[bytes, Decoded]](lambda result: self.store.drop([result[0]]))
        """By an item's key, and the bytes that are reserved for it."""
        self._urls = _Names[bytes]()
        """Digests of files."""
        self._given = _Names[bytes]()
        """Digests of files by the digests of the sources' data."""
        self._num_pages = _Names[int]()
        """Of documents, by the digests of their files."""
        self._uuids = _Names[_SourceFile]()
        """Files by the names that owners give."""
        self._lessees: dict[str, _Lessee | None] = {}
        """The connections of leases' processes; None: it has disconnected."""

    async def load(self, sources: Sequence[MediaSource], owner: str) -> LoadedMedia:
        """Load the items of a request, and lease them. Raises `InvalidParameter` and `MediaUnavailable`."""
        if len(sources) > MAX_ITEMS:
            raise InvalidParameter(f"a request may have at most {MAX_ITEMS} images and videos", sources[-1].param)
        SHARE.set(Share(owner.encode(errors="surrogatepass")))  # whose turns its work takes
        images = [at for at, source in enumerate(sources) if source.kind == "image"]
        among_several = len(images) > 1 or any(source.is_document for source in sources)  # maybe of several pages
        among_several = among_several and (await self.decoders.ready()).counts_images
        found, texts = await self._load_all(sources, owner, among_several)
        if among_several and sum(len(found[at]) for at in images) == 1:
            self.store.drop(digest for digests in found for digest in digests)
            found, texts = await self._load_all(sources, owner, among_several=False)
        leased = self.store.lease([digest for digests in found for digest in digests])
        if any(source.is_document for source in sources):
            leased = msgspec.structs.replace(leased, num_items=tuple(map(len, found)), texts=texts)
        return leased

    async def _load_all(self, sources: Sequence[MediaSource], owner: str, among_several: bool) -> Loaded:
        """Return the digests of each source's items, which the caller then holds, and `LoadedMedia.texts`.

        A request whose items do not all fit gives up those that it has, waits for its turn and begins again. So
        requests never wait for space that others hold while they wait too.
        """
        request = _Request(owner, self._settings)
        request.among_several = among_several
        with contextlib.suppress(_NoSpace):
            return await self._load_each(sources, request)
        async with contextlib.AsyncExitStack() as stack:
            try:
                async with asyncio.timeout(self._settings.wait_seconds):
                    await stack.enter_async_context(self._space_turn)
            except (TimeoutError, Overloaded):
                raise MediaUnavailable(_OVERLOADED) from None
            return await self._load_each(sources, request.again())

    async def _load_each(self, sources: Sequence[MediaSource], request: _Request) -> Loaded:
        """The same; raises `_NoSpace` if the request may not wait for space, and needs it."""
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._load(source, request)) for source in sources]
        except BaseException as error:
            self.store.drop(request.held)
            while isinstance(error, BaseExceptionGroup):
                error = error.exceptions[0]
            raise error from None
        texts = tuple(request.texts.get(id(source)) for source in sources) if request.texts else ()
        return [task.result() for task in tasks], texts

    async def format(self) -> MediaFormat:
        """Return how prompts refer to items."""
        return (await self.decoders.ready()).format

    async def serve(self, path: str) -> asyncio.Server:
        """Accept connections of API processes at this socket."""
        return await asyncio.start_unix_server(self._on_connection, path, limit=READ_BYTES)

    async def close(self) -> None:
        """End the processes that work for this one."""
        self.decoders.close()
        await self._fetcher.close()

    async def _load(self, source: MediaSource, request: _Request) -> list[bytes]:
        """Return the digests of a source's items, which the request holds: one, or a document's pages. Raises
        `InvalidParameter` and `MediaUnavailable`.
        """
        result: MediaResult | None = "failed"
        try:
            digests = await self._items(source, request)
            result = None  # it is counted
            return digests
        except InvalidParameter as error:
            result = "refused"
            raise InvalidParameter(f"{source.param}: {error}", source.param) from None
        except (TimeoutError, Overloaded):
            raise MediaUnavailable(_OVERLOADED) from None
        except UploadsStalled as error:
            raise MediaUnavailable(f"{error}; try again") from None
        except FetcherDied:
            raise MediaUnavailable("the process that fetches URLs died; try again") from None
        except (asyncio.CancelledError, _DataNeeded, _NoSpace):
            result = None
            raise
        finally:
            if result is not None:
                self._metrics.count(source.kind, result, request.age)

    async def _items(self, source: MediaSource, request: _Request) -> list[bytes]:
        kind, name = source.kind, (source.kind, source.uuid)
        options = {option: value for option, value in source.options.items() if option != "detail"}
        many = kind == "image" and request.among_several
        if source.is_array and kind == "image" and not self._settings.embeds:
            raise InvalidParameter(f"{EMBEDS} are accepted by servers with --enable-mm-embeds only")
        digests: list[bytes] | None
        known: bytes | None
        if source.data:
            given, content, data = await asyncio.to_thread(_content, source)
            file = _SourceFile(content, kind, options, source.is_document, source.is_array, many)
            digests = self._found(file, request) or await self._decoded(file, data, request)
            self._given.set(given, content)
        elif source.data_digest:
            found = self._given.get(source.data_digest)
            file = _SourceFile(found or b"", kind, options, source.is_document, source.is_array, many)
            if found is None or (digests := self._found(file, request)) is None:
                raise _DataNeeded
        elif source.url or source.file_id:
            url = (kind, source.url) if source.url else (kind, request.owner, source.file_id)
            known = self._urls.get(url)
            file = _SourceFile(known or b"", kind, options, source.is_document, source.is_array, many)
            digests = None if known is None else self._found(file, request)
            if digests is None:
                async with self._fetches.result(url, partial(self._fetched, source, url, request.owner)) as (
                    known,
                    data,
                ):
                    if source.file_id and _is_text(data):
                        request.charge_bytes(len(data))
                        request.texts[id(source)] = await asyncio.to_thread(_text, source, data)
                        return []
                    file = _SourceFile(known, kind, options, source.is_document, source.is_array, many)
                    digests = self._found(file, request) or await self._decoded(file, data, request)
        elif source.uuid:
            named = self._uuids.get(name, request.owner)
            digests = None if named is None else self._found(replace(named, among_several=many), request)
            if named is None or digests is None:
                raise InvalidParameter(f"there is no {kind} with this uuid any more; send it again")
            file = named
        else:
            raise InvalidParameter(f"the {kind} is empty")
        if source.uuid:
            self._uuids.set(name, file, owner=request.owner)
        return digests

    def _found(self, file: _SourceFile, request: _Request) -> list[bytes] | None:
        """Return the digests of a file's items, which the request then holds, if the store has all of them."""
        num_pages = self._num_pages.get(file.digest) or 0 if file.is_document else 1
        found = [self.store.find(file.key(page)) for page in range(num_pages)]
        digests = [digest for digest in found if digest is not None]
        if not digests or len(digests) < len(found):
            self.store.drop(digests)
            return None
        request.held += digests
        for page in range(num_pages):
            request.missing.pop(file.key(page), None)
        if request.missing:  # others of its items may wait for the space of these
            self._check_space(request)
        request.charge_pages(len(digests))
        for _ in digests:
            self._metrics.count(file.kind, "cached", request.age)
        return digests

    async def _fetched(self, source: MediaSource, name: tuple[str, ...], owner: str) -> tuple[bytes, bytes]:
        """Fetch a URL, or read an uploaded file; returns the file's digest and content, which are counted until
        `_forget_file`."""
        url, settings = source.url, self._settings
        host = "" if not url or url[:5].lower() == "file:" else parse_url(url).host
        of_host = self._host_slots.setdefault(host, FairSlots(_FETCHES // 2, _MAX_WAITING))
        async with contextlib.AsyncExitStack() as stack:
            async with asyncio.timeout(self._settings.wait_seconds):
                await stack.enter_async_context(of_host)
                await stack.enter_async_context(self._fetch_slots)
                while self._fetched_bytes >= _FETCHED_FILES * self._settings.max_bytes:
                    self._file_forgotten.clear()
                    await self._file_forgotten.wait()
            if url:
                fetched = await self._fetcher.fetch(url, settings.max_bytes)
            elif (uploads := self._uploads) is not None:
                fetched = Fetched(await uploads.run(uploads.read, owner, source.file_id, settings.max_bytes), 0.0)
            else:
                raise InvalidParameter("files are not stored on this server (--file-storage-path)")
        digest = await asyncio.to_thread(_digest, fetched.data)
        seconds = _MAX_URL_SECONDS if fetched.max_age is None else min(fetched.max_age, _MAX_URL_SECONDS)
        self._urls.set(name, digest, seconds)
        self._fetched_bytes += len(fetched.data)
        return digest, fetched.data

    def _forget_file(self, fetched: tuple[bytes, bytes]) -> None:
        """Undo `_fetched`."""
        self._fetched_bytes -= len(fetched[1])
        self._file_forgotten.set()

    async def _decoded(self, file: _SourceFile, data: bytes, request: _Request) -> list[bytes]:
        """Decode a file; returns the digests of its items, which the request holds. Raises `TimeoutError`."""
        request.charge_bytes(len(data))
        digests: list[bytes] = []
        num_pages = 1
        while len(digests) < num_pages:
            key = file.key(page := len(digests))
            reserved = request.missing.get(key, 0)
            make = partial(self._decode, file, page, data, reserved)
            try:
                async with (
                    asyncio.timeout(self._settings.wait_seconds),
                    self._decodes.result((key, reserved), make) as (digest, made),
                ):
                    if page == 0:
                        num_pages = made.num_pages
                        request.charge_pages(num_pages)
                        self._num_pages.set(file.digest, num_pages)
                    request.charge_pixels(made.num_pixels)
                    self.store.hold(digest)
                    request.held.append(digest)
            except _NoSpace as error:
                request.missing[key] = error.num_bytes
                self._check_space(request)
                if not request.may_wait:
                    raise
                continue
            request.missing.pop(key, None)
            if request.missing:  # others of its items may wait for the space of this one
                self._check_space(request)
            digests.append(digest)
            self._metrics.count(file.kind, "loaded", request.age)
        self._metrics.cache_bytes = self.store.num_bytes
        return digests

    def _check_space(self, request: _Request) -> None:
        """Raise `InvalidParameter` if a request would wait for the space of its own items."""
        needed = self.store.size(request.held) + sum(request.missing.values())
        if needed > self.store.capacity:
            raise InvalidParameter(
                f"the images and videos of the request need {math.ceil(needed / MIB)} MiB when they are processed;"
                f" --mm-processor-cache-gb allows {self.store.capacity // MIB} MiB"
            )

    async def _decode(self, file: _SourceFile, page: int, data: bytes, reserved: int) -> tuple[bytes, Decoded]:
        """Decode a file, or a page of it, into the store; returns the item's digest, which is held.

        How much space an item needs is known when it is decoded. If there is not enough then, this raises `_NoSpace`,
        and must be called again with the number of bytes as `reserved`: it waits for these before it decodes.
        """
        settings = self._settings
        if len(data) > settings.max_bytes:
            raise InvalidParameter(f"the file has more than {settings.max_bytes} bytes (--max-media-bytes)")
        kind, seconds = file.kind, int(settings.decode_seconds)
        order = DecodeOrder(kind, file.options, seconds, settings.max_pixels, _MAX_ITEM_BYTES)
        order.page, order.among_several = page if file.is_document else None, file.among_several
        order.is_array = file.is_array
        async with contextlib.AsyncExitStack() as stack:
            if reserved:
                await self.store.reserve(reserved)
                stack.callback(self.store.unreserve, reserved)
            of_owner = self._owner_slots.setdefault(SHARE.get().key, FairSlots(self._num_decoders, _MAX_WAITING))
            await stack.enter_async_context(of_owner)
            await stack.enter_async_context(self._decode_slots)
            target, path = self.store.unfinished()
            charged = reserved

            def open_target(num_bytes: int) -> int:
                nonlocal charged
                if num_bytes > charged:
                    if charged or not self.store.try_reserve(num_bytes):
                        raise _NoSpace(num_bytes)
                    stack.callback(self.store.unreserve, num_bytes)
                    charged = num_bytes
                return target

            try:
                answer = await self.decoders.decode(data, order, open_target)
                if isinstance(answer, Refused):
                    raise InvalidParameter(answer.reason[:500])
                if os.fstat(target).st_size != answer.num_bytes:
                    raise InvalidParameter(f"the {kind} cannot be decoded")
                digest = await asyncio.to_thread(_item_digest, kind, answer, target)
                data_of = MediaData(answer.arrays, answer.num_bytes, self.store.path(digest))
                item = LoadedItem(digest, kind, answer.text, answer.grids, answer.seconds_per_frame, data_of)
                return self.store.add(file.key(page), item, path), answer
            finally:
                os.close(target)
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)

    async def _on_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = _Lessee(writer)
        try:
            while True:
                self._on_message(connection, _decode_message(await receive_message(reader)))
        except (asyncio.IncompleteReadError, OSError, asyncio.CancelledError):
            pass  # asyncio logs a handler that is cancelled, as when the process ends
        finally:
            for task in connection.tasks.values():
                task.cancel()
            writer.close()
            for lease in [lease for lease, lessee in self._lessees.items() if lessee is connection]:
                if lease in connection.handed_over:
                    self._lessees[lease] = None
                    asyncio.get_running_loop().call_later(ORPHAN_SECONDS, self._release_orphan, lease)
                else:
                    del self._lessees[lease]
                    self.store.release(lease)

    def _on_message(self, connection: _Lessee, message: Message) -> None:
        match message:
            case Release(lease):
                self._lessees.pop(lease, None)
                self.store.release(lease)
            case Renew(lease, digests):
                self.store.renew(lease, digests)
                self._lessees[lease] = connection
            case HandOver(lease):
                connection.handed_over.add(lease)
            case Cancel(number):
                if (task := connection.tasks.get(number)) is not None:
                    task.cancel()
            case AskFormat() | Load() | Adopt():
                connection.tasks[message.id] = asyncio.create_task(self._answer(connection, message))

    async def _answer(self, connection: _Lessee, message: AskFormat | Load | Adopt) -> None:
        answer = Answer(message.id)
        try:
            match message:
                case AskFormat():
                    answer.format = await self.format()
                case Load(_, owner, sources):
                    answer.media = await self.load(sources, owner)
                case Adopt(_, lease):
                    if (items := self.store.leased(lease)) is None:
                        raise MediaUnavailable("the images and videos of the request are no longer there; try again")
                    answer.media = LoadedMedia(items, lease)
        except InvalidParameter as error:
            answer.error, answer.param = str(error), error.param or ""
        except MediaUnavailable as error:
            answer.error, answer.is_unavailable = str(error), True
        except _DataNeeded:
            answer.needs_data = True
        except Exception:
            logger.exception("an image or a video could not be loaded")
            answer.error, answer.is_unavailable = "images and videos cannot be loaded at the moment", True
        finally:
            connection.tasks.pop(message.id, None)
        if answer.media is not None:
            if connection.writer.is_closing():
                return self.store.release(answer.media.lease)
            self._lessees[answer.media.lease] = connection
        connection.writer.write(encode_message(answer))

    def _release_orphan(self, lease: str) -> None:
        if lease in self._lessees and self._lessees[lease] is None:
            del self._lessees[lease]
            self.store.release(lease)


class _DataNeeded(Exception):
    """An item of which only the data's digest was sent is not there."""


class _NoSpace(Exception):
    """There is no space at the moment for the arrays of an item."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes


class _Lessee:
    """The connection of an API process, or of another process that loads items."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self.writer = writer
        self.tasks: dict[int, asyncio.Task[None]] = {}
        self.handed_over: set[str] = set()
        """Leases that another process may adopt."""


class _Request:
    """What a request has loaded."""

    def __init__(self, owner: str, settings: MediaSettings) -> None:
        self.owner, self._settings = owner, settings
        self.among_several = False
        """Whether its images are processed as `DecodeOrder.among_several`."""
        self.held: list[bytes] = []
        """Digests of items that the store keeps for it."""
        self.texts: dict[int, str] = {}
        """By the sources that are texts (`id`)."""
        self.missing: dict[bytes, int] = {}
        """Bytes of items for which there was no space, by key."""
        self.may_wait = False
        """Whether it has the turn to wait for space."""
        self._begun = time.monotonic()
        self._num_bytes = self._num_pixels = self._num_pages = 0

    def again(self) -> _Request:
        """Return the same request with nothing loaded, which has the turn to wait for space."""
        request = _Request(self.owner, self._settings)
        request.among_several, request.missing = self.among_several, self.missing
        request.may_wait, request._begun = True, self._begun
        return request

    @property
    def age(self) -> float:
        """Seconds since it began."""
        return time.monotonic() - self._begun

    def charge_bytes(self, num_bytes: int) -> None:
        self._num_bytes += num_bytes
        if self._num_bytes > (limit := self._settings.max_request_bytes):
            raise InvalidParameter(f"the images and videos of the request have more than {limit} bytes")

    def charge_pages(self, num_pages: int) -> None:
        """Also for files that are no documents: they have one."""
        self._num_pages += num_pages
        if num_pages > MAX_PAGES:
            raise InvalidParameter(f"the document has {num_pages} pages; at most {MAX_PAGES} are allowed")
        if self._num_pages > MAX_ITEMS:
            raise InvalidParameter(f"a request may have at most {MAX_ITEMS} images, videos and pages of documents")

    def charge_pixels(self, num_pixels: int) -> None:
        self._num_pixels += num_pixels
        if self._num_pixels > (limit := self._settings.max_request_pixels):
            raise InvalidParameter(f"the images and videos of the request have more than {limit} pixels")


def _is_text(data: bytes) -> bool:
    """Whether a file is a text in UTF-8, by its begin. A PDF may begin with other bytes."""
    begin = data[:1024]
    with contextlib.suppress(UnicodeDecodeError):
        return bool(getincrementaldecoder("utf-8")().decode(begin)) and b"\0" not in begin and b"%PDF" not in begin
    return False


def _text(source: MediaSource, data: bytes) -> str:
    """Return an uploaded text. Raises `InvalidParameter`."""
    if not source.is_document:
        raise InvalidParameter("the uploaded file is a text; send it as a file or document")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise InvalidParameter("the text is not UTF-8") from None


def _content(source: MediaSource) -> tuple[bytes, bytes, bytes]:
    """Return the digests of what was sent and of the file, and the file. Raises `InvalidParameter`."""
    given = source.digest()
    if not source.is_base64:
        return given, _digest(source.data), source.data
    try:
        data = decoded_base64(source.data)
    except InvalidParameter as error:
        raise InvalidParameter(f"{source.param}: {error}") from None
    return given, _digest(data), data


@dataclass(frozen=True)
class _SourceFile:
    """A file, and what else its items are made of."""

    digest: bytes
    kind: MediaKind
    options: dict[str, Any]
    is_document: bool
    is_array: bool
    among_several: bool
    """See `DecodeOrder`."""

    def key(self, page: int = 0) -> bytes:
        """What an item is made of."""
        facts = (self.kind, self.options, page if self.is_document else None, self.is_array, self.among_several)
        return _digest(self.digest + msgspec.json.encode(facts, order="sorted"))


def _digest(data: bytes) -> bytes:
    return blake2b(data, digest_size=DIGEST_BYTES).digest()


def _digest_of(name: tuple[str, ...] | bytes) -> bytes:
    return name if isinstance(name, bytes) else _digest(msgspec.msgpack.encode(name))


def _item_digest(kind: MediaKind, decoded: Decoded, file: int) -> bytes:
    """Digest of what a model gets: of the arrays in a file, the text, and what positions depend on."""
    facts = (kind, decoded.arrays, decoded.text, decoded.grids, decoded.seconds_per_frame)
    hashed = blake2b(msgspec.json.encode(facts), digest_size=DIGEST_BYTES)
    if decoded.num_bytes:
        with mmap.mmap(file, decoded.num_bytes, prot=mmap.PROT_READ) as content:
            hashed.update(content)
    return hashed.digest()
