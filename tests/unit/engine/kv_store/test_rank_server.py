"""What ranks of other hosts may write and read in a store's memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import pytest
import zmq

from quire.engine.config.kv_layout import KVKind
from quire.engine.kv_store.checksum import placed_checksum
from quire.engine.kv_store.rank_server import RankServer
from quire.engine.protocol.kv_ranks import KVAnswer, KVRank, KVRuns, RankPlace, ReadKV, WriteKV
from quire.engine.protocol.kv_store import MEMORY, NO_TIER, KVEntry, StoredKV
from tests.fakes.frames import DEEP
from tests.fakes.kv_store import Host, chain, content

SIZE = 96
LINKS = chain(1)
ENTRY = KVEntry(LINKS[0], 0)
RUNS = [KVRuns(8, 2, 40, 2, 16, 8)]
"""Two layers with two rows each."""
BYTES = b"".join(content(ENTRY, SIZE)[start : start + 8] for start in (8, 24, 48, 64))


@dataclass
class Rank:
    """Asks the server, as a rank of another host does."""

    server: RankServer
    sender: KVRank
    place: RankPlace

    def write(self, found: bytes = BYTES, **changes: Any) -> str | None:
        """The error; None: there was no answer."""
        place = msgspec.Raw(msgspec.msgpack.encode(msgspec.structs.replace(self.place, **changes)))
        message = WriteKV(self.sender, 1, place, placed_checksum(place, BYTES))
        answer = self.server.receive([msgspec.msgpack.encode(message), found])
        return msgspec.msgpack.decode(answer[0], type=KVAnswer).error if answer else None

    def read(self) -> tuple[str, bytes] | None:
        place = msgspec.Raw(msgspec.msgpack.encode(self.place))
        answer = self.server.receive([msgspec.msgpack.encode(ReadKV(self.sender, 1, place))])
        if not answer:
            return None
        found, read = msgspec.msgpack.decode(answer[0], type=KVAnswer), b"".join(answer[1:])
        assert found.error or found.checksum == placed_checksum(place, read)
        return found.error, read

    def later(self, **changes: int) -> Rank:
        return replace(self, sender=msgspec.structs.replace(self.sender, **changes))


@pytest.fixture
def host() -> Host:
    return Host([KVKind((0,), SIZE)], 4096)


@pytest.fixture
def server(host: Host) -> Iterator[RankServer]:
    made = RankServer(host.store.of_ranks, "127.0.0.1", "", zmq.Poller())
    yield made
    made.close()


def test_a_rank_writes_what_its_core_was_granted_and_reads_what_it_loads(host: Host, server: RankServer) -> None:
    core = host.core(0, 5)
    core.offer(LINKS)
    (offset,) = core.grants
    rank = Rank(server, KVRank(0, 5, 3, 1), RankPlace(core.path, 0, offset, RUNS))
    assert "not loaded" in (rank.read() or ("", b""))[0]
    assert "not granted" in (rank.write(kind=1) or "")
    assert "not granted" in (rank.write(offset=offset + 64) or "")
    assert "not granted" in (rank.write(arena="/proc/1/fd/1#another") or "")
    assert "not granted" in (rank.later(replica=1).write() or "")
    assert rank.write(BYTES[:-1] + b"\0") == rank.write(BYTES[:-1]) == "the data was damaged in transit"
    assert bytes(host.store.arena.view(0, offset)) == bytes(SIZE), "nothing of that was written"
    assert rank.write() == ""
    view = host.store.arena.view(0, offset)
    assert b"".join(view[start : start + 8] for start in (8, 24, 48, 64)) == BYTES
    assert view.tobytes().count(0) >= SIZE - len(BYTES), "and nothing else"
    core.finish()
    assert "not granted" in (rank.write() or "")
    assert "not loaded" in (rank.read() or ("", b""))[0]
    call = core.load([ENTRY])
    assert rank.read() == ("", BYTES)
    assert server.copied_bytes == 2 * len(BYTES)
    core.release(call)
    assert "not loaded" in (rank.read() or ("", b""))[0]
    assert core.look_up(LINKS) == [[MEMORY]]
    host.store.check_integrity()


def test_what_is_late_is_never_written(host: Host, server: RankServer) -> None:
    """Of an earlier connection of the rank, or of an earlier incarnation, which other hosts learn later of."""
    core = host.core(0, 5)
    core.offer(LINKS)
    (offset,) = core.grants
    rank = Rank(server, KVRank(0, 5, 3, 7), RankPlace(core.path, 0, offset, RUNS))
    assert rank.write() == ""
    assert "not granted" in (rank.later(number=6).write() or "")
    assert rank.later(number=8).write() == ""
    assert "not granted" in (rank.write() or "")
    assert rank.later(rank=2, number=1).write() == ""
    after = host.core(0, 6)
    after.offer(LINKS)
    (offset,) = after.grants
    late = replace(rank.later(number=9), place=msgspec.structs.replace(rank.place, offset=offset))
    assert "not granted" in (late.write() or "")
    assert late.later(incarnation=6, number=1).write() == ""
    assert "not granted" in (late.write() or "")
    after._send(StoredKV([], [offset], after.path))
    assert after.look_up(LINKS) == [[NO_TIER]]
    host.store.check_integrity()


def test_only_what_a_rank_may_do_silences_its_earlier_connections(host: Host, server: RankServer) -> None:
    """Neither what a stranger sends does, nor what an incarnation sent that another clock made."""
    core = host.core(0, 5)
    core.offer(LINKS)
    (offset,) = core.grants
    rank = Rank(server, KVRank(0, 5, 3, 1), RankPlace(core.path, 0, offset, RUNS))
    assert "not granted" in (rank.later(incarnation=1 << 62).write() or "")
    assert "not granted" in (rank.later(number=1 << 62).write(arena="") or "")
    assert rank.write() == ""
    host.store.forget_replica(0)
    before = host.core(0, 4)
    before.offer(LINKS)
    (offset,) = before.grants
    place = msgspec.structs.replace(rank.place, offset=offset)
    assert replace(rank.later(incarnation=4), place=place).write() == ""


@pytest.mark.parametrize(
    "runs",
    [
        KVRuns(0, 1, 0, 1, 0, SIZE + 1),
        KVRuns(SIZE - 7, 1, 0, 1, 0, 8),
        KVRuns(8, 2, 96, 1, 0, 8),
        KVRuns(8, 2, -8, 1, 0, 8),
        KVRuns(0, 1 << 60, 0, 1, 0, 0),
        KVRuns(0, 1 << 60, 0, 0, 0, 8),
        KVRuns(0, 0, 0, 1 << 60, 0, 8),
    ],
)
def test_bytes_outside_the_entry_are_not_touched(runs: KVRuns, host: Host, server: RankServer) -> None:
    core = host.core()
    core.offer(LINKS)
    (offset,) = core.grants
    rank = Rank(server, KVRank(0, 1, 0, 1), RankPlace(core.path, 0, offset, RUNS))
    assert rank.write(runs=[runs]) is None
    assert server.receive([]) == server.receive([b"\xff"]) == server.receive([b""]) == []


def test_a_message_that_would_take_long_or_is_nested_too_deeply_is_dropped() -> None:
    host = Host([KVKind((0,), 1 << 17)], 1 << 20)
    server = RankServer(host.store.of_ranks, "127.0.0.1", "", zmq.Poller())
    core = host.core()
    core.offer(LINKS)
    (offset,) = core.grants
    rank = Rank(server, KVRank(0, 1, 0, 1), RankPlace(core.path, 0, offset, [KVRuns(0, 1, 0, 1 << 16, 2, 1)]))
    assert rank.write() == "the data was damaged in transit"
    assert rank.write(runs=[KVRuns(0, 1, 0, 1 << 17, 1, 1)]) is None
    assert server.receive([msgspec.msgpack.encode(ReadKV(rank.sender, 1, DEEP))]) == []
    server.close()
