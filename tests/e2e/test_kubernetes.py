"""The commands of the manifests for several hosts, on two hosts: the same tokens as in one process.

Pods are started as a cluster would start them: with its environment variables, a read-only root file system, and `/tmp`
and `/dev/shm` of their own. Only the model, its layout and the sizes are others.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import httpx
import psutil
import pytest
import yaml

from tests.e2e.serving import quire, serve
from tests.fakes.manifests import (
    Manifest,
    all_pod_templates,
    arguments,
    component,
    environment,
    find,
    flags,
    kustomize,
    quire_container,
)
from tests.fakes.namespaces import Command, Host, two_hosts

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
SECRETS = {"api-keys": "a-key-for-tests", "metrics-key": "another-key", "cluster-token": "a-token-for-tests-only"}
SIZES = {"dtype": "float32", "max-model-len": 1024, "max-num-seqs": 8, "kv-cache-memory-bytes": 20_000_000}
INDEX = "metadata.labels['apps.kubernetes.io/pod-index']"
REQUESTS: list[dict[str, Any]] = [
    {"prompt": prompt, "max_tokens": 24, "ignore_eos": True, **sampling}
    for prompt in ("Quire is", "The rank that", "When a request")
    for sampling in ({"temperature": 0}, {"temperature": 1.0, "top_p": 0.95, "seed": 7})
]
_POD = """
case $0 in /tmp/*) mount --bind "$0" /mnt ;; esac
mount -t tmpfs tmpfs /tmp && mount -t tmpfs tmpfs /dev/shm &&
case $0 in /tmp/*) mkdir -p "$0" && mount --bind /mnt "$0" ;; esac &&
mount -o remount,bind,ro / && exec "$@"
"""
"""A pod's own /tmp, which does not hide the checkout, `$0`, if that is there; and nothing else can be written."""
_CLEAN = {name: "" for name in os.environ if name.lower() in ("http_proxy", "https_proxy", "all_proxy", "grpc_proxy")}
_CLEAN |= {"TMPDIR": "/tmp", "OMP_NUM_THREADS": "1"}
_RAY_PORT = "6379"


def ask(url: str, host: Host | None = None, **headers: str) -> list[str]:
    """The texts that answer `REQUESTS`, sent all at once."""

    def one(body: dict[str, Any]) -> str:
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=120, headers=headers)
        return str(answer.raise_for_status().json()["choices"][0]["text"])

    def there(body: dict[str, Any]) -> str:
        if host is None:
            return one(body)
        with host.inside():
            return one(body)

    with ThreadPoolExecutor(len(REQUESTS)) as pool:
        return list(pool.map(there, REQUESTS))


@pytest.fixture(scope="module")
def expected() -> Iterator[list[str]]:
    with serve(*(f"--{name}={value}" for name, value in SIZES.items())) as server:
        yield ask(server.url)


@dataclass
class Cluster:
    """Two hosts, and the volumes of the pods on them."""

    hosts: tuple[Host, Host]
    volumes: Path

    def configure(self, manifests: list[Manifest], **layout: int) -> None:
        """Fill the volumes, with another model and layout than in the manifests."""
        ours = {key: value for key, value in flags(manifests).items() if "model" not in key}
        for folder, files in (
            ("config", {"quire.yaml": yaml.safe_dump({**ours, **SIZES, **layout})}),
            ("secrets", SECRETS),
        ):
            (self.volumes / folder).mkdir()
            for name, text in files.items():
                (self.volumes / folder / name).write_text(text)

    def start(
        self, host: Host, template: Manifest, index: int = 0, variables: Mapping[str, str] = MappingProxyType({})
    ) -> Command:
        """Start a pod, number `index` of its set; a controller adds `variables`."""
        command, env = self.command(host, template, index, variables)
        return host.start("sh", "-c", _POD, str(ROOT), *command, **env)

    def command(
        self, host: Host, template: Manifest, index: int, variables: Mapping[str, str]
    ) -> tuple[list[str], dict[str, str]]:
        """The command of a pod's container `quire`, and its environment."""
        container = quire_container(template)
        env = {**variables} | environment(container, {"status.podIP": host.address, INDEX: str(index)}, SECRETS)
        mounts = {name: self.volumes / name for name in ("config", "secrets")}
        return quire(*arguments(container, env, mounts)), _CLEAN | env

    def assert_serves(self, expected: list[str]) -> None:
        """The API is on the first host, wants a key, and is ready."""
        url = f"http://{self.hosts[0].address}:8000"
        with self.hosts[0].inside():
            assert httpx.get(f"{url}/health/ready").status_code == 200
            assert httpx.get(f"{url}/v1/models").status_code == 401
            assert httpx.get(f"{url}/metrics", headers=bearer("metrics-key")).status_code == 200
        assert ask(url, self.hosts[0], **bearer("api-keys")) == expected


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {SECRETS[key]}"}


def by_component(manifests: list[Manifest]) -> dict[str, Manifest]:
    return {component(template): template for template in all_pod_templates(manifests)}


def terminate(*commands: Command) -> None:
    """End the first, with which the others end."""
    commands[0].named("quire-serve").send_signal(signal.SIGTERM)
    assert [command.wait(30) for command in commands] == [0] * len(commands)


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    # Not in /tmp, which each pod has for itself.
    with tempfile.TemporaryDirectory(prefix="quire-volumes-", dir="/var/tmp") as folder, two_hosts() as hosts:
        yield Cluster(hosts, Path(folder))


def test_a_leader_worker_set(cluster: Cluster, expected: list[str]) -> None:
    """The worker starts before the name of the leader is published, and stays when the leader gets another address."""
    manifests = kustomize("leader-worker-set")
    cluster.configure(manifests, **{"tensor-parallel-size": 2})
    group = find(manifests, "LeaderWorkerSet", "quire-group")
    name, size = group["metadata"]["name"], group["spec"]["leaderWorkerTemplate"]["size"]
    # The controller makes the headless Service in which the leader is found, unless one of this name exists.
    assert name not in [each["metadata"]["name"] for each in manifests if each["kind"] == "Service"]
    leader = f"{name}-0.{name}.default"
    variables = {"LWS_GROUP_SIZE": str(size), "LWS_LEADER_ADDRESS": leader}
    pods = by_component(manifests)
    first, second = cluster.hosts
    second.set_names()
    worker = cluster.start(second, pods["worker"], variables={**variables, "LWS_WORKER_INDEX": "1"})
    worker.wait_for(f"{leader}: .*; trying again")
    server = cluster.start(first, pods["server"], variables={**variables, "LWS_WORKER_INDEX": "0"})
    server.wait_for("waiting up to .* for node 1")
    second.set_names(**{leader: first.address})
    server.wait_for("serving .* on http")
    assert "2 hosts: ranks 0-1 on host 0 (this host), ranks 2-3 on host 1" in server.text
    cluster.assert_serves(expected)
    server.kill_all()
    worker.wait_for("joining node 0 again")
    for change in (["delete", f"{first.address}/24"], ["add", "10.77.0.3/24"]):
        subprocess.run(["ip", "-n", first.name, "address", *change, "dev", "eth0"], check=True)
    first.address = "10.77.0.3"
    server = cluster.start(first, pods["server"], variables={**variables, "LWS_WORKER_INDEX": "0"})
    server.wait_for("waiting up to .* for node 1")
    second.set_names(**{leader: first.address})
    server.wait_for("serving .* on http")
    cluster.assert_serves(expected)
    terminate(server, worker)


def test_stateful_sets(cluster: Cluster, expected: list[str]) -> None:
    manifests = kustomize("statefulset")
    cluster.configure(manifests, **{"tensor-parallel-size": 2})
    workers = find(manifests, "StatefulSet", "quire-worker")["spec"]
    pods = by_component(manifests)
    first, second = cluster.hosts
    second.set_names(**{"quire-0.quire-hosts": first.address})
    server = cluster.start(first, pods["server"], 0)
    worker = cluster.start(second, pods["worker"], workers["ordinals"]["start"])
    server.wait_for("serving .* on http")
    cluster.assert_serves(expected)
    terminate(server, worker)


def test_replicas_join_and_leave(cluster: Cluster, expected: list[str]) -> None:
    manifests = kustomize("replicas")
    cluster.configure(manifests)
    pods = by_component(manifests)
    first, second = cluster.hosts
    for host in cluster.hosts:
        host.set_names(**{"quire-0.quire-hosts": first.address})
    server = cluster.start(first, pods["server"], 0)
    one, other = cluster.start(second, pods["replica"], 0), cluster.start(first, pods["replica"], 1)
    server.wait_for("serving .* on http")
    server.wait_for("replica 1 .*joined")
    cluster.assert_serves(expected)
    other.named("quire-replicas").send_signal(signal.SIGTERM)
    assert other.wait(30) == 0
    server.wait_for("replica 1 has been removed")
    cluster.assert_serves(expected)
    terminate(server, one)


def ray_start(group: Manifest, head: str, *, cpus: int, is_head: bool) -> list[str]:
    """The command that KubeRay generates for a group (docs.ray.io: `rayStartParams`)."""
    given = {
        "dashboard-agent-listen-port": "52365",
        "metrics-export-port": "8080",
        "num-cpus": str(cpus),
        "block": "true",
    }
    given |= {"dashboard-host": "0.0.0.0"} if is_head else {"address": f"{head}:{_RAY_PORT}"}
    given |= group["rayStartParams"]
    shown = [f"--{name}" if value == "true" else f"--{name}={value}" for name, value in sorted(given.items())]
    return [f"{Path(sys.executable).parent}/ray", "start", *(["--head"] if is_head else []), *shown]


@pytest.mark.timeout(300)
def test_a_ray_cluster(cluster: Cluster, expected: list[str]) -> None:
    manifests = kustomize("ray")
    cluster.configure(manifests, **{"tensor-parallel-size": 2})
    spec = find(manifests, "RayCluster")["spec"]
    groups = (spec["headGroupSpec"], *spec["workerGroupSpecs"])
    name = "quire-head-svc.default.svc.cluster.local"
    # As pods have one: Ray finds its own address by it.
    subprocess.run(["ip", "-n", cluster.hosts[0].name, "route", "add", "default", "dev", "eth0"], check=True)
    ray_nodes = []
    for number, (host, group) in enumerate(zip(cluster.hosts, groups, strict=True)):
        (container,) = (each for each in group["template"]["spec"]["containers"] if each["name"] == "ray")
        env = _CLEAN | environment(container, {"status.podIP": host.address}, SECRETS)
        host.set_names(**{name: cluster.hosts[0].address})
        command = ray_start(group, name, cpus=2, is_head=not number)
        ray_nodes.append(host.start("sh", "-c", _POD, str(ROOT), *command, **env))
        ray_nodes[-1].wait_for("This command will now block")
    first = cluster.hosts[0]
    command, env = cluster.command(first, groups[0]["template"], 0, {})
    assert groups[0]["template"]["spec"]["shareProcessNamespace"]
    (head,) = psutil.Process(ray_nodes[0].process.pid).children()
    inside = ["nsenter", "--target", str(head.pid), "--pid", "--ipc", "--mount", "--net"]
    process = subprocess.Popen(
        [*inside, *command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **env},
    )
    first.commands.append(server := Command(process, tuple(command)))
    server.wait_for("serving .* on http")
    cluster.assert_serves(expected)
    terminate(server)
