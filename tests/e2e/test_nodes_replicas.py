"""Replicas that span hosts, behind one API: four hosts at a switch, two for each of two replicas."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Iterator

import httpx
import psutil
import pytest

from tests.e2e.serving import quire
from tests.e2e.test_replicas import KEY, answers, listed, states, streams
from tests.e2e.test_replicas import expected as expected
from tests.fakes.namespaces import Command, Host, switched_hosts
from tests.fakes.waiting import until

pytestmark = pytest.mark.slow

ENVIRONMENT = {"QUIRE_CLUSTER_TOKEN": "a token for tests only", "OMP_NUM_THREADS": "1"}
EXIT_SECONDS = 30.0


class Site:
    """Four hosts, each with its command; the first one has the API."""

    def __init__(self, hosts: list[Host]) -> None:
        self.hosts, self.url = hosts, f"http://{hosts[0].address}:8000"
        self.commands = {node: self.start(node) for node in (3, 1, 2, 0)}
        self.api = self.commands[0]
        self.api.wait_for("serving .* on http")

    def start(self, node: int, dp: int = 2) -> Command:
        role = ("--headless",) if node else ("--host", self.hosts[0].address, "--admin-key", "none")
        layout = ("-pp", "2", "-dp", str(dp), "--nnodes", "4", "--node-rank", str(node))
        shape = ("--max-model-len", "512", "--max-num-seqs", "8", "--kv-cache-memory-bytes", "20000000")
        where = ("--master-addr", self.hosts[0].address, "--kv-offloading-size", "0.1")
        return self.hosts[node].start(*quire("serve", *layout, *where, *role, *shape), **ENVIRONMENT)

    def restart(self, node: int) -> None:
        """As a service manager does."""
        self.commands[node].join()
        self.commands[node] = self.start(node)

    def counted(self, name: str) -> list[float]:
        """A metric of each replica."""
        text = httpx.get(f"{self.url}/metrics", headers=KEY).text
        return [float(number) for number in re.findall(rf'^{name}{{engine="\d".*}} (\S+)$', text, re.MULTILINE)]


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    with switched_hosts(4) as hosts:
        yield Site(hosts)


def test_tokens_are_those_of_one_process(site: Site, expected: tuple[list[str], list[str]]) -> None:
    names = [sorted(process.name() for process in command.family()) for _, command in sorted(site.commands.items())]
    assert [[name for name in each if re.fullmatch("quire-(core|rank|node).*", name)] for each in names] == [
        ["quire-core-0", "quire-rank-0"],
        ["quire-node-1", "quire-rank-1"],
        ["quire-core-1", "quire-rank-0"],
        ["quire-node-3", "quire-rank-1"],
    ]
    with site.hosts[0].inside():
        assert answers(site.url) == expected[0]
        assert [each["host"] for each in listed(site.url)] == ["10.77.0.1", "10.77.0.3"]
        refused = httpx.post(f"{site.url}/replicas", json={"data_parallel_size": 3}, headers=KEY)
        assert (refused.status_code, "replicas on several --nnodes" in refused.text) == (400, True)


def test_kv_of_one_replica_is_loaded_by_the_other(site: Site) -> None:
    """By way of the stores of both first hosts, to ranks of all four; also of prompts that the one computes for the
    other."""
    deadline, from_peer, start = time.monotonic() + 120, 0, 300
    with site.hosts[0].inside(), httpx.Client(base_url=site.url, headers=KEY, timeout=120) as client:

        def answer(replica: int | None) -> tuple[str, dict[str, int]]:
            """The text, and where the prompt's tokens have come from."""
            body = {"prompt": [*range(start, start + 490)], "max_tokens": 8, "temperature": 0, "ignore_eos": True}
            chosen = {} if replica is None else {"X-data-parallel-rank": f"{replica}"}
            answer = client.post("/v1/completions", json=body, headers=chosen)
            found = answer.raise_for_status().json()
            details = found["usage"]["prompt_tokens_details"].get("cached_tokens_details", {})
            return found["choices"][0]["text"], details

        while not from_peer:
            assert time.monotonic() < deadline
            start += 1
            expected, _ = answer(0)
            time.sleep(1.0)  # what is not stored by then is not loaded: the next prompt is
            text, tiers = answer(1)
            assert text == expected
            from_peer = tiers.get("peer", 0)
        assert client.post("/replicas", json={"prefill_replicas": 1, "decode_replicas": 1}).status_code == 202
        while sum(site.counted("quire:handed_over_tokens_total")) < 400:
            assert time.monotonic() < deadline
            start += 1
            text, _ = answer(None)
            assert text == answer(0)[0]
        assert client.post("/replicas", json={"prefill_replicas": 0}).status_code == 202


