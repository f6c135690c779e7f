"""The control plane between hosts: one leader, and followers that join it.

Each follower has one TCP connection to the leader (ZMQ DEALER to ROUTER) for all messages, including heartbeats.
Messages are `[kind, body]`, or `[identity, kind, body]` on the leader's side. A thread owns the socket. A peer that
sends nothing for `LOST_SECONDS`, or whose connection closes, is lost, and does not reconnect by itself.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import logging
import os
import platform
import socket as sockets
import struct
import threading
import time
from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from quire.engine.protocol.errors import ConfigError

LOST_SECONDS = 5.0
"""Seconds without a message after which a peer is lost."""
_BEAT_SECONDS = 1.0
_LINGER_MS = 1000
"""Time for the last messages to be sent when a socket closes."""
_MAX_BYTES = 1 << 30
"""Maximum size of a message."""
_HELLO, _WELCOME, _BEAT, _BODY, _END = b"quire hello", b"W", b"A", b"B", b"E"
_WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
_HASHED = (
    "config.json",
    "*.index.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "*.jinja",
)
_SIOCGIFCONF, _IFREQ, _MAX_ADDRESSES = 0x8912, struct.Struct("@16s4x4s16x"), 1024
"""netdevice(7): the ioctl that lists every IPv4 address of the host with the interface's name."""

logger = logging.getLogger(__name__)


class Hello(msgspec.Struct, kw_only=True):
    """Description of a follower, sent when it joins."""

    name: str
    """Name in error messages: node 1 (10.0.0.2)."""
    number: int
    """Number by which the leader identifies it."""
    versions: dict[str, str] = {}
    model: dict[str, str] = {}
    """Hash or size of each file of the model."""
    body: bytes = b""
    """Additional data of the layer above."""


