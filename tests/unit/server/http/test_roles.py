"""What each key may do, and what needs none."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest

from quire.engine.config.engine_config import EngineConfig
from quire.engine.protocol.errors import ConfigError
from quire.server.config.server_options import ServerOptions
from quire.server.http.api_keys import ApiKeys, Key
from tests.fakes.api_server import Server, run_server

pytestmark = pytest.mark.usefixtures("core_mode")

GENERATE = ("POST", "/v1/completions", {"prompt": "hello", "max_tokens": 2})
METRICS = ("GET", "/metrics", None)
ADMIN = (
    ("POST", "/log_level", {"level": "info"}),
    ("POST", "/replicas", {"data_parallel_size": 1}),
    ("POST", "/reset_prefix_cache?reset_external=true", None),
    ("POST", "/start_profile", {"seconds": 1}),
    ("POST", "/stop_profile", None),
    ("GET", "/kv_event_sources", None),
    ("GET", "/kv_events/snapshot", None),
)
HEALTH = ("GET", "/health", None)
KEYS: dict[str, Any] = {"admin_key": ("admin",), "metrics_key": ("metrics",)}


async def statuses(server: Server, asked: tuple[str, str, Any]) -> dict[str, int]:
    """The status for each key; "" is none."""
    method, path, body = asked
    found = {}
    for key in ("", "wrong", "api", "admin", "metrics"):
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        found[key] = (await server.http.request(method, path, json=body, headers=headers)).status_code
    return found


async def test_each_role_opens_its_routes(config: EngineConfig, tmp_path: Path) -> None:
    async with run_server(config, api_key="api", torch_profiler_dir=str(tmp_path), **KEYS) as server:
        refused = {"": 401, "wrong": 401}
        assert await statuses(server, GENERATE) == {**refused, "api": 200, "admin": 200, "metrics": 403}
        assert await statuses(server, METRICS) == {**refused, "api": 403, "admin": 200, "metrics": 200}
        assert await statuses(server, HEALTH) == dict.fromkeys(("", "wrong", "api", "admin", "metrics"), 200)
        for asked in ADMIN:
            found = await statuses(server, asked)
            assert found.pop("admin") not in (401, 403), asked
            assert found == {**refused, "api": 403, "metrics": 403}, asked
        # The router's own idea of a path decides, not a comparison of strings before it.
        for path in ("/replicas%0A", "/replicas/", "//replicas", "/./replicas"):
            answer = await server.http.post(
                path, json={"data_parallel_size": 1}, headers={"Authorization": "Bearer api"}
            )
            assert answer.status_code in (307, 403, 404, 405), path


async def test_without_an_admin_key_nobody_changes_anything(config: EngineConfig, tmp_path: Path) -> None:
    async with run_server(config, api_key="api", torch_profiler_dir=str(tmp_path)) as server:
        assert (await statuses(server, METRICS))["api"] == 200
        for method, path, body in ADMIN:
            answer = await server.http.request(method, path, json=body, headers={"Authorization": "Bearer api"})
            assert (answer.status_code, answer.json()["error"]["code"]) == (403, "admin_key_required")
            assert "--admin-key" in answer.json()["error"]["message"]


async def test_a_prefix_cache_is_reset_as_in_vllm(server: Server) -> None:
    for query in ("", "?reset_running_requests=true", "?reset_external=false"):
        answer = await server.http.post(f"/reset_prefix_cache{query}")
        assert (answer.status_code, answer.json()) == (200, {"success": True})
    answer = await server.http.post("/reset_prefix_cache?reset_external=true")  # the fake core cannot
    assert (answer.status_code, answer.json()) == (200, {"success": False, "error": "the KV store is not up"})


async def test_without_api_keys_generation_is_open(config: EngineConfig) -> None:
    async with run_server(config, **KEYS) as server:
        assert set((await statuses(server, GENERATE)).values()) == {200}
        expected = {"": 401, "wrong": 401, "api": 401, "admin": 200, "metrics": 200}
        assert await statuses(server, METRICS) == expected
        found = await statuses(server, ADMIN[0])
        assert found == {"": 401, "wrong": 401, "api": 401, "admin": 200, "metrics": 403}


async def test_metrics_may_be_public(config: EngineConfig) -> None:
    async with run_server(config, api_key="api", public_metrics=True, root_path="/llm", **KEYS) as server:
        assert set((await statuses(server, METRICS)).values()) == {200}
        assert set((await statuses(server, ("GET", "/llm/metrics", None))).values()) == {200}
        assert (await statuses(server, ("GET", "/ui/state", None)))[""] == 401


async def test_the_log_level_of_a_server_without_keys_is_its_hosts(server: Server) -> None:
    levels: list[str] = []
    server.frontend.set_log_level = levels.append
    for level, headers, status in (
        ("debug", {}, 200),
        ("verbose", {}, 400),
        ("info", {"Origin": "http://evil.example"}, 403),
        ("warning", {"X-Forwarded-For": "127.0.0.1"}, 403),
        ("warning", {"Via": "1.1 proxy"}, 403),
        ("warning", {"Host": "rebound.example:8000"}, 403),
        ("warning", {"Host": "[::1"}, 403),
        ("error", {"Host": "localhost:8000"}, 200),
    ):
        answer = await server.http.post("/log_level", json={"level": level}, headers=headers)
        assert answer.status_code == status
    assert levels == ["debug", "error"]


def unnamed(secret: str, name: str, *args: Any, **kwargs: Any) -> Key:
    """A key without a name: what it stores is found by its secret, not by its place."""
    return Key(name, *args, **kwargs)._replace(digest=f"sha256:{hashlib.sha256(secret.encode()).hexdigest()}")


def test_lines_have_names_weights_and_roles(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(
        "alice:secret # hers\n bob : no-name weight=2\nops:a:b role=admin weight=0.5\n:c:d\n"
        "plain\nprom:scrape role=metrics\nteam:two words\n"
    )
    keys = ApiKeys([("api", "first"), ("api", "second"), ("admin", "third")], str(file))
    assert {secret: keys.find(secret.encode()) for secret in ("first", "second", "third")} == {
        "first": unnamed("first", "api-1"),
        "second": unnamed("second", "api-2"),
        "third": unnamed("third", "admin-1", "admin"),
    }
    found = {secret: keys.find(secret.encode()) for secret in ("secret", "a:b", "c:d", "plain", "scrape", "two words")}
    assert found == {
        "secret": Key("alice"),
        "a:b": Key("ops", "admin", 0.5),
        "c:d": unnamed("c:d", "line-4"),
        "plain": unnamed("plain", "line-5"),
        "scrape": Key("prom", "metrics"),
        "two words": Key("team"),
    }
    assert keys.find(b"bob : no-name") == unnamed("bob : no-name", "line-2", weight=2.0), "names have no spaces"
    for text, problem in (
        ("alice:", "line 1: there is no key in alice:"),
        ("\nbob:role=admin", "line 2: there is no key in bob:role=admin"),
        ("weight=2 role=admin", "line 1: there is no key in weight=2"),
        ("ops:k role=admin\nbob:k", "line 2: an earlier line gives this key the role admin, not api"),
        ("prom:first role=metrics", r"line 1: --api-key \(or QUIRE_API_KEY\) gives this key the role api, not metrics"),
        ("\nk role=root", "line 2: role=root: expected api or admin or metrics"),
        ("k weight=0", "line 1: expected a weight"),
    ):
        file.write_text(text)
        with pytest.raises(ConfigError, match=problem):
            ApiKeys([("api", "first")], str(file))
    with pytest.raises(ConfigError, match=r"--api-key \(.*\) and --admin-key \(.*\) have a key in common"):
        ApiKeys([("api", "k"), ("admin", "k")])


def test_a_file_that_becomes_invalid_is_reported_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "keys"
    file.write_text("alice:secret\n")
    keys = ApiKeys([("api", "first")], str(file))
    for break_file in (lambda: file.write_text("alice:secret\nroot:first role=admin\n"), file.unlink):
        break_file()
        caplog.clear()
        assert [keys.find(b"secret") for _ in range(3)] == [Key("alice")] * 3
        assert [record.levelname for record in caplog.records] == ["ERROR"]
    file.write_text("bob:other\n")
    assert (keys.find(b"secret"), keys.find(b"other")) == (None, Key("bob"))


def test_a_file_that_loses_its_keys_opens_nothing(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("ops:root role=admin\n")
    keys = ApiKeys([], str(file))
    assert keys.roles == {"api", "admin"}, "a file of keys closes the API, whatever is in it"
    file.write_text("# nobody\n")
    assert keys.find(b"root") is None
    assert keys.roles == {"api", "admin"}


@pytest.mark.parametrize("role", ["api", "admin", "metrics"])
def test_empty_keys_are_errors(monkeypatch: pytest.MonkeyPatch, role: str) -> None:
    flag = f"{role}_key"
    for key in ("", " "):
        with pytest.raises(ConfigError, match=f"^--{role}-key is empty"):
            ServerOptions(**{flag: (key,)}).check()  # type: ignore[arg-type]
        monkeypatch.setenv(f"QUIRE_{flag.upper()}", key)
        with pytest.raises(ConfigError, match=f"QUIRE_{flag.upper()}.* is empty; unset it"):
            ApiKeys.load(ServerOptions())
    monkeypatch.setenv(f"QUIRE_{flag.upper()}", "from-environment")
    keys = ApiKeys.load(ServerOptions())
    assert keys is not None
    assert keys.find(b"from-environment") == unnamed("from-environment", f"{role}-1", role)


def test_fair_shares_of_keys_need_api_keys() -> None:
    with pytest.raises(ConfigError, match="--fair-share key requires API keys"):
        ApiKeys.load(ServerOptions(fair_share="key", admin_key=("root",)))
