"""The caches of replicas as API processes see them: from events, which the real scheduler and publisher send."""

from __future__ import annotations

import json
import random
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import msgspec
import pytest
from msgspec import structs

from quire.engine.config.engine_config import EngineConfig
from quire.engine.core.kv_event_publisher import KVEventPublisher
from quire.engine.protocol.adapters import AdapterRef
from quire.engine.protocol.engine_core import EngineCoreRequest
from quire.engine.protocol.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    FollowKVEvents,
    GetKVEvents,
    KVEvent,
    KVEventBatch,
    KVEventsNews,
    KVEventsState,
)
from quire.engine.protocol.media import MediaItem, MediaRun
from quire.engine.protocol.sampling_params import SamplingParams
from quire.engine.protocol.stats import EngineStats
from quire.engine.scheduler import kv_cache_manager
from quire.engine.scheduler.event_hashes import EventBlock, event_block, root_hash
from quire.engine.scheduler.kv_cache_manager import extend_hashes
from quire.server.client.kv_view import KVViews
from quire.server.client.router import Router
from tests.fakes.configs import Windows, engine_config
from tests.unit.engine.scheduler.test_kv_events import take, with_events
from tests.unit.engine.scheduler.test_scheduler import Engine, tightened


@pytest.fixture(autouse=True)
def _states_are_kept_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_cache_manager, "STATE_INTERVAL", 8)


def views_of(config: EngineConfig, client: int = 0) -> KVViews:
    assert config.kv_events is not None
    return KVViews(config.cache, config.kv_events, None, client)


def asked(request_id: str, prompt: list[int], salt: bytes = b"") -> EngineCoreRequest:
    return EngineCoreRequest(0, request_id, prompt, SamplingParams(max_tokens=8), cache_salt=salt)


class Replica:
    """A scheduler and the publisher of its events. Messages to API processes wait until they are taken."""

    def __init__(self, config: EngineConfig, folder: Path, number: int = 0) -> None:
        self.engine, self.messages = Engine(config), SimpleQueue[tuple[int, KVEventsState | KVEventsNews]]()
        events = config.kv_events
        assert events is not None
        events = replace(events, endpoint=f"ipc://{folder}/{number}", max_queue_size=10_000)
        self.publisher = KVEventPublisher(
            events, number, "192.0.2.7", lambda *message: self.messages.put(message), lambda error: None
        )

    def close(self) -> None:
        self.publisher.close()

    def sent(self) -> tuple[list[tuple[int, KVEventsNews]], KVEventsState]:
        """Publish what is new; returns what API processes were sent since the last call, and the present state."""
        if events := take(self.engine):
            self.publisher.publish(events)
        self.publisher.answer(GetKVEvents(0, 0, has_blocks=True))
        news = list[tuple[int, KVEventsNews]]()
        while True:
            client, message = self.messages.get(timeout=10)
            if isinstance(message, KVEventsState):
                assert not message.has_more, "it is small"
                return news, message
            news.append((client, message))


