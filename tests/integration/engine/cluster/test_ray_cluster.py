"""Queries of a Ray cluster, with a child process that only prints: its answers, delays and failures."""

from __future__ import annotations

import importlib.util
import json
import logging
import socket
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quire.engine.cluster import ray_cluster
from quire.engine.config import devices, plan_text
from quire.engine.config.devices import Devices
from quire.engine.config.engine_config import EngineConfig
from quire.engine.config.options import EngineOptions
from quire.engine.core.launch import replica_config
from quire.engine.protocol.errors import ConfigError

OPTIONS = EngineOptions(distributed_executor_backend="ray", tensor_parallel_size=2, pipeline_parallel_size=2)
ANSWER: dict[str, Any] = {
    "address": "10.0.0.1:6379",
    "head": "10.0.0.1",
    "kind": "cpu",
    "replicas": [{"nodes": [("a", "10.0.0.1"), ("b", "10.0.0.2")], "ranks_per_node": [3, 1]}],
    "memory": {"a": 900, "b": 200},
}


@pytest.fixture(autouse=True)
def _is_ray_without_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray counts as installed, as no test here imports it, and the host has no cluster."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


def play(monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    """Run this program instead of the one that asks Ray."""
    monkeypatch.setattr(ray_cluster, "_COMMAND", (sys.executable, "-c", f"import sys, time; {program}"))


def answer(monkeypatch: pytest.MonkeyPatch, **changes: object) -> None:
    text = "quire: connected\n" + json.dumps({**ANSWER, **changes})
    play(monkeypatch, f"print({text!r})")


def of_replicas(config: EngineConfig) -> list[EngineConfig]:
    return [replica_config(config, replica, "") for replica in config.parallel.local_replicas]


def refusal(options: EngineOptions = OPTIONS) -> str:
    with pytest.raises(ConfigError) as error:
        ray_cluster.find(options)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_ranks_go_where_the_cluster_has_room(monkeypatch: pytest.MonkeyPatch) -> None:
    answer(monkeypatch)
    found = ray_cluster.find(OPTIONS)
    assert found is not None
    (placement,), available = found
    assert [placement.ranks_of(node) for node in range(3)] == [range(0), range(3), range(3, 4)]  # node 0 is the core
    assert placement.nodes == (("a", "10.0.0.1"), ("b", "10.0.0.2"))
    assert (placement.options.device, placement.options.master_addr) == ("cpu", "10.0.0.1")
    assert available == Devices("cpu", 4, 200)  # of one rank, on the node with least for each


def test_replicas_share_what_a_host_has(monkeypatch: pytest.MonkeyPatch) -> None:
    first = {"nodes": [("a", "10.0.0.1")], "ranks_per_node": [2], "bundles": [0]}
    second = {"nodes": [("a", "10.0.0.1"), ("b", "10.0.0.2")], "ranks_per_node": [1, 1], "bundles": [1]}
    answer(monkeypatch, replicas=[first, second], memory={"a": 900 << 30, "b": 400 << 30})
    options = replace(OPTIONS, tensor_parallel_size=1, data_parallel_size=2)
    config = ray_cluster.resolve(options)
    assert [each.parallel.hosts for each in of_replicas(config)] == [range(2), range(3)]
    assert [each.parallel.executor for each in of_replicas(config)] == ["ray", "ray"]
    found = ray_cluster.find(options)
    assert found is not None
    placements, available = found
    assert [each.all_ranks_per_node for each in placements] == [(3,), (3, 1)]
    assert [each.bundles for each in placements] == [(0,), (1,)]
    assert available == Devices("cpu", 4, 300 << 30)
    text = "\n".join(plan_text.parallel_lines(config.parallel, config.model.architecture))
    assert "  replica 0 on 1 host: ranks 0-1 on host 1 (10.0.0.1)\n" in text
    assert "  replica 1 on 2 hosts: rank 0 on host 1 (10.0.0.1), rank 1 on host 2 (10.0.0.2)\n" in text
    assert (
        "  pipeline across hosts over the network\n  2 replicas, which run independently, each with the ranks" in text
    )


def test_a_gpu_is_one_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    answer(monkeypatch, kind="cuda", memory={"a": 900, "b": 700})
    found = ray_cluster.find(OPTIONS)
    assert found is not None
    assert found[1] == Devices("cuda", 4, 700)


def test_a_stage_on_several_nodes_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    answer(monkeypatch, split_stages=[1])
    monkeypatch.setattr(logging.getLogger("quire"), "propagate", True)
    with caplog.at_level("WARNING"):
        ray_cluster.find(OPTIONS)
    assert "stage 1 of tensor parallel 2 is on several nodes" in caplog.text


def test_missing_cluster_resources_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    play(monkeypatch, 'print(\'{"error": "too few"}\')')
    assert refusal() == "too few"


def test_a_wrong_token_is_reported_as_soon_as_ray_logs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    play(monkeypatch, "print('RPC error: InvalidAuthToken: no', file=sys.stderr, flush=True); time.sleep(60)")
    assert "does not accept this process's token; give every node and this process the same" in refusal()


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("time.sleep(60)", "no Ray cluster (this host) could be joined within 0 s: check that it runs"),
        (
            "print('quire: connected', flush=True); time.sleep(60)",
            "accepts connections but does not respond; see `ray status`",
        ),
        ("sys.exit('out of luck')", "could not be queried: out of luck"),
    ],
)
def test_a_cluster_that_does_not_answer_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, program: str, message: str
) -> None:
    play(monkeypatch, program)
    seconds = 0.0 if program.startswith("time.sleep") else 60.0
    monkeypatch.setattr(ray_cluster, "CONNECT_SECONDS", seconds)
    monkeypatch.setattr(ray_cluster, "NODES_SECONDS", -seconds)  # both together are waited for once it has connected
    assert message in refusal()


