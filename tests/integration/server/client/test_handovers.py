"""Prompts that one replica computes and another one continues, and the loss of either at any moment."""

from __future__ import annotations

import contextlib
import random
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from quire.engine.protocol.engine_core import (
    AbortRequests,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
    ToCore,
)
from quire.engine.protocol.kv_store import KVStoreStats
from quire.engine.protocol.media import MediaData, MediaItem, MediaRun
from quire.engine.protocol.sampling_params import SamplingParams
from quire.engine.protocol.supervision import (
    ReplicaDraining,
    ReplicaLost,
    ReplicaRemoved,
    ReplicaRoles,
    ReplicaStarting,
    ReplicaUp,
)
from quire.server.client.engine_client import EngineClient
from quire.server.client.metrics import Metrics
from quire.server.client.output_stream import OutputStream
from quire.server.client.replica import Replica
from tests.fakes.scripted_cores import LONG, Script, Scripted, endpoints, scripted, stop_checks, whole
from tests.fakes.waiting import until_async

PROMPT = list(range(400))


@contextlib.asynccontextmanager
async def apart(folder: Path, count: int = 2) -> AsyncIterator[tuple[Scripted, Script, Script]]:
    """An engine whose replica 0 is for prompts, and replicas 0 and 1."""
    roles = {number: "decode" if number else "prefill" for number in range(count)}
    async with scripted(folder, count, roles=roles) as engine:
        engine.metrics.take_store(0, "localhost", KVStoreStats())
        yield engine, engine.cores[0], engine.cores[1]


async def begin(engine: Scripted, first: Script, second: Script, params: SamplingParams = LONG) -> OutputStream:
    """Submit a request that one computes and the other expects."""
    stream = engine.submit("a", PROMPT, params)
    sent, expected = await first.hear(EngineCoreRequest), await second.hear(EngineCoreRequest)
    assert (sent.hands_over, sent.is_expected) == (True, False)
    assert (expected.hands_over, expected.is_expected) == (False, True)
    assert sent.prompt_token_ids == expected.prompt_token_ids == PROMPT
    return stream


def hand_over(core: Script) -> None:
    core.tell(EngineCoreOutput("a", [7], num_cached_tokens=16, running_seconds=0.1, is_handed_over=True))


async def finish(core: Script, stream: OutputStream, tokens: list[int]) -> None:
    """Continue after these tokens, and end."""
    sent = await core.hear(EngineCoreRequest)
    assert (sent.hands_over, sent.is_expected, sent.output_token_ids) == (False, False, tokens)
    core.tell(EngineCoreOutput("a", [8], finish_reason="stop", num_cached_tokens=384, num_loaded_tokens=(384, 0, 0)))
    output = await whole(stream)
    assert (output.token_ids, output.finish_reason) == ([*tokens, 8], "stop")


def books_are_even(client: EngineClient) -> bool:
    assert client._router is not None
    loads = client._router._loads.values()
    return not client.num_open and all((each.open, each.pending, each.blocks) == (0, 0, 0) for each in loads)


async def test_the_first_token_waits_for_nobody(tmp_path: Path) -> None:
    async with apart(tmp_path) as (engine, first, second):
        stream = await begin(engine, first, second)
        hand_over(first)
        (output,) = await stream.get()
        assert (output.token_ids, output.finish_reason) == ([7], None)
        sent = await second.hear(EngineCoreRequest)
        assert (sent.is_expected, sent.hands_over, sent.output_token_ids) == (False, False, [7])
        second.tell(EngineCoreOutput("a", [8], num_cached_tokens=384, num_loaded_tokens=(384, 0, 0)))
        second.say(EngineCoreOutputs(request_ids=["a"], token_ids=[9]))
        second.tell(EngineCoreOutput("a", [10], finish_reason="length"))
        output = await whole(stream)
        assert (output.token_ids, output.num_cached_tokens) == ([8, 9, 10], 16), "what the prompt's replica had"
        names = "requests_handed_over", "handed_over_tokens", "handed_over_tokens_recomputed"
        counts = [[engine.metrics.totals(name, [replica])[0] for name in names] for replica in range(2)]
        assert counts == [[1, 0, 0], [0, 384, 16]]
        assert sum(engine.metrics.histogram(1, "handover_time_seconds")[:-1]) == 1
        assert books_are_even(engine.client)
        assert first.is_quiet
        assert second.is_quiet


