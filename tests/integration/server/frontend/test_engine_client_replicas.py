"""Several replicas behind one client: what is sent where, and what happens when one of them dies."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from quire.engine.config.engine_config import CacheConfig, EngineConfig
from quire.engine.core.launch import Endpoints
from quire.engine.protocol.engine_core import (
    AbortRequests,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineDead,
    EngineReady,
    Join,
    Probe,
    ProbeReply,
    ToCore,
    ToServer,
)
from quire.engine.protocol.sampling_params import SamplingParams
from quire.engine.protocol.stats import EngineStats
from quire.server.frontend.engine_client import EngineClient, QueueFull
from quire.server.frontend.metrics import Metrics
from quire.server.frontend.output_stream import EngineUnavailable, OutputStream
from tests.fakes import fake_core
from tests.fakes.outputs import prompt_logprobs

LONG = SamplingParams(max_tokens=100, ignore_eos=True)


def endpoints(folder: Path, replicas: int, clients: int = 1) -> Endpoints:
    return Endpoints(
        tuple(f"ipc://{folder}/requests-{number}" for number in range(replicas)),
        tuple(f"ipc://{folder}/responses-{number}" for number in range(clients)),
    )


async def until(condition: Callable[[], Any]) -> None:
    """A hanging test, if it never comes true."""
    while not condition():
        await asyncio.sleep(0.005)


async def whole(stream: OutputStream) -> EngineCoreOutput:
    """All that comes of a request, up to its end, as one."""
    outputs: list[EngineCoreOutput] = []
    while not outputs or outputs[-1].finish_reason is None:
        outputs += await stream.get()
    merged = OutputStream(None, [])  # type: ignore[arg-type]
    for output in outputs:
        merged.put(output)
    (one,) = merged._unread.values()
    return one


# --- a client between sockets ---------------------------------------------------------------------------------


class Script:
    """A core whose every word the test says."""

    def __init__(self, replica: int, ends: Endpoints) -> None:
        self.replica = replica
        self._context = zmq.Context()
        self._address = ends.requests[replica]
        self._requests = self._context.socket(zmq.PULL)
        self._requests.bind(self._address)
        self._responses = [self._context.socket(zmq.PUSH) for _ in ends.responses]
        for socket, address in zip(self._responses, ends.responses, strict=True):
            socket.connect(address)

    def say(self, message: ToServer, client: int = 0) -> None:
        message.replica = self.replica
        self._responses[client].send(msgspec.msgpack.encode(message))

    def tell(self, *outputs: EngineCoreOutput, stats: EngineStats | None = None) -> None:
        self.say(EngineCoreOutputs(list(outputs), stats))

    async def hear(self, kind: Any) -> Any:
        """The next message, which is of this kind."""
        await until(lambda: self._requests.poll(0))
        decoder: msgspec.msgpack.Decoder[ToCore] = msgspec.msgpack.Decoder(ToCore)
        message = decoder.decode(self._requests.recv())
        assert isinstance(message, kind), message
        return message

    @property
    def is_quiet(self) -> bool:
        return not self._requests.poll(50)

    def close(self) -> None:
        self._context.destroy(linger=200)


@dataclass
class Scripted:
    client: EngineClient
    metrics: Metrics
    ends: Endpoints
    cores: list[Script]

    def submit(self, request_id: str, prompt: list[int], params: SamplingParams = LONG) -> OutputStream:
        return self.client.submit([(request_id, prompt, params)])

    async def of(self, request_id: str) -> Script:
        """Where a request was sent to; its `EngineCoreRequest` is taken out there."""
        core = self.cores[self.client._running[request_id].replica]
        assert (await core.hear(EngineCoreRequest)).request_id == request_id
        return core


@asynccontextmanager
async def scripted(folder: Path, count: int = 2, **options: Any) -> AsyncIterator[Scripted]:
    ends = endpoints(folder, count)
    metrics = Metrics("m", replicas=range(count))
    client = EngineClient(ends, {}, metrics, replicas=range(count), **options)
    cores = [Script(number, ends) for number in range(count)]
    try:
        for core in cores:
            core.say(EngineReady({}))
        await client.ready()
        yield Scripted(client, metrics, ends, cores)
    finally:
        await client.close()
        for core in cores:
            core.close()


async def test_a_stream_goes_on_at_another_replica_as_if_nothing_had_happened(tmp_path: Path) -> None:
    async with scripted(tmp_path) as engine:
        params = SamplingParams(max_tokens=9, prompt_logprobs=0, logprobs=0)
        stream = engine.submit("a", [1, 2, 3], params)
        first = await engine.of("a")
        other = engine.cores[1 - first.replica]
        rows: Any = [(float(number), 1, [], []) for number in range(9)]
        first.tell(EngineCoreOutput("a", [], prompt_logprobs=prompt_logprobs(rows[:2], 0)))
        first.tell(EngineCoreOutput("a", [7], num_cached_tokens=2))
        first.say(EngineCoreOutputs(request_ids=["a"], token_ids=[8]))
        first.say(EngineDead("rank 0 hangs"))
        resumed = await other.hear(EngineCoreRequest)
        assert (resumed.prompt_token_ids, resumed.output_token_ids) == ([1, 2, 3], [7, 8])
        assert resumed.params == params
        first.tell(EngineCoreOutput("a", [99]))  # too late
        other.tell(EngineCoreOutput("a", [9], num_cached_tokens=1))
        other.tell(EngineCoreOutput("a", [10], finish_reason="stop", num_cached_tokens=1))
        output = await whole(stream)
        assert (output.token_ids, output.finish_reason, output.num_cached_tokens) == ([7, 8, 9, 10], "stop", 2)
        assert output.prompt_logprobs is not None
        assert [row.logprob for row in output.prompt_logprobs.rows()] == [0.0, 1.0]
        assert not engine.client.num_open


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
            first.say(EngineDead("gone"))
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
        engine.client.replica_died(0, "the host is gone")
        engine.client.abort({mine[0]}, "abort")
        successor = engine.cores[0] = Script(0, engine.ends)
        assert successor.is_quiet
        kinds = [type(await alive.hear(EngineCoreRequest | AbortRequests)) for _ in range(11)]
        assert kinds == [EngineCoreRequest] * 10 + [AbortRequests]
        assert engine.metrics.of(0).running == 0
        successor.say(EngineReady({}))
        await until(lambda: engine.client._live_replicas() == [0, 1])
        engine.submit("new", [1])
        assert (await successor.hear(EngineCoreRequest)).request_id == "new"  # it has the least to do


async def test_without_replicas_the_reason_is_reported(tmp_path: Path) -> None:
    async with scripted(tmp_path) as engine:
        stream = engine.submit("a", [1])
        first = await engine.of("a")
        first.say(EngineDead("rank 0 hangs"))
        other = engine.cores[1 - first.replica]
        await other.hear(EngineCoreRequest)
        other.say(EngineDead("rank 1 hangs"))
        with pytest.raises(EngineUnavailable, match=f"replica {other.replica}: rank 1 hangs"):
            await whole(stream)
        with pytest.raises(EngineUnavailable, match="rank 1 hangs"):
            engine.client.check()
        assert "rank 1 hangs" in str(await engine.client.failed())


async def test_a_request_that_kills_whoever_has_it_is_not_given_to_all(tmp_path: Path) -> None:
    cache = CacheConfig(block_size=2, num_blocks=100, dtype="float32", enable_prefix_caching=True)
    async with scripted(tmp_path, 4, cache=cache) as engine:
        stream = engine.submit("poison", [1, 2, 3])
        for token in range(3):
            core = engine.cores[engine.client._running["poison"].replica]
            await core.hear(EngineCoreRequest)
            core.tell(EngineCoreOutput("poison", [token]))
            core.say(EngineDead("rank 0 was killed"))
            await until(lambda core=core: core.replica not in engine.client._live_replicas())  # type: ignore[misc]
        output = await whole(stream)
        assert output.finish_reason == "error"
        assert output.error is not None
        assert output.error.endswith("rank 0 was killed; the request cannot go on, as it has lost 3 replicas already")
        assert len(engine.client._live_replicas()) == 1
        assert not any(load.cached for load in engine.client._router._loads.values())
        engine.client.check()


async def test_a_stop_or_an_abort_reaches_the_replica_that_has_the_request_now(tmp_path: Path) -> None:
    async with scripted(tmp_path) as engine:
        stream = engine.submit("a", [1])
        first = await engine.of("a")
        other = engine.cores[1 - first.replica]
        first.say(EngineDead("gone"))
        await other.hear(EngineCoreRequest)
        stream.close()
        assert (await other.hear(AbortRequests)).request_ids == ["a"]


async def test_a_replica_that_answers_no_probe_is_avoided(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.server.frontend.engine_client.PROBE_SECONDS", 0.5)
    async with scripted(tmp_path) as engine:
        health = asyncio.create_task(engine.client.probe())
        silent, good = engine.cores
        await silent.hear(Probe)
        probe = await good.hear(Probe)
        good.say(ProbeReply(probe.probe_id))
        await health  # one lives
        await until(lambda: engine.client._live_replicas() == [1])
        for number in range(4):
            engine.submit(str(number), [number])
            await good.hear(EngineCoreRequest)
        with pytest.raises(EngineUnavailable, match=r"not answered for 0\.5 seconds"):
            await engine.client.probe()
        silent.tell(stats=EngineStats(steps=1))  # it lives after all
        await until(lambda: engine.client._live_replicas() == [0])


async def test_the_queue_is_that_of_all_replicas(tmp_path: Path) -> None:
    async with scripted(tmp_path, max_num_seqs=2, max_queue=1) as engine:
        for number in range(5):
            engine.submit(str(number), [number])
        with pytest.raises(QueueFull, match="1 requests are waiting"):
            engine.submit("x", [1])
        engine.cores[0].tell(stats=EngineStats(running=1, waiting=2, steps=1))
        await until(lambda: engine.metrics.of(0).waiting)
        assert (engine.metrics.stats.running, engine.metrics.stats.waiting) == (1, 2)
        with pytest.raises(QueueFull, match="2 requests are waiting"):
            engine.submit("x", [1])


async def test_messages_that_cannot_be_decoded_are_dropped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with scripted(tmp_path) as engine:
        stream = engine.submit("a", [1])
        core = await engine.of("a")
        for message in (b"\xc1", b"", b"\x00" * 9, msgspec.msgpack.encode(["EngineDead"])):
            core._responses[0].send(message)
        core._responses[0].send_multipart([b"\x92", b"\xa1"])
        core.tell(EngineCoreOutput("a", [5], finish_reason="length"))
        assert (await whole(stream)).token_ids == [5]
    assert "dropped a message to this API process that could not be decoded" in caplog.text


async def test_what_others_say_is_not_heard(tmp_path: Path) -> None:
    """An API process behind somebody else's balancer has some of the replicas only."""
    ends = endpoints(tmp_path, 2)
    client = EngineClient(ends, {}, Metrics("m", replicas=[1]), replicas=[1])
    cores = [Script(number, ends) for number in range(2)]
    try:
        cores[0].say(EngineReady({}))
        cores[0].say(EngineDead("not of ours"))
        cores[1].say(EngineReady({"load": 1.0}))
        assert (await client.ready()).seconds == {"load": 1.0}
        cores[0].tell(stats=EngineStats(steps=1))
        client.submit([("a", [1], LONG)])
        assert (await cores[1].hear(EngineCoreRequest)).request_id == "a"
        cores[1].say(EngineDead("rank 0 hangs"))
        assert str(await client.failed()) == "rank 0 hangs"
    finally:
        await client.close()
        for core in cores:
            core.close()


