"""The server's listening socket, opened before anything slow starts."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
import stat
from collections.abc import Iterator
from typing import Any

from quire.engine.protocol.errors import ConfigError
from quire.server.cli.takeover import Predecessor
from quire.server.config.server_options import ServerOptions

_BACKLOG = 2048

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def listen(options: ServerOptions) -> Iterator[tuple[socket.socket, Predecessor | None]]:
    """Open a listening socket; raises `ConfigError` if the address is not available. Early connections wait in its
    queue. With `--takeover` it is the socket of the running server, if there is one.
    """
    family, where = (socket.AF_UNIX, options.uds) if options.uds is not None else _resolve(options.host, options.port)
    predecessor = Predecessor.find(where) if options.takeover else None
    if options.takeover and predecessor is None:
        logger.info("--takeover: no server runs there yet; starting the first one")
    if predecessor is not None:
        listener = predecessor.listener
    elif isinstance(where, str):
        listener = _unix(where)
    else:
        listener = _tcp(options, family, where)
    try:
        yield listener, predecessor
    finally:
        if predecessor is not None:
            predecessor.close()
        listener.close()
        if options.uds is not None and _is_stale(options.uds):  # nobody has taken over
            with contextlib.suppress(FileNotFoundError):
                os.unlink(options.uds)


def address(listener: socket.socket, is_tls: bool = False) -> str:
    """Return the URL of a listening socket."""
    name = listener.getsockname()
    if listener.family == socket.AF_UNIX:
        return f"unix:{name}"
    host, port = name[:2]
    return f"http{'s' * is_tls}://{f'[{host}]' if ':' in host else host}:{port}"


def _resolve(host: str, port: int) -> tuple[socket.AddressFamily, tuple[Any, ...]]:
    if not 0 <= port < 65536:
        raise ConfigError(f"--port {port}: must be from 0 to 65535")
    try:
        family, *_, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        return family, where
    except (socket.gaierror, UnicodeError) as error:  # UnicodeError: not a valid host name
        raise ConfigError(f"--host {host}: {getattr(error, 'strerror', None) or 'not a valid host name'}") from None


def _tcp(options: ServerOptions, family: socket.AddressFamily, where: tuple[Any, ...]) -> socket.socket:
    host, port = options.host, options.port
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(where)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"port {port} on {host} is in use; choose another with --port (0: any free port)"
                + "; --takeover needs the --host and --port of the running server" * options.takeover
            ) from None
        raise ConfigError(f"cannot listen on {host} port {port} (--host, --port): {error.strerror}") from None
    return listener


def _unix(path: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if _is_stale(path):
            os.unlink(path)
        listener.bind(path)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(f"--uds {path}: cannot listen on this path: {error.strerror or error}") from None
    return listener


def _is_stale(path: str) -> bool:
    """Return whether this is a leftover socket that nobody listens on."""
    if not os.path.exists(path) or not stat.S_ISSOCK(os.stat(path).st_mode):
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        return probe.connect_ex(path) == errno.ECONNREFUSED
