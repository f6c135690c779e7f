"""The sockets between the KV stores of several hosts, which are authenticated and encrypted with the cluster token."""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import msgspec
import zmq

from quire.engine.cluster.network import resolve_address, tcp_url
from quire.engine.cluster.security import Security, split
from quire.engine.config.kv_store_config import ip_of
from quire.engine.kv_store.launch import KVStoreArgs
from quire.engine.kv_store.peer_server import PeerServer
from quire.engine.kv_store.peers import PeerTier
from quire.engine.kv_store.store import KVStore
from quire.engine.protocol.errors import ConfigError
from quire.engine.protocol.kv_peers import FromPeer, ToPeer
from quire.engine.protocol.kv_store import FromStore

_BURST = 16
"""Messages taken from a socket before everything else gets its turn."""
_QUEUE = 8
"""Maximum messages that wait in the connection of a reader."""
_RESOLVE_SECONDS = 30.0
"""Interval at which names are resolved again: orchestrators move a name to a new address with its host."""
_LISTEN_SECONDS = 1.0
"""Interval between attempts to listen at a port that another program has."""

logger = logging.getLogger(__name__)


class PeerLinks:
    """Reads from peers through one socket each, and answers all readers through one socket. `poller` has all of them.

    A thread resolves names, repeatedly, and sockets connect to addresses, so that a name server that does not answer
    delays nothing else.
    """

    def __init__(self, poller: zmq.Poller, token: str, call: Callable[[Callable[[], None]], None]) -> None:
        """`call` makes the thread that owns this object call a function."""
        self._poller, self._call, self._is_closed = poller, call, threading.Event()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._security = Security(self._context, token)
        self._encode = msgspec.msgpack.Encoder().encode
        self._peers: dict[str, zmq.Socket[bytes]] = {}
        self._used: tuple[str, ...] = ()
        self._server: zmq.Socket[bytes] | None = None

    def listen(self, url: str) -> bool:
        """Let others read from this store; returns False if another program has the port. Raises `zmq.ZMQError`."""
        socket = self._socket(zmq.ROUTER)
        socket.setsockopt(zmq.SNDHWM, _QUEUE)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a full connection raises `zmq.Again`
        try:
            self._security.bind(socket, url)
        except zmq.ZMQError as error:
            socket.close()
            if error.errno != errno.EADDRINUSE:
                raise
            return False
        self._server = socket
        self._poller.register(socket, zmq.POLLIN)
        return True

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        return socket

    def use(self, addresses: Sequence[str]) -> None:
        """Connect to these peers (`HOST:PORT`), and to no others."""
        known, self._used = self._used, tuple(addresses)
        for address in self._peers.keys() - {*addresses}:
            self._disconnect(address)
        new = [each for each in addresses if each not in known]
        names = {each: each.rpartition(":")[0] for each in new if ip_of(each) is None}
        for address in new:
            if address not in names:
                self._connect(address, address)
        if names:
            threading.Thread(target=self._resolve, args=(names,), daemon=True, name="kv-peer-names").start()

    def _resolve(self, names: dict[str, str]) -> None:
        """In a thread: connect to the peers with these names, and again when a name has a new address, as long as they
        are used."""
        known = dict[str, str]()
        while names := {address: name for address, name in names.items() if address in self._used}:
            for address, name in names.items():
                try:
                    found = resolve_address(name)
                except ConfigError as error:
                    if address not in known:
                        logger.warning("--kv-peers: %s; trying again", error)
                        known[address] = ""
                    continue
                if known.get(address) != found:
                    known[address] = found
                    url = tcp_url(found, int(address.rpartition(":")[2])).removeprefix("tcp://")
                    self._call(partial(self._connect, address, url))
            if self._is_closed.wait(_RESOLVE_SECONDS):
                return

    def _connect(self, address: str, to: str) -> None:
        """Connect to a used peer at an IP address, in place of its earlier connection."""
        self._disconnect(address)
        if address not in self._used:
            return
        socket = self._socket(zmq.DEALER)
        socket.setsockopt(zmq.IMMEDIATE, 1)  # nothing waits for a peer that is not there
        try:
            self._security.connect(socket, f"tcp://{to}")
        except zmq.ZMQError as error:
            socket.close()
            return logger.warning("the KV store at %s cannot be reached: %s", address, str(error).lower())
        self._peers[address] = socket
        self._poller.register(socket, zmq.POLLIN)

    def _disconnect(self, address: str) -> None:
        if (socket := self._peers.pop(address, None)) is not None:
            self._poller.unregister(socket)
            socket.close()

    def ask(self, address: str, message: ToPeer) -> None:
        """Send a message to a peer, or drop it if it takes none."""
        if (socket := self._peers.get(address)) is not None:
            with contextlib.suppress(zmq.Again):
                socket.send_multipart(split(self._encode(message)), zmq.NOBLOCK)

    def answer(self, name: bytes, message: FromPeer, content: memoryview | None) -> bool:
        """Send a message to a reader, or drop it if the reader is gone; returns False if it takes none at present."""
        assert self._server is not None
        frames: list[bytes | memoryview] = [name, self._encode(message), *([] if content is None else [content])]
        try:
            self._server.send_multipart(frames, zmq.NOBLOCK)  # copies the frames
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno != errno.EHOSTUNREACH:
                raise
        return True

    def receive(
        self,
        ready: dict[zmq.Socket[bytes], int],
        on_answer: Callable[[str, Sequence[memoryview]], None],
        on_question: Callable[[bytes, Sequence[bytes]], None],
    ) -> None:
        """Pass on what has arrived on the sockets that are `ready`."""
        if self._server in ready:
            for name, *frames in self._arrived(self._server):
                on_question(name.bytes, [frame.bytes for frame in frames])
        for address, socket in [*self._peers.items()]:
            if socket in ready:
                for frames in self._arrived(socket):
                    on_answer(address, [frame.buffer for frame in frames])

    def _arrived(self, socket: zmq.Socket[bytes]) -> Iterator[list[zmq.Frame]]:
        for _ in range(_BURST):
            if socket.closed:
                return
            try:
                yield socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return

    def close(self) -> None:
        for socket in (*self._peers.values(), *([] if self._server is None else [self._server])):
            socket.close()
        self._is_closed.set()
        self._context.term()


