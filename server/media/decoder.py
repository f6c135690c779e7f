"""A decoder's process: loads the model's processor once, then forks for each item. One fork waits for the next item.

A fork that decodes an item has seen no other item, is confined (see `confinement`), and ends with it: whatever a file
does to it, it does to nobody else. It gets the item's file open, and the file for the result when it has said how much
it will write.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import importlib
import logging
import os
import pickle
import select
import signal
import socket
import sys
import warnings
from collections.abc import Sequence
from typing import Any, Literal, NoReturn, cast

import msgspec
from numpy.typing import NDArray
from PIL import Image

from quire.engine.process import current_process, log
from quire.engine.protocol.errors import ConfigError
from quire.engine.protocol.media import MediaArray
from quire.server.media import documents, images
from quire.server.media.confinement import confine, end_with_parent
from quire.server.media.decoding import (
    ALIGNMENT,
    NO_SPACE,
    ORDER_BYTES,
    WRITTEN,
    ArrayLayout,
    Decoded,
    DecodeOrder,
    DecoderReady,
    ItemLayout,
    Refused,
)
from quire.server.media.images import MediaRefused
from quire.server.media.processor import ProcessedItem, Processor
from quire.server.media.types import MediaFormat, MediaSettings

_MEMORY = {"image": 2**31, "video": 2**32}
"""Bytes of memory for an item, in addition to what the process has."""
_NICENESS = 10
"""Lowers the scheduling priority: streams come first."""
_ENCODINGS = ("ascii", "latin_1", "utf_8", "utf_16", "utf_16_le", "utf_16_be", "cp1252")
"""Of texts in pictures; a fork can import nothing."""

Arrays = dict[str, NDArray[Any]]
ArrayType = Literal["float32", "int64", "uint8"]

logger = logging.getLogger(__name__)


def main() -> None:
    """Main function of the process, whose argument is the socket that it gets its orders from."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    current_process.set_name("quire-decoder")
    log.setup("warning", "decoder")
    parent: int
    settings: MediaSettings
    parent, settings = pickle.load(sys.stdin.buffer)
    end_with_parent(parent)
    control = socket.socket(fileno=int(sys.argv[1]))
    os.nice(_NICENESS)
    warnings.simplefilter("ignore")  # libraries', about how this program calls them
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        try:
            with current_process.imports():
                formats, pdfium = images.register(), documents.register()
                processor = Processor(settings)
                for name in _ENCODINGS:
                    importlib.import_module(f"encodings.{name}")
        except ConfigError as error:
            control.send(msgspec.msgpack.encode(DecoderReady(MediaFormat("", ""), str(error))))
            return
        gc.collect()
        gc.freeze()
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the forks
        ready = DecoderReady(processor.format, counts_images=processor.counts_images)
        ready.layouts = {kind: _layout(items) for kind, items in processor.examples.items()}
        control.send(msgspec.msgpack.encode(ready))
        closed = select.poll()
        closed.register(control, select.POLLHUP)
        helper = os.getpid()
        while not closed.poll(0):
            is_busy, idle = os.pipe()
            if os.fork() == 0:
                os.close(is_busy)
                end_with_parent(helper)
                _decode(control, idle, formats, pdfium, processor)
            os.close(idle)
            os.read(is_busy, 1)  # until the fork closes its end: it has an order, or has died
            os.close(is_busy)


