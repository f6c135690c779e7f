"""`/classify`, `/pooling`, `/score`, `/rerank` and their Python methods, with a fake core whose logits are known."""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import processors

from quire import LLM, AsyncLLM, PoolingParams
from quire.engine.config.engine_config import EngineConfig
from quire.engine.config.pooling import Activation, Classes, Dense, Pooling
from quire.engine.protocol.engine_core import EngineCoreRequest
from quire.engine.protocol.errors import InvalidParameter
from quire.engine.protocol.sampling_params import SamplingParams
from quire.server.text.sandbox import SandboxStopped
from tests.fakes import fake_core
from tests.fakes.api_server import Server, run_server
from tests.fakes.sandbox import InProcessSandbox
from tests.fakes.tokenizers import byte_level

WIDTH = 32
EMBEDS = Pooling(modes=("mean",), modules=("normalize",), size=WIDTH)
TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }} {% endfor %}>"


def classifier(count: int, activation: Activation, **changes: Any) -> Pooling:
    labels = tuple(f"label {number}" for number in range(count))
    head = Dense(name="score", in_features=WIDTH, out_features=count, bias=False)
    classes = Classes(labels=labels, activation=activation, **changes)
    return Pooling(modes=("cls",), modules=(head,), size=count, classes=classes)


def pooling(config: EngineConfig, pooler: Pooling, **changes: Any) -> EngineConfig:
    return replace(config, model=replace(config.model, pooling=pooler, **changes))


def sigmoid(logit: float) -> float:
    return float(np.float32(1 / (1 + np.exp(-logit))))


def logits(tokens: list[int], count: int) -> list[float]:
    return fake_core.vector(tokens, count)


@pytest.fixture
async def classes(config: EngineConfig, core_mode: Callable[[str], None]) -> AsyncIterator[Server]:
    """A classifier with three labels."""
    async with run_server(pooling(config, classifier(3, "softmax"))) as running:
        yield running


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    """A tokenizer that joins pairs as BERT's does."""
    built = byte_level()
    built.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A <|im_end|>",
        pair="<|im_start|> $A <|im_end|> $B:1 <|im_end|>:1",
        special_tokens=[("<|im_start|>", 1), ("<|im_end|>", 2)],
    )
    built.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


@pytest.fixture
async def reranker(config: EngineConfig, core_mode: Callable[[str], None], pairs: Path) -> AsyncIterator[Server]:
    """A cross-encoder."""
    async with run_server(pooling(config, classifier(1, "sigmoid"), tokenizer=pairs)) as running:
        yield running


@pytest.fixture
async def embedder(config: EngineConfig, core_mode: Callable[[str], None]) -> AsyncIterator[Server]:
    async with run_server(pooling(config, EMBEDS)) as running:
        yield running


def watch(server: Server, monkeypatch: pytest.MonkeyPatch) -> list[EngineCoreRequest]:
    """The requests to the engine."""
    requests: list[EngineCoreRequest] = []
    send = server.frontend.client._send

    def seen(message: Any, to: int) -> None:
        if isinstance(message, EngineCoreRequest):
            requests.append(message)
        send(message, to)

    monkeypatch.setattr(server.frontend.client, "_send", seen)
    return requests


async def post(server: Server, route: str, status: int = 200, **body: Any) -> dict[str, Any]:
    response = await server.http.post(route, content=json.dumps(body), headers={"Content-Type": "application/json"})
    assert response.status_code == status, response.text
    found: dict[str, Any] = response.json()
    return found


async def refused(server: Server, route: str, **body: Any) -> tuple[str, str | None]:
    error = (await post(server, route, 400, **body))["error"]
    return error["message"], error["param"]


def pair(server: Server, first: str, second: str) -> list[int]:
    a, b = (server.tokenizer.encode(text, add_special_tokens=False) for text in (first, second))
    return [1, *a, 2, *b, 2]


def closely(found: Any) -> Any:
    return pytest.approx(found, abs=1e-6)


# --- classes ------------------------------------------------------------------------------------------------------


