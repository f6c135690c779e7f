"""Several replicas behind one client: the replica of each request, and the death of a replica."""

from __future__ import annotations

import asyncio
import errno
import functools
import gzip
import io
import json
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from quire.engine.config.engine_config import EngineConfig
from quire.engine.core.launch import CoreArgs, Endpoints
from quire.engine.protocol.adapters import AdapterRef
from quire.engine.protocol.engine_core import (
    AbortRequests,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    Join,
    KVStoreState,
    PinAdapters,
    PrefixCacheReset,
    PrepareAdapter,
    PreparedAdapter,
    Probe,
    ProbeReply,
    ResetPrefixCache,
)
from quire.engine.protocol.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    FollowKVEvents,
    KVEvent,
    KVEventBatch,
    KVEventsNews,
)
from quire.engine.protocol.kv_store import KVStoreStats
from quire.engine.protocol.media import MediaData, MediaItem, MediaRun
from quire.engine.protocol.profile import (
    ClockPing,
    ClockReply,
    ProfileReply,
    StartProfile,
    StopProfile,
    TracePiece,
    TraceSummary,
)
from quire.engine.protocol.sampling_params import SamplingParams
from quire.engine.protocol.stats import EngineStats
from quire.engine.protocol.supervision import (
    EngineFailed,
    EngineState,
    ReplicaDraining,
    ReplicaLost,
    ReplicaRemoved,
    ReplicaStarting,
    ReplicaUp,
)
from quire.server.client import engine_client, media_content
from quire.server.client.admission import QueueFull
from quire.server.client.engine_client import DATA_PARALLEL_RANK, EngineClient
from quire.server.client.engine_manager import EngineManager
from quire.server.client.metrics import Metrics
from quire.server.client.output_stream import EngineUnavailable, OutputStream, RequestFailed
from quire.server.client.profiler import ProfileConflict, Profiler
from quire.server.client.replica import Replica
from quire.server.client.replica_calls import _CLOCK_PINGS
from tests.fakes import fake_core
from tests.fakes.configs import engine_config
from tests.fakes.frames import DEEP
from tests.fakes.outputs import prompt_logprobs
from tests.fakes.scripted_cores import LONG, Script, Scripted, endpoints, scripted, stop_checks, whole
from tests.fakes.waiting import until_async
from tests.unit.engine.scheduler.test_kv_events import with_events


@pytest.fixture(autouse=True)
def _instant_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cores that the test plays are back at once."""
    monkeypatch.setattr("quire.server.client.suspects._SAME_MOMENT_SECONDS", 0.0)


# --- a client between sockets ---------------------------------------------------------------------------------


async def test_a_stream_goes_on_at_another_replica_as_if_nothing_had_happened(tmp_path: Path) -> None:
    async with scripted(tmp_path) as engine:
        params = SamplingParams(max_tokens=9, prompt_logprobs=0, logprobs=0)
        stream = engine.submit("a", [1, 2, 3], params)
        first = await engine.of("a")
        other = engine.cores[1 - first.replica]
        rows: Any = [(float(number), 1, [], []) for number in range(9)]
        first.tell(EngineCoreOutput("a", [], prompt_logprobs=prompt_logprobs(rows[:2], 0)))
        first.tell(EngineCoreOutput("a", [7], num_cached_tokens=2, num_loaded_tokens=(1, 0, 0)))
        first.say(EngineCoreOutputs(request_ids=["a"], token_ids=[8]))
        await engine.lost(first, "rank 0 hangs")
        resumed = await other.hear(EngineCoreRequest)
        assert (resumed.prompt_token_ids, resumed.output_token_ids) == ([1, 2, 3], [7, 8])
        assert resumed.params == params
        first.tell(EngineCoreOutput("a", [99]))  # too late
        first.say(ProbeReply(-1))
        other.tell(EngineCoreOutput("a", [9], num_cached_tokens=1))
        other.tell(EngineCoreOutput("a", [10], finish_reason="stop", num_cached_tokens=1))
        output = await whole(stream)
        assert (output.token_ids, output.finish_reason, output.num_cached_tokens) == ([7, 8, 9, 10], "stop", 2)
        assert output.num_loaded_tokens == (1, 0, 0)
        assert output.prompt_logprobs is not None
        assert [row.logprob for row in output.prompt_logprobs.rows()] == [0.0, 1.0]
        assert not engine.client.num_open


async def test_requests_go_where_events_say_that_their_prefix_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_client, "_NEWS_BYTES", 0)
    config = with_events(engine_config())
    async with scripted(tmp_path, cache=config.cache, kv_events=config.kv_events) as engine:
        assert engine.client._views is not None
        prompt = list(range(60))
        numbers = engine.client._views.hashes(EngineCoreRequest(0, "", prompt, LONG))
        stored = BlockStored(numbers, None, [], 0, None, "GPU", None, None, 0)

        def tell(core: Script, number: int, *events: KVEvent, is_first: bool = False) -> None:
            batch = msgspec.msgpack.encode(KVEventBatch(1.0, list(events), core.replica))
            core.say(KVEventsNews(number, batch, is_first))

        async def knows(core: Script, count: int | None) -> None:
            def found() -> int | None:
                assert engine.client._views is not None
                blocks = engine.client._views.blocks_of(core.replica)
                return None if blocks is None else len(blocks)

            await until_async(lambda: found() == count)

        for core in engine.cores:
            asked = await core.hear(FollowKVEvents)
            assert asked.has_tiers == (core is engine.cores[0]), "both have the same store"
            tell(core, 7, is_first=True)
            await knows(core, 0)
        first, second = engine.cores
        tell(second, 8, stored)
        await knows(second, len(numbers))
        engine.submit("a", prompt)
        assert await engine.of("a") is second
        tell(second, 10, BlockRemoved(numbers[:1], "GPU", 0))  # one is missing
        await second.hear(FollowKVEvents)
        await knows(second, None)
        tell(second, 11, stored)  # the snapshot is under way
        tell(second, 11, AllBlocksCleared(), stored, is_first=True)
        await knows(second, len(numbers))
        tell(first, 8, stored)
        await engine.lost(second, "gone", returns=True)
        assert (await first.hear(EngineCoreRequest)).request_id == "a"
        await knows(second, None)
        second.incarnation += 1
        engine.up(second)
        await second.hear(Join)
        assert not (await second.hear(FollowKVEvents)).has_tiers
        await engine.lost(first, "gone", returns=True)
        assert (await second.hear(FollowKVEvents)).has_tiers


async def test_all_replicas_forget_before_a_store_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise one would store again what another one's store has forgotten."""
    async with scripted(tmp_path) as engine:

        async def answer(*cores: Script, clears_store: bool, error: str = "") -> None:
            for core in cores:
                asked = await core.hear(ResetPrefixCache)
                assert asked.clears_store == clears_store
                core.say(PrefixCacheReset(asked.call_id, error))

        first, second = engine.cores
        assert engine.client._router is not None
        forgotten: list[int] = []
        monkeypatch.setattr(engine.client._router, "on_reset", forgotten.append)
        first.say(PrefixCacheReset(-1))  # another process has asked it
        reset = asyncio.create_task(engine.client.calls.reset_prefix_cache(clears_stores=True))
        await answer(first, second, clears_store=False)
        await answer(first, clears_store=True)
        await answer(second, clears_store=True, error="the KV store is not up")
        assert await reset == "the KV store is not up"
        assert sorted(forgotten) == [0, 0, 0, 1, 1]
        reset = asyncio.create_task(engine.client.calls.reset_prefix_cache(clears_stores=False))
        await answer(first, clears_store=False)
        await engine.lost(second, "gone", returns=True)
        assert await reset == "", "it comes back with an empty cache"
        reset = asyncio.create_task(engine.client.calls.reset_prefix_cache(clears_stores=True))
        await answer(first, clears_store=False)
        await answer(first, clears_store=True)
        assert await reset == "", "both have the same store"
        monkeypatch.setattr(Replica, "host", property(lambda replica: f"10.0.0.{replica.number}"))
        reset = asyncio.create_task(engine.client.calls.reset_prefix_cache(clears_stores=True))
        await answer(first, clears_store=False)
        await answer(first, clears_store=True)
        assert await reset == "replica 1 is restarting: the KV store of its host was not cleared"


