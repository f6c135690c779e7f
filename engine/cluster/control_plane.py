"""The control plane between hosts: one leader, and followers that join it.

Each follower has one TCP connection to the leader (ZMQ DEALER to ROUTER) for all messages, including heartbeats. A
thread owns the socket. A peer that sends nothing for --cluster-timeout-seconds, or whose connection closes, is lost.
The cluster token authenticates and encrypts the connections (`quire.engine.cluster.security`).

    follower                    leader
    HELLO (Hello) ───────────▶  compares versions, model files and settings (`handshake.compare`)
             ◀─────── WELCOME   or REJECT with the reason, or REDIRECT with the address of another leader
    PROBE (ports) ◀──────────▶  `Leader.check_links`: connections between hosts are tried (`reachability`)
             ◀────────── BODY   `Leader.start`: the same for all, once all have joined; again for one that rejoins
    BODY, HEARTBEAT ◀────────▶  BODY, HEARTBEAT; a follower's has its time, and the leader adds its own
    FILES (WeightDigests) ──▶   compares all bytes of the weights, before the first answer
             ◀────────── FILES  they are the same; REJECT if not
             ◀──────── LOG_LEVEL  the lowest level to show, when it changes, and to followers that join later
    STORE (call) ───────────▶   `KeyValueStore`, torch.distributed's rendezvous: of ranks, which need not join
             ◀───────── STORE   (result)
    END (reason) ◀───────────▶  END (reason; empty after a normal shutdown)
    REJECT (reason) ◀────────▶  REJECT: END for an error that another try does not mend

Layouts, and the parts of the control plane that each of them uses:

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
  --data-parallel-address, --data-parallel-rpc-port, or the host with replica 0 if each host has an API and the
  replicas share experts. Each replica of another host joins. Start message: `JoinReply`, the addresses of all. Then
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
from collections.abc import Iterable, Iterator
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar

import msgspec
import zmq

from quire.engine.cluster.handshake import weight_files
from quire.engine.cluster.network import tcp_url
from quire.engine.cluster.security import EVENTS, Dropped, Security
from quire.engine.config.engine_config import EngineConfig
from quire.engine.protocol.errors import UNDECODABLE, ConfigError
from quire.engine.repository.weights_digest import digests

LOST_SECONDS = 15.0
"""Default of --cluster-timeout-seconds."""
_HEARTBEAT_SECONDS = 1.0
_LINGER_MS = 1000
"""Time for the last messages to be sent when a socket closes."""
HELLO, WELCOME, HEARTBEAT, BODY, END, REJECT = b"quire hello", b"W", b"A", b"B", b"E", b"X"
FILES, PROBE, REDIRECT, LOG_LEVEL = b"F", b"P", b"R", b"L"
logger = logging.getLogger(__name__)

T = TypeVar("T")


class LinkEnded(Exception):
    """The other side has ended, rejected this one, or is lost; the text is the reason.

    The text is empty after a normal shutdown.
    """

    def __init__(self, reason: str, *, is_final: bool = False) -> None:
        """`is_final`: because of a user's error, which another try does not mend."""
        super().__init__(reason)
        self.reason, self.is_final = reason, is_final


class Rejected(ConfigError):
    """This host cannot join, and another try does not mend it."""


class HostsMissing(ConfigError):
    """Hosts have not joined in time. They may come back."""


class WeightDigests(msgspec.Struct):
    """Hashes of all bytes of a host's weights, by file."""

    digests: dict[str, str]
    error: str = ""
    """Why they cannot be read."""


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


class ControlLink(ABC):
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

    @abstractmethod
    def set_digests(self, found: WeightDigests) -> None:
        """Compare the hashes of this host's weights with those of the other hosts, from any thread."""

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
                except UNDECODABLE as error:
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


def compares_weights(config: EngineConfig) -> bool:
    """Return whether hosts compare all bytes of their weights before the first answer."""
    return config.model.load_format != "dummy" and not config.parallel.trust_weights


def compare_weights(config: EngineConfig, links: Iterable[ControlLink]) -> None:
    """Compare all bytes of the weights with the other hosts', in a thread. The leader rejects a host that differs."""
    links = list(links)

    def work() -> None:
        started = time.monotonic()
        try:
            files = weight_files(config.model.path)
            found, size = WeightDigests(digests(files)), sum(file.stat().st_size for file in files)
            text = "hashed the weights in %.1f s (%.1f GiB), for the comparison of hosts"
            logger.info(text, time.monotonic() - started, size / (1 << 30))
        except Exception as error:  # the hosts wait for a result
            found = WeightDigests({}, f"the weights cannot be read: {error}")
        for link in links:
            link.set_digests(found)

    if links and compares_weights(config):
        threading.Thread(target=work, daemon=True, name="weights-hash").start()
