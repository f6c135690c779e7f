"""Publishes the KV events of a replica (`quire.engine.protocol.kv_events`) from a thread of the core, as vLLM does.

- a PUB socket sends each batch; a subscriber that is too slow loses batches, and sees that numbers are missing;
- a ROUTER socket sends the last batches again: a REQ or DEALER client sends an empty frame and the number of the first
  one, as 8 bytes, and receives an empty frame, the topic, the number and the batch of each; the last reply has an empty
  topic and batch, and `END_OF_REPLAY`;
- `GetKVEvents` is answered with the blocks that the replica has after the last batch, so that a router that starts late
  needs only the batches that follow.

The loop of the core never waits: nothing here blocks on a subscriber, and when the queue is full, events wait for the
next batch.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from urllib.parse import urlsplit

import msgspec
import zmq

from quire.engine.cluster.network import tcp_url
from quire.engine.cluster.security import Dropped
from quire.engine.config.engine_config import KVEventsConfig
from quire.engine.protocol.errors import ConfigError
from quire.engine.protocol.kv_events import (
    END_OF_REPLAY,
    NOTHING_SENT,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    GetKVEvents,
    KVEvent,
    KVEventBatch,
    KVEventSource,
    KVEventsState,
)

logger = logging.getLogger(__name__)

_LINGER_MS = 1000
_RETRY_MS = 200
"""Interval at which ports are tried that another server has."""
_WILDCARDS = ("0.0.0.0", "::")
_EVENTS_AT_ONCE = 64
"""Events that are encoded at once, in which time the loop cannot run."""


class KVEventPublisher:
    """The sockets, the thread that owns them, and what it has sent."""

    def __init__(
        self,
        config: KVEventsConfig,
        replica: int,
        address: str,
        reply: Callable[[int, KVEventsState], None],
        fail: Callable[[Exception], None],
        incarnation: int = 0,
    ) -> None:
        """`address` is how this host is reached; `reply` sends an answer to an API process, `fail` tells the loop that
        the thread has ended. Raises `ConfigError` if a port cannot be had."""
        self._replica, self._incarnation, self._reply, self._fail = replica, incarnation, reply, fail
        self._topic, self._max_queued = config.topic.encode(), config.max_queue_size
        self._context = zmq.Context()
        self._publisher = self._context.socket(zmq.PUB)
        self._publisher.set_hwm(config.hwm)
        self._unopened = [(self._publisher, of_replica(config.endpoint, replica), False)]
        """Sockets that are not bound or connected yet, where they are to be, and whether they listen in any case."""
        self._replayer: zmq.Socket[bytes] | None = None
        if config.replay_endpoint is not None:
            self._replayer = self._context.socket(zmq.ROUTER)
            self._replayer.set_hwm(4 * (config.buffer_steps + 1))  # of one client, which may ask again
            self._replayer.setsockopt(zmq.MAXMSGSIZE, 64)  # of requests
            self._unopened.append((self._replayer, of_replica(config.replay_endpoint, replica), True))
        asked = [(socket, endpoint) for socket, endpoint, _ in self._unopened]
        try:
            self._open_sockets()
        except zmq.ZMQError as error:
            if error.errno != zmq.EADDRINUSE or not config.waits_for_ports:
                self._context.destroy(0)
                text = f"--kv-events-config: cannot use {self._unopened[0][1]}: {(error.strerror or '').lower()}"
                raise ConfigError(text) from None
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
        self._queue: deque[KVEventBatch | GetKVEvents | None] = deque()
        self._wakeup = os.eventfd(0)
        self._thread = threading.Thread(target=self._serve, daemon=True, name="kv-events")
        self._thread.start()
        self.publish([AllBlocksCleared()])  # subscribers may know the blocks of an earlier start

    @property
    def is_full(self) -> bool:
        """Whether events have to wait."""
        return len(self._queue) >= self._max_queued

    def publish(self, events: list[KVEvent]) -> None:
        """Send events as the next batch."""
        self._put(KVEventBatch(time.time(), events, self._replica))

    def answer(self, call: GetKVEvents) -> None:
        """Answer when all batches before have been sent."""
        self._put(call)

    def close(self) -> None:
        """Send what is queued, then stop."""
        self._put(None)
        self._thread.join()
        os.close(self._wakeup)

    def _put(self, entry: KVEventBatch | GetKVEvents | None) -> None:
        self._queue.append(entry)
        os.eventfd_write(self._wakeup, 1)

    def _serve(self) -> None:
        try:
            self._run()
        except Exception as error:
            logger.exception("KV events cannot be published")
            self._fail(error)
        finally:
            self._context.destroy(_LINGER_MS)

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._wakeup, zmq.POLLIN)
        if self._replayer is not None:
            poller.register(self._replayer, zmq.POLLIN)
        dropped = Dropped("dropped a request for earlier KV events that could not be decoded")
        is_open = True
        while is_open:
            ready = dict(poller.poll(_RETRY_MS if self._unopened else None))
            if self._unopened:
                with contextlib.suppress(zmq.ZMQError):
                    self._open_sockets()
                    events: list[KVEvent] = [AllBlocksCleared(), *self._view.events()]  # subscribers know others
                    self._send(KVEventBatch(time.time(), events, self._replica))
            if self._wakeup in ready:
                os.eventfd_read(self._wakeup)
            while self._queue:
                match self._queue.popleft():
                    case None:
                        is_open = False
                    case GetKVEvents() as call:
                        self._answer(call)
                    case KVEventBatch() as batch:
                        self._send(batch)
            if self._replayer is not None and self._replayer in ready:
                try:
                    self._replay(self._replayer)
                except ValueError as error:
                    dropped.add(error)

    def _send(self, batch: KVEventBatch) -> None:
        payload = msgspec.msgpack.encode(batch)
        self._sequence += 1
        self._publisher.send_multipart((self._topic, self._sequence.to_bytes(8), payload))
        self._sent.append(payload)
        self._view.apply(batch.events)

    def _answer(self, call: GetKVEvents) -> None:
        parts: list[bytes] = []
        if call.has_blocks:
            events = list(self._view.events())
            starts = range(0, len(events), _EVENTS_AT_ONCE)
            parts += (msgspec.json.encode(events[start : start + _EVENTS_AT_ONCE])[1:-1] for start in starts)
        content = b"[" + b",".join(parts) + b"]" if call.has_blocks else b""
        state = KVEventsState(call.call_id, self.source, self._sequence, content, self._replica, self._incarnation)
        self._reply(call.client, state)

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
        """Raises `zmq.ZMQError`, and can be called again."""
        while self._unopened:
            socket, endpoint, listens = self._unopened[0]
            host = _host(endpoint)
            if ":" in host:
                socket.setsockopt(zmq.IPV6, 1)
            if listens or host in _WILDCARDS or "::" in host or endpoint.startswith("ipc:"):  # as in vLLM
                socket.bind(endpoint)
            else:
                socket.connect(endpoint)
            del self._unopened[0]


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


class KVEventsView:
    """The blocks that events have announced."""

    def __init__(self) -> None:
        self._blocks: dict[tuple[str | None, int | None, int | None], BlockStored] = {}
        """One each, by medium, group and hash."""

    def apply(self, events: list[KVEvent]) -> None:
        for event in events:
            match event:
                case BlockStored():
                    size, parent = event.block_size, event.parent_block_hash
                    keys = event.extra_keys or [None] * len(event.block_hashes)
                    for at, (number, extra_keys) in enumerate(zip(event.block_hashes, keys, strict=True)):
                        self._blocks[event.medium, event.group_idx, number] = BlockStored(
                            [number],
                            parent,
                            event.token_ids[at * size : (at + 1) * size],
                            size,
                            event.lora_id,
                            event.medium,
                            event.lora_name,
                            [extra_keys],
                            event.group_idx,
                            event.kv_cache_spec_kind,
                            event.kv_cache_spec_sliding_window,
                        )
                        parent = number
                case BlockRemoved():
                    for number in event.block_hashes:
                        del self._blocks[event.medium, event.group_idx, number]
                case AllBlocksCleared():
                    self._blocks.clear()

    def events(self) -> Iterator[BlockStored]:
        """Yield events that announce all blocks, parents before their children."""
        done: set[tuple[str | None, int | None, int | None]] = set()
        last: BlockStored | None = None
        for key in self._blocks:
            chain = []
            while key in self._blocks and key not in done:
                chain.append(block := self._blocks[key])
                done.add(key)
                key = *key[:2], block.parent_block_hash
            for block in reversed(chain):
                own = msgspec.structs.replace(
                    block,
                    block_hashes=[*block.block_hashes],
                    token_ids=[*block.token_ids],
                    extra_keys=[*(block.extra_keys or ())],
                )
                if last is None or not last.append(own):
                    if last is not None:
                        yield last
                    last = own
        if last is not None:
            yield last
