"""Decoders, seen from the media process: an item's file → arrays in another file, by a process that ends with it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import pickle
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping

import msgspec

from quire.engine.protocol.errors import UNDECODABLE, ConfigError
from quire.server.media.confinement import environment
from quire.server.media.decoding import (
    ALIGNMENT,
    WRITTEN,
    Decoded,
    DecodeOrder,
    DecoderReady,
    ItemLayout,
    Refused,
)
from quire.server.media.types import MediaSettings, MediaUnavailable

_HELPER = "from quire.server.media import decoder; decoder.main()"
_WALL_CLOCK_FACTOR = 4.0
"""Wall-clock limit of an item, as a multiple of its processor time limit."""
_SILENT_SECONDS = 20.0
"""Seconds after which a helper that has not forked is taken to hang."""
_END_SECONDS = 10.0
"""Seconds for a process to end that was killed."""
_MAX_ANSWER_BYTES = 2**24
_STOPPED = Refused("the item needs too much time or memory to decode")
_ITEM_BYTES = {"float32": 4, "int64": 8, "uint8": 1}

logger = logging.getLogger(__name__)


class Decoders:
    """The helper process that loads the model's processor and forks for each item; started again when it dies."""

    def __init__(self, settings: MediaSettings) -> None:
        self._settings = settings
        self._popen: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._ready: asyncio.Task[DecoderReady] | None = None

    async def ready(self) -> DecoderReady:
        """Wait until the processor is loaded; raises `ConfigError` if it cannot be, and `MediaUnavailable`."""
        if self._ready is None or (self._popen is not None and self._popen.poll() is not None):
            self._start()
        assert self._ready is not None
        ready = await asyncio.shield(self._ready)
        if ready.error:
            raise ConfigError(ready.error)
        return ready

    async def decode(self, data: bytes, order: DecodeOrder, open_target: Callable[[int], int]) -> Decoded | Refused:
        """Decode a file into the file that `open_target` opens for a number of bytes. Nobody writes to it afterwards.

        Raises `MediaUnavailable`, and what `open_target` raises. Cancelling it kills the fork.
        """
        source = os.memfd_create("media", os.MFD_CLOEXEC)
        try:
            await asyncio.to_thread(_fill, source, data)
            has_died = False
            for _ in range(3):  # again, as the helper may just have died
                layouts = (await self.ready()).layouts
                os.lseek(source, 0, os.SEEK_SET)
                if (channel := self._fork(order, source)) is None:
                    continue
                with channel:
                    if (pid := await self._begun(channel)) is None:
                        continue
                    answer = await self._answer(channel, pid, order, layouts, open_target)
                if answer is not None:
                    return answer
                if has_died:  # again: the item's fault
                    return _STOPPED
                has_died = True
            raise MediaUnavailable("images and videos cannot be decoded at the moment; try again")
        finally:
            os.close(source)

    def close(self) -> None:
        """Stop the helper, and with it its forks."""
        if self._control is not None:
            self._control.close()
        if self._popen is not None and self._popen.poll() is None:
            self._popen.kill()
            self._popen.wait()
        if self._ready is not None:
            self._ready.cancel()
        self._control = self._popen = self._ready = None

    def _start(self) -> None:
        if self._popen is not None:
            logger.warning("the decoder's process died; starting it again")
        self.close()
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.setblocking(False)
        with theirs:
            self._popen = subprocess.Popen(
                [sys.executable, "-P", "-c", _HELPER, str(theirs.fileno())],
                stdin=subprocess.PIPE,
                pass_fds=(theirs.fileno(),),
                # Threads do not survive a fork.
                env={
                    **environment(),
                    "OPENBLAS_NUM_THREADS": "1",
                    "OMP_NUM_THREADS": "1",
                    "TOKENIZERS_PARALLELISM": "false",
                    "TRANSFORMERS_VERBOSITY": "critical",
                    "HF_HUB_OFFLINE": "1",
                },
            )
        assert self._popen.stdin is not None
        with contextlib.suppress(BrokenPipeError), self._popen.stdin:
            self._popen.stdin.write(pickle.dumps((os.getpid(), self._settings)))
        self._ready = asyncio.create_task(self._first_message(self._control))

    async def _first_message(self, control: socket.socket) -> DecoderReady:
        message = await asyncio.get_running_loop().sock_recv(control, 2**20)
        if not message:
            raise MediaUnavailable("the decoder's process died while it loaded the model's processor")
        return msgspec.msgpack.decode(message, type=DecoderReady)

    def _fork(self, order: DecodeOrder, source: int) -> socket.socket | None:
        """Return the connection to a new fork; None: the helper is dead, or hangs and was killed."""
        assert self._control is not None
        mine, theirs = socket.socketpair()
        mine.setblocking(False)
        with theirs:
            try:
                socket.send_fds(self._control, [msgspec.msgpack.encode(order)], [theirs.fileno(), source])
            except OSError:
                mine.close()
                self.close()
                return None
        return mine

    async def _begun(self, channel: socket.socket) -> int | None:
        """Return the id of the fork that has the order; None: there is none."""
        try:
            async with asyncio.timeout(_SILENT_SECONDS):
                return int.from_bytes(await _received(channel, 4), "big")
        except (EOFError, ConnectionResetError):
            return None
        except TimeoutError:
            logger.warning("the decoder's process did not respond for %g s", _SILENT_SECONDS)
            self.close()
            return None

    async def _answer(
        self,
        channel: socket.socket,
        pid: int,
        order: DecodeOrder,
        layouts: Mapping[str, ItemLayout],
        open_target: Callable[[int], int],
    ) -> Decoded | Refused | None:
        """Return a fork's answer, when it has written the arrays and ended; None: it died, but not because it took too
        long.

        What the item's file has made of the fork is not known: the answer is checked, and the fork is killed.
        """
        begun = time.monotonic()
        answer: Decoded | Refused = Refused("the item cannot be decoded")
        try:
            async with asyncio.timeout(order.seconds * _WALL_CLOCK_FACTOR):
                if (length := int.from_bytes(await _received(channel, 4), "big")) > _MAX_ANSWER_BYTES:
                    return answer
                given: Decoded | Refused = msgspec.msgpack.decode(
                    await _received(channel, length), type=Decoded | Refused
                )
                if isinstance(given, Decoded):
                    if not _is_valid(given, order, layouts):
                        return answer
                    target = open_target(given.num_bytes)
                    resource.prlimit(pid, resource.RLIMIT_FSIZE, (given.num_bytes, given.num_bytes))
                    socket.send_fds(channel, [b"\0"], [target])
                    if await _received(channel, 1) != WRITTEN:
                        raise MediaUnavailable("there is not enough shared memory for images and videos; try again")
                answer = given
        except UNDECODABLE:
            return answer
        except (EOFError, ConnectionError, ProcessLookupError, TimeoutError):
            return None if time.monotonic() - begun < order.seconds else _STOPPED
        finally:
            await _end(pid)
        return answer