# --- processes ------------------------------------------------------------------------------------------------


@contextmanager
def started(config: EngineConfig, ends: Endpoints, modes: list[str]) -> Iterator[dict[int, subprocess.Popen[bytes]]]:
    cores = {number: start(config, ends, number, mode) for number, mode in enumerate(modes)}
    try:
        yield cores
    finally:
        for core in cores.values():
            core.kill()
            core.wait()


def start(config: EngineConfig, ends: Endpoints, replica: int, mode: str = "") -> subprocess.Popen[bytes]:
    parallel = replace(config.parallel, replicas=len(ends.requests), replica=replica)
    return fake_core.start_process(replace(config, parallel=parallel), ends, "info", mode)


def prompt(number: int) -> list[int]:
    return [10 + number, 50, 51]


def echoed(number: int, count: int = 100) -> list[int]:
    return (prompt(number) * count)[:count]


async def test_killing_a_replica_loses_no_stream_of_any_api_process(
    config: EngineConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is started again, and gets requests again."""
    monkeypatch.setattr("quire.server.frontend.engine_client.RESTART_SECONDS", (0.01, 0.1))
    ends = endpoints(tmp_path, 2, 2)
    tables = [Metrics("m", str(tmp_path / "metrics"), index, 2, range(2)) for index in range(2)]
    with started(config, ends, ["slow", "slow"]) as cores:
        restarted: list[int] = []

        def restart(number: int) -> subprocess.Popen[bytes]:
            restarted.append(number)
            cores[number] = start(config, ends, number)
            return cores[number]

        clients = [
            EngineClient(ends, cores, tables[0], 0, replicas=range(2), restart=restart),
            EngineClient(ends, None, tables[1], 1, replicas=range(2)),
        ]
        try:
            for client in clients:
                await client.ready()
            await until(lambda: all(client._live_replicas() == [0, 1] for client in clients))
            streams = [
                clients[number % 2].submit([(str(number), prompt(number), LONG)], cache_salt=b"x")
                for number in range(50)
            ]
            first = [(await stream.get())[0].token_ids for stream in streams]
            assert all(0 < len(tokens) < 50 for tokens in first)
            victims = [sum(r.replica == 0 for r in client._running.values()) for client in clients]
            assert min(victims) > 5
            os.kill(cores[0].pid, signal.SIGKILL)
            for number, (begun, stream) in enumerate(zip(first, streams, strict=True)):
                output = await whole(stream)
                assert begun + output.token_ids == echoed(number)
                assert output.finish_reason == "length"
            await until(lambda: all(client._live_replicas() == [0, 1] for client in clients))
            assert restarted == [0]
            again = [client.submit([(f"again {client.index}", prompt(1), LONG)]) for client in clients]
            assert [(await whole(stream)).token_ids for stream in again] == [echoed(1)] * 2
        finally:
            for client in reversed(clients):
                await client.close()
    assert [core.returncode for core in cores.values()] == [0, 0]


async def test_one_that_cannot_load_ends_the_start_and_is_not_started_again(
    config: EngineConfig, tmp_path: Path
) -> None:
    ends = endpoints(tmp_path, 2)
    metrics = Metrics("m", replicas=range(2))
    with started(config, ends, ["dead", ""]) as cores:
        client = EngineClient(ends, cores, metrics, replicas=range(2), restart=lambda number: pytest.fail("again"))
        try:
            with pytest.raises(EngineUnavailable, match="replica 0: the weights do not fit"):
                await client.ready()
            assert "weights do not fit" in str(await client.failed())
            assert 'quire:replicas{model_name="m",state="dead"} 1.0' in metrics.exposition().decode()
        finally:
            await client.close()


async def test_if_no_replica_loads_the_reason_is_reported(config: EngineConfig, tmp_path: Path) -> None:
    ends = endpoints(tmp_path, 2)
    with started(config, ends, ["dead", "dead"]) as cores:
        client = EngineClient(ends, cores, Metrics("m", replicas=range(2)), replicas=range(2))
        try:
            with pytest.raises(EngineUnavailable, match=r"replica \d: the weights do not fit"):
                await client.ready()
        finally:
            await client.close()


async def test_a_replica_without_an_answer_yet_takes_over(tmp_path: Path) -> None:
    """An API process that joins does not know which replicas still load."""
    ends = endpoints(tmp_path, 2)
    client = EngineClient(ends, None, Metrics("m", replicas=range(2)), replicas=range(2))
    cores = [Script(number, ends) for number in range(2)]
    try:
        cores[0].say(EngineReady({}))
        await client.ready()
        stream = client.submit([("a", [1], LONG)])
        cores[0].say(EngineDead("gone"))
        assert (await whole(stream)).error == (
            "replica 0: gone; the request cannot go on, as no other replica is available"
        )
        with pytest.raises(EngineUnavailable, match="still loading"):
            client.check()
        cores[1].say(EngineReady({}))
        await until(lambda: client._live_replicas() == [1])
        client.check()
    finally:
        await client.close()
        for core in cores:
            core.close()


async def test_an_api_process_that_joins_asks_every_replica(tmp_path: Path) -> None:
    ends = endpoints(tmp_path, 2)
    client = EngineClient(ends, None, Metrics("m", replicas=range(2)), replicas=range(2))
    cores = [Script(number, ends) for number in range(2)]
    try:
        for core in cores:
            await core.hear(Join)
        cores[1].say(EngineReady({}))
        await client.ready()
        assert client._live_replicas() == [1]
    finally:
        await client.close()
        assert all(core.is_quiet for core in cores)  # the engine is not its own to end
        for core in cores:
            core.close()