async def test_a_kv_store_is_heard_of_while_its_replica_is_silent(tmp_path: Path) -> None:
    async with scripted(tmp_path) as engine:
        replica, core = engine.client._replicas[0], engine.cores[0]
        replica.is_silent = True
        core.say(KVStoreState(KVStoreStats(memory_bytes=5)))
        await until_async(lambda: engine.metrics.stores() == {"localhost": (KVStoreStats(memory_bytes=5), True)})
        assert replica.is_silent


async def test_images_for_other_hosts_travel_with_their_data(tmp_path: Path) -> None:
    """Read beside the event loop. A file that is gone ends its requests alone, also when they move."""
    async with scripted(tmp_path) as engine:
        engine.client._has_hosts = True
        await engine.lost(engine.cores[1], "gone", returns=True)
        file, lost = tmp_path / "item", tmp_path / "lost"
        file.write_bytes(b"pixels and padding")
        lost.touch()
        items = [
            MediaItem(bytes(16), "image", 0, 1, (MediaRun(0, 1),), data=MediaData((), 6, path=str(path)))
            for path in (file, lost)
        ]
        requests = {request_id: items[request_id == "b"] for request_id in "abc"}
        streams = {each: engine.client.submit([(each, [1], LONG)], media=[[item]]) for each, item in requests.items()}
        sent = [await engine.cores[0].hear(EngineCoreRequest) for _ in requests]
        data = {each.request_id: each.media[0].data for each in sent}
        assert data["a"] == data["c"] == MediaData((), 6, content=b"pixels")
        lost.unlink()
        engine.up(engine.cores[1])
        await engine.lost(engine.cores[0], "gone", returns=True)
        await engine.cores[1].hear(Join)
        moved = [await engine.cores[1].hear(EngineCoreRequest) for _ in "ac"]
        assert sorted(each.request_id for each in moved) == ["a", "c"]
        with pytest.raises(EngineUnavailable, match="cannot be read now: No such file"):
            await whole(streams["b"])
        assert engine.client.num_open == 2
        engine.client.submit([("d", [1], LONG)], media=[[items[0]]]).close()
        await asyncio.gather(*engine.client._tasks)
        assert (await engine.cores[1].hear(AbortRequests)).request_ids == ["d"]
        assert engine.cores[1].is_quiet


@pytest.mark.parametrize("seconds", [60.0, 0.0])
async def test_images_wait_for_a_while_for_file_descriptors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    monkeypatch.setattr(media_content, "_READ_SECONDS", seconds)
    monkeypatch.setattr(media_content, "_READ_AGAIN_SECONDS", 0.0)
    read, lacks = media_content._with_content, [errno.EMFILE, errno.ENFILE]

    def read_later(item: MediaItem) -> MediaItem:
        if lacks:
            raise OSError(number := lacks.pop(), os.strerror(number))
        return read(item)

    monkeypatch.setattr(media_content, "_with_content", read_later)
    async with scripted(tmp_path) as engine:
        engine.client._has_hosts = True
        await engine.lost(engine.cores[1], "gone", returns=True)
        (file := tmp_path / "item").write_bytes(b"pixels")
        item = MediaItem(bytes(16), "image", 0, 1, (MediaRun(0, 1),), data=MediaData((), 6, path=str(file)))
        stream = engine.client.submit([("a", [1], LONG)], media=[[item]])
        if seconds:
            sent = await engine.cores[0].hear(EngineCoreRequest)
            assert sent.media[0].data == MediaData((), 6, content=b"pixels")
        else:
            with pytest.raises(EngineUnavailable, match="cannot be read now: Too many open files in system"):
                await whole(stream)


