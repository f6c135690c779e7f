"""A router follows the KV events of a live server, and starts again with one of its cores."""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from contextlib import closing
from typing import Any

import httpx
import pytest

from tests.e2e.serving import Server, quire, serve
from tests.e2e.test_replicas import free_port, run
from tests.fakes.kv_router import KVRouter
from tests.fakes.waiting import until

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


def test_all_api_processes_know_what_all_hosts_have() -> None:
    """Replicas on two hosts, and two API processes: a prompt goes where it is cached, whichever process gets it, also
    if only the KV store of that host has it. Hosts are told apart by their addresses."""
    port, rng = free_port(), random.Random(0)
    flags = (
        *("--kv-events-config", json.dumps(EVENTS), "--kv-offloading-size", "0.1", "--device", "cpu"),
        *("--max-model-len", "512", "--kv-cache-memory-bytes", str(64 << 20), "-dp", "2", "-dpl", "1"),
        *("--data-parallel-rpc-port", port),
    )
    behind = quire("serve", *flags, "-dpr", "1", "--data-parallel-address", "127.0.0.1", "--headless")
    prompts = [rng.choices(range(300, 1500), k=400) for _ in range(8)]

    def ask(client: Any, number: int, rank: int | None = None) -> dict[str, Any]:
        """`client`: `httpx` opens a connection, which any process may accept. Returns where the KV came from."""
        body = {"prompt": prompts[number], "max_tokens": 1, "cache_salt": "a"}
        headers = {} if rank is None else {"X-data-parallel-rank": f"{rank}"}
        answer = client.post(f"{server.url}/v1/completions", json=body, headers=headers, timeout=60)
        details: dict[str, Any] = answer.raise_for_status().json()["usage"]["prompt_tokens_details"]
        return details

    def announced(rank: int) -> Counter[str]:
        answer = httpx.get(f"{server.url}/kv_events/snapshot", params={"data_parallel_rank": rank}, timeout=60)
        (found,) = answer.raise_for_status().json()["snapshots"]
        return Counter(event["medium"] for event in found["events"] for _ in event["block_hashes"])

    def media(gpu: int) -> list[Counter[str]]:
        return [Counter(GPU=gpu, CPU=100) + Counter()] * 2

    with run("env", "QUIRE_HOST_IP=127.0.0.2", *behind), serve(*flags, "--api-server-count", "2") as server:
        with httpx.Client(timeout=60) as client:
            while not (announced(0)["CPU"] and announced(1)["CPU"]):  # what is computed before is not stored
                prompts[0] = rng.choices(range(300, 1500), k=400)
                for rank in (0, 1):
                    ask(client, 0, rank)
                time.sleep(0.5)
            forget = {"reset_external": "true"}
            assert client.post(f"{server.url}/reset_prefix_cache", params=forget).json() == {"success": True}
            until(lambda: not announced(0) and not announced(1))
            for number in range(8):  # by one process, so that it has sent each replica as much as the other
                ask(client, number, number % 2)
        until(lambda: [announced(0), announced(1)] == media(100))
        assert [ask(httpx, number)["cached_tokens"] for number in [*range(8)] * 4] == [384] * 32
        httpx.post(f"{server.url}/reset_prefix_cache", timeout=60).raise_for_status()
        until(lambda: [announced(0), announced(1)] == media(0))
        assert [ask(httpx, number)["cached_tokens_details"]["host"] for number in range(8)] == [384] * 8