async def test_a_request_that_ends_with_its_first_token_is_not_expected_any_more(tmp_path: Path) -> None:
    async with apart(tmp_path) as (engine, first, second):
        stream = await begin(engine, first, second)
        first.tell(EngineCoreOutput("a", [7], finish_reason="stop"))
        assert (await whole(stream)).token_ids == [7]
        assert (await second.hear(AbortRequests)).request_ids == ["a"]
        second.tell(EngineCoreOutput("a", [], finish_reason="abort"))
        stream = engine.submit("b", [5, *PROMPT], SamplingParams(max_tokens=1))
        assert not (await first.hear(EngineCoreRequest)).hands_over, "it is known to be the only one"
        stream.close()
        assert (await first.hear(AbortRequests)).request_ids == ["b"]
        assert second.is_quiet
        assert books_are_even(engine.client)


async def test_an_aborted_request_leaves_both(tmp_path: Path) -> None:
    async with apart(tmp_path) as (engine, first, second):
        (await begin(engine, first, second)).close()
        for core in (first, second):
            assert (await core.hear(AbortRequests)).request_ids == ["a"]
        assert books_are_even(engine.client)
        await begin(engine, first, second)
        engine.client.fail("it is over")
        for core in (first, second):
            assert (await core.hear(AbortRequests)).request_ids == ["a"]


async def test_the_prompts_replica_dies(tmp_path: Path) -> None:
    """Before its token: the other one computes what it has not loaded."""
    async with apart(tmp_path) as (engine, first, second):
        stream = await begin(engine, first, second)
        await engine.lost(first, "killed")
        await finish(second, stream, [])
        assert books_are_even(engine.client)


async def test_the_prompts_replica_is_silent(tmp_path: Path) -> None:
    """Its late token is dropped, and says that it has nothing of the request any more."""
    async with apart(tmp_path) as (engine, first, second):
        stream = await begin(engine, first, second)
        engine.check_silence(first, 1.5)
        assert (await first.hear(AbortRequests)).request_ids == ["a"]
        hand_over(first)
        running = engine.client._running["a"]
        await until_async(lambda: not running.leaving)
        await finish(second, stream, [])
        assert books_are_even(engine.client)


async def test_the_other_replica_dies_before_the_first_token(tmp_path: Path) -> None:
    async with apart(tmp_path, 3) as (engine, first, second):
        stream = await begin(engine, first, second)
        await engine.lost(second, "killed", returns=True)
        hand_over(first)
        third = engine.cores[2]
        sent = await first.hear(EngineCoreRequest)  # it has the prompt, so the next token comes from there
        assert (sent.hands_over, sent.output_token_ids) == (True, [7])
        expected = await third.hear(EngineCoreRequest)
        assert (expected.is_expected, expected.output_token_ids) == (True, [7])
        assert engine.metrics.totals("requests_handed_over", range(3)) == [0], "it has stayed"
        first.tell(EngineCoreOutput("a", [6], is_handed_over=True))
        await finish(third, stream, [7, 6])
        assert engine.metrics.totals("requests_handed_over", range(3)) == [1]
        assert sum(engine.metrics.histogram(0, "handover_time_seconds")[:-1]) == 0
        assert books_are_even(engine.client)


async def test_without_another_replica_the_prompts_replica_goes_on(tmp_path: Path) -> None:
    async with apart(tmp_path) as (engine, first, second):
        stream = await begin(engine, first, second)
        await engine.lost(second, "killed", returns=True)
        hand_over(first)
        await finish(first, stream, [7])
        stream = engine.submit("b", PROMPT)
        assert not (await first.hear(EngineCoreRequest)).hands_over, "roles are preferences"


