"""The engine manager's decisions when cores come up and die, with cores controlled by the test."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from quire.engine.config import devices, topology
from quire.engine.config.added_replica import added_replica
from quire.engine.config.engine_config import EngineConfig, ExpertParallelConfig, KVStoreConfig
from quire.engine.core.launch import CoreArgs
from quire.engine.kv_store.launch import KVStoreArgs
from quire.engine.process.supervisor import Process
from quire.engine.protocol.errors import ConfigError
from quire.engine.protocol.stats import EngineStats
from quire.engine.protocol.supervision import (
    EngineFailed,
    EngineState,
    Failed,
    Ready,
    ReplicaDraining,
    ReplicaLost,
    ReplicaRemoved,
    ReplicaRole,
    ReplicaRoles,
    ReplicaStarting,
    ReplicaUp,
    SetLogLevel,
    Shutdown,
    UseKVPeers,
)
from quire.server.client import engine_manager as module
from quire.server.client.dp_coordinator import DPCoordinator, DPLeader, DPMember
from quire.server.client.engine_manager import EngineManager
from quire.server.config.server_options import RestartPolicy
from tests.fakes.supervised import FakeProcess


class Engine:
    """A manager, the cores that it has started, and the states that it has reported."""

    def __init__(
        self,
        config: EngineConfig,
        policy: RestartPolicy,
        started: list[tuple[CoreArgs, FakeProcess]],
        *,
        is_coupled: bool,
        count: int,
        num_clients: int,
        hosts: DPCoordinator | None,
        local: int | None,
        kv_store: KVStoreConfig | None,
        stores: list[tuple[KVStoreArgs, FakeProcess]],
        prefill_replicas: int,
    ) -> None:
        self.started = started
        self.stores = stores
        self.states: list[EngineState] = []
        experts = ExpertParallelConfig() if is_coupled else None
        is_member = isinstance(hosts, DPMember)
        parallel = replace(
            config.parallel,
            replicas=count,
            local_replicas=range(local or count),
            experts=experts,
            external_lb=is_member,
            prefill_replicas=prefill_replicas,
        )
        config = replace(config, parallel=parallel, kv_store=kv_store)
        if prefill_replicas:
            two_ranks = replace(parallel, tensor_parallel_size=2, local_ranks=(2, *[1] * (count - 1)))
            config = replace(config, prefill=replace(config, parallel=two_ranks))
        self.manager = EngineManager(config, name="m", policy=policy, num_clients=num_clients, hosts=hosts)
        self.manager.on_change = self.states.append

    def core(self, replica: int) -> FakeProcess:
        """The newest core of a replica."""
        return [core for args, core in self.started if args.config.parallel.replica == replica][-1]

    def starts(self, replica: int) -> int:
        return sum(args.config.parallel.replica == replica for args, _ in self.started)

    def run(self, until: Callable[[], bool]) -> None:
        """Wait until it holds; otherwise the test hangs."""
        self.manager.run(until)

    def up(self, *replicas: int) -> None:
        for replica in replicas:
            self.core(replica).say(Ready({}, EngineStats(kv_blocks=100)))
            self.run(lambda replica=replica: isinstance(self.manager.states.get(replica), ReplicaUp))  # type: ignore[misc]

    def die(self, replica: int, reason: str = "rank 0 was killed by SIGKILL", *, user_error: bool = False) -> None:
        before = len(self.states)
        core = self.core(replica)
        core.say(Failed(reason, user_error))
        core.exit(1)
        self.run(lambda: len(self.states) > before)

    def live_again(self, replica: int) -> None:
        count = self.starts(replica)
        self.run(lambda: self.starts(replica) > count)
        self.up(replica)


Make = Callable[..., Engine]


@pytest.fixture
def engine(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Make]:
    monkeypatch.setattr(module, "RESTART_SECONDS", (0.0, 0.0))
    monkeypatch.setattr("quire.engine.process.supervisor._TICK_SECONDS", 0.001)
    made: list[Engine] = []

    def make(
        count: int = 1,
        *,
        is_coupled: bool = False,
        policy: RestartPolicy | None = None,
        num_clients: int = 1,
        hosts: DPCoordinator | None = None,
        local: int | None = None,
        kv_store: KVStoreConfig | None = None,
        prefill_replicas: int = 0,
    ) -> Engine:
        found: list[tuple[CoreArgs, FakeProcess]] = []
        stores: list[tuple[KVStoreArgs, FakeProcess]] = []

        def start(args: CoreArgs, folder: str) -> Process:
            assert Path(folder).is_dir()
            found.append((args, FakeProcess()))
            return found[-1][1]

        def start_store(args: KVStoreArgs) -> Process:
            stores.append((args, FakeProcess()))
            return stores[-1][1]

        monkeypatch.setattr(module, "start_core", start)
        monkeypatch.setattr(module, "start_kv_store", start_store)
        policy = policy or RestartPolicy()
        made.append(
            Engine(
                config,
                policy,
                found,
                is_coupled=is_coupled,
                count=count,
                num_clients=num_clients,
                hosts=hosts,
                local=local,
                kv_store=kv_store,
                stores=stores,
                prefill_replicas=prefill_replicas,
            )
        )
        return made[-1]

    yield make
    for each in made:
        for _, process in (*each.started, *each.stores):
            if process.code is None:
                process.exit(0)
        each.manager.close()


def test_a_replica_that_dies_comes_back_with_another_incarnation(engine: Make) -> None:
    one = engine()
    assert not one.manager.is_settled
    one.up(0)
    assert one.manager.is_settled
    one.die(0)
    one.live_again(0)
    first, lost, second = one.states
    assert isinstance(first, ReplicaUp)
    assert isinstance(second, ReplicaUp)
    assert lost == ReplicaLost(0, "rank 0 was killed by SIGKILL", returns=True)
    assert first.incarnation != second.incarnation
    assert [args.incarnation for args, _ in one.started] == [first.incarnation, second.incarnation]
    text = one.manager.metrics.exposition().decode()
    assert 'quire:engine_deaths_total{engine="0",model_name="m"} 1.0' in text
    assert 'quire:replicas{model_name="m",state="up"} 1.0' in text


def test_the_log_level_reaches_cores_their_successors_and_other_hosts(
    engine: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts, levels = DPCoordinator(), list[str]()
    monkeypatch.setattr(hosts, "set_log_level", levels.append)
    one = engine(hosts=hosts)
    one.up(0)
    one.manager.log_level_changed("error")
    level = logging.getLogger("quire").level
    try:
        one.run(lambda: bool(levels))
        assert one.core(0).heard() == [SetLogLevel("error")]
        one.die(0)
        one.live_again(0)
        assert logging.getLogger("quire").level == logging.ERROR
    finally:
        logging.getLogger("quire").setLevel(level)
    assert levels == ["error"]
    assert [args.log_level for args, _ in one.started] == ["info", "error"]
    assert one.core(0).heard() == [SetLogLevel("error")]  # its nodes may have another one


@pytest.mark.parametrize("user_error", [False, True])
def test_an_engine_that_cannot_load_is_not_started_again(engine: Make, user_error: bool) -> None:
    two = engine(2)
    two.up(1)
    two.die(0, "the weights do not fit", user_error=user_error)
    assert two.states[1:] == [EngineFailed("replica 0: the weights do not fit")]
    assert two.manager.is_user_error == user_error
    assert two.starts(0) == 1


def test_the_last_replica_may_die_so_often_only(engine: Make) -> None:
    one = engine(policy=RestartPolicy(max_restarts=2))
    one.up(0)
    for _ in range(2):
        one.die(0)
        one.live_again(0)
    one.die(0)
    failed = one.states[-1]
    assert isinstance(failed, EngineFailed)
    assert failed.reason == "rank 0 was killed by SIGKILL (death 3 within 10 minutes; see --max-restarts)"
    assert one.starts(0) == 3


def test_there_is_no_limit_while_others_are_up(engine: Make) -> None:
    two = engine(2, policy=RestartPolicy(max_restarts=1))
    two.up(0, 1)
    for _ in range(4):
        two.die(0)
        two.live_again(0)
    two.die(0)
    two.die(1)  # now none is up, but this is its first death
    assert isinstance(two.states[-1], ReplicaLost)


def test_without_restarts_the_last_death_ends_the_engine(engine: Make) -> None:
    two = engine(2, policy=RestartPolicy(is_enabled=False))
    two.up(0, 1)
    two.die(0)
    two.die(1, "rank 1 hangs")
    assert two.states[2:] == [
        ReplicaLost(0, "rank 0 was killed by SIGKILL", returns=False),
        EngineFailed("replica 1: rank 1 hangs"),
    ]
    assert (two.starts(0), two.starts(1)) == (1, 1)


def test_replicas_that_share_experts_are_restarted_together(engine: Make) -> None:
    """None is started while another is still exiting: that would fail the new one with it."""
    two = engine(2, is_coupled=True)
    two.up(0, 1)
    two.die(0, "replica 0: rank 0 was killed by SIGKILL")
    # Both at once: a request that went on at the other would be suspected of its death.
    assert {state.replica for state in two.states[2:] if isinstance(state, ReplicaLost)} == {0, 1}
    assert (two.starts(0), two.starts(1)) == (1, 1)
    two.core(1).exit(1)
    two.run(lambda: two.starts(0) == two.starts(1) == 2)
    two.up(0, 1)
    assert two.manager.failure is None


def test_replicas_of_other_hosts_are_reported(engine: Make, config: EngineConfig) -> None:
    one = engine()
    one.manager.requests[1] = "tcp://10.0.0.2:1"
    one.manager._awaited.add(1)
    one.up(0)
    one.manager.replica_up(ReplicaUp(1, 7))
    one.run(lambda: one.manager.is_settled)
    one.manager.replica_died(1, "nothing was heard for 10 s")
    one.manager.replica_died(1, "its core has ended")  # the same death
    one.manager.replica_up(ReplicaUp(1, 8))
    one.run(lambda: len(one.states) == 4)
    assert one.states[1:] == [
        ReplicaUp(1, 7),
        ReplicaLost(1, "nothing was heard for 10 s", returns=True),
        ReplicaUp(1, 8),
    ]
    one.manager.fail("the host with the first replica has exited")
    one.run(lambda: one.manager.failure is not None)


def test_the_engine_fails_if_no_replica_comes_back(engine: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    one = engine()
    one.manager.requests = {1: "tcp://10.0.0.2:1"}
    one.manager._awaited = {1}
    one.manager._config = replace(one.manager._config, parallel=replace(one.manager._config.parallel, timeout=0.05))
    one.manager._cores.clear()  # this host has none
    one.manager.replica_up(ReplicaUp(1, 7))
    one.manager.replica_died(1, "the host is gone")
    one.run(lambda: one.manager.failure is not None)
    assert one.states[-1] == EngineFailed("no replica has been up for 0.05 s")


def test_replicas_are_added(engine: Make) -> None:
    one = engine(num_clients=2)
    with pytest.raises(ConfigError, match="not running yet"):
        one.manager.resize(2, 30.0)
    one.up(0)
    one.manager.resize(3, 30.0)
    folder = one.manager._folder.path
    assert one.states[1:] == [ReplicaStarting(n, f"ipc://{folder}/requests-{n}") for n in (1, 2)]
    configs = [args.config.parallel for args, _ in one.started]
    assert [config.replica for config in configs] == [0, 1, 2]
    assert [config.num_local_ranks for config in configs] == [1, 2, 3]  # they share the processors
    assert [config.device_of(0) for config in configs] == [0, 0, 0]
    assert one.manager.process_info(1).endpoints.requests.keys() == {0, 1, 2}
    assert not one.manager.process_info(1).awaited
    one.up(1, 2)
    one.die(2)
    one.live_again(2)
    one.manager.resize(3, 30.0)
    assert len(one.started) == 4
    assert 'quire:replicas{model_name="m",state="up"} 3.0' in one.manager.metrics.exposition().decode()


def test_those_that_leave_drain_in_every_api_process(engine: Make) -> None:
    three = engine(3, num_clients=2)
    three.up(0, 1, 2)
    three.manager.resize(1, 7.0)
    assert three.states[3:] == [ReplicaDraining(2, 7.0), ReplicaDraining(1, 7.0)]
    assert ReplicaDraining(1, 7.0) in three.manager.states.values()  # an API process that starts now gets it
    three.manager.drained(0, 2)
    three.manager.drained(1, 1)
    three.manager.drained(1, 2)
    three.run(lambda: len(three.states) == 6)
    assert three.states[5] == ReplicaRemoved(2)
    assert [Shutdown() in three.core(replica).heard() for replica in range(3)] == [False, False, True]
    three.manager.resize(2, 7.0)  # 1 still drains, and the core of 2 is exiting
    assert isinstance(three.states[6], ReplicaStarting)
    assert three.states[6].replica == 3
    three.core(2).exit(0)
    three.manager.drained(0, 1)
    three.run(lambda: len(three.states) == 8)
    three.core(1).exit(0)
    three.run(lambda: [core.replica for core in three.manager._cores if core.process is not None] == [0, 3])
    assert three.states[7] == ReplicaRemoved(1)
    assert three.manager.failure is None
    text = three.manager.metrics.exposition().decode()
    gauges = [f'quire:num_requests_running{{engine="{n}",model_name="m"}} 0.0' for n in range(4)]
    assert [line in text for line in gauges] == [True, False, False, True]


def test_those_that_are_not_up_are_removed_first(engine: Make) -> None:
    three = engine(3, policy=RestartPolicy(is_enabled=False))
    three.up(0, 1, 2)
    three.die(0)
    three.manager.resize(2, 7.0)
    assert three.states[4:] == [ReplicaRemoved(0)]
    three.die(1)
    three.manager.resize(2, 7.0)  # a dead one that stays is started again
    three.run(lambda: three.starts(1) == 2)
    three.up(1)
    assert three.manager.requests.keys() == {1, 2}


def test_one_that_dies_while_it_drains_is_removed(engine: Make) -> None:
    two = engine(2)
    two.up(0, 1)
    two.manager.resize(1, 30.0)
    two.die(1)
    two.run(lambda: len(two.states) == 5)
    reason = "rank 0 was killed by SIGKILL"
    assert two.states[2:] == [ReplicaDraining(1, 30.0), ReplicaLost(1, reason, returns=False), ReplicaRemoved(1)]
    assert two.starts(1) == 1


def test_an_added_replica_that_cannot_start_stays_dead_until_the_next_call(engine: Make) -> None:
    one = engine()
    one.up(0)
    one.manager.resize(2, 30.0)
    one.die(1, "the weights do not fit")
    assert one.states[2:] == [ReplicaLost(1, "the weights do not fit", returns=False)]
    one.manager.resize(2, 30.0)
    one.run(lambda: one.starts(1) == 2)
    one.die(1, "the weights do not fit")
    one.manager.resize(1, 30.0)
    assert one.manager.requests.keys() == {0}
    assert one.manager.failure is None


@pytest.mark.parametrize(
    ("changes", "count", "reason"),
    [
        ({"experts": ExpertParallelConfig()}, 1, "--enable-expert-parallel replicas share experts, and their number"),
        ({"executor": "ray"}, 2, "that Ray starts, is fixed; restart the server with another --data-parallel-size"),
        ({"nnodes": 2}, 2, "the number of replicas on several --nnodes"),
        ({"local_replicas": range(0)}, 3, "this host has no replicas .* start another host with --headless"),
        ({"device": "cuda"}, 3, "replica 2 needs 1 more GPU, and 0 of the 2 that are visible are unused"),
        ({}, 1000, "Not enough memory for replica 2: needs .* available"),
    ],
)
def test_what_cannot_be_is_refused(
    engine: Make, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], count: int, reason: str
) -> None:
    two = engine(2)
    two.up(0, 1)
    parallel = two.manager._config.parallel
    two.manager._config = replace(two.manager._config, parallel=replace(parallel, **changes))
    links = ((topology.LinkType.NVLINK,) * 2,) * 2
    found = devices.Devices(changes.get("device", "cpu"), 2, 0, links=links)
    monkeypatch.setattr(devices, "find", lambda kind, groups: found)
    with pytest.raises(ConfigError, match=reason):
        two.manager.resize(count, 30.0)
    assert len(two.states) == 2


def test_an_added_replica_gets_unused_devices(config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    near, far = topology.LinkType.NVLINK, topology.LinkType.PCIE
    links = tuple(tuple(near if one // 2 == other // 2 else far for other in range(6)) for one in range(6))
    monkeypatch.setattr(devices, "find", lambda kind, groups: devices.Devices("cuda", 6, 0, links=links))
    parallel = replace(config.parallel, tensor_parallel_size=2, device="cuda", devices=(0, 1))
    added = added_replica(replace(config, parallel=parallel), 1, {0, 1, 3}, [2]).parallel
    assert [added.device_of(rank) for rank in range(2)] == [4, 5]


class Hosts(DPLeader):
    """Other hosts that the test plays."""

    restarts_group = True

    def __init__(self) -> None:
        self.told: list[object] = []
        self.local_replicas = frozenset({0})
        self.joined: set[int] = set()
        self.different: set[int] = set()
        self.dismissed: list[tuple[int, str]] = []
        self.requests, self.responses, self.init_method = {0: "tcp://10.0.0.1:7000"}, ("tcp://10.0.0.1:1",), ""
        self.masters: dict[int, tuple[str, int]] = {}
        self.kv_peer, self.kv_peers = "", ()

    def watch(self, listener: object) -> None:
        pass

    def is_joined(self, replica: int) -> bool:
        return replica in self.joined

    def added_address(self, replica: int) -> str:
        return f"tcp://10.0.0.1:{7000 + replica}"

    def dismiss(self, replica: int, reason: str = "") -> None:
        self.dismissed.append((replica, reason))

    def stop_group(self) -> None:
        self.told.append("stop")

    def start_group(self, requests: dict[int, str]) -> None:
        self.told.append(dict(requests))

    def may_answer(self, replica: int) -> bool:
        return replica not in self.different

    def close(self, reason: str = "", *, user_error: bool = False) -> None:
        self.user_error = user_error


@pytest.mark.parametrize("first", ["here", "there", "host"])
def test_replicas_of_several_hosts_that_share_experts_are_restarted_together(engine: Make, first: str) -> None:
    """When all have exited, and all hosts are there."""
    hosts = Hosts()
    hosts.requests = {0: "tcp://10.0.0.1:1", 1: "tcp://10.0.0.2:1"}
    hosts.joined = {1}
    one = engine(2, hosts=hosts, is_coupled=True, local=1)
    manager = one.manager
    manager.replica_joined(1, "tcp://10.0.0.2:1")
    one.up(0)
    manager.replica_up(ReplicaUp(1, 7))
    one.run(lambda: manager.is_settled)
    there = "rank 0 was killed by SIGKILL"
    if first == "here":
        one.die(0)
        manager.replica_died(1, "lost the connection to the other replicas")
    else:
        hosts.joined -= {1} if first == "host" else set()
        manager.replica_died(1, there)
        one.run(lambda: hosts.told == ["stop"])
        assert Shutdown() in one.core(0).heard()
        one.core(0).exit(0)
    address = "tcp://10.0.0.2:1"
    if first == "host":
        one.run(lambda: all(core.process is None for core in manager._cores))
        assert hosts.told == ["stop"]
        hosts.joined, address = {1}, "tcp://10.0.0.2:2"
        manager.replica_joined(1, address)
    one.run(lambda: one.starts(0) == 2)
    assert hosts.told == ["stop", {0: "tcp://10.0.0.1:1", 1: address}]
    assert one.started[-1][0].endpoints.requests[1] == address
    lost = [state for state in one.states if isinstance(state, ReplicaLost)]
    assert [(state.replica, state.returns) for state in lost] == [(0, True), (1, True)]
    one.up(0)
    manager.replica_up(ReplicaUp(1, 8))
    one.run(lambda: isinstance(manager.states.get(1), ReplicaUp))
    assert manager.failure is None


def test_without_restarts_a_death_elsewhere_ends_replicas_that_share_experts(engine: Make) -> None:
    hosts = Hosts()
    hosts.requests = {0: "tcp://10.0.0.1:1", 1: "tcp://10.0.0.2:1"}
    one = engine(2, hosts=hosts, is_coupled=True, local=1, policy=RestartPolicy(is_enabled=False))
    one.up(0)
    one.manager.replica_up(ReplicaUp(1, 7))
    one.manager.replica_died(1, "rank 0 was killed by SIGKILL")
    one.run(lambda: one.manager.failure is not None)
    assert one.states[-1] == EngineFailed("replica 1: rank 0 was killed by SIGKILL")
    assert not hosts.told


class Member(DPMember):
    """A leader that the test plays."""

    restarts_group = True

    def __init__(self) -> None:
        self.requests, self.responses = {n: f"tcp://10.0.0.{n + 2}:1" for n in range(2)}, ("tcp://10.0.0.1:2",)
        self.init_method = "tcp://10.0.0.1:1"
        self.masters, self.kv_peer = {}, "10.0.0.2:3"
        self.different: set[int] = set()

    def watch(self, listener: object) -> None:
        pass

    def may_answer(self, replica: int) -> bool:
        return replica not in self.different

    def close(self, reason: str = "", *, user_error: bool = False) -> None:
        self.user_error = user_error


@pytest.mark.parametrize("first", ["here", "there"])
def test_a_host_whose_replicas_share_experts_waits_for_its_leader(engine: Make, first: str) -> None:
    one = engine(2, hosts=Member(), is_coupled=True, local=1)
    one.up(0)
    if first == "here":
        one.die(0)
    else:
        one.manager.group_stops()
        one.run(lambda: not one.manager.group_runs)
        assert Shutdown() in one.core(0).heard()
        assert len(one.states) == 1  # its core has not exited yet
        one.core(0).exit(0)
        one.run(lambda: len(one.states) == 2)
    one.manager.group_stops()
    rounds = iter(range(5))
    one.run(lambda: next(rounds, None) is None)
    assert one.starts(0) == 1
    one.manager.group_starts({0: "tcp://10.0.0.2:1", 1: "tcp://10.0.0.3:1"})
    one.live_again(0)
    assert one.started[-1][0].endpoints.requests[1] == "tcp://10.0.0.3:1"
    assert [type(state) for state in one.states] == [ReplicaUp, ReplicaLost, ReplicaUp]
    assert [state.kv_peer for state in one.states if isinstance(state, ReplicaUp)] == ["10.0.0.2:3"] * 2


def test_hosts_join_and_leave(engine: Make) -> None:
    hosts = Hosts()
    one = engine(hosts=hosts)
    one.up(0)
    manager = one.manager
    hosts.joined |= {1, 2, 3}
    for replica in (1, 2, 3):
        manager.replica_joined(replica, f"tcp://10.0.0.2:{replica}")
    manager.replica_up(ReplicaUp(1, 7))
    manager.replica_up(ReplicaUp(2, 8))
    manager.replica_died(3, "replica 3 (10.0.0.2) has ended: the weights do not fit")
    one.run(lambda: len(one.states) == 8)
    assert one.states[-2:] == [
        ReplicaLost(3, "replica 3 (10.0.0.2) has ended: the weights do not fit", returns=False),
        ReplicaRemoved(3),
    ]
    hosts.joined -= {3}
    with pytest.raises(
        ConfigError, match="there are 2 replicas on other hosts, so that 1 are too few; stop them there"
    ):
        manager.resize(1, 30.0)
    manager.resize(4, 30.0)
    assert hosts.local_replicas == {0, 3}
    assert manager.requests[3] == "tcp://10.0.0.1:7003", "at the address of its host, as the others there"
    one.up(3)
    manager.replica_joined(3, "tcp://10.0.0.2:3")  # in the same moment
    one.run(lambda: len(hosts.dismissed) == 2)
    assert hosts.dismissed[1] == (3, "replica 3 is on the host with the API")
    before = len(one.states)
    manager.replica_leaves(1, 20.0)
    manager.replica_died(2, "replica 2 (10.0.0.2) was lost: its connection has closed")
    one.run(lambda: len(one.states) == before + 2)
    assert one.states[before] == ReplicaDraining(1, 20.0)
    manager.drained(0, 1)
    one.run(lambda: len(one.states) == before + 3)
    manager.replica_died(1, "replica 1 (10.0.0.2) has left")  # nobody cares
    assert hosts.dismissed[2:] == [(1, "")]
    hosts.joined.clear()
    manager.resize(2, 30.0)  # forgets the one that was lost
    assert manager.requests.keys() == {0, 3}


def test_a_replica_is_not_up_before_its_weights_are_compared(engine: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.server.client.engine_manager.SHUTDOWN_SECONDS", 0.0)  # the core does not end by itself
    hosts = Hosts()
    one = engine(hosts=hosts)
    manager = one.manager
    manager.requests[1] = "tcp://10.0.0.2:1"
    manager._awaited.add(1)
    hosts.different |= {0, 1}
    one.core(0).say(Ready({}, EngineStats(kv_blocks=100)))
    manager.replica_up(ReplicaUp(1, 7))
    one.run(lambda: len(manager._unverified) == 2)
    assert not one.states
    hosts.different.discard(0)
    manager.weights_compared()
    one.run(lambda: len(one.states) == 1)
    assert not manager.is_settled
    manager.replica_died(1, "replica 1 (10.0.0.2) has other bytes in model.safetensors", user_error=True)
    one.run(lambda: manager.failure is not None)
    assert manager.is_user_error
    manager.close()
    assert hosts.user_error


def test_an_engine_without_replicas_waits_for_hosts(engine: Make) -> None:
    """They have left on purpose; requests wait."""
    one = engine(hosts=Hosts())
    one.up(0)
    one.manager._cores.clear()  # it is on another host
    one.manager._config = replace(one.manager._config, parallel=replace(one.manager._config.parallel, timeout=0.0))
    one.manager.replica_leaves(0, 0.0)
    one.manager.drained(0, 0)
    one.run(lambda: not one.manager.requests)
    rounds = iter(range(5))
    one.run(lambda: next(rounds, None) is None)
    one.manager.replica_joined(5, "tcp://10.0.0.2:5")
    one.manager.replica_up(ReplicaUp(5, 7))
    one.run(lambda: 5 in one.manager.states)
    assert one.manager.failure is None


def test_a_core_that_is_killed_while_it_starts_is_started_once_more(engine: Make) -> None:
    one = engine()
    one.core(0).kill()
    one.live_again(0)
    again = engine()
    again.core(0).kill()
    again.run(lambda: again.starts(0) == 2)
    again.core(0).kill()
    again.run(lambda: again.manager.failure is not None)
    assert again.states == [EngineFailed("the engine core was killed by SIGKILL")]


def test_an_engine_whose_folder_is_removed_has_failed(engine: Make) -> None:
    one = engine()
    one.up(0)
    shutil.rmtree(folder := one.manager._folder.path)
    one.run(lambda: one.manager.failure is not None)
    reason = f"the folder {folder} with the sockets of this server was removed; set TMPDIR to a safe place"
    assert one.states[1:] == [EngineFailed(reason)]


def test_a_core_that_is_ready_while_it_is_removed_is_not_up(engine: Make) -> None:
    one = engine()
    one.up(0)
    one.manager.resize(2, 0.0)
    one.manager.resize(1, 0.0)
    core = one.core(1)
    core.say(Ready({}, EngineStats(kv_blocks=100)))
    rounds = iter(range(5))
    one.run(lambda: next(rounds, None) is None)
    core.exit(0)
    assert one.manager.states.keys() == {0}


def test_a_group_that_is_about_to_start_is_stopped(engine: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its leader takes the replicas of a host for running as soon as it has said that they start."""
    one = engine(2, hosts=Member(), is_coupled=True, local=1)
    one.up(0)
    one.die(0)
    monkeypatch.setattr(one.manager, "_start_group", partial(one.manager._start_group, 1e9))
    one.manager.group_starts({0: "tcp://10.0.0.2:1", 1: "tcp://10.0.0.3:1"})
    one.manager.group_stops()
    one.run(lambda: len(one.states) == 3)
    assert isinstance(one.states[-1], ReplicaLost)
    assert one.manager._cores[0].restart_at is None
    one.manager.group_stops()
    rounds = iter(range(5))
    one.run(lambda: next(rounds, None) is None)
    assert len(one.states) == 3, "it has said so already"


