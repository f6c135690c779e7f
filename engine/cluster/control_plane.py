"""The control plane between hosts: one leader, and followers that join it.

Each follower has one TCP connection to the leader (ZMQ DEALER to ROUTER) for all messages, including heartbeats. A
thread owns the socket. A peer that sends nothing for --cluster-timeout-seconds, or whose connection closes, is lost.
The cluster token authenticates and encrypts the connections (`quire.engine.cluster.security`).

    follower                    leader
    HELLO (Hello) ───────────▶  compares versions, model files and settings (`handshake.compare`)
             ◀─────── WELCOME   or END with the reason, or REDIRECT with the address of another leader
             ◀────────── BODY   `Leader.start`: the same for all, once all have joined; again for one that rejoins
    BODY, HEARTBEAT ◀────────▶  BODY, HEARTBEAT; that of a follower has its time, and the leader adds its own
    FILES (hashes) ─────────▶   compares all bytes of the weights, some time after the start; END if they differ
    STORE (call) ───────────▶   `KeyValueStore`, torch.distributed's rendezvous: of ranks, which need not join
             ◀───────── STORE   (result)
    END (reason) ◀───────────▶  END (reason; empty after a normal shutdown)

Layouts, and what each of them uses of it:

- One host (`executor/mp.py`): no link. The core forks the ranks (`LocalRanks`), sends plans by shared memory, gets
  results through pipes, and notices deaths by the processes' exit.
- `--nnodes N` (`executor/nodes.py`): the core on node 0 leads at --master-addr, --master-port; nodes 1 to N - 1 join,
  which the user starts with `--headless`. Start message: `NodeStart`. Then plans one way; results, `WorkerReady`,
  `NodeProgress` and `WorkerFailed` the other. Hidden states use torch.distributed. If a rank or a node dies, the core
  ends, and every node's ranks with it, with the same reason. The nodes then join the core's successor.
- Ray (`cluster/ray_launcher.py`): as `--nnodes`, except that the core's host is node 0 without ranks, the leader's port
  is any free one, and Ray starts the nodes' processes and reports their exit (`Leader.fail`). The cores of all replicas
  are on one host, and each leads its own nodes.
- Replicas on several hosts (`server/client/dp_coordinator.py`): the host with the API leads at
  --data-parallel-address, --data-parallel-rpc-port, or that with replica 0 if each host has an API and the replicas
  share experts. Each replica of another host joins. Start message: `JoinReply`, the addresses of all. Then
  `ReplicaDied` and `ShutdownRequested` to the leader. Requests and outputs use sockets of their own between API
  processes and cores. A replica that dies is restarted by its host, and a host that was lost can join again;
  meanwhile other replicas resume its requests. Other hosts can join at any time, and leave: the leader ends their
  connection (`Leader.dismiss`) once their requests have ended. Replicas that share experts are restarted together:
  the leader tells all hosts to stop their cores (`StopGroup`), and sends the start message again when all have, and
  when hosts that were lost have joined again. They all end if each host has an API.
- `--nnodes N` with several replicas: node 0 leads as the host of an API does, at --master-addr, --master-port, and the
  first node of each replica joins as a host with replicas does. If replicas span several nodes, each first node leads
  its own replica's others as above, at any free port, which it tells node 0 (`JoinRequest`). The others ask node 0,
  which compares and redirects them (`Redirected`).

The cause of a failure is determined where it can be seen, in three places: among the ranks of a host
(`LocalRanks`), which see exit codes; among the nodes of a replica (`MultiNodeExecutor`), which report to the leader;
and among replicas that share experts (`engine_core.root_cause`), whose cores tell each other.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Generic, Literal, TypeVar

import msgspec
import zmq

from quire.engine.cluster import handshake
from quire.engine.cluster.handshake import Hello, compare
from quire.engine.cluster.key_value_store import STORE, KeyValueStore
from quire.engine.cluster.network import is_local, is_loopback, tcp_url
from quire.engine.cluster.security import EVENTS, Dropped, Security, join, split
from quire.engine.config.engine_config import EngineConfig
from quire.engine.process.log import printable
from quire.engine.protocol.errors import ConfigError
from quire.engine.protocol.profile import Clock

LOST_SECONDS = 15.0
"""Default of --cluster-timeout-seconds."""
_MAX_FAILED_HANDSHAKES = 10
"""Failed handshakes after which a follower that has not joined gives up: the leader has another token."""
_HEARTBEAT_SECONDS = 1.0
_NUM_CLOCKS = 10
"""Measurements of the leader's clock, of which the one with the shortest round trip counts."""
_RECONNECT_MS = 200
"""Interval at which a follower tries to connect."""
_LOWEST_PRIORITY = 19
"""nice(2)"""
_LINGER_MS = 1000
"""Time for the last messages to be sent when a socket closes."""
_HELLO, _WELCOME, _HEARTBEAT, _BODY, _END, _FILES, _REDIRECT = b"quire hello", b"W", b"A", b"B", b"E", b"F", b"R"
_START, _STOP, _FAIL, _DISMISS = b"start", b"stop", b"fail", b"dismiss"
"""Commands to the leader's thread, beside messages to send."""
logger = logging.getLogger(__name__)

