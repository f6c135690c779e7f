"""Clients that people use, each in an environment of its own, against one live server of the demo model.

Their programs are in tests/e2e/clients. Environments are kept in ~/.cache/quire/clients, one for each requirement.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest

from tests.e2e.environments import environment, run
from tests.e2e.serving import Server, serve
from tests.fakes.sentence import minilm

SCRIPTS = Path(__file__).parent / "clients"
KEY = "secret"
CLIENTS = {
    "openai>=2,<3": "openai_sdk.py",
    "openai>=3,<4": "openai_sdk.py",
    "anthropic>=2,<3": "anthropic_sdk.py",
    "langchain-openai>=1,<2": "langchain_sdk.py",
    "instructor>=1,<2": "instructor_sdk.py",
}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serve("--api-key", KEY) as server:
        yield server


@pytest.fixture(scope="module")
def embedding_server() -> Iterator[Server]:
    with serve(str(minilm()), "--api-key", KEY, "--served-model-name", "minilm") as server:
        yield server


@pytest.fixture
def busy_url(server: Server) -> Iterator[str]:
    """The server behind a proxy that rejects every first, third, … request, with a retry after a second."""
    arrived = 0

    class Door(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def do_GET(self) -> None:
            nonlocal arrived
            arrived += 1
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            if arrived % 2:
                self.answer(429, {"Retry-After": "1"}, b'{"error": {"message": "busy", "type": "rate_limit_error"}}')
                return
            headers = {name: self.headers[name] for name in ("Authorization", "Content-Type") if name in self.headers}
            there = httpx.request(self.command, server.url + self.path, content=body, headers=headers, timeout=60)
            self.answer(there.status_code, {}, there.content)

        do_POST = do_GET

        def answer(self, status: int, headers: dict[str, str], body: bytes) -> None:
            self.send_response(status)
            for name, value in {
                "Content-Type": "application/json",
                "Content-Length": str(len(body)),
                **headers,
            }.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

    with ThreadingHTTPServer(("127.0.0.1", 0), Door) as door:
        thread = threading.Thread(target=door.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{door.server_port}/v1"
        door.shutdown()
        thread.join()


@pytest.mark.parametrize(("requirement", "script"), CLIENTS.items(), ids=list(CLIENTS))
def test_a_client_notices_nothing(
    server: Server,
    embedding_server: Server,
    busy_url: str,
    requirement: str,
    script: str,
    capfd: pytest.CaptureFixture[str],
) -> None:
    python = environment(capfd, requirement)
    print(
        run(
            [str(python), "-P", "-W", "ignore", str(SCRIPTS / script)],
            f"{requirement}: {script} failed",
            QUIRE_URL=f"{server.url}/v1",
            QUIRE_BUSY_URL=busy_url,
            QUIRE_EMBEDDING_URL=f"{embedding_server.url}/v1",
            QUIRE_KEY=KEY,
        )
    )