async def test_a_replica_that_comes_back_expects_nothing(tmp_path: Path) -> None:
    async with apart(tmp_path) as (engine, first, second):
        stream = await begin(engine, first, second)
        await engine.lost(second, "killed", returns=True)
        assert engine.client._running["a"].successor is None
        assert engine.client._router is not None
        assert not engine.client._router._loads[1].open
        stream.close()
        assert (await first.hear(AbortRequests)).request_ids == ["a"]
        assert books_are_even(engine.client)


async def test_the_other_replica_dies_afterwards(tmp_path: Path) -> None:
    async with apart(tmp_path) as (engine, first, second):
        stream = await begin(engine, first, second)
        hand_over(first)
        assert (await second.hear(EngineCoreRequest)).output_token_ids == [7]
        await engine.lost(second, "killed")
        await finish(first, stream, [7])
        assert books_are_even(engine.client)


async def test_the_other_replica_is_silent_or_to_be_removed(tmp_path: Path) -> None:
    async with apart(tmp_path, 3) as (engine, first, second):
        stream = await begin(engine, first, second)
        engine.client.update(ReplicaDraining(1, 60.0))
        assert (await second.hear(AbortRequests)).request_ids == ["a"]
        assert engine.client._replicas[1].is_drained
        stream.close()
        await first.hear(AbortRequests)
        third = engine.cores[2]
        stream = await begin(engine, first, third)
        engine.client._replicas[2].is_silent = True
        hand_over(first)
        assert (await third.hear(AbortRequests)).request_ids == ["a"]
        await finish(first, stream, [7])
        assert engine.metrics.totals("requests_handed_over", range(3)) == [0], "it has stayed"
        assert books_are_even(engine.client)


async def test_prompts_stay_where_they_are_decoded_without_a_store_or_a_role(tmp_path: Path) -> None:
    async with apart(tmp_path) as (engine, first, second):
        for number, prompt in enumerate((PROMPT[:200], PROMPT)):
            if number:
                engine.metrics._kv_stores.clear()
            stream = engine.submit(str(number), prompt)
            sent = await second.hear(EngineCoreRequest)
            assert not sent.hands_over
            assert not sent.is_expected
            stream.close()
            await second.hear(AbortRequests)
        assert first.is_quiet
        engine.metrics.take_store(0, "localhost", KVStoreStats())
        engine.client.update(ReplicaRoles({1: "prefill"}))
        engine.submit("a", [9, *PROMPT])
        assert (await second.hear(EngineCoreRequest)).hands_over
        assert (await first.hear(EngineCoreRequest)).is_expected


@pytest.mark.parametrize("host", ["10.0.0.2", "10.0.0.1"])
async def test_the_other_host_is_told_whose_store_has_the_prompt(host: str, tmp_path: Path) -> None:
    """If that is read there: prompts that cannot be loaded stay where they are decoded. Both may have one address."""
    async with apart(tmp_path) as (engine, first, second):
        one, other = (engine.client._replicas[number] for number in range(2))
        one.address, other.address = "tcp://10.0.0.1:1", f"tcp://{host}:2"
        one.kv_peer, other.kv_peer = "10.0.0.1:7", f"{host}:8"
        engine.metrics.take_store(0, one.host, KVStoreStats(peers=1), one.store)
        for peers in (["10.0.0.3:7"], ["10.0.0.1:7"]):
            engine.metrics.take_store(1, host, KVStoreStats(peers=2, peers_up=peers), other.store)
            stream = engine.submit("a", PROMPT)
            if peers == ["10.0.0.3:7"]:
                sent = await second.hear(EngineCoreRequest)
                assert (sent.is_expected, sent.kv_peer) == (False, "")
                stream.close()
                await second.hear(AbortRequests)
        sent, expected = await first.hear(EngineCoreRequest), await second.hear(EngineCoreRequest)
        assert (sent.hands_over, sent.kv_peer) == (True, "")
        assert (expected.is_expected, expected.kv_peer) == (True, "10.0.0.1:7")
        hand_over(first)
        sent = await second.hear(EngineCoreRequest)
        assert (sent.is_expected, sent.output_token_ids, sent.kv_peer) == (False, [7], "10.0.0.1:7")
        await engine.lost(second, "killed")
        sent = await first.hear(EngineCoreRequest)
        assert (sent.output_token_ids, sent.kv_peer) == ([7], "")


