"""`LLM` and `AsyncLLM`, as people write them for vLLM."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import shutil
import subprocess
import sys
import textwrap
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer

from quire import (
    LLM,
    AsyncEngineArgs,
    AsyncLLM,
    AsyncLLMEngine,
    BeamSearchParams,
    EngineArgs,
    LLMEngine,
    RequestOutput,
    SamplingParams,
    StructuredOutputs,
)
from quire.engine.protocol.errors import ConfigError, InvalidParameter
from quire.server.client.output_stream import EngineUnavailable, RequestFailed
from tests.fakes import fake_core
from tests.unit.server.openai.test_chat import CALL, TEMPLATE


@pytest.fixture
def llm(model_folder: Path, core_mode: Callable[[str], None]) -> Iterator[LLM]:
    with LLM(str(model_folder), load_format="dummy", device="cpu") as running:
        yield running


def test_generate_keeps_the_order_of_its_prompts(
    llm: LLM, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(sys.stderr), "isatty", lambda self: True)  # bars are for terminals
    prompts = [f"{'long ' * (index % 3)}{index}" for index in range(20)]
    results = llm.generate(prompts, SamplingParams(max_tokens=60, n=2))
    assert [result.prompt for result in results] == prompts
    assert [[output.text for output in result.outputs] for result in results] == [[p, p] for p in prompts]
    assert all(result.finished and result.outputs[1].finish_reason == "stop" for result in results)
    assert results[3].outputs[0].token_ids == [*results[3].prompt_token_ids, fake_core.EOS]
    assert "20/20" in capfd.readouterr().err


def test_every_kind_of_prompt(llm: LLM, capfd: pytest.CaptureFixture[str]) -> None:
    prompts: list[Any] = ["hello", {"prompt": "hello"}, [70, 71], {"prompt_token_ids": [70, 71]}]
    for prompt in prompts:
        (result,) = llm.generate(prompt, use_tqdm=False)
        assert result.prompt_token_ids[-1] == result.outputs[0].token_ids[-2]
    mixed: list[Any] = ["a", [70], {"prompt": "b"}]
    results = llm.generate(mixed, [SamplingParams(max_tokens=n) for n in (1, 2, 3)], use_tqdm=False)
    assert [result.outputs[0].text for result in results][::2] == ["a", "b"]
    assert llm.generate([], use_tqdm=False) == []
    assert capfd.readouterr().err == ""


def test_chat(llm: LLM) -> None:
    messages = [{"role": "user", "content": "hi"}]
    for results in (llm.chat(messages, SamplingParams(max_tokens=50)), llm.chat([messages, messages])):
        assert all(result.outputs[0].text == "user\nhi\nassistant\n" for result in results)


def test_the_tokenizer_is_an_object_of_transformers(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    result = llm.generate("hello")[0]
    assert tokenizer("hello")["input_ids"] == tokenizer.encode("hello") == result.prompt_token_ids
    messages = [{"role": "user", "content": "hi"}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert llm.generate(prompt, tokenization_kwargs={"add_special_tokens": False})[0].prompt_token_ids == (
        llm.chat(messages)[0].prompt_token_ids
    )
    assert tokenizer.model_max_length == llm.llm_engine.model_config.max_model_len
    assert set(tokenizer.all_special_ids) == llm._frontend.input_processor.tokenizer.special_ids
    assert len(tokenizer("hello", truncation=True, max_length=1)["input_ids"]) == 1
    assert llm.generate("hello")[0].prompt_token_ids == result.prompt_token_ids
    assert llm.llm_engine.get_tokenizer() is tokenizer


def test_beam_search(llm: LLM) -> None:
    prompts: list[Any] = ["hello", [70, 71]]
    hello, other = llm.beam_search(prompts, BeamSearchParams(beam_width=2, max_tokens=3), use_tqdm=False)
    best, second = hello.sequences
    prompt = llm.generate("hello", use_tqdm=False)[0].prompt_token_ids
    assert (best.tokens, best.finish_reason, best.cum_logprob) == (prompt + prompt[:1] * 3, "length", -1.5)
    assert [at[prompt[0]].logprob for at in best.logprobs] == [-0.5] * 3
    assert second.cum_logprob < best.cum_logprob
    assert other.sequences[0].tokens[:2] == [70, 71]


def test_replicas_share_the_prompts(model_folder: Path, core_mode: Callable[[str], None]) -> None:
    with LLM(str(model_folder), load_format="dummy", device="cpu", data_parallel_size=3) as llm:
        prompts = [f"prompt {number}" for number in range(12)]
        results = llm.generate(prompts, SamplingParams(max_tokens=60), use_tqdm=False)
        assert [result.outputs[0].text for result in results] == prompts
        metrics = llm._frontend.metrics
        assert [metrics.of(replica).generated_tokens > 0 for replica in range(3)] == [True] * 3


F: Any = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


@pytest.mark.parametrize("marker", ["text", "special"])
def test_chat_with_tools(
    model_folder: Path,
    core_mode: Callable[[str], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    marker: str,
) -> None:
    """The model repeats the last message."""
    folder = Path(shutil.copytree(model_folder, tmp_path / "model"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    if marker == "special":
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        tokenizer.add_tokens([AddedToken("<tool_call>", special=True), AddedToken("</tool_call>", special=True)])
        tokenizer.save(str(folder / "tokenizer.json"))
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"vocab_size": 330}))
    said = f"So: {CALL}"
    says = [[{"role": "user", "content": text}] for text in (said, "hello")]
    with LLM(str(folder), load_format="dummy", device="cpu") as llm:
        params = SamplingParams(max_tokens=100)
        first, second = (result.outputs[0] for result in llm.chat(says, params, tools=[F], use_tqdm=False))
        assert [(call.index, call.name, call.arguments) for call in first.tool_calls] == [(0, "f", '{"a":1}')]
        assert first.text == (said if marker == "text" else re.sub("</?tool_call>", "", said))
        assert (second.text, second.tool_calls) == ("hello", [])
        assert not llm.chat(says[0], params, use_tqdm=False)[0].outputs[0].tool_calls
        shown = llm.chat(says[1], params, chat_template_kwargs={"enable_thinking": 5}, use_tqdm=False)
        assert shown[0].outputs[0].text == "thinking 5 hello"
        shown = llm.chat(says[1], params, chat_template="{{ messages[0].content | upper }}", use_tqdm=False)
        assert shown[0].outputs[0].text == "HELLO"
        asked: list[Any] = []
        client = llm._frontend.client
        send = client._send

        def watch(message: Any, to: int) -> None:
            asked.append(message)
            send(message, to)

        monkeypatch.setattr(client, "_send", watch)
        llm.chat(says[1], params, tools=[F], tool_choice="required", use_tqdm=False)
        assert "call_0" in asked[-1].params.structured_outputs.grammar
        wrongs: list[dict[str, Any]] = [{"tools": [F, F]}, {"tool_choice": "none", "tools": [{}]}]
        for wrong in (*wrongs, {"tool_choice": "required"}, {"tools": [F], "tool_choice": "any"}):
            with pytest.raises(InvalidParameter, match="tool"):
                llm.chat(says[1], params, use_tqdm=False, **wrong)
        unheld = {"type": "function", "function": {**F["function"], "parameters": {"not": {}}, "strict": True}}
        with pytest.raises(InvalidParameter, match=r"^tools: ") as error:
            llm.chat(says[1], params, tools=[unheld], use_tqdm=False)
        assert error.value.param == "tools"


async def test_async_chat_with_tools(model_folder: Path, core_mode: Callable[[str], None], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(model_folder, tmp_path / "model"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    async with AsyncLLM(str(folder), load_format="dummy", device="cpu") as llm:
        says = [{"role": "user", "content": CALL}]
        results = [
            r async for r in llm.chat(says, SamplingParams(max_tokens=100), tools=[F], chat_template_kwargs=None)
        ]
        assert [len(result.outputs[0].tool_calls) for result in results] == [0] * (len(results) - 1) + [1]


def test_a_request_may_bring_its_own_template(llm: LLM) -> None:
    (result,) = llm.chat([{"role": "user", "content": "hi"}], chat_template="so {{ messages[0].content }}")
    assert result.outputs[0].text == "so hi"


def test_output_ends_at_the_models_length(llm: LLM) -> None:
    (result,) = llm.generate([[70, 71]], SamplingParams(max_tokens=10**6, ignore_eos=True), use_tqdm=False)
    output = result.outputs[0]
    assert (output.finish_reason, len(output.token_ids)) == ("length", fake_core.MAX_MODEL_LEN - 2)


def test_only_the_tokenizer_makes_ids_of_bad_words(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[SamplingParams] = []
    submit = llm._frontend.client.submit

    def spy(requests: Any, *args: Any) -> Any:
        sent.extend(params for _, _, params in requests)
        return submit(requests, *args)

    monkeypatch.setattr(llm._frontend.client, "submit", spy)
    llm.generate("a", SamplingParams(bad_word_ids=[[10**9], []]), use_tqdm=False)
    assert sent[0].bad_word_ids == []


def test_logprobs(llm: LLM) -> None:
    (result,) = llm.generate("ab", SamplingParams(logprobs=2), use_tqdm=False)
    output = result.outputs[0]
    assert output.logprobs is not None
    assert len(output.logprobs) == len(output.token_ids)
    sampled = output.logprobs[0][output.token_ids[0]]
    assert (sampled.logprob, sampled.rank, sampled.decoded_token) == (-0.5, 1, "a")
    assert len(output.logprobs[0]) == 2


def test_prompt_logprobs(llm: LLM) -> None:
    (result,) = llm.generate("hello world", SamplingParams(prompt_logprobs=1, n=2), use_tqdm=False)
    assert result.prompt_logprobs is not None
    first, *rest = result.prompt_logprobs
    assert first is None
    for token, at in zip(result.prompt_token_ids[1:], rest, strict=True):
        assert at is not None
        assert (at[token].logprob, at[token].rank) == (-1.0, 2)
        assert (at[token - 1].logprob, at[token - 1].rank) == (-0.5, 1)
    (scored,) = llm.generate([[70]], SamplingParams(prompt_logprobs=1, max_tokens=0), use_tqdm=False)
    assert (scored.prompt_logprobs, scored.outputs[0].token_ids, scored.outputs[0].text) == ([None], [], "")
    assert llm.generate("x", use_tqdm=False)[0].prompt_logprobs is None
    with pytest.raises(InvalidParameter, match="prompt_logprobs must be from 0 to 20"):
        llm.generate("x", SamplingParams(prompt_logprobs=21))


def test_errors_reach_the_caller_and_the_engine_goes_on(llm: LLM) -> None:
    with pytest.raises(InvalidParameter, match="vocabulary"):
        llm.generate([[70], [999]])
    with pytest.raises(InvalidParameter, match="logit_bias"):
        llm.generate("a", SamplingParams(logit_bias={999: 1.0}))
    with pytest.raises(InvalidParameter, match="num_marks"):
        llm.generate("a", SamplingParams(structured_outputs=StructuredOutputs(grammar='start: "a"', num_marks=1)))
    with pytest.raises(InvalidParameter, match=r"Expected `int \| null`, got `float`.*max_tokens"):
        llm.generate("a", SamplingParams(max_tokens=5.5))  # type: ignore[arg-type]
    with pytest.raises(InvalidParameter, match="must be integers"):
        llm.generate([[70.5]])  # type: ignore[arg-type]
    with pytest.raises(InvalidParameter, match="got `float`"):
        llm.generate("a", priority=[1.5])  # type: ignore[list-item]
    assert llm.generate([list(np.array([70, 71]))])[0].prompt_token_ids == [70, 71]
    with pytest.raises(RequestFailed, match="KV cache"):
        llm.generate(["a<hang>", "a<fail>"])
    with pytest.raises(ValueError, match="2 for 1 prompts"):
        llm.generate(["a"], [SamplingParams()] * 2)
    assert llm.generate("a")[0].outputs[0].text == "a"
    with pytest.raises(RequestFailed, match=r"the engine died . times while it ran this request.* rank 1"):
        llm.generate(["a<die>"])
    assert llm.generate("a")[0].outputs[0].text == "a"


def test_unsupported_models_are_rejected_at_once(model_folder: Path, core_mode: Callable[[str], None]) -> None:
    with pytest.raises(ConfigError, match="does not divide"):
        LLM(str(model_folder), load_format="dummy", device="cpu", tensor_parallel_size=3)
    core_mode("dead")
    with pytest.raises(EngineUnavailable, match="do not fit"):
        LLM(str(model_folder), load_format="dummy", device="cpu")


async def test_async_results_are_cumulative(model_folder: Path, core_mode: Callable[[str], None]) -> None:
    async with AsyncLLM(str(model_folder), load_format="dummy", device="cpu") as llm:
        results = [r async for r in llm.generate("hello world", SamplingParams(max_tokens=50), request_id="mine")]
        assert {result.request_id for result in results} == {"mine"}
        assert [result.finished for result in results] == [False] * (len(results) - 1) + [True]
        texts = [result.outputs[0].text for result in results]
        assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(texts))
        assert texts[-1] == "hello world"
        chat = [r async for r in llm.chat([{"role": "user", "content": "x"}], SamplingParams(max_tokens=50))]
        assert chat[-1].outputs[0].text == "user\nx\nassistant\n"


async def test_an_id_may_be_used_again_at_once(model_folder: Path, core_mode: Callable[[str], None]) -> None:
    """Late outputs of a request that a stop string has ended do not reach the next request with its id."""
    params = SamplingParams(max_tokens=50, stop=["o"])
    async with AsyncLLM(str(model_folder), load_format="dummy", device="cpu") as llm:
        for prompt in ("hello world", "another one") * 10:
            results = [r async for r in llm.generate(prompt, params, request_id="same")]
            assert results[-1].outputs[0].text == prompt.partition("o")[0]
            assert results[-1].outputs[0].finish_reason == "stop"


async def last(results: AsyncIterator[RequestOutput]) -> RequestOutput:
    return [result async for result in results][-1]


async def test_programs_for_vllm_run_with_its_names(
    model_folder: Path, core_mode: Callable[[str], None], caplog: pytest.LogCaptureFixture
) -> None:
    args = AsyncEngineArgs(str(model_folder), load_format="dummy", device="cpu", dtype="float", swap_space=4)
    assert [record.getMessage().split()[0] for record in caplog.records] == ["--swap-space"]
    assert args.options.dtype == "float32"
    engine = AsyncLLMEngine.from_engine_args(args, usage_context="api_server", start_engine_loop=True)
    try:
        params = SamplingParams(max_tokens=50)
        later = [await engine.add_request(str(number), f"prompt {number}", params) for number in range(3)]
        for number, results in enumerate(later):
            result = await last(results)
            assert (result.request_id, result.outputs[0].text) == (str(number), f"prompt {number}")
        assert (await last(engine.generate("hello", params, "3"))).outputs[0].text == "hello"
        hangs = await engine.add_request("4", "a<hang>", SamplingParams(max_tokens=None))
        await engine.abort("unknown")
        reader = asyncio.create_task(last(hangs))
        await asyncio.sleep(0)  # it reads
        await engine.abort("4")
        with pytest.raises(RequestFailed, match="the request was aborted"):
            await reader
        assert not (await engine.start()).client._running
        dropped = await engine.add_request("5", "a<hang>", SamplingParams(max_tokens=None))
        assert (await engine.start()).client._running
        del dropped
        await asyncio.sleep(0)  # the abort is the loop's next callback
        assert not (await engine.start()).client._running
    finally:
        await engine.shutdown()
    with pytest.raises(ConfigError, match="--no-such-option"):
        EngineArgs(no_such_option=1)
    with pytest.raises(ConfigError, match="--lora-dtype"):
        EngineArgs(enable_lora=True, lora_dtype="float16")


@pytest.mark.parametrize("in_a_loop", [False, True], ids=["script", "notebook"])
def test_the_synchronous_engine(model_folder: Path, core_mode: Callable[[str], None], in_a_loop: bool) -> None:
    async def notebook() -> None:
        use_synchronous_engine(model_folder)

    if in_a_loop:
        asyncio.run(notebook())
    else:
        use_synchronous_engine(model_folder)


def use_synchronous_engine(model_folder: Path) -> None:
    engine = LLMEngine.from_engine_args(EngineArgs(str(model_folder), load_format="dummy", device="cpu"))
    try:
        params, forever = SamplingParams(max_tokens=50), SamplingParams(max_tokens=None)
        assert engine.step() == []
        prompts = {str(number): f"prompt {number}" for number in range(3)}
        for request_id, prompt in prompts.items():
            engine.add_request(request_id, prompt, params)
        engine.add_request("hangs", "a<hang>", forever)
        engine.add_request("fails", "<fail>", forever)
        with pytest.raises(InvalidParameter, match="already running"):
            engine.add_request("hangs", "hello", params)
        assert engine.get_num_unfinished_requests() == 5
        texts, failures = dict[str, str](), 0
        while engine.get_num_unfinished_requests() > 1:
            try:
                outputs = engine.step()
            except RequestFailed:
                failures += 1
                continue
            assert outputs
            texts |= {output.request_id: output.outputs[0].text for output in outputs if output.finished}
        assert (texts, failures) == (prompts, 1)
        engine.abort_request(["hangs", "unknown"])
        assert not engine.has_unfinished_requests()
        engine.add_request("hangs", "hello", params)
        while engine.has_unfinished_requests():
            outputs = engine.step()
        assert outputs[0].outputs[0].text == "hello"
        for request_id in ("unread", "read"):
            engine.add_request(request_id, "hello", params)
        while engine._frontend.client._running:
            time.sleep(0.001)
        with pytest.raises(InvalidParameter, match="the id unread is already running, or `step` has more"):
            engine.add_request("unread", "another", params)
        texts = {}
        while engine.has_unfinished_requests():
            texts |= {output.request_id: output.outputs[0].text for output in engine.step()}
        assert texts == {"unread": "hello", "read": "hello"}
    finally:
        engine.shutdown()
    with pytest.raises(EngineUnavailable, match="the engine is shut down"):
        engine.add_request("late", "hello", params)


async def test_cancelling_aborts_in_the_engine(model_folder: Path, core_mode: Callable[[str], None]) -> None:
    async with AsyncLLM(str(model_folder), load_format="dummy", device="cpu") as llm:
        frontend = await llm.start()

        async def forever(prompt: str) -> None:
            async for _ in llm.generate(prompt, SamplingParams(max_tokens=None, ignore_eos=True)):
                pass

        for prompt in ("a", "a<hang>"):
            task = asyncio.create_task(forever(prompt))
            while not frontend.client._running:
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait((task,))
            assert task.cancelled()
            assert not frontend.client._running
        while frontend.metrics.of(0).running or not frontend.metrics.of(0).steps:
            await asyncio.sleep(0.01)


def test_a_script_needs_no_main_guard_and_cleans_up(model_folder: Path, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(f"""
            from quire.server.client import engine_manager
            from tests.fakes import fake_core
            engine_manager.start_core = fake_core.start_process
            from quire import LLM
            llm = LLM({str(model_folder)!r}, load_format="dummy", device="cpu")
            print(llm.generate("hello", use_tqdm=False)[0].outputs[0].text)
            manager = llm._frontend._manager
            print(manager._folder.path, manager._cores[0].process.pid)
        """)
    )
    done = subprocess.run([sys.executable, str(script)], env={"PYTHONPATH": "."}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    text, folder_and_pid = done.stdout.splitlines()
    folder, pid = folder_and_pid.split()
    assert text == "hello"
    assert not Path(folder).exists()
    assert not Path(f"/proc/{pid}").exists()
