"""Routes beside generation: tokens, models, and the routes of clouds."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import openai
import pytest
from starlette.exceptions import HTTPException

from quire.engine.config.engine_config import EngineConfig
from quire.engine.protocol.errors import ConfigError
from quire.engine.protocol.supervision import (
    EngineFailed,
    ReplicaLost,
    ReplicaRoles,
    ReplicaStarting,
    ReplicaUp,
    Resize,
)
from quire.server.app import create_app
from quire.server.config.server_options import ServerOptions
from quire.server.http import sagemaker_vertex
from quire.server.http.errors import ApiError, describe
from quire.server.http.large_bodies import LARGE_BODY
from quire.server.http.state import AppState
from tests.fakes.api_server import Server, run_server

AS_JSON = {"Content-Type": "application/json"}
USER = [{"role": "user", "content": "hello"}]
ECHO = "user\nhello\nassistant\n"


async def post(server: Server, path: str, body: Any, status: int = 200) -> dict[str, Any]:
    response = await server.http.post(path, json=body)
    assert response.status_code == status, response.text
    answer: dict[str, Any] = response.json()
    return answer


# --- tokens and models ----------------------------------------------------------------------------------------


async def test_requests_are_as_long_as_the_smallest_kv_cache_holds(
    config: EngineConfig, core_mode: Callable[[str], None]
) -> None:
    """A replica may have measured less memory than was planned. A larger one does not make them longer."""
    blocks, size = 10, config.cache.block_size
    async with run_server(replace(config, model=replace(config.model, min_model_len=2))) as server:
        for its_length, length in (
            (1000, 128),
            (blocks * size, blocks * size),
            (1000, blocks * size),
            (0, blocks * size),
        ):
            server.frontend.update(ReplicaUp(9, 1, max_model_len=its_length))
            model, *_ = (await server.http.get("/v1/models")).json()["data"]
            assert model["max_model_len"] == length
            assert (await post(server, "/tokenize", {"prompt": "hello"}))["max_model_len"] == length
        body = {"model": "echo", "prompt": [7] * (blocks * size), "max_tokens": 1}
        error = (await post(server, "/v1/completions", body, 400))["error"]
        assert f"maximum context length is {blocks * size} tokens" in error["message"]


async def test_tokenize_a_prompt_and_back(server: Server) -> None:
    text = "hello 你好 😀<|im_end|>"
    answer = await post(server, "/tokenize", {"model": "echo", "prompt": text})
    tokens = server.tokenizer.encode(text, add_special_tokens=True)
    assert answer == {"count": len(tokens), "max_model_len": 128, "tokens": tokens, "token_strs": None}
    assert await post(server, "/detokenize", {"tokens": tokens}) == {"prompt": text}
    answer = await post(server, "/tokenize", {"prompt": "hello<|im_end|>", "return_token_strs": True})
    assert answer["token_strs"][-1] == "<|im_end|>"
    assert "".join(answer["token_strs"]) == "hello<|im_end|>"
    assert (await post(server, "/tokenize", {"prompt": ""}))["tokens"] == []
    assert await post(server, "/detokenize", {"tokens": []}) == {"prompt": ""}
    long = await post(server, "/tokenize", {"prompt": "~" * 20_000})  # longer than the model, to be counted
    assert long["count"] == 20_000


async def test_tokenize_with_and_without_special_tokens(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    encode = server.tokenizer.encode

    def spy(text: str, *, add_special_tokens: bool) -> list[int]:
        asked.append(add_special_tokens)
        return encode(text, add_special_tokens=add_special_tokens)

    monkeypatch.setattr(server.tokenizer, "encode", spy)
    for body in ({"prompt": "a"}, {"messages": USER}):
        for add in ({}, {"add_special_tokens": True}, {"add_special_tokens": False}):
            await post(server, "/tokenize", {**body, **add})
    assert asked == [True, True, False, False, True, False]


async def test_tokenize_a_chat_as_it_would_be_answered(server: Server) -> None:
    chat = await server.openai.chat.completions.create(model="echo", messages=USER)  # type: ignore[arg-type]
    answer = await post(server, "/tokenize", {"messages": USER})
    assert chat.usage is not None
    assert answer["count"] == chat.usage.prompt_tokens
    assert (await post(server, "/tokenize", {"messages": USER, "temperature": 0, "max_tokens": 5})) == answer
    bare = await post(server, "/tokenize", {"messages": USER, "add_generation_prompt": False})
    assert bare["tokens"] == answer["tokens"][: bare["count"]]
    assert 0 < bare["count"] < answer["count"]


async def test_tokenize_takes_what_says_how_a_chat_is_rendered(
    config: EngineConfig, core_mode: Callable[[str], None]
) -> None:
    template = (
        "{{ word }}{% for m in messages %}{{ m.content }}{% endfor %}{% if tools %}{{ tools | length }}{% endif %}"
        "{% if add_generation_prompt %}!{% endif %}"
    )
    async with run_server(config, trust_request_chat_template=True) as server:

        async def tokens(**options: Any) -> list[int]:
            body = {"messages": USER, "chat_template": template, **options}
            found: list[int] = (await post(server, "/tokenize", body))["tokens"]
            return found

        async def text(**options: Any) -> str:
            return str((await post(server, "/detokenize", {"tokens": await tokens(**options)}))["prompt"])

        assert await text() == "hello!"
        assert await text(chat_template_kwargs={"word": "x"}) == "xhello!"
        assert await text(add_generation_prompt=False) == await text(continue_final_message=True) == "hello"
        assert await text(tools=[{"type": "function", "function": {"name": "f"}}]) == "hello1!"
        assert await tokens(truncate_prompt_tokens=1) == (await tokens())[-1:]


WRONG: list[tuple[str, Any, str]] = [
    ("/tokenize", {}, "prompt"),
    ("/tokenize", {"prompt": "a", "messages": USER}, "prompt"),
    ("/tokenize", {"prompt": ["a"]}, "prompt"),
    ("/tokenize", {"prompt": "a", "tools": []}, "tools"),
    ("/tokenize", {"prompt": "a", "add_generation_prompt": False}, "add_generation_prompt"),
    ("/tokenize", {"messages": USER, "chat_template": "a"}, "chat_template"),
    ("/tokenize", {"messages": USER, "documents": [{"text": "a"}]}, "documents"),
    ("/tokenize", {"messages": USER, "tool_choice": "required"}, "tool_choice"),
    ("/tokenize", {"messages": []}, "messages"),
    ("/tokenize", {"messages": [{"role": 5, "content": ""}]}, "messages[0].role"),
    ("/tokenize", {"messages": [{"role": "user"}]}, "messages[0].content"),
    ("/tokenize", {"messages": USER, "no_such_parameter": 1}, "no_such_parameter"),
    ("/detokenize", {}, "tokens"),
    ("/detokenize", {"tokens": [320]}, "tokens"),
    ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
    ("/detokenize", {"tokens": ["a"]}, "tokens[0]"),
    ("/detokenize", {"tokens": [], "prompt": ""}, "prompt"),
]


async def test_what_cannot_be_tokenized(server: Server) -> None:
    for path, body, param in WRONG:
        error = (await post(server, path, body, 400))["error"]
        assert (error["type"], error["param"]) == ("invalid_request_error", param), error


async def test_the_tokenizer_describes_itself(server: Server) -> None:
    found = (await server.http.get("/tokenizer_info")).json()
    template = found.pop("chat_template")
    assert found.pop("tokenizer_class")
    assert found == {name: value for name, value in server.tokenizer.config.items() if name in found}
    assert template == server.frontend.input_processor.chat_template is not None


async def test_a_model_by_its_name(config: EngineConfig, core_mode: Callable[[str], None]) -> None:
    async with run_server(config, names=("org/model", "alias")) as server:
        for name in ("org/model", "alias"):
            assert (await server.openai.models.retrieve(name)).id == name
            listed = (await server.http.get("/v1/models")).json()["data"]
            assert (await server.http.get(f"/v1/models/{name}")).json() in listed
        for name in ("org", "org/model/", "org/model/x"):
            response = await server.http.get(f"/v1/models/{name}")
            assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")
        for path in ("/tokenize", "/detokenize"):
            body = {"model": "org", "prompt": "a"} if path == "/tokenize" else {"model": "org", "tokens": []}
            assert (await post(server, path, body, 404))["error"]["code"] == "model_not_found"


# --- health ---------------------------------------------------------------------------------------------------


async def test_readiness_says_why(config: EngineConfig, core_mode: Callable[[str], None]) -> None:
    core_mode("loading")
    async with run_server(config, wait=False) as server:
        frontend, ready = server.frontend, "/health/ready"

        async def reported() -> tuple[int, str, str]:
            response = await server.http.get(ready)
            body = response.json()
            assert response.status_code == 200 or set(body) == {"status", "reason"}
            return response.status_code, body["status"], body.get("reason", "")

        await frontend.loaded()
        assert await reported() == (503, "loading", "the model is still loading")
        frontend.update(ReplicaLost(0, "rank 1 was killed by SIGKILL", returns=True))
        assert await reported() == (503, "restarting", "replica 0 is restarting: rank 1 was killed by SIGKILL")
        frontend.update(ReplicaUp(0, incarnation=7))
        assert await reported() == (200, "ok", "")
        frontend.client._replicas[0].has_failed_probe = True
        assert await reported() == (503, "unresponsive", "replica 0 is unresponsive")
        frontend.update(ReplicaLost(0, "gone", returns=False))
        assert await reported() == (503, "dead", "replica 0 is dead: gone")
        frontend.is_draining = True
        assert await reported() == (503, "draining", "the server is shutting down")
        frontend.is_draining = False
        frontend.update(EngineFailed("the weights do not fit"))
        assert await reported() == (503, "failed", "the weights do not fit")


# --- clouds ---------------------------------------------------------------------------------------------------


async def test_ping_is_health(server: Server, config: EngineConfig, core_mode: Callable[[str], None]) -> None:
    assert (await server.http.get("/ping")).status_code == 200
    assert (await server.http.post("/ping")).status_code == 200
    core_mode("loading")
    async with run_server(config, wait=False) as loading:
        assert (await loading.http.get("/ping")).status_code == 503


async def test_head_is_get_without_a_body(server: Server) -> None:
    for path, status in (("/health", 200), ("/ping", 200), ("/v1/models", 200), ("/nothing", 404)):
        head, get = await server.http.head(path), await server.http.get(path)
        assert (head.status_code, head.content, head.headers["content-type"]) == (
            status,
            b"",
            get.headers["content-type"],
        )
    assert (await server.http.head("/v1/completions")).status_code == 405


async def test_long_names_are_not_repeated(server: Server) -> None:
    name = "m" * 60_000
    for body in ({"model": name, "prompt": "a"}, {"prompt": "a", name: 1}):
        response = await server.http.post("/v1/completions", json=body)
        assert response.status_code in (400, 404)
        assert 1000 < len(response.content) < 5000


async def test_invocations_go_where_their_fields_say(server: Server) -> None:
    chat = await post(server, "/invocations", {"messages": USER})
    assert (chat["object"], chat["choices"][0]["message"]["content"]) == ("chat.completion", ECHO)
    completion = await post(server, "/invocations", {"prompt": "hello", "max_tokens": 60})
    assert (completion["object"], completion["choices"][0]["text"]) == ("text_completion", "hello")
    text = '{"prompt": "\\ud83d\\ude00 é", "max_tokens": 60, "seed": 9007199254740993}'  # not encoded again
    response = await server.http.post("/invocations", content=text, headers={"Content-Type": "application/json"})
    assert response.json()["choices"][0]["text"] == "😀 é"
    for body, status, said in (
        ({}, 400, "`messages`, `prompt`"),
        ({"messages": []}, 400, "messages must not be empty"),
        ({"prompt": "a", "model": "other"}, 404, "other"),
        ([], 400, "body"),
    ):
        assert said in (await post(server, "/invocations", body, status))["error"]["message"]


async def test_invocations_stream_and_end_with_the_client(server: Server) -> None:
    headers = {"X-Request-Id": "mine"}
    body = {"prompt": "hello", "max_tokens": 60, "stream": True}
    response = await server.http.post("/invocations", json=body, headers=headers)
    assert response.headers.get_list("x-request-id") == ["mine"]
    assert response.text.endswith("data: [DONE]\n\n")
    events = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
    assert "".join(event["choices"][0]["text"] for event in events) == "hello"
    for stream in (False, True):
        task = asyncio.create_task(server.http.post("/invocations", json={"prompt": "a<hang>", "stream": stream}))
        while not server.frontend.client.num_open:
            await asyncio.sleep(0.001)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        while server.frontend.client.num_open:
            await asyncio.sleep(0.001)


async def test_vertex(config: EngineConfig, core_mode: Callable[[str], None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIP_HEALTH_ROUTE", "/alive")
    monkeypatch.setenv("AIP_PREDICT_ROUTE", "/predict")
    async with run_server(config, api_key="k") as server:
        assert (await server.http.get("/alive")).status_code == 200
        assert (await server.http.post("/predict", json={"instances": [{"prompt": "a"}]})).status_code == 401
        server.http.headers["Authorization"] = "Bearer k"
        instances = [{"prompt": "hello"}, {"messages": USER}, {"prompt": "world", "max_tokens": 1}]
        body = {"instances": instances, "parameters": {"max_tokens": 60}}
        first, second, third = (await post(server, "/predict", body))["predictions"]
        assert first["choices"][0]["text"] == "hello"
        assert second["choices"][0]["message"]["content"] == ECHO
        assert third["usage"]["completion_tokens"] == 1
        assert (await post(server, "/predict", {"prompt": "hello"}))["choices"][0]["text"] == "hello"
        for wrong, param in (
            ({"instances": []}, "instances"),
            ({"instances": {"prompt": "a"}}, "instances"),
            ({"instances": [{"prompt": "a"}] * (sagemaker_vertex.MAX_INSTANCES + 1)}, "instances"),
            ({"instances": [{"prompt": "a"}, 1]}, "instances[1]"),
            ({"instances": [{"prompt": "a", "stream": True}]}, "instances[0]"),
            ({"instances": [{"prompt": "a"}], "parameters": []}, "parameters"),
            ({"instances": [{"prompt": "a"}] * 1024, "parameters": {"user": "x" * 2**16}}, "parameters"),
            ({"instances": [{"prompt": "a"}, {"prompt": "b", "top_p": 2}]}, "top_p"),
        ):
            assert (await post(server, "/predict", wrong, 400))["error"]["param"] == param
        assert (
            "instances[1]: expected one of"
            in (await post(server, "/predict", {"instances": [{"prompt": "a"}, {}]}, 400))["error"]["message"]
        )
        task = asyncio.create_task(server.http.post("/predict", json={"instances": [{"prompt": "a<hang>"}] * 3}))
        while server.frontend.client.num_open < 3:
            await asyncio.sleep(0.001)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        while server.frontend.client.num_open:
            await asyncio.sleep(0.001)


async def test_vertex_may_name_routes_that_are_there(
    config: EngineConfig, core_mode: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AIP_HEALTH_ROUTE", "/v1/models")
    monkeypatch.setenv("AIP_PREDICT_ROUTE", "/v1/chat/completions")
    async with run_server(config, api_key="k") as server:
        assert (await server.http.get("/v1/models")).status_code == 401  # it is no health route
        with pytest.raises(openai.BadRequestError, match="instances"):
            await server.openai.chat.completions.create(model="echo", messages=[], extra_body={"instances": []})
    for name in ("AIP_HEALTH_ROUTE", "AIP_PREDICT_ROUTE"):
        monkeypatch.setenv(name, "predict")
        with pytest.raises(ConfigError, match=f"{name}=predict"):
            create_app(AppState(server.frontend, ("echo",)), ServerOptions())
        monkeypatch.delenv(name)


# --- replicas -------------------------------------------------------------------------------------------------


async def test_the_replicas_are_listed(server: Server) -> None:
    assert (await server.http.get("/replicas")).json() == {
        "data_parallel_size": 1,
        "replicas": [
            {
                "index": 0,
                "host": "localhost",
                "role": "any",
                "state": "up",
                "num_requests_running": 0,
                "num_requests_waiting": 0,
                "reason": None,
                "last_death": None,
                "tensor_parallel_size": 1,
                "prefill_context_parallel_size": 1,
                "stages": [[0, 5]],
            }
        ],
    }


async def test_their_number_is_changed_with_an_admin_key_only(
    config: EngineConfig, core_mode: Callable[[str], None], server: Server
) -> None:
    refused = await post(server, "/replicas", {"data_parallel_size": 2}, 403)
    assert "start it with --admin-key or QUIRE_ADMIN_KEY" in refused["error"]["message"]
    asked: list[Resize] = []

    async def resize(wanted: Resize) -> None:
        if max(wanted.count or 0, wanted.decode or 0) > 2:
            raise ConfigError("replica 2 needs 1 more GPU")
        asked.append(wanted)
        running.frontend.client.update(ReplicaRoles({1: "decode"}))
        running.frontend.client.update(ReplicaStarting(1, "tcp://10.0.0.2:1"))

    async with run_server(config, admin_key=("secret",), shutdown_timeout=7.0) as running:
        body: dict[str, Any] = {"data_parallel_size": 2}
        assert (await running.http.post("/replicas", json=body)).status_code == 401
        running.http.headers["Authorization"] = "Bearer secret"
        assert "has a fixed number" in (await post(running, "/replicas", body, 400))["error"]["message"]
        running.frontend.ask_resize = resize
        answer = await post(running, "/replicas", body, 202)
        assert answer["data_parallel_size"] == 2
        assert [(each["host"], each["state"], each["role"]) for each in answer["replicas"]] == [
            ("localhost", "up", "any"),
            ("10.0.0.2", "loading", "decode"),
        ]
        await post(running, "/replicas", {**body, "drain_timeout_seconds": 0}, 202)
        await post(running, "/replicas", {"prefill_replicas": 1, "decode_replicas": 1}, 202)
        await post(running, "/replicas", {"prefill_replicas": 0}, 202)
        assert asked == [Resize(2, 7.0), Resize(2, 0.0), Resize(None, 7.0, 1, 1), Resize(None, 7.0, 0)]
        for name, number in (("prefill_replicas", -1), ("decode_replicas", 0), ("decode_replicas", 1025)):
            refused = await post(running, "/replicas", {name: number}, 400)
            assert refused["error"]["param"] == name
        for names in (["data_parallel_size"], ["decode_replicas"], ["prefill_replicas", "decode_replicas"]):
            refused = (await post(running, "/replicas", dict.fromkeys(names, 3), 400))["error"]
            assert (refused["message"], refused["param"]) == ("replica 2 needs 1 more GPU", names[0])
        for wrong in ({"data_parallel_size": size} for size in (0, -1, 1025, 10**30, 1.5, "2", True, None)):
            refused = await post(running, "/replicas", wrong, 400)
            assert refused["error"]["param"] == "data_parallel_size"
        for seconds in (-1, 1e9, "1"):
            refused = await post(running, "/replicas", {**body, "drain_timeout_seconds": seconds}, 400)
            assert refused["error"]["param"] == "drain_timeout_seconds"
        running.frontend.is_draining = True
        assert "shutting down" in (await post(running, "/replicas", body, 503))["error"]["message"]


@pytest.mark.parametrize(
    ("status", "kind"),
    [(400, "invalid_request_error"), (401, "invalid_request_error"), (404, "invalid_request_error"),
     (413, "invalid_request_error"), (429, "rate_limit_error"), (500, "server_error"), (503, "server_error")],
)  # fmt: skip
def test_the_type_of_an_error_follows_its_status(status: int, kind: str) -> None:
    """OpenAI's types. A rejected key is an invalid request there, too."""
    for error in (ApiError(status, "no", "some_code"), HTTPException(status, "no")):
        found, body = describe(error)
        assert (found, body["error"]["type"]) == (status, kind)