class LinkEnded(Exception):
    """The leader has ended, rejected this follower, or is lost; the text is the reason.

    The text is empty after a normal shutdown.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass
class _FollowerLink:
    identity: bytes
    hello: Hello
    fd: int
    last_heard: float
    """Time of the last message, on the monotonic clock."""


@dataclass
class _FramedSocket:
    """A ZMQ socket whose thread can also wait for messages of other threads and for closed connections."""

    kind: int
    ipv6: bool
    """Whether to use IPv6 in addition to IPv4."""
    outbox: SimpleQueue[Any] = field(default_factory=SimpleQueue)
    closed: set[int] = field(default_factory=set)
    """File descriptors of connections that have closed and were not handled yet."""

    def __post_init__(self) -> None:
        self.context = zmq.Context()
        self.zmq = self.context.socket(self.kind)
        self.zmq.set_hwm(0)
        self.zmq.setsockopt(zmq.LINGER, _LINGER_MS)
        self.zmq.setsockopt(zmq.MAXMSGSIZE, _MAX_BYTES)
        self.zmq.setsockopt(zmq.IPV6, int(self.ipv6))
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._open = threading.Lock()  # locked while the eventfd is written or closed
        self._is_open = True
        self._monitor = self.zmq.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._poller = zmq.Poller()
        for each in (self.zmq, self._wake_fd, self._monitor):
            self._poller.register(each, zmq.POLLIN)

    def put(self, message: Any) -> None:
        """Queue a message for the thread that owns the socket, from any thread. Dropped after the socket has closed."""
        self.outbox.put(message)
        with self._open:
            if self._is_open:
                os.eventfd_write(self._wake_fd, 1)

    def poll(self, seconds: float) -> None:
        """Wait for messages, and record closed connections."""
        ready = dict(self._poller.poll(int(max(0.0, seconds) * 1000) + 1))
        if self._wake_fd in ready:
            os.eventfd_read(self._wake_fd)
        self.update_closed()

    def update_closed(self) -> None:
        while self._monitor.poll(0):
            self.closed.add(int(recv_monitor_message(self._monitor)["value"]))

    def receive(self) -> list[zmq.Frame] | None:
        """Return a message that has arrived, or None."""
        try:
            return self.zmq.recv_multipart(zmq.DONTWAIT, copy=False)
        except zmq.Again:
            return None

    def close(self) -> None:
        """Close the socket after queued messages are sent or `_LINGER_MS` has passed."""
        self.zmq.disable_monitor()
        self._monitor.close(0)
        self.zmq.close()
        self.context.term()
        with self._open:
            self._is_open = False
            os.close(self._wake_fd)


class Leader:
    """The side that followers join. The callbacks are called from its thread and must not block."""

    def __init__(
        self,
        port: int,
        expected: Iterable[int],
        *,
        on_lost: Callable[[int, str], None],
        on_message: Callable[[int, bytes], None],
        on_join: Callable[[Hello], None] | None = None,
        noun: str = "node",
        flag: str = "--master-port",
    ) -> None:
        """Listen on `port` of every interface (0: any free port, see `port`) for followers with `expected` numbers.

        The text passed to `on_lost` names the follower and the reason. A lost follower can join again if `on_join` is
        given. `noun` and `flag` name a follower and the port in errors. Raises `ConfigError` if the port is in use.
        """
        self._expected = tuple(expected)
        self._on_lost, self._on_message, self._on_join, self._noun = on_lost, on_message, on_join, noun
        self._socket = _FramedSocket(zmq.ROUTER, ipv6=sockets.has_dualstack_ipv6())
        self._socket.zmq.setsockopt(zmq.ROUTER_MANDATORY, 1)
        try:
            if port:
                self._socket.zmq.bind(f"tcp://*:{port}")
            self.port = port or self._socket.zmq.bind_to_random_port("tcp://*")
        except zmq.ZMQError as error:
            self._socket.close()
            raise ConfigError(
                f"{noun}s cannot join at port {port} of this host: {os.strerror(error.errno or 0).lower()}; "
                f"choose another with {flag}"
            ) from None
        self._peers: dict[int, _FollowerLink] = {}
        """The followers that have joined; only the thread modifies it."""
        self._changed = threading.Condition()
        self._lost: dict[int, str] = {}
        """Reason for each lost follower; removed when it joins again."""
        self._thread = threading.Thread(target=self._run, daemon=True, name="cluster-leader")
        self._thread.start()

    def wait(self, seconds: float) -> dict[int, Hello]:
        """Wait until all followers have joined; raises `ConfigError` if one does not, or is lost."""
        logger.info("waiting up to %.0f s for %s at port %d", seconds, _numbered(self._noun, self._expected), self.port)
        with self._changed:
            self._changed.wait_for(lambda: self._lost or len(self._peers) == len(self._expected), seconds)
            if self._lost:
                raise ConfigError(next(iter(self._lost.values())))
            joined = {number: peer.hello for number, peer in self._peers.items()}
        missing = [number for number in self._expected if number not in joined]
        if missing:
            names = ", ".join(hello.name for _, hello in sorted(joined.items())) or "nobody else"
            raise ConfigError(
                f"{_numbered(self._noun, missing)} did not join at port {self.port} within {seconds:.0f} s: "
                f"{len(joined)} of {len(self._expected)} came ({names})"
            )
        return joined

    @staticmethod
    def check(local: Hello, remote: Hello) -> None:
        """Raise `ConfigError` if a remote host's versions or model files differ from the local ones."""
        for name, ours in local.versions.items():
            if (other := remote.versions.get(name)) != ours:
                raise ConfigError(
                    f"{remote.name} has {name} {other or 'in no version'}, and {local.name} has {ours}; "
                    "install the same on every host"
                )
        for name in sorted(local.model.keys() | remote.model.keys()):
            here, there = local.model.get(name), remote.model.get(name)
            if here != there:
                what = f"no {name}" if there is None else f"a {name}" if here is None else f"other bytes in {name}"
                raise ConfigError(
                    f"{remote.name} has {what}, unlike {local.name}; copy the same model files to every host"
                )

    def fail(self, number: int, reason: str) -> None:
        """Record that this follower will not join: `wait` raises the reason."""
        with self._changed:
            if number not in self._peers:
                self._lost.setdefault(number, reason)
                self._changed.notify_all()

    def send(self, number: int, body: bytes) -> None:
        """Send a message to a follower; dropped if it is lost."""
        self._socket.put((number, _BODY, body))

    def reject(self, number: int, reason: str) -> None:
        """Disconnect a follower with a reason; `on_lost` is not called for it."""
        self._socket.put((number, _END, reason.encode()))

    def close(self, reason: str = "") -> None:
        """Send every follower the end of the connection, with a reason after a failure."""
        if self._thread.is_alive():
            self._socket.put((None, _END, reason.encode()))
            if threading.current_thread() is not self._thread:
                self._thread.join()

    def _run(self) -> None:
        try:
            self._serve()
        except Exception as error:  # otherwise failures would go unnoticed
            logger.exception("communication with the other hosts failed")
            for peer in list(self._peers.values()):
                self._on_dead(peer, f"{peer.hello.name} was lost: {type(error).__name__}: {error}")
            self._socket.close()

    def _serve(self) -> None:
        socket, next_beat = self._socket, time.monotonic()
        while True:
            socket.poll(next_beat - time.monotonic())
            while (frames := socket.receive()) is not None:
                self._handle(frames)
            while True:
                try:
                    number, kind, body = socket.outbox.get_nowait()
                except Empty:
                    break
                if number is None:
                    for each in list(self._peers):
                        self._send(each, kind, body)
                    return socket.close()
                self._send(number, kind, body)
                if kind == _END:
                    with self._changed:
                        self._peers.pop(number, None)
            if (now := time.monotonic()) >= next_beat:
                next_beat = now + _BEAT_SECONDS
                for number in list(self._peers):
                    self._send(number, _BEAT, b"")
            self._find_lost()

    def _handle(self, frames: list[zmq.Frame]) -> None:
        if len(frames) != 3:
            return
        identity, kind, body = (frame.bytes for frame in frames)
        if kind == _HELLO:
            return self._join(identity, body, frames[2])
        peer = next((peer for peer in self._peers.values() if peer.identity == identity), None)
        if peer is None:
            return
        peer.last_heard = time.monotonic()
        if kind == _BODY:
            self._on_message(peer.hello.number, body)
        elif kind == _END:
            reason = body.decode(errors="replace")
            self._on_dead(peer, f"{peer.hello.name} {f'has ended: {reason}' if reason else 'has left'}")

    def _join(self, identity: bytes, body: bytes, frame: zmq.Frame) -> None:
        try:
            hello = msgspec.msgpack.decode(body, type=Hello)
        except msgspec.DecodeError:
            return
        number = hello.number
        known = self._peers.get(number)
        if known is None or known.identity != identity:
            rejection = ""
            if number not in self._expected:
                rejection = f"{hello.name}: {_numbered(self._noun, self._expected)} can join here, not {number}"
            elif known is not None:
                rejection = f"{hello.name} cannot join: {known.hello.name} is {self._noun} {number} already"
            elif number in self._lost and self._on_join is None:
                rejection = f"{hello.name} cannot join again"
            if rejection:
                logger.warning("%s", rejection)
                return self._reply(identity, _END, rejection.encode())
            fd = int(frame.get(zmq.SRCFD))
            self._socket.update_closed()
            self._socket.closed.discard(fd)  # of an earlier connection
            with self._changed:
                self._lost.pop(number, None)
                self._peers[number] = _FollowerLink(identity, hello, fd, time.monotonic())
                self._changed.notify_all()
            logger.info("%s has joined", hello.name)
            if self._on_join is not None:
                self._on_join(hello)
        self._reply(identity, _WELCOME, b"")

    def _find_lost(self) -> None:
        """Detect lost followers. Called after all received messages are handled."""
        now = time.monotonic()
        for peer in list(self._peers.values()):
            if peer.fd in self._socket.closed:
                self._on_dead(peer, f"{peer.hello.name} was lost: its connection has closed")
            elif now - peer.last_heard > LOST_SECONDS:
                self._on_dead(peer, f"{peer.hello.name} was lost: nothing was heard of it for {LOST_SECONDS:.0f} s")
        self._socket.closed.clear()

    def _on_dead(self, peer: _FollowerLink, reason: str) -> None:
        number = peer.hello.number
        with self._changed:
            del self._peers[number]
            self._lost[number] = reason
            self._changed.notify_all()
        self._on_lost(number, reason)

    def _send(self, number: int, kind: bytes, body: bytes) -> None:
        if (peer := self._peers.get(number)) is not None:
            self._reply(peer.identity, kind, body)

    def _reply(self, identity: bytes, kind: bytes, body: bytes) -> None:
        try:
            self._socket.zmq.send_multipart((identity, kind, body))
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:  # it has disconnected; `closed` has its connection
                raise


