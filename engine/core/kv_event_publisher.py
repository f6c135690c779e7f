"""Publishes the KV events of a replica (`quire.engine.protocol.kv_events`) from a thread of the core, as vLLM does.

- a PUB socket sends each batch; a subscriber that is too slow loses batches, and sees that numbers are missing;
- a ROUTER socket sends the last batches again: a REQ or DEALER client sends an empty frame and the number of the first
  one, as 8 bytes, and receives an empty frame, the topic, the number and the batch of each; the last reply has an empty
  topic and batch, and `END_OF_REPLAY`;
- `GetKVEvents` is answered with the blocks that the replica has after the last batch, so that a router that starts late
  needs only the batches that follow;
- API processes that follow the events (`FollowKVEvents`) get the blocks that the replica has, in parts, and then each
  batch; those that say nothing more get no more than `_AHEAD_BYTES` of batches, and begin anew when they are heard of.

The loop of the core never waits: nothing here blocks on a subscriber, and when the queue is full, events wait for the
next batch. As the loop cannot run while this thread does, the news of the KV store become events a slice at a time,
with pauses between them, and those of the device go first.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import os
import socket as sockets
import stat
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import zmq

from quire.engine.cluster.network import tcp_url
from quire.engine.cluster.security import Dropped
from quire.engine.config.engine_config import KVEventsConfig
from quire.engine.protocol.errors import ConfigError
from quire.engine.protocol.kv_events import (
    BYTES_HEARD,
    END_OF_REPLAY,
    NOTHING_SENT,
    AllBlocksCleared,
    FollowKVEvents,
    GetKVEvents,
    KVEvent,
    KVEventBatch,
    KVEventsNews,
    KVEventSource,
    KVEventsState,
)
from quire.engine.scheduler.kv_events_view import DeviceCleared, KVEventsView, TierNews

logger = logging.getLogger(__name__)

_LINGER_MS = 1000
_RETRY_MS = 200
"""Interval at which ports are tried that another server has."""
_WILDCARDS = ("0.0.0.0", "::")
_TIER_PAUSE = 0.005
"""Seconds between two slices of news of the tiers."""
_PART = 4096
"""Blocks in each part of what API processes are sent."""
_PART_BYTES = 1 << 18
"""JSON in each part of a snapshot, at least, except the last one."""
_PART_PAUSE = 0.001
"""Seconds after each part, in which the loop can run."""
_AHEAD_BYTES = 32 * BYTES_HEARD
"""Batches for an API process that it has not taken yet."""


@dataclass(eq=False)
class _FollowingProcess:
    """An API process that gets each batch."""

    has_tiers: bool
    number: int = NOTHING_SENT
    """Of the last news."""
    unheard: deque[tuple[int, int]] = field(default_factory=deque)
    """Number and bytes of news that it has not taken, as far as is known."""
    num_bytes: int = 0
    """Of these."""
    most_bytes: int = 0
    """With more of them, it gets no further ones."""
    is_behind: bool = False
    """It has missed a batch: it gets none until it has taken most of what was sent, and then begins anew."""

    def hear(self, number: int) -> None:
        """It has taken the news up to this one."""
        while self.unheard and self.unheard[0][0] <= number:
            self.num_bytes -= self.unheard.popleft()[1]


class KVEventPublisher:
    """The sockets, the thread that owns them, and what it has sent."""

    def __init__(
        self,
        config: KVEventsConfig,
        replica: int,
        address: str,
        reply: Callable[[int, KVEventsState | KVEventsNews], None],
        fail: Callable[[Exception], None],
        incarnation: int = 0,
    ) -> None:
        """`address` is how this host is reached; `reply` sends an answer to an API process, `fail` tells the loop that
        the thread has ended. Raises `ConfigError` if an endpoint cannot be used."""
        self._replica, self._incarnation, self._reply, self._fail = replica, incarnation, reply, fail
        self._topic, self._max_queued = config.topic.encode(), config.max_queue_size
        self._waits_for_ports = config.waits_for_ports
        self._context = zmq.Context()
        self._publisher = self._context.socket(zmq.PUB)
        self._publisher.set_hwm(config.hwm)
        self._unopened = [(self._publisher, of_replica(config.endpoint, replica), False)]
        """Sockets that are not bound or connected yet, where they are to be, and whether they listen in any case."""
        self._paths: list[Path] = []
        """Socket files that this publisher has bound."""
        self._replayer: zmq.Socket[bytes] | None = None
        if config.replay_endpoint is not None:
            self._replayer = self._context.socket(zmq.ROUTER)
            self._replayer.set_hwm(4 * (config.buffer_steps + 1))  # of one client, which may ask again
            self._replayer.setsockopt(zmq.MAXMSGSIZE, 64)  # of requests
            self._unopened.append((self._replayer, of_replica(config.replay_endpoint, replica), True))
        asked = [(socket, endpoint) for socket, endpoint, _ in self._unopened]
        try:
            self._open_sockets()
        except ConfigError:
            self._close_sockets(0)
            raise
        if self._unopened:
            logger.info("KV events will be published when the process that had the ports before has ended")
        endpoint, *replay_endpoint = (_reached(*each, address) for each in asked)
        self.source = KVEventSource(
            endpoint,
            replay_endpoint[0] if replay_endpoint else None,
            config.buffer_steps,
            config.hwm,
            config.max_queue_size,
            config.topic,
        )
        self._sequence = NOTHING_SENT
        self._sent: deque[bytes] = deque(maxlen=config.buffer_steps)
        """The last batches."""
        self._view = KVEventsView()
        self._followers: dict[int, _FollowingProcess] = {}
        """By API process."""
        self._queue: deque[tuple[float, Sequence[KVEvent | DeviceCleared]] | GetKVEvents | FollowKVEvents | None]
        self._queue = deque()
        """Events with their time, and calls; None: close."""
        self._tier_news: deque[TierNews] = deque()
        self._tiers_due = 0.0
        """When the next slice of these is due (`time.monotonic`)."""
        self._wakeup = os.eventfd(0)
        self._thread = threading.Thread(target=self._serve, daemon=True, name="kv-events")
        self._thread.start()
        self.publish([AllBlocksCleared()])  # subscribers may know the blocks of an earlier start

    @property
    def is_full(self) -> bool:
        """Whether events have to wait."""
        return len(self._queue) >= self._max_queued

    def publish(self, events: Sequence[KVEvent | DeviceCleared]) -> None:
        """Send events of the device as the next batch."""
        self._put((time.time(), events))

    def publish_tiers(self, news: Sequence[TierNews]) -> None:
        """Send the news of the tiers in batches of their own, when there is time."""
        self._tier_news.extend(news)
        os.eventfd_write(self._wakeup, 1)

    def answer(self, call: GetKVEvents | FollowKVEvents) -> None:
        """Answer when all batches before have been sent. `FollowKVEvents` is answered with what has been announced, and
        then with each batch."""
        self._put(call)

    def close(self) -> None:
        """Send what is queued, then stop."""
        self._put(None)
        self._thread.join()
        os.close(self._wakeup)

    def _put(
        self, entry: tuple[float, Sequence[KVEvent | DeviceCleared]] | GetKVEvents | FollowKVEvents | None
    ) -> None:
        self._queue.append(entry)
        os.eventfd_write(self._wakeup, 1)

    def _serve(self) -> None:
        try:
            self._run()
        except Exception as error:
            logger.exception("KV events cannot be published")
            self._fail(error)
        finally:
            self._close_sockets(_LINGER_MS)

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._wakeup, zmq.POLLIN)
        if self._replayer is not None:
            poller.register(self._replayer, zmq.POLLIN)
        dropped = Dropped("dropped a request for earlier KV events that could not be decoded")
        refused = Dropped("KV events are not published yet")
        is_open = True
        while is_open:
            ready = dict(poller.poll(self._milliseconds_left()))
            if self._unopened:
                try:
                    self._open_sockets()
                except ConfigError as error:  # keep serving: the cause may go away
                    refused.add(error)
                if not self._unopened:
                    known: list[KVEvent] = [AllBlocksCleared(), *self._view.events()]  # subscribers know others
                    self._send(time.time(), known)
            if self._wakeup in ready:
                os.eventfd_read(self._wakeup)
            while self._queue:
                match self._queue.popleft():
                    case None:
                        is_open = False
                    case GetKVEvents() as call:
                        self._answer(call)
                    case FollowKVEvents() as call:
                        self._follow(call)
                    case (moment, events):
                        self._send(moment, self._view.take(events))
            if self._tier_news and time.monotonic() >= self._tiers_due:
                self._send_tiers()
            if self._replayer is not None and self._replayer in ready:
                try:
                    self._replay(self._replayer)
                except ValueError as error:
                    dropped.add(error)

    def _milliseconds_left(self) -> int | None:
        """Until something is due; None: nothing will be."""
        if self._tier_news:
            return max(0, math.ceil((self._tiers_due - time.monotonic()) * 1000))
        return _RETRY_MS if self._unopened else None

    def _send_tiers(self) -> None:
        events, is_done = self._view.take_tiers(self._tier_news[0])
        if is_done:
            self._tier_news.popleft()
        if events:
            self._send(time.time(), events, of_tiers=True)
        self._tiers_due = time.monotonic() + _TIER_PAUSE

    def _send(self, moment: float, events: list[KVEvent], *, of_tiers: bool = False) -> None:
        """Send a batch, which the view has taken."""
        payload = msgspec.msgpack.encode(KVEventBatch(moment, events, self._replica))
        self._sequence += 1
        self._publisher.send_multipart((self._topic, self._sequence.to_bytes(8), payload))
        self._sent.append(payload)
        for client, follower in self._followers.items():
            if follower.has_tiers or not of_tiers:
                follower.is_behind = follower.is_behind or follower.num_bytes > follower.most_bytes
                if not follower.is_behind:
                    self._tell(client, follower, payload)

    def _follow(self, call: FollowKVEvents) -> None:
        follower = self._followers.get(call.client)
        if call.heard != NOTHING_SENT:
            if follower is None:
                return
            follower.hear(call.heard)
            if not follower.is_behind or follower.num_bytes > _AHEAD_BYTES // 2:
                return
        earlier = NOTHING_SENT if follower is None else follower.number
        follower = self._followers[call.client] = _FollowingProcess(call.has_tiers, earlier)
        is_first, moment = True, time.time()
        for part in self._view.hashes(_PART, has_tiers=call.has_tiers):
            payload = msgspec.msgpack.encode(KVEventBatch(moment, [part], self._replica))
            self._tell(call.client, follower, payload, is_first=is_first, has_more=True)
            is_first = False
            time.sleep(_PART_PAUSE)
        payload = msgspec.msgpack.encode(KVEventBatch(moment, [], self._replica))
        self._tell(call.client, follower, payload, is_first=is_first)
        follower.most_bytes = follower.num_bytes + _AHEAD_BYTES

    def _tell(
        self,
        client: int,
        follower: _FollowingProcess,
        payload: bytes,
        *,
        is_first: bool = False,
        has_more: bool = False,
    ) -> None:
        follower.number += 1
        follower.unheard.append((follower.number, len(payload)))
        follower.num_bytes += len(payload)
        self._reply(
            client, KVEventsNews(follower.number, payload, is_first, has_more, self._replica, self._incarnation)
        )

    def _answer(self, call: GetKVEvents) -> None:
        def reply(*, has_more: bool) -> None:
            content, own = b",".join(items), (self._replica, self._incarnation)
            self._reply(call.client, KVEventsState(call.call_id, self.source, self._sequence, content, has_more, *own))

        items, size = list[bytes](), 0
        for event in self._view.events() if call.has_blocks else ():
            items.append(msgspec.json.encode(event))
            if (size := size + len(items[-1])) >= _PART_BYTES:
                reply(has_more=True)
                items, size = [], 0
                time.sleep(_PART_PAUSE)
        reply(has_more=False)

    def _replay(self, socket: zmq.Socket[bytes]) -> None:
        """Answer a request for earlier batches. Raises `ValueError` if it is none."""
        client, empty, number = socket.recv_multipart()
        if empty or len(number) != 8:
            raise ValueError(f"expected an empty frame and 8 bytes, got {len(empty)} and {len(number)}")
        oldest = self._sequence + 1 - len(self._sent)
        first = min(max(int.from_bytes(number), oldest), self._sequence + 1)
        for sequence, payload in enumerate(islice(self._sent, first - oldest, None), first):
            socket.send_multipart((client, b"", self._topic, sequence.to_bytes(8), payload))
        socket.send_multipart((client, b"", b"", END_OF_REPLAY, b""))

    def _open_sockets(self) -> None:
        """Open the remaining sockets, except those whose endpoint an earlier server still uses. Can be called again.
        Raises `ConfigError`."""
        for entry in [*self._unopened]:
            socket, endpoint, listens = entry
            host, path = _host(endpoint), _path(endpoint)
            if ":" in host:
                socket.setsockopt(zmq.IPV6, 1)
            try:
                if path is not None:
                    _check_free(path)
                if listens or endpoint.startswith("ipc:") or host in _WILDCARDS or "::" in host:  # as in vLLM
                    socket.bind(endpoint)
                else:
                    socket.connect(endpoint)
            except (OSError, zmq.ZMQError) as error:
                if error.errno == errno.EADDRINUSE and self._waits_for_ports:
                    continue
                reason = zmq.strerror(error.errno) if error.errno else str(error)
                raise ConfigError(f"--kv-events-config: cannot use {endpoint}: {reason.lower()}") from None
            self._paths += filter(None, [path])
            self._unopened.remove(entry)

    def _close_sockets(self, linger: int) -> None:
        """Remove the socket files, then close the sockets: once they are closed, a successor may have bound the paths.
        `linger` is in milliseconds."""
        for path in self._paths:
            with contextlib.suppress(OSError):
                if path.is_socket():
                    path.unlink()
        self._context.destroy(linger)


def _path(endpoint: str) -> Path | None:
    """Return the socket file of an `ipc://` endpoint; None for TCP, abstract sockets, and paths that ZeroMQ chooses."""
    name = endpoint.removeprefix("ipc://")
    return None if name == endpoint or name.startswith(("@", "*")) else Path(name)


def _check_free(path: Path) -> None:
    """Check that no other process loses `path`, which ZeroMQ removes before it binds. Raises `OSError`: EADDRINUSE if a
    process listens there, EEXIST if it is not a socket."""
    try:
        if not stat.S_ISSOCK(path.stat().st_mode):
            raise FileExistsError(errno.EEXIST, "not a socket")
        with sockets.socket(sockets.AF_UNIX) as probe, contextlib.suppress(BlockingIOError):  # many connect to it
            probe.setblocking(False)
            probe.connect(str(path))
    except (FileNotFoundError, ConnectionRefusedError):
        return
    raise OSError(errno.EADDRINUSE, "a process listens there")


def _host(endpoint: str) -> str:
    """The host of a TCP endpoint; empty: it is none."""
    return urlsplit(endpoint.replace("*", "0.0.0.0", 1)).hostname or "" if endpoint.startswith("tcp:") else ""


def _reached(socket: zmq.Socket[bytes], endpoint: str, address: str) -> str:
    """The endpoint of a socket, with the address at which this host is reached, and the port that it has got."""
    found = socket.getsockopt_string(zmq.LAST_ENDPOINT) or endpoint
    return tcp_url(address, int(found.rpartition(":")[2])) if _host(endpoint) in _WILDCARDS else found


def of_replica(endpoint: str, replica: int) -> str:
    """Return a replica's endpoint: ports follow each other, except port 0, which the system chooses."""
    if not replica:
        return endpoint
    if endpoint.startswith("ipc:"):
        return f"{endpoint}_dp{replica}"
    host, _, port = endpoint.rpartition(":")
    return endpoint if int(port) == 0 else f"{host}:{int(port) + replica}"