class Peers:
    """Everything about stores of other hosts in the process of a store: reading from them, and letting them read."""

    def __init__(
        self, args: KVStoreArgs, store: KVStore, poller: zmq.Poller, call: Callable[[Callable[[], None]], None]
    ) -> None:
        """For `call` see `PeerLinks`. Raises `ConfigError` if the address to listen at is not this host's."""
        assert args.config.kv_store is not None
        self._args, self._store, self._config, self._addresses = args, store, args.config.kv_store, args.peers
        self._links = PeerLinks(poller, args.config.parallel.cluster_token, call)
        self._next_listen = 0.0 if args.peer_address else math.inf
        """When to try to listen next."""
        self._listen()
        self._tier: PeerTier | None = None
        self._server: PeerServer | None = None

    def _listen(self) -> None:
        """Try to listen, repeatedly until the port is free: with --takeover, the old server still has it."""
        if (now := time.monotonic()) < self._next_listen:
            return
        is_first, self._next_listen = not self._next_listen, now + _LISTEN_SECONDS
        address = self._args.peer_address
        try:
            is_listening = self._links.listen(f"tcp://{address}")
        except zmq.ZMQError as error:
            raise ConfigError(
                f"the KV store cannot listen at {address}: {str(error).lower()}; set QUIRE_HOST_IP to an address of "
                "this host"
            ) from None
        if is_listening:
            self._next_listen = math.inf
            logger.info("the KV stores of other hosts read from this one at %s", address)
        elif is_first:
            logger.warning(
                "another program listens at %s: the KV stores of other hosts cannot read from this one until it ends; "
                "unless it is the server that this one takes over from, choose another --kv-peer-port",
                address,
            )

    def begin(self, signature: bytes, sizes: Sequence[int]) -> None:
        """Begin to read from others, and to let them read, now that the signature is known."""
        links, store, address = self._links, self._store, self._args.peer_address
        self._tier = tier = PeerTier(signature, sizes, links.ask)
        self.use(self._addresses)
        store.use_peers(tier, -(-self._config.min_tokens // self._args.config.cache.block_size))
        self._server = PeerServer(
            signature,
            sizes,
            store.handle,
            lambda links, counts_granted: store.find(links, counts_granted=counts_granted),
            store.locate,
            store.forget_replica,
            tier,
            address,
            links.answer,
            self._config.peer_bandwidth,
        )

    def use(self, addresses: Sequence[str]) -> None:
        """Read from the stores at these addresses, and from no others."""
        self._addresses = tuple(each for each in dict.fromkeys(addresses) if each != self._args.peer_address)
        if self._tier is not None:
            self._tier.use(self._addresses)
            self._links.use(self._addresses)

    def seconds_left(self) -> float:
        """Seconds until `run` has something to do without messages."""
        listen = self._next_listen - time.monotonic()
        if self._tier is None or self._server is None:
            return max(0.0, listen)
        return min(max(0.0, listen), self._tier.seconds_left(), self._server.seconds_left())

    def run(self, ready: dict[Any, int]) -> None:
        """Take what has arrived, and do what is due."""
        self._listen()
        if self._tier is None or self._server is None:
            return self._links.receive(ready, lambda address, frames: None, lambda name, frames: None)
        self._links.receive(ready, self._tier.receive, self._server.receive)
        self._tier.tick()
        self._server.pump()
        self._store.sent_peer_bytes = self._server.sent_bytes

    def deliver(self, client: bytes, message: FromStore) -> None:
        """Pass the store's answer on to a reader."""
        if self._server is not None:
            self._server.deliver(client, message)