async def test_prompt_logprobs_are_not_sent_twice(tmp_path: Path) -> None:
    """It was lost in the middle of its prompt, and is cut elsewhere by the next."""
    rows: Any = [(float(number), 1, [5, 6], [float(number), -1.0]) for number in range(9)]
    for cuts in ((2, 9), (4, 9), (9,), (3, 4, 9)):
        folder = tmp_path / str(cuts)
        folder.mkdir()
        async with scripted(folder) as engine:
            stream = engine.submit("a", list(range(10)), SamplingParams(prompt_logprobs=2))
            first = await engine.of("a")
            other = engine.cores[1 - first.replica]
            first.tell(EngineCoreOutput("a", [], prompt_logprobs=prompt_logprobs(rows[:4], 2)))
            await engine.lost(first, "gone")
            assert (await other.hear(EngineCoreRequest)).output_token_ids == []
            begin = 0
            for end in cuts:
                other.tell(EngineCoreOutput("a", [], prompt_logprobs=prompt_logprobs(rows[begin:end], 2)))
                begin = end
            other.tell(EngineCoreOutput("a", [1], finish_reason="length", num_cached_tokens=3))
            output = await whole(stream)
            assert output.prompt_logprobs == prompt_logprobs(rows, 2)
            assert output.num_cached_tokens == 3


async def test_nothing_that_was_queued_for_the_dead_reaches_its_successor(tmp_path: Path) -> None:
    async with scripted(tmp_path) as engine:
        streams = {str(number): engine.submit(str(number), [number]) for number in range(10)}
        dead, alive = engine.cores
        mine = [i for i in streams if engine.client._running[i].replica == 0]
        assert len(mine) == 5
        dead.close()  # it has read nothing
        engine.client.update(ReplicaLost(0, "the host is gone", returns=True))
        engine.client.abort({mine[0]}, "abort")
        successor = engine.cores[0] = Script(0, engine.ends, incarnation=2)
        assert successor.is_quiet
        kinds = [type(await alive.hear(EngineCoreRequest | AbortRequests)) for _ in range(11)]
        assert kinds == [EngineCoreRequest] * 10 + [AbortRequests]
        engine.up(successor)
        assert engine.client._live_replicas() == [0, 1]
        await successor.hear(Join)
        engine.submit("new", [1])
        assert (await successor.hear(EngineCoreRequest)).request_id == "new"  # it has the least to do


async def test_late_messages_of_the_dead_do_not_reach_their_successors_requests(tmp_path: Path) -> None:
    """A host that was cut off sends its queued messages once its cable is back."""
    async with scripted(tmp_path) as engine:
        await engine.lost(engine.cores[1], "gone for good")
        stream = engine.submit("a", [1])
        late = engine.cores[0]
        late.tell(EngineCoreOutput("a", [7]))
        await engine.lost(late, "nothing was heard", returns=True)
        late.incarnation = 2  # the same sockets for both
        engine.up(late)
        late.incarnation = 1
        late.tell(EngineCoreOutput("a", [98], finish_reason="error", error="rank 0 hangs"))
        late.incarnation = 2
        late.tell(EngineCoreOutput("a", [8], finish_reason="stop"))
        output = await whole(stream)
        assert (output.token_ids, output.finish_reason) == ([7, 8], "stop")


async def test_requests_wait_while_the_only_replica_restarts(tmp_path: Path) -> None:
    async with scripted(tmp_path, 1) as engine:
        stream = engine.submit("a", [1])
        core = await engine.of("a")
        core.tell(EngineCoreOutput("a", [7]))
        await engine.lost(core, "rank 0 was killed", returns=True)
        engine.client.check()
        assert engine.client.problem == ("restarting", "replica 0 is restarting: rank 0 was killed")
        with pytest.raises(EngineUnavailable, match="the engine is restarting"):
            await engine.client.probe()
        late, aborted = engine.submit("b", [2]), engine.submit("c", [3])
        aborted.close()
        core.incarnation = 2
        engine.up(core)
        await core.hear(Join)
        resumed, new = await core.hear(EngineCoreRequest), await core.hear(EngineCoreRequest)
        assert (resumed.request_id, resumed.output_token_ids, new.request_id) == ("a", [7], "b")
        for request_id in "ab":
            core.tell(EngineCoreOutput(request_id, [8], finish_reason="stop"))
        assert [(await whole(each)).token_ids for each in (stream, late)] == [[7, 8], [8]]


async def test_replicas_know_what_is_pinned_also_when_they_are_back(tmp_path: Path) -> None:
    async with scripted(tmp_path, 2) as engine:
        first, second = engine.cores
        await engine.lost(first, "rank 0 was killed", returns=True)
        engine.client.pin_adapters([b"1" * 32])
        assert await second.hear(PinAdapters) == PinAdapters(0, [b"1" * 32])
        first.incarnation = 2
        engine.up(first)
        await first.hear(Join)
        assert await first.hear(PinAdapters) == PinAdapters(0, [b"1" * 32])
        answers = asyncio.create_task(engine.client.calls.prepare_adapter(AdapterRef(b"2" * 32, ("a",)), True))
        for core, error, is_invalid in ((first, "no memory", False), (second, "NaN", True)):
            message = await core.hear(PrepareAdapter)
            assert message.pins
            core.say(PreparedAdapter(message.call_id, error, is_invalid))
        assert await answers == "NaN"  # which tells more


