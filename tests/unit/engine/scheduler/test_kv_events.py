"""KV events of the scheduler: what a router learns from them is what the prefix cache has."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import msgspec
import pytest

from quire.engine.config.engine_config import EngineConfig, KVEventsConfig
from quire.engine.protocol.adapters import AdapterRef
from quire.engine.protocol.engine_core import EngineCoreRequest
from quire.engine.protocol.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent, KVEventBatch
from quire.engine.protocol.media import MediaItem, MediaRun
from quire.engine.protocol.sampling_params import SamplingParams
from quire.engine.scheduler import kv_cache_manager
from quire.engine.scheduler.event_hashes import cbor, event_block, root_hash
from quire.engine.scheduler.kv_cache_manager import extend_hashes
from quire.engine.scheduler.kv_events import KVEvents
from quire.engine.scheduler.kv_events_view import KVEventsView
from quire.engine.scheduler.request import Request, ShareQueue
from tests.fakes.configs import Windows, engine_config
from tests.fakes.kv_router import KVRouter
from tests.unit.engine.scheduler.test_scheduler import Engine, out_of_memory_at, tightened


@pytest.fixture(autouse=True)
def _states_are_kept_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_cache_manager, "STATE_INTERVAL", 8)


def with_events(config: EngineConfig) -> EngineConfig:
    """The same configuration with KV events."""
    kinds = tuple(("any", group.window) for group in config.cache.groups)
    events = KVEventsConfig(
        endpoint="tcp://*:0",
        replay_endpoint=None,
        buffer_steps=10,
        hwm=10,
        max_queue_size=10,
        topic="",
        hash_seed="vllm-none-hash",
        kinds=kinds,
    )
    return replace(config, kv_events=events)


VIEWS: WeakKeyDictionary[Engine, KVEventsView] = WeakKeyDictionary()


def take(engine: Engine) -> list[KVEvent]:
    """The new events, as they are published."""
    assert engine.scheduler.kv.listener is not None
    view, (news, tier_news) = VIEWS.setdefault(engine, KVEventsView()), engine.scheduler.kv.listener.take()
    events = view.take(news)
    for each in tier_news:
        while True:
            more, is_done = view.take_tiers(each)
            events += more
            if is_done:
                break
    return events


def plain(events: list[KVEvent]) -> list[dict[str, Any]]:
    """Events as a router receives them."""
    found: list[dict[str, Any]] = msgspec.msgpack.decode(msgspec.msgpack.encode(events))
    return found


def test_hashes_are_those_of_vllm() -> None:
    """The numbers are those of vLLM 0.32 (`hash_block_tokens` with `sha256_cbor`)."""
    root = root_hash("vllm-none-hash")
    assert root.hex() == "9bd96a485ad84efdafb72ee48a1d7a69bcead0f8f0433173941b276b9581eef0"
    params = SamplingParams()
    first = event_block(None, root, EngineCoreRequest(0, "", [], params), [1, 23, 24, 255], 0, b"")
    assert first.digest.hex() == "c1493911ccb324f9b34a43d0bf4108a42b0eef837128f0512b6d9d7dfb60d14f"
    assert (first.number, first.parent, first.extra_keys) == (0x2B6D9D7DFB60D14F & (1 << 64) - 1, None, None)
    item = MediaItem(b"\xcd" * 16, "image", 1, 4, (MediaRun(0, 4),))
    given = EngineCoreRequest(0, "", [], params, media=[item], adapter=AdapterRef(b"\xab" * 32, ()))
    given.adapter_name = "adapter"
    second = event_block(first, root, given, [256, 65535, 65536, 2**32], 4, b"salt")
    assert second.digest.hex() == "da1a4ce7ebd32855c58b9d7adf86e10a43c8a6c398d3330f0d50872f2b5400ab"
    assert second.parent == first.number
    assert (second.lora_name, second.extra_keys) == ("adapter", ("adapter", ("cd" * 16, -3)))


@pytest.mark.parametrize(
    ("value", "encoded"),
    [
        *((2**32 - 1, "1affffffff"), (2**63, "1b8000000000000000"), (-1, "20"), (-25, "3818"), ("", "60")),
        *(([], "80"), ("ä", "62c3a4"), ([None] * 24, "9818" + "f6" * 24), (bytes(300), "59012c" + "00" * 300)),
    ],
)
def test_cbor_is_in_its_shortest_form(value: Any, encoded: str) -> None:
    assert cbor(value).hex() == encoded


def test_a_batch_is_encoded_as_vllm_does() -> None:
    """The bytes are those of vLLM 0.32's `KVEventBatch` of the same events."""
    stored = [
        BlockStored([2**63 + 5, 7], None, [1, 2, 3, 4], 2, None, "GPU", None, [None, (("ab", -1),)], 0),
        BlockStored([9], 7, [5, 6], 2, None, "GPU", "ad", [("ad",)], 1, "sliding_window", 8),
    ]
    stored[0].kv_cache_spec_kind = "full_attention"
    batch = KVEventBatch(1.5, [*stored, BlockRemoved([7], "GPU", 0), AllBlocksCleared()], 1)
    assert msgspec.msgpack.encode(batch).hex() == VLLM_BATCH