class Follower:
    """The side that joins a leader. `on_lost` is called from its thread and must not block."""

    def __init__(
        self,
        address: str,
        port: int,
        hello: Hello,
        *,
        seconds: float,
        on_lost: Callable[[str], None],
        leader: str | None = None,
        remedy: str = "see that it is started, and that --master-addr and --master-port are its own",
    ) -> None:
        """Join the leader, retrying for up to `seconds`.

        `leader` is its name in errors. Raises `ConfigError` with `remedy` if it does not answer in time, and
        `LinkEnded` if it rejects this follower.
        """
        self._leader, self._on_lost = leader or f"the host at {address}:{port}", on_lost
        self._hello = msgspec.msgpack.encode(hello)
        self._inbox: SimpleQueue[bytes | LinkEnded] = SimpleQueue()
        self._answered = threading.Event()
        self._is_accepted = False
        self.ended: LinkEnded | None = None
        """What `receive` raises after the remaining messages."""
        self._last_heard = 0.0
        self._socket = _FramedSocket(zmq.DEALER, ipv6=":" in address)
        self._socket.zmq.setsockopt(zmq.RECONNECT_IVL, 200)
        self._socket.zmq.connect(f"tcp://{f'[{address}]' if ':' in address else address}:{port}")
        self._thread = threading.Thread(target=self._run, daemon=True, name="cluster-follower")
        self._thread.start()
        logger.info("%s: trying to join %s at %s:%d for up to %.0f s", hello.name, self._leader, address, port, seconds)
        try:
            if not self._answered.wait(seconds):
                raise ConfigError(f"{self._leader} did not answer at {address}:{port} within {seconds:.0f} s; {remedy}")
            if not self._is_accepted:
                self.receive(None)
        except BaseException:
            self.close()
            raise
        logger.info("%s has joined %s", hello.name, self._leader)

    def receive(self, timeout: float | None) -> bytes:
        """Return the next message; raises `TimeoutError`, and `LinkEnded` after the connection has ended."""
        try:
            message = self._inbox.get(timeout=timeout)
        except Empty:
            raise TimeoutError from None
        if isinstance(message, LinkEnded):
            self._inbox.put(message)
            raise message
        return message

    def send(self, body: bytes) -> None:
        """Send a message to the leader; dropped if the connection has ended."""
        self._socket.put((_BODY, body))

    def close(self, reason: str = "") -> None:
        """Leave; `reason` is sent to the leader after a failure."""
        if self._thread.is_alive():
            self._socket.put((_END, reason.encode()))
            if threading.current_thread() is not self._thread:
                self._thread.join()

    def _run(self) -> None:
        socket, next_beat = self._socket, time.monotonic()
        is_over = False
        while True:
            socket.poll(next_beat - time.monotonic())
            while (frames := socket.receive()) is not None:
                if len(frames) == 2 and not is_over:
                    is_over = self._handle(*(frame.bytes for frame in frames))
            while True:
                try:
                    kind, body = socket.outbox.get_nowait()
                except Empty:
                    break
                if not is_over and (kind != _END or self._is_accepted):
                    socket.zmq.send_multipart((kind, body))
                if kind == _END:
                    if not self._is_accepted:
                        socket.zmq.setsockopt(zmq.LINGER, 0)
                    return socket.close()
            if (now := time.monotonic()) >= next_beat:
                next_beat = now + _BEAT_SECONDS
                if not is_over:
                    socket.zmq.send_multipart((_BEAT, b"") if self._is_accepted else (_HELLO, self._hello))
            if self._is_accepted and not is_over:
                is_over = self._is_lost()
            socket.closed.clear()

    def _handle(self, kind: bytes, body: bytes) -> bool:
        """Handle a message; returns whether it ends the connection."""
        self._last_heard = time.monotonic()
        if kind == _BODY:
            self._inbox.put(body)
        elif kind == _WELCOME:
            self._is_accepted = True
            self._answered.set()
        elif kind == _END:
            self._end(LinkEnded(body.decode(errors="replace")))
            self._answered.set()
        return kind == _END

    def _is_lost(self) -> bool:
        """Detect a lost leader. Called after all received messages are handled."""
        if self._socket.closed:
            how = "its connection has closed"
        elif time.monotonic() - self._last_heard > LOST_SECONDS:
            how = f"nothing was heard of it for {LOST_SECONDS:.0f} s"
        else:
            return False
        reason = f"{self._leader} was lost: {how}"
        self._end(LinkEnded(reason))
        self._on_lost(reason)
        return True

    def _end(self, ended: LinkEnded) -> None:
        self.ended = ended
        self._inbox.put(ended)


