"""What becomes of each request: its counts by route, status and reason, and its line in the access log."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire.engine.config.engine_config import EngineConfig
from quire.engine.process import log
from quire.server.client.admission import QueueFull
from quire.server.client.http_metrics import STATUSES, HttpMetrics
from quire.server.http.connection import MAX_HEADER_BYTES
from quire.server.serving.frontend import Frontend
from tests.fakes.api_server import Server, run_server

pytestmark = pytest.mark.usefixtures("core_mode")
COMPLETIONS = "/v1/completions"
HELLO: dict[str, Any] = {"prompt": "hello", "max_tokens": 3, "ignore_eos": True}
HANG: dict[str, Any] = {"prompt": "a<hang>", "stream": True}


def counts(server: Server) -> tuple[dict[str, float], dict[str, float]]:
    """The requests by `METHOD ROUTE STATUS`, and those that failed by reason."""
    totals = HttpMetrics.totals([server.frontend.metrics.http])
    requests = {
        f"{name} {status}": count
        for name, found in totals.statuses.items()
        for status, count in zip(STATUSES, found, strict=True)
        if count
    }
    return requests, {reason: count for reason, count in totals.reasons.items() if count}


async def raw(server: Server, content: bytes) -> bytes:
    """What the server answers to these bytes, until it closes the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.http.base_url.port)
    writer.write(content)
    answer = await asyncio.wait_for(reader.read(), 60)
    writer.close()
    return answer


async def test_each_refusal_is_counted_with_its_reason(config: EngineConfig) -> None:
    options: dict[str, Any] = {"max_queue": 0, "max_body_mib": 0.1, "metrics_key": ("m",)}
    async with run_server(config, api_key="k", root_path="/llm", **options) as server:
        server.http.headers["Authorization"] = "Bearer k"
        post, client = server.http.post, server.frontend.client
        for path, body, status in (
            (COMPLETIONS, HELLO, 200),
            (f"/llm{COMPLETIONS}", HELLO, 200),
            (COMPLETIONS, {"max_tokens": 0}, 400),
            (COMPLETIONS, {"prompt": "a", "nonsense": 1}, 400),
            (COMPLETIONS, {"prompt": "a", "nonsense": "x" * 70_000}, 400),  # in another process
            (COMPLETIONS, {"prompt": "a " * 5000}, 400),
            (COMPLETIONS, {"prompt": "x" * 200_000}, 413),
            (COMPLETIONS, {"prompt": "a", "model": "other"}, 404),
            ("/nothing", {}, 404),
            ("/stop_profile", {}, 403),
        ):
            assert (await post(path, json=body)).status_code == status
        assert (await post(COMPLETIONS, headers={"Authorization": "Bearer guess"})).status_code == 401
        assert (await server.http.get("/metrics")).status_code == 403
        assert (await server.http.get("/v1/models/echo?a=b")).status_code == 200
        assert (await server.http.get("/v1/models/a/b")).status_code == 404
        assert (await server.http.head("/health")).status_code == 200
        assert (await server.http.put("/health")).status_code == 405
        client.admit = _full  # type: ignore[method-assign]
        for _ in range(10):
            assert (await post(COMPLETIONS, json=HELLO)).status_code == 429
        del client.admit
        server.frontend.is_draining = True
        assert (await post(COMPLETIONS, json=HELLO)).status_code == 503
        server.frontend.is_draining = False
        client._awaited.add(0)
        assert (await post(COMPLETIONS, json=HELLO)).status_code == 503
        requests, reasons = counts(server)
    assert requests == {
        f"POST {COMPLETIONS} 200": 2,
        f"POST {COMPLETIONS} 400": 4,
        f"POST {COMPLETIONS} 401": 1,
        f"POST {COMPLETIONS} 404": 1,
        f"POST {COMPLETIONS} 413": 1,
        f"POST {COMPLETIONS} 429": 10,
        f"POST {COMPLETIONS} 503": 2,
        "POST /stop_profile 403": 1,
        "GET /metrics 403": 1,
        "GET /v1/models/{name:path} 200": 1,
        "GET /v1/models/{name:path} 404": 1,
        "GET /health 200": 1,
        "none none 404": 1,
        "none none 405": 1,
    }
    assert reasons == {
        "auth": 3,
        "invalid": 4,
        "too_large": 2,
        "not_found": 3,
        "queue_full": 10,
        "draining": 1,
        "loading": 1,
    }


