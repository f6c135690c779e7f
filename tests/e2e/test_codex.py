"""OpenAI's Codex CLI against a live server of the demo model, with a tool of an MCP server, over two turns.

The demo model cannot follow Codex's prompt. So a proxy forces its answers: the call of the tool, and a text after the
result. Codex comes from the npm registry, and is kept in ~/.cache/quire/clients.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.environments import made_once, run
from tests.e2e.serving import serve

VERSION = "0.171.0"
ANSWER = "It is sunny."
WEATHER = {"type": "function", "namespace": "mcp__weather", "name": "get_weather"}
FORMAT = {"type": "json_schema", "name": "answer", "schema": {"const": ANSWER}}
CONFIG = """\
model = "quire-demo"
model_provider = "quire"
approval_policy = "never"
sandbox_mode = "danger-full-access"
[model_providers.quire]
name = "quire"
base_url = "{url}/v1"
wire_api = "responses"
env_key = "QUIRE_KEY"
[mcp_servers.weather]
command = "{python}"
args = ["{server}"]
"""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def install(folder: Path) -> None:
    command = ["npm", "install", "--silent", "--prefix", str(folder), f"@openai/codex@{VERSION}"]
    run(command, "Codex cannot be installed; this test needs npm and its registry")


@pytest.fixture(scope="module")
def codex() -> Path:
    return made_once("codex", VERSION, make=install) / "node_modules/.bin/codex"


class Door(ThreadingHTTPServer):
    """A proxy that forces the answer of each turn, and keeps the requests."""

    def __init__(self, url: str) -> None:
        self.requests: list[dict[str, Any]] = []

        class Handler(BaseHTTPRequestHandler):
            server: Door

            def log_message(self, *_: object) -> None:
                pass

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                self.server.requests.append(dict(body))
                if any(item["type"] == "function_call_output" for item in body["input"]):
                    body |= {"tool_choice": "none", "text": {"format": FORMAT}}
                else:
                    body["tool_choice"] = WEATHER
                headers = {"Authorization": self.headers["Authorization"]}
                there = httpx.post(f"{url}{self.path}", json=body, headers=headers, timeout=120)
                self.send_response(there.status_code)
                self.send_header("Content-Type", there.headers["Content-Type"])
                self.end_headers()
                self.wfile.write(there.content)

        super().__init__(("127.0.0.1", 0), Handler)


@pytest.fixture(scope="module")
def door() -> Iterator[Door]:
    length = "32768"
    overrides = json.dumps({"text_config": {"max_position_embeddings": int(length)}})
    with (
        serve("--api-key", "secret", "--max-model-len", length, "--hf-overrides", overrides) as server,
        Door(server.url) as door,
    ):
        thread = threading.Thread(target=door.serve_forever)
        thread.start()
        yield door
        door.shutdown()
        thread.join()


def test_codex_calls_a_tool_of_an_mcp_server(codex: Path, door: Door, tmp_path: Path) -> None:
    url, weather = f"http://127.0.0.1:{door.server_port}", Path(__file__).parent / "clients/mcp_weather.py"
    (tmp_path / "config.toml").write_text(CONFIG.format(url=url, python=sys.executable, server=weather))
    command = [str(codex), "exec", "--skip-git-repo-check", "--json", "What is the weather in Oslo?"]
    output = run(command, "Codex failed", cwd=tmp_path, CODEX_HOME=str(tmp_path), QUIRE_KEY="secret")
    assert ANSWER in output
    _, second = door.requests
    *_, call, result = second["input"]
    assert (call["type"], call["namespace"], call["name"]) == ("function_call", "mcp__weather", "get_weather")
    assert json.loads(call["arguments"]) == {"city": "Oslo"}
    assert (result["call_id"], "sunny in Oslo" in json.dumps(result["output"])) == (call["call_id"], True)