VLLM_BATCH = (
    "93cb3ff8000000000000948ba474797065ab426c6f636b53746f726564ac626c6f636b5f68617368657392cf800000000000000507b17061"
    "72656e745f626c6f636b5f68617368c0a9746f6b656e5f6964739401020304aa626c6f636b5f73697a6502a76c6f72615f6964c0a66d6564"
    "69756da3475055a96c6f72615f6e616d65c0aa65787472615f6b65797392c09192a26162ffa967726f75705f69647800b26b765f63616368"
    "655f737065635f6b696e64ae66756c6c5f617474656e74696f6e8ca474797065ab426c6f636b53746f726564ac626c6f636b5f6861736865"
    "739109b1706172656e745f626c6f636b5f6861736807a9746f6b656e5f696473920506aa626c6f636b5f73697a6502a76c6f72615f6964c0"
    "a66d656469756da3475055a96c6f72615f6e616d65a26164aa65787472615f6b6579739191a26164a967726f75705f69647801b26b765f63"
    "616368655f737065635f6b696e64ae736c6964696e675f77696e646f77bc6b765f63616368655f737065635f736c6964696e675f77696e64"
    "6f770884a474797065ac426c6f636b52656d6f766564ac626c6f636b5f6861736865739107a66d656469756da3475055a967726f75705f69"
    "64780081a474797065b0416c6c426c6f636b73436c656172656401"
)


CASES: list[tuple[int, int, Windows]] = [
    *((stages, depth, (None,)) for stages, depth in ((1, 1), (1, 2), (2, 2), (3, 3))),
    (1, 2, (None, 9, 9)),
    (2, 2, (None, "state", "state")),
    (1, 2, (None, -9)),
    (1, 1, (6,)),
]


@pytest.mark.parametrize(("stages", "depth", "windows"), CASES)
def test_a_router_knows_what_the_cache_has(stages: int, depth: int, windows: Windows) -> None:
    """With evictions, preemptions, aborts, and steps that fail; at any time, except for what steps in flight write."""
    config = engine_config(stages=stages, depth=depth, windows=windows, max_num_batched_tokens=24)
    engine = Engine(with_events(tightened(config)))
    rng = random.Random(depth)
    engine.model.fails = out_of_memory_at(rng, 0.03)
    shared = [rng.randrange(97) for _ in range(30)]
    router, kv, size = KVRouter(), engine.scheduler.kv, config.cache.block_size
    numbers: dict[bytes, int] = {}
    """The hashes that a router computes, by those of the cache."""

    def check(turn: int) -> None:
        if turn < 60:
            if turn % 2 == 0:
                prompt = shared[: rng.randrange(31)] + [rng.randrange(97) for _ in range(rng.randrange(1, 40))]
                engine.add(str(turn), prompt, max_tokens=rng.randrange(1, 30), cache_salt=b"s" * 16 * (turn % 3 == 0))
            if turn % 7 == 0:
                engine.abort(str(rng.randrange(60)))
        for event in plain(take(engine)):
            router.apply(event)
        for request in engine.scheduler.requests.values():
            links: list[bytes] = []
            given, block, salt = request.core_request, None, request.core_request.cache_salt
            extend_hashes(links, request.token_ids, size, salt)
            for at, link in enumerate(links):
                tokens = request.token_ids[at * size : (at + 1) * size]
                block = event_block(block, root_hash("vllm-none-hash"), given, tokens, at * size, salt)
                numbers[link] = block.number
        unwritten = {block for blocks in kv._unwritten.values() for block in blocks}
        held = {number for block, number in places(kv, numbers).items() if block not in unwritten}
        known = {(group, number) for _, group, number in router.blocks}
        assert held <= known <= set(places(kv, numbers).values())

    engine.run(check, at_least=60)
    check(1000)
    assert {(group, number) for _, group, number in router.blocks} == set(places(kv, numbers).values())
    assert engine.scheduler.stats.preemptions or windows != (None,)
    kv.unpublish_all()
    assert plain(take(engine)) == [{"type": "AllBlocksCleared"}]
    kv.check_integrity([])
    router.close()