async def test_a_body_of_another_type_is_refused_with_the_header_to_send(server: Server) -> None:
    """On every route that has a body."""
    paths = (await server.http.get("/openapi.json")).json()["paths"]
    routes = [path for path, methods in paths.items() if "requestBody" in methods.get("post", {})]
    assert len(routes) > 15
    for path in routes:
        headers = {"Content-Type": "application/x-www-form-urlencoded"}
        response = await server.http.post(path, content=b'{"model": "m"}', headers=headers)
        assert response.status_code == 415, path
        assert "send the header Content-Type: application/json" in response.text, path
    body = json.dumps({"prompt": "hello", "max_tokens": 1}).encode()
    response = await server.http.post("/v1/completions", content=body)
    assert response.status_code == 415
    assert "it has no type; send the header Content-Type: application/json" in response.text
    for kind, status in (
        ("application/x-www-form-urlencoded", 415),  # of `curl -d`
        ("text/plain", 415),
        ("application/json; charset=utf-8", 200),
        ("application/vnd.api+json", 200),
    ):
        response = await server.http.post("/v1/completions", content=body, headers={"Content-Type": kind})
        assert response.status_code == status
        if status == 415:
            error = response.json()["error"]
            assert error["code"] == "unsupported_media_type"
            assert f"{kind}; send the header Content-Type: application/json" in error["message"]


