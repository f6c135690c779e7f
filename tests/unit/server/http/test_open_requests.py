"""`/ui/requests`: the unfinished requests of all API processes, and their abort."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import httpx
import pytest

from quire.engine.config.engine_config import EngineConfig
from quire.engine.protocol.engine_core import AbortRequests, EngineCoreRequest
from quire.engine.protocol.sampling_params import SamplingParams
from quire.engine.protocol.supervision import ReplicaLost
from quire.server.serving import open_requests
from tests.fakes import fake_core
from tests.fakes.api_server import Server, run_server

COMPLETIONS = "/v1/completions"
HANG = {"prompt": "a<hang>", "request_id": "mine"}
BODIES: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "<hang>"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "<hang>"}]},
    "/v1/messages": {"model": "echo", "messages": [{"role": "user", "content": "<hang>"}], "max_tokens": 9},
    "/v1/responses": {"input": "<hang>"},
}


async def listed(server: Server, count: int, **headers: str) -> dict[str, dict[str, Any]]:
    """The requests by id, once there are `count`; otherwise the test hangs."""
    while True:
        answer = (await server.http.get("/ui/requests", headers=headers)).json()
        if answer["total"] == count:
            return {each["id"]: each for each in answer["requests"]}
        await asyncio.sleep(0.005)


Ask = Callable[[Coroutine[Any, Any, httpx.Response]], asyncio.Task[httpx.Response]]


@pytest.fixture
async def ask() -> AsyncIterator[Ask]:
    """Starts requests that are cancelled at the end."""
    tasks: list[asyncio.Task[httpx.Response]] = []

    def start(request: Coroutine[Any, Any, httpx.Response]) -> asyncio.Task[httpx.Response]:
        tasks.append(asyncio.create_task(request))
        return tasks[-1]

    yield start
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_requests_of_all_processes_are_listed_the_oldest_first(server: Server, ask: Ask) -> None:
    ask(server.http.post(COMPLETIONS, json={**HANG, "n": 2}))
    await listed(server, 2)
    others = EngineCoreRequest(0, "cmpl-x-1-0-a1f@3", [9, fake_core.HANG], SamplingParams(), label="bob", arrived=1.0)

    server.frontend.client._send(others, 0)
    found = await listed(server, 3)
    assert list(found) == ["cmpl-x-1", "cmpl-mine", "cmpl-mine#1"]
    assert found["cmpl-x-1"].pop("age") == pytest.approx(time.monotonic() - 1.0, abs=60)
    assert found["cmpl-x-1"] == {
        "id": "cmpl-x-1",
        "handle": "3-a1f",
        "key": "bob",
        "replica": 0,
        "phase": "prefill",
        "api": 3,
        "adapter": None,
        "prompt_tokens": 2,
        "cached_tokens": 0,
        "output_tokens": 0,
        "max_tokens": None,
    }
    assert 0 <= found["cmpl-mine"]["age"] < 60
    assert (found["cmpl-mine"]["key"], found["cmpl-mine"]["api"]) == (None, 0)
    assert found["cmpl-mine"]["handle"] == found["cmpl-mine#1"]["handle"]


async def test_beams_have_the_id_of_the_search(server: Server, ask: Ask) -> None:
    search = ask(server.http.post(COMPLETIONS, json={**HANG, "use_beam_search": True, "n": 2}))
    (found,) = (await listed(server, 1)).values()
    assert found["id"] == "cmpl-mine"
    assert (await server.http.delete(f"/ui/requests/{found['handle']}")).status_code == 204
    assert (await search).json()["error"]["code"] == "request_aborted"


@pytest.mark.parametrize("where", ["here", "at the core"])
@pytest.mark.parametrize("path", BODIES)
async def test_clients_of_aborted_requests_get_an_error(server: Server, ask: Ask, path: str, where: str) -> None:
    stream, whole = (ask(server.http.post(path, json={**BODIES[path], "stream": stream})) for stream in (True, False))
    for name, each in (await listed(server, 2)).items():
        if where == "here":
            assert (await server.http.delete(f"/ui/requests/{each['handle']}")).status_code == 204
        else:  # as the other processes see it
            ids = [each for each in server.frontend.client._running if each.startswith(name)]
            server.frontend.client._send(AbortRequests(ids), 0)
    answer = await whole
    assert (answer.status_code, answer.headers["x-should-retry"]) == (500, "false")
    assert answer.json()["error"]["message"] == "the request was aborted"
    events = [json.loads(line[6:]) for line in (await stream).text.splitlines() if line.startswith("data: {")]
    last = [event for event in events if "error" in event or event.get("type") == "response.failed"]
    assert last == events[-1:]
    error = last[0]["response"]["error"] if path == "/v1/responses" else last[0]["error"]
    assert error["message"] == "the request was aborted"
    assert await listed(server, 0) == {}
    metrics = server.frontend.metrics
    assert metrics.totals("finished", [0])[2] == 2
    assert 'quire:http_requests_failed_total{model_name="echo",reason="aborted"} 2.0' in metrics.exposition().decode()


async def test_an_abort_ends_no_other_request_with_the_same_id(server: Server) -> None:
    for name in (
        "cmpl-a-0-1@7",
        "cmpl-a-1-1@7",
        "cmpl-a-0-1@8",
        "cmpl-a#1-0-2@7",
        "cmpl-a-0-1@7-0-3@7",
        "cmpl-a 5-0-6@8",
    ):
        server.frontend.client._send(EngineCoreRequest(0, name, [9, fake_core.HANG], SamplingParams()), 0)

    async def handles() -> list[str]:
        found = (await server.http.get("/ui/requests")).json()["requests"]
        return [f"{each['id']} {each['handle']}" for each in found]

    await listed(server, 6)
    others = ["cmpl-a 8-1", "cmpl-a#1 7-2", "cmpl-a-0-1@7 7-3", "cmpl-a 8-5"]
    assert await handles() == ["cmpl-a 7-1", "cmpl-a#1 7-1", *others]
    assert (await server.http.delete("/ui/requests/7-1")).status_code == 204
    await listed(server, 4)
    assert await handles() == others
    for handle in ("7-1", "7", "cmpl-a", "cmpl-a%231", "%25", "8-1-"):
        answer = await server.http.delete(f"/ui/requests/{handle}")
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "request_not_found")


async def test_a_replica_that_does_not_answer_delays_nobody(
    server: Server, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("LIST_SECONDS", "ABORT_SECONDS"):
        monkeypatch.setattr(open_requests, name, 0.02)
    asked = ask(server.http.post(COMPLETIONS, json={"prompt": "<mute><hang>", "request_id": "mine"}))
    while not server.frontend.client.num_open:
        await asyncio.sleep(0.005)
    listing = (await server.http.get("/ui/requests")).json()
    while not listing["silent"]:
        listing = (await server.http.get("/ui/requests")).json()
    (found,) = listing["requests"]
    assert (found["id"], found["replica"], found["phase"], listing["total"]) == ("cmpl-mine", 0, "waiting", 1)
    answer = await server.http.delete("/ui/requests/7-1")
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_unavailable")
    server.frontend.update(ReplicaLost(0, "killed", returns=True))
    found = (await listed(server, 1))["cmpl-mine"]
    assert (found["replica"], found["phase"]) == (None, "queued")
    assert (await server.http.delete(f"/ui/requests/{found['handle']}")).status_code == 204
    assert (await asked).json()["error"]["code"] == "request_aborted"


async def test_an_abort_needs_an_admin_key_and_is_logged(
    config: EngineConfig,
    core_mode: Callable[[str], None],
    ask: Ask,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:
    (tmp_path / "keys").write_text("alice:api\nbob:other\nops:admin role=admin\nprom:metrics role=metrics\n")
    async with run_server(config, api_key_file=str(tmp_path / "keys")) as server:

        def key(name: str) -> dict[str, str]:
            return {"Authorization": f"Bearer {name}"}

        asked = ask(server.http.post(COMPLETIONS, json=HANG, headers=key("api")))
        (found,) = (await listed(server, 1, **key("api"))).values()
        assert (found["id"], found["key"]) == ("cmpl-mine", "alice")
        handle = found["handle"]
        for name, status in (("none", 401), ("metrics", 403)):
            for path in ("/ui/requests", "/ui/state", "/ui/history"):
                expected = 200 if name == "metrics" and path != "/ui/requests" else status
                assert (await server.http.get(path, headers=key(name))).status_code == expected
        assert await listed(server, 0, **key("other")) == {}
        assert list(await listed(server, 1, **key("admin"))) == ["cmpl-mine"]
        with caplog.at_level(logging.INFO, "quire"):
            for name, status in (("none", 401), ("metrics", 403), ("api", 403), ("admin", 204)):
                answer = await server.http.delete(f"/ui/requests/{handle}", headers=key(name))
                assert answer.status_code == status
                state = await server.http.get("/ui/state", headers=key(name))
                if name != "none":
                    found = state.json()
                    assert (found["role"], found["can_abort"]) == (name, name == "admin")
        assert (await asked).status_code == 500
    lines = [record.getMessage() for record in caplog.records if "aborted" in record.getMessage()]
    assert lines == ["request cmpl-mine of the key alice was aborted by the key ops"]


async def test_clients_without_keys_do_not_see_each_other(
    config: EngineConfig, core_mode: Callable[[str], None], ask: Ask
) -> None:
    async with run_server(config, admin_key=("admin",)) as server:
        ask(server.http.post(COMPLETIONS, json=HANG))
        assert await listed(server, 1) == {}
        assert (await server.http.get("/ui/state")).json()["has_admin_key"]
        assert list(await listed(server, 1, Authorization="Bearer admin")) == ["cmpl-mine"]


async def test_without_keys_only_local_clients_list_and_abort(server: Server, ask: Ask) -> None:
    ask(server.http.post(COMPLETIONS, json=HANG))
    handle = (await listed(server, 1))["cmpl-mine"]["handle"]
    own = str(server.http.base_url).rstrip("/")
    for headers, status in (
        ({"Origin": "http://evil.example"}, 403),
        ({"X-Forwarded-For": "127.0.0.1"}, 403),
        ({"Origin": own}, 204),
    ):
        state = (await server.http.get("/ui/state", headers=headers)).json()
        assert state["can_abort"] == (status == 204)
        assert len(await listed(server, 1, **headers)) == (status == 204), "whoever has the id can read the response"
        assert (await server.http.delete(f"/ui/requests/{handle}", headers=headers)).status_code == status


async def test_a_line_of_the_access_log_has_the_id(
    config: EngineConfig, core_mode: Callable[[str], None], caplog: pytest.LogCaptureFixture
) -> None:
    async with run_server(config, access_log=True) as server:
        with caplog.at_level(logging.INFO):
            answer = await server.http.post(COMPLETIONS, json={"prompt": "hello", "max_tokens": 1})
    (line,) = [record.getMessage() for record in caplog.records if "route=" in record.getMessage()]
    assert f" response_id={answer.json()['id']} " in line
