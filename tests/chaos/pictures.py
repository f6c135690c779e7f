"""Pictures for the load, and a site from which they can be fetched."""

from __future__ import annotations

import base64
import copy
import io
import itertools
import struct
import threading
import zlib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self

import numpy as np
from PIL import Image

_PNG = "data:image/png;base64,"
_HEAD_BYTES = 33
"""Of a PNG: its signature and the first chunk, with the size."""
_numbers = itertools.count()


def _png(seed: int, width: int, height: int) -> bytes:
    """Noise in squares of 20 pixels."""
    shape = (-(-height // 20), -(-width // 20), 3)
    blocks = np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
    image = Image.fromarray(blocks.repeat(20, axis=0).repeat(20, axis=1)[:height, :width])
    image.save(file := io.BytesIO(), "PNG")
    return file.getvalue()


def _chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack("!I", len(content)) + kind + content + struct.pack("!I", zlib.crc32(kind + content))


def _another(png: bytes) -> bytes:
    """Another file with the same picture."""
    comment = _chunk(b"tEXt", b"Comment\0%d" % next(_numbers))
    return png[:_HEAD_BYTES] + comment + png[_HEAD_BYTES:]


def fresh(body: dict[str, Any]) -> dict[str, Any]:
    """The same request with other files, or addresses, of the same pictures."""
    body = copy.deepcopy(body)
    for part in body["messages"][0]["content"]:
        if part["type"] == "image_url":
            url = part["image_url"]["url"]
            if url.startswith(_PNG):
                url = _PNG + base64.b64encode(_another(base64.b64decode(url.removeprefix(_PNG)))).decode()
            else:
                url = f"{url}?{next(_numbers)}"
            part["image_url"]["url"] = url
    return body


class Site:
    """Serves pictures on this host."""

    def __init__(self) -> None:
        site, self._pictures = self, dict[str, bytes]()

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                found = site._pictures.get(self.path.partition("?")[0])
                self.send_response(404 if found is None else 200)
                self.send_header("Content-Length", str(len(found or b"")))
                self.end_headers()
                self.wfile.write(found or b"")

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def url(self, seed: int, width: int, height: int) -> str:
        """The address of a picture."""
        self._pictures[f"/{seed}.png"] = _png(seed, width, height)
        return f"{self._address}/{seed}.png"

    def missing(self) -> str:
        """An address where nothing is."""
        return f"{self._address}/nothing.png"

    def data_url(self, seed: int, width: int, height: int, *, cut: bool = False) -> str:
        """A picture in a data: URL; `cut`: only the first half of the file."""
        png = _png(seed, width, height)
        return _PNG + base64.b64encode(png[: len(png) // 2] if cut else png).decode()

    def bomb(self) -> str:
        """A small file that says that it has 10¹⁰ pixels, in a data: URL."""
        png = _png(0, 20, 20)
        size = struct.pack("!2I", 100_000, 100_000) + png[24:29]
        return _PNG + base64.b64encode(png[:8] + _chunk(b"IHDR", size) + png[_HEAD_BYTES:]).decode()

    @property
    def _address(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"