def places(kv: kv_cache_manager.KVCacheManager, numbers: dict[bytes, int]) -> dict[int, tuple[int, int]]:
    """The group and the hash in events of each cached block."""
    return {block: (int.from_bytes(digest[16:]), numbers[digest[:16]]) for digest, block in kv._block_of.items()}


def test_blocks_are_announced_when_their_step_has_run_and_in_one_event() -> None:
    engine = Engine(with_events(engine_config(depth=2)))
    engine.add("a", list(range(13)), max_tokens=1)
    plan = engine.scheduler.schedule()
    assert plan is not None
    assert take(engine) == []
    engine.scheduler.update(plan, engine.model.execute(plan))
    (event,) = take(engine)
    assert isinstance(event, BlockStored)
    assert (len(event.block_hashes), event.token_ids, event.parent_block_hash) == (3, list(range(12)), None)
    assert event.extra_keys == [None] * 3
    engine.add("b", [*range(8), 90, 91, 92, 93, 94], max_tokens=1)
    engine.run()
    (other,) = take(engine)
    assert isinstance(other, BlockStored)
    assert (other.parent_block_hash, other.token_ids) == (event.block_hashes[1], [90, 91, 92, 93])


def test_what_an_adapter_computes_is_announced_under_its_first_name() -> None:
    config = with_events(engine_config()).kv_events
    assert config is not None
    listener, prompt = KVEvents(config, block_size=4), list(range(8))
    kv = kv_cache_manager.KVCacheManager(num_blocks=16, block_size=4, enable_prefix_caching=True)
    view = KVEventsView()

    def announced(name: str, adapter: AdapterRef | None, start: int = 0) -> list[dict[str, Any]]:
        given = EngineCoreRequest(0, name, prompt, SamplingParams(), adapter=adapter, adapter_start=start)
        given.adapter_name = name
        request = Request(given, 0, name, (0, 0), prompt, 9, frozenset(), ShareQueue(b"", 1.0))
        digest = b"" if adapter is None else adapter.digest
        extend_hashes(request.hashes, prompt, 4, adapter=digest, adapter_start=start)
        listener.describe(request, 2, b"")
        for index, (block, link) in enumerate(zip(kv.allocate(2), request.hashes, strict=True)):
            if kv.publish(block, link):
                listener.stored(request, index, None)
        return plain(view.take(listener.take()[0]))

    one = AdapterRef(b"1" * 32, ())
    base, first = announced("base", None), announced("first", one)
    assert [(event["lora_name"], event["extra_keys"]) for event in base] == [(None, [None])] * 2
    assert [(event["lora_name"], event["extra_keys"]) for event in first] == [("first", [["first"]])] * 2
    assert first[0]["block_hashes"] != base[0]["block_hashes"]
    assert announced("second", one) == []
    (late,) = announced("late", one, 5)  # until there, everything is as without it
    assert (late["parent_block_hash"], late["extra_keys"]) == (base[0]["block_hashes"][0], [["late", 1]])
