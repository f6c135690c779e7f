"""Fetches URLs in a process of its own, which decodes nothing.

The process gets its settings and then URLs over a pair of sockets, its standard input, and ends when that is closed.
Each message is preceded by its length; a file follows the message that announces it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import socket
import struct
import subprocess
import sys

import msgspec

from quire.engine.process import current_process, log
from quire.engine.protocol.errors import InvalidParameter
from quire.server.media.confinement import confine, environment
from quire.server.media.download import Downloader, Fetched, FetchSettings, check

_LENGTH = struct.Struct("!I")
_MAX_MESSAGE = 2**20
_READ_BYTES = 2**22
_MEMORY = 2**33
"""Limit of the process's address space in bytes, beyond the files: threads and their heaps reserve much of it."""

logger = logging.getLogger(__name__)


class FetcherDied(Exception):
    """The fetcher's process ended while it fetched a URL, twice."""


class _Order(msgspec.Struct, array_like=True):
    """To the process."""

    id: int
    url: str = ""
    """Empty: nobody waits for it any more."""
    max_bytes: int = 0


class _Report(msgspec.Struct, array_like=True):
    """From the process."""

    id: int
    error: str = ""
    num_bytes: int = 0
    """Of the file, which follows."""
    max_age: float | None = None


class _Process:
    """A running process, and what it has been asked for."""

    def __init__(
        self,
        popen: subprocess.Popen[bytes],
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        max_bytes: int,
    ) -> None:
        self._popen = popen
        self._reader, self._writer = reader, writer
        self._max_bytes = max_bytes
        self._ids = itertools.count()
        self._waiting: dict[int, asyncio.Future[Fetched]] = {}
        self.task = asyncio.create_task(self._receive())

    @classmethod
    async def start(cls, settings: FetchSettings) -> _Process:
        mine, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-P", "-c", "from quire.server.media import fetcher; fetcher.main()"]
            try:
                popen = subprocess.Popen(
                    command, stdin=theirs.fileno(), stdout=subprocess.DEVNULL, process_group=0, env=environment()
                )
            except BaseException:
                mine.close()
                raise
        reader, writer = await asyncio.open_connection(sock=mine, limit=_READ_BYTES)
        _write(writer, msgspec.msgpack.encode(settings))
        return cls(popen, reader, writer, settings.max_bytes)

    async def fetch(self, url: str, max_bytes: int) -> Fetched | None:
        """None: the process has died."""
        if self._writer.is_closing():
            return None
        number = next(self._ids)
        future: asyncio.Future[Fetched] = asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        _write(self._writer, msgspec.msgpack.encode(_Order(number, url, max_bytes)))
        try:
            return await future
        except EOFError:
            return None
        except asyncio.CancelledError:
            _write(self._writer, msgspec.msgpack.encode(_Order(number)))
            raise
        finally:
            self._waiting.pop(number, None)

    async def _receive(self) -> None:
        try:
            while True:
                report = msgspec.msgpack.decode(await _read(self._reader), type=_Report)
                if not 0 <= report.num_bytes <= self._max_bytes:
                    raise OSError("the fetcher's answer is invalid")
                data = await self._reader.readexactly(report.num_bytes) if report.num_bytes else b""
                if (future := self._waiting.get(report.id)) is None or future.done():
                    continue
                if report.error:
                    future.set_exception(InvalidParameter(report.error))
                else:
                    future.set_result(Fetched(data, report.max_age))
        except (asyncio.IncompleteReadError, OSError, msgspec.MsgspecError) as error:
            logger.debug("the fetcher's process is replaced: %s", error)
        finally:
            self.end()

    def end(self) -> None:
        """Kill the process; who waits for it is told."""
        self._writer.close()
        if self._popen.poll() is None:
            self._popen.kill()
            self._popen.wait()
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(EOFError())
        self.task.cancel()


class Fetcher:
    """Fetches URLs by a process, which it starts when it is needed, and again if it dies. All calls must be on one
    event loop.
    """

    def __init__(self, settings: FetchSettings) -> None:
        """Raises `ConfigError` for invalid rules."""
        self._settings = settings
        settings.rules()
        self._process: _Process | None = None
        self._lock = asyncio.Lock()

    async def fetch(self, url: str, max_bytes: int | None = None) -> Fetched:
        """Fetch an http:, https: or file: URL of at most `max_bytes`, or of what the settings allow.

        Raises `InvalidParameter` with a text for the client, and `FetcherDied`. Cancelling it stops the download.
        """
        check(self._settings, url)
        limit = self._settings.max_bytes if max_bytes is None else min(max_bytes, self._settings.max_bytes)
        for _ in range(2):  # twice, as another URL may have killed the process
            async with self._lock:
                if self._process is None or self._process.task.done():
                    self._process = await _Process.start(self._settings)
                process = self._process
            if (fetched := await process.fetch(url, limit)) is not None:
                return fetched
            logger.warning("the fetcher's process died")
        raise FetcherDied("the process that fetches URLs died")

    async def close(self) -> None:
        """Stop the process. URLs that are being fetched raise `FetcherDied`."""
        if (process := self._process) is not None:
            process.end()
            with contextlib.suppress(asyncio.CancelledError):
                await process.task
            self._process = None


def main() -> None:
    """Main function of the process."""
    current_process.set_name("quire-fetcher")
    log.setup("warning", "fetcher")
    with contextlib.suppress(KeyboardInterrupt, ConnectionError, asyncio.IncompleteReadError):
        asyncio.run(_serve(socket.socket(fileno=os.dup(0))))


async def _serve(connection: socket.socket) -> None:
    reader, writer = await asyncio.open_connection(sock=connection, limit=_READ_BYTES)
    settings = msgspec.msgpack.decode(await _read(reader), type=FetchSettings)
    downloader, tasks, turn = Downloader(settings), dict[int, asyncio.Task[None]](), asyncio.Lock()
    confine(_MEMORY + 16 * settings.max_bytes, network=True)

    async def answer(order: _Order) -> None:
        report, data = _Report(order.id), b""
        try:
            fetched = await downloader.fetch(order.url, order.max_bytes)
            data, report.num_bytes, report.max_age = fetched.data, len(fetched.data), fetched.max_age
        except InvalidParameter as error:
            report.error = str(error)
        except Exception:
            logger.exception("a URL could not be fetched")
            report.error = "the URL could not be fetched"
        finally:
            tasks.pop(order.id, None)
        async with turn:  # what has begun is sent whole, also if nobody waits for it
            _write(writer, msgspec.msgpack.encode(report))
            writer.write(data)
            await writer.drain()

    try:
        while True:
            order = msgspec.msgpack.decode(await _read(reader), type=_Order)
            if order.url:
                tasks[order.id] = asyncio.create_task(answer(order))
            elif (task := tasks.get(order.id)) is not None:
                task.cancel()
    finally:
        downloader.close()
        writer.close()
        os._exit(0)  # threads that resolve names may take long


async def _read(reader: asyncio.StreamReader) -> bytes:
    (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    assert length <= _MAX_MESSAGE
    return await reader.readexactly(length)


def _write(writer: asyncio.StreamWriter, message: bytes) -> None:
    writer.write(_LENGTH.pack(len(message)) + message)