T = TypeVar("T")


class LinkEnded(Exception):
    """The leader has ended, rejected this follower, or is lost; the text is the reason.

    The text is empty after a normal shutdown.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Redirected(Exception):
    """Another leader is to be joined, at this address and port."""

    def __init__(self, address: str, port: int) -> None:
        super().__init__(tcp_url(address, port))
        self.address, self.port = address, port


class WakeQueue(Generic[T]):
    """A queue whose reader can also wait for a file descriptor, together with others."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        """Readable after `put`, until `drain`."""
        self._queue: SimpleQueue[T] = SimpleQueue()
        self._open = threading.Lock()  # locked while the eventfd is written or closed
        self._is_open = True

    def put(self, item: T) -> None:
        """Add an item, from any thread."""
        self._queue.put(item)
        with self._open:
            if self._is_open:
                os.eventfd_write(self.fd, 1)

    def get(self, timeout: float | None) -> T:
        """Wait for an item; raises `queue.Empty`."""
        return self._queue.get(timeout=timeout)

    def drain(self) -> Iterator[T]:
        """Return the items that have arrived."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.fd)
        with contextlib.suppress(Empty):
            while True:
                yield self._queue.get_nowait()

    def close(self) -> None:
        """Close the file descriptor; items that are put later wake nobody."""
        with self._open:
            if self._is_open:
                self._is_open = False
                os.close(self.fd)