async def test_images_are_expected_without_their_data(tmp_path: Path) -> None:
    async with apart(tmp_path) as (engine, first, second):
        item = MediaItem(bytes(16), "image", 0, 1, (MediaRun(0, 1),), data=MediaData((), 6, content=b"pixels"))
        engine.client.submit([("a", PROMPT, LONG)], media=[[item]])
        assert (await first.hear(EngineCoreRequest)).media == [item]
        (expected,) = (await second.hear(EngineCoreRequest)).media
        assert (expected.digest, expected.data) == (item.digest, None)
        hand_over(first)
        assert (await second.hear(EngineCoreRequest)).media == [item]


# --- any order of events --------------------------------------------------------------------------------------------


class Cores:
    """Replicas that compute a token of a request at a time, and whose messages arrive when the test lets them."""

    def __init__(self, client: EngineClient, count: int) -> None:
        self.client = client
        self.inboxes: dict[int, list[ToCore]] = {number: [] for number in range(count)}
        self.outboxes: dict[int, list[EngineCoreOutputs]] = {number: [] for number in range(count)}
        self.requests: dict[int, dict[str, EngineCoreRequest]] = {number: {} for number in range(count)}
        self.tokens: dict[int, dict[str, list[int]]] = {number: {} for number in range(count)}
        self.incarnations = dict.fromkeys(range(count), 1)
        self.num_handed_over = 0

    def start(self, number: int) -> None:
        """Start a replica that is not up."""
        self.incarnations[number] += 1
        for each in (self.inboxes, self.outboxes, self.requests, self.tokens):
            each[number].clear()
        self.client.update(ReplicaUp(number, self.incarnations[number]))

    def read(self, number: int) -> None:
        """Process the next message to a replica."""
        match self.inboxes[number].pop(0):
            case EngineCoreRequest(request_id=request_id) as request:
                earlier = self.requests[number].get(request_id)
                assert earlier is None or (earlier.is_expected and not request.is_expected), "it is there already"
                self.requests[number][request_id] = request
                self.tokens[number][request_id] = [*request.output_token_ids]
            case AbortRequests(request_ids):
                for request_id in request_ids:
                    if self.requests[number].pop(request_id, None) is not None:
                        self._say(number, EngineCoreOutput(request_id, [], finish_reason="abort"))

    def compute(self, number: int, request_id: str) -> None:
        """Compute a token of a request."""
        request, tokens = self.requests[number][request_id], self.tokens[number][request_id]
        tokens.append(token(request_id, len(tokens)))
        is_last = len(tokens) == request.params.max_tokens
        reason: FinishReason | None = "length" if is_last else None
        is_handed_over = request.hands_over and not is_last
        self.num_handed_over += is_handed_over
        if is_last or is_handed_over:
            del self.requests[number][request_id]
        output = EngineCoreOutput(request_id, [tokens[-1]], finish_reason=reason, is_handed_over=is_handed_over)
        self._say(number, output)

    def _say(self, number: int, output: EngineCoreOutput) -> None:
        self.outboxes[number].append(EngineCoreOutputs([output], replica=number))

    def deliver(self, number: int) -> None:
        """Let the oldest message of a replica arrive."""
        outputs = self.outboxes[number].pop(0)
        if self.client._replicas[number].state in ("up", "draining"):
            self.client._deliver(outputs)

    @property
    def work(self) -> list[tuple[Callable[..., None], tuple[Any, ...]]]:
        """All that replicas may do next."""
        found: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        for number in self.inboxes:
            found += [(self.read, (number,))] * bool(self.inboxes[number])
            found += [(self.deliver, (number,))] * bool(self.outboxes[number])
            running = (each for each in self.requests[number].values() if not each.is_expected)
            found += [(self.compute, (number, each.request_id)) for each in running]
        return found


