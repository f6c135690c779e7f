"""Hosts that work together: one of them leads, the others follow it.

Each follower has one TCP connection to the leader (ZMQ DEALER to ROUTER) for all that they have to say to each other,
signs of life included. Messages are `[kind, body]`, or `[identity, kind, body]` as the leader sees them. A thread owns
the socket. Who is silent for `LOST_SECONDS`, or whose connection closes, is lost, and does not come back by itself.
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
"""Who is not heard of for so long is lost."""
_BEAT_SECONDS = 1.0
_LINGER_MS = 1000
"""What is said last may take so long to leave."""
_MOST_BYTES = 1 << 30
"""Of a message."""
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
_SIOCGIFCONF, _IFREQ, _MOST_ADDRESSES = 0x8912, struct.Struct("@16s4x4s16x"), 1024
"""netdevice(7): every IPv4 address of the host, with the interface's name"""

logger = logging.getLogger(__name__)


class Hello(msgspec.Struct, kw_only=True):
    """What a follower says of itself when it joins."""

    name: str
    """As errors say it: node 1 (10.0.0.2)."""
    number: int
    """What the leader knows it by."""
    versions: dict[str, str] = {}
    model: dict[str, str] = {}
    """Hash or size of each file of the model."""
    body: bytes = b""
    """What its user wants to say besides."""