def test_an_address_without_a_listener_is_reported_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{taken.getsockname()[1]}")
        assert "could be joined (connection refused)" in refusal()


def test_a_ray_client_is_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "ray://10.0.0.1:10001")
    assert "run quire on one of its nodes" in refusal()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"nnodes": 2}, "--nnodes 2 is not supported with"),
        (
            {"data_parallel_size": 2, "data_parallel_size_local": 1},
            "--data-parallel-size-local 1 is not supported with",
        ),
        ({"data_parallel_size": 2, "data_parallel_start_rank": 1}, "--data-parallel-start-rank 1 is not supported"),
        ({"data_parallel_size": 2, "enable_expert_parallel": True}, "replicas that share experts are not supported"),
        (
            {"prefill_replicas": 1, "decode_replicas": 1, "prefill_tensor_parallel_size": 2},
            "--prefill-pipeline-parallel-size: replicas that --distributed-executor-backend ray places have the same",
        ),
    ],
)
def test_what_ray_does_not_do_is_refused(changes: dict[str, Any], message: str) -> None:
    assert message in refusal(EngineOptions(distributed_executor_backend="ray", **changes))


def test_without_ray_its_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert refusal().endswith("pip install 'quire-llm[ray]'")


@pytest.mark.parametrize(
    ("gpus", "kind", "is_ray"), [(4, "cuda", False), (2, "cuda", True), (0, "cuda", True), (0, "cpu", False)]
)
def test_auto_is_ray_where_this_host_has_too_few_gpus(
    monkeypatch: pytest.MonkeyPatch, gpus: int, kind: str, is_ray: bool
) -> None:
    options = EngineOptions(tensor_parallel_size=4)
    monkeypatch.setattr(devices, "count_gpus", lambda: gpus)
    answer(monkeypatch, kind=kind)
    monkeypatch.setattr(ray_cluster, "_CURRENT_CLUSTER", Path("/nowhere"))
    assert ray_cluster.find(options) is None  # no cluster is at hand
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{server.getsockname()[1]}")
        assert (ray_cluster.find(options) is not None) == is_ray


def test_auto_goes_on_without_a_cluster_that_is_gone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(devices, "count_gpus", lambda: 0)
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    monkeypatch.setattr(logging.getLogger("quire"), "propagate", True)
    assert ray_cluster.find(EngineOptions(tensor_parallel_size=4)) is None
    assert "Ray is not used: no Ray cluster" in caplog.text


def test_a_child_that_fails_after_connecting_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    play(monkeypatch, "print('quire: connected', flush=True); sys.exit('KeyError: 5')")
    assert "could not be queried: KeyError: 5" in refusal()
