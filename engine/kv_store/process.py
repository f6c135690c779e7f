"""The process of a host's KV store: `quire-kv-store`.

One thread owns the store (`KVStore`). Messages of cores and of the supervisor wake it, and so do jobs that have ended
in other threads. The disk tier is used once the digest of the model's weights is known.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import math
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import msgspec
import zmq

from quire.engine.cluster.network import address_towards
from quire.engine.config.floors import doubling_context
from quire.engine.config.kv_layout import KVLayout, kv_layout
from quire.engine.config.memory_plan import format_bytes
from quire.engine.kv_store.disk import SCAN_SECONDS, DiskTier, signature_of
from quire.engine.kv_store.entries import Lane
from quire.engine.kv_store.launch import KVStoreArgs
from quire.engine.kv_store.peer_links import Peers
from quire.engine.kv_store.peer_server import PeerServer
from quire.engine.kv_store.rank_server import RankServer
from quire.engine.kv_store.store import KVStore
from quire.engine.process import current_process, log
from quire.engine.process.runtime_folder import RuntimeFolder
from quire.engine.process.supervisor import HEARTBEAT_SECONDS, SupervisorConnection
from quire.engine.protocol.errors import ConfigError, reason_of
from quire.engine.protocol.kv_store import FromStore, ToStore
from quire.engine.protocol.supervision import (
    Failed,
    Ready,
    Reload,
    ReplicaLost,
    ReplicaRemoved,
    SetLogLevel,
    Shutdown,
    ToProcess,
    UseKVPeers,
)

_THREADS = {Lane.SUM: 2, Lane.READ: 4, Lane.WRITE: 1}
_BURST = 64
"""Messages taken from cores before everything else gets its turn."""
_TELL_SECONDS = 0.01
"""Interval at which cores are told of a slice of changed entries."""
_FLUSH_SECONDS = 8.0
"""Time at the end to write entries to disk that only memory has; less than the supervisor waits."""
_DIGESTING = "the digest of the model's weights is being computed"

logger = logging.getLogger(__name__)


class StoreProcess:
    """The store, its socket and its threads."""

    def __init__(self, args: KVStoreArgs, connection: SupervisorConnection) -> None:
        """Raises `ConfigError` if there is not enough memory."""
        config = args.config.kv_store
        assert config is not None
        self._connection = connection
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        """Functions that other threads want this thread to call."""
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._pools = {lane: ThreadPoolExecutor(count, f"kv-{lane.name.lower()}") for lane, count in _THREADS.items()}
        layout = kv_layout(args.config)
        doubling = doubling_context(args.config) / args.config.cache.block_size
        self._store = KVStore(
            layout.kinds, config.memory_bytes, self._send, self._submit, on_piece=connection.beat, doubling=doubling
        )
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
        # Messages that a core cannot take at once must not be dropped: it would keep its grants forever.
        for option in (zmq.SNDHWM, zmq.RCVHWM, zmq.LINGER):
            self._socket.setsockopt(option, 0)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a core that connects again takes the place of its connection
        self._encode, self._decode = msgspec.msgpack.Encoder().encode, msgspec.msgpack.Decoder[ToStore](ToStore).decode
        self._num_jobs = 0
        self._next_scan = 0.0
        self._stop_at: float | None = None
        """When to end even if writes are in progress; None: not stopping."""
        self._disk_error = ""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(args.address.removeprefix("ipc://"))
        self._socket.bind(args.address)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._wake, zmq.POLLIN)
        self._peers: Peers | None = None
        if args.rank_host:
            try:
                host, token = address_towards(args.rank_host), args.config.parallel.cluster_token
                self._store.ranks = RankServer(self._store.of_ranks, host, token, self._poller)
            except ConfigError as error:
                logger.warning("KV is computed, because ranks on other hosts cannot reach the store: %s", error)
        threading.Thread(target=self._listen, daemon=True, name="supervisor").start()
        if config.disk_path:
            self._store.disk_error = self._disk_error = _DIGESTING
        if args.peers or args.peer_address:
            self._peers = Peers(args, self._store, self._poller, self._call)
        if config.disk_path or self._peers is not None:
            threading.Thread(target=self._find_signature, args=(args, layout), daemon=True, name="weights").start()
        logger.info(
            "KV store: %s of memory%s, entries of %s",
            format_bytes(config.memory_bytes),
            f", {format_bytes(config.disk_bytes)} in {config.disk_path}" * bool(config.disk_path),
            ", ".join(format_bytes(kind.size) for kind in layout.kinds),
        )

    def run(self) -> None:
        """Serve the cores until the supervisor stops this process; then write entries to disk that only memory has."""
        next_tick = next_slice = 0.0
        while not self._has_ended():
            if (now := time.monotonic()) >= next_tick:
                next_tick = now + HEARTBEAT_SECONDS
                self._connection.beat()
                self._tick(now)
                next_slice = now + _TELL_SECONDS
            elif now >= next_slice:
                next_slice = now + _TELL_SECONDS if self._store.tell() else next_tick
            due = min(next_tick - now, next_slice - now, self._store.entries.seconds_left())
            if self._peers is not None:
                due = min(due, self._peers.seconds_left())
            events = dict(self._poller.poll(max(0, math.ceil(due * 1000))))
            if self._wake in events:
                os.eventfd_read(self._wake)
            with contextlib.suppress(Empty):
                while True:
                    self._inbox.get_nowait()()
            if self._socket in events:
                self._receive()
            if self._store.ranks is not None:
                self._store.ranks.run(events)
            if self._peers is not None:
                self._peers.run(events)
            self._store.entries.write(all_now=self._stop_at is not None)

    def _has_ended(self) -> bool:
        if self._stop_at is None:
            return False
        is_idle = not self._num_jobs and not self._store.entries.num_unwritten and not self._socket.poll(0)
        return is_idle or time.monotonic() > self._stop_at

    def _receive(self) -> None:
        for _ in range(_BURST):
            try:
                client, frame = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._store.handle(client, self._decode(frame))

    def _send(self, client: bytes, message: FromStore) -> None:
        if self._peers is not None and PeerServer.is_reader(client):
            return self._peers.deliver(client, message)
        self._socket.send_multipart([client, self._encode(message)])  # dropped if the core is gone

    def _tick(self, now: float) -> None:
        self._store.tick()
        if (disk := self._store.entries.disk) is not None and now >= self._next_scan:
            self._next_scan = float("inf")
            self._scan(disk)
        if (error := self._store.stats().disk_error) != self._disk_error:
            if error:
                logger.warning("the disk tier is not in use: %s", error)
            elif self._disk_error != _DIGESTING:
                logger.info("the disk tier is in use again")
            self._disk_error = error

    def _scan(self, disk: DiskTier) -> None:
        """Scan files for a slice of time, and again until all have been seen; writes happen in between."""

        def scanned(has_more: bool) -> None:
            if has_more and self._stop_at is None:
                self._scan(disk)
            else:
                self._next_scan = time.monotonic() + SCAN_SECONDS

        self._submit(Lane.WRITE, disk.scan, scanned)

    def _find_signature(self, args: KVStoreArgs, layout: KVLayout) -> None:
        """In a thread: compute the signature, for which all weights may have to be read, then start to use the disk
        tier and peers."""
        config, start = args.config.kv_store, time.monotonic()
        assert config is not None
        try:
            signature = signature_of(args.config, layout)
        except ConfigError as error:
            return self._call(partial(self._lack_signature, str(error)))
        except Exception as error:  # whatever it is, the memory tier works
            if not (is_expected := isinstance(error, OSError)):
                logger.exception("the model's weights cannot be digested")
            reason = reason_of(error) if is_expected else f"{type(error).__name__}: {error}"
            return self._call(partial(self._lack_signature, f"the model's weights cannot be read: {reason}"))
        seconds, sizes = time.monotonic() - start, [kind.size for kind in layout.kinds]
        if config.disk_path:
            path, model = Path(config.disk_path), str(args.config.model.path)
            disk = DiskTier(path, config.disk_bytes, signature, sizes, model=model)
            logger.info("the disk tier is in use: the model's weights were digested in %.1f s", seconds)
            self._call(partial(self._store.use_disk, disk, config.disk_bandwidth))
        if self._peers is not None:
            self._call(partial(self._peers.begin, signature, sizes))

    def _lack_signature(self, reason: str) -> None:
        if self._store.disk_error:
            self._store.disk_error = reason
        if self._peers is not None:
            logger.warning("the KV stores of other hosts are not in use: %s", reason)

    def _submit(self, lane: Lane, job: Callable[[], Any], done: Callable[[Any], None]) -> None:
        """Run a job in a thread of a lane, see `quire.engine.kv_store.entries.Submit`."""

        def run() -> None:
            try:
                result = job()
            except Exception as error:
                self._call(partial(_raise, error))
            else:
                self._call(partial(self._finish, done, result))

        self._num_jobs += 1
        self._pools[lane].submit(run)

    def _finish(self, done: Callable[[Any], None], result: Any) -> None:
        self._num_jobs -= 1
        done(result)

    def _call(self, function: Callable[[], None]) -> None:
        """Make the thread of the store call a function."""
        self._inbox.put(function)
        os.eventfd_write(self._wake, 1)

    def _listen(self) -> None:
        with contextlib.suppress(EOFError):
            while True:
                self._call(partial(self._obey, self._connection.receive()))
        self._call(partial(self._obey, Shutdown()))

    def _obey(self, message: ToProcess) -> None:
        match message:
            case ReplicaRemoved(replica):
                self._store.forget_replica(replica)
            case ReplicaLost(replica):
                self._store.lose_replica(replica)
            case UseKVPeers(addresses) if self._peers is not None:
                self._peers.use(addresses)
            case SetLogLevel(level):
                log.set_level(level)
            case Reload(log_config, level):
                log.reload(log_config, level)
            case Shutdown() if self._stop_at is None:
                self._stop_at = time.monotonic() + _FLUSH_SECONDS


def _raise(error: Exception) -> None:
    raise error


def main() -> None:
    """Main function of the process."""
    start, connection = time.monotonic(), SupervisorConnection()
    args: KVStoreArgs = connection.receive_args()
    current_process.set_name("quire-kv-store")
    log.setup(args.log_level, "kv store")
    folder = RuntimeFolder(args.folder)  # this process may outlive the one that created it
    os.environ["TMPDIR"] = tempfile.tempdir = args.folder
    gc.disable()  # nothing here makes cycles, and a collection would visit a million entries
    code = 0
    try:
        process = StoreProcess(args, connection)
        connection.send(Ready({"kv store": time.monotonic() - start}))
        process.run()
    except ConfigError as error:
        connection.send(Failed(str(error), user_error=True))
        code = 2
    except Exception as error:
        logger.exception("the KV store failed")
        connection.send(Failed(f"the KV store failed: {type(error).__name__}: {error}"))
        code = 1
    folder.remove()
    sys.stdout.flush()
    os._exit(code)  # threads that read or write would be waited for
