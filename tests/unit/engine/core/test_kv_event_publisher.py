"""The sockets of KV events: routers that start at different times end with the same view."""

from __future__ import annotations

import json
import os
import random
import re
import socket
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue

import msgspec
import pytest
import zmq

from quire.engine.config.engine_config import KVEventsConfig
from quire.engine.core import kv_event_publisher
from quire.engine.core.kv_event_publisher import KVEventPublisher, of_replica
from quire.engine.protocol.errors import ConfigError
from quire.engine.protocol.kv_events import (
    BlockRemoved,
    BlockStored,
    FollowKVEvents,
    GetKVEvents,
    KVEvent,
    KVEventBatch,
    KVEventsNews,
    KVEventsState,
)
from quire.engine.protocol.kv_store import MEMORY, DescribedBlock, KVTiersChanged
from quire.engine.scheduler.kv_events import KVEvents
from tests.fakes.configs import engine_config
from tests.fakes.kv_router import END, KVRouter
from tests.fakes.waiting import until
from tests.unit.engine.scheduler.test_kv_events import take, with_events
from tests.unit.engine.scheduler.test_scheduler import Engine, tightened


@pytest.fixture
def config(tmp_path: Path) -> KVEventsConfig:
    found = with_events(engine_config()).kv_events
    assert found is not None
    return replace(
        found,
        endpoint=f"ipc://{tmp_path}/live",
        replay_endpoint=f"ipc://{tmp_path}/replay",
        buffer_steps=10_000,
        hwm=10_000,
        max_queue_size=10_000,
        topic="kv@pod@model",
    )


class Published(KVEventPublisher):
    """A publisher, and its answers."""

    def __init__(self, config: KVEventsConfig, replica: int = 0, incarnation: int = 0) -> None:
        self.answers: SimpleQueue[KVEventsState | KVEventsNews] = SimpleQueue()
        self.failures: SimpleQueue[Exception] = SimpleQueue()
        super().__init__(
            config, replica, "192.0.2.7", lambda client, state: self.answers.put(state), self.failures.put, incarnation
        )

    def state(self, *, has_blocks: bool = True) -> KVEventsState:
        """The answer, with all parts of a JSON array."""
        self.answer(GetKVEvents(0, 7, has_blocks))
        parts = list[bytes]()
        while True:
            state = self.answers.get(timeout=10)
            assert isinstance(state, KVEventsState)
            parts += filter(None, [state.events])
            if not state.has_more:
                return msgspec.structs.replace(state, events=b"[" + b",".join(parts) + b"]")

    def news(self) -> list[KVEventsNews]:
        """What API processes have been sent since the last call."""
        self.answer(GetKVEvents(0, 7, has_blocks=False))
        news = list[KVEventsNews]()
        while isinstance(message := self.answers.get(timeout=10), KVEventsNews):
            news.append(message)
        return news

    def router(self) -> KVRouter:
        assert self.source.replay_endpoint is not None
        return KVRouter(self.source.endpoint, self.source.replay_endpoint, self.source.topic.encode()[:2])


@pytest.fixture
def publisher(config: KVEventsConfig) -> Iterator[Published]:
    with closing(Published(config)) as found:
        yield found


def recorded() -> list[list[KVEvent]]:
    """The events of each step of random requests in a tight cache."""
    engine = Engine(with_events(tightened(engine_config(depth=2, windows=(None, 9)))))
    rng = random.Random(1)
    batches: list[list[KVEvent]] = []

    def step(turn: int) -> None:
        if turn < 40:
            prompt = [rng.randrange(2) for _ in range(rng.randrange(1, 60))]
            engine.add(str(turn), prompt, max_tokens=rng.randrange(1, 20))
        if events := take(engine):
            batches.append(events)

    engine.run(step, at_least=40)
    return batches


def test_routers_that_start_at_three_times_have_the_servers_view(publisher: Published) -> None:
    batches = recorded()
    third = len(batches) // 3
    with (
        closing(publisher.router()) as first,
        closing(publisher.router()) as second,
        closing(publisher.router()) as third_,
    ):
        while not first.num_live:  # until its subscription has arrived
            publisher.publish([])
            if first.poll(10):
                continue
        for events in batches[:third]:
            publisher.publish(events)
        start = publisher.state()
        second.start(start.sequence, json.loads(start.events))
        for events in batches[third : 2 * third]:
            publisher.publish(events)
        third_.replay()
        for events in batches[2 * third :]:
            publisher.publish(events)
        end = publisher.state()
        for router in (first, second, third_):
            while router.sequence < end.sequence:
                if not router.poll(2000):
                    router.replay()
        with closing(KVRouter()) as snapshot:
            snapshot.start(end.sequence, json.loads(end.events))
            assert snapshot.blocks
            assert first.blocks == second.blocks == third_.blocks == snapshot.blocks
        assert first.num_live > len(batches)


