"""The process of a KV store: cores over its socket, memory that is mapped, and a disk tier that outlives it."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import zmq

from quire.engine.config.engine_config import EngineConfig, KVStoreConfig
from quire.engine.config.kv_layout import KVKind, kv_layout
from quire.engine.config.options import EngineOptions
from quire.engine.config.resolve import resolve
from quire.engine.kv_store.arena import open_arena
from quire.engine.kv_store.launch import KVStoreArgs, start_kv_store
from quire.engine.process.runtime_folder import RuntimeFolder
from quire.engine.process.supervisor import Process
from quire.engine.protocol.kv_store import DISK, MEMORY, FoundKV, FromStore, KVEntry, KVStoreStats, LookUpKV, ToStore
from quire.engine.protocol.supervision import Failed, FromProcess, Heartbeat, Ready, ReplicaRemoved, Shutdown, ToProcess
from tests.fakes.kv_store import StoreCore, chain

SECONDS = 60


class ZmqCore(StoreCore):
    """A core whose messages go over a socket."""

    def __init__(self, kinds: tuple[KVKind, ...], address: str, replica: int = 0, incarnation: int = 1) -> None:
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, f"{replica}.{incarnation}".encode())
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(address)
        super().__init__(kinds, self._send_frame, replica, incarnation)
        self._decode = msgspec.msgpack.Decoder[FromStore](FromStore).decode

    def _send_frame(self, message: ToStore) -> None:
        self._socket.send(msgspec.msgpack.encode(message))

    def wait(self, until: Callable[[], bool]) -> None:
        """Receive messages until something holds."""
        deadline = time.monotonic() + SECONDS
        while not until():
            left = max(0.0, deadline - time.monotonic())  # the store tells its stats every second
            assert self._socket.poll(int(left * 1000)), f"it has not come to that; last: {self.received[-1:]}"
            self.receive(self._decode(self._socket.recv()))

    def wait_for_stats(self, is_right: Callable[[KVStoreStats], bool]) -> KVStoreStats:
        """Wait until the store's state is as it should be; the last message is that state."""

        def has_come() -> bool:
            last = self.received[-1] if self.received else None
            return isinstance(last, KVStoreStats) and is_right(last)

        self.wait(has_come)
        last = self.received[-1]
        assert isinstance(last, KVStoreStats)
        return last

    def store_all(self, links: list[bytes]) -> None:
        count = len(self.received)
        self.offer(links)
        self.wait(lambda: len(self.received) > count and bool(self.grants))
        self.finish()

    def tiers(self, links: list[bytes]) -> list[list[int]]:
        """Look up a chain; returns the tiers by kind."""
        count = len(self.received)
        self._send_frame(LookUpKV(1, links))
        self.wait(lambda: len(self.received) > count and isinstance(self.received[-1], FoundKV))
        found = self.received[-1]
        assert isinstance(found, FoundKV)
        return [list(each) for each in found.tiers]

    def load_all(self, entries: list[KVEntry]) -> int:
        call = self.load(entries)
        self.wait(lambda: len(self.loaded[call]) == len(entries))
        assert None not in self.loaded[call].values()
        return call

    def close(self) -> None:
        self._socket.close()


class StoreUnderTest:
    """Starts the process, again and again."""

    def __init__(self, config: EngineConfig) -> None:
        self.config, self.kinds = config, kv_layout(config).kinds
        self._folder = RuntimeFolder()
        self.address = f"ipc://{self._folder.path}/kv-store"
        self.process: Process | None = None

    def start(self) -> None:
        self.process = start_kv_store(KVStoreArgs(self.config, self.address, self._folder.path, "info"))

    def hear(self) -> FromProcess:
        """The next message to the supervisor that is no heartbeat."""
        assert self.process is not None
        while self.process.connection.poll(SECONDS):
            message: FromProcess = msgspec.msgpack.decode(self.process.connection.recv_bytes(), type=FromProcess)
            if not isinstance(message, Heartbeat):
                return message
        raise AssertionError("no message")

    def send(self, message: ToProcess) -> None:
        assert self.process is not None
        self.process.connection.send_bytes(msgspec.msgpack.encode(message))

    def end(self) -> int | None:
        """Wait for the process; returns its exit code."""
        assert self.process is not None
        try:
            while True:
                self.process.connection.recv_bytes()
        except (EOFError, OSError):
            self.process.connection.close()
        code: int = self.process.wait()  # type: ignore[attr-defined]
        self.process = None
        return code

    def close(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.end()
        self._folder.remove()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[StoreUnderTest]:
    config = resolve(EngineOptions(device="cpu", max_model_len=256, max_num_seqs=4))
    kv_store = KVStoreConfig(memory_bytes=2**24, disk_path=str(tmp_path / "disk"), disk_bytes=2**26)
    made = StoreUnderTest(dataclasses.replace(config, kv_store=kv_store))
    yield made
    made.close()


def test_what_was_stored_outlives_the_process(store: StoreUnderTest) -> None:
    """In order: stored, read by another core, written to disk at the end, read from there by the next process. The core
    of before, whose connection goes on, learns of the next one's memory."""
    store.start()
    assert isinstance(store.hear(), Ready)
    core, other = ZmqCore(store.kinds, store.address), ZmqCore(store.kinds, store.address, replica=1)
    links = chain(1, 2, 3, 4)
    entries = [KVEntry(link, kind) for link in links for kind in range(len(store.kinds))]
    for each in (core, other):
        each.open()
        each.wait(lambda each=each: bool(each.path))  # type: ignore[misc]
    core.store_all(links)
    core.wait_for_stats(lambda stats: stats.stored_bytes > 0)
    other.load_all(entries)
    store.send(ReplicaRemoved(1))
    core.wait_for_stats(lambda stats: not stats.disk_error)  # the digest of the weights is known
    last = chain(5, 6)
    core.store_all(last)
    assert core.tiers(last) == [[MEMORY] * 2] * len(store.kinds)  # it has heard of them
    store.send(Shutdown())
    assert store.end() == 0

    path = core.path
    store.start()
    assert isinstance(store.hear(), Ready)
    core.offer([b"unknown"])
    core.wait(lambda: core.path != path)
    core.open()
    stats = core.wait_for_stats(lambda stats: stats.disk_entries == len(entries) + 2 * len(store.kinds))
    assert stats.memory_entries == 0
    assert core.tiers(links) == [[DISK] * 4] * len(store.kinds)
    core.load_all(entries)
    assert core.tiers(links) == [[MEMORY] * 4] * len(store.kinds)
    core.close()
    other.close()


def test_a_killed_store_leaves_nothing_and_ranks_may_still_write(store: StoreUnderTest) -> None:
    """Its memory is there as long as ranks have it mapped."""
    store.start()
    assert isinstance(store.hear(), Ready)
    core = ZmqCore(store.kinds, store.address)
    core.open()
    core.wait(lambda: bool(core.path))
    core.offer(chain(1, 2))
    core.wait(lambda: bool(core.grants))
    assert store.process is not None
    store.process.kill()
    store.end()
    for offset in core.grants:
        core.write(offset)
    with pytest.raises(FileNotFoundError):
        open_arena(core.path)
    core.close()


def test_too_little_memory_is_the_users_error(store: StoreUnderTest) -> None:
    assert store.config.kv_store is not None
    store.config = dataclasses.replace(
        store.config, kv_store=dataclasses.replace(store.config.kv_store, memory_bytes=100)
    )
    store.start()
    failed = store.hear()
    assert isinstance(failed, Failed)
    assert failed.user_error
    assert "increase --kv-offloading-size" in failed.reason
    assert store.end() == 2
