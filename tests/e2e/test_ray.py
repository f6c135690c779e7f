"""A Ray cluster of two hosts: two network namespaces, each with its raylet. Tokens, failures, and misconfigurations."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest

from quire.engine.config.options import DEMO_MODEL
from tests.e2e.serving import quire, serve
from tests.e2e.test_replicas import streams
from tests.fakes.namespaces import Command, Host, two_hosts
from tests.fakes.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

HEAD, PORT = "10.77.0.1", 6379
URL = f"http://{HEAD}:8000"
"""Seconds, of which Ray's share is bounded by `ray_cluster.CONNECT_SECONDS`; the rest is imports on a busy machine."""
STOPPED_SECONDS = 15.0
SHAPE = ("--max-model-len", "1024", "--max-num-seqs", "8", "--kv-cache-memory-bytes", "20000000")
GRID = ("--tensor-parallel-size", "2", "--pipeline-parallel-size", "2")
RAY = ("--distributed-executor-backend", "ray")
REQUESTS: list[dict[str, Any]] = [
    {"prompt": "Quire is", "max_tokens": 40, "temperature": 0.0},
    {"prompt": "The rank that", "max_tokens": 40, "temperature": 1.0, "seed": 7},
    {"prompt": "When a request", "max_tokens": 40, "temperature": 0.0},
]
_CLEAN = {name: "" for name in os.environ if name.lower() in ("http_proxy", "https_proxy", "all_proxy", "grpc_proxy")}