def test_a_snapshot_has_parents_before_their_children(publisher: Published, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_event_publisher, "_PART_BYTES", 200)

    def stored(number: int, parent: int | None) -> BlockStored:
        return BlockStored([number], parent, [number], 1, None, "GPU", None, [None], 0, "full_attention")

    publisher.publish([stored(2, 1), stored(3, 2), stored(4, 9)])
    publisher.publish([stored(1, None), stored(5, 1)])
    state = publisher.state()
    found = [(event["parent_block_hash"], event["block_hashes"]) for event in json.loads(state.events)]
    assert found == [(None, [1, 2, 3]), (9, [4]), (1, [5])]
    assert state.sequence == 2


def replayed(publisher: Published, *frames: bytes) -> list[tuple[bytes, ...]]:
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    assert publisher.source.replay_endpoint is not None
    socket.connect(publisher.source.replay_endpoint)
    socket.send_multipart(frames)
    socket.send_multipart((b"", ((1 << 64) - 1).to_bytes(8)))  # nothing but the end
    found: list[tuple[bytes, ...]] = []
    ends = 1 + (len(frames) == 2 and len(frames[1]) == 8)
    while ends:
        assert socket.poll(10_000)
        found.append(tuple(socket.recv_multipart()))
        ends -= found[-1] == (b"", b"", END, b"")
    context.destroy(0)
    return found


def test_the_last_batches_are_sent_again(config: KVEventsConfig) -> None:
    with closing(Published(replace(config, buffer_steps=3))) as publisher:
        for _ in range(5):
            publisher.publish([])
        publisher.state()
        numbers = [frames[2] for frames in replayed(publisher, b"", bytes(8))]
        assert numbers == [*(number.to_bytes(8) for number in (3, 4, 5)), END, END]
        assert [frames[2] for frames in replayed(publisher, b"", (5).to_bytes(8))][:1] == [(5).to_bytes(8)]
        assert len(replayed(publisher, b"what?")) == len(replayed(publisher, b"", b"4")) == 1


def test_a_start_tells_that_the_cache_is_empty(config: KVEventsConfig) -> None:
    with closing(Published(config, incarnation=2)) as publisher, closing(publisher.router()) as router:
        router.blocks["GPU", 0, 1] = None, (), None, None
        assert router.replay() == 1
        assert not router.blocks
        assert publisher.state().incarnation == 2


def test_a_full_queue_lets_events_wait(config: KVEventsConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Published, "_serve", lambda self: self._context.destroy(0))
    publisher = Published(replace(config, max_queue_size=2))
    assert not publisher.is_full
    publisher.publish([])
    assert publisher.is_full
    publisher.close()


@pytest.mark.parametrize(
    ("endpoint", "expected"),
    [
        ("tcp://*:5557", "tcp://*:5560"),
        ("tcp://[::]:5557", "tcp://[::]:5560"),
        ("tcp://router:1", "tcp://router:4"),
        ("tcp://*:0", "tcp://*:0"),
        ("ipc:///tmp/kv", "ipc:///tmp/kv_dp3"),
    ],
)
def test_each_replica_has_its_own_endpoint(endpoint: str, expected: str) -> None:
    assert of_replica(endpoint, 3) == expected
    assert of_replica(endpoint, 0) == endpoint


def test_others_are_told_an_address_that_they_reach(config: KVEventsConfig) -> None:
    given = replace(config, endpoint="tcp://*:0", replay_endpoint="tcp://127.0.0.1:0")
    with closing(Published(given, replica=1)) as publisher:
        source = publisher.state(has_blocks=False).source
        assert source is not None
        address, _, port = source.endpoint.rpartition(":")
        assert address == "tcp://192.0.2.7"
        assert re.fullmatch(r"tcp://127\.0\.0\.1:[1-9]\d+", source.replay_endpoint or "")
        with pytest.raises(
            ConfigError, match=rf"--kv-events-config: cannot use tcp://\*:{port}: address already in use"
        ):
            Published(replace(config, endpoint=f"tcp://*:{port}"))
        with closing(KVRouter(f"tcp://127.0.0.1:{port}", source.replay_endpoint or "")) as router:
            while not router.poll(10):
                publisher.publish([])