def _full() -> None:
    raise QueueFull("full")


async def test_requests_that_fail_later_are_counted_too(config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    async with run_server(config, request_timeout=0.1) as server:
        for stream, status in ((False, 504), (True, 200)):
            body = {"prompt": "a<hang>", "stream": stream}
            assert (await server.http.post(COMPLETIONS, json=body)).status_code == status
        assert counts(server) == ({f"POST {COMPLETIONS} 200": 1, f"POST {COMPLETIONS} 504": 1}, {"timeout": 2})
    async with run_server(config) as server:
        for stream, status in ((False, 500), (True, 200)):
            body = {"prompt": "<fail>", "stream": stream}
            assert (await server.http.post(COMPLETIONS, json=body)).status_code == status
        assert (await server.http.post("/invocations", json={"prompt": "<fail>"})).status_code == 500

        def broken(*_: Any) -> None:
            raise ZeroDivisionError

        monkeypatch.setattr(Frontend, "generate", broken)
        answer = await server.http.post(COMPLETIONS, json=HELLO)
        assert (answer.status_code, "x-request-id" in answer.headers) == (500, True)
        requests, reasons = counts(server)
    assert requests == {
        f"POST {COMPLETIONS} 200": 1,
        f"POST {COMPLETIONS} 500": 2,
        "POST /invocations 500": 1,
    }
    assert reasons == {"failed": 3, "internal": 1}


async def test_clients_that_leave_are_no_failures_of_the_server(server: Server) -> None:
    for stream in (True, False):
        body = json.dumps({**HANG, "stream": stream}).encode()
        _, writer = await asyncio.open_connection("127.0.0.1", server.http.base_url.port)
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        while not server.frontend.client.num_open:
            await asyncio.sleep(0.001)
        writer.close()
        while server.frontend.client.num_open:
            await asyncio.sleep(0.001)
    while sum(counts(server)[0].values()) < 2:
        await asyncio.sleep(0.001)
    assert counts(server) == (
        {f"POST {COMPLETIONS} 200": 1, f"POST {COMPLETIONS} 499": 1},
        {"client_closed": 2},
    )


async def test_what_is_refused_before_it_is_a_request_is_counted(config: EngineConfig) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
    async with run_server(config, client_body_timeout=0.01) as server:
        assert b" 400 " in await raw(server, b"nonsense\r\n\r\n")
        assert b" 431 " in await raw(server, b"GET / HTTP/1.1\r\nA: ".ljust(MAX_HEADER_BYTES + 1, b"x"))
        assert b" 408 " in await raw(server, head + b"Content-Length: 9\r\n\r\n")
        assert b" 400 " in await raw(server, head + b"Transfer-Encoding: chunked\r\n\r\nno size\r\n")
        while sum(counts(server)[0].values()) < 4:
            await asyncio.sleep(0.001)
        assert counts(server) == (
            {"none none 400": 1, "none none 431": 1, f"POST {COMPLETIONS} 400": 1, f"POST {COMPLETIONS} 408": 1},
            {"invalid": 2, "client_timeout": 1, "too_large": 1},
        )
    async with run_server(config, client_header_timeout=0.01) as server:
        assert b" 408 " in await raw(server, b"")
        assert counts(server) == ({"none none 408": 1}, {"client_timeout": 1})


# --- the access log -------------------------------------------------------------------------------------------


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Any]]]:
    """The fields of each line, without the duration; their text is in `text`."""
    found: list[dict[str, Any]] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            fields: dict[str, Any] = dict(record.fields)  # type: ignore[attr-defined]
            assert (
                fields.pop("total_seconds") >= (fields.get("ttft_seconds") or 0) >= (fields.get("queue_seconds") or 0)
            )
            found.append(fields | {"text": record.getMessage()})

    handler = Keep()
    log.ACCESS.addHandler(handler)
    monkeypatch.setattr(log.ACCESS, "level", logging.INFO)
    monkeypatch.setattr(log.ACCESS, "propagate", False)
    yield found
    log.ACCESS.removeHandler(handler)


