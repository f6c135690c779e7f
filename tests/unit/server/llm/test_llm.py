"""`LLM` as vLLM's users write it, over a fake core."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tqdm import tqdm

from quire import (
    LLM,
    AsyncLLM,
    Counter,
    EngineArgs,
    FlatLogprobs,
    Gauge,
    Histogram,
    InvalidParameter,
    LoRARequest,
    RequestOutputKind,
    SamplingParams,
    Vector,
)
from quire.engine.protocol.errors import ConfigError
from quire.server.client.profiler import ProfileConflict
from quire.server.llm.metrics_reader import read_metrics
from tests.fakes import fake_core


@pytest.fixture
def llm(model_folder: Path, core_mode: Callable[[str], None], tmp_path: Path) -> Iterator[LLM]:
    args = EngineArgs(
        str(model_folder),
        load_format="dummy",
        dtype="half",
        device="cpu",
        profiler_config={"torch_profiler_dir": str(tmp_path)},
    )
    with LLM.from_engine_args(args, usage_context="llm_class") as running:
        yield running


def test_token_ids_may_have_an_argument_of_their_own(llm: LLM) -> None:
    ids = [70, 71]
    (result,) = llm.generate(prompt_token_ids=ids)
    assert (result.prompt_token_ids, result.prompt) == (ids, None)
    first, second = llm.generate(["a", "b"], SamplingParams(), prompt_token_ids=[ids, ids[:1]], lora_request=None)
    assert (first.prompt, second.prompt, second.prompt_token_ids) == ("a", "b", ids[:1])
    with pytest.raises(InvalidParameter, match="guided_options_request: use SamplingParams"):
        llm.generate("a", guided_options_request={"guided_regex": "a"})
    llm.llm_engine.add_request("1", "a", lora_request=None)
    with pytest.raises(InvalidParameter, match="lora_request: expected a LoRARequest, not object"):
        llm.llm_engine.add_request("2", "a", lora_request=object())  # type: ignore[arg-type]
    assert [result.request_id for result in llm.llm_engine.step()] == ["1"]


CALLS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("generate", "embed", "classify", "encode"), ("a",)),
    "chat": ([{"role": "user", "content": "a"}],),
    "score": ("a", "b"),
}


@pytest.mark.parametrize("name", CALLS)
async def test_other_arguments_of_asyncio_methods(name: str, model_folder: Path) -> None:
    llm = AsyncLLM(str(model_folder), load_format="dummy", device="cpu")
    await check_arguments(partial(call, getattr(llm, name), *CALLS[name]))


async def test_other_arguments_of_methods(llm: LLM) -> None:
    for name, given in CALLS.items():
        await check_arguments(partial(call, getattr(llm, name), *given))


async def call(method: Callable[..., Any], *given: Any, **options: Any) -> None:
    answer = method(*given, **options)
    if isinstance(answer, AsyncIterator):
        await anext(answer)
    elif isinstance(answer, Awaitable):
        await answer


async def check_arguments(run: Callable[..., Awaitable[None]]) -> None:
    with pytest.raises(InvalidParameter, match=r"^lora_request: expected a LoRARequest, not object"):
        await run(lora_request=object())
    with pytest.raises(InvalidParameter, match=r"^lora_request 'sql': lora_path is missing"):
        await run(lora_request=LoRARequest("sql", 1))
    with pytest.raises(TypeError, match=r"^unexpected keyword argument 'trace_header'; did you mean trace_headers\?$"):
        await run(trace_header=None)
    with pytest.raises(InvalidParameter, match=r"^tokenization_kwargs: Expected `int"):
        await run(trace_headers=None, lora_request=None, tokenization_kwargs={"truncate_prompt_tokens": "x"})


def test_the_models_own_sampling_parameters(model_folder: Path, core_mode: Callable[[str], None]) -> None:
    overridden = {"temperature": 0.5, "max_new_tokens": 3}
    with LLM(str(model_folder), load_format="dummy", device="cpu", override_generation_config=overridden) as llm:
        assert llm.get_default_sampling_params() == SamplingParams(temperature=0.5, max_tokens=3)
        assert llm.get_default_sampling_params() is not llm.get_default_sampling_params()


def test_arguments_of_from_engine_args_replace_options(model_folder: Path) -> None:
    args = EngineArgs(
        str(model_folder), load_format="dummy", device="cpu", chat_template="old", tool_call_parser="hermes"
    )
    made = AsyncLLM.from_engine_args(args, chat_template="new", log_level="INFO", stat_loggers=[])
    assert (made._server.chat_template, made._server.log_level) == ("new", "info")
    assert (made._server.tool_call_parser, args.chat_template, args.log_level) == ("hermes", "old", "warning")
    assert AsyncLLM.from_engine_args(args)._server == args.server_options
    with pytest.raises(ConfigError, match="argument --log-level: invalid choice: 'loud'"):
        AsyncLLM.from_engine_args(args, log_level="loud")
    with pytest.raises(TypeError, match="unexpected keyword argument 'chat_templates'"):
        AsyncLLM.from_engine_args(args, chat_templates="new")


def test_metrics_are_objects(llm: LLM) -> None:
    llm.generate(["a", "b"])
    found = {metric.name: metric for metric in llm.get_metrics()}
    assert all(name.startswith("vllm:") for name in found)
    success = [metric for metric in llm.get_metrics() if metric.name == "vllm:request_success"]
    assert {metric.labels["finished_reason"]: metric.value for metric in success if isinstance(metric, Counter)}[
        "stop"
    ] == 2
    latency = found["vllm:e2e_request_latency_seconds"]
    assert isinstance(latency, Histogram)
    assert latency.count == latency.buckets["+Inf"] == 2
    assert latency.sum > 0
    running = found["vllm:num_requests_running"]
    assert isinstance(running, Gauge)
    assert running.labels["engine"] == "0"


def test_counters_by_position_are_vectors() -> None:
    name = "vllm:spec_decode_num_accepted_tokens_per_pos"
    samples = (f'{name}_total{{engine="0",position="{at}"}} {float(value)}' for at, value in ((0, 5), (1, 3), (10, 1)))
    text = "\n".join((f"# TYPE {name}_total counter", *samples, "# TYPE quire:x gauge", "quire:x 1.0", ""))
    assert read_metrics(text.encode()) == [Vector(name, {"engine": "0"}, [5, 3, 1])]


def test_profiles_are_files_in_the_folder_for_traces(llm: LLM, tmp_path: Path) -> None:
    llm.start_profile("mine")
    with pytest.raises(ProfileConflict):
        llm.start_profile()
    path = Path(llm.stop_profile())
    assert [*tmp_path.iterdir()] == [path]
    assert path.name.startswith("mine-")
    with pytest.raises(ProfileConflict):
        llm.stop_profile()
    assert [*tmp_path.iterdir()] == [path]


async def test_profiles_need_a_folder(model_folder: Path) -> None:
    llm = AsyncLLM(str(model_folder), load_format="dummy", device="cpu")
    for method in (llm.start_profile, llm.stop_profile):
        with pytest.raises(ConfigError, match="torch_profiler_dir is not set"):
            await method()


def test_the_prefix_cache_and_the_kv_store_can_be_reset(llm: LLM) -> None:
    assert llm.reset_prefix_cache() is True
    assert llm.reset_prefix_cache(reset_connector=True) is False, "the fake core cannot"


def test_results_have_times_and_total_log_probabilities(llm: LLM) -> None:
    before, clock = time.time(), time.monotonic()
    (result,) = llm.generate("hello", SamplingParams(max_tokens=3, logprobs=1, n=2))
    metrics = result.metrics
    assert metrics is not None
    assert before <= metrics.arrival_time <= time.time()
    assert clock <= metrics.queued_ts <= metrics.scheduled_ts <= metrics.last_token_ts <= time.monotonic()
    assert metrics.first_token_latency == metrics.first_token_ts - metrics.queued_ts > 0
    assert metrics.num_generation_tokens == 6
    assert [output.cumulative_logprob for output in result.outputs] == [-1.5, -1.5]
    assert all(output.finished() for output in result.outputs)
    assert llm.generate("hello")[0].outputs[0].cumulative_logprob is None


def test_log_probabilities_may_be_flat(llm: LLM) -> None:
    params = SamplingParams(max_tokens=3, logprobs=2, prompt_logprobs=1)
    (plain,) = llm.generate("hello", params)
    params.flat_logprobs = True
    (flat,) = llm.generate("hello", params)
    for found, expected in (
        (flat.outputs[0].logprobs, plain.outputs[0].logprobs),
        (flat.prompt_logprobs, plain.prompt_logprobs),
    ):
        assert isinstance(found, FlatLogprobs)
        assert expected is not None
        assert [*found] == expected


def test_output_without_text(llm: LLM) -> None:
    (result,) = llm.generate("hello", SamplingParams(detokenize=False, max_tokens=60, logprobs=0))
    output = result.outputs[0]
    assert (output.text, output.token_ids) == ("", [*result.prompt_token_ids, fake_core.EOS])
    assert (output.finish_reason, len(output.logprobs or ())) == ("stop", len(output.token_ids))


async def test_the_kind_of_results(model_folder: Path, core_mode: Callable[[str], None]) -> None:
    async with AsyncLLM(str(model_folder), load_format="dummy", device="cpu") as llm:
        params = SamplingParams(max_tokens=50, n=2, logprobs=0, output_kind=RequestOutputKind.DELTA)
        texts, ids, logprobs = ["", ""], [list[int](), list[int]()], [0, 0]
        async for result in await llm.add_request("1", "hello world", params):
            for output in result.outputs:
                texts[output.index] += output.text
                ids[output.index] += output.token_ids
                logprobs[output.index] += len(output.logprobs or ())
                assert output.cumulative_logprob == -0.5 * len(ids[output.index])
        assert result.finished
        assert texts == ["hello world"] * 2
        assert ids == [[*result.prompt_token_ids, fake_core.EOS]] * 2
        assert logprobs == [len(ids[0])] * 2
        params = SamplingParams(max_tokens=50, output_kind=RequestOutputKind.FINAL_ONLY)
        (result,) = [each async for each in llm.generate("hello world", params)]
        assert (result.finished, result.outputs[0].text) == (True, "hello world")


async def test_asyncio_programs_choose_the_tokenization(model_folder: Path, core_mode: Callable[[str], None]) -> None:
    async with AsyncLLM(str(model_folder), load_format="dummy", device="cpu") as llm:
        cut = {"truncate_prompt_tokens": 2}
        for results in (
            llm.generate("hello world", tokenization_kwargs=cut, lora_request=None),
            await llm.add_request("1", "hello world", tokenization_kwargs=cut),
            llm.chat([{"role": "user", "content": "hello"}], tokenization_kwargs=cut, lora_request=None),
        ):
            assert [len(each.prompt_token_ids) async for each in results][-1] == 2


def test_llm_returns_whole_outputs_whatever_the_kind(llm: LLM) -> None:
    params = SamplingParams(max_tokens=50, output_kind=RequestOutputKind.DELTA)
    assert llm.generate("hello", params)[0].outputs[0].text == "hello"


def test_a_function_makes_the_progress_bar(llm: LLM, capfd: pytest.CaptureFixture[str]) -> None:
    llm.generate(["a", "b"], use_tqdm=partial(tqdm, colour="red", mininterval=0))
    assert "2/2" in capfd.readouterr().err
