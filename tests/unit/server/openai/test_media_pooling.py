"""Images in requests for embeddings, classes and scores: their shapes, what the engine gets, and what is refused."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from quire.engine.config.engine_config import EngineConfig
from quire.engine.config.pooling import Classes, Dense, Pooling
from quire.engine.protocol.engine_core import EngineCoreOutput, EngineCoreRequest
from quire.server.http.large_bodies import LARGE_BODY
from quire.server.text.embedding_output import scores
from quire.server.text.inputs import PoolingInput
from tests.fakes import fake_core
from tests.fakes.api_server import Server, run_server
from tests.fakes.media import FakeLoader
from tests.unit.server.openai.test_media import IMAGE, LARGE, PDF, PNG, TEMPLATE, image, until_released, user
from tests.unit.server.openai.test_media import config as config
from tests.unit.server.openai.test_media import loader as loader
from tests.unit.server.openai.test_media import sent as sent

SIZE = 8
EMBEDS = Pooling(modes=("mean",), modules=("normalize",), size=SIZE)
TOKENS = Pooling(
    modes=(),
    modules=("normalize",),
    size=SIZE,
    prompts={"query": "Q:"},
    default_prompt="query",
    suffix=";",
    chat_template=TEMPLATE.replace("{{ part.text or", "{{ 'Q:' + part.text + ';' if part.text else"),
)
SCORES = Pooling(
    modes=("lasttoken",),
    modules=(Dense(name="score", in_features=SIZE, out_features=1, bias=False),),
    size=1,
    classes=Classes(labels=("LABEL_0",), activation="sigmoid", joins_texts=True),
)
PAIRS = (
    "{% for message in messages %}[{{ message.role }}]{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{{ part.text or '<|' + part.type + '_pad|>' }}{% endfor %}{% endif %}{% endfor %}"
)


def pooled(config: EngineConfig, pooling: Pooling) -> EngineConfig:
    return replace(config, model=replace(config.model, pooling=pooling))


@pytest.fixture
async def server(config: EngineConfig, core_mode: Callable[[str], None], loader: FakeLoader) -> AsyncIterator[Server]:
    """An embedding model."""
    async with run_server(pooled(config, EMBEDS)) as running:
        yield running


async def post(server: Server, route: str, status: int = 200, **body: Any) -> dict[str, Any]:
    response = await server.http.post(route, json=body)
    assert response.status_code == status, response.text
    found: dict[str, Any] = response.json()
    return found


def texts(server: Server, sent: list[EngineCoreRequest]) -> list[str]:
    return [server.tokenizer.decode(each.prompt_token_ids, skip_special_tokens=False) for each in sent]


def vector(request: EngineCoreRequest) -> list[float]:
    x = np.array(fake_core.vector(request.prompt_token_ids, SIZE), np.float32)
    found: list[float] = (x / np.linalg.norm(x)).tolist()
    return found


PICTURE = IMAGE * 3


@pytest.mark.parametrize("route", ["/v1/embeddings", "/pooling"])
async def test_a_conversation(server: Server, loader: FakeLoader, sent: list[EngineCoreRequest], route: str) -> None:
    messages = user("hello", image(), "world")
    answer = await post(server, route, messages=messages, mm_processor_kwargs={"max_pixels": 5})
    await post(server, route, messages=messages, add_generation_prompt=True)
    await post(server, route, messages=[*messages, {"role": "assistant", "content": "a"}], continue_final_message=True)
    begin = f"<|im_start|>user\nhello{PICTURE}world<|im_end|>\n"
    assert texts(server, sent) == [begin, f"{begin}<|im_start|>assistant\n", f"{begin}<|im_start|>assistant\na"]
    assert [(len(each.media), each.media[0].num_features) for each in sent] == [(1, 3)] * 3
    assert loader.loaded[0].options == {"max_pixels": 5}
    (same,) = (await post(server, "/invocations", messages=messages, mm_processor_kwargs={"max_pixels": 5}))["data"]
    assert same["embedding"] == pytest.approx(vector(sent.pop()), abs=1e-6)
    tokens = len(sent[0].prompt_token_ids)
    details = {"prompt_tokens_details": {"image_tokens": 3}}
    assert answer["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens} | details
    (entry,) = answer["data"]
    assert entry["embedding" if route == "/v1/embeddings" else "data"] == pytest.approx(vector(sent[0]), abs=1e-6)
    await until_released(loader)


async def test_several_inputs_in_their_order(server: Server, loader: FakeLoader, sent: list[EngineCoreRequest]) -> None:
    """Plain ones are used unchanged, and the others rendered; each image is loaded once."""
    both = {"content": [{"type": "text", "text": "what?"}, image()]}
    for url in (PNG, LARGE):  # a large body is processed elsewhere
        sent.clear()
        given: list[Any] = ["hello", {"image": url}, {"text": "world"}, both, {"image": url}]
        answer = await post(server, "/v1/embeddings", input=given)
        turn = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
        shown = [turn.format(each) for each in (PICTURE, f"what?{PICTURE}", PICTURE)]
        expected = ["hello", shown[0], "world", shown[1].replace("\n<|image", "<|image", 1), shown[2]]
        assert [text.replace("<|im_start|>h", "h") for text in texts(server, sent)] == expected
        assert [entry["embedding"] for entry in answer["data"]] == [
            pytest.approx(vector(each), abs=1e-6) for each in sent
        ]
        assert answer["usage"]["prompt_tokens_details"] == {"image_tokens": 9}
    assert len(LARGE) > LARGE_BODY
    (entry,) = (await post(server, "/v1/embeddings", input={"image": PNG}))["data"]
    assert entry["embedding"] == pytest.approx(vector(sent[-1]), abs=1e-6)
    await until_released(loader)


async def test_the_prompt_of_texts_is_refused_for_content(server: Server) -> None:
    for body in ({"input": ["a", {"image": PNG}]}, {"messages": user(image())}):
        error = (await post(server, "/v1/embeddings", 400, **body, prompt_name="query"))["error"]
        assert (error["param"], error["message"][:28]) == ("prompt_name", "prompt_name: only for texts;")


async def test_scores_of_an_embedding_model(server: Server, sent: list[EngineCoreRequest]) -> None:
    documents = ["hello", {"content": [image("https://a/b")]}, {"content": [{"type": "text", "text": "world"}]}]
    answer = await post(server, "/score", queries={"content": [image()]}, documents=documents)
    first, *others = map(vector, sent)
    assert len(sent) == 4
    right = [float(np.dot(first, other)) for other in others]
    assert [entry["score"] for entry in answer["data"]] == pytest.approx(right, abs=1e-6)
    assert "assistant" in texts(server, sent)[3], "content is rendered, even if it is a text"
    answer = await post(
        server, "/rerank", query="hello", documents={"content": [image(), {"type": "text", "text": "a"}]}
    )
    assert [each["document"] for each in answer["results"]] == [{"text": "a"}]


async def test_vectors_of_tokens_are_compared_by_maxsim(
    config: EngineConfig, core_mode: Callable[[str], None], loader: FakeLoader, sent: list[EngineCoreRequest]
) -> None:
    async with run_server(pooled(config, TOKENS)) as server:
        (entry,) = (await post(server, "/pooling", input="hello", task="token_embed"))["data"]
        found = np.array(entry["data"])
        assert found.shape == (1, SIZE)  # the fake engine has one vector
        assert texts(server, sent)[0].endswith("Q:hello;")
        answer = await post(server, "/rerank", query="a", documents=["b", {"image": PNG}])
        query, *others = map(vector, sent[1:])
        right = sorted((float(np.dot(query, other)) for other in others), reverse=True)
        assert [each["relevance_score"] for each in answer["results"]] == pytest.approx(right, abs=1e-6)
        assert texts(server, sent)[-1] == f"<|im_start|>user\n{PICTURE}<|im_end|>\n<|im_start|>assistant\n"
        for route, body in (("/v1/embeddings", {"input": "a"}), ("/pooling", {"input": "a", "task": "embed"})):
            error = (await post(server, route, 400, **body))["error"]
            assert "computes a vector of each token and does not support embeddings; use /pooling" in error["message"]


def test_maxsim_adds_the_best_similarity_of_each_token_of_the_query() -> None:
    query, document = np.eye(SIZE, dtype=np.float32)[[0, 1, 2]] * 2, np.eye(SIZE, dtype=np.float32)[[2, 0, 0, 5]]
    outputs = [EngineCoreOutput("", [], vector=each.tobytes()) for each in (query, document)]
    given = PoolingInput(prompts=[[1] * 3, [1] * 4], compared=[(0, 1), (1, 0)])
    assert scores(outputs, given, TOKENS) == [2.0, 3.0]
    assert scores(outputs, given, TOKENS, use_activation=False) == [4.0, 6.0]


async def test_a_reranker_reads_images_by_its_template(
    config: EngineConfig, core_mode: Callable[[str], None], loader: FakeLoader, sent: list[EngineCoreRequest]
) -> None:
    async with run_server(pooled(config, SCORES), chat_template=PAIRS) as server:
        documents = [
            "b",
            {"content": [{"type": "text", "text": "c"}, image()]},
            {"content": [{"type": "text", "text": "d"}]},
        ]
        answer = await post(server, "/rerank", query={"image": PNG}, documents=documents, add_special_tokens=False)
        begin = f"[query]{PICTURE}[document]"
        assert texts(server, sent) == [f"{begin}b", f"{begin}c{PICTURE}", f"{begin}d"]
        assert [len(each.media) for each in sent] == [1, 2, 1]
        assert len(answer["results"]) == 3
        assert len(loader.loaded) == 2, "the query's image is loaded once"
        error = (await post(server, "/rerank", 400, query="a", documents=documents, truncate_prompt_tokens=4))["error"]
        assert "documents[0] has" in error["message"]
        error = (await post(server, "/rerank", 400, query="a", documents=documents, max_tokens_per_doc=4))["error"]
        assert "only texts can be truncated" in error["message"]
    async with run_server(pooled(config, SCORES)) as server:
        error = (await post(server, "/score", 400, text_1="a", text_2=["b", {"image": PNG}]))["error"]
        assert (error["param"], "start the server with --chat-template" in error["message"]) == ("text_2[1]", True)


WRONG: list[tuple[str, dict[str, Any], str, str]] = [
    ("/v1/embeddings", {"messages": user(image(), image(), image(), image())}, "at most 3 images", "messages[0]"),
    ("/v1/embeddings", {"input": [{"content": [image()] * 3}, {"content": [image()] * 4}]}, "at most 3", "input[1]"),
    ("/v1/embeddings", {"input": [{"content": [{"type": "audio"}]}]}, "is not supported", "input[0].content[0].type"),
    ("/v1/embeddings", {"input": {"image": "ftp://a"}}, "expected a URL", "input.image"),
    ("/v1/embeddings", {"input": {"image": "https://missing"}}, "cannot be fetched", "input.image"),
    ("/v1/embeddings", {"input": {"title": "a"}}, "expected text, image or content", "input"),
    ("/v1/embeddings", {"messages": user(image()), "truncate_prompt_tokens": 5}, "would cut", "truncate_prompt_tokens"),
    ("/v1/embeddings", {"messages": user("a" * 200, image())}, "maximum context length", "messages"),
    ("/score", {"text_1": "a", "text_2": {"content": [image("https://missing")]}}, "cannot be", "text_2.content[0]"),
]


async def test_what_is_refused(server: Server, loader: FakeLoader) -> None:
    for route, body, message, param in WRONG:
        error = (await post(server, route, 400, **body))["error"]
        assert message in error["message"], (body, error)
        assert error["param"].startswith(param), (body, error)
    await until_released(loader)
    document = {"content": [{"type": "file", "file": {"filename": "a.pdf", "file_data": PDF}}]}
    answer = await post(server, "/v1/embeddings", input=[document, {"image": PNG}])
    assert answer["usage"]["prompt_tokens_details"] == {"image_tokens": 9}, "a document has two pages"


async def test_a_model_for_text_refuses_images(config: EngineConfig, core_mode: Callable[[str], None]) -> None:
    async with run_server(replace(pooled(config, EMBEDS), media=None)) as server:
        error = (await post(server, "/v1/embeddings", 400, input=["a", {"image": PNG}]))["error"]
        assert (error["param"], "takes only text" in error["message"]) == ("input[1].image", True)