def address_towards(host: str, seconds: float = 0.0) -> str:
    """Return QUIRE_HOST_IP, or this host's address on the interface that reaches `host`.

    Name resolution is retried for `seconds`. Raises `ConfigError`.
    """
    if own := os.environ.get("QUIRE_HOST_IP"):
        return own
    deadline = time.monotonic() + seconds
    while True:
        try:
            family, kind, _, _, target = sockets.getaddrinfo(host, 9, type=sockets.SOCK_DGRAM)[0]
            with sockets.socket(family, kind) as probe:
                probe.connect(target)  # sends nothing
                return str(probe.getsockname()[0])
        except OSError as error:
            if time.monotonic() >= deadline:
                raise ConfigError(
                    f"{host} cannot be reached from this host: {(error.strerror or str(error)).lower()}; check the "
                    "address, or give this host's own in QUIRE_HOST_IP"
                ) from None
        time.sleep(min(1.0, max(0.0, deadline - time.monotonic())))


def interface_of(address: str) -> str | None:
    """Return the network interface with this address (primary or alias); None if this host has no such address."""
    if ":" in address:
        target_hex = sockets.inet_pton(sockets.AF_INET6, address.partition("%")[0]).hex()
        table = Path("/proc/net/if_inet6")
        lines = (line.split() for line in table.read_text().splitlines()) if table.exists() else ()
        return next((fields[5] for fields in lines if fields[0] == target_hex), None)
    if address.startswith("127."):
        return "lo"
    found = array("B", bytes(_IFREQ.size * _MAX_ADDRESSES))
    with sockets.socket(sockets.AF_INET, sockets.SOCK_DGRAM) as probe:
        start, length = found.buffer_info()
        answer = fcntl.ioctl(probe, _SIOCGIFCONF, struct.pack("iP", length, start))
    label: bytes
    for label, its in _IFREQ.iter_unpack(found.tobytes()[: struct.unpack("iP", answer)[0]]):
        if sockets.inet_ntoa(its) == address:
            return label.rstrip(b"\0").decode().partition(":")[0]  # an alias is named interface:alias
    return None


def versions() -> dict[str, str]:
    """Return the versions that must be the same on every host."""
    found = {"python": ".".join(platform.python_version_tuple()[:2])}
    for name in ("torch", "quire"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def fingerprint(folder: Path) -> dict[str, str]:
    """Return hashes of a model's small files, and sizes of its weights."""
    hashed = {file for pattern in _HASHED for file in folder.glob(pattern)}
    weights = {file for pattern in _WEIGHTS for file in folder.glob(pattern)}
    found = {file.name: hashlib.sha256(file.read_bytes()).hexdigest()[:16] for file in hashed if file.is_file()}
    return found | {file.name: f"{file.stat().st_size} bytes" for file in weights if file.is_file()}


def _numbered(noun: str, numbers: Iterable[int]) -> str:
    """nodes 1, 2 and 3"""
    *first, last = map(str, sorted(numbers))
    return f"{noun}s {', '.join(first)} and {last}" if first else f"{noun} {last}"
