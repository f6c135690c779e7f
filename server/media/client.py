"""The media process, seen from API processes."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Sequence

import msgspec

from quire.engine.protocol.errors import InvalidParameter
from quire.server.media.types import LoadedMedia, MediaFormat, MediaSource, MediaUnavailable
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
    encode,
    receive,
)

_NOT_READY = "the process that loads images and videos is not ready; try again"
_DIED = "the process that loads images and videos has died; it is restarted, try again"
_RECONNECT_SECONDS = 0.2
_ATTEMPTS = 3
_SMALL_BYTES = 2**14
"""Files of this size are sent even if they are known."""
_decode = msgspec.msgpack.Decoder(Answer).decode


class MediaClient:
    """Loads images and videos by the media process. All calls must be on one event loop.

    It connects when it is needed. While it has leases it connects again by itself, and enters them in the new process.
    """

    def __init__(self, path: str, patience: float = 15.0) -> None:
        """`path` is the process's socket. A request waits `patience` seconds for a process that is started again."""
        self._path, self._patience = path, patience
        self._writer: asyncio.StreamWriter | None = None
        self._receiving: asyncio.Task[None] | None = None
        self._connecting = asyncio.Lock()
        self._ids = itertools.count()
        self._waiting: dict[int, asyncio.Future[Answer | None]] = {}
        self._leases: dict[str, list[bytes]] = {}

    async def format(self) -> MediaFormat:
        """Return how prompts refer to items, when the model's processor is loaded. Raises `MediaUnavailable`."""
        answer = await self._ask(AskFormat(next(self._ids)))
        assert answer.format is not None
        return answer.format

    async def load(self, sources: Sequence[MediaSource], owner: str = "") -> LoadedMedia:
        """Fetch, decode and process the items of a request. `owner` is whom the `uuid`s of items belong to.

        Raises `InvalidParameter` with the `param` of an item, and `MediaUnavailable`. Cancelling it cancels the work.
        """
        if all(len(source.data) > _SMALL_BYTES for source in sources):  # often a question about a known picture
            known = await asyncio.to_thread(lambda: [*map(_without_data, sources)])
            answer = await self._ask(Load(next(self._ids), owner, known))
            if not answer.needs_data:
                return self._keep(answer)
        return self._keep(await self._ask(Load(next(self._ids), owner, list(sources))))

    async def adopt(self, lease: str) -> LoadedMedia:
        """Take over a lease that another process made, and may have ended since. Raises `MediaUnavailable`."""
        return self._keep(await self._ask(Adopt(next(self._ids), lease)))

    def hand_over(self, lease: str) -> None:
        """Leave a lease to a process that adopts it, also if this one has ended by then."""
        if self._leases.pop(lease, None) is not None:
            self._send(HandOver(lease))

    def release(self, lease: str) -> None:
        """End a lease: the files of its items may be deleted. A lease that has ended is ignored."""
        if self._leases.pop(lease, None) is not None and self._writer is not None:
            self._writer.write(encode(Release(lease)))

    def close(self) -> None:
        """End the connection, and with it the leases but those that were handed over."""
        self._leases.clear()
        if self._receiving is not None:
            self._receiving.cancel()
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        for future in self._waiting.values():
            future.cancel()

    def _keep(self, answer: Answer) -> LoadedMedia:
        assert answer.media is not None
        self._leases[answer.media.lease] = [item.digest for item in answer.media.items]
        return answer.media

    async def _ask(self, message: AskFormat | Load | Adopt) -> Answer:
        """Return the answer; asks again if the process dies meanwhile."""
        for _ in range(_ATTEMPTS):
            if (answer := await self._exchange(message)) is not None:
                break
            await asyncio.sleep(_RECONNECT_SECONDS)  # one that is dying may still accept connections
        else:
            raise MediaUnavailable(_DIED)
        if answer.is_unavailable:
            raise MediaUnavailable(answer.error)
        if answer.error:
            raise InvalidParameter(answer.error, answer.param or None)
        return answer

    async def _exchange(self, message: AskFormat | Load | Adopt) -> Answer | None:
        """Return the answer; None: the process has died meanwhile. Raises `MediaUnavailable`."""
        try:
            async with asyncio.timeout(self._patience):
                await self._connected()
        except TimeoutError:
            raise MediaUnavailable(_NOT_READY) from None
        future = self._waiting[message.id] = asyncio.get_running_loop().create_future()
        try:
            self._send(message)
            given: Answer | None = await future
            return given
        except asyncio.CancelledError:
            if not future.cancelled() and (answer := future.result()) is not None and answer.media is not None:
                self._send(Release(answer.media.lease))  # the answer came at the same time
            else:
                self._send(Cancel(message.id))
            raise
        finally:
            del self._waiting[message.id]

    async def _connected(self) -> None:
        """Connect, unless it is connected, and enter the leases."""
        async with self._connecting:
            while self._writer is None:
                with contextlib.suppress(OSError):
                    reader, self._writer = await asyncio.open_unix_connection(self._path, limit=READ_BYTES)
                    for lease, digests in self._leases.items():
                        self._send(Renew(lease, digests))
                    self._receiving = asyncio.create_task(self._receive(reader))
                    return
                await asyncio.sleep(_RECONNECT_SECONDS)

    def _send(self, message: Message) -> None:
        if self._writer is not None:
            self._writer.write(encode(message))

    async def _receive(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                answer = _decode(await receive(reader))
                future = self._waiting.get(answer.id)
                if future is not None and not future.done():
                    future.set_result(answer)
                elif answer.media is not None:
                    self._send(Release(answer.media.lease))
        except (asyncio.IncompleteReadError, OSError):
            pass
        if self._writer is not None:
            self._writer.close()
        self._writer = None
        self._fail()
        if self._leases:
            await self._connected()

    def _fail(self) -> None:
        """Tell who waits for an answer that the process has died."""
        for future in self._waiting.values():
            if not future.done():
                future.set_result(None)


def _without_data(source: MediaSource) -> MediaSource:
    return msgspec.structs.replace(source, data=b"", data_digest=source.digest())
