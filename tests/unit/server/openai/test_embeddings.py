"""`/v1/embeddings` and `LLM.embed`, with a fake core whose vectors are known."""

from __future__ import annotations

import asyncio
import base64
import sys
import threading
from array import array
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

from quire import LLM, AsyncLLM, PoolingParams, SamplingParams
from quire.engine.config.engine_config import EngineConfig
from quire.engine.config.pooling import Pooling
from quire.engine.protocol.engine_core import AbortRequests, EngineCoreRequest
from quire.engine.protocol.errors import InvalidParameter
from quire.server.client.output_stream import RequestFailed
from quire.server.text.embedding_output import VectorOptions, to_json
from tests.fakes import fake_core
from tests.fakes.api_server import Server, run_server
from tests.fakes.sentence import write_modules
from tests.unit.server.openai.test_openai_document import check

SIZE = 32
POOLING = Pooling(
    modes=("mean",), modules=("normalize",), size=SIZE, is_matryoshka=True, prompts={"query": "quick ", "document": ""}
)


def expected(tokens: list[int], dimensions: int = SIZE, *, normalize: bool = True) -> list[float]:
    vector = np.array(fake_core.vector(tokens, SIZE)[:dimensions], np.float32)
    return list(map(float, vector / np.linalg.norm(vector) if normalize else vector))


def embedding(config: EngineConfig, **changes: Any) -> EngineConfig:
    return replace(config, model=replace(config.model, pooling=replace(POOLING, **changes)))


@pytest.fixture
async def server(config: EngineConfig, core_mode: Callable[[str], None]) -> AsyncIterator[Server]:
    async with run_server(embedding(config)) as running:
        yield running


