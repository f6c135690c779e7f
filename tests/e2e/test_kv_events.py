"""A router follows the KV events of a live server, and starts again with one of its cores."""

from __future__ import annotations

import json
from contextlib import closing

import httpx
import pytest

from tests.e2e.serving import Server, serve
from tests.fakes.kv_router import KVRouter

pytestmark = pytest.mark.slow
EVENTS = {"enable_kv_cache_events": True, "endpoint": "tcp://*:0", "replay_endpoint": "tcp://127.0.0.1:0"}


def ask(server: Server, rank: int, first: int) -> None:
    body = {"prompt": list(range(first, first + 50)), "max_tokens": 20, "ignore_eos": True}
    headers = {"X-data-parallel-rank": str(rank)}
    httpx.post(f"{server.url}/v1/completions", json=body, headers=headers, timeout=60).raise_for_status()


def snapshot(server: Server, rank: int) -> KVRouter:
    """A router that starts now."""
    answer = httpx.get(f"{server.url}/kv_events/snapshot", params={"data_parallel_rank": rank}).raise_for_status()
    source = httpx.get(f"{server.url}/kv_event_sources").raise_for_status().json()[str(rank)]
    router = KVRouter(source["endpoint"], source["replay_endpoint"])
    (found,) = answer.json()["snapshots"]
    assert found["data_parallel_rank"] == rank
    router.start(found["sequence"], found["events"])
    return router


def test_a_router_has_the_view_of_each_replica() -> None:
    flags = ("--kv-events-config", json.dumps(EVENTS), "--data-parallel-size", "2")
    with serve(*flags, "--max-model-len", "160", "--kv-cache-memory-bytes", str(4 << 20)) as server:
        for rank in (0, 1):
            with closing(snapshot(server, rank)) as router:
                assert not router.blocks
                for first in range(10, 400, 10):  # more than the cache holds
                    ask(server, rank, first)
                router.replay()
                with closing(snapshot(server, rank)) as late:
                    while router.sequence < late.sequence:
                        router.replay()
                    assert router.blocks == late.blocks
                    assert {len(tokens) for _, tokens, _, _ in late.blocks.values()} == {16}
        server.named("quire-core-1").kill()
        ask(server, 0, 10)  # replica 0 goes on
        while True:  # until replica 1 is up again
            if httpx.get(f"{server.url}/kv_event_sources").json().keys() == {"0", "1"}:
                break
        with closing(snapshot(server, 1)) as router:
            assert not router.blocks
            assert router.sequence == 0  # `AllBlocksCleared`