def _decode(control: socket.socket, idle: int, formats: tuple[str, ...], pdfium: Any, processor: Processor) -> NoReturn:
    """Main function of a fork, which waits for an order."""
    code = 1
    gc.disable()
    try:
        with contextlib.suppress(Exception):
            processor.image(Image.new("RGB", (64, 64)), {})  # touches the memory that it needs
        encoded, descriptors, _, _ = socket.recv_fds(control, ORDER_BYTES, 2)
        control.close()
        os.close(idle)
        if not encoded:
            os._exit(0)  # the media process has ended
        channel = socket.socket(fileno=descriptors[0])
        channel.sendall(os.getpid().to_bytes(4, "big"))
        order = msgspec.msgpack.decode(encoded, type=DecodeOrder)
        with open(os.devnull, "r+b", buffering=0) as nothing:  # libraries write to standard error
            for each in (0, 1, 2):
                os.dup2(nothing.fileno(), each)
        confine(_MEMORY[order.kind], order.seconds, opens_files=False, file_bytes=order.max_bytes)
        answer, arrays = _answer(order, descriptors[1], formats, pdfium, processor)
        encoded = msgspec.msgpack.encode(answer)
        channel.sendall(len(encoded).to_bytes(4, "big") + encoded)
        if isinstance(answer, Decoded):
            _, (target,), _, _ = socket.recv_fds(channel, 1, 1)
            channel.sendall(_write(answer, arrays, target))
        code = 0
    finally:
        os._exit(code)


def _answer(
    order: DecodeOrder, source: int, formats: tuple[str, ...], pdfium: Any, processor: Processor
) -> tuple[Decoded | Refused, Arrays]:
    try:
        with open(source, "rb") as file:
            if order.kind == "video":
                limits = order.max_pixels, order.max_bytes
                processed = processor.video(file, order.options, *limits, is_array=order.is_array)
                return _described(processed, processed.arrays["pixel_values_videos"].size // 3, order.max_bytes)
            num_pages = 1
            if order.is_array:
                return _described(processor.embeds(file.read()), 0, order.max_bytes)
            if order.page is not None and file.peek(len(documents.BEGINNING)).startswith(documents.BEGINNING):
                image, num_pages = documents.render_page(pdfium, file.read(), order.page, order.max_pixels)
            else:
                image = images.decode_image(file, formats, order.max_pixels, processor.background)
        try:
            processed = processor.image(
                image, order.options, among_several=order.among_several, max_bytes=order.max_bytes
            )
        except (MediaRefused, MemoryError):
            raise
        except Exception:
            raise MediaRefused(
                f"this model's processor does not accept a picture of {image.width} × {image.height} pixels"
                + " with these options" * bool(order.options)
            ) from None
        return _described(processed, image.width * image.height, order.max_bytes, num_pages)
    except MediaRefused as refusal:
        return Refused(str(refusal)), {}
    except MemoryError:
        return Refused("the item needs too much memory to decode"), {}


def _described(processed: ProcessedItem, num_pixels: int, max_bytes: int, num_pages: int = 1) -> tuple[Decoded, Arrays]:
    """Return the answer, and its arrays, each of which begins at a multiple of `ALIGNMENT`. Raises `MediaRefused`."""
    arrays, position = [], 0
    for name, array in processed.arrays.items():
        position += -position % ALIGNMENT
        arrays.append(MediaArray(name, cast(ArrayType, array.dtype.name), array.shape, position))
        position += array.nbytes
    if position > max_bytes:
        raise MediaRefused(f"the processed item has {position} bytes; at most {max_bytes} are allowed")
    facts = processed.text, processed.grids, processed.seconds_per_frame, num_pixels, num_pages
    return Decoded(tuple(arrays), position, *facts), processed.arrays


def _write(answer: Decoded, arrays: Arrays, target: int) -> bytes:
    """Write the arrays; returns `WRITTEN` or `NO_SPACE`."""
    try:
        with open(target, "wb") as file:
            for each in answer.arrays:
                file.seek(each.start)
                file.write(arrays[each.name].data)
            file.truncate(answer.num_bytes)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        return NO_SPACE
    return WRITTEN


def _layout(items: Sequence[ProcessedItem]) -> ItemLayout:
    """What items of several sizes have in common."""
    arrays = {}
    for name in {name for item in items for name in item.arrays}:
        found = [item.arrays[name] for item in items if name in item.arrays]
        widths = {array.shape[-1] if array.ndim else None for array in found}
        width = widths.pop() if len(widths) == 1 else None
        arrays[name] = ArrayLayout(found[0].dtype.name, found[0].ndim, width, is_optional=len(found) < len(items))
    return ItemLayout(arrays, bool(items[0].grids))
