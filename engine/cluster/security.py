"""Authentication and encryption of the ZMQ sockets between hosts: CurveZMQ, with keys derived from the cluster token.

Every host of a cluster has the same token, and therefore the same two key pairs: one for sockets that listen, one for
sockets that connect. A connection exists only if both sides hold the keys of the token; then all that it carries is
encrypted. ZMQ sockets on Unix sockets are left as they are, and so are the sockets of a cluster on one host without a
token, which listen on 127.0.0.1 only.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import threading
import time
from collections.abc import Sequence
from functools import cache
from queue import Empty, SimpleQueue
from typing import NamedTuple

import zmq
from zmq.utils import z85

from quire.engine.cluster.network import limit_retransmission, resolve_address
from quire.engine.process.log import printable
from quire.engine.protocol.errors import ConfigError

FRAME_BYTES = 1 << 20
"""Maximum size of a frame. Longer messages are split, so that a stranger cannot make a host buffer more."""
_OVERHEAD_BYTES = 1024
"""More than CurveZMQ and the handshake add to a frame."""
_HANDSHAKE_MS = 10_000
"""Time after which a connection without a completed handshake is closed."""
_CONNECT_MS = 3000
"""Time after which an attempt to connect is given up for another: by default minutes, if the address is gone."""
_LOG_SECONDS = 10.0
"""Minimum interval of log messages about the same kind of dropped messages."""
_POLL_MS = 1000
_FAILED = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
_CONNECTED = zmq.EVENT_CONNECTED | zmq.EVENT_ACCEPTED
EVENTS = _FAILED | _CONNECTED
"""Events of a socket's monitor that `Security.on_event` handles."""

logger = logging.getLogger(__name__)


class Keys(NamedTuple):
    """The key pairs of a token, in Z85."""

    server: bytes
    server_secret: bytes
    client: bytes
    client_secret: bytes


@cache
def derive(token: str) -> Keys:
    """Return the keys of a token. scrypt makes guessing short tokens from recorded traffic expensive."""
    secrets = hashlib.scrypt(token.encode(), salt=b"quire cluster token", n=1 << 14, r=8, p=1, dklen=64)
    server, client = z85.encode(secrets[:32]), z85.encode(secrets[32:])
    return Keys(zmq.curve_public(server), server, zmq.curve_public(client), client)


def split(message: bytes | memoryview) -> list[bytes | memoryview]:
    """Return a message as frames of at most `FRAME_BYTES`."""
    if len(message) <= FRAME_BYTES:
        return [message]
    view = memoryview(message)
    return [view[at : at + FRAME_BYTES] for at in range(0, len(view), FRAME_BYTES)]


def join(frames: Sequence[bytes]) -> bytes:
    """Return the message that was `split` into these frames."""
    return frames[0] if len(frames) == 1 else b"".join(frames)


class Dropped:
    """Counts dropped messages of one kind, and logs at most one line in `_LOG_SECONDS`."""

    def __init__(self, what: str) -> None:
        self.count = 0
        self._what = what
        self._next_log = 0.0

    def add(self, reason: object) -> None:
        self.count += 1
        if (now := time.monotonic()) >= self._next_log:
            self._next_log = now + _LOG_SECONDS
            logger.warning("%s: %s (%d so far)", self._what, printable(str(reason)), self.count)