class _Link(ABC):
    """A ZMQ socket and the thread that owns it, which also sends heartbeats and detects lost peers."""

    def __init__(self, kind: int, name: str, token: str, lost_seconds: float) -> None:
        """`name` is the thread's; `_thread.start` starts it."""
        self._commands: WakeQueue[Any] = WakeQueue()
        """Commands of other threads; dropped after the socket has closed."""
        self._closed: set[int] = set()
        """File descriptors of connections that have closed and were not handled yet."""
        self._lost_seconds = lost_seconds
        self._num_failed_handshakes = 0
        self._has_other_mechanism = False
        self._dropped = Dropped(f"{name}: dropped a message that could not be decoded")
        self._context = zmq.Context()
        self._security = Security(self._context, token)
        self._socket = self._context.socket(kind)
        self._socket.set_hwm(0)
        self._socket.setsockopt(zmq.LINGER, _LINGER_MS)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED | EVENTS)
        self._poller = zmq.Poller()
        for each in (self._socket, self._commands.fd, self._monitor):
            self._poller.register(each, zmq.POLLIN)
        self._thread = threading.Thread(target=self._run, daemon=True, name=name)

    def compare_files(self, config: EngineConfig) -> None:
        """Compare all bytes of the weights with the other hosts', in the background; one that differs is lost."""
        if config.model.load_format != "dummy":
            name, path = "weights-hash", config.model.path
            threading.Thread(target=self._hash_files, args=(path,), daemon=True, name=name).start()

    def _hash_files(self, folder: Path) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_PRIORITY)
        try:
            self._on_hashed(handshake.digests(folder))
        except OSError as error:
            logger.warning("the weights cannot be compared with the other hosts': %s", error)

    @abstractmethod
    def _on_hashed(self, digests: dict[str, str]) -> None:
        """Pass on the hashes of this host's weights, from their thread."""

    @abstractmethod
    def _on_frames(self, frames: list[zmq.Frame]) -> None: ...

    @abstractmethod
    def _on_command(self, command: Any) -> bool:
        """Execute a command of another thread; returns whether to close the socket."""

    @abstractmethod
    def _send_heartbeats(self) -> None: ...

    @abstractmethod
    def _find_lost(self) -> None: ...

    @abstractmethod
    def _on_error(self, error: Exception) -> None: ...

    def _run(self) -> None:
        try:
            self._loop()
        except Exception as error:  # otherwise failures would go unnoticed
            logger.exception("communication with the other hosts failed")
            self._on_error(error)
        finally:
            self._close_socket()

    def _loop(self) -> None:
        next_heartbeat = time.monotonic()
        while True:
            self._poller.poll(int(max(0.0, next_heartbeat - time.monotonic()) * 1000) + 1)
            self._update_closed()
            while True:
                try:
                    frames = self._socket.recv_multipart(zmq.DONTWAIT, copy=False)
                except zmq.Again:
                    break
                try:
                    self._on_frames(frames)
                except (msgspec.DecodeError, UnicodeDecodeError) as error:
                    self._dropped.add(error)
            for command in self._commands.drain():
                if self._on_command(command):
                    return
            if (now := time.monotonic()) >= next_heartbeat:
                next_heartbeat = now + _HEARTBEAT_SECONDS
                self._send_heartbeats()
            self._find_lost()
            self._closed.clear()

    def _update_closed(self) -> None:
        while self._monitor.poll(0):
            from zmq.utils.monitor import recv_monitor_message  # imports asyncio

            message = recv_monitor_message(self._monitor)
            if message["event"] == zmq.EVENT_DISCONNECTED:
                self._closed.add(int(message["value"]))
            elif self._security.on_event(int(message["event"]), int(message["value"])):
                self._num_failed_handshakes += 1
                # ZMQ does not try again with a peer that has another security mechanism
                self._has_other_mechanism |= message["event"] == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL

    def _close(self, command: Any) -> None:
        """Give the thread its last command, and wait for it."""
        if self._thread.is_alive():
            self._commands.put(command)
            if threading.current_thread() is not self._thread:
                self._thread.join()

    def _close_socket(self) -> None:
        """Close the socket after queued messages are sent or `_LINGER_MS` has passed."""
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close()
        self._context.term()
        self._commands.close()


@dataclass
class _Peer:
    """A follower that has joined."""

    identity: bytes
    hello: Hello
    fd: int
    last_heard: float
    """Time of the last message, on the monotonic clock."""
    digests: dict[str, str] | None = None
    """Hashes of its weights, once it has sent them."""