class LinkEnded(Exception):
    """The leader has ended, refused us, or is lost; the text says why.

    An end without trouble has no reason; the text is empty then.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass
class _FollowerLink:
    identity: bytes
    hello: Hello
    fd: int
    heard: float
    """When, on the monotonic clock."""


@dataclass
class _FramedSocket:
    """A ZMQ socket, and what its thread waits for besides: the bell of other threads, and connections that close."""

    kind: int
    ipv6: bool
    """Besides IPv4."""
    outbox: SimpleQueue[Any] = field(default_factory=SimpleQueue)
    closed: set[int] = field(default_factory=set)
    """File descriptors of connections that have closed since they were last looked at."""

    def __post_init__(self) -> None:
        self.context = zmq.Context()
        self.zmq = self.context.socket(self.kind)
        self.zmq.set_hwm(0)
        self.zmq.setsockopt(zmq.LINGER, _LINGER_MS)
        self.zmq.setsockopt(zmq.MAXMSGSIZE, _MOST_BYTES)
        self.zmq.setsockopt(zmq.IPV6, int(self.ipv6))
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._open = threading.Lock()  # held while the bell is rung or taken away
        self._is_open = True
        self._monitor = self.zmq.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._poller = zmq.Poller()
        for each in (self.zmq, self._bell, self._monitor):
            self._poller.register(each, zmq.POLLIN)

    def put(self, message: Any) -> None:
        """From any thread: for the one that owns the socket. Once it has closed, nobody hears of it."""
        self.outbox.put(message)
        with self._open:
            if self._is_open:
                os.eventfd_write(self._bell, 1)

    def poll(self, seconds: float) -> None:
        """Wait until there is something to do, and take in what has closed."""
        ready = dict(self._poller.poll(int(max(0.0, seconds) * 1000) + 1))
        if self._bell in ready:
            os.eventfd_read(self._bell)
        self.take_closed()

    def take_closed(self) -> None:
        while self._monitor.poll(0):
            self.closed.add(int(recv_monitor_message(self._monitor)["value"]))

    def receive(self) -> list[zmq.Frame] | None:
        """A message that is there; None: there is none."""
        try:
            return self.zmq.recv_multipart(zmq.DONTWAIT, copy=False)
        except zmq.Again:
            return None

    def close(self) -> None:
        """Once what was sent has left, or cannot."""
        self.zmq.disable_monitor()
        self._monitor.close(0)
        self.zmq.close()
        self.context.term()
        with self._open:
            self._is_open = False
            os.close(self._bell)


class Leader:
    """The end that the others join. Both callbacks are called from its thread, and must not wait."""

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
        """Listen at `port` of every interface (0: any, see `port`) for those with the `expected` numbers.

        The text of `on_lost` names who was lost, and how. One that was lost may join again, if `on_join` is given.
        `noun` and `flag` are what errors call a follower, and the port. Raises `ConfigError` when the port is taken.
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
        """Those that are here; only the thread changes it."""
        self._changed = threading.Condition()
        self._lost: dict[int, str] = {}
        """How; one that is here again stands in `_peers` only."""
        self._thread = threading.Thread(target=self._run, daemon=True, name="cluster-leader")
        self._thread.start()

    def wait(self, seconds: float) -> dict[int, Hello]:
        """Wait until all have joined; raises `ConfigError` when somebody does not, or is lost again."""
        logger.info("waiting up to %.0f s for %s at port %d", seconds, _several(self._noun, self._expected), self.port)
        with self._changed:
            self._changed.wait_for(lambda: self._lost or len(self._peers) == len(self._expected), seconds)
            if self._lost:
                raise ConfigError(next(iter(self._lost.values())))
            here = {number: peer.hello for number, peer in self._peers.items()}
        missing = [number for number in self._expected if number not in here]
        if missing:
            come = ", ".join(hello.name for _, hello in sorted(here.items())) or "nobody else"
            raise ConfigError(
                f"{_several(self._noun, missing)} did not join at port {self.port} within {seconds:.0f} s: "
                f"{len(here)} of {len(self._expected)} came ({come})"
            )
        return here

    @staticmethod
    def check(mine: Hello, theirs: Hello) -> None:
        """Raise `ConfigError` if another host's versions or files of the model are not those of this one."""
        for name, ours in mine.versions.items():
            if (other := theirs.versions.get(name)) != ours:
                raise ConfigError(
                    f"{theirs.name} has {name} {other or 'in no version'}, and {mine.name} has {ours}; "
                    "install the same on every host"
                )
        for name in sorted(mine.model.keys() | theirs.model.keys()):
            here, there = mine.model.get(name), theirs.model.get(name)
            if here != there:
                what = f"no {name}" if there is None else f"a {name}" if here is None else f"other bytes in {name}"
                raise ConfigError(
                    f"{theirs.name} has {what}, unlike {mine.name}; copy the same model files to every host"
                )

    def give_up(self, number: int, reason: str) -> None:
        """It is known that this one will not join: `wait` ends with the reason."""
        with self._changed:
            if number not in self._peers:
                self._lost.setdefault(number, reason)
                self._changed.notify_all()

    def send(self, number: int, body: bytes) -> None:
        """To a follower; what is for one that is lost goes nowhere."""
        self._socket.put((number, _BODY, body))

    def refuse(self, number: int, reason: str) -> None:
        """Tell one follower that it cannot stay; it counts as gone, and `on_lost` is not called for it."""
        self._socket.put((number, _END, reason.encode()))

    def close(self, reason: str = "") -> None:
        """Tell every follower that this is the end, and why if it is one with trouble."""
        if self._thread.is_alive():
            self._socket.put((None, _END, reason.encode()))
            if threading.current_thread() is not self._thread:
                self._thread.join()

    def _run(self) -> None:
        try:
            self._serve()
        except Exception as error:  # nobody would hear of anything any more
            logger.exception("the hosts that have joined cannot be talked to")
            for peer in list(self._peers.values()):
                self._lose(peer, f"{peer.hello.name} was lost: {type(error).__name__}: {error}")
            self._socket.close()

    def _serve(self) -> None:
        socket, next_beat = self._socket, time.monotonic()
        while True:
            socket.poll(next_beat - time.monotonic())
            while (frames := socket.receive()) is not None:
                self._take(frames)
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

    def _take(self, frames: list[zmq.Frame]) -> None:
        if len(frames) != 3:
            return
        identity, kind, body = (frame.bytes for frame in frames)
        if kind == _HELLO:
            return self._join(identity, body, frames[2])
        peer = next((peer for peer in self._peers.values() if peer.identity == identity), None)
        if peer is None:
            return
        peer.heard = time.monotonic()
        if kind == _BODY:
            self._on_message(peer.hello.number, body)
        elif kind == _END:
            reason = body.decode(errors="replace")
            self._lose(peer, f"{peer.hello.name} {f'has ended: {reason}' if reason else 'has left'}")

    def _join(self, identity: bytes, body: bytes, frame: zmq.Frame) -> None:
        try:
            hello = msgspec.msgpack.decode(body, type=Hello)
        except msgspec.DecodeError:
            return
        number = hello.number
        known = self._peers.get(number)
        if known is None or known.identity != identity:
            refusal = ""
            if number not in self._expected:
                refusal = f"{hello.name}: {_several(self._noun, self._expected)} can join here, not {number}"
            elif known is not None:
                refusal = f"{hello.name} cannot join: {known.hello.name} is {self._noun} {number} already"
            elif number in self._lost and self._on_join is None:
                refusal = f"{hello.name} cannot join again"
            if refusal:
                logger.warning("%s", refusal)
                return self._reply(identity, _END, refusal.encode())
            fd = int(frame.get(zmq.SRCFD))
            self._socket.take_closed()
            self._socket.closed.discard(fd)  # that of one before it
            with self._changed:
                self._lost.pop(number, None)
                self._peers[number] = _FollowerLink(identity, hello, fd, time.monotonic())
                self._changed.notify_all()
            logger.info("%s has joined", hello.name)
            if self._on_join is not None:
                self._on_join(hello)
        self._reply(identity, _WELCOME, b"")

    def _find_lost(self) -> None:
        """Called when all that has come is taken in."""
        now = time.monotonic()
        for peer in list(self._peers.values()):
            if peer.fd in self._socket.closed:
                self._lose(peer, f"{peer.hello.name} was lost: its connection has closed")
            elif now - peer.heard > LOST_SECONDS:
                self._lose(peer, f"{peer.hello.name} was lost: nothing was heard of it for {LOST_SECONDS:.0f} s")
        self._socket.closed.clear()

    def _lose(self, peer: _FollowerLink, reason: str) -> None:
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
            if error.errno != zmq.EHOSTUNREACH:  # it has gone; its connection is among those that closed
                raise