@dataclass
class Cluster:
    """Two raylets of two processors each. Some model folders differ between the hosts."""

    hosts: tuple[Host, Host]
    folder: Path
    models: dict[str, Path]
    raylets: list[Command] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)

    def ray(self, host: Host, *arguments: str, before: str = "", **env: str) -> Command:
        """`ray start`, until it is up; `before` is done by a shell in the same mount namespace."""
        start = [f"{Path(sys.executable).parent}/ray", "start", "--block", "--node-ip-address", host.address]
        start += ["--object-store-memory", "80000000", "--disable-usage-stats", *arguments]
        command = host.start("sh", "-c", f'{before or ":"} && exec "$@"', "sh", *start, **{**_CLEAN, **self.env, **env})
        self.raylets.append(command)
        command.wait_for("This command will now block")
        return command

    def start_second(self) -> None:
        """The raylet of host 2, in place of one that is lost."""
        for lost in self.raylets[1:]:
            lost.kill_all()
        del self.raylets[1:]
        elsewhere = f"mount --bind {self.folder}/config.json {self.models['other']}/config.json && "
        elsewhere += f"mount --bind {self.folder}/empty {self.models['missing']}"
        self.ray(self.hosts[1], "--address", f"{HEAD}:{PORT}", "--num-cpus", "2", before=elsewhere)

    def serve(self, *arguments: str, **env: str) -> Command:
        """`quire serve` on host 1."""
        return self.start(*quire("serve", *arguments, "--host", HEAD, "--port", "8000"), **env)

    def serve_when_free(self, *arguments: str) -> Command:
        """`serve`, repeated until Ray has noticed the end of a node, or of a server before this one."""
        deadline = time.monotonic() + 60
        while True:
            command = self.serve(*arguments)
            if command.wait_for("serving .* on http|^quire: error: ")[0].startswith("serving"):
                return command
            assert time.monotonic() < deadline, command.text
            command.wait(STOPPED_SECONDS)

    def start(self, *command: str, **env: str) -> Command:
        """A program on host 1, among the processes of its raylet: that looks for its drivers there."""
        (first,) = psutil.Process(self.raylets[0].process.pid).children()
        inside = ["nsenter", "--target", str(first.pid), "--pid", "--ipc", "--mount"]
        process = subprocess.Popen(
            ["ip", "netns", "exec", self.hosts[0].name, *inside, *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, **_CLEAN, **self.env, "RAY_ADDRESS": f"{HEAD}:{PORT}", **env},
        )
        self.hosts[0].commands.append(Command(process, command))
        return self.hosts[0].commands[-1]

    def refusal(self, *arguments: str, **env: str) -> str:
        """The last line of `quire serve`, when it does not start."""
        command = self.serve(*arguments, **env)
        assert command.wait(90) in (1, 2)
        command.join()
        assert "Traceback" not in command.text
        return command.lines[-1]

    def ours(self) -> set[psutil.Process]:
        """Processes of ours under Ray's."""
        found = set()
        for raylet in self.raylets:
            for process in raylet.family():
                if process.is_running() and process.name().startswith("quire-"):
                    found.add(process)
        return found


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    # Short, since it holds Unix sockets.
    with (
        tempfile.TemporaryDirectory(prefix="qray-", dir="/tmp", ignore_cleanup_errors=True) as name,
        two_hosts() as hosts,
    ):
        folder = Path(name)
        models = {name: folder / name for name in ("missing", "other")}
        for path in models.values():
            shutil.copytree(DEMO_MODEL, path)
        config = json.loads((DEMO_MODEL / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "rope_theta": 5000.0}))
        (folder / "empty").mkdir()
        made = Cluster(hosts, folder, models, env={"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "s" * 32})
        first = ("--head", "--port", str(PORT), "--temp-dir", str(folder / "ray"), "--include-dashboard=false")
        made.ray(hosts[0], *first, "--num-cpus", "2")
        made.start_second()
        yield made


def ask(url: str, host: Host | None = None) -> list[str]:
    """The texts of `REQUESTS`, which run together."""

    def one(body: dict[str, Any]) -> str:
        answer = httpx.post(f"{url}/v1/completions", json={"model": "quire-demo", **body}, timeout=120)
        return str(answer.raise_for_status().json()["choices"][0]["text"])

    def there(body: dict[str, Any]) -> str:
        if host is None:
            return one(body)
        with host.inside():
            return one(body)

    with ThreadPoolExecutor(len(REQUESTS)) as pool:
        return list(pool.map(there, REQUESTS))


@pytest.fixture(scope="module")
def expected() -> tuple[list[str], list[str]]:
    """The output of one process: the texts of `REQUESTS`, and the texts of streams."""
    with serve(*SHAPE) as server:
        return ask(server.url), asyncio.run(streams(server.url, lambda: None))


def is_alive(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def assert_gone(processes: set[psutil.Process]) -> None:
    """Within `STOPPED_SECONDS`. `ray start`, which is the first process of its host there, collects no orphans."""
    deadline = time.monotonic() + STOPPED_SECONDS
    while left := [process for process in processes if is_alive(process)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


def test_stages_on_two_nodes_answer_as_one_process(cluster: Cluster, expected: tuple[list[str], list[str]]) -> None:
    api = cluster.serve_when_free(*SHAPE, *GRID, *RAY)
    names = {
        host.address: sorted(p.name() for p in raylet.family() if p.is_running() and p.name().startswith("quire-rank"))
        for host, raylet in zip(cluster.hosts, cluster.raylets, strict=True)
    }
    assert names == {HEAD: ["quire-rank-0", "quire-rank-1"], "10.77.0.2": ["quire-rank-2", "quire-rank-3"]}
    assert ask(URL, cluster.hosts[0]) == expected[0]
    processes = cluster.ours() | api.family()
    api.named("quire-serve").terminate()
    assert api.wait(STOPPED_SECONDS) == 0
    assert_gone(processes)


def test_a_replica_continues_with_kv_of_another_nodes_ranks(cluster: Cluster) -> None:
    """One node computes prompts and the other one continues, by way of the KV store of the host with the cores."""
    api = cluster.serve_when_free(*SHAPE, "-tp", "2", *RAY, "--prefill-replicas", "1", "--decode-replicas", "1")
    loaded, start, deadline = 0.0, 300, time.monotonic() + 60
    with cluster.hosts[0].inside(), httpx.Client(base_url=URL, timeout=120) as client:
        while loaded < 800:
            assert time.monotonic() < deadline
            start += 1
            body = {"prompt": [*range(start, start + 810)], "max_tokens": 8, "temperature": 0, "ignore_eos": True}
            texts = [
                client.post("/v1/completions", json=body, headers=headers)
                .raise_for_status()
                .json()["choices"][0]["text"]
                for headers in ({}, {"X-data-parallel-rank": "0"})
            ]
            assert texts[0] == texts[1]
            found = re.search(r'quire:handed_over_tokens_total\{.*engine="1".*\} (\S+)', client.get("/metrics").text)
            loaded = float(found[1]) if found else 0.0
    api.named("quire-serve").terminate()
    assert api.wait(STOPPED_SECONDS) == 0


@pytest.mark.parametrize(
    ("arguments", "env", "message"),
    [
        ((*GRID, "-tp", "4"), {}, "needs 8 CPUs; the Ray cluster has 4: 2 CPUs on 10.77.0.1, 2 CPUs on 10.77.0.2; use"),
        (("-pp", "4"), {"QUIRE_HOST_IP": "10.77.0.9"}, "the Ray node 10.77.0.1 has QUIRE_HOST_IP=10.77.0.9"),
        (("-pp", "4"), {"RAY_AUTH_TOKEN": "other" * 8}, "does not accept this process's token; give every node"),
        (("-pp", "4"), {"RAY_AUTH_TOKEN": "", "HOME": "/nowhere"}, "requires a token, and this process has none; give"),
        (("-pp", "4"), {"RAY_ADDRESS": f"{HEAD}:6000"}, f"no Ray cluster (RAY_ADDRESS={HEAD}:6000) could be joined"),
        (
            ("-pp", "4"),
            {"RAY_ADDRESS": "10.78.0.1:6379"},
            "no Ray cluster (RAY_ADDRESS=10.78.0.1:6379) could be joined",
        ),
    ],
)
def test_what_cannot_run_is_one_line(
    cluster: Cluster, arguments: tuple[str, ...], env: dict[str, str], message: str
) -> None:
    """Cases that need no cluster are in tests/integration/engine/cluster/test_ray_cluster.py."""
    assert message in cluster.refusal(*SHAPE, *RAY, *arguments, **env)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("missing", "the Ray node 10.77.0.2 has no "),
        ("other", "the Ray node 10.77.0.2 has other bytes in config.json, unlike this host; copy the same model files"),
    ],
)
def test_a_model_that_is_not_the_same_on_a_node_is_one_line(cluster: Cluster, model: str, message: str) -> None:
    assert message in cluster.refusal(str(cluster.models[model]), *SHAPE, *GRID, *RAY)


def test_other_versions_on_a_node_are_one_line(cluster: Cluster) -> None:
    metadata = cluster.folder / "older" / "torch-1.2.3.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text("Metadata-Version: 2.1\nName: torch\nVersion: 1.2.3\n")
    path = os.pathsep.join([str(metadata.parent.parent), os.environ.get("PYTHONPATH", "")])
    third = cluster.ray(cluster.hosts[1], "--address", f"{HEAD}:{PORT}", "--num-cpus", "8", PYTHONPATH=path)
    try:
        assert "the Ray node 10.77.0.2 has torch 1.2.3, and this host has" in cluster.refusal(*SHAPE, *RAY, "-tp", "8")
    finally:
        cluster.raylets.remove(third)
        third.kill_all()
        third.join()


def test_a_placement_group_is_used(cluster: Cluster) -> None:
    """`LLM` in an actor, whose group has bundles for the ranks: on host 2 only.

    Ray tells for a while that a raylet of another test, with other processors, is alive.
    """
    script = cluster.folder / "in_group.py"
    script.write_text(
        "import ray\n"
        "from ray.util.placement_group import placement_group\n"
        "from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy\n"
        "ray.init(address='auto', log_to_driver=False)\n"
        "there = [n for n in ray.nodes() if n['Alive'] and n['NodeManagerAddress'] == '10.77.0.2']\n"
        "node = next(n['NodeID'] for n in there if n['Resources'].get('CPU') == 2)\n"
        "group = placement_group([{'CPU': 1}] * 2, bundle_label_selector=[{'ray.io/node-id': node}] * 2)\n"
        "assert group.wait(30)\n"
        "@ray.remote(num_cpus=0)\n"
        "def work():\n"
        "    from quire import LLM, SamplingParams\n"
        "    llm = LLM(tensor_parallel_size=2, max_model_len=256, kv_cache_memory_bytes=20000000)\n"
        "    out = llm.generate(['Quire is'], SamplingParams(max_tokens=4, temperature=0.0))[0].outputs[0].token_ids\n"
        "    free = ray.available_resources().get(f'CPU_group_{group.id.hex()}', 0)\n"
        "    return len(out), free\n"
        "strategy = PlacementGroupSchedulingStrategy(group, placement_group_capture_child_tasks=True)\n"
        "print('it says', ray.get(work.options(scheduling_strategy=strategy).remote(), timeout=120))\n"
    )
    driver = cluster.start(sys.executable, str(script))
    assert driver.wait(180) == 0, driver.text
    driver.wait_for(r"it says \(4, 0")


def test_auto_stays_on_one_host_where_that_is_enough(cluster: Cluster) -> None:
    api = cluster.serve(*SHAPE, "-tp", "2")
    api.wait_for("serving .* on http")
    api.wait_for(r"= 2 ranks \(mp\)", 0)
    api.named("quire-serve").terminate()
    assert api.wait(STOPPED_SECONDS) == 0


def kill_actor(cluster: Cluster) -> None:
    node = next(p for p in cluster.raylets[1].family() if p.is_running() and p.name() == "quire-node-2")
    parent = node.parent()
    assert parent is not None
    parent.kill()


def kill_node(cluster: Cluster) -> None:
    cluster.raylets[1].kill_all()


def unplug(cluster: Cluster) -> None:
    cluster.hosts[1].set_link(False)


@pytest.fixture
def mended(cluster: Cluster) -> Iterator[Cluster]:
    """A cluster that has both nodes again after the test."""
    yield cluster
    cluster.hosts[1].set_link(True)
    cluster.start_second()


def test_streams_go_on_when_an_actor_is_placed_again(mended: Cluster) -> None:
    cluster = mended
    api = cluster.serve_when_free(*SHAPE, *GRID, *RAY)
    body = {"prompt": "Quire", "max_tokens": 300, "ignore_eos": True, "temperature": 0.0}

    def text(lines: Iterator[str]) -> str:
        return "".join(json.loads(line[6:])["choices"][0]["text"] for line in lines if line.startswith("data: {"))

    with cluster.hosts[0].inside(), httpx.Client(base_url=URL, timeout=300) as client:
        expected = client.post("/v1/completions", json=body).json()["choices"][0]["text"]
        with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as stream:
            lines = stream.iter_lines()
            begun = text(iter([next(lines)]))
            kill_actor(cluster)
            assert begun + text(lines) == expected
    api.named("quire-serve").terminate()
    assert api.wait(60) == 0


@pytest.mark.parametrize("problem", [unplug, kill_node])
def test_without_restarts_a_node_that_is_lost_is_named_and_all_end(
    mended: Cluster, problem: Callable[[Cluster], None]
) -> None:
    cluster = mended
    api = cluster.serve_when_free(*SHAPE, *GRID, *RAY, "--no-restart")
    processes = cluster.ours() | api.family()
    with cluster.hosts[0].inside(), openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0) as client:
        stream = client.completions.create(
            model="quire-demo", prompt="Quire", max_tokens=900, extra_body={"ignore_eos": True}, stream=True
        )
        next(stream)
        problem(cluster)
        with pytest.raises(openai.APIError, match=r"node 2 \(10.77.0.2\)"):
            list(stream)
    assert api.wait(STOPPED_SECONDS) == 1
    assert_gone(processes)


def test_replicas_are_placed_and_restarted_each_on_its_own(
    cluster: Cluster, expected: tuple[list[str], list[str]]
) -> None:
    """With a third raylet, on host 2: replica 0 is on both hosts, replica 1 on both raylets of host 2.

    One of these is lost, and another one takes its place.
    """
    third = ("--address", f"{HEAD}:{PORT}", "--num-cpus", "2")
    cluster.ray(cluster.hosts[1], *third)
    api = cluster.serve_when_free(*SHAPE, "-pp", "3", "-dp", "2", *RAY)
    api.wait_for(r"replica 0 on 2 hosts: ranks 0-1 on host 1 \(10.77.0.1\), rank 2 on host 2 \(10.77.0.2\)", 0)
    api.wait_for(r"replica 1 on 2 hosts: ranks 0-1 on host 1 \(10.77.0.2\), rank 2 on host 2 \(10.77.0.2\)", 0)
    running = [(raylet, each) for raylet in cluster.raylets[1:] for each in raylet.family() if each.is_running()]
    there = {process.name(): raylet for raylet, process in running}
    with cluster.hosts[0].inside():
        assert ask(URL) == expected[0]
        assert asyncio.run(streams(URL, there["quire-node-1"].kill_all)) == expected[1]
        api.wait_for(r"ERROR .*replica 1: node 1 \(10.77.0.2\) was lost: .*; restarting it", 0)
        cluster.ray(cluster.hosts[1], *third)
        until(lambda: "replica 1 is up again" in api.text, 150)
        api.wait_for("Ray says that the node has died; looking for another place", 0)
        metrics = httpx.get(f"{URL}/metrics").text
        assert re.search('quire:engine_deaths_total{engine="0".*} 0.0', metrics)
        assert re.search('quire:replicas{.*state="up"} 2.0', metrics)
    processes = cluster.ours() | api.family()
    api.named("quire-serve").terminate()
    assert api.wait(STOPPED_SECONDS) == 0
    assert_gone(processes)