def test_an_address_of_ipv6_is_listened_at(config: KVEventsConfig) -> None:
    """As in vLLM: a router's is given by its name."""
    with closing(Published(replace(config, endpoint="tcp://[::1]:0", replay_endpoint=None))) as publisher:
        assert re.fullmatch(r"tcp://\[::1\]:[1-9]\d+", publisher.source.endpoint)


def test_a_successor_publishes_when_the_ports_are_free(config: KVEventsConfig) -> None:
    given = replace(config, endpoint="tcp://*:0", replay_endpoint="tcp://127.0.0.1:0")
    with closing(Published(given)) as first:
        ports = {name: getattr(first.source, name).rpartition(":")[2] for name in ("endpoint", "replay_endpoint")}
        endpoints = {name: getattr(given, name).replace(":0", f":{port}") for name, port in ports.items()}
        successor = Published(replace(config, **endpoints, waits_for_ports=True))
        assert successor.source == first.source
        successor.publish([BlockStored([1], None, [1], 1, None, "GPU", None, [None], 0, "full_attention")])
        assert successor.state().sequence == 1
    with closing(successor), closing(KVRouter("", successor.source.replay_endpoint or "")) as router:
        router.sequence = 1
        assert router.replay() == 1  # the blocks again, as subscribers know others
        assert [number for _, _, number in router.blocks] == [1]


def test_a_path_is_had_by_one_publisher_until_it_ends(config: KVEventsConfig, tmp_path: Path) -> None:
    """ZeroMQ itself would take it from the other one, whatever it is, and leave it behind."""
    (tmp_path / "live").write_text("a file")
    for waits in (False, True):
        with pytest.raises(ConfigError, match=r"--kv-events-config: cannot use ipc://.*/live: file exists"):
            Published(replace(config, waits_for_ports=waits))
    assert (tmp_path / "live").read_text() == "a file"
    (tmp_path / "live").unlink()
    with closing(Published(config)) as first:
        with pytest.raises(ConfigError, match=r"--kv-events-config: cannot use ipc://.*/live: address already in use"):
            Published(config)
        successor = Published(replace(config, waits_for_ports=True))
        with closing(first.router()) as router:
            assert router.replay() == 1
    with closing(successor), closing(successor.router()) as router:
        assert router.replay() == 2  # its start, and that it can be read
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("name", ["a" * 300, "b/" * 60 + "replay"])
def test_a_path_that_cannot_be_used_is_refused(config: KVEventsConfig, tmp_path: Path, name: str) -> None:
    """Even by a server that waits for an earlier one, and nothing stays open."""
    with socket.socket(socket.AF_UNIX) as earlier:
        earlier.bind(str(tmp_path / "earlier"))
        earlier.listen()
        for endpoint in ("live", "earlier"):
            given = replace(config, endpoint=f"ipc://{tmp_path}/{endpoint}", replay_endpoint=f"ipc://{tmp_path}/{name}")
            with pytest.raises(ConfigError, match=rf"cannot use ipc://.*{name}: file name too long"):
                Published(replace(given, waits_for_ports=True))
            assert [each.name for each in tmp_path.iterdir()] == ["earlier"]


