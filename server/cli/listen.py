"""The server's listening socket, opened before anything slow starts."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
from collections.abc import Iterator

from quire.engine.protocol.errors import ConfigError
from quire.server.config.server_options import ServerOptions

_BACKLOG = 2048


@contextlib.contextmanager
def listen(options: ServerOptions) -> Iterator[socket.socket]:
    """Open a listening socket; raises `ConfigError` if the address is not available. Early connections wait in its
    queue.
    """
    listener = _tcp(options.host, options.port) if options.uds is None else _unix(options.uds)
    try:
        yield listener
    finally:
        listener.close()
        if options.uds is not None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(options.uds)


def address(listener: socket.socket, is_tls: bool = False) -> str:
    """Return the URL of a listening socket."""
    name = listener.getsockname()
    if listener.family == socket.AF_UNIX:
        return f"unix:{name}"
    host, port = name[:2]
    return f"http{'s' * is_tls}://{f'[{host}]' if ':' in host else host}:{port}"


def _tcp(host: str, port: int) -> socket.socket:
    if not 0 <= port < 65536:
        raise ConfigError(f"--port {port}: must be from 0 to 65535")
    try:
        family, *_, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except (socket.gaierror, UnicodeError) as error:  # UnicodeError: not a valid host name
        raise ConfigError(f"--host {host}: {getattr(error, 'strerror', None) or 'not a valid host name'}") from None
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
