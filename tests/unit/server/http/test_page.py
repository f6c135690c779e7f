"""The page at `/`, and the numbers that it draws."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterator
from hashlib import sha256
from typing import Any

import pytest

from quire.engine.config.engine_config import EngineConfig
from quire.engine.process import log
from quire.engine.protocol.adapters import AdapterRef
from quire.engine.protocol.engine_core import EngineCoreOutputs
from quire.engine.protocol.kv_store import KVStoreStats
from quire.engine.protocol.stats import GpuUsage, LogRecord, RankStats, RankUsage
from quire.engine.protocol.supervision import NamedAdapter
from tests.fakes.api_server import Server, run_server


async def state(server: Server) -> dict[str, Any]:
    answer = await server.http.get("/ui/state")
    assert answer.status_code == 200
    found: dict[str, Any] = answer.json()
    return found


async def test_the_page_has_the_kv_stores_of_all_hosts(server: Server) -> None:
    assert (await state(server))["kv_stores"] == []
    server.frontend.metrics.take_store(
        0, "10.0.0.2", KVStoreStats(memory_bytes=5, memory_capacity=9, disk_error="full")
    )
    tiers = {"memory_bytes": 5, "memory_capacity": 9, "disk_bytes": 0, "disk_capacity": 0, "disk_error": "full"}
    assert (await state(server))["kv_stores"] == [{"host": "10.0.0.2", "is_up": True, **tiers}]


VENDORED = {
    "marked.umd.js": "bb95d4c15f1289f78486eaacebf3bb18688475ed58a040ef762ed49337090542",
    "purify.min.js": "f69a46022ab1f53e969c8ebbca98172c8995785a9b3be72ea4a12d25b1a1bf67",
    "uPlot.iife.min.js": "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f",
    "uPlot.min.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
}
"""SHA-256 of the files of npm packages."""


async def test_the_page_needs_nothing_from_outside(server: Server) -> None:
    names = set()
    for path in ("/", "/ui"):
        page = await server.http.get(path)
        assert page.headers["content-type"] == "text/html; charset=utf-8"
        policy = page.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        names |= set(re.findall(r'(?:src|href)="([^"]+)"', page.text.replace("data:image", "")))
    assert "ui/files/page.js" in names
    for name in {name for name in names if name.startswith("ui/")}:
        got = await server.http.get(f"/{name}")
        assert got.status_code == 200
        again = await server.http.get(f"/{name}", headers={"If-None-Match": got.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
        own = name.rpartition("/")[2]
        if "/vendor/" in name:
            assert sha256(got.content).hexdigest() == VENDORED[own]
        else:
            outside = set(re.findall(r"\w+://[^'\" ]+", got.text))
            assert outside <= {"http://www.w3.org/2000/svg"}  # the name of a format
    for name in ("nothing.js", "../routes.py", "vendor/README.md"):
        assert (await server.http.get(f"/ui/files/{name}")).status_code == 404
    assert "/ui" not in (await server.http.get("/openapi.json")).json()["paths"]


@pytest.mark.parametrize("path", ["/", "/ui/files/page.js", "/ui/state", "/ui/history", "/ui/requests"])
async def test_browsers_take_answers_for_what_they_are(server: Server, path: str) -> None:
    assert (await server.http.get(path)).headers["x-content-type-options"] == "nosniff"


async def test_a_number_changes_with_the_adapters(server: Server) -> None:
    adapters, seen = server.frontend.adapters, [(await state(server))["adapters"]]
    for digest in (None, b"1" * 32, b"2" * 32):
        adapters.set("sql", NamedAdapter("sql", "/sql", 0, None if digest is None else AdapterRef(digest, ())))
        seen.append((await state(server))["adapters"])
    adapters.set("sql", None)
    assert (await state(server))["adapters"] is None is seen[0]
    assert len(set(seen)) == 4


async def test_numbers_are_those_of_the_engine(server: Server) -> None:
    await server.openai.completions.create(model="echo", prompt="hello", max_tokens=4)
    await server.until_idle()
    gpu, metrics, history = (
        RankUsage(1.0, 2, 1, GpuUsage(3, 4, utilization=0.5)),
        server.frontend.metrics,
        server.frontend.history,
    )
    metrics.rank_stats[0] = [RankStats(10, 3.0, 1.0, True), RankStats(usage=gpu)]
    history.sample(1000.0, 10.0)
    metrics.rank_stats[0] = [RankStats(30, 6.0, 2.0, True), RankStats(usage=gpu)]
    history.sample(1004.0, 14.0)
    metrics.count_death(0, "rank 1 was killed by SIGKILL")
    after = await state(server)
    (replica,) = after["replicas"]
    assert replica["state"] == "up"
    assert replica["generated_tokens"] == server.frontend.metrics.of(0).generated_tokens > 0
    assert replica["last_death"]["reason"] == "rank 1 was killed by SIGKILL"
    assert (replica["tokens_per_second"], replica["step_seconds"]) == (0.0, 0.15)
    assert replica["ranks"] == [
        {
            "is_straggler": True,
            "computing": 0.5,
            "waiting": 0.25,
            "step_seconds": 0.15,
            "resident_bytes": None,
            "gpu": None,
        },
        {
            "is_straggler": False,
            "computing": None,
            "waiting": None,
            "step_seconds": None,
            "resident_bytes": 2,
            "gpu": {"utilization": 0.5, "memory_used": 3, "memory_total": 4, "power": None},
        },
    ]
    assert after["capabilities"] == {"tools": False, "reasoning": False}
    assert (after["model"], after["status"], after["reason"], after["generates"]) == ("echo", "ready", None, True)
    assert (after["role"], after["can_abort"], after["has_admin_key"]) == (None, True, False)
    assert "tensor parallel" in after["plan"]


async def test_a_long_history_is_compressed_for_browsers_that_accept_it(server: Server) -> None:
    now = time.time()
    for seconds in range(200, -2, -2):
        server.frontend.history.sample(now - seconds, 1000 - seconds)
    whole, plain, end = [
        await server.http.get("/ui/history", params={"after": after}, headers={"Accept-Encoding": accepted})
        for after, accepted in ((0, "gzip, br"), (0, "identity"), (now - 10, "gzip"))
    ]
    assert [answer.headers.get("content-encoding") for answer in (whole, plain, end)] == ["gzip", None, None]
    assert int(whole.headers["content-length"]) < len(whole.content) / 4
    assert {answer.headers["vary"] for answer in (whole, plain, end)} == {"Accept-Encoding"}
    assert whole.json()["columns"] == plain.json()["columns"]
    assert len(whole.json()["columns"]["time"]) >= 100 > len(end.json()["columns"]["time"]) > 0


@pytest.fixture
def recent(monkeypatch: pytest.MonkeyPatch) -> Iterator[log.RecentWarnings]:
    """As if this process had just started."""
    monkeypatch.setattr(log, "RECENT", recent := log.RecentWarnings())
    logger = logging.getLogger("quire")
    logger.addHandler(recent)
    yield recent
    logger.removeHandler(recent)


async def test_warnings_are_those_of_this_process_and_of_the_replicas(
    server: Server, recent: log.RecentWarnings
) -> None:
    recent.source = "api"
    logging.getLogger("quire.test").warning("the queue is full")
    warnings = [LogRecord(1.0, "error", "lost a host", "rank 3")]
    server.frontend.client._deliver(EngineCoreOutputs(warnings=warnings))
    found = [(each["replica"], each["source"], each["text"]) for each in (await state(server))["warnings"]]
    assert found == [(0, "rank 3", "lost a host"), (None, "api", "the queue is full")]


async def test_the_numbers_need_the_key(config: EngineConfig, core_mode: Callable[[str], None]) -> None:
    core_mode("plain")
    async with run_server(config, "secret", root_path="/llm") as server:
        for path in ("/", "/ui", "/llm/", "/llm/ui"):
            assert (await server.http.get(path)).status_code == 200
        assert (await server.http.get("/llm/ui/state")).status_code == 401
        headers = {"Authorization": "Bearer secret"}
        assert (await server.http.get("/llm/ui/state", headers=headers)).status_code == 200


@pytest.mark.parametrize("path", ["/", "/ui", "/ui/state"])
async def test_without_the_page(config: EngineConfig, core_mode: Callable[[str], None], path: str) -> None:
    core_mode("plain")
    async with run_server(config, ui=False) as server:
        assert (await server.http.get(path)).status_code == 404


async def test_a_health_check_at_the_root_stays_one(
    config: EngineConfig, core_mode: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AIP_HEALTH_ROUTE", "/")
    core_mode("plain")
    async with run_server(config, "secret") as server:
        health, page = await server.http.get("/"), await server.http.get("/ui")
        assert health.status_code == page.status_code == 200
        assert "text/html" not in health.headers.get("content-type", "")
        assert page.headers["content-type"] == "text/html; charset=utf-8"
        server.frontend.client.fail("the engine has failed")
        assert (await server.http.get("/")).status_code == 503
        assert (await server.http.get("/ui")).status_code == 200