async def test_classify(classes: Server) -> None:
    ids = [classes.tokenizer.encode(text, add_special_tokens=True) for text in ("hello", "the quick fox")]
    answer = await post(classes, "/classify", input=["hello", "the quick fox"], model="alias", request_id="mine")
    assert answer.pop("created") > 0
    data = answer.pop("data")
    assert answer == {
        "id": "classify-mine",
        "object": "list",
        "model": "alias",
        "usage": {"prompt_tokens": sum(map(len, ids)), "total_tokens": sum(map(len, ids))},
    }
    for index, (entry, tokens) in enumerate(zip(data, ids, strict=True)):
        x = np.array(logits(tokens, 3))
        right = np.exp(x - x.max()) / np.exp(x - x.max()).sum()
        assert entry == {
            "index": index,
            "label": f"label {x.argmax()}",
            "probs": closely(right.tolist()),
            "num_classes": 3,
        }
    (entry,) = (await post(classes, "/classify", input=ids[1], use_activation=False))["data"]
    assert entry["probs"] == logits(ids[1], 3)
    (entry,) = (await post(classes, "/classify", input="a" * 400, truncate_prompt_tokens=5))["data"]
    assert entry["num_classes"] == 3


async def test_pooling_of_classes_and_vectors(classes: Server, embedder: Server) -> None:
    tokens = classes.tokenizer.encode("hello", add_special_tokens=True)
    answer = await post(classes, "/pooling", input="hello", use_activation=False, task="classify")
    assert answer["id"].startswith("pool-")
    assert answer["data"] == [{"index": 0, "object": "pooling", "data": logits(tokens, 3)}]
    whole = (await post(classes, "/pooling", input="hello"))["data"][0]["data"]
    assert sum(whole) == closely(1.0)
    text = (await post(embedder, "/pooling", input="hello", encoding_format="base64"))["data"][0]["data"]
    vector = (await post(embedder, "/v1/embeddings", input="hello"))["data"][0]["embedding"]
    assert np.frombuffer(base64.b64decode(text), "<f4").tolist() == vector
    raw = (await post(embedder, "/pooling", input="hello", task="embed", normalize=False))["data"][0]["data"]
    assert raw == fake_core.vector(tokens, WIDTH)


async def test_the_model_says_what_it_can_do(
    classes: Server, reranker: Server, embedder: Server, config: EngineConfig
) -> None:
    texts = {"text_1": "a", "text_2": "b"}
    for server, route, body, message in (
        (classes, "/v1/embeddings", {"input": "a"}, "is a classifier and does not support embeddings; use /classify"),
        (classes, "/v1/completions", {"prompt": "a"}, "is a classifier and does not generate text; use /classify"),
        (classes, "/score", texts, "a classifier with 3 labels, and scores need one, and does not score pairs"),
        (classes, "/rerank", {"query": "a", "documents": ["b"]}, "use /classify (in Python: LLM.classify)"),
        (classes, "/pooling", {"input": "a", "task": "embed"}, "does not support embeddings"),
        (reranker, "/v1/embeddings", {"input": "a"}, "use /classify (in Python: LLM.classify), or /score and /rerank"),
        (embedder, "/classify", {"input": "a"}, "use /v1/embeddings (in Python: LLM.embed), or /score for pairs"),
        (embedder, "/pooling", {"input": "a", "task": "classify"}, "computes embeddings and does not classify"),
    ):
        for size in (1, 70_000):  # a large body is processed elsewhere
            given = {name: value * size if value in ("a", "b") else value for name, value in body.items()}
            found, param = await refused(server, route, **given)
            assert message in found
            assert param == "model"
    async with run_server(config) as server:
        assert "a classification head" in (await refused(server, "/classify", input="a"))[0]
        assert "--runner pooling" in (await refused(server, "/score", **texts))[0]
        assert "--runner pooling" in (await refused(server, "/pooling", input="a"))[0]


# --- pairs --------------------------------------------------------------------------------------------------------