def test_a_successor_goes_on_when_a_path_becomes_unusable(
    config: KVEventsConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    live, file = tmp_path / "live", tmp_path / "file"
    file.write_text("a file")
    with socket.socket(socket.AF_UNIX) as earlier:
        earlier.bind(str(live))
        earlier.listen()
        successor = Published(replace(config, waits_for_ports=True))
        successor.state()  # it has looked, and looks again later
        file.replace(live)  # before the path is free
    with closing(successor):
        until(lambda: "KV events are not published yet: --kv-events-config: cannot use" in caplog.text)
        live.unlink()
        until(live.is_socket)
        live.unlink()
        live.write_text("not the publisher's")
    assert [each.name for each in tmp_path.iterdir()] == ["live"]


def test_sockets_need_no_path_of_the_user(
    config: KVEventsConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Abstract ones of Linux, and paths that ZeroMQ chooses."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "*").write_text("a file")
    name = f"ipc://@{tmp_path.name}-{os.getpid()}"
    with closing(Published(replace(config, endpoint="ipc://*", replay_endpoint=name))) as publisher:
        assert publisher.source.replay_endpoint == name
        with closing(publisher.router()) as router:
            assert router.replay() == 1
        with pytest.raises(ConfigError, match=f"cannot use {name}: address already in use"):
            Published(replace(config, replay_endpoint=name))
    assert [each.name for each in tmp_path.iterdir()] == ["*"]


def stored(*numbers: int) -> KVEvent:
    return BlockStored([*numbers], None, [*numbers], 1, None, "GPU", None, [None] * len(numbers), 0, "full_attention")


def events_of(news: KVEventsNews) -> list[KVEvent]:
    return msgspec.msgpack.decode(news.batch, type=KVEventBatch).events


def told(count: int) -> KVTiersChanged:
    """Blocks with the numbers from 0 on are in memory."""
    block = msgspec.msgpack.encode(DescribedBlock(None, [7], None, None))
    return KVTiersChanged([(MEMORY, 0, number, block) for number in range(count)], [], is_first=True)


def test_what_a_lost_store_had_is_withdrawn_in_slices(config: KVEventsConfig) -> None:
    """The scheduler passes on what the store says. Processes that do not ask for it are not sent it."""
    listener, count = KVEvents(replace(config, kinds=(("any", None),)), 1), 9000
    listener.groups_of = [(0,)]
    with closing(Published(config)) as publisher, closing(publisher.router()) as router:

        def tell(message: KVTiersChanged, num_blocks: int) -> None:
            listener.on_tiers_changed(message)
            (news,) = listener.take()[1]
            publisher.publish_tiers([news])
            while len(router.blocks) != num_blocks:
                router.replay()

        for client in (0, 1):
            publisher.answer(FollowKVEvents(client, has_tiers=client == 1))
        publisher.publish([stored(1)])
        tell(told(count), count + 1)
        publisher.news()
        tell(KVTiersChanged([], [], is_first=True), 1)
        publisher.publish([stored(2)])
        events = [event for each in publisher.news() for event in events_of(each)]
        assert events.count(stored(2)) == 2
        sizes = [len(each.block_hashes) for each in events if isinstance(each, BlockRemoved)]
        assert sum(sizes) == count
        assert max(sizes) < count / 4


def test_a_process_that_is_gone_is_not_sent_more_and_more(
    config: KVEventsConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When it is heard of, it is sent what there is."""
    monkeypatch.setattr(kv_event_publisher, "_AHEAD_BYTES", 4000)
    monkeypatch.setattr(kv_event_publisher, "_PART", 10)
    with closing(Published(config)) as publisher:
        publisher.publish([stored(*range(25))])
        publisher.answer(FollowKVEvents(0))
        first = publisher.news()
        assert [(each.is_first, each.has_more) for each in first] == [
            (True, True),
            (False, True),
            (False, True),
            (False, False),
        ]
        for number in range(100, 300):
            publisher.publish([stored(number)])
        sent = publisher.news()
        assert 4000 <= sum(len(each.batch) for each in sent) < 4500
        numbers = [each.number for each in first + sent]
        assert numbers == [*range(len(numbers))]
        publisher.answer(FollowKVEvents(0, heard=numbers[3]))
        publisher.publish([stored(300)])
        assert not publisher.news(), "it has taken too little"
        publisher.answer(FollowKVEvents(0, heard=numbers[-1] - 2))
        again = publisher.news()
        assert again[0].is_first
        assert again[0].number == numbers[-1] + 1
        found = {
            number
            for each in again
            for event in events_of(each)
            if isinstance(event, BlockStored)
            for number in event.block_hashes
        }
        assert found == {*range(25), *range(100, 301)}
        publisher.answer(FollowKVEvents(0, heard=again[-1].number))
        for number in range(301, 400):
            publisher.publish([stored(number)])
            publisher.answer(FollowKVEvents(0, heard=again[-1].number + number - 300))
        assert len(publisher.news()) == 99, "who takes them gets all"
        publisher.answer(FollowKVEvents(1, heard=5))
        assert not publisher.news(), "it was told by an earlier start of the replica"