def test_only_the_replica_that_died_may_have_had_a_deadly_request(engine: Make) -> None:
    two = engine(2, is_coupled=True)
    two.up(0, 1)
    two.die(1)
    lost = [state for state in two.states if isinstance(state, ReplicaLost)]
    assert {state.replica: state.may_be_caused_by_request for state in lost} == {0: False, 1: True}


def test_the_kv_store_is_told_of_those_of_other_hosts(engine: Make) -> None:
    hosts = Hosts()
    one = engine(kv_store=KVStoreConfig(memory_bytes=1 << 30, peers=("10.0.0.9:1",)), hosts=hosts)
    ((args, store),) = one.stores
    assert args.peers == ("10.0.0.9:1",)
    hosts.kv_peers = ("10.0.0.1:1", "10.0.0.2:1")
    one.manager.kv_peers_changed()
    one.run(lambda: store.heard() == [UseKVPeers(("10.0.0.9:1", "10.0.0.1:1", "10.0.0.2:1"))])


def test_cores_use_the_kv_store_of_their_host(engine: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.server.client.helper_process._MAX_RESTART_SECONDS", 0.0)
    two = engine(2, kv_store=KVStoreConfig(memory_bytes=1 << 30))
    ((args, store),) = two.stores
    assert args.config.kv_store == KVStoreConfig(memory_bytes=1 << 30)
    assert args.address == f"ipc://{args.folder}/kv-store"
    two.up(0, 1)
    store.say(Ready({}))
    two.manager.resize(3, 30.0)
    two.up(2)
    assert {core.endpoints.kv_store for core, _ in two.started} == {args.address}
    states = len(two.states)
    store.exit(1)
    two.run(lambda: len(two.stores) == 2)
    assert two.stores[1][0] == args
    assert len(two.states) == states  # API processes need not know it
    two.die(1, "killed")
    assert two.stores[1][1].heard() == [ReplicaLost(1, "killed", returns=False)]
    two.live_again(1)
    two.manager.resize(2, 0.0)
    two.manager.drained(0, 2)
    two.run(lambda: ReplicaRemoved(2) in two.states)
    assert two.stores[1][1].heard() == []  # its ranks may still write
    two.core(2).exit(0)
    two.run(lambda: two.stores[1][1].heard() == [ReplicaRemoved(2)])


STORE = KVStoreConfig(memory_bytes=1 << 30)


def test_each_role_has_its_layout(engine: Make) -> None:
    """A role outlives a restart; another one restarts nothing."""
    two = engine(2, kv_store=STORE, prefill_replicas=1, num_clients=2)

    def sizes() -> list[int]:
        return [args.config.parallel.tensor_parallel_size for args, _ in two.started]

    assert sizes() == [2, 1]
    assert two.manager.process_info(1).roles == {0: "prefill", 1: "decode"}
    two.up(0, 1)
    up = two.manager.states[0]
    assert isinstance(up, ReplicaUp)
    assert (up.tensor_parallel_size, up.stages) == (2, [(0, 5)])
    two.die(0)
    two.live_again(0)
    assert sizes() == [2, 1, 2]
    before = len(two.states)
    two.manager.resize(None, 7.0, 2, 1)
    roles: dict[int, ReplicaRole] = {0: "prefill", 1: "decode", 2: "prefill"}
    assert two.states[before] == ReplicaRoles(roles)  # before the replica is known
    assert isinstance(two.states[before + 1], ReplicaStarting)
    assert sizes() == [2, 1, 2, 2]
    assert two.started[-1][0].config.parallel.num_local_ranks == 5
    two.up(2)
    two.manager.resize(3, 7.0, prefill=1)
    assert two.states[-1] == ReplicaRoles({0: "prefill", 1: "decode", 2: "decode"})
    two.manager.resize(None, 7.0, 2, 1)  # that of them with the layout for prompts
    assert two.manager.process_info(0).roles == roles
    two.manager.resize(2, 7.0, decode=1)
    assert two.states[before + 4 :] == [ReplicaRoles(roles), ReplicaDraining(2, 7.0)]


def test_roles_can_be_given_and_taken_while_replicas_run(engine: Make, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "quire.server.client.engine_manager")
    hosts = Hosts()
    two = engine(kv_store=STORE, hosts=hosts)
    two.up(0)
    two.manager.resize(2, 7.0)
    two.up(1)
    before = len(two.states)
    two.manager.resize(None, 7.0, 1, 1)
    assert two.states[before:] == [ReplicaRoles({0: "prefill", 1: "decode"})]
    hosts.joined.add(2)
    two.manager.replica_joined(2, "tcp://10.0.0.2:2")
    two.run(lambda: 2 in two.manager.requests)
    assert two.states[before + 1] == ReplicaRoles({0: "prefill", 1: "decode", 2: "decode"})
    assert "all replicas of" not in caplog.text
    two.manager.replica_up(ReplicaUp(2, 7))
    two.run(lambda: isinstance(two.manager.states.get(2), ReplicaUp))
    assert (
        caplog.text.count("all replicas of 10.0.0.2 are for decodes, and it has no KV store that other hosts read") == 1
    )
    hosts.joined.add(3)
    two.manager.replica_joined(3, "tcp://10.0.0.3:2")
    two.manager.replica_up(ReplicaUp(3, 7, kv_peer="10.0.0.3:7"))
    two.run(lambda: isinstance(two.manager.states.get(3), ReplicaUp))
    assert caplog.text.count("all replicas of 10.0.0.3 are for decodes: their requests may change hosts") == 1
    with pytest.raises(ConfigError, match="1 replicas for prompts and 0 for decodes"):
        two.manager.resize(1, 7.0)
    two.manager.resize(None, 7.0, 0)
    assert two.states[-1] == ReplicaRoles({})
    assert len(two.started) == 2


def test_roles_need_a_kv_store(engine: Make) -> None:
    two = engine(2)
    two.up(0, 1)
    with pytest.raises(ConfigError, match="this server keeps none there; restart it with --prefill-replicas and"):
        two.manager.resize(None, 7.0, 1, 1)


def test_an_error_of_the_thread_fails_the_engine(engine: Make) -> None:
    one = engine()
    one.started[0][1].on_poll = lambda: one.started[0][1].exit(0)
    one.started[0][1].theirs.send_bytes(b"of another version")
    one.manager.run_in_thread()
    one.manager._thread.join(30)
    (failed,) = (state for state in one.states if isinstance(state, EngineFailed))
    assert failed.reason.startswith("the engine manager failed: ")