class Follower:
    """The end that joins a leader. `on_lost` is called from its thread, and must not wait."""

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
        """Join, trying again until the leader is there.

        `leader` is what errors call it, `remedy` what they say when it does not answer within `seconds`
        (`ConfigError`). Raises `LinkEnded` when it refuses us.
        """
        self._leader, self._on_lost = leader or f"the host at {address}:{port}", on_lost
        self._hello = msgspec.msgpack.encode(hello)
        self._inbox: SimpleQueue[bytes | LinkEnded] = SimpleQueue()
        self._answered = threading.Event()
        self._is_welcome = False
        self.ended: LinkEnded | None = None
        """What `receive` will raise once it has given the messages before."""
        self._heard = 0.0
        self._socket = _FramedSocket(zmq.DEALER, ipv6=":" in address)
        self._socket.zmq.setsockopt(zmq.RECONNECT_IVL, 200)
        self._socket.zmq.connect(f"tcp://{f'[{address}]' if ':' in address else address}:{port}")
        self._thread = threading.Thread(target=self._run, daemon=True, name="cluster-follower")
        self._thread.start()
        logger.info("%s: trying to join %s at %s:%d for up to %.0f s", hello.name, self._leader, address, port, seconds)
        try:
            if not self._answered.wait(seconds):
                raise ConfigError(f"{self._leader} did not answer at {address}:{port} within {seconds:.0f} s; {remedy}")
            if not self._is_welcome:
                self.receive(None)
        except BaseException:
            self.close()
            raise
        logger.info("%s has joined %s", hello.name, self._leader)

    def receive(self, timeout: float | None) -> bytes:
        """The next message; raises `TimeoutError`, and `LinkEnded` from the leader's end on."""
        try:
            message = self._inbox.get(timeout=timeout)
        except Empty:
            raise TimeoutError from None
        if isinstance(message, LinkEnded):
            self._inbox.put(message)
            raise message
        return message

    def send(self, body: bytes) -> None:
        """To the leader; goes nowhere when it has ended."""
        self._socket.put((_BODY, body))

    def close(self, reason: str = "") -> None:
        """Leave, saying why if there is trouble."""
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
                    is_over = self._take(*(frame.bytes for frame in frames))
            while True:
                try:
                    kind, body = socket.outbox.get_nowait()
                except Empty:
                    break
                if not is_over and (kind != _END or self._is_welcome):
                    socket.zmq.send_multipart((kind, body))
                if kind == _END:
                    if not self._is_welcome:
                        socket.zmq.setsockopt(zmq.LINGER, 0)
                    return socket.close()
            if (now := time.monotonic()) >= next_beat:
                next_beat = now + _BEAT_SECONDS
                if not is_over:
                    socket.zmq.send_multipart((_BEAT, b"") if self._is_welcome else (_HELLO, self._hello))
            if self._is_welcome and not is_over:
                is_over = self._is_lost()
            socket.closed.clear()

    def _take(self, kind: bytes, body: bytes) -> bool:
        """Whether that was the end."""
        self._heard = time.monotonic()
        if kind == _BODY:
            self._inbox.put(body)
        elif kind == _WELCOME:
            self._is_welcome = True
            self._answered.set()
        elif kind == _END:
            self._end(LinkEnded(body.decode(errors="replace")))
            self._answered.set()
        return kind == _END

    def _is_lost(self) -> bool:
        """Called when all that has come is taken in."""
        if self._socket.closed:
            how = "its connection has closed"
        elif time.monotonic() - self._heard > LOST_SECONDS:
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
    """Our own address on the interface that reaches `host`, unless QUIRE_HOST_IP gives it.

    A name that is not known yet is asked for again for so many seconds. Raises `ConfigError`.
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
    """The network interface that has this address, its first one or another; None: none of this host has."""
    if ":" in address:
        wanted = sockets.inet_pton(sockets.AF_INET6, address.partition("%")[0]).hex()
        table = Path("/proc/net/if_inet6")
        lines = (line.split() for line in table.read_text().splitlines()) if table.exists() else ()
        return next((fields[5] for fields in lines if fields[0] == wanted), None)
    if address.startswith("127."):
        return "lo"
    found = array("B", bytes(_IFREQ.size * _MOST_ADDRESSES))
    with sockets.socket(sockets.AF_INET, sockets.SOCK_DGRAM) as probe:
        start, length = found.buffer_info()
        answer = fcntl.ioctl(probe, _SIOCGIFCONF, struct.pack("iP", length, start))
    label: bytes
    for label, its in _IFREQ.iter_unpack(found.tobytes()[: struct.unpack("iP", answer)[0]]):
        if sockets.inet_ntoa(its) == address:
            return label.rstrip(b"\0").decode().partition(":")[0]  # an alias has a name of its own
    return None


def versions() -> dict[str, str]:
    """Of what must be the same on every host."""
    found = {"python": ".".join(platform.python_version_tuple()[:2])}
    for name in ("torch", "quire"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def fingerprint(folder: Path) -> dict[str, str]:
    """Of a model's files: hashes of the small ones, sizes of the weights."""
    hashed = {file for pattern in _HASHED for file in folder.glob(pattern)}
    weights = {file for pattern in _WEIGHTS for file in folder.glob(pattern)}
    found = {file.name: hashlib.sha256(file.read_bytes()).hexdigest()[:16] for file in hashed if file.is_file()}
    return found | {file.name: f"{file.stat().st_size} bytes" for file in weights if file.is_file()}


def _several(noun: str, numbers: Iterable[int]) -> str:
    """nodes 1, 2 and 3"""
    *first, last = map(str, sorted(numbers))
    return f"{noun}s {', '.join(first)} and {last}" if first else f"{noun} {last}"