async def _received(channel: socket.socket, count: int) -> bytes:
    """The next bytes of a fork. Raises `EOFError` and `ConnectionError`."""
    received, loop = bytearray(), asyncio.get_running_loop()
    while len(received) < count:
        if not (part := await loop.sock_recv(channel, min(count - len(received), 2**18))):
            raise EOFError
        received += part
    return bytes(received)


def _fill(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
    os.lseek(descriptor, 0, os.SEEK_SET)


async def _end(pid: int) -> None:
    """Kill a process, and wait until none of its threads can write any more. Raises `MediaUnavailable`.

    Its descriptor says so at once. To ask /proc about a process that ends may take the kernel many milliseconds.
    """
    descriptor, loop, has_ended = None, asyncio.get_running_loop(), asyncio.Event()
    try:
        os.kill(pid, signal.SIGKILL)  # first: there may be no descriptor left
        descriptor = os.pidfd_open(pid)
        loop.add_reader(descriptor, has_ended.set)
        async with asyncio.timeout(_END_SECONDS):
            await has_ended.wait()
    except ProcessLookupError:
        return
    except OSError as error:  # also if it does not end in time
        logger.warning("whether a decoding process has ended is not known: %r", error)
        raise MediaUnavailable("images and videos cannot be decoded at the moment; try again") from None
    finally:
        if descriptor is not None:
            loop.remove_reader(descriptor)
            os.close(descriptor)


def _is_valid(answer: Decoded, order: DecodeOrder, layouts: Mapping[str, ItemLayout]) -> bool:
    """Whether the arrays lie in the file one after the other, and are such as the model's processor makes."""
    if (layout := layouts.get(order.layout)) is None or bool(answer.grids) != layout.has_grids:
        return False
    names = {array.name for array in answer.arrays}
    required = {name for name, array in layout.arrays.items() if not array.is_optional}
    if len(names) != len(answer.arrays) or not required <= names <= layout.arrays.keys():
        return False
    end = 0
    for array in answer.arrays:
        if array.start % ALIGNMENT or array.start < end or min(array.shape, default=1) < 0:
            return False
        expected = layout.arrays[array.name]
        if (array.dtype, len(array.shape)) != (expected.dtype, expected.rank):
            return False
        if expected.width is not None and array.shape[-1] != expected.width:
            return False
        size = _ITEM_BYTES[array.dtype]
        for length in array.shape:
            size *= length
        end = array.start + size
    return end == answer.num_bytes <= order.max_bytes and all(min(grid) > 0 for grid in answer.grids)
