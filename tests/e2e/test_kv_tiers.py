"""KV tiers of a real server: prefixes outlast the devices' cache, the store and the server, and replicas share them."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from quire import LLM, SamplingParams
from quire.engine.core.launch import reserve_ports, socket_port
from tests.e2e.serving import Server, quire, serve
from tests.e2e.test_replicas import free_port, run
from tests.fakes.waiting import until

pytestmark = pytest.mark.slow
FLAGS = ("--device", "cpu", "--dtype", "float32", "--kv-cache-memory-bytes", str(64 << 20))
PROMPT = random.Random(0).choices(range(300, 1500), k=1000)
NUM_BLOCKS = len(PROMPT) // 16
SHARED = 16 * NUM_BLOCKS
"""Tokens of the prompt in full blocks."""


class Answer:
    """The answer to the prompt, and where its KV came from."""

    def __init__(self, server: Server, replica: int = 0, salt: str | None = None) -> None:
        body = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0, "ignore_eos": True, "cache_salt": salt}
        headers = {"X-data-parallel-rank": f"{replica}"}
        answer = httpx.post(f"{server.url}/v1/completions", json=body, headers=headers, timeout=60)
        assert answer.status_code == 200, answer.text
        found = answer.json()
        details = found["usage"]["prompt_tokens_details"]
        self.text: str = found["choices"][0]["text"]
        self.cached: int = details["cached_tokens"]
        on_device = {"device": self.cached, "host": 0, "disk": 0, "peer": 0}
        self.tiers: dict[str, Any] = details.get("cached_tokens_details", on_device)


def forget(server: Server, *, external: bool = False) -> None:
    """Empty the caches of the devices, and the store."""
    answer = httpx.post(f"{server.url}/reset_prefix_cache", params={"reset_external": external}, timeout=60)
    assert answer.json() == {"success": True}


def store(server: Server, expected: str, salts: Sequence[str | None] = (None,)) -> None:
    """Ask replica 0 until the store has the prompt with all salts: at first, the core may not know that the store is
    up."""
    count = NUM_BLOCKS * len(salts)
    while server.metrics("kv_store_entries", tier="memory") < count:
        forget(server)
        for salt in salts:
            assert Answer(server, salt=salt).text == expected
        deadline = time.monotonic() + 3.0
        while time.monotonic() < deadline and server.metrics("kv_store_entries", tier="memory") < count:
            time.sleep(0.02)


@pytest.fixture(scope="module")
def expected() -> Iterator[str]:
    """The answer without tiers."""
    with serve(*FLAGS) as server:
        yield Answer(server).text


def test_a_server_that_starts_again_finds_its_prefixes(tmp_path: Path, expected: str) -> None:
    tiers = ("--kv-offloading-size", "0.1", "--kv-disk", f"{tmp_path}/kv:0.5")
    with serve(*FLAGS, *tiers) as server:
        until(lambda: server.metrics("kv_store_up"))  # blocks of earlier requests are not stored
        first = Answer(server)
        assert (first.text, first.cached) == (expected, 0)
        until(lambda: server.metrics("kv_stored_blocks_total") >= NUM_BLOCKS)
        forget(server)
        loaded = Answer(server)
        assert loaded.text == expected
        assert loaded.tiers == {"device": 0, "host": SHARED, "disk": 0, "peer": 0}
        assert server.metrics("prompt_tokens_cached_by_source_total", source="host") == SHARED
        assert Answer(server).tiers["device"] == SHARED
    # The same weights, divided in another way.
    with serve(*FLAGS, *tiers, "--tensor-parallel-size", "2", "--pipeline-parallel-size", "2") as server:
        until(lambda: server.metrics("kv_store_entries", tier="disk") >= NUM_BLOCKS)
        warm = Answer(server)
        assert warm.text == expected
        assert warm.tiers == {"device": 0, "host": 0, "disk": SHARED, "peer": 0}
        forget(server, external=True)
        cold = Answer(server)
        assert (cold.text, cold.cached) == (expected, 0)


def test_replicas_share_a_store_and_both_may_be_killed(expected: str) -> None:
    with serve(*FLAGS, "--kv-offloading-size", "0.1", "--data-parallel-size", "2") as server:
        store(server, expected)
        shared = Answer(server, 1)
        assert shared.text == expected
        assert shared.tiers == {"device": 0, "host": SHARED, "disk": 0, "peer": 0}
        os.kill(server.named("quire-core-0").pid, signal.SIGKILL)
        until(lambda: any("replica 0 is up again" in line for line in server.lines))
        back = Answer(server, 0)
        assert back.text == expected
        assert back.tiers == {"device": 0, "host": SHARED, "disk": 0, "peer": 0}
        process = server.named("quire-kv-store")
        os.kill(process.pid, signal.SIGSTOP)  # it does not answer
        forget(server)
        silent = Answer(server, 0)
        assert (silent.text, silent.cached) == (expected, 0)
        os.kill(process.pid, signal.SIGKILL)
        for replica in (0, 1):
            assert Answer(server, replica).text == expected
            assert httpx.get(f"{server.url}/health", timeout=60).status_code == 200
        until(lambda: any(each.name() == "quire-kv-store" and each.pid != process.pid for each in server.family()))
        until(lambda: server.metrics("kv_store_up") and not server.metrics("kv_store_read_bytes_total"))  # a new one
        forget(server)
        store(server, expected)
        again = Answer(server, 1)
        assert again.text == expected
        assert again.tiers == {"device": 0, "host": SHARED, "disk": 0, "peer": 0}
        assert any("the KV store was killed by SIGKILL; restarting it" in line for line in server.lines)


def test_servers_read_from_each_other(expected: str) -> None:
    """The second has another layout, and loads nothing for a while after it was cleared; the first may hang."""
    reserved = reserve_ports("127.0.0.1", 2)
    ports = [str(socket_port(each)) for each in reserved]
    token = ("--kv-offloading-size", "0.1", "--cluster-token", "a token of both servers")
    env, peers = os.environ | {"QUIRE_HOST_IP": "127.0.0.1"}, ",".join(f"127.0.0.1:{port}" for port in ports)
    with serve(*FLAGS, *token, "--kv-peer-port", ports[0], env=env) as first:
        store(first, expected, "0123456")
        salts = iter("0123456")
        flags = (*token, "--kv-peer-port", ports[1], "--kv-peers", peers)
        with serve(*FLAGS, *flags, "--tensor-parallel-size", "2", env=env) as second:
            until(lambda: second.metrics("kv_store_peers_up") == 1)

            def is_loaded() -> bool:
                loaded = Answer(second, salt=next(salts))
                assert loaded.text == expected
                return loaded.tiers == {"device": 0, "host": 0, "disk": 0, "peer": SHARED}

            until(is_loaded)  # the machine may be too busy for an answer in time
            until(lambda: first.metrics("kv_store_sent_bytes_total") > 0)
            forget(second)
            assert Answer(second, salt="0").tiers["host"] == SHARED
            os.kill(first.named("quire-kv-store").pid, signal.SIGSTOP)
            hung = Answer(second, salt=next(salts))
            assert (hung.text, hung.cached) == (expected, 0)
            os.kill(first.named("quire-kv-store").pid, signal.SIGCONT)
            until(lambda: second.metrics("kv_store_peers_up") == 1)
            forget(second, external=True)
            cleared = Answer(second, salt="6")
            assert (cleared.text, cleared.cached) == (expected, 0)
    for each in reserved:
        each.close()


def test_hosts_of_a_server_read_from_each_other(expected: str) -> None:
    """They are not told of each other's stores."""
    flags = (*FLAGS, "--kv-offloading-size", "0.1", "-dp", "2", "-dpl", "1", "--data-parallel-rpc-port", free_port())
    behind = quire("serve", *flags, "-dpr", "1", "--data-parallel-address", "127.0.0.1", "--headless")
    with run(*behind), serve(*flags) as server:
        until(lambda: server.metrics("kv_store_peers_up") >= 1)
        store(server, expected)

        def is_loaded() -> bool:
            answer = Answer(server, 1)
            assert answer.text == expected
            return SHARED in (answer.tiers["peer"], answer.tiers["host"])

        until(is_loaded)
        until(lambda: server.metrics("prompt_tokens_cached_by_source_total", source="peer") >= SHARED)


def test_a_program_has_tiers_too(tmp_path: Path, expected: str) -> None:
    options: dict[str, Any] = {"device": "cpu", "dtype": "float32", "kv_disk": f"{tmp_path}/kv:0.5"}
    params, prompt = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True), {"prompt_token_ids": PROMPT}
    with LLM(**options, kv_cache_memory_bytes=64 << 20) as llm:
        until(llm._frontend.metrics.stores)
        (first,) = llm.generate(prompt, params)
        assert (first.outputs[0].text, first.num_cached_tokens) == (expected, 0)
        family = psutil.Process().children(recursive=True)
        assert [each.name() for each in family].count("quire-kv-store") == 1
    with LLM(**options, kv_cache_memory_bytes=64 << 20) as llm:
        stores = llm._frontend.metrics.stores
        until(lambda: stores() and stores()["localhost"][0].disk_entries >= NUM_BLOCKS)
        (second,) = llm.generate(prompt, params)
        assert second.outputs[0].text == expected
        assert second.num_loaded_tokens == (0, SHARED, 0)
        assert llm.reset_prefix_cache(reset_connector=True) is True
        (third,) = llm.generate(prompt, params)
        assert (third.outputs[0].text, third.num_cached_tokens) == (expected, 0)
