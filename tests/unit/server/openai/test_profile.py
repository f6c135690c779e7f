"""`/start_profile`, `/stop_profile`, and `quire profile`, against a fake core."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
from pathlib import Path
from typing import Any

import httpx
import pytest

from quire.engine.config.engine_config import EngineConfig
from quire.engine.protocol.errors import ConfigError
from quire.server.app import create_app
from quire.server.cli import main
from quire.server.config.server_options import ServerOptions
from tests.fakes.api_server import Server, run_server

pytestmark = pytest.mark.usefixtures("core_mode")
KEY = {"Authorization": "Bearer secret"}


def processes(trace: bytes) -> list[str]:
    """The names of the processes in a trace; each has an event."""
    document: dict[str, Any] = json.loads(gzip.decompress(trace))
    events = document["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert {event["pid"] for event in events if event["ph"] == "X"} == set(names)
    assert [each["name"] for each in document["otherData"]["processes"]] == list(names.values())
    return list(names.values())


async def quire(*arguments: str) -> int:
    return await asyncio.to_thread(main.main, arguments)


async def test_a_profile_is_started_stopped_and_sent(config: EngineConfig) -> None:
    async with run_server(config, admin_key=("secret",)) as server:
        server.http.headers.update(KEY)
        refused = await server.http.post("/stop_profile")
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "profile_conflict")
        assert (await server.http.post("/start_profile")).json() == {"seconds": 60.0}
        assert (await server.http.post("/start_profile", json={"seconds": 1})).status_code == 409
        answer = await server.http.post("/stop_profile")
        assert (answer.status_code, answer.headers["content-type"]) == (200, "application/gzip")
        assert processes(answer.content) == ["replica 0, rank -1", "replica 0, rank 0"]
        assert (await server.http.post("/stop_profile")).status_code == 409
        for wrong in ({"seconds": 0}, {"seconds": 61}, {"seconds": "1"}, {"with_stack": 1}):
            refused = await server.http.post("/start_profile", json=wrong)
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, next(iter(wrong)))


async def test_the_test_request_of_vllm_bench_starts_a_profile(config: EngineConfig) -> None:
    body = {"model": "echo", "prompt": "Hi", "repetition_penalty": 1.0, "max_tokens": 16, "logprobs": None}
    more = {"stream": True, "stream_options": {"include_usage": True}, "temperature": 0.0}
    async with run_server(config, admin_key=("secret",)) as server:
        server.http.headers.update(KEY)
        assert (await server.http.post("/start_profile", json=body | more)).json() == {"seconds": 60.0}
    async with run_server(config, admin_key=("secret",), strict_parameters=True) as server:
        refused = await server.http.post("/start_profile", json=body | more, headers=KEY)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "max_tokens")


@pytest.mark.parametrize(
    ("client", "header", "status"),
    [
        ("127.0.0.1", {}, 200),
        ("127.1.2.3", {}, 200),
        ("::1", {}, 200),
        ("::ffff:127.0.0.1", {}, 200),
        (None, {}, 200),
        ("10.0.0.7", {}, 403),
        ("fe80::1%eth0", {}, 403),
        ("::ffff:10.0.0.7", {}, 403),
        ("127.0.0.1", {"Origin": "http://evil.example"}, 403),
        ("127.0.0.1", {"Origin": "null"}, 403),
        ("127.0.0.1", {"X-Forwarded-For": "127.0.0.1"}, 403),
        ("127.0.0.1", {"Forwarded": "for=127.0.0.1"}, 403),
    ],
)
async def test_without_keys_only_programs_on_the_host_may_profile(
    client: str | None, header: dict[str, str], status: int, config: EngineConfig, tmp_path: Path
) -> None:
    async with run_server(config, torch_profiler_dir=str(tmp_path)) as server:
        app = create_app(server.state, ServerOptions(torch_profiler_dir=str(tmp_path)))

        async def from_client(scope: Any, receive: Any, send: Any) -> None:
            await app({**scope, "client": client and (client, 1)}, receive, send)

        async with httpx.AsyncClient(transport=httpx.ASGITransport(from_client), base_url="http://localhost") as http:
            for path in ("/start_profile", "/stop_profile"):
                answer = await http.post(path, headers={"Content-Type": "text/plain"} | header)
                assert answer.status_code == status
                assert (status == 403) == ("web pages" in answer.text)
    assert bool(list(tmp_path.iterdir())) == (status == 200)


async def test_who_may_profile(config: EngineConfig, server: Server, tmp_path: Path) -> None:
    for path in ("/start_profile", "/stop_profile"):
        refused = await server.http.post(path)
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "admin_key_required")
        assert "--torch-profiler-dir" in refused.json()["error"]["message"]
    async with run_server(config, torch_profiler_dir=str(tmp_path)) as running:
        await running.http.post("/start_profile")
        answer = (await running.http.post("/stop_profile")).json()
        assert (answer["events"], answer["cut_off"]) == (2, False)
        assert [str(path) for path in tmp_path.iterdir()] == [answer["path"]]
        assert len(processes(Path(answer["path"]).read_bytes())) == 2
        assert (await running.http.post("/stop_profile")).status_code == 409
        os.rename(tmp_path, moved := tmp_path.with_name("moved"))
        await running.http.post("/start_profile")
        failed = await running.http.post("/stop_profile")
        assert failed.status_code == 500
        assert f"cannot be written to {tmp_path}" in failed.json()["error"]["message"]
        os.rename(moved, tmp_path)
        assert (await running.http.post("/stop_profile")).status_code == 200, "the trace is still there"


async def test_the_command(config: EngineConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with run_server(config, admin_key=("secret",)) as server:
        output, url = str(tmp_path / "trace.json.gz"), ("--url", str(server.http.base_url))
        short = ("profile", "--seconds", "0.01", "-o", output)
        assert await quire(*short, *url, "--api-key", "secret", "--record-shapes") == 0
        assert "open it at https://ui.perfetto.dev" in capsys.readouterr().out
        assert len(processes(Path(output).read_bytes())) == 2
        assert os.listdir(tmp_path) == ["trace.json.gz"]
        for arguments, error in (
            ((*short, *url, "--api-key", "wrong"), "variable QUIRE_ADMIN_KEY"),
            ((*short, *url, "--api-key", "secret", "--seconds", "61"), "--seconds 61: "),
            ((*short, *url, "--seconds", "nan"), "--seconds nan: "),
            ((*short, *url, "--seconds", "0"), "--seconds 0: "),
            ((*short, "--url", "http://127.0.0.1:1"), "no server answers"),
            (("profile", "-o", str(tmp_path / "none" / "trace"), *url), "--output"),
        ):
            assert await quire(*arguments) == 2
            assert error in capsys.readouterr().err
    async with run_server(config, torch_profiler_dir=str(tmp_path)) as server:
        assert await quire(*short, "--url", str(server.http.base_url)) == 0
        assert f"the server has written {tmp_path}" in capsys.readouterr().out


def test_the_folder_is_made(tmp_path: Path) -> None:
    ServerOptions(torch_profiler_dir=str(tmp_path / "a" / "b")).check()
    assert (tmp_path / "a" / "b").is_dir()
    (tmp_path / "program").touch(0o700)
    with pytest.raises(ConfigError, match="not a folder that can be written to"):
        ServerOptions(torch_profiler_dir=str(tmp_path / "program")).check()


async def test_the_path_is_absolute(config: EngineConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    async with run_server(config, torch_profiler_dir=".") as server:
        await server.http.post("/start_profile")
        path = (await server.http.post("/stop_profile")).json()["path"]
    assert [str(each) for each in tmp_path.iterdir()] == [path]
