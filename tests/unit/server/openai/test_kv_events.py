"""`/kv_event_sources` and `/kv_events/snapshot`, against fake cores."""

from __future__ import annotations

from dataclasses import replace

import pytest

from quire.engine.config.engine_config import EngineConfig
from tests.fakes.api_server import run_server
from tests.unit.engine.scheduler.test_kv_events import with_events

pytestmark = pytest.mark.usefixtures("core_mode")


async def test_routers_learn_where_replicas_publish_and_what_they_have(config: EngineConfig) -> None:
    two = replace(config.parallel, replicas=2, local_replicas=range(2))
    async with run_server(with_events(replace(config, parallel=two))) as server:
        found = (await server.http.get("/kv_event_sources")).json()
        assert found == {
            rank: {
                "enable_kv_cache_events": True,
                "publisher": "zmq",
                "endpoint": f"tcp://192.0.2.7:{5557 + int(rank)}",
                "replay_endpoint": None,
                "buffer_steps": 1,
                "hwm": 2,
                "max_queue_size": 3,
                "topic": "",
            }
            for rank in ("0", "1")
        }
        snapshots = (await server.http.get("/kv_events/snapshot")).json()["snapshots"]
        expected = [
            {"data_parallel_rank": rank, "sequence": 7 + rank, "events": [{"type": "BlockStored"}] * 2}
            for rank in (0, 1)
        ]
        assert [each.pop("incarnation") >= 0 for each in snapshots] == [True, True]
        assert snapshots == expected
        one = (await server.http.get("/kv_events/snapshot", params={"data_parallel_rank": 1})).json()["snapshots"]
        assert [each["sequence"] for each in one] == [8]
        for rank in (2, -1, "x"):
            refused = await server.http.get("/kv_events/snapshot", params={"data_parallel_rank": rank})
            assert refused.status_code == 400
            assert "data_parallel_rank" in refused.json()["error"]["message"]


async def test_without_events_there_is_nothing_to_follow(config: EngineConfig) -> None:
    async with run_server(config) as server:
        assert (await server.http.get("/kv_event_sources")).json() == {}
        refused = await server.http.get("/kv_events/snapshot")
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "kv_events_disabled")


async def test_without_keys_only_the_own_host_reads_them(config: EngineConfig) -> None:
    """Snapshots have the tokens of prompts."""
    async with run_server(with_events(config)) as server:
        for path in ("/kv_event_sources", "/kv_events/snapshot"):
            assert (await server.http.get(path)).status_code == 200
            refused = await server.http.get(path, headers={"X-Forwarded-For": "192.0.2.9"})
            assert (refused.status_code, refused.json()["error"]["code"]) == (403, "admin_key_required")