class Security:
    """Binds and connects the sockets of a ZMQ context, securely if they are TCP sockets and there is a token.

    A thread authenticates the peers of listening sockets, logs the ones that fail, and ends with the context.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], token: str) -> None:
        """An empty `token` secures nothing."""
        self._keys = derive(token) if token else None
        self._monitors: SimpleQueue[zmq.Socket[bytes]] = SimpleQueue()
        self._rejected = Dropped("rejected a connection without the right --cluster-token")
        if self._keys is not None:
            authenticator = context.socket(zmq.REP)
            authenticator.bind("inproc://zeromq.zap.01")
            threading.Thread(target=self._run, args=(authenticator,), daemon=True, name="cluster-security").start()

    def bind(self, socket: zmq.Socket[bytes], url: str, *, monitor: bool = True) -> None:
        """Bind a socket. `monitor`: watch its connections; otherwise the caller passes its `EVENTS` to `on_event`."""
        if self._prepare(socket, url, monitor=monitor) and self._keys is not None:
            socket.curve_server = True
            socket.curve_publickey, socket.curve_secretkey = self._keys.server, self._keys.server_secret
            socket.setsockopt(zmq.ZAP_DOMAIN, b"cluster")
            socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        socket.bind(url)

    def connect(self, socket: zmq.Socket[bytes], url: str, *, monitor: bool = True) -> None:
        """Connect a socket; arguments as in `bind`.

        A host name is resolved again with each attempt to connect: orchestrators publish the name of a host after they
        have started others, and move it to another address when they restart the host.
        """
        has_ipv6 = None
        if url.startswith("tcp://"):
            try:
                has_ipv6 = ":" in resolve_address(url.removeprefix("tcp://").rpartition(":")[0].strip("[]"))
            except ConfigError as error:
                logger.warning("%s; trying again until it can be resolved", error)
                has_ipv6 = True  # then ZMQ takes addresses of both kinds
        if self._prepare(socket, url, monitor=monitor, has_ipv6=has_ipv6) and self._keys is not None:
            socket.curve_serverkey = self._keys.server
            socket.curve_publickey, socket.curve_secretkey = self._keys.client, self._keys.client_secret
        socket.connect(url)

    def on_event(self, event: int, value: int) -> bool:
        """Handle an event of a monitored socket (`value` is a file descriptor or an error number).

        Returns whether it is a handshake that failed.
        """
        if event & _CONNECTED:
            limit_retransmission(value)
        elif event & _FAILED:
            self._rejected.add(f"the handshake failed (ZMQ error {value})")
        return bool(event & _FAILED)

    def _prepare(self, socket: zmq.Socket[bytes], url: str, *, monitor: bool, has_ipv6: bool | None = None) -> bool:
        """Set the options of TCP sockets; returns whether it is one. `has_ipv6` by default as `url` looks."""
        if not url.startswith("tcp://"):
            return False
        socket.setsockopt(zmq.IPV6, int("[" in url if has_ipv6 is None else has_ipv6))
        socket.setsockopt(zmq.MAXMSGSIZE, FRAME_BYTES + _OVERHEAD_BYTES)
        socket.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
        socket.setsockopt(zmq.CONNECT_TIMEOUT, _CONNECT_MS)
        if monitor and self._keys is not None:
            self._monitors.put(socket.get_monitor_socket(EVENTS | zmq.EVENT_MONITOR_STOPPED))
        return True

    def _run(self, authenticator: zmq.Socket[bytes]) -> None:
        from zmq.utils.monitor import recv_monitor_message  # imports asyncio

        poller, monitors = zmq.Poller(), list[zmq.Socket[bytes]]()
        poller.register(authenticator, zmq.POLLIN)
        try:
            while True:
                ready = dict(poller.poll(_POLL_MS))
                if authenticator in ready:
                    self._authenticate(authenticator)
                for monitor in [each for each in monitors if each in ready]:
                    if (event := recv_monitor_message(monitor))["event"] == zmq.EVENT_MONITOR_STOPPED:
                        poller.unregister(monitor)
                        monitors.remove(monitor)
                        monitor.close(0)
                    else:
                        self.on_event(int(event["event"]), int(event["value"]))
                with contextlib.suppress(Empty):
                    while True:
                        monitors.append(self._monitors.get_nowait())
                        poller.register(monitors[-1], zmq.POLLIN)
        except zmq.ContextTerminated:
            pass
        finally:
            while not self._monitors.empty():
                monitors.append(self._monitors.get())
            for each in (authenticator, *monitors):
                each.close(0)

    def _authenticate(self, authenticator: zmq.Socket[bytes]) -> None:
        """Answer a request of libzmq (ZAP, rfc.zeromq.org/spec/27): only the client key of the token is accepted."""
        assert self._keys is not None
        version, sequence, _, address, _, mechanism, *credentials = authenticator.recv_multipart()
        is_accepted = mechanism == b"CURVE" and credentials == [z85.decode(self._keys.client)]
        if not is_accepted:
            self._rejected.add(address.decode(errors="replace"))
        status = (b"200", b"OK") if is_accepted else (b"400", b"unknown key")
        authenticator.send_multipart((version, sequence, *status, b"", b""))
