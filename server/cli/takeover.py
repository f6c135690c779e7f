"""`quire serve --takeover`: a server gets the listening socket of the one that runs, and the latter drains.

A running server offers its listening socket (SCM_RIGHTS) at an abstract Unix socket, which belongs to the network
namespace, as its port does, and leaves no file behind. Both sides check that the other one is of the same user
(SO_PEERCRED). The successor accepts no connections until it can answer; then it sends `_READY`, and the running server
stops to accept any. Connections that nobody has accepted yet stay in the queue of the socket that both have.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import socket
import struct
import threading
from collections.abc import Callable
from typing import Any

from quire.engine.protocol.errors import ConfigError

_LISTENER, _READY, _ENDING = b"listener", b"ready", b"ending"
_ANSWER_SECONDS = 10.0
"""Time for the other server to answer."""
_RETRY_SECONDS = 1.0
"""Time after an error, until the offer goes on."""

logger = logging.getLogger(__name__)


class Offer:
    """Offers the listening socket of this server to a successor, in a thread, until `close`."""

    def __init__(self, listener: socket.socket, on_taken: Callable[[], None]) -> None:
        """`on_taken` is called in the thread, when a successor accepts all further connections."""
        self._listener, self._on_taken = listener, on_taken
        self._is_closed = threading.Event()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._socket.bind(_name(listener.getsockname()))
            self._socket.listen()
        except OSError as error:
            self._socket.close()
            logger.warning("no other server can take over from this one (--takeover): %s", error.strerror)
            return
        threading.Thread(target=self._run, name="takeover", daemon=True).start()

    def close(self) -> None:
        """Offer nothing any more. A successor that has the socket keeps it."""
        self._is_closed.set()
        with contextlib.suppress(OSError):  # it is closed already
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._socket.close()

    def _run(self) -> None:
        while not self._is_closed.is_set():
            try:
                connection, _ = self._socket.accept()
                with connection:
                    is_taken = self._serve(connection)
            except OSError as error:  # such as when no files can be opened
                if not self._is_closed.wait(_RETRY_SECONDS):
                    logger.warning("--takeover has failed: %s; serving on", error.strerror)
                continue
            if is_taken:
                self._on_taken()
                return

    def _serve(self, connection: socket.socket) -> bool:
        """Hand the socket to a process; returns whether it accepts connections now."""
        if (user := _user(connection)) != os.getuid():
            logger.warning("a process of user %d is not allowed to take over (--takeover)", user)
            return False
        logger.info("another server is to take over (--takeover), when it is ready")
        socket.send_fds(connection, [_LISTENER], [self._listener.fileno()])
        if connection.recv(len(_READY)) != _READY:
            logger.warning("the server that was to take over (--takeover) has ended; serving on")
            return False
        self._socket.close()  # the successor's own offer has the same name
        with contextlib.suppress(OSError):
            connection.send(_ENDING)
        return True


class Predecessor:
    """The running server, whose listening socket this one has, too."""

    def __init__(self, connection: socket.socket, listener: socket.socket) -> None:
        self._connection = connection
        self.listener = listener

    @staticmethod
    def find(where: str | tuple[Any, ...]) -> Predecessor | None:
        """Return the server that listens at the address of a socket, or None. Raises `ConfigError` if its socket is not
        to be had.
        """
        with contextlib.ExitStack() as stack:
            connection = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            connection.settimeout(_ANSWER_SECONDS)
            try:
                connection.connect(_name(where))
                if (user := _user(connection)) != os.getuid():
                    raise ConfigError(f"--takeover: the running server is user {user}'s; start this one as that user")
                _, descriptors, _, _ = socket.recv_fds(connection, len(_LISTENER), 1)
            except ConnectionRefusedError:
                return None
            except TimeoutError:
                text = "another server is about to take over; wait until it is ready"
                raise ConfigError(f"--takeover: {text}") from None
            except OSError as error:
                raise ConfigError(f"--takeover: the running server does not answer: {error.strerror}") from None
            if not descriptors:
                raise ConfigError("--takeover: the running server refuses; its log says why")
            stack.pop_all()
            return Predecessor(connection, socket.socket(fileno=descriptors[0]))

    def end(self) -> None:
        """Let it end, as this server accepts connections now. It may have ended already."""
        with self._connection, contextlib.suppress(OSError):
            self._connection.send(_READY)
            self._connection.recv(len(_ENDING))

    def close(self) -> None:
        """Let it go on, unless `end` was called."""
        self._connection.close()


def _name(where: str | tuple[Any, ...]) -> str:
    """The abstract address of the offer of the socket that listens there."""
    address = os.path.realpath(where) if isinstance(where, str) else f"{where[0]}:{where[1]}"
    return f"\0quire-serve-{hashlib.sha256(address.encode()).hexdigest()[:32]}"


def _user(connection: socket.socket) -> int:
    """The user of the process at the other end."""
    _, user, _ = struct.unpack(
        "3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    )
    return int(user)