async def test_scores_of_pairs(
    reranker: Server, config: EngineConfig, core_mode: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = watch(reranker, monkeypatch)
    texts = ["hello world", "the quick brown fox"]
    ids = [pair(reranker, "who are you?", text) for text in texts]
    for route in ("/score", "/v1/score"):
        answer = await post(reranker, route, text_1="who are you?", text_2=texts)
        assert answer["id"].startswith("score-")
        assert answer["usage"]["prompt_tokens"] == sum(map(len, ids))
        assert answer["data"] == [
            {"index": at, "object": "score", "score": closely(sigmoid(logits(tokens, 1)[0]))}
            for at, tokens in enumerate(ids)
        ]
    assert [request.prompt_token_ids for request in sent] == [*ids, *ids]
    assert {request.second_segment for request in sent} == {0}, "the model has no token types"
    answer = await post(reranker, "/score", queries=["a", "b"], documents=["c", "d"], use_activation=False)
    assert [entry["score"] for entry in answer["data"]] == [
        logits(pair(reranker, *each), 1)[0] for each in (("a", "c"), ("b", "d"))
    ]


async def test_token_types(
    config: EngineConfig, core_mode: Callable[[str], None], pairs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.unit.engine.config.test_classifier import bert_spec

    changed = pooling(config, classifier(1, "sigmoid"), tokenizer=pairs, architecture=bert_spec(), max_model_len=20)
    async with run_server(changed) as server:
        sent = watch(server, monkeypatch)
        await post(server, "/score", text_1="abc", text_2=["de", ""])
        await post(server, "/classify", input="abc")
        whole = pair(server, "abc", "de")
        assert (sent[0].prompt_token_ids, sent[0].second_segment) == (whole, whole.index(2) + 1)
        assert sent[1].second_segment == len(sent[1].prompt_token_ids) - 1
        assert sent[2].second_segment == 0
        del sent[:]
        long: dict[str, Any] = {"text_1": "zyx", "text_2": "zyxwvutsrqpozyxwvuts"}
        message, param = await refused(server, "/score", **long)
        assert ("maximum context length is 20 tokens" in message, param) == (True, "text_2")
        for limit, side, first, second in (
            (-1, "right", "zyx", "zyxwvutsrqpozy"),
            (8, "right", "zy", "zyx"),
            (8, "left", "yx", "uts"),
            (3, "right", "", ""),
        ):
            await post(server, "/score", **long, truncate_prompt_tokens=limit, truncation_side=side)
            assert sent[-1].prompt_token_ids == pair(server, first, second)
        message, _ = await refused(server, "/score", **long, truncate_prompt_tokens=2)
        assert "must be at least 3, the number of special tokens added to a pair" in message


async def test_vectors_are_compared_by_their_cosine(embedder: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    sent = watch(embedder, monkeypatch)
    answer = await post(embedder, "/score", text_1="hello", text_2=["hello", "world", "fox"])
    assert len(sent) == 4, "the common text is embedded once"
    vectors = [
        np.array(fake_core.vector(embedder.tokenizer.encode(text, add_special_tokens=True), WIDTH))
        for text in ("hello", "world", "fox")
    ]
    right = [float(vectors[0] @ x / np.linalg.norm(vectors[0]) / np.linalg.norm(x)) for x in vectors]
    assert [entry["score"] for entry in answer["data"]] == closely(right)
    answer = await post(embedder, "/score", text_1="hello", text_2=["hello", "world", "fox"], use_activation=False)
    assert [entry["score"] for entry in answer["data"]] == closely([float(vectors[0] @ x) for x in vectors])
    answer = await post(embedder, "/rerank", query="hello", documents=["world", "hello"])
    assert [entry["index"] for entry in answer["results"]] == [1, 0]


async def test_rerank_in_the_shapes_of_jina_and_cohere(reranker: Server) -> None:
    documents: list[Any] = ["hello", {"text": "the quick brown fox", "title": "no text"}, "world", "serve a model"]
    texts = [each if isinstance(each, str) else each["text"] for each in documents]
    found = [sigmoid(logits(pair(reranker, "fox?", text), 1)[0]) for text in texts]
    best = sorted(range(4), key=lambda at: -found[at])
    for route, version in (("/rerank", "1"), ("/v1/rerank", "1"), ("/v2/rerank", "2")):
        answer = await post(reranker, route, query="fox?", documents=documents, model="echo", request_id="7")
        tokens = sum(len(pair(reranker, "fox?", text)) for text in texts)
        assert answer == {
            "id": "rerank-7",
            "object": "list",
            "model": "echo",
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
            "results": [
                {"index": at, "document": {"text": texts[at]}, "relevance_score": closely(found[at])} for at in best
            ],
            "meta": {"api_version": {"version": version}},
        }
    answer = await post(reranker, "/v2/rerank", query="fox?", documents=texts, top_n=2, return_documents=False)
    assert [[*each] for each in answer["results"]] == [["index", "relevance_score"]] * 2
    assert [each["index"] for each in answer["results"]] == best[:2]
    assert len((await post(reranker, "/rerank", query="a", documents=texts, top_n=99))["results"]) == 4
    mixed = [documents[1], "hello", documents[1]]  # an object first: lists of one kind and of both
    assert len((await post(reranker, "/rerank", query="a", documents=mixed))["results"]) == 3


async def test_documents_are_shortened(reranker: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    sent = watch(reranker, monkeypatch)
    await post(reranker, "/v2/rerank", query="zyx", documents=["zyxwvu", "z"], max_tokens_per_doc=2)
    assert [request.prompt_token_ids for request in sent] == [
        pair(reranker, "zyx", "zy"),
        pair(reranker, "zyx", "z"),
    ]


async def test_a_large_body_returns_its_documents(reranker: Server) -> None:
    texts = [f"{number} hello" for number in range(6000 // 3)]
    body: dict[str, Any] = {"query": "a", "documents": texts, "metadata": "x" * 70_000}
    answer = await post(reranker, "/rerank", **body)
    assert sorted(each["document"]["text"] for each in answer["results"]) == sorted(texts)


WRONG: list[tuple[str, dict[str, Any], str, str]] = [
    ("/score", {"text_1": ["a", "b"], "text_2": ["c"]}, "2 texts for 1 in text_2; send one, or as many", "text_1"),
    ("/score", {"text_1": [], "text_2": ["c"]}, "must not be empty", "text_1"),
    ("/score", {"text_1": "a", "text_2": []}, "must not be empty", "text_2"),
    ("/score", {"text_1": "a"}, "Field required", "text_2"),
    ("/score", {"text_1": "a", "text_2": "~" * 130}, "maximum context length", "text_2"),
    ("/score", {"text_1": "~" * 130, "text_2": ["b", "c"]}, "maximum context length", "text_1"),
    ("/score", {"queries": ["a", "~" * 130], "items": ["b", "c"]}, "maximum context length", "queries[1]"),
    ("/score", {"data_1": "a", "documents": ["b", "~" * 130]}, "maximum context length", "documents[1]"),
    ("/score", {"data_1": ["a", "b"], "items": ["c"]}, "data_1: 2 texts for 1 in items", "data_1"),
    ("/rerank", {"query": "~" * 130, "documents": ["b"]}, "maximum context length", "query"),
    ("/rerank", {"query": "a", "documents": ["b", {"text": "~" * 130}]}, "maximum context length", "documents[1]"),
    ("/score", {"text_1": "a", "text_2": "b", "dimensions": 3}, "not a parameter of this API", "dimensions"),
    ("/rerank", {"query": "a\ud800", "documents": ["b"]}, "unpaired surrogate", "query"),
    ("/rerank", {"query": "a", "documents": ["b", "\ud800"]}, "unpaired surrogate", "documents[1]"),
    ("/v2/rerank", {"query": "a", "documents": ["\ud800"], "max_tokens_per_doc": 3}, "surrogate", "documents[0]"),
    ("/rerank", {"query": "a", "documents": []}, "must not be empty", "documents"),
    ("/rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "greater than or equal to 0", "top_n"),
    ("/rerank", {"query": "a", "documents": ["b"], "rank_fields": ["title"]}, "is not supported", "rank_fields"),
    ("/rerank", {"query": "a", "documents": ["b"] * 2049}, "at most 2048", "documents"),
    ("/rerank", {"query": "a", "documents": [{"title": "b"}]}, "", "documents"),
    ("/classify", {"input": []}, "must not be empty", "input"),
    ("/classify", {}, "Field required", "input"),
    ("/classify", {"messages": []}, "no chat template", "messages"),
    ("/classify", {"input": "a", "add_generation_prompt": True}, "is only for messages", "add_generation_prompt"),
    ("/rerank", {"query": "a", "documents": [{"text": "b", "image": "c"}]}, "exclude each other", "documents[0].text"),
    ("/rerank", {"query": "a", "documents": [{"content": []}]}, "must not be empty", "documents[0].content"),
    ("/pooling", {"input": "a", "task": "token_embed"}, "does not support embeddings of tokens", "model"),
    ("/pooling", {"input": "a", "dimensions": 1}, "is a classifier", "dimensions"),
]


async def test_what_is_refused(reranker: Server) -> None:
    for route, body, message, param in WRONG:
        said, about = await refused(reranker, route, **body)
        assert message in said, (route, body)
        assert about is not None
        assert about.startswith(param), (route, body, about)


async def test_what_an_embedding_model_refuses(embedder: Server) -> None:
    for route, body, message, param in [
        case for case in WRONG if any(part in case[2] for part in ("context", "texts for", "surrogate"))
    ]:
        said, about = await refused(embedder, route, **body)
        assert message in said, (route, body)
        assert about == param, (route, body)


async def test_a_common_text_is_tokenized_once(reranker: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = reranker.frontend.input_processor.tokenizer
    seen: list[str] = []
    encode = tokenizer.encode

    def counted(text: str, **options: Any) -> list[int]:
        seen.append(text)
        return encode(text, **options)

    monkeypatch.setattr(tokenizer, "encode", counted)
    await post(reranker, "/rerank", query="fox?", documents=["b", "c", "d"])
    assert sorted({*seen} - {"a"}) == sorted(text for text in seen if text != "a") == ["b", "c", "d", "fox?"]


async def test_texts_that_are_truncated_are_not_combined(reranker: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """The parts that are cut off both texts are not joined with each other."""
    sent = watch(reranker, monkeypatch)
    await post(reranker, "/score", text_1="hello" * 3000, text_2="world" * 3000, truncate_prompt_tokens=9)
    ids = [reranker.tokenizer.encode(text * 9, add_special_tokens=False)[:3] for text in ("hello", "world")]
    assert sent[0].prompt_token_ids == [1, *ids[0], 2, *ids[1], 2]


async def test_pairs_that_are_tokenized_as_a_whole_have_a_limit(
    config: EngineConfig, core_mode: Callable[[str], None]
) -> None:
    """The limit holds for a small body, in which many pairs have a common text."""
    changed = pooling(config, classifier(1, "sigmoid", joins_texts=True), max_model_len=60)
    async with run_server(changed) as server:
        body: dict[str, Any] = {"query": "hello " * 5000, "documents": ["a"] * 600}
        message, param = await refused(server, "/rerank", **body)
        assert ("600 pairs of texts have 18000600 characters" in message, param) == (True, "documents")
        answer = await post(server, "/rerank", **body, truncate_prompt_tokens=-1)
        assert len(answer["results"]) == 600, "what truncation drops does not count"


async def test_a_template_joins_the_texts(
    config: EngineConfig, core_mode: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    changed = pooling(config, classifier(1, "sigmoid", joins_texts=True), max_model_len=60)
    async with run_server(changed) as server:
        sent = watch(server, monkeypatch)
        await post(server, "/score", text_1="hello ", text_2="world", truncate_prompt_tokens=-1)
        await post(server, "/score", text_1="hello ", text_2="world")
        whole = server.tokenizer.encode("hello world", add_special_tokens=True)
        assert [request.prompt_token_ids for request in sent] == [whole, whole]
    async with run_server(changed, chat_template=TEMPLATE) as server:
        sent = watch(server, monkeypatch)
        await post(server, "/score", text_1="hello", text_2="world")
        await post(server, "/score", text_1="hello", text_2="zyxwvutsrqponmlk" * 5, truncate_prompt_tokens=-1)
        rendered = [server.tokenizer.decode(each.prompt_token_ids, skip_special_tokens=False) for each in sent]
        assert rendered[0] == "query: hello document: world >"
        assert rendered[1].startswith("query: hello document: zyxwvutsrq")
        assert rendered[1].endswith(" >"), "truncation leaves the template's end"
        assert 55 <= len(sent[1].prompt_token_ids) <= 60
        assert "maximum context" in (await refused(server, "/score", text_1="hello" * 60, text_2="a"))[0]

        async def stopped(*question: Any, **limit: Any) -> bytes:
            raise SandboxStopped

        for ask in ("ask_kept", "ask_async"):
            monkeypatch.setattr(InProcessSandbox, ask, stopped)
        message, param = await refused(server, "/rerank", query="a", documents=["b", "c"])
        assert ("the chat template takes more than 10 s" in message, param) == (True, "documents")


async def test_invocations_choose_these_routes(reranker: Server) -> None:
    answer = await post(reranker, "/invocations", query="a", documents=["b"])
    assert answer["results"][0]["document"] == {"text": "b"}
    for first, second in (("text_1", "text_2"), ("data_1", "data_2"), ("queries", "documents")):
        texts: dict[str, Any] = {first: "a", second: "b"}
        answer = await post(reranker, "/invocations", **texts)
        assert answer["data"][0]["object"] == "score"
    for text in ("a", "a" * 70_000):
        inputs: dict[str, Any] = {"input": text, "truncate_prompt_tokens": -1}
        answer = await post(reranker, "/invocations", **inputs)
        assert answer["data"][0]["label"] == "label 0"
        answer = await post(reranker, "/invocations", **inputs, task="classify")
        assert answer["data"][0]["object"] == "pooling"


async def test_predictions_of_a_classifier(
    config: EngineConfig, core_mode: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AIP_PREDICT_ROUTE", "/predict")
    async with run_server(pooling(config, classifier(3, "softmax"))) as server:
        for text in ("a", "a" * 70_000):
            answer = await post(
                server, "/predict", instances=[{"input": text}], parameters={"truncate_prompt_tokens": -1}
            )
            assert answer["predictions"][0]["data"][0]["num_classes"] == 3


async def test_two_names_of_one_parameter_agree(embedder: Server) -> None:
    for route in ("/v1/embeddings", "/pooling"):
        message, param = await refused(embedder, route, input="a", normalize=True, use_activation=False)
        assert ("send only one of them" in message, param) == (True, "normalize")


# --- Python -------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(model_folder: Path, tmp_path: Path) -> Path:
    for path in model_folder.iterdir():
        (tmp_path / path.name).symlink_to(path)
    return tmp_path


OVERRIDES: dict[str, Any] = {"architectures": ["LlamaForSequenceClassification"], "num_labels": 1}


@pytest.fixture
def llm(folder: Path, core_mode: Callable[[str], None]) -> Iterator[LLM]:
    with LLM(str(folder), load_format="dummy", device="cpu", hf_overrides=OVERRIDES) as running:
        yield running


def test_llm_classifies_and_scores(llm: LLM) -> None:
    prompts: list[Any] = ["hello", [70, 71]]
    first, second = llm.classify(prompts, use_tqdm=False)
    assert (first.prompt, second.prompt) == ("hello", None)
    assert first.outputs.num_classes == 1
    assert second.outputs.probs == closely([sigmoid(logits([70, 71], 1)[0])])
    (raw,) = llm.classify([[70, 71]], use_activation=False)
    assert raw.outputs.probs == logits([70, 71], 1)
    (pooled,) = llm.encode([[70, 71]], pooling_task="classify")
    assert pooled.outputs.data == second.outputs.probs
    scored = llm.score("hello", ["world", "fox"])
    assert [each.outputs.score for each in scored] == closely(
        [sigmoid(logits(each.prompt_token_ids, 1)[0]) for each in scored]
    )
    assert scored[0].prompt_token_ids != scored[1].prompt_token_ids
    with pytest.raises(InvalidParameter, match="is a classifier and does not support embeddings"):
        llm.embed("a")
    with pytest.raises(InvalidParameter, match="is a classifier and does not generate text"):
        llm.generate("a", SamplingParams())
    with pytest.raises(InvalidParameter, match="data_1: 2 texts for 3 in data_2"):
        llm.score(["a", "b"], ["c", "d", "e"])
    with pytest.raises(InvalidParameter, match="only texts"):
        llm.score([[1]], ["c"])  # type: ignore[list-item]


async def test_async_llm(folder: Path, core_mode: Callable[[str], None]) -> None:
    async with AsyncLLM(str(folder), load_format="dummy", device="cpu", runner="pooling") as llm:
        (same,) = await llm.score("hello", "hello", "mine", truncate_prompt_tokens=1)
        assert (same.request_id, same.outputs.score) == ("mine", closely(1.0))
        assert len(same.prompt_token_ids) == 2
        unused: dict[str, Any] = {"lora_request": None, "trace_headers": None}
        assert (await llm.score("hello", "hello", truncate_prompt_tokens=1, **unused))[0].outputs == same.outputs
        vector = (await llm.encode("hello", PoolingParams(), "id", **unused)).outputs.data
        assert (await llm.embed("hello", **unused)).outputs.embedding == vector
        cut = await llm.embed("hello", tokenization_kwargs={"truncate_prompt_tokens": 1})
        assert len(cut.prompt_token_ids) == 1
        with pytest.raises(InvalidParameter, match="computes embeddings and does not classify"):
            await llm.classify("a")