class Leader(_Link):
    """The side that followers join. The callbacks are called from its thread and must not block."""

    def __init__(
        self,
        own: Hello,
        address: str,
        port: int,
        expected: Iterable[int],
        *,
        on_message: Callable[[int, bytes], None],
        on_lost: Callable[[int, str], None],
        check: Callable[[Hello], None] | None = None,
        on_joined: Callable[[Hello], None] = lambda hello: None,
        redirect: Callable[[int], tuple[str, int] | None] | None = None,
        admits: Literal["once", "again", "anybody"] = "once",
        noun: str = "node",
        flags: tuple[str, str] = ("--master-addr", "--master-port"),
        token: str = "",
        lost_seconds: float = LOST_SECONDS,
    ) -> None:
        """Listen on `port` of `address` (0: any free port, see `port`) for followers with `expected` numbers.

        `token` is the cluster's; "" is for loopback addresses. `lost_seconds`: a follower that sends nothing for so
        long is lost. A follower is rejected if it differs from `own` or the first one that joined (see `compare`), if
        it cannot reach `address`, or if `check` raises `ConfigError`. `redirect` returns the leader of a replica, for
        followers that look for it (`Hello.replica`); they ask again until it is known. `admits` lets followers that
        were lost join again after the start, or followers with any number join at any time. The text passed to
        `on_lost` names the follower and the reason. `noun` and `flags` name a follower, the address and the port in
        errors. Raises `ConfigError` if the address is not this host's, or the port is in use.
        """
        assert token or is_loopback(address)
        super().__init__(zmq.ROUTER, "cluster-leader", token, lost_seconds)
        self._expected, self._admits = tuple(expected), admits
        self._on_lost, self._on_message, self._on_joined, self._check = on_lost, on_message, on_joined, check
        self._redirect = redirect
        self._address, self._noun, self._flags = address, noun, flags
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        try:
            if not (os.environ.get("QUIRE_HOST_IP") or is_local(address)):  # set where addresses are translated
                raise ConfigError(
                    f"{flags[0]} {address} is not an address of this host, where the other {noun}s join; give one of "
                    f"its own addresses on every host, or start this host as another {noun}"
                )
            self._security.bind(self._socket, tcp_url(own.address or address, port), monitor=False)
        except ConfigError:
            self._close_socket()
            raise
        except (OSError, zmq.ZMQError) as error:
            self._close_socket()
            raise ConfigError(
                f"{noun}s cannot join at port {port} of {address}: {os.strerror(error.errno or 0).lower()}; "
                f"choose another with {flags[1]}"
            ) from None
        self.port = int(self._socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
        self._store = KeyValueStore()
        self._references = [own]
        """The hosts that others are compared with."""
        self._peers: dict[int, _Peer] = {}
        """The followers that have joined; only the thread modifies it."""
        self._changed = threading.Condition()
        self._lost: dict[int, str] = {}
        """Why a follower was lost or did not join; removed when it joins again."""
        self._start_message: bytes | None = None
        self._own, self._digests = own, dict[str, str]()
        """This host, and the hashes of its weights once they are known."""
        self._thread.start()

    def wait(self, seconds: float) -> dict[int, Hello]:
        """Wait until all followers have joined; raises `ConfigError` if one does not, is rejected, or is lost."""
        if not self._expected:
            return {}
        names = _numbered(self._noun, self._expected)
        logger.info("waiting up to %.0f s for %s at port %d of %s", seconds, names, self.port, self._address)
        with self._changed:
            expected, lost = set(self._expected), list[int]()

            def is_done() -> bool:
                # Others, which may join at any time, do not concern the start.
                lost[:] = self._lost.keys() & expected if self._admits == "anybody" else self._lost
                return bool(lost) or self._peers.keys() >= expected

            self._changed.wait_for(is_done, seconds)
            if lost:
                raise ConfigError(self._lost[lost[0]])
            joined = {number: self._peers[number].hello for number in self._expected if number in self._peers}
        missing = [number for number in self._expected if number not in joined]
        if missing:
            names = ", ".join(hello.name for hello in joined.values()) or "none"
            raise ConfigError(
                f"{_numbered(self._noun, missing)} did not join at port {self.port} within {seconds:.0f} s: "
                f"{len(joined)} of {len(self._expected)} joined ({names})"
            )
        return joined

    def start(self, body: bytes) -> None:
        """Send the first message to every follower, and to each that joins later; the store is empty then."""
        self._commands.put((None, _START, body))

    def stop(self, body: bytes) -> None:
        """Send a message to every follower, and let those that join wait for the next `start`."""
        self._commands.put((None, _STOP, body))

    def send(self, number: int | None, body: bytes) -> None:
        """Send a message to a follower (None: to all); dropped if it is lost."""
        self._commands.put((number, _BODY, body))

    def fail(self, number: int, reason: str) -> None:
        """Report that a follower's process has ended, as its launcher knows: it counts as lost."""
        self._commands.put((number, _FAIL, reason))

    def is_joined(self, number: int) -> bool:
        """Return whether a follower is connected."""
        return number in self._peers

    def dismiss(self, number: int, reason: str = "") -> None:
        """End the connection of a follower, which is not lost thereby and may join again; `reason`: after a failure."""
        self._commands.put((number, _DISMISS, reason.encode()))

    def close(self, reason: str = "") -> None:
        """Send every follower the end of the connection, with a reason after a failure."""
        self._close((None, _END, reason.encode()))

    def _on_command(self, command: tuple[int | None, bytes, Any]) -> bool:
        number, kind, body = command
        if kind == _FAIL:
            assert number is not None
            if (peer := self._peers.get(number)) is not None:
                self._on_dead(peer, body)
            else:
                self._record_lost(number, body)
            return False
        if kind == _DISMISS:
            assert number is not None
            with self._changed:
                dismissed = self._peers.pop(number, None)
            if dismissed is not None:
                self._send(dismissed.identity, _END, body)
            return False
        if kind == _FILES:
            self._digests = body
            for peer in list(self._peers.values()):
                self._compare_digests(peer)
            return False
        if kind == _START:
            self._start_message, self._store, kind = body, KeyValueStore(), _BODY
        if kind == _STOP:
            self._start_message, kind = None, _BODY
        for each in list(self._peers) if number is None else [number]:
            if (peer := self._peers.get(each)) is not None:
                self._send(peer.identity, kind, body)
        return kind == _END

    def _send_heartbeats(self) -> None:
        for peer in self._peers.values():
            self._send(peer.identity, _HEARTBEAT, b"")

    def _on_frames(self, frames: list[zmq.Frame]) -> None:
        if len(frames) < 3:
            return self._dropped.add("it has too few frames")
        identity, kind, *parts = (frame.bytes for frame in frames)
        body = join(parts)
        if kind == _HELLO:
            return self._join(identity, body, int(frames[2].get(zmq.SRCFD)))
        if kind == STORE:
            return self._send(identity, STORE, self._store.answer(body))
        peer = next((peer for peer in self._peers.values() if peer.identity == identity), None)
        if peer is None:
            return
        peer.last_heard = time.monotonic()
        if kind == _BODY:
            self._on_message(peer.hello.number, body)
        elif kind == _HEARTBEAT and body:
            sent = msgspec.msgpack.decode(body, type=int)
            self._send(identity, _HEARTBEAT, msgspec.msgpack.encode((sent, time.time_ns())))
        elif kind == _FILES:
            peer.digests = msgspec.msgpack.decode(body, type=dict[str, str])
            self._compare_digests(peer)
        elif kind == _END:
            reason = printable(body.decode(errors="replace"))
            self._on_dead(peer, f"{peer.hello.name} {f'has ended: {reason}' if reason else 'has left'}")

    def _join(self, identity: bytes, body: bytes, fd: int) -> None:
        hello = msgspec.msgpack.decode(body, type=Hello)
        number = hello.number
        known = self._peers.get(number)
        if known is not None and known.identity == identity:
            return self._send(identity, _WELCOME, b"")  # it repeats its hello until it is answered
        is_redirected = hello.replica is not None and self._redirect is not None
        try:
            if not is_redirected:
                self._check_place(hello, known)
            self._check_host(hello)
        except ConfigError as error:
            logger.warning("%s", error)
            return self._send(identity, _END, str(error).encode())
        if is_redirected:
            return self._send_on(identity, hello)
        self._update_closed()
        self._closed.discard(fd)  # of an earlier connection
        with self._changed:
            self._lost.pop(number, None)
            self._peers[number] = _Peer(identity, hello, fd, time.monotonic())
            self._changed.notify_all()
        if len(self._references) == 1:
            self._references.append(hello)
        logger.info("%s has joined", hello.name)
        self._send(identity, _WELCOME, b"")
        if self._start_message is not None:
            self._send(identity, _BODY, self._start_message)
        self._on_joined(hello)

    def _send_on(self, identity: bytes, hello: Hello) -> None:
        """Tell a follower which leader it is to join, if that is known; it says hello again until then."""
        assert self._redirect is not None
        assert hello.replica is not None
        if self._start_message is not None and (leader := self._redirect(hello.replica)) is not None:
            self._send(identity, _REDIRECT, msgspec.msgpack.encode(leader))

    def _check_place(self, hello: Hello, known: _Peer | None) -> None:
        """Raise `ConfigError` if there is no place for a follower with this number."""
        if known is not None:
            raise ConfigError(f"{hello.name} cannot join: {known.hello.name} is {self._noun} {hello.number} already")
        if self._admits == "anybody":
            return
        if hello.number not in self._expected:
            compare(self._own, hello)  # the numbers depend on the settings
            raise ConfigError(
                f"{hello.name}: {_numbered(self._noun, self._expected)} can join here, not {hello.number}"
            )
        if hello.number in self._lost and self._admits == "once":
            raise ConfigError(f"{hello.name} cannot join again")

    def _check_host(self, hello: Hello) -> None:
        """Raise `ConfigError` if the host cannot start or does not match; before the start, `wait` raises it too."""
        try:
            for reference in self._references:
                compare(reference, hello)
            if is_loopback(self._address) and not is_loopback(hello.address or self._address):
                raise ConfigError(
                    f"{self._flags[0]} {self._address}: {hello.name} cannot reach that address of "
                    f"{self._references[0].name}; start every host with one that it can"
                )
            if self._check is not None and hello.replica is None:
                self._check(hello)
        except ConfigError as error:
            if self._start_message is None:
                self._record_lost(hello.number, str(error))
            raise

    def _on_hashed(self, digests: dict[str, str]) -> None:
        self._commands.put((None, _FILES, digests))

    def _compare_digests(self, peer: _Peer) -> None:
        """End a follower whose weights differ from this host's, once both are known."""
        if not self._digests or peer.digests is None:
            return
        try:
            compare(
                msgspec.structs.replace(self._own, model=self._digests, settings={}),
                msgspec.structs.replace(peer.hello, model=peer.digests),
            )
        except ConfigError as error:
            self._send(peer.identity, _END, str(error).encode())
            self._on_dead(peer, str(error))
        else:
            logger.info("%s has the same weights, byte for byte", peer.hello.name)

    def _find_lost(self) -> None:
        now = time.monotonic()
        for peer in list(self._peers.values()):
            if peer.fd in self._closed:
                self._on_dead(peer, f"{peer.hello.name} was lost: its connection has closed")
            elif now - peer.last_heard > self._lost_seconds:
                self._on_dead(
                    peer, f"{peer.hello.name} was lost: nothing was received from it for {self._lost_seconds:g} s"
                )

    def _on_dead(self, peer: _Peer, reason: str) -> None:
        with self._changed:
            del self._peers[peer.hello.number]
        self._record_lost(peer.hello.number, reason)
        self._on_lost(peer.hello.number, reason)

    def _record_lost(self, number: int, reason: str) -> None:
        with self._changed:
            self._lost.setdefault(number, reason)
            self._changed.notify_all()

    def _on_error(self, error: Exception) -> None:
        for peer in list(self._peers.values()):
            self._on_dead(peer, f"{peer.hello.name} was lost: {type(error).__name__}: {error}")

    def _send(self, identity: bytes, kind: bytes, body: bytes) -> None:
        try:
            self._socket.send_multipart((identity, kind, *split(body)))
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:  # it has disconnected; `_closed` has its connection
                raise


class Follower(_Link):
    """The side that joins a leader."""

    def __init__(
        self,
        address: str,
        port: int,
        hello: Hello,
        *,
        seconds: float,
        on_end: Callable[[LinkEnded], None] | None = None,
        leader: str | None = None,
        flags: tuple[str, str] = ("--master-addr", "--master-port"),
        token: str = "",
        lost_seconds: float = LOST_SECONDS,
    ) -> None:
        """Join the leader, retrying for up to `seconds`. `token` and `lost_seconds` as of `Leader`.

        `on_end` is called, from its thread, when the leader ends or is lost; it must not block. `leader` is its name in
        errors, `flags` are those of its address and port. Raises `ConfigError` if it does not answer in time,
        `LinkEnded` if it rejects this follower or has another token, and `Redirected` if another leader is to be
        joined.
        """
        super().__init__(zmq.DEALER, "cluster-follower", token, lost_seconds)
        self._leader, self._on_end = leader or f"the host at {address}:{port}", on_end
        self._hello = msgspec.msgpack.encode(hello)
        self.inbox: WakeQueue[bytes | LinkEnded] = WakeQueue()
        """Messages, for one reader; the last one is a `LinkEnded`."""
        self._answered = threading.Event()
        self._is_accepted = False
        self._redirected: Redirected | None = None
        self.ended: LinkEnded | None = None
        """What `receive` raises after the remaining messages."""
        self._last_heard = 0.0
        self._clocks: deque[Clock] = deque(maxlen=_NUM_CLOCKS)
        """The latest measurements, from heartbeats."""
        self._socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
        self._security.connect(self._socket, tcp_url(address, port), monitor=False)
        self._thread.start()
        logger.info("%s: trying to join %s at %s:%d for up to %.0f s", hello.name, self._leader, address, port, seconds)
        try:
            if not self._answered.wait(seconds):
                raise ConfigError(
                    f"{self._leader} did not answer at {address}:{port} within {seconds:.0f} s; check that it is "
                    f"running, and that {flags[0]} and {flags[1]} match its own"
                )
            if self._redirected is not None:
                raise self._redirected
            if not self._is_accepted:
                self.receive(None)
        except BaseException:
            self.close()
            raise
        logger.info("%s has joined %s", hello.name, self._leader)

    @property
    def clock(self) -> Clock:
        """This host's clock for the leader's."""
        return min(tuple(self._clocks), key=lambda each: each.error, default=Clock())

    def receive(self, timeout: float | None) -> bytes:
        """Return the next message; raises `TimeoutError`, and `LinkEnded` after the connection has ended."""
        try:
            message = self.inbox.get(timeout)
        except Empty:
            raise TimeoutError from None
        if isinstance(message, LinkEnded):
            self.inbox.put(message)
            raise message
        return message

    def send(self, body: bytes) -> None:
        """Send a message to the leader; dropped if the connection has ended."""
        self._commands.put((_BODY, body))

    def _on_hashed(self, digests: dict[str, str]) -> None:
        self._commands.put((_FILES, msgspec.msgpack.encode(digests)))

    def close(self, reason: str = "") -> None:
        """Leave; `reason` is sent to the leader after a failure."""
        self._close((_END, reason.encode()))
        self.inbox.put(self.ended or LinkEnded(""))
        self.inbox.close()

    def _on_command(self, command: tuple[bytes, bytes]) -> bool:
        is_last = command[0] == _END
        if self.ended is None and (self._is_accepted or not is_last):
            self._socket.send_multipart((command[0], *split(command[1])))
        if is_last and not self._is_accepted:
            self._socket.setsockopt(zmq.LINGER, 0)
        return is_last

    def _send_heartbeats(self) -> None:
        if self.ended is not None:
            return
        if self._is_accepted:
            self._socket.send_multipart((_HEARTBEAT, msgspec.msgpack.encode(time.time_ns())))
        else:
            with contextlib.suppress(zmq.Again):  # its peer has another security mechanism
                self._socket.send_multipart((_HELLO, self._hello), zmq.DONTWAIT)

    def _on_frames(self, frames: list[zmq.Frame]) -> None:
        if len(frames) < 2 or self.ended is not None:
            return
        self._last_heard = time.monotonic()
        kind, *parts = (frame.bytes for frame in frames)
        body = join(parts)
        if kind == _BODY:
            self.inbox.put(body)
        elif kind == _HEARTBEAT and body:
            sent, answered = msgspec.msgpack.decode(body, type=tuple[int, int])
            self._clocks.append(Clock.measured(sent, answered, time.time_ns()))
        elif kind == _WELCOME:
            self._is_accepted = True
            self._answered.set()
        elif kind == _REDIRECT:
            self._redirected = Redirected(*msgspec.msgpack.decode(body, type=tuple[str, int]))
            self._answered.set()
        elif kind == _END:
            self._end(printable(body.decode(errors="replace")))

    def _find_lost(self) -> None:
        if self.ended is not None:
            return
        if not self._is_accepted:
            if self._has_other_mechanism or self._num_failed_handshakes >= _MAX_FAILED_HANDSHAKES:
                self._end(f"{self._leader} has another --cluster-token than this host, or none; use the same on all")
        elif self._closed:
            self._end(f"{self._leader} was lost: its connection has closed")
        elif time.monotonic() - self._last_heard > self._lost_seconds:
            self._end(f"{self._leader} was lost: nothing was received from it for {self._lost_seconds:g} s")

    def _on_error(self, error: Exception) -> None:
        self._end(f"{self._leader} was lost: {type(error).__name__}: {error}")

    def _end(self, reason: str) -> None:
        self.ended = LinkEnded(reason)
        self.inbox.put(self.ended)
        self._answered.set()
        if self._is_accepted and self._on_end is not None:
            self._on_end(self.ended)


def _numbered(noun: str, numbers: Iterable[int]) -> str:
    """nodes 1, 2 and 3"""
    *first, last = map(str, sorted(numbers))
    return f"{noun}s {', '.join(first)} and {last}" if first else f"{noun} {last}"
