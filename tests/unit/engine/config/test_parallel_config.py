"""The replicas and ranks of each host, if replicas span hosts or hosts have several."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from quire.engine.architecture.families import from_hf_config
from quire.engine.config import parallel_config, plan_text
from quire.engine.config.devices import Devices
from quire.engine.config.engine_config import ParallelConfig
from quire.engine.config.options import EngineOptions
from quire.engine.config.resolve import resolve
from quire.engine.core.launch import replica_config
from quire.engine.protocol.errors import ConfigError
from tests.unit.engine.config.test_resolve import LLAMA

ARCH = from_hf_config(LLAMA)
SPANS: dict[str, Any] = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "data_parallel_size": 2, "nnodes": 4}


def layout(**options: Any) -> ParallelConfig:
    asked = EngineOptions(master_addr="10.0.0.1", master_port=7000, **options)
    return parallel_config.resolve(asked, ARCH, Devices("cpu", 8, 1 << 30))


def test_replicas_have_consecutive_hosts() -> None:
    of_nodes = [layout(**SPANS, node_rank=node) for node in range(4)]
    assert [each.local_replicas for each in of_nodes] == [range(1), range(1), range(1, 2), range(1, 2)]
    assert [each.hosts for each in of_nodes] == [range(2), range(2), range(2, 4), range(2, 4)]
    assert [each.ranks_of(each.node) for each in of_nodes] == [range(2), range(2, 4), range(2), range(2, 4)]
    assert [[each.device_of(rank) for rank in each.ranks_of(each.node)] for each in of_nodes] == [[0, 1]] * 4
    assert {each.coordinator for each in of_nodes} == {("10.0.0.1", 7000)}
    firsts = [parallel_config.is_first_of_replica(EngineOptions(**SPANS, node_rank=node)) for node in range(4)]
    assert firsts == [True, False, True, False]


def test_hosts_have_whole_replicas() -> None:
    of_nodes = [layout(data_parallel_size=4, tensor_parallel_size=2, nnodes=2, node_rank=node) for node in range(2)]
    assert [each.local_replicas for each in of_nodes] == [range(2), range(2, 4)]
    assert [(each.hosts, each.num_local_ranks) for each in of_nodes] == [(range(1), 4), (range(1, 2), 4)]
    assert [replace(each, replica=each.local_replicas[1]).device_of(0) for each in of_nodes] == [2, 2]
    assert {each.coordinator for each in of_nodes} == {("10.0.0.1", 7000)}
    assert not any(each.external_lb for each in of_nodes)


def test_the_plan_numbers_hosts_among_all() -> None:
    text = "\n".join(plan_text.parallel_lines(layout(**SPANS, node_rank=2), ARCH))
    assert "  replica 1 on 2 hosts: ranks 0-1 on host 2 (this host), ranks 2-3 on host 3\n" in text
    assert "  2 replicas, which run independently: replica 1 on this host" in text


def test_the_core_of_a_replica_leads_its_other_hosts() -> None:
    config = resolve(EngineOptions(device="cpu", pipeline_parallel_size=2, data_parallel_size=2, nnodes=4))
    own = replica_config(config, 0, "", ("10.0.0.1", 4321)).parallel
    assert (own.master, replica_config(config, 0, "").parallel.master) == (("10.0.0.1", 4321), ("127.0.0.1", 29501))


def test_nodes_with_replicas_must_agree_on_their_number() -> None:
    settings = resolve(EngineOptions(device="cpu", data_parallel_size=2, nnodes=2)).shared_settings
    assert (settings["--nnodes"], settings["--data-parallel-size"]) == ("2", "2")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data_parallel_size": 3}, "--nnodes 4 with --data-parallel-size 3: replicas have whole hosts, or"),
        ({"nnodes": 6}, r"--nnodes 6: 4 ranks .* cannot be divided evenly among the 3 hosts of a replica"),
        ({"node_rank": 4}, "--node-rank 4 is out of range: with --nnodes 4 it must be from 0 to 3"),
        ({"data_parallel_start_rank": 1}, "--data-parallel-start-rank with --nnodes 4: --node-rank says which"),
        ({"data_parallel_size_local": 1}, "--data-parallel-size-local with --nnodes 4: .*; omit it"),
        ({"data_parallel_address": "10.0.0.1"}, "--data-parallel-address with --nnodes 4: .* --master-addr where"),
        ({"enable_expert_parallel": True}, r"each of the 2 \(--data-parallel-size\) has 2 of the 4 \(--nnodes\); omit"),
    ],
)
def test_what_cannot_be_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        layout(**{**SPANS, **changes})