@pytest.fixture
def sent(server: Server, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The messages to the engine."""
    messages: list[Any] = []
    send = server.frontend.client._send

    def watch(message: Any, to: int) -> None:
        messages.append(message)
        send(message, to)

    monkeypatch.setattr(server.frontend.client, "_send", watch)
    return messages


async def post(server: Server, status: int = 200, **body: Any) -> dict[str, Any]:
    response = await server.http.post("/v1/embeddings", json=body)
    assert response.status_code == status, response.text
    found: dict[str, Any] = response.json()
    return found


async def refused(server: Server, **body: Any) -> tuple[str, str | None]:
    error = (await post(server, 400, **body))["error"]
    assert error["type"] == "invalid_request_error"
    return error["message"], error["param"]


def close(found: list[float], right: list[float]) -> None:
    assert found == pytest.approx(right, abs=1e-6)


async def test_the_shape_of_an_answer(server: Server) -> None:
    ids = server.tokenizer.encode("hello world", add_special_tokens=True)
    answer = await post(server, input="hello world", model="alias", request_id="mine", user="u")
    check("CreateEmbeddingResponse", answer)
    (entry,) = answer.pop("data")
    close(entry.pop("embedding"), expected(ids))
    assert entry == {"object": "embedding", "index": 0}
    assert answer.pop("created") > 0
    assert answer == {
        "id": "embd-mine",
        "object": "list",
        "model": "alias",
        "usage": {"prompt_tokens": len(ids), "total_tokens": len(ids)},
    }


async def test_every_kind_of_input_in_its_order(server: Server) -> None:
    texts = ["hello", "world, how are you?", "the quick brown fox"]
    ids = [server.tokenizer.encode(text, add_special_tokens=True) for text in texts]
    for given, prompts in (
        ("hello", ids[:1]),
        (["hello"], ids[:1]),
        (texts, ids),
        (ids[1], ids[1:2]),
        ([ids[2]], ids[2:]),
        (ids, ids),
    ):
        answer = await post(server, input=given)
        assert [entry["index"] for entry in answer["data"]] == list(range(len(prompts)))
        for entry, prompt in zip(answer["data"], prompts, strict=True):
            close(entry["embedding"], expected(prompt))
        assert answer["usage"]["prompt_tokens"] == sum(map(len, prompts))


async def test_the_official_client_asks_for_base64(server: Server, sent: list[Any]) -> None:
    for format in ({}, {"encoding_format": "float"}, {"encoding_format": "base64"}):
        answer = await server.openai.embeddings.create(model="echo", input=["hello", "world"], **format)  # type: ignore[arg-type]
        first = answer.data[0].embedding
        if isinstance(first, str):
            first = array("f", base64.b64decode(first)).tolist()
        close(first, expected(server.tokenizer.encode("hello", add_special_tokens=True)))
        assert answer.usage.total_tokens == answer.usage.prompt_tokens


async def test_base64_and_numbers_are_the_same(server: Server) -> None:
    numbers = (await post(server, input="hello"))["data"][0]["embedding"]
    text = (await post(server, input="hello", encoding_format="base64"))["data"][0]["embedding"]
    assert np.frombuffer(base64.b64decode(text), "<f4").tolist() == numbers


async def test_dimensions_and_normalization(server: Server) -> None:
    ids = server.tokenizer.encode("hello", add_special_tokens=True)
    for body, right in (
        ({"dimensions": 5}, expected(ids, 5)),
        ({"dimensions": SIZE}, expected(ids)),
        ({"normalize": False}, expected(ids, normalize=False)),
        ({"use_activation": False, "dimensions": 3}, expected(ids, 3, normalize=False)),
        ({"normalize": True, "use_activation": True}, expected(ids)),
    ):
        close((await post(server, input="hello", **body))["data"][0]["embedding"], right)
    assert await refused(server, input="hello", dimensions=SIZE + 1) == (
        f"dimensions must be from 1 to {SIZE} for this model, got {SIZE + 1}",
        "dimensions",
    )
    assert (await refused(server, input="hello", dimensions=0))[1] == "dimensions"
    assert (await refused(server, input="hello", normalize=True, use_activation=False))[1] == "normalize"


async def test_dimensions_where_the_model_has_none_or_few(
    config: EngineConfig, core_mode: Callable[[str], None]
) -> None:
    async with run_server(embedding(config, is_matryoshka=False, modules=())) as server:
        message, param = await refused(server, input="hello", dimensions=8)
        assert param == "dimensions"
        assert f"have {SIZE} dimensions, which cannot be reduced" in message
        ids = server.tokenizer.encode("hello", add_special_tokens=True)
        close(
            (await post(server, input="hello", dimensions=SIZE))["data"][0]["embedding"], expected(ids, normalize=False)
        )
        close((await post(server, input="hello", normalize=True))["data"][0]["embedding"], expected(ids))
    async with run_server(embedding(config, dimensions=(8, 16))) as server:
        assert len((await post(server, input="hello", dimensions=8))["data"][0]["embedding"]) == 8
        message, _ = await refused(server, input="hello", dimensions=9)
        assert message == "dimensions must be 8, 16 for this model, got 9"


WRONG: list[tuple[dict[str, Any], str, str | None]] = [
    ({"input": ""}, "input must not be empty", "input"),
    ({"input": []}, "input must not be empty", "input"),
    ({"input": ["a", ""]}, "input[1] must not be empty", "input[1]"),
    ({"input": [[70], []]}, "input[1] must not be empty", "input[1]"),
    ({}, "input: Field required", "input"),
    ({"input": [70, "a"]}, "input", "input"),
    ({"input": [[70.5]]}, "input", "input"),
    ({"input": [70, 999]}, "input: token id 999 is not in the model's vocabulary", "input"),
    ({"input": [[70], [-1]]}, "input[1]: token id -1", "input[1]"),
    ({"input": "a", "encoding_format": "hex"}, "encoding_format", "encoding_format"),
    ({"input": "a", "dimensions": "5"}, "dimensions", "dimensions"),
    ({"input": "a", "messages": []}, "input and messages exclude each other", "input"),
    ({"input": "a", "embed_dtype": "float16"}, "embed_dtype is not supported", "embed_dtype"),
    ({"input": "a", "stream": True}, "stream is not a parameter of this API", "stream"),
    ({"input": "a", "prompt_name": "q"}, "this model has no prompt 'q'; it has query, document", "prompt_name"),
    (
        {"input": "a", "truncate_prompt_tokens": 0},
        "truncate_prompt_tokens must be -1 or from 1",
        "truncate_prompt_tokens",
    ),
    ({"input": "a", "truncate_prompt_tokens": 129}, "from 1 to 128", "truncate_prompt_tokens"),
    ({"input": ["a", "~" * 129]}, "maximum context length is 128 tokens, but input[1] has 129", "input[1]"),
    ({"input": [70] * 129}, "maximum context length is 128 tokens, but input has 129", "input"),
    ({"input": ["a"] * 2049}, "at most 2048 items", "input"),
    ({"input": [[70]] * 2049}, "at most 2048 items", "input"),
]


async def test_what_is_refused(server: Server) -> None:
    for body, message, param in WRONG:
        said, about = await refused(server, **body)
        assert message in said
        assert about == param


async def test_harmless_values_are_taken(server: Server) -> None:
    await post(server, input="a", embed_dtype="float32", endianness="little", padding=None, dimensions=None)
    error = (await post(server, 404, input="a", model="gpt-4"))["error"]
    assert error["code"] == "model_not_found"
    with pytest.raises(openai.BadRequestError) as caught:
        await server.openai.embeddings.create(model="echo", input="~" * 200)
    assert caught.value.code == "context_length_exceeded"


async def test_a_full_length_fits_and_more_is_cut_off(server: Server, sent: list[Any]) -> None:
    text = "a" * 100 + "b" * 28
    assert len(server.tokenizer.encode(text, add_special_tokens=True)) == 128
    ids = list(range(8, 208))
    for body in (
        {"input": text},
        {"input": text + "~~", "truncate_prompt_tokens": -1},
        {"input": text, "truncate_prompt_tokens": 5},
        {"input": text, "truncate_prompt_tokens": 5, "truncation_side": "left"},
        {"input": ids, "truncate_prompt_tokens": 3},
        {"input": [ids], "truncate_prompt_tokens": -1, "truncation_side": "left"},
    ):
        await post(server, **body)
    letters = server.tokenizer.encode(text, add_special_tokens=True)
    prompts = [message.prompt_token_ids for message in sent if isinstance(message, EngineCoreRequest)]
    assert prompts == [letters, letters, letters[:5], letters[-5:], ids[:3], ids[-128:]]


async def test_special_tokens_stay_when_text_is_cut(
    config: EngineConfig, core_mode: Callable[[str], None], tmp_path: Path
) -> None:
    from tokenizers import processors

    from tests.fakes.tokenizers import byte_level

    built = byte_level()
    built.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A <|im_end|>", special_tokens=[("<|im_start|>", 1), ("<|im_end|>", 2)]
    )
    built.save(str(tmp_path / "tokenizer.json"))
    template = "{% set content = messages[0].content %}{{ content if content is string else content[0].text }}"
    changed, letters = embedding(config, chat_template=template), "zyxwvutsrqpo"
    async with run_server(
        replace(changed, model=replace(changed.model, tokenizer=tmp_path, max_model_len=10))
    ) as server:
        tokens = server.tokenizer.encode(letters, add_special_tokens=True)
        assert (tokens[0], tokens[-1], len(tokens)) == (1, 2, 14)
        for body, right in (
            ({"truncate_prompt_tokens": -1}, [*tokens[:9], 2]),
            ({"truncate_prompt_tokens": 4}, [*tokens[:3], 2]),
            ({"truncate_prompt_tokens": 4, "truncation_side": "left"}, [1, *tokens[-3:]]),
            ({"truncate_prompt_tokens": 4, "add_special_tokens": False}, tokens[1:5]),
            ({"truncate_prompt_tokens": 2}, [1, 2]),
        ):
            answer = await post(server, input=letters, **body)
            close(answer["data"][0]["embedding"], expected(right))
            assert answer["usage"]["prompt_tokens"] == len(right)
        content = [{"type": "text", "text": "abc"}]
        for given in ({"input": {"content": content}}, {"messages": [{"role": "user", "content": content}]}):
            for adds, count in ((None, 3), (False, 3), (True, 5)):
                answer = await post(server, **given, add_special_tokens=adds)
                assert answer["usage"]["prompt_tokens"] == count
        message, _ = await refused(server, input="abc", truncate_prompt_tokens=1)
        assert "must be at least 2, the number of special tokens" in message
        message, _ = await refused(server, input=letters)
        assert "10 tokens, but input has 14" in message


async def test_prompts_and_lower_case(config: EngineConfig, core_mode: Callable[[str], None]) -> None:
    async with run_server(embedding(config, lower_case=True, default_prompt="query")) as server:

        def ids(text: str) -> list[int]:
            return server.tokenizer.encode(text, add_special_tokens=True)

        for body, tokens in (
            ({"input": "FOX"}, ids("quick fox")),
            ({"input": "FOX", "prompt_name": "document"}, ids("fox")),
            ({"input": ids("FOX")}, ids("FOX")),
        ):
            close((await post(server, **body))["data"][0]["embedding"], expected(tokens))
    async with run_server(embedding(config, include_prompt=False)) as server:
        assert (await refused(server, input="a", prompt_name="query"))[1] == "prompt_name"
        await post(server, input="a", prompt_name="document")


async def test_priority_salt_and_an_id_that_runs(server: Server, sent: list[Any]) -> None:
    await post(server, input="a", priority=3, cache_salt="s")
    (submit,) = sent
    assert submit.priority == 3
    assert len(submit.cache_salt) == 16
    hanging = asyncio.create_task(server.http.post("/v1/embeddings", json={"input": "<hang>", "request_id": "x"}))
    while len(sent) < 2:
        await asyncio.sleep(0.01)
    message, param = await refused(server, input="a", request_id="x")
    assert ("is already running" in message, param) == (True, "request_id")
    hanging.cancel()


async def test_who_goes_away_leaves_nothing_running(server: Server, sent: list[Any]) -> None:
    request = asyncio.create_task(server.http.post("/v1/embeddings", json={"input": ["a", "<hang>"]}))
    while not sent or len(server.frontend.client._running) != 1:  # the first vector has come
        await asyncio.sleep(0.001)
    request.cancel()
    while not (aborted := [message for message in sent if isinstance(message, AbortRequests)]):
        await asyncio.sleep(0.001)
    await server.until_idle()
    assert [len(message.request_ids) for message in aborted] == [1]
    load = (await server.http.get("/load")).json()
    assert load == {"server_load": 0}
    assert "embedding" in (await post(server, input="a"))["data"][0]


async def test_a_failing_input_fails_the_request(server: Server) -> None:
    error = (await post(server, 500, input=["a", "<fail>"]))["error"]
    assert error["code"] == "request_failed"
    assert "the KV cache is too small" in error["message"]
    await post(server, input="a")


async def test_metrics_and_the_other_routes(server: Server) -> None:
    await post(server, input=["a", "b"])
    text = (await server.http.get("/metrics")).text
    assert 'quire:request_success_total{engine="0",finished_reason="stop",model_name="echo"} 2.0' in text
    counts = {
        line.partition("_count{")[0].removeprefix("quire:"): float(line.rpartition(" ")[2])
        for line in text.splitlines()
        if line.startswith("quire:request_") and "_count{" in line
    }
    assert {name for name, count in counts.items() if count == 2} == {
        f"request_{name}"
        for name in (
            *("queue_time_seconds", "prefill_time_seconds", "inference_time_seconds"),
            *("prompt_tokens", "prefill_kv_computed_tokens"),
        )
    }
    assert set(counts.values()) == {0.0, 2.0}, "of what is generated"
    models = (await server.http.get("/v1/models")).json()
    assert models["data"][0]["max_model_len"] == 128
    tokens = (await server.http.post("/tokenize", json={"prompt": "hello"})).json()
    assert tokens["tokens"] == server.tokenizer.encode("hello", add_special_tokens=True)


USER = [{"role": "user", "content": "hello"}]


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("/v1/chat/completions", {"messages": USER}),
        ("/v1/chat/completions", {"messages": USER, "stream": True}),
        ("/v1/completions", {"prompt": "hello"}),
        ("/v1/responses", {"input": "hello"}),
        ("/v1/messages", {"messages": USER, "max_tokens": 5, "model": "echo"}),
        ("/invocations", {"prompt": "hello"}),
    ],
)
async def test_a_model_that_embeds_generates_nothing(server: Server, route: str, body: dict[str, Any]) -> None:
    response = await server.http.post(route, json=body)
    assert response.status_code == 400
    error = response.json()["error"]
    assert "computes embeddings and does not generate text; use /v1/embeddings" in error["message"]


async def test_a_model_that_generates_does_not_embed(config: EngineConfig, core_mode: Callable[[str], None]) -> None:
    async with run_server(config) as server:
        message, param = await refused(server, input="hello")
        assert param == "model"
        assert "--runner pooling" in message


async def test_invocations_choose_the_route_by_field(
    config: EngineConfig, core_mode: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AIP_PREDICT_ROUTE", "/predict")
    async with run_server(embedding(config)) as server:
        ids = server.tokenizer.encode("hello", add_special_tokens=True)
        answer = (await server.http.post("/invocations", json={"input": "hello"})).json()
        close(answer["data"][0]["embedding"], expected(ids))
        body = {"instances": [{"input": "hello"}, {"input": "hello", "dimensions": 4}]}
        answer = (await server.http.post("/predict", json=body)).json()
        assert [len(each["data"][0]["embedding"]) for each in answer["predictions"]] == [SIZE, 4]


async def test_many_inputs_do_not_block_other_requests(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Vectors are written in a thread."""
    threads = []

    def spy(*args: Any, **kwargs: Any) -> Any:
        threads.append(threading.current_thread())
        return to_json(*args, **kwargs)

    monkeypatch.setattr("quire.server.openai.embeddings.to_json", spy)
    await post(server, input=["a"] * 2048)
    assert len(threads) == 2048
    assert threading.main_thread() not in threads


def test_vectors_of_nothing_stay_nothing() -> None:
    zeros = array("f", [0.0] * SIZE).tobytes()
    assert VectorOptions().finish(zeros, POOLING).tolist() == [0.0] * SIZE


# --- Python, and files ----------------------------------------------------------------------------------------


@pytest.fixture
def folder(model_folder: Path, tmp_path: Path) -> Path:
    """A decoder with a sentence-transformers folder."""
    for path in model_folder.iterdir():
        (tmp_path / path.name).symlink_to(path)
    return write_modules(tmp_path, "lasttoken", {}, prompts={"query": "quick "})


@pytest.fixture
def llm(folder: Path, core_mode: Callable[[str], None]) -> Iterator[LLM]:
    with LLM(str(folder), load_format="dummy", device="cpu") as running:
        yield running


def test_llm_embeds(llm: LLM, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(sys.stderr), "isatty", lambda self: True)  # bars are for terminals
    prompts: list[Any] = ["hello", [70, 71], {"prompt": "world", "cache_salt": "s"}, {"prompt_token_ids": [72]}]
    results = llm.embed(prompts)
    assert "4/4" in capfd.readouterr().err
    assert [result.prompt for result in results] == ["hello", None, "world", None]
    for result in results:
        assert result.finished
        close(result.outputs.embedding, expected(result.prompt_token_ids))
    assert llm.embed([], use_tqdm=False) == []
    (query,) = llm.embed("fox", use_tqdm=False, prompt_name="query", normalize=False)
    assert query.prompt_token_ids == llm.embed("quick fox", use_tqdm=False)[0].prompt_token_ids
    close(query.outputs.embedding, expected(query.prompt_token_ids, normalize=False))
    ids = llm._frontend.input_processor.tokenizer.encode("ab", add_special_tokens=False)
    (cut,) = llm.embed(
        [ids], use_tqdm=False, truncate_prompt_tokens=1, truncation_side="left", add_special_tokens=False
    )
    assert cut.prompt_token_ids == ids[-1:]
    assert llm.embed("a" * 50, use_tqdm=False, truncate_prompt_tokens=4)[0].prompt_token_ids[3:] == [
        llm.embed("a", use_tqdm=False)[0].prompt_token_ids[0]
    ]


def test_parameters_of_pooling_may_be_an_object_for_each_prompt(llm: LLM) -> None:
    params = [PoolingParams(use_activation=False, truncate_prompt_tokens=1), PoolingParams(normalize=True)]
    first, second = llm.embed(["a b c", "a b c"], pooling_params=params)
    assert len(first.prompt_token_ids) == 1 < len(second.prompt_token_ids)
    close(first.outputs.embedding, expected(first.prompt_token_ids, normalize=False))
    close(second.outputs.embedding, expected(second.prompt_token_ids))
    (same,) = llm.embed("a b c", pooling_params=params[0], normalize=True, truncate_prompt_tokens=-1)
    assert same.outputs == second.outputs
    assert same.outputs.hidden_size == SIZE
    (pooled,) = llm.encode("a b c", params[1].clone())
    assert pooled.outputs.data == second.outputs.embedding
    with pytest.raises(ValueError, match="pooling_params: 2 for 1 prompts"):
        llm.embed("a", pooling_params=params)
    with pytest.raises(InvalidParameter, match="classif"):
        llm.encode("a", PoolingParams(task="classify"))
    with pytest.raises(InvalidParameter, match="lora_request"):
        llm.embed("a", lora_request=object())  # type: ignore[arg-type]


def test_errors_reach_the_caller(llm: LLM) -> None:
    for wrong, message in (
        ([[70], [999]], "vocabulary"),
        (["~" * 200], "maximum context length is 128 tokens, but prompt has 200"),
        ([[70.5]], "token ids must be integers"),
        ([""], "prompt must not be empty"),
    ):
        with pytest.raises(InvalidParameter, match=message):
            llm.embed(wrong, use_tqdm=False)  # type: ignore[arg-type]
    with pytest.raises(InvalidParameter, match="dimensions"):
        llm.embed("a", dimensions=4)
    with pytest.raises(InvalidParameter, match="does not generate text"):
        llm.generate("a", SamplingParams())
    with pytest.raises(RequestFailed, match="KV cache"):
        llm.embed(["a", "<fail>"])
    assert len(llm.embed("a")) == 1


async def test_async_llm_embeds(folder: Path, core_mode: Callable[[str], None]) -> None:
    async with AsyncLLM(str(folder), load_format="dummy", device="cpu") as llm:
        results = await asyncio.gather(*(llm.embed(text, text) for text in ("hello", "world")))
        assert [result.request_id for result in results] == ["hello", "world"]
        close(results[1].outputs.embedding, expected(results[1].prompt_token_ids))
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(llm.embed("<hang>"), 0.2)


def test_a_text_model_says_how_it_could_embed(model_folder: Path, core_mode: Callable[[str], None]) -> None:
    with (
        LLM(str(model_folder), load_format="dummy", device="cpu") as llm,
        pytest.raises(InvalidParameter, match="--runner pooling"),
    ):
        llm.embed("a")