async def test_a_line_for_each_request(config: EngineConfig, lines: list[dict[str, Any]], tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("alice: secret\n")
    options: dict[str, Any] = {"access_log": True, "disable_access_log_for_endpoints": "/health,/metrics"}
    async with run_server(config, api_key_file=str(tmp_path / "keys"), **options) as server:
        server.http.headers.update({"Authorization": "Bearer secret", "X-Request-Id": 'a "b"'})
        for _ in range(2):
            body = {"prompt": ["one two three", "four"], "n": 2, "max_tokens": 3, "ignore_eos": True}
            usage = (await server.http.post(COMPLETIONS, json=body)).json()["usage"]
        assert (await server.http.get("/health")).status_code == 200
        assert (await server.http.get("/v1/models/x")).status_code == 404
        assert (await server.http.get("/v1/models", headers={"Authorization": "guess"})).status_code == 401
        keys = HttpMetrics.totals([server.frontend.metrics.http]).keys
    _, whole, unknown, refused = lines
    assert {name: whole[name] for name in ("request_id", "key", "method", "route", "status")} == {
        "request_id": 'a "b"',
        "key": "alice",
        "method": "POST",
        "route": COMPLETIONS,
        "status": 200,
    }
    assert [whole[f"{kind}_tokens"] for kind in ("prompt", "cached", "output")] == [
        usage["prompt_tokens"],
        usage["prompt_tokens_details"]["cached_tokens"],
        usage["completion_tokens"],
    ]
    assert whole["text"].startswith(
        r'request_id="a \"b\"" key=alice method=POST route=/v1/completions status=200 response_id=cmpl-'
    )
    assert "four" not in str(lines), "prompts are not logged"
    assert (unknown["route"], unknown["status"], unknown["reason"]) == ("/v1/models/{name:path}", 404, "not_found")
    assert (refused["key"], refused["status"], refused["reason"]) == (None, 401, "auth")
    assert " key=- " in refused["text"]
    assert "prompt_tokens" not in refused
    assert keys == {"alice": [4, 2 * usage["prompt_tokens"], 24]}


async def test_prompts_are_logged_only_if_that_is_asked_for(config: EngineConfig, lines: list[dict[str, Any]]) -> None:
    async with run_server(config, access_log=True, log_prompts=True, max_log_len=7) as server:
        tokenizer, decoded = server.frontend.input_processor.tokenizer, []
        decode = tokenizer.decode

        def decode_and_note(ids: list[int], **options: bool) -> str:
            decoded.append(len(ids))
            return decode(ids, **options)

        tokenizer.decode = decode_and_note  # type: ignore[method-assign]
        body = {"prompt": ["one two\nthree", "four", "x y " * 25], "max_tokens": 2}
        assert (await server.http.post(COMPLETIONS, json=body)).status_code == 200
    (line,) = lines
    assert max(decoded) <= 29 < line["prompt_tokens"] - 29, "no more is decoded than is shown"
    assert [text.removeprefix("<s>") for text in line["prompts"]][1] == "four"
    assert all(len(text) <= 7 for text in line["prompts"])
    assert "\n" not in line["text"]


async def test_what_is_no_request_has_a_line(config: EngineConfig, lines: list[dict[str, Any]]) -> None:
    async with run_server(config, access_log=True) as server:
        await raw(server, b"nonsense\r\n\r\n")
    (line,) = lines
    assert line["text"].startswith(
        "request_id=- key=- method=none route=none status=400 reason=invalid total_seconds=0"
    )


async def test_a_search_of_beams_is_one_request(config: EngineConfig, lines: list[dict[str, Any]]) -> None:
    async with run_server(config, access_log=True) as server:
        body = {"prompt": "one two", "max_tokens": 3, "n": 2, "use_beam_search": True, "ignore_eos": True}
        usage = (await server.http.post(COMPLETIONS, json=body)).json()["usage"]
    (line,) = lines
    assert (line["prompt_tokens"], line["output_tokens"]) == (usage["prompt_tokens"], usage["completion_tokens"])