@pytest.mark.parametrize("windows", [(None,), (None, 9), (None, "state"), (None, -9)])
def test_views_that_begin_at_three_times_are_what_the_cache_has(windows: Windows, tmp_path: Path) -> None:
    """One of them loses a message, and asks again."""
    config = with_events(tightened(engine_config(depth=2, windows=windows)))
    rng, views = random.Random(1), [views_of(config, client) for client in range(3)]
    asked_for: list[EngineCoreRequest] = []
    lost = found = 0
    with closing(Replica(config, tmp_path)) as replica:
        kv = replica.engine.scheduler.kv

        def compare(views: list[KVViews]) -> int:
            """Compare what of the prompts the views and the cache have; returns the number of tokens."""
            total = 0
            for request in asked_for:
                hashes: list[bytes] = []
                extend_hashes(hashes, request.prompt_token_ids, kv.block_size, request.cache_salt, kv.num_groups)
                total += (cached := kv.num_tokens_in(len(kv.match(hashes))))
                assert [each.num_cached(0, each.hashes(request)) for each in views] == [cached] * len(views)
            return total

        def step(turn: int) -> None:
            nonlocal lost, found
            if turn in (0, 15, 30):
                replica.publisher.answer(views[turn // 15].follow(0, "host"))
            if turn < 40:
                prompt = [7] * rng.randrange(60) + [rng.randrange(2) for _ in range(rng.randrange(1, 8))]
                asked_for.append(request := asked(str(turn), prompt, bytes(16) * (turn % 4 == 0)))
                replica.engine.add(
                    str(turn), request.prompt_token_ids, max_tokens=rng.randrange(1, 20), cache_salt=request.cache_salt
                )
            news, _ = replica.sent()
            for client, message in news:
                if client == 0 and turn == 20:
                    lost += 1
                elif (answer := views[client].take(message)) is not None:
                    replica.publisher.answer(answer)
            if not kv.unwritten:
                found += compare(views[:1] if turn < 20 else views[1:] if turn > 30 else [])

        replica.engine.run(step, at_least=40)
        news, state = replica.sent()
        for client, message in news:
            views[client].take(message)
        assert lost
        blocks = {
            ("GPU", number, event["group_idx"])
            for event in json.loads(b"[%b]" % state.events)
            for number in event["block_hashes"]
        }
        assert blocks
        assert [each.blocks_of(0) for each in views] == [blocks] * 3
        compare(views)
        assert found


def test_hashes_are_those_that_the_core_announces() -> None:
    config = with_events(engine_config())
    items = [MediaItem(bytes([7]) * 16, "image", 9, 6, (MediaRun(0, 6),))]
    request = structs.replace(asked("a", list(range(40)), bytes(16)), media=items)
    request.adapter, request.adapter_start, request.adapter_name = AdapterRef(b"\xab" * 32, ()), 13, "x"
    size, root = config.cache.block_size, root_hash("vllm-none-hash")
    block: EventBlock | None = None
    expected: list[int] = []
    for start in range(0, 40 - size + 1, size):
        block = event_block(block, root, request, list(range(start, start + size)), start, bytes(16))
        expected.append(block.number)
    views = views_of(config)
    assert views.hashes(request) == expected
    changes: list[dict[str, Any]] = [{"media": []}, {"adapter": None}, {"cache_salt": b""}, {"adapter_start": 14}]
    for change in changes:
        assert views.hashes(structs.replace(request, **change)) != expected


def test_what_was_sent_counts_before_it_is_announced_and_no_longer_than_that() -> None:
    config = with_events(engine_config())
    views, request = views_of(config), asked("a", list(range(40)))
    hashes, size = views.hashes(request), config.cache.block_size
    views.take(KVEventsNews(0, b"\x93\xcb" + bytes(8) + b"\x90\x00", is_first=True))
    views.on_placed(0, hashes, 100)
    views.on_placed(0, hashes[:1], 100)
    assert views.num_cached(0, hashes) == 40 // size * size
    views.on_finished(0, request, hashes, [])
    assert views.num_cached(0, hashes) == size
    views.on_finished(0, request, hashes[:1], [])
    assert views.num_cached(0, hashes) == 0
    assert not views._view(0).placed
    views.forget(0)  # then it is estimated, until its next start has sent its own
    views.on_placed(0, hashes, 100)
    views.on_finished(0, request, hashes, [])
    assert views.num_cached(0, hashes) == 40 // size * size


def test_the_device_comes_before_memory_and_memory_before_disks() -> None:
    config = with_events(engine_config(block_size=16, num_blocks=600))
    views, request = views_of(config), asked("a", list(range(330)))
    numbers = views.hashes(request)

    def tell(replica: int, *events: KVEvent, number: int = 0) -> None:
        batch = msgspec.msgpack.encode(KVEventBatch(1.0, [*events], replica))
        assert views.take(KVEventsNews(number, batch, is_first=not number, replica=replica)) is None

    def stored(medium: str, start: int = 0) -> BlockStored:
        return BlockStored(numbers[start:], None, [], 0, None, medium, None, None, 0)

    for replica in range(4):
        views.follow(replica, f"host {replica}")
    tell(0)
    tell(1, stored("STORAGE"))
    tell(2, stored("STORAGE"), stored("CPU"))
    tell(3, stored("GPU"), stored("CPU"))
    stats = {number: EngineStats(kv_blocks=600) for number in range(4)}
    for number, expected in ((3, 10), (2, 10 + 20), (1, 10 + 160), (0, 330)):
        router = Router(range(4), cache=config.cache, max_num_seqs=8, caches=views)
        assert router.place(request, stats) == number
        placed = router._placed["a"]
        assert (placed.pending, placed.blocks) == (expected, 1 if number == 3 else 21), "what is loaded takes room"
        router.on_finished("a", [])
        del stats[number]
    tell(3, BlockRemoved(numbers[12:], "GPU", 0), BlockRemoved(numbers[:4], "CPU", 0), number=1)
    hashes = views.hashes(request)
    assert views.num_cached(3, hashes) == 12 * 16
    assert views.num_saved(3, hashes, 12 * 16) == 12 * 16 + 8 * 15


def test_one_replica_of_a_host_says_what_the_store_has() -> None:
    """The others do when it has gone."""
    config = with_events(engine_config(block_size=16))
    views, request = views_of(config, client=3), asked("a", list(range(330)))
    hashes = views.hashes(request)
    on_cpu = BlockStored(hashes, None, [], 0, None, "CPU", None, None, 0)

    def tell(replica: int, number: int, *events: KVEvent, **more: bool) -> FollowKVEvents | None:
        batch = msgspec.msgpack.encode(KVEventBatch(1.0, [*events], replica))
        return views.take(KVEventsNews(number, batch, replica=replica, **more))

    def loaded(replica: int) -> int:
        return views.num_saved(replica, hashes, 0)

    hosts = ["one", "one", "other"]
    assert [views.follow(*each) for each in enumerate(hosts)] == [
        FollowKVEvents(3, each) for each in (True, False, True)
    ]
    for replica in range(3):
        tell(replica, 7, is_first=True)
    tell(0, 8, on_cpu)
    tell(1, 8, AllBlocksCleared())
    assert [*map(loaded, range(3))] == [300, 300, 0]
    views.on_finished(4, request, [], [])
    assert not views.silent_stores()
    views.forget(0)
    assert views.silent_stores() == {"one"}
    assert views.follow(1, "one") == FollowKVEvents(3, has_tiers=True)
    on_cpu.block_hashes = hashes[:10]
    tell(1, 9, on_cpu, is_first=True, has_more=True)
    assert views.blocks_of(1) is None, "there is another part"
    tell(1, 10)
    assert [*map(loaded, (1, 2))] == [150, 0]
    answers = [tell(1, number) for number in range(11, 43)]
    assert [each for each in answers if each] == [FollowKVEvents(3, True, heard) for heard in (24, 40)]
    assert tell(1, 44) == FollowKVEvents(3, has_tiers=True), "one is missing"
    tell(1, 45, BlockRemoved(hashes[:10], "CPU", 0), is_first=True)
    views.forget(1)
    tell(2, 8)
    assert [*views._stores] == ["other"]
    assert not views._freed, "nothing else is kept"


def conversation_hits(folder: Path, *, has_events: bool) -> float:
    """The part of the tokens of earlier turns that is cached at the replica of the next: conversations with four
    replicas, whose turns come to one or the other of two processes."""
    config = engine_config(block_size=16, num_blocks=600, max_num_batched_tokens=512, max_model_len=1024)
    config = with_events(config)
    replicas = [Replica(config, folder, number) for number in range(4)]
    views = [views_of(config, client) for client in range(2)]
    routers = [
        Router(range(4), cache=config.cache, max_num_seqs=8, first=at, caches=views[at] if has_events else None)
        for at in range(2)
    ]
    for number, replica in enumerate(replicas):
        for each in views:
            replica.publisher.answer(each.follow(number, "host"))
    rng = random.Random(3)
    texts = [rng.choices(range(1000), k=160) for _ in range(12)]
    cached = earlier = 0
    stats = {number: EngineStats(kv_blocks=600) for number in range(4)}
    try:
        for turn in range(4):
            for number, text in enumerate(texts):
                router, name = routers[(turn + number) % 2], f"{turn}.{number}"
                chosen = router.place(asked(name, [*text]), stats)
                replica = replicas[chosen]
                replica.engine.add(name, [*text], max_tokens=8, ignore_eos=True)
                replica.engine.run(lambda turn: None)
                outputs = replica.engine.outputs[name]
                cached += outputs[-1].num_cached_tokens
                earlier += (len(text) - 32) // 16 * 16 if turn else 0
                output = [token for each in outputs for token in each.token_ids]
                router.on_first_token(name, 0.01)
                router.on_finished(name, output)
                text += output + rng.choices(range(1000), k=24)
                for client, message in replica.sent()[0]:
                    views[client].take(message)
    finally:
        for replica in replicas:
            replica.close()
    return cached / earlier


def test_a_turn_that_comes_to_another_process_finds_its_conversation(tmp_path: Path) -> None:
    """With the estimate, a process knows only what it has sent itself."""
    assert conversation_hits(tmp_path, has_events=True) > 0.95
    assert conversation_hits(tmp_path, has_events=False) < 0.8