@pytest.mark.parametrize(
    ("lost", "victim", "reason"),
    [
        (1, 0, r"replica 0: node 1 \(10.77.0.2\) was lost: its connection has closed; restarting it"),
        (2, 1, r"replica 1: replica 1 \(10.77.0.3\) was lost: its connection has closed"),
    ],
)
def test_a_replica_that_loses_a_host_is_restarted_alone(
    site: Site, expected: tuple[list[str], list[str]], lost: int, victim: int, reason: str
) -> None:
    """Its streams go on at the other one, with the same tokens. Its other host, which has the core or not, is there."""

    def lose_host() -> None:
        site.commands[lost].kill_all()
        site.restart(lost)

    again = f"replica {victim} is up again"
    with site.hosts[0].inside():
        times, deaths = site.api.text.count(again), site.counted("quire:engine_deaths_total")
        assert asyncio.run(streams(site.url, lose_host)) == expected[1]
        site.api.wait_for(reason, 0)
        until(lambda: site.api.text.count(again) > times)
        deaths[victim] += 1
        assert site.counted("quire:engine_deaths_total") == deaths
        assert (states(site.url), httpx.get(f"{site.url}/health").status_code) == ({0: "up", 1: "up"}, 200)


def test_a_replica_leaves_with_its_hosts_and_comes_back(site: Site, expected: tuple[list[str], list[str]]) -> None:
    with site.hosts[0].inside():
        assert asyncio.run(streams(site.url, site.commands[2].named("quire-replicas").terminate)) == expected[1]
        assert [site.commands[node].wait(EXIT_SECONDS) for node in (2, 3)] == [0, 0]
        assert (states(site.url), site.api.text.count("replica 1 has been removed")) == ({0: "up"}, 1)
        for node in (3, 2):
            site.restart(node)
        until(lambda: states(site.url) == {0: "up", 1: "up"})
        assert answers(site.url) == expected[0]


def test_all_wait_for_a_host_with_the_api_that_is_lost(site: Site, expected: tuple[list[str], list[str]]) -> None:
    site.commands[0].kill_all()
    site.restart(0)
    site.api = site.commands[0]
    site.api.wait_for("serving .* on http")
    with site.hosts[0].inside():
        assert answers(site.url) == expected[0]


def test_nodes_that_do_not_fit_are_refused_at_once(site: Site) -> None:
    for node, dp, text in (
        (3, 2, r"node 3 \(10.77.0.4\) cannot join: node 3 \(10.77.0.4\) is node 3 already"),
        (2, 2, r"replica 1 \(10.77.0.3\) cannot join: replica 1 \(10.77.0.3\) is replica 1 already"),
        (3, 4, r"replica 3 \(10.77.0.4\) has --data-parallel-size 4, and the host with the API \(10.77.0.1\) has 2"),
    ):
        other = site.start(node, dp)
        assert other.wait(EXIT_SECONDS) == 2
        other.wait_for(f"quire: error: {text}", 0)


def test_all_end_when_the_api_does_and_streams_before(site: Site, expected: tuple[list[str], list[str]]) -> None:
    processes = {process for command in site.commands.values() for process in command.family()}
    with site.hosts[0].inside():
        stop = site.api.named("quire-serve").terminate
        assert asyncio.run(streams(site.url, stop)) == expected[1]
    assert [site.commands[node].wait(EXIT_SECONDS) for node in range(4)] == [0, 0, 0, 0]
    assert not psutil.wait_procs(processes, timeout=5)[1]
    assert not any("Traceback" in command.text for command in site.commands.values())
