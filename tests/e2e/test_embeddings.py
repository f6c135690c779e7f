"""Real weights of all-MiniLM-L6-v2, served: the vectors equal transformers' with mean pooling and normalization."""

from __future__ import annotations

import base64
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import numpy.typing as npt
import openai
import pytest
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from transformers import Gemma3TextConfig, Gemma3TextModel

from quire import LLM
from tests.e2e.serving import Server, quire, serve
from tests.e2e.test_openai import metric
from tests.fakes.sentence import dense, hidden_states, minilm, pooled, write_modules
from tests.fakes.tokenizers import byte_level

TEXTS = [
    "A man is eating food.",
    "A man is eating a piece of bread.",
    "The girl is carrying a baby.",
    "x",
    "Two men pushed carts through the woods. " * 12,
    "ein Satz auf Deutsch, 中文 und 😀",
    "word " * 250,
]
Vectors = npt.NDArray[np.float64]


@pytest.fixture(scope="module")
def token_ids() -> list[list[int]]:
    tokenizer = Tokenizer.from_file(str(minilm() / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    ids = [tokenizer.encode(text).ids for text in TEXTS]
    assert max(map(len, ids)) in range(250, 257)
    return ids


@pytest.fixture(scope="module")
def expected(token_ids: list[list[int]]) -> Vectors:
    states = hidden_states(minilm(), token_ids)
    return np.array([F.normalize(pooled("mean", x), dim=0).tolist() for x in states])


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serve(str(minilm()), "--api-server-count", "2", "--api-key", "secret") as server:
        yield server


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="secret", max_retries=0) as client:
        yield client


def check(vectors: Any, expected: Vectors) -> None:
    assert np.abs(np.array(vectors) - expected).max() < 1e-5


def test_vectors_are_those_of_transformers(
    client: openai.OpenAI, expected: Vectors, token_ids: list[list[int]]
) -> None:
    model: Any = {"model": str(minilm())}
    for given in (TEXTS, token_ids):
        answer = client.embeddings.create(input=given, **model)  # the client asks for base64
        check([entry.embedding for entry in answer.data], expected)
        assert [entry.index for entry in answer.data] == list(range(len(TEXTS)))
        assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(map(len, token_ids))
    answer = client.embeddings.create(input=TEXTS[::-1], encoding_format="float", **model)
    check([entry.embedding for entry in answer.data], expected[::-1])
    raw = client.embeddings.with_raw_response.create(input=TEXTS, encoding_format="base64", **model)
    strings = [entry["embedding"] for entry in json.loads(raw.content)["data"]]
    check([np.frombuffer(base64.b64decode(text), "<f4") for text in strings], expected)
    for text, right in zip(TEXTS, expected, strict=True):  # the same alone and in a batch
        check(client.embeddings.create(input=text, **model).data[0].embedding, right)


def test_like_texts_have_like_vectors(client: openai.OpenAI) -> None:
    answer = client.embeddings.create(input=TEXTS[:3], model=str(minilm()))
    man, bread, girl = (np.array(entry.embedding) for entry in answer.data)
    assert man @ bread > 0.7 > 0.3 > man @ girl


def test_limits_and_what_it_does_not_do(server: Server, client: openai.OpenAI) -> None:
    model: Any = {"model": str(minilm())}
    with pytest.raises(openai.BadRequestError, match=r"256 tokens, but input\[1\] has 302") as caught:
        client.embeddings.create(input=["a", "word " * 300], **model)
    assert caught.value.code == "context_length_exceeded"
    cut = client.embeddings.create(input="word " * 300, extra_body={"truncate_prompt_tokens": -1}, **model)
    assert cut.usage.prompt_tokens == 256
    with pytest.raises(openai.BadRequestError, match="Matryoshka") as caught:
        client.embeddings.create(input="a", dimensions=100, **model)
    assert caught.value.param == "dimensions"
    with pytest.raises(openai.BadRequestError, match="/v1/embeddings"):
        client.chat.completions.create(messages=[{"role": "user", "content": "hi"}], **model)
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="guess").embeddings.create(input="a", **model)
    assert httpx.get(f"{server.url}/health").json() == {"status": "ok"}
    plan = "".join(server.lines)
    assert "embeds prompts of up to 256 tokens (--runner pooling): mean pooling, normalize: 384 numbers" in plan
    assert "no KV cache" in plan
    assert metric(server, "quire:generation_tokens_total") == 0
    assert metric(server, "quire:prompt_tokens_total") > 0
    assert not [line for line in server.lines if ("WARNING" in line or "ERROR" in line) and "ps has shown" not in line]


@pytest.mark.slow
def test_embedding_gemma_as_it_is_published(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"vocab_size": 320, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3}
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 16}
    kinds: dict[str, Any] = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"] * 2}
    kinds["layer_types"].pop()
    torch.manual_seed(0)
    config = Gemma3TextConfig(
        **sizes, **heads, **kinds, use_bidirectional_attention=True, query_pre_attn_scalar=16, initializer_range=0.2
    )
    Gemma3TextModel(config).save_pretrained(tmp_path)
    tokenizer = byte_level()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    modules = [dense(48, 96, bias=False, activation="Identity"), dense(96, 48, bias=False, activation="Identity")]
    prompts = {"query": "task: search result | query: ", "document": "title: none | text: "}
    write_modules(tmp_path, "mean", *modules, {}, prompts=prompts, max_seq_length=2048)
    given = [tokenizer.encode(prompts["query"] + text).ids for text in TEXTS]
    expected = []
    for x in hidden_states(tmp_path, given):
        vector = pooled("mean", x)
        for module in modules:
            vector = module["weights"]["linear.weight"] @ vector
        expected.append(F.normalize(vector, dim=0).tolist())
    with (
        serve(str(tmp_path), "--dtype", "float32", "-tp", "2") as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        body = {"prompt_name": "query"}
        answer = client.embeddings.create(input=TEXTS, model=str(tmp_path), extra_body=body)
        check([entry.embedding for entry in answer.data], np.array(expected))
        plan = "".join(server.lines)
        assert "mean pooling, dense to 96, dense to 48, normalize: 48 numbers" in plan
        assert "no KV cache" in plan


@pytest.mark.slow
def test_the_python_api_in_another_layout(expected: Vectors) -> None:
    with LLM(str(minilm()), dtype="float32", tensor_parallel_size=2, max_num_seqs=2) as llm:
        results = llm.embed(TEXTS, use_tqdm=False)
        check([result.outputs.embedding for result in results], expected)


@pytest.mark.slow
def test_a_file_of_requests(tmp_path: Path, expected: Vectors) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    with source.open("w") as file:
        for number, text in enumerate(TEXTS):
            request = {"custom_id": str(number), "method": "POST", "url": "/v1/embeddings", "body": {"input": text}}
            file.write(json.dumps(request) + "\n")
    command = quire("run-batch", "-i", str(source), "-o", str(target), str(minilm()))
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    for record in map(json.loads, target.read_text().splitlines()):
        vector = record["response"]["body"]["data"][0]["embedding"]
        check(vector, expected[int(record["custom_id"])])