async def test_a_request_without_a_replica_counts_for_the_last_one(tmp_path: Path) -> None:
    async with scripted(tmp_path) as engine:
        await engine.lost(engine.cores[0], "rank 0 was killed", returns=True)
        stream = engine.submit("a", [1])
        await engine.lost(engine.cores[1], "rank 0 was killed", returns=True)
        stream.close()
        text = engine.metrics.exposition().decode()
        for replica, count in ((0, 0.0), (1, 1.0)):
            labels = f'engine="{replica}",finished_reason="abort",model_name="m"'
            assert f"quire:request_success_total{{{labels}}} {count}" in text


async def test_without_replicas_the_reason_is_reported(tmp_path: Path) -> None:
    async with scripted(tmp_path) as engine:
        stream = engine.submit("a", [1])
        first = await engine.of("a")
        await engine.lost(first, "rank 0 hangs")
        engine.client.update(EngineFailed("replica 1: rank 1 hangs"))
        with pytest.raises(EngineUnavailable, match="replica 1: rank 1 hangs"):
            await whole(stream)
        with pytest.raises(EngineUnavailable, match="rank 1 hangs"):
            engine.client.check()


async def test_requests_leave_a_silent_replica(tmp_path: Path) -> None:
    """At once if they have not begun, later if they have. They return to it only when it has confirmed their end."""
    async with scripted(tmp_path) as engine:
        silent, alive = engine.cores
        chosen = DATA_PARALLEL_RANK.set(0)
        begun, fresh = engine.submit("begun", [1]), engine.submit("fresh", [2])
        DATA_PARALLEL_RANK.reset(chosen)
        assert await engine.of("begun") is await engine.of("fresh") is silent
        silent.tell(EngineCoreOutput("begun", [7]))
        await until_async(lambda: engine.client._running["begun"].delivered)
        engine.check_silence(silent, 0.9)
        assert engine.client._live_replicas() == [0, 1]

        engine.check_silence(silent, 1.1)
        assert (await silent.hear(AbortRequests)).request_ids == ["fresh"]
        assert (await alive.hear(EngineCoreRequest)).request_id == "fresh"
        assert [each.state for each in engine.client.replicas] == ["unresponsive", "up"]
        assert 'quire:replicas{model_name="m",state="unresponsive"} 1.0' in engine.metrics.exposition().decode()
        for number in range(3):
            engine.submit(f"new {number}", [3])
            assert await engine.of(f"new {number}") is alive

        engine.check_silence(silent, 3.1)
        assert (await silent.hear(AbortRequests)).request_ids == ["begun"]
        assert (await alive.hear(EngineCoreRequest)).output_token_ids == [7]
        silent.tell(EngineCoreOutput("begun", [99]), EngineCoreOutput("fresh", [98]))  # too late
        silent.say(ProbeReply(-1))
        alive.tell(EngineCoreOutput("begun", [8]), EngineCoreOutput("fresh", [4], finish_reason="stop"))
        assert (await whole(fresh)).token_ids == [4]

        await engine.lost(alive, "rank 0 was killed", returns=True)
        assert engine.client._live_replicas() == [0]
        assert engine.client._running["begun"].replica is None
        silent.tell(EngineCoreOutput("begun", [97]), EngineCoreOutput("begun", [], finish_reason="abort"))
        again = await silent.hear(EngineCoreRequest)
        while again.request_id != "begun":
            again = await silent.hear(EngineCoreRequest)
        assert again.output_token_ids == [7, 8]
        silent.tell(EngineCoreOutput("begun", [9], finish_reason="stop"))
        assert (await whole(begun)).token_ids == [7, 8, 9]


async def test_nothing_moves_while_all_replicas_are_silent_or_this_process_stood_still(tmp_path: Path) -> None:
    async with scripted(tmp_path) as engine:
        stream = engine.submit("a", [1])
        core = await engine.of("a")
        for replica in engine.client._replicas.values():
            replica.heard_at = engine.client.loop.time() - 60.0
        engine.client._check_silence()
        stop_checks(engine.client)
        assert engine.client._running["a"].replica == core.replica
        core.say(ProbeReply(-1))
        await until_async(lambda: engine.client._live_replicas() == [core.replica])
        for replica in engine.client._replicas.values():
            replica.is_silent, replica.heard_at = False, engine.client.loop.time() - 60.0
        assert engine.client._silence is not None
        engine.client._silence.checked_at -= 60.0
        engine.client._check_silence()
        stop_checks(engine.client)
        assert engine.client._live_replicas() == [0, 1]
        stream.close()


async def kill(engine: Scripted, core: Script) -> None:
    """The core dies and is back."""
    await engine.lost(core, "rank 0 was killed", returns=True)
    core.incarnation += 1
    engine.up(core)
    await core.hear(Join)


@pytest.mark.parametrize("tokens", [0, 1])
async def test_a_request_that_kills_its_replicas_is_given_up(tmp_path: Path, tokens: int) -> None:
    """Also one that gets a token before."""
    async with scripted(tmp_path, 1) as engine:
        (core,) = engine.cores
        stream = engine.submit("poison", [1, 2, 3])
        for _ in range(2):
            await core.hear(EngineCoreRequest)
            if tokens:
                core.tell(EngineCoreOutput("poison", [5]))
            await kill(engine, core)
        reason = "^the engine died 2 times while it ran this request, which is given up: rank 0 was killed$"
        with pytest.raises(RequestFailed, match=reason):
            await whole(stream)
        engine.submit("next", [1])
        assert (await core.hear(EngineCoreRequest)).request_id == "next"