@pytest.mark.parametrize("padding", [0, LARGE_BODY])
@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (b'"\xff"', "byte {at} is not UTF-8"),
        (b"[" * 5000 + b"]" * 5000, "it is nested too deeply"),
        (b"1" * 5000, "it has an integer of more than 4300 digits"),
        (b"1,", "Expecting property name enclosed in double quotes"),
    ],
)
async def test_a_body_that_cannot_be_read_is_refused_with_the_reason(
    server: Server, value: bytes, problem: str, padding: int
) -> None:
    """Also if another process reads it, because it is large."""
    start = b'{"prompt": "%s", "max_tokens": ' % (b"a" * padding)
    response = await server.http.post("/v1/completions", content=start + value + b"}", headers=AS_JSON)
    assert response.status_code == 400
    reason = problem.format(at=len(start) + 1)
    assert response.json()["error"]["message"] == f"the body cannot be read as JSON: {reason}"


@pytest.mark.parametrize("size", [10, LARGE_BODY])
async def test_a_compressed_body_is_refused_as_such(server: Server, size: int) -> None:
    body = gzip.compress(b"a" * size, 0)
    response = await server.http.post("/v1/completions", content=body, headers=AS_JSON)
    assert response.status_code == 400
    assert "cannot be read as JSON: it is compressed with gzip" in response.text
    headers = AS_JSON | {"Content-Encoding": "gzip"}
    response = await server.http.post("/v1/messages", content=body, headers=headers)
    assert response.status_code == 415
    assert "it is compressed (gzip); send it as it is" in response.json()["error"]["message"]


async def test_the_document_says_that_metrics_are_text(server: Server) -> None:
    document = (await server.http.get("/openapi.json")).json()
    assert [*document["paths"]["/metrics"]["get"]["responses"]["200"]["content"]] == ["text/plain"]
    assert (await server.http.get("/metrics")).headers["content-type"].startswith("text/plain")