def token(request_id: str, place: int) -> int:
    return int(request_id) * 100 + place


@pytest.mark.parametrize("seed", range(10))
async def test_streams_are_whole_and_nothing_is_left_behind_whatever_happens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    rng, count = random.Random(seed), 4
    client = EngineClient(endpoints(tmp_path, count), metrics := Metrics("m"))
    stop_checks(client)
    cores = Cores(client, count)
    monkeypatch.setattr(Replica, "open", lambda self: None)
    monkeypatch.setattr(Replica, "send", lambda self, message: cores.inboxes[self.number].append(message))
    streams: dict[str, OutputStream] = {}
    closed = set[str]()

    def state(number: int) -> str:
        return client._replicas[number].state

    def store(is_up: bool) -> None:
        if is_up:
            metrics.take_store(0, "localhost", KVStoreStats())
        else:
            metrics._kv_stores.clear()

    def submit() -> None:
        request_id = str(len(streams) + 1)
        prompt = [int(request_id)] * rng.choice((20, 300, 300, 400))
        streams[request_id] = client.submit([(request_id, prompt, SamplingParams(max_tokens=rng.randint(1, 12)))])

    def close() -> None:
        if left := [each for each in streams if each not in closed]:
            closed.add(chosen := rng.choice(left))
            streams[chosen].close()

    def kill() -> None:
        if state(number := rng.randrange(count)) == "up":
            client.update(ReplicaLost(number, "killed", returns=True, may_be_caused_by_request=False))

    def start(number: int) -> None:
        if state(number) == "draining" and client._replicas[number].is_drained:
            client.update(ReplicaRemoved(number))
            client.update(ReplicaStarting(number, ""))
        if state(number) in ("loading", "restarting"):
            cores.start(number)

    def drain() -> None:
        if state(number := rng.randrange(count)) == "up":
            client.update(ReplicaDraining(number, 60.0))

    def move() -> None:
        """A replica that drains has had its time."""
        for replica in client._replicas.values():
            if replica.state == "draining" and not replica.is_drained:
                client._move(replica)

    def silence() -> None:
        silent = rng.randrange(count)
        for replica in client._replicas.values():
            replica.is_silent = False
            replica.heard_at = client.loop.time() - rng.choice((1.5, 4.0, 10.0)) * (replica.number == silent)
        client._check_silence()
        stop_checks(client)

    def change_roles() -> None:
        prefill = rng.sample(range(count), rng.choice((0, 1, 1, 2)))
        client.update(ReplicaRoles({number: "prefill" if number in prefill else "decode" for number in range(count)}))

    try:
        assert client._router is not None
        client._router._clock = lambda: 0.0
        for number in range(count):
            cores.start(number)
            metrics.state(number, "up")
        store(is_up=True)
        change_roles()
        events = [submit] * 12 + [close, kill, drain, move, silence, change_roles]
        events += (
            [lambda: start(rng.randrange(count))] * 3 + [lambda: store(is_up=True)] * 3 + [lambda: store(is_up=False)]
        )
        for _ in range(1500):
            if (work := cores.work) and rng.random() < 0.85:
                act, arguments = rng.choice(work)
                act(*arguments)
            else:
                rng.choice(events)()
        for _ in range(3):
            move()
            for number in range(count):
                start(number)
            while work := cores.work:
                act, arguments = rng.choice(work)
                act(*arguments)
        assert not client.num_open
        for request_id, stream in streams.items():
            if request_id not in closed:
                output = await whole(stream)
                expected = [token(request_id, place) for place in range(len(output.token_ids))]
                assert (output.token_ids, output.finish_reason) == (expected, "length")
        assert not any(cores.requests.values()), "nothing is expected or computed any more"
        assert cores.num_handed_over > 0
        assert books_are_even(client)
    finally:
        await client.close()