async def test_requests_that_ran_beside_the_one_that_kills_go_on(tmp_path: Path) -> None:
    async with scripted(tmp_path, 1, max_num_seqs=8) as engine:
        (core,) = engine.cores
        streams = {name: engine.submit(name, [1]) for name in ("good", "poison", "also good")}
        for _ in range(2):
            for name in streams:
                assert (await core.hear(EngineCoreRequest)).request_id == name
            await kill(engine, core)
        engine.submit("new", [1])
        for name in ("good", "new"):
            assert (await core.hear(EngineCoreRequest)).request_id == name
        assert core.is_quiet  # suspects run one at a time
        for token in range(16):
            core.tell(EngineCoreOutput("good", [token]))
        assert (await core.hear(EngineCoreRequest)).request_id == "poison"
        await kill(engine, core)
        with pytest.raises(RequestFailed, match="3 times"):
            await whole(streams["poison"])
        names = {(await core.hear(EngineCoreRequest)).request_id for _ in range(3)}
        assert names == {"good", "also good", "new"}


async def test_replicas_that_die_together_make_no_request_suspect(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.server.client.suspects._SAME_MOMENT_SECONDS", 60.0)
    async with scripted(tmp_path) as engine:
        engine.submit("a", [1])
        first = await engine.of("a")
        other = engine.cores[1 - first.replica]
        await engine.lost(first, "rank 0 was killed", returns=True)
        await other.hear(EngineCoreRequest)
        await kill(engine, other)
        assert (await other.hear(EngineCoreRequest)).request_id == "a"


async def test_requests_that_have_not_run_yet_are_not_suspected(tmp_path: Path) -> None:
    async with scripted(tmp_path, 1, max_num_seqs=1) as engine:
        (core,) = engine.cores
        streams = [engine.submit(name, [1]) for name in ("poison", "waiting")]
        for _ in range(2):
            for _ in streams:
                await core.hear(EngineCoreRequest)
            await kill(engine, core)
        with pytest.raises(RequestFailed, match="2 times"):
            await whole(streams[0])
        assert (await core.hear(EngineCoreRequest)).request_id == "waiting"


@pytest.mark.parametrize("lost", [0, 1])
async def test_an_api_process_that_starts_while_a_replica_is_lost_is_ready(tmp_path: Path, lost: int) -> None:
    client = EngineClient(endpoints(tmp_path, 2), Metrics("m"))
    try:
        assert client.problem == ("loading", "the model is still loading: 0 of 2 replicas are up")
        for number in range(2):
            client.update(ReplicaLost(number, "gone", returns=False) if number == lost else ReplicaUp(number, 1))
        assert (await client.ready()).replica == 1 - lost
        assert client.problem is None
    finally:
        await client.close()


async def test_a_stream_outlives_any_number_of_deaths(tmp_path: Path) -> None:
    async with scripted(tmp_path, 1) as engine:
        (core,) = engine.cores
        stream = engine.submit("a", [1])
        for death in range(5):
            assert len((await core.hear(EngineCoreRequest)).output_token_ids) == 16 * death
            core.say(EngineCoreOutputs(request_ids=["a"] * 16, token_ids=[7] * 16))
            await kill(engine, core)
        await core.hear(EngineCoreRequest)
        core.tell(EngineCoreOutput("a", [8], finish_reason="stop"))
        assert (await whole(stream)).token_ids == [7] * 80 + [8]


async def test_a_stop_or_an_abort_reaches_the_replica_that_has_the_request_now(tmp_path: Path) -> None:
    async with scripted(tmp_path) as engine:
        stream = engine.submit("a", [1])
        first = await engine.of("a")
        other = engine.cores[1 - first.replica]
        await engine.lost(first, "gone")
        await other.hear(EngineCoreRequest)
        stream.close()
        assert (await other.hear(AbortRequests)).request_ids == ["a"]


async def test_a_replica_that_answers_no_probe_is_avoided(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with scripted(tmp_path) as engine:
        health = asyncio.create_task(engine.client.probe())
        silent, good = engine.cores
        await silent.hear(Probe)
        probe = await good.hear(Probe)
        good.say(ProbeReply(probe.call_id))
        await health  # one lives
        monkeypatch.setattr("quire.server.client.replica_calls.PROBE_SECONDS", 0.5)
        with pytest.raises(EngineUnavailable, match=r"not answered for 0\.5 seconds"):
            await engine.client.probe()
        good.say(ProbeReply((await good.hear(Probe)).call_id))  # it lives after all
        await until_async(lambda: engine.client._live_replicas() == [1])
        for number in range(4):
            engine.submit(str(number), [number])
            await good.hear(EngineCoreRequest)
        silent.tell(stats=EngineStats(steps=1))
        await until_async(lambda: engine.client._live_replicas() == [0, 1])


async def test_the_queue_is_that_of_all_replicas(tmp_path: Path) -> None:
    async with scripted(tmp_path, max_num_seqs=2, max_queue=1) as engine:
        for number in range(5):
            engine.submit(str(number), [number])
        with pytest.raises(QueueFull, match="1 requests are waiting"):
            engine.submit("x", [1])
        engine.cores[0].tell(stats=EngineStats(running=1, waiting=2, steps=1))
        await until_async(lambda: engine.metrics.of(0).waiting)
        each = [engine.metrics.of(number) for number in (0, 1)]
        assert [sum(of.running for of in each), sum(of.waiting for of in each)] == [1, 2]
        with pytest.raises(QueueFull, match="2 requests are waiting"):
            engine.submit("x", [1])


async def test_messages_that_cannot_be_decoded_are_dropped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with scripted(tmp_path) as engine:
        stream = engine.submit("a", [1])
        core = await engine.of("a")
        strange = (["EngineDead"], ["PrefixCacheReset", -1, "", 0, 0, DEEP])
        for message in (b"\xc1", b"", b"\x00" * 9, b"\x91\xa1\xff", *map(msgspec.msgpack.encode, strange)):
            core._responses[0].send(message)
        core._responses[0].send_multipart([b"\x92", b"\xa1"])
        core.tell(EngineCoreOutput("a", [5], finish_reason="length"))
        assert (await whole(stream)).token_ids == [5]
    assert "dropped a message to this API process that could not be decoded" in caplog.text


async def test_a_new_api_process_accepts_requests_while_the_engine_restarts(tmp_path: Path) -> None:
    """It has died together with the engine core, which has been up before."""
    ends = endpoints(tmp_path, 1)
    client = EngineClient(ends, Metrics("m"))
    core = Script(0, ends)
    try:
        with pytest.raises(EngineUnavailable, match="still loading"):
            client.submit([("early", [1], LONG)])
        client.update(ReplicaLost(0, "killed", returns=True))
        stream = client.submit([("a", [1], LONG)])
        assert client.problem is not None
        client.update(ReplicaUp(0, core.incarnation))
        await core.hear(Join)
        assert (await core.hear(EngineCoreRequest)).request_id == "a"
        core.tell(EngineCoreOutput("a", [2], finish_reason="stop"))
        assert (await whole(stream)).token_ids == [2]
    finally:
        await client.close()
        core.close()


async def test_replicas_of_other_api_hosts_are_ignored(tmp_path: Path) -> None:
    """An API process behind an external load balancer has some of the replicas only."""
    ends = endpoints(tmp_path, 2)
    client = EngineClient(Endpoints({1: ends.requests[1]}, ends.responses), Metrics("m"))
    cores = [Script(number, ends) for number in range(2)]
    engine = Scripted(client, client._metrics, ends, cores)
    try:
        engine.up(cores[0])
        client.update(ReplicaLost(0, "not of ours", returns=False))
        client.update(ReplicaUp(1, 1, seconds={"load": 1.0}))
        await cores[1].hear(Join)
        assert (await client.ready()).seconds == {"load": 1.0}
        cores[0].tell(stats=EngineStats(steps=1))
        engine.submit("a", [1])
        assert (await cores[1].hear(EngineCoreRequest)).request_id == "a"
        assert cores[0].is_quiet
    finally:
        await client.close()
        for core in cores:
            core.close()


async def test_a_replica_that_was_added_gets_requests(tmp_path: Path) -> None:
    """Also if there was one only, and nothing was known of its load."""
    async with scripted(tmp_path, 1) as engine:
        engine.submit("a", [1])
        (first,) = engine.cores
        assert (await first.hear(EngineCoreRequest)).request_id == "a"
        more = endpoints(tmp_path, 2)
        engine.cores.append(Script(1, more))
        engine.client.update(ReplicaStarting(1, more.requests[1]))
        engine.client.check()  # nobody waits for it
        engine.submit("b", [1])
        assert (await first.hear(EngineCoreRequest)).request_id == "b"
        engine.client.update(ReplicaLost(1, "killed while it was loading", returns=True))
        engine.up(engine.cores[1])
        engine.metrics.state(1, "up")
        await engine.cores[1].hear(Join)
        engine.submit("c", [1])
        assert (await engine.cores[1].hear(EngineCoreRequest)).request_id == "c"
        engine.cores[1].tell(EngineCoreOutput("c", [9], finish_reason="stop"), stats=EngineStats(steps=3, running=2))
        await until_async(lambda: engine.metrics.of(1).steps)
        assert [(each.index, each.host, each.state) for each in engine.client.replicas] == [
            (0, "localhost", "up"),
            (1, "localhost", "up"),
        ]
        assert engine.client.replicas[1].num_requests_running == 2


async def test_a_replica_that_drains_finishes_its_requests_and_gets_no_more(tmp_path: Path) -> None:
    async with scripted(tmp_path) as engine:
        drained: list[int] = []
        engine.client.on_drained = drained.append
        streams = [engine.submit(name, [1]) for name in "ab"]
        cores = [await engine.of(name) for name in "ab"]
        leaving, staying = cores
        engine.client.update(ReplicaDraining(leaving.replica, 60.0))
        engine.submit("c", [1])
        engine.submit("d", [1])
        assert [(await staying.hear(EngineCoreRequest)).request_id for _ in range(2)] == ["c", "d"]
        leaving.tell(EngineCoreOutput("a", [7]))
        leaving.tell(EngineCoreOutput("a", [8], finish_reason="stop"))
        assert (await whole(streams[0])).token_ids == [7, 8]
        assert drained == [leaving.replica]
        assert leaving.is_quiet
        engine.client.update(ReplicaRemoved(leaving.replica))
        assert [each.index for each in engine.client.replicas] == [staying.replica]
        successor = Script(
            leaving.replica, Endpoints({leaving.replica: f"ipc://{tmp_path}/again"}, engine.ends.responses)
        )
        try:
            engine.client.update(ReplicaStarting(leaving.replica, f"ipc://{tmp_path}/again"))
            engine.up(successor)
            await successor.hear(Join)
            engine.submit("e", [1])
            assert (await successor.hear(EngineCoreRequest)).request_id == "e"
        finally:
            successor.close()


@pytest.mark.parametrize("count", [1, 2])
async def test_what_has_not_ended_in_time_goes_on_elsewhere(tmp_path: Path, count: int) -> None:
    """Or waits for another, and nobody is suspected."""
    async with scripted(tmp_path, count) as engine:
        drained: list[int] = []
        engine.client.on_drained = drained.append
        stream = engine.submit("a", [1])
        leaving = await engine.of("a")
        leaving.tell(EngineCoreOutput("a", [7]))
        assert (await stream.get())[0].token_ids == [7]
        engine.client.update(ReplicaDraining(leaving.replica, 0.0))
        await until_async(lambda: drained)
        engine.client.update(ReplicaRemoved(leaving.replica))
        if count == 1:
            engine.cores.append(Script(1, endpoints(tmp_path, 2)))
            engine.client.update(ReplicaStarting(1, f"ipc://{tmp_path}/requests-1"))
            engine.up(engine.cores[1])
        other = engine.cores[1 - leaving.replica]
        if count == 1:
            await other.hear(Join)
        assert (await other.hear(EngineCoreRequest)).output_token_ids == [7]
        assert engine.client._running["a"].num_deaths == 0
        leaving.tell(EngineCoreOutput("a", [99], finish_reason="error", error="the engine was shut down"))
        other.tell(EngineCoreOutput("a", [8], finish_reason="stop"))
        assert (await whole(stream)).token_ids == [8]
        assert drained == [leaving.replica]


async def test_one_that_leaves_without_requests_is_drained_at_once(tmp_path: Path) -> None:
    """By an API process that has just started too, which does not wait for it."""
    drained: list[int] = []
    client = EngineClient(endpoints(tmp_path, 2), Metrics("m"))
    client.on_drained = drained.append
    try:
        client.update(ReplicaDraining(0, 60.0))
        assert drained == [0]
        client.update(ReplicaRemoved(0))
        client.update(ReplicaUp(1, 1))
        assert (await client.ready()).replica == 1
    finally:
        await client.close()


async def test_abandoned_requests_do_not_delay_a_drain(tmp_path: Path) -> None:
    async with scripted(tmp_path) as engine:
        drained: list[int] = []
        engine.client.on_drained = drained.append
        stream = engine.submit("a", [1])
        leaving = await engine.of("a")
        engine.client.update(ReplicaDraining(leaving.replica, 60.0))
        assert not drained
        stream.close()
        assert drained == [leaving.replica]


# --- processes ------------------------------------------------------------------------------------------------


@asynccontextmanager
async def running(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch, modes: list[str], num_clients: int = 1
) -> AsyncIterator[tuple[EngineManager, list[EngineClient], list[Any]]]:
    """Fake cores under a manager, and the clients of so many API processes."""
    cores: list[Any] = []

    def start(args: CoreArgs, folder: str) -> Any:
        cores.append(
            fake_core.start_process(args, folder, dict(enumerate(modes)).get(args.config.parallel.replica, ""))
        )
        return cores[-1]

    monkeypatch.setattr("quire.server.client.engine_manager.start_core", start)
    parallel = replace(config.parallel, replicas=len(modes), local_replicas=range(len(modes)))
    manager = EngineManager(replace(config, parallel=parallel), name="m", num_clients=num_clients)
    infos = [manager.process_info(index) for index in range(num_clients)]
    clients = [
        EngineClient(info.endpoints, Metrics("m", info.metrics, info.index, num_clients), info.index) for info in infos
    ]
    for client in clients:
        client.on_drained = functools.partial(manager.drained, client.index)
    loop = asyncio.get_running_loop()

    def on_change(state: EngineState) -> None:
        for client in clients:
            loop.call_soon_threadsafe(client.update, state)

    manager.on_change = on_change
    manager.run_in_thread()
    try:
        yield manager, clients, cores
    finally:
        await asyncio.to_thread(manager.stop_thread().join)
        for client in clients:
            await client.close()


def prompt(number: int) -> list[int]:
    return [10 + number, 50, 51]


def echoed(number: int, count: int = 100) -> list[int]:
    return (prompt(number) * count)[:count]


@pytest.mark.parametrize(("count", "number", "watchdog_seconds"), [(1, signal.SIGKILL, 60.0), (2, signal.SIGSTOP, 5.0)])
async def test_killing_or_stopping_a_replica_loses_no_stream_of_any_api_process(
    config: EngineConfig,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    count: int,
    number: signal.Signals,
    watchdog_seconds: float,
) -> None:
    """It is started again, and gets requests again."""
    config = replace(config, parallel=replace(config.parallel, watchdog_seconds=watchdog_seconds))
    async with running(config, monkeypatch, [f"held until {tmp_path / 'gate'}"] * count, 2) as (
        manager,
        clients,
        cores,
    ):
        for client in clients:
            await client.ready()
        streams = [clients[n % 2].submit([(str(n), prompt(n), LONG)], cache_salt=b"x") for n in range(50)]
        first = [(await stream.get())[0].token_ids for stream in streams]
        assert all(0 < len(tokens) <= fake_core.HELD_AT for tokens in first)
        victims = [sum(r.replica == 0 for r in client._running.values()) for client in clients]
        assert min(victims) > 5
        os.kill(cores[0].pid, number)
        (tmp_path / "gate").touch()
        for n, (begun, stream) in enumerate(zip(first, streams, strict=True)):
            output = await whole(stream)
            assert begun + output.token_ids == echoed(n)
            assert output.finish_reason == "length"
        await until_async(lambda: all(client._live_replicas() == list(range(count)) for client in clients))
        assert len(cores) == count + 1
        again = [client.submit([(f"again {client.index}", prompt(1), LONG)]) for client in clients]
        assert [(await whole(stream)).token_ids for stream in again] == [echoed(1)] * 2
        text = manager.metrics.exposition().decode()
        assert 'quire:engine_deaths_total{engine="0",model_name="m"} 1.0' in text
    assert [core.returncode for core in cores] == [-signal.SIGKILL, *[0] * count]


async def test_streams_of_a_replica_that_hangs_go_on_before_it_is_declared_dead(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It gets requests again when it goes on."""
    config = replace(config, parallel=replace(config.parallel, watchdog_seconds=3600.0))
    async with running(config, monkeypatch, [f"held until {tmp_path / 'gate'}"] * 2, 2) as (_, clients, cores):
        for client in clients:
            await client.ready()
        streams = [clients[n % 2].submit([(str(n), prompt(n), LONG)], cache_salt=b"x") for n in range(20)]
        first = [(await stream.get())[0].token_ids for stream in streams]
        os.kill(cores[0].pid, signal.SIGSTOP)
        (tmp_path / "gate").touch()
        try:
            late = [client.submit([(f"late {client.index}", prompt(1), LONG)]) for client in clients]
            for n, (begun, stream) in enumerate(zip(first, streams, strict=True)):
                assert begun + (await whole(stream)).token_ids == echoed(n)
            assert [(await whole(stream)).token_ids for stream in late] == [echoed(1)] * 2
            await until_async(lambda: all(client._live_replicas() == [1] for client in clients))
        finally:
            os.kill(cores[0].pid, signal.SIGCONT)
        await until_async(lambda: all(client._live_replicas() == [0, 1] for client in clients))
    assert [core.returncode for core in cores] == [0, 0]


@pytest.mark.parametrize("drain_seconds", [0.0, 60.0])
async def test_replicas_come_and_go_under_open_streams(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, drain_seconds: float
) -> None:
    """From one to three, to one."""
    async with running(config, monkeypatch, [f"held until {tmp_path / 'gate'}"], 2) as (manager, clients, cores):
        for client in clients:
            await client.ready()

        def submit(begin: int) -> dict[int, OutputStream]:
            return {n: clients[n % 2].submit([(str(n), prompt(n), LONG)]) for n in range(begin, begin + 20)}

        streams = submit(0)
        first = {n: (await stream.get())[0].token_ids for n, stream in streams.items()}
        manager.supervisor.call(lambda: manager.resize(3, 30.0))
        await until_async(lambda: all(client._live_replicas() == [0, 1, 2] for client in clients))
        more = submit(20)
        assert {each.replica for client in clients for each in client._running.values()} >= {1, 2}
        first |= {n: (await stream.get())[0].token_ids for n, stream in more.items()}
        manager.supervisor.call(lambda: manager.resize(1, drain_seconds))
        (tmp_path / "gate").touch()
        await until_async(lambda: all([each.index for each in client.replicas] == [0] for client in clients))
        for n, stream in (streams | more).items():
            output = await whole(stream)
            assert first[n] + output.token_ids == echoed(n)
            assert output.finish_reason == "length"
        await until_async(lambda: [core.poll() for core in cores] == [None, 0, 0])


# --- profiles -------------------------------------------------------------------------------------------------


async def answer_pings(core: Script, ahead: int = 0) -> Any:
    """Answer the pings of a stop with a clock that is `ahead`, in nanoseconds; returns the stop."""
    while isinstance(message := await core.hear(ClockPing | StopProfile), ClockPing):
        core.say(ClockReply(message.call_id, 0, 0, time.time_ns() + ahead))
    return message


def piece(stop: StopProfile, rank: int) -> TracePiece:
    return TracePiece(stop.client, stop.call_id, rank, b"", TraceSummary(f"rank {rank}", rank + 2, 0, stop.clock))


async def test_a_profile_that_one_replica_refuses_is_started_on_none(tmp_path: Path) -> None:
    async with scripted(tmp_path) as engine:
        first, second = engine.cores
        starting = asyncio.create_task(Profiler(engine.client).start(1.0))
        for core, error in ((first, ""), (second, "running already")):
            core.say(ProfileReply((await core.hear(StartProfile)).call_id, 0, 0, error))
        stop = await first.hear(StopProfile)
        assert stop.discard
        first.say(ProfileReply(stop.call_id, 0, 0))
        with pytest.raises(ProfileConflict, match="running already"):
            await starting
        assert second.is_quiet


async def test_a_replica_that_dies_while_its_trace_is_awaited_is_named(tmp_path: Path) -> None:
    async with scripted(tmp_path) as engine:
        first, second = engine.cores
        stopping = asyncio.create_task(Profiler(engine.client).stop(io.BytesIO()))
        stops = await asyncio.gather(answer_pings(first), answer_pings(second))
        for core, stop in zip((first, second), stops, strict=True):
            core.say(ProfileReply(stop.call_id, 0, 0))
            core.say(piece(stop, -1))
        await engine.lost(second, "rank 1 was killed by SIGKILL")
        with pytest.raises(EngineUnavailable, match=r"replica 1 was lost: rank 1 was killed.*profile is lost"):
            await stopping
        assert not engine.client.calls.traces


async def test_clocks_are_measured_and_a_restarted_replica_has_no_trace(tmp_path: Path) -> None:
    async with scripted(tmp_path) as engine:
        first, second = engine.cores
        file = io.BytesIO()
        stopping = asyncio.create_task(Profiler(engine.client).stop(file))
        stop, other = await asyncio.gather(answer_pings(first, ahead=3600 * 10**9), answer_pings(second))
        assert abs(stop.clock.offset + 3600 * 10**9) <= stop.clock.error
        assert other.clock.offset == 0
        first.say(ProfileReply(stop.call_id, 0, 0))
        second.say(ProfileReply(other.call_id, 0, 0, "no profile is running"))
        first.say(piece(stop, -1))
        second.say(piece(other, 0))  # of another profile
        first.say(piece(stop, 0))
        assert (await stopping).is_cut
        data = json.loads(gzip.decompress(file.getvalue()))["otherData"]
        assert [each["name"] for each in data["processes"]] == ["rank -1", "rank 0"]
        assert data["processes"][0]["clock_offset_us"] == stop.clock.offset / 1000
        assert data["replicas_without_trace"] == [1]


async def test_a_replica_that_is_removed_while_a_profile_is_stopped_has_no_trace(tmp_path: Path) -> None:
    async with scripted(tmp_path) as engine:
        first, second = engine.cores
        stopping = asyncio.create_task(Profiler(engine.client).stop(io.BytesIO()))
        for _ in range(_CLOCK_PINGS):
            second.say(ClockReply((await second.hear(ClockPing)).call_id, 1, 0, time.time_ns()))
        await until_async(lambda: not any(number == 1 for number, _ in engine.client.calls.waiting))
        engine.client.update(ReplicaRemoved(1))
        stop = await answer_pings(first)
        for each in (-1, 0):
            first.say(piece(stop, each))
        first.say(ProfileReply(stop.call_id, 0, 0))
        await stopping
