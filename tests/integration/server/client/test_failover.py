"""Two real replicas of the demo model behind one client: prefixes find their cache, and a death loses no stream."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import pytest

from quire.engine.config.options import DEMO_MODEL, EngineOptions
from quire.engine.config.resolve import resolve
from quire.engine.protocol.engine_core import EngineCoreOutput, FinishReason
from quire.engine.protocol.sampling_params import SamplingParams, StructuredOutputs
from quire.server.client.engine_client import EngineClient
from quire.server.client.engine_manager import EngineManager
from quire.server.client.metrics import Metrics
from quire.server.client.output_stream import OutputStream
from quire.server.client.router import Router
from quire.server.serving.frontend import Frontend

pytestmark = pytest.mark.slow

GUIDE = StructuredOutputs(
    json={
        "type": "object",
        "properties": {"names": {"type": "array", "items": {"enum": ["Ada", "Grace"]}, "minItems": 12}},
        "required": ["names"],
        "additionalProperties": False,
    }
)


_LENGTH = 200
"""Tokens of a stream: a busy machine is not to be done with them before it hears of the first ones."""


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """One thread for each core: they share the processors."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@dataclass
class Engine:
    client: EngineClient
    metrics: Metrics
    manager: EngineManager

    def kill(self, replica: int) -> None:
        process = self.manager._cores[replica].process
        assert process is not None
        process.kill()


@asynccontextmanager
async def engine(count: int) -> AsyncIterator[Engine]:
    """A number of cores of one thread each, in float32; dead ones are started again."""
    options = EngineOptions(model=str(DEMO_MODEL), device="cpu", kv_cache_memory_bytes=64 << 20, max_num_seqs=64)
    config = resolve(options)
    parallel = replace(config.parallel, replicas=count, local_replicas=range(count))
    async with Frontend.start(replace(config, parallel=parallel), name="m", log_level="warning") as frontend:
        await frontend.ready()
        assert frontend._manager is not None
        yield Engine(frontend.client, frontend.metrics, frontend._manager)


async def read(stream: OutputStream, outputs: dict[str, list[EngineCoreOutput]]) -> None:
    """Until each of its requests has ended."""
    ends = set(stream._open)
    while ends:
        for output in await stream.get():
            outputs[output.request_id].append(output)
            if output.finish_reason is not None:
                ends.discard(output.request_id)


def params(number: int) -> SamplingParams:
    """All kinds; each runs long enough to be cut."""
    match number % 5:
        case 0:
            return SamplingParams(temperature=0.0, max_tokens=_LENGTH, ignore_eos=True)
        case 1:
            return SamplingParams(
                temperature=1.0, seed=number, max_tokens=_LENGTH, ignore_eos=True, frequency_penalty=1.0
            )
        case 2:
            return SamplingParams(temperature=1.0, seed=number, max_tokens=_LENGTH, ignore_eos=True, logprobs=2)
        case 3:
            return SamplingParams(temperature=0.0, max_tokens=_LENGTH, ignore_eos=True, prompt_logprobs=0)
        case _:
            return SamplingParams(temperature=1.0, seed=number, max_tokens=_LENGTH, structured_outputs=GUIDE)


async def answers(count: int, kill: bool) -> tuple[list[tuple[list[int], int, int, FinishReason | None]], int]:
    """The answers to 50 streams: tokens, numbers of log-probabilities and of scores, and the end; and the number of
    moved streams."""
    rng = random.Random(0)
    requests = [(str(n), [rng.randrange(3, 300) for _ in range(rng.randrange(5, 60))], params(n)) for n in range(50)]
    outputs: dict[str, list[EngineCoreOutput]] = {request_id: [] for request_id, _, _ in requests}
    moved = 0
    async with engine(count) as running:
        streams = [running.client.submit([request]) for request in requests]
        reading = [asyncio.create_task(read(stream, outputs)) for stream in streams]
        if kill:
            while sum(len(output.token_ids) for reported in outputs.values() for output in reported) < 50 * 12:
                await asyncio.sleep(0.005)
            moved = sum(request.replica == 0 for request in running.client._running.values())
            running.kill(0)
        await asyncio.gather(*reading)
        if kill:  # it serves again
            while running.client._live_replicas() != list(range(count)):
                await asyncio.sleep(0.05)
            streams = [running.client.submit([(f"again {n}", [n], params(0))]) for n in range(4)]
            outputs |= {f"again {n}": [] for n in range(4)}
            assert {request.replica for request in running.client._running.values()} == set(range(count))
            await asyncio.gather(*(read(stream, outputs) for stream in streams))
    found = []
    for request_id, _, _ in requests:
        reported = outputs[request_id]
        tokens = list(itertools.chain.from_iterable(output.token_ids for output in reported))
        logprobs = sum(len(output.logprobs or []) for output in reported)
        scores = sum(len(output.prompt_logprobs or []) for output in reported)
        found.append((tokens, logprobs, scores, reported[-1].finish_reason))
    return found, moved


async def test_killing_a_replica_under_50_streams_changes_no_token() -> None:
    """The only replica is killed in tests/e2e/test_failures.py."""
    undisturbed, _ = await answers(1, kill=False)
    disturbed, moved = await answers(2, kill=True)
    assert moved > 10
    assert disturbed == undisturbed
    assert all(end in ("length", "stop") for _, _, _, end in disturbed)


@pytest.mark.parametrize("is_zipf", [False, True], ids=["even", "zipf"])
async def test_shared_prefixes_find_their_cache(is_zipf: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the engines' own counters, cold starts included; and neither replica has much more to do than the other. The
    router is not told how fast they are, since that depends on what else the machine does; and requests come in groups,
    so that neither gets more of them because it answers sooner."""
    on_first_token = Router.on_first_token
    monkeypatch.setattr(Router, "on_first_token", lambda self, request_id, _: on_first_token(self, request_id, 0.0))
    rng = random.Random(1)
    count, length = 240, 128
    heads = [[rng.randrange(3, 300) for _ in range(length)] for _ in range(10)]
    weights = [1 / (rank + 1) if is_zipf else 1.0 for rank in range(len(heads))]
    async with engine(2) as running:
        outputs: dict[str, list[EngineCoreOutput]] = {str(n): [] for n in range(count)}
        places = [0, 0]

        def ask(number: int) -> OutputStream:
            (head,) = rng.choices(heads, weights)
            prompt = head + [rng.randrange(3, 300) for _ in range(rng.randrange(4, 20))]
            asked = SamplingParams(max_tokens=rng.randrange(4, 16), ignore_eos=True, seed=number)
            stream = running.client.submit([(str(number), prompt, asked)])
            replica = running.client._running[str(number)].replica
            assert replica is not None
            places[replica] += 1
            return stream

        for first in range(0, count, 16):
            streams = [ask(number) for number in range(first, first + 16)]
            await asyncio.gather(*(read(stream, outputs) for stream in streams))
        stats = [running.metrics.of(replica) for replica in range(2)]
    hits = sum(each.prefix_hit_tokens for each in stats) / (count * length)
    work = [each.generated_tokens + each.prompt_tokens - each.prefix_hit_tokens for each in stats]
    print(f"hits {hits:.3f}, requests {places}, tokens computed {work}")
    assert hits >= 0.9
    assert max(places) / (count / 2) < 1.5
    assert max(work) / (sum(work) / 2) < 1.5
