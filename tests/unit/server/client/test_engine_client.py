"""The wire: merging, seeds, closing."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable
from pathlib import Path

import pytest

from quire.engine.config.engine_config import EngineConfig
from quire.engine.core.launch import CoreArgs
from quire.engine.protocol.engine_core import EngineCoreOutput, EngineCoreOutputs
from quire.engine.protocol.errors import InvalidParameter
from quire.engine.protocol.logprobs import TokenLogprobs
from quire.engine.protocol.sampling_params import SamplingParams
from quire.engine.protocol.stats import ExpertLoad
from quire.server.client.output_stream import EngineUnavailable, OutputStream, RequestFailed
from quire.server.serving.frontend import Frontend
from quire.server.text.inputs import GenerationInput
from tests.fakes import fake_core
from tests.fakes.api_server import Server, run_server


async def test_outputs_that_nobody_reads_merge(server: Server) -> None:
    stream = OutputStream(server.frontend.client.abort, ["a", "b"])
    for count in range(1000):
        stream.put(EngineCoreOutput("a", [count], [TokenLogprobs(-1.0, 1, [], [])]))
        stream.put(EngineCoreOutput("b", [count]))
    stream.put(EngineCoreOutput("a", [1000], [TokenLogprobs(-1.0, 1, [], [])], "stop", 1000))
    first, second = await stream.get()
    assert (first.token_ids, first.finish_reason, first.stop_token_id) == (list(range(1001)), "stop", 1000)
    assert first.logprobs is not None
    assert len(first.logprobs) == 1001
    assert (second.token_ids, second.finish_reason) == (list(range(1000)), None)


async def test_tokens_alone_merge_with_full_outputs(server: Server) -> None:
    stream = OutputStream(server.frontend.client.abort, ["a"])
    stream.put(EngineCoreOutput("a", [1], num_cached_tokens=7))
    stream.put_token("a", 2)
    (output,) = await stream.get()
    assert (output.token_ids, output.num_cached_tokens) == ([1, 2], 7)
    stream.put_token("a", 3)
    stream.put(EngineCoreOutput("a", [4], None, "length"))
    (output,) = await stream.get()
    assert (output.token_ids, output.finish_reason) == ([3, 4], "length")


async def test_a_slow_reader_gets_all_of_its_text(server: Server) -> None:
    prompt = server.tokenizer.encode("hello 😀 world", add_special_tokens=False)
    with server.frontend.generate(
        "r", GenerationInput(prompts=[prompt], params=SamplingParams(max_tokens=50))
    ) as generation:
        while server.frontend.client._running:
            await asyncio.sleep(0.01)
        deltas = [delta async for step in generation for delta in step]
    assert len(deltas) == 1
    assert deltas[0].text == "hello 😀 world"


async def test_same_id_twice_is_refused(server: Server) -> None:
    with server.frontend.generate(
        "r", GenerationInput(prompts=[[70]], params=SamplingParams(ignore_eos=True, max_tokens=None))
    ):
        with pytest.raises(InvalidParameter, match="is already running"):
            server.frontend.generate("r", GenerationInput(prompts=[[71]], params=SamplingParams()))
        assert len(server.frontend.client._running) == 1
    assert not server.frontend.client._running
    await server.until_idle()


async def test_a_replaced_process_gives_other_ids(config: EngineConfig, core_mode: Callable[[str], None]) -> None:
    """An output for the dead process, on its way, is not taken for one of a new request with the same id."""
    given = GenerationInput(prompts=[[70]], params=SamplingParams(ignore_eos=True, max_tokens=None))
    ids: set[str] = set()
    for _ in range(2):
        async with run_server(config) as server:
            with server.frontend.generate("r", given):
                ids |= server.frontend.client._running.keys()
    assert len(ids) == 2


async def test_what_fails_after_the_submission_aborts_it(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr("quire.server.serving.frontend.OutputProcessor", fail)
    with pytest.raises(RuntimeError, match="no memory"):
        server.frontend.generate("r", GenerationInput(prompts=[[70]], params=SamplingParams(ignore_eos=True)))
    assert not server.frontend.client._running
    await server.until_idle()


async def test_one_sequence_that_fails_ends_all_of_its_request(server: Server) -> None:
    fail = server.tokenizer.encode("<fail>", add_special_tokens=False)
    with (
        server.frontend.generate(
            "r", GenerationInput(prompts=[[70], fail], params=SamplingParams(ignore_eos=True, max_tokens=None))
        ) as generation,
        pytest.raises(RequestFailed, match="KV cache"),
    ):
        [_ async for _ in generation]
    await server.until_idle()


async def test_seeds_are_the_users_or_our_own(config: EngineConfig, core_mode: Callable[[str], None]) -> None:
    async def seeds() -> list[int]:
        async with Frontend.start(config, name="x") as frontend:
            return [frontend._seed(5, 0), frontend._seed(5, 1), frontend._seed(None, 0), frontend._seed(None, 0)]

    first, second = await seeds(), await seeds()
    assert first == second
    assert first[0] == 5
    assert len(set(first)) == 4
    assert all(0 <= seed < 2**63 for seed in first)


async def test_a_core_that_cannot_start_says_why(config: EngineConfig, core_mode: Callable[[str], None]) -> None:
    core_mode("dead")
    async with Frontend.start(config, name="x") as frontend:
        with pytest.raises(EngineUnavailable, match="the weights do not fit"):
            await frontend.ready()
    assert not Path(frontend.process_info.metrics).parent.exists()


async def test_a_core_that_will_not_stop_is_killed(
    config: EngineConfig, core_mode: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.server.client.engine_manager.SHUTDOWN_SECONDS", 0.1)
    cores: list[fake_core.CoreThread] = []

    def start(args: CoreArgs, folder: str) -> fake_core.CoreThread:
        cores.append(fake_core.start(args, folder, "stubborn"))
        return cores[-1]

    monkeypatch.setattr("quire.server.client.engine_manager.start_core", start)
    async with Frontend.start(config, name="x") as frontend:
        await frontend.ready()
    assert [core.returncode for core in cores] == [-9]


async def test_the_lengths_and_times_of_requests_are_in_the_metrics(server: Server) -> None:
    await server.openai.completions.create(model="echo", prompt=[70, 71, 72], n=2, max_tokens=9)
    await server.openai.completions.create(model="echo", prompt=[[73, 74]] * 2, max_tokens=1)
    exposition = server.frontend.metrics.exposition().decode()
    found = dict(line.rsplit(" ", 1) for line in exposition.splitlines() if line.startswith("quire:request_"))

    def totals(name: str) -> tuple[float, float]:
        labels = '{engine="0",model_name="echo"}'
        return float(found[f"quire:request_{name}_count{labels}"]), float(found[f"quire:request_{name}_sum{labels}"])

    assert totals("prompt_tokens") == (4, 3 + 3 + 2 + 2)
    assert totals("prefill_kv_computed_tokens") == (4, 2 + 2 + 1 + 1)  # one is cached
    assert totals("generation_tokens") == (4, 4 + 4 + 1 + 1)  # an echo, with the end of the sequence
    assert totals("max_num_generation_tokens") == (3, 4 + 1 + 1)
    assert totals("params_n") == (3, 2 + 1 + 1)
    assert totals("params_max_tokens") == (4, 9 + 9 + 1 + 1)
    assert totals("time_per_output_token_seconds")[0] == 2
    for name in ("queue", "prefill", "decode", "inference"):
        assert totals(f"{name}_time_seconds")[0] == 4
    assert totals("inference_time_seconds")[1] == pytest.approx(totals("decode_time_seconds")[1])  # no prefill here


async def test_the_time_in_the_queue_is_what_comes_before_the_prefill(server: Server) -> None:
    client, metrics = server.frontend.client, server.frontend.metrics
    with server.frontend.generate("r", GenerationInput(prompts=[[70]], params=SamplingParams(ignore_eos=True))):
        ((request_id, running),) = client._running.items()
        running.arrived -= 60.0
        client._deliver(EngineCoreOutputs([EngineCoreOutput(request_id, [5], running_seconds=20.0)]))
        client._deliver(EngineCoreOutputs([EngineCoreOutput(request_id, [6], running_seconds=25.0)]))  # not again
    exposition = metrics.exposition().decode()
    for line in ('queue_time_seconds_bucket{engine="0",le="30.0"', 'prefill_time_seconds_bucket{engine="0",le="15.0"'):
        assert f'quire:request_{line},model_name="echo"}} 0.0' in exposition
    for line in ('queue_time_seconds_bucket{engine="0",le="60.0"', 'prefill_time_seconds_bucket{engine="0",le="20.0"'):
        assert f'quire:request_{line},model_name="echo"}} 1.0' in exposition


async def test_expert_load_is_in_the_metrics(server: Server) -> None:
    server.frontend.client._deliver(
        EngineCoreOutputs(expert_load=ExpertLoad({0: 2}, array("q", [3, 1]).tobytes(), 1.5, 2))
    )
    server.frontend.client._deliver(EngineCoreOutputs())  # as before
    exposition = server.frontend.metrics.exposition().decode()
    assert 'quire:expert_tokens_total{expert="0",layer="0",' in exposition
    assert "quire:expert_load_imbalance" in exposition
