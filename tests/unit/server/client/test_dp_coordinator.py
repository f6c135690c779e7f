"""Hosts with replicas that find each other, compare themselves and lose each other; no engine is started."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any
from urllib.parse import urlsplit

import msgspec
import pytest

from quire.engine.cluster import control_plane, follower, network
from quire.engine.cluster.control_plane import LinkEnded, Rejected
from quire.engine.cluster.follower import Follower
from quire.engine.cluster.handshake import Hello
from quire.engine.cluster.leader import Leader
from quire.engine.config.engine_config import EngineConfig, ExpertParallelConfig, KVStoreConfig
from quire.engine.config.options import EngineOptions
from quire.engine.config.resolve import shared_settings
from quire.engine.core.launch import replica_config, reserve_ports
from quire.engine.executor import nodes
from quire.engine.protocol.errors import ConfigError
from quire.engine.protocol.supervision import LogLevel, ReplicaUp
from quire.server.client.dp_coordinator import (
    DPCoordinator,
    DPLeader,
    DPMember,
    KVPeersChanged,
    ReplicaDied,
    connect_hosts,
    role,
)
from tests.fakes.configs import engine_config
from tests.fakes.waiting import until


@dataclass
class Site:
    """Starts hosts in threads, and ends them with the test."""

    folder: Path
    port: int
    stack: ExitStack
    pool: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(8))

    def config(
        self,
        size: int,
        start: int | None,
        local: int,
        *,
        coupled: bool = False,
        max_model_len: int | None = None,
        is_open: bool = False,
        **options: Any,
    ) -> EngineConfig:
        asked = EngineOptions(
            **{
                "data_parallel_size": size,
                "data_parallel_start_rank": start,
                "data_parallel_size_local": local,
                "data_parallel_rpc_port": self.port,
                "distributed_timeout_seconds": 20.0,
                **options,
            }
        )
        plain = engine_config(path=self.folder)
        parallel = replace(
            plain.parallel,
            replicas=size,
            local_replicas=range(start or 0, (start or 0) + local),
            coordinator=(asked.data_parallel_address or "127.0.0.1", asked.data_parallel_rpc_port),
            accepts_hosts=is_open,
            external_lb=start is not None,
            timeout=asked.distributed_timeout_seconds,
            experts=ExpertParallelConfig() if coupled else None,
        )
        model = replace(
            plain.model, load_format="safetensors", max_model_len=max_model_len or plain.model.max_model_len
        )
        tokens = options.get("max_num_batched_tokens", plain.scheduler.max_num_batched_tokens)
        scheduler = replace(plain.scheduler, max_num_batched_tokens=tokens)
        config = replace(plain, model=model, scheduler=scheduler, parallel=parallel)
        return replace(config, shared_settings=shared_settings(asked, config))

    def node(self, number: int, **options: Any) -> EngineConfig:
        """The configuration of one of four hosts, two for each replica."""
        of_all = {"nnodes": 4, "node_rank": number, "master_port": self.port, **options}
        config = self.config(options.get("data_parallel_size", 2), None, 1, **of_all)
        replica, master = number // 2, ("127.0.0.1", self.port)
        parallel = replace(config.parallel, nnodes=4, nodes=2, node=number, first_node=2 * replica, replica=replica)
        local = range(replica, replica + 1)
        return replace(config, parallel=replace(parallel, local_replicas=local, master=master, coordinator=master))

    def further(self, config: EngineConfig) -> Future[Follower]:
        """A host that is not its replica's first."""
        return self.pool.submit(self._held, lambda: nodes._join(config.parallel, nodes._describe_node(config)))

    def first(self, config: EngineConfig) -> Leader:
        """The core of a replica, which its further hosts join."""
        own, expected = nodes._describe_node(config), config.parallel.hosts[1:]
        leader = Leader(own, *config.parallel.master, expected, on_message=ignore, on_lost=ignore)
        self.stack.callback(leader.close)
        return leader

    def api(self, config: EngineConfig, count: int = 1) -> Future[DPCoordinator]:
        return self.pool.submit(self._held, lambda: connect_hosts(config, count))

    def headless(self, config: EngineConfig) -> Future[DPMember]:
        return self.pool.submit(self._held, lambda: DPMember(config, is_headless=True))

    def _held(self, make: Callable[[], Any]) -> Any:
        made = make()
        self.stack.callback(made.close)
        return made


@pytest.fixture
def site(tmp_path: Path, free_port: int) -> Iterator[Site]:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    with ExitStack() as stack:
        yield Site(tmp_path / "model", free_port, stack)


class Listener:
    """Replaces `EngineManager`."""

    def __init__(self) -> None:
        self.notices: SimpleQueue[tuple[int | None, str]] = SimpleQueue()
        self.num_compared = 0

    def replica_joined(self, replica: int, address: str) -> None:
        self.notices.put((replica, address))

    def replica_leaves(self, replica: int, seconds: float) -> None:
        self.notices.put((replica, f"leaves within {seconds:g} s"))

    def group_stops(self) -> None:
        self.notices.put((None, "stop"))

    def group_starts(self, requests: dict[int, str]) -> None:
        self.notices.put((None, f"start with {requests}"))

    def weights_compared(self) -> None:
        self.num_compared += 1

    def log_level_changed(self, level: LogLevel) -> None:
        self.notices.put((None, level))

    def kv_peers_changed(self) -> None:
        self.notices.put((None, "other KV stores"))

    def replica_died(self, replica: int, reason: str, *, is_host_lost: bool = False, user_error: bool = False) -> None:
        self.notices.put((replica, reason))

    def replica_up(self, state: ReplicaUp) -> None:
        self.notices.put((state.replica, f"is up as {state.incarnation}"))

    def fail(self, reason: str, *, user_error: bool = False) -> None:
        self.notices.put((None, reason))


@pytest.fixture
def listener() -> Listener:
    return Listener()


def ignore(*_: object) -> None:
    """A callback."""


@pytest.mark.parametrize("late", ["the API", "a replica"])
def test_all_learn_all_addresses_in_whatever_order_they_come(site: Site, late: str) -> None:
    api_config, first, second = site.config(4, None, 1), site.config(4, 1, 2), site.config(4, 3, 1)
    api_config = replace(api_config, kv_store=KVStoreConfig(memory_bytes=1, peer_port=7))
    second = replace(second, kv_store=KVStoreConfig(memory_bytes=1))
    if late == "the API":
        others = [site.headless(first), site.headless(second)]
        api = site.api(api_config, count=2).result(30)
    else:
        starting = site.api(api_config, count=2)
        others = [site.headless(second), site.headless(first)]
        api = starting.result(30)
    assert api.requests.keys() == {0, 1, 2, 3}
    assert len(set(api.requests.values())) == 4
    assert len(set(api.responses)) == 2
    assert all(url.startswith("tcp://127.0.0.1:") for url in (*api.requests.values(), *api.responses))
    for other in others:
        member = other.result(30)
        assert (member.requests, member.responses, member.init_method) == (api.requests, api.responses, api.init_method)
        assert member.kv_peers == api.kv_peers
        assert member.kv_peer in ("", api.kv_peers[1])
    assert api.kv_peer == api.kv_peers[0] == "127.0.0.1:7"
    assert len(api.kv_peers) == 2


def test_hosts_are_told_of_the_kv_store_of_one_that_comes_back(
    listener: Listener, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At another port; also if no other has changed."""
    monkeypatch.setattr(follower, "_RECONNECT_MS", 5)
    one, two, three = (
        replace(site.config(3, rank, 1), kv_store=KVStoreConfig(memory_bytes=1)) for rank in (None, 1, 2)
    )
    starting, members = site.api(one), [site.headless(two), site.headless(three)]
    api, stays, leaves = starting.result(30), *(member.result(30) for member in members)
    stays.watch(listener)
    assert isinstance(api, DPLeader)
    for _ in range(2):
        leave(api, 2, leaves)
        leaves = site.headless(three).result(30)
        assert listener.notices.get(timeout=10) == (None, "other KV stores")
        expected = {api.kv_peer, stays.kv_peer, leaves.kv_peer}
        assert {*stays.kv_peers} == {*api.kv_peers} == expected
        late = Listener()
        leaves.watch(late)
        assert late.notices.get(timeout=10) == (None, "other KV stores")
        assert {*leaves.kv_peers} == expected
    api.dismiss(2)
    assert listener.notices.get(timeout=10) == (None, "other KV stores")
    assert {*stays.kv_peers} == {*api.kv_peers} == {api.kv_peer, stays.kv_peer}, "it has left for good"


def test_the_newest_message_about_kv_stores_counts(site: Site) -> None:
    """Each replica of a host is told by its own connection, one later than the other."""
    one, two = (
        replace(site.config(3, rank, local), kv_store=KVStoreConfig(memory_bytes=1))
        for rank, local in ((None, 1), (1, 2))
    )
    starting, member = site.api(one), site.headless(two).result(30)
    api = starting.result(30)
    listener = Listener()
    member.watch(listener)
    assert isinstance(api, DPLeader)
    api._leader.send(1, msgspec.msgpack.encode(KVPeersChanged(12, ("new:1",))))
    assert listener.notices.get(timeout=10) == (None, "other KV stores")
    for number, addresses in ((11, ("old:1",)), (13, ("newest:1",))):
        api._leader.send(2, msgspec.msgpack.encode(KVPeersChanged(number, addresses)))
    assert listener.notices.get(timeout=10) == (None, "other KV stores")
    assert member.kv_peers == ("newest:1",)
    assert listener.notices.empty()


def test_a_further_host_of_a_replica_is_told_where_its_first_is(
    listener: Listener, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once that is there, also when it has come back elsewhere."""
    monkeypatch.setattr(control_plane, "_HEARTBEAT_SECONDS", 0.05)
    monkeypatch.setattr(follower, "_RECONNECT_MS", 5)
    further = [site.further(site.node(number)) for number in (1, 3)]
    starting, member = site.api(site.node(0)), site.headless(site.node(2)).result(30)
    api = starting.result(30)
    api.watch(listener)
    assert listener.notices.get(timeout=10) == (1, api.requests[1])
    assert (set(member.masters), set(api.masters)) == ({1}, {0, 1})
    leaders = [
        site.first(replica_config(site.node(2 * replica), replica, "", hosts.masters[replica]))
        for replica, hosts in enumerate((api, member))
    ]
    assert [leader.wait(20).keys() for leader in leaders] == [{1}, {3}]
    leaders[1].close("rank 1 was killed by SIGKILL")
    with pytest.raises(LinkEnded, match="rank 1 was killed"):
        further[1].result(30).receive(20)
    member.close("the lights went out")
    assert listener.notices.get(timeout=10)[0] == 1
    again = site.further(site.node(3))
    with pytest.raises(ConfigError, match=r"node 3 .* has --max-num-seqs 7, and the host with the API .* has 256"):
        refused(site.further(site.node(3, max_num_seqs=7)))
    back = site.headless(site.node(2)).result(30)
    assert back.masters != member.masters
    leader = site.first(replica_config(site.node(2), 1, "", back.masters[1]))
    assert leader.wait(20).keys() == {3}
    again.result(20)


def refused(future: Future[Any]) -> None:
    try:
        future.result(30)
    except LinkEnded as ended:
        raise ConfigError(ended.reason) from None


@pytest.mark.parametrize(
    ("node", "options", "reason"),
    [
        (1, {"data_parallel_size": 1}, r"node 1 .* has --data-parallel-size 1, and the host with the API .* has 2"),
        (3, {"nnodes": 6}, r"node 3 .* has --nnodes 6, and the host with the API .* has 4; start every host with the"),
        (2, {"data_parallel_size": 4, "nnodes": 4}, r"replica 1 .* has --data-parallel-size 4, and the host with"),
    ],
)
def test_nodes_that_count_differently_are_refused_at_once(
    site: Site, node: int, options: dict[str, Any], reason: str
) -> None:
    """In any role, before any other message has come."""
    starting = site.api(site.node(0))
    config = site.node(node, **options)
    other = site.headless(config) if node % 2 == 0 else site.further(config)
    for future in (starting, other):
        with pytest.raises(ConfigError, match=reason):
            refused(future)


@pytest.mark.parametrize("size", [1, 4])
def test_a_number_that_comes_from_other_settings_is_told_by_them(site: Site, size: int) -> None:
    """The start goes on without it."""
    starting, config = site.api(site.node(0)), site.node(3, data_parallel_size=size)
    if size == 4:
        config = replace(config, parallel=replace(config.parallel, local_replicas=range(3, 4), nodes=1, first_node=3))
    other = site.headless(config) if size == 4 else site.further(config)
    with pytest.raises(ConfigError, match=rf" 3 .* has --data-parallel-size {size}, and the host with the API .* has"):
        refused(other)
    site.headless(site.node(2)).result(30)
    starting.result(30)


def test_two_hosts_with_the_same_number_are_refused_by_name(site: Site) -> None:
    starting, member = site.api(site.node(0)), site.headless(site.node(2)).result(30)
    starting.result(30)
    with pytest.raises(ConfigError, match=r"replica 1 .* cannot join: replica 1 .* is replica 1 already"):
        site.headless(site.node(2)).result(30)
    site.first(replica_config(site.node(2), 1, "", member.masters[1]))
    site.further(site.node(3)).result(30)
    with pytest.raises(ConfigError, match=r"node 3 .* cannot join: node 3 .* is node 3 already"):
        refused(site.further(site.node(3)))


@pytest.mark.skipif(network.interface_of("::1") is None, reason="this host has no IPv6")
def test_hosts_meet_over_ipv6(site: Site) -> None:
    starting = site.api(site.config(2, None, 1, data_parallel_address="::1"))
    member = site.headless(site.config(2, 1, 1, data_parallel_address="::1")).result(30)
    api = starting.result(30)
    assert (member.requests, member.init_method) == (api.requests, api.init_method)
    assert all(url.startswith("tcp://[::1]:") for url in (*api.requests.values(), *api.responses, api.init_method))


def test_without_replicas_of_its_own_the_first_is_anothers(site: Site) -> None:
    starting = site.api(site.config(2, None, 0))
    first, second = site.headless(site.config(2, 0, 1)), site.headless(site.config(2, 1, 1))
    assert starting.result(30).init_method == first.result(30).init_method == second.result(30).init_method


def test_who_does_not_come_is_named(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other one has joined before the time is over."""
    wait = Leader.wait

    def wait_from_then_on(leader: Leader, seconds: float) -> dict[int, Hello]:
        until(lambda: leader.is_joined(1))
        return wait(leader, seconds)

    monkeypatch.setattr(Leader, "wait", wait_from_then_on)
    starting = site.api(site.config(3, None, 1, distributed_timeout_seconds=0.6))
    member = site.headless(site.config(3, 1, 1))
    with pytest.raises(ConfigError, match=r"replica 2 did not join at port \d+ within 1 s: 1 of 2 joined \(replica 1"):
        starting.result(30)
    with pytest.raises(ConfigError, match="replica 2 did not join"):
        member.result(30)


def test_an_api_that_does_not_come_is_named(site: Site) -> None:
    member = site.headless(site.config(2, 1, 1, distributed_timeout_seconds=1.0))
    with pytest.raises(
        ConfigError, match=r"the host with the API \(127.0.0.1\) did not answer .* within 1 s; check that"
    ):
        member.result(30)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"block_size": 32}, r"replica 1 \(127.0.0.1\) has --block-size 32, and the host with the API .* has 16"),
        ("model", "replica 1 .* has other bytes in config.json, unlike the host with the API"),
        (
            {"max_model_len": 64},
            "replica 1 .* has --max-model-len 64, and the host with the API .* has 128; start every host",
        ),
    ],
)
def test_hosts_that_differ_are_refused_by_name(
    site: Site, tmp_path: Path, changes: dict[str, Any] | str, reason: str
) -> None:
    config = site.config(2, 1, 1, **(changes if isinstance(changes, dict) else {}))
    if changes == "model":
        (tmp_path / "other").mkdir()
        (tmp_path / "other" / "config.json").write_text('{"hidden_size": 1}')
        config = replace(config, model=replace(config.model, path=tmp_path / "other"))
    starting, member = site.api(site.config(2, None, 1)), site.headless(config)
    for future in (starting, member):
        with pytest.raises(ConfigError, match=reason):
            future.result(30)


def test_hosts_with_replicas_are_compared_with_each_other_if_the_api_has_none(site: Site) -> None:
    starting = site.api(site.config(2, None, 0, max_num_batched_tokens=32))  # resolved for no device
    first, second = (site.headless(site.config(2, r, 1, max_num_batched_tokens=64 + r)) for r in range(2))
    both = r"replica \d .* has --max-num-batched-tokens \d+, and replica \d .* has \d+; start"
    with pytest.raises(ConfigError, match=both):
        starting.result(30)
    for future in (first, second):
        with pytest.raises(ConfigError, match="has --max-num-batched-tokens"):
            future.result(30)


def test_an_api_without_replicas_is_compared_where_no_device_matters(site: Site) -> None:
    starting, member = site.api(site.config(1, None, 0, max_model_len=64)), site.headless(site.config(1, 0, 1))
    for future in (starting, member):
        with pytest.raises(ConfigError, match=r"has --max-model-len 128, and the host with the API .* has 64"):
            future.result(30)


def test_a_host_that_cannot_reach_the_address_is_refused(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has found the port of the API by another address, and would be given 127.0.0.1 to talk to."""
    monkeypatch.setattr("quire.server.client.dp_coordinator.reserve_ports", fake_ports)
    monkeypatch.setattr("quire.server.client.dp_coordinator.address_towards", lambda host, seconds: "10.0.0.2")
    starting, member = site.api(site.config(2, None, 1)), site.headless(site.config(2, 1, 1))
    for future in (starting, member):
        with pytest.raises(
            ConfigError,
            match=r"--data-parallel-address 127.0.0.1: replica 1 \(10.0.0.2\) cannot reach that address of the host "
            r"with the API \(127.0.0.1\); start every host with one that it can",
        ):
            future.result(30)


def fake_ports(address: str, count: int) -> list[socket.socket]:
    """Reserves fake ports of any address."""
    return reserve_ports("127.0.0.1", count)


def test_an_api_of_its_own_behind_an_api_of_all_is_refused(site: Site) -> None:
    starting, peer = (
        site.api(
            site.config(
                2,
                None,
                1,
            )
        ),
        site.api(site.config(2, 1, 1, coupled=True)),
    )
    for future in (starting, peer):
        with pytest.raises(ConfigError, match=r"has an API of its own, and .* start it with --headless"):
            future.result(30)


def test_the_log_level_reaches_hosts_without_an_api_also_later(listener: Listener, site: Site) -> None:
    starting, member = site.api(site.config(2, None, 1)), site.headless(site.config(2, 1, 1)).result(30)
    api = starting.result(30)
    member.watch(listener)
    api.set_log_level("debug")
    assert listener.notices.get(timeout=10) == (None, "debug")
    assert isinstance(api, DPLeader)
    leave(api, 1, member)
    again = site.headless(site.config(2, 1, 1)).result(30)
    again.watch(listener)
    assert listener.notices.get(timeout=10) == (None, "debug")


def test_a_lost_replica_is_reported_and_may_come_back(listener: Listener, site: Site) -> None:
    starting, member = site.api(site.config(3, None, 1)), site.headless(site.config(3, 1, 2)).result(30)
    api = starting.result(30)
    member.report(2, ReplicaUp(2, 17))
    member.report(2, ReplicaDied("rank 0 was killed by SIGKILL"))
    api.watch(listener)
    assert {listener.notices.get(timeout=10) for _ in range(2)} == {(r, api.requests[r]) for r in (1, 2)}
    assert listener.notices.get(timeout=10) == (2, "is up as 17")
    assert listener.notices.get(timeout=10) == (2, "rank 0 was killed by SIGKILL")
    member.close("the lights went out")
    losses = [listener.notices.get(timeout=10) for _ in range(2)]
    assert sorted(losses) == [(r, f"replica {r} (127.0.0.1) has ended: the lights went out") for r in (1, 2)]
    with pytest.raises(ConfigError, match="--block-size 32"):
        site.headless(site.config(3, 1, 2, block_size=32)).result(30)
    again = site.headless(site.config(3, 1, 2)).result(30)
    assert again.responses == api.responses
    assert {listener.notices.get(timeout=10) for _ in range(2)} == {(r, again.requests[r]) for r in (1, 2)}


def test_hosts_join_and_leave_while_the_api_serves(listener: Listener, site: Site) -> None:
    """Also an API that has all its replicas, and waits for nobody."""
    api = site.api(site.config(1, None, 1, is_open=True), count=2).result(30)
    api.watch(listener)
    with pytest.raises(
        ConfigError, match=r"replica 0 .* cannot join: the host with the API .* has a replica 0; choose"
    ):
        site.headless(site.config(1, 0, 1)).result(30)
    member = site.headless(site.config(7, 5, 2)).result(30)
    assert {listener.notices.get(timeout=10) for _ in range(2)} == {(r, member.requests[r]) for r in (5, 6)}
    assert member.responses == api.responses
    with pytest.raises(ConfigError, match=r"replica 5 .* cannot join: replica 5 .* is replica 5 already"):
        site.headless(site.config(6, 5, 1)).result(30)
    member.request_shutdown(3.0)
    assert {listener.notices.get(timeout=10) for _ in range(2)} == {(r, "leaves within 3 s") for r in (5, 6)}
    assert isinstance(api, DPLeader)
    api.dismiss(5)
    until(lambda: member.ended is not None)
    assert not member.can_shut_down
    api.dismiss(6)
    until(lambda: member.can_shut_down)
    assert not str(member.ended)
    member.close()
    again = site.headless(site.config(6, 5, 1)).result(30)
    assert listener.notices.get(timeout=10) == (5, again.requests[5])
    again.close("the lights went out")
    assert listener.notices.get(timeout=10) == (5, "replica 5 (127.0.0.1) has ended: the lights went out")
    assert listener.notices.empty()
    own = {api.requests[0], *map(api.added_address, (1, 2, 1))}
    assert [urlsplit(address).hostname for address in own] == ["127.0.0.1"] * 3


def test_a_host_may_join_before_those_that_are_waited_for(
    listener: Listener, site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    """As pods that an orchestrator starts in any order."""
    caplog.set_level("INFO")
    starting, early = site.api(site.config(1, None, 0)), site.headless(site.config(3, 2, 1))
    until(lambda: "replica 2 (127.0.0.1) has joined" in caplog.text)
    assert not starting.done()
    first, api = site.headless(site.config(1, 0, 1)), starting.result(30)
    assert api.requests == {0: first.result(30).requests[0]}
    api.watch(listener)
    members = {0: first.result(30), 2: early.result(30)}
    assert dict(listener.notices.get(timeout=10) for _ in members) == {r: members[r].requests[r] for r in members}


def test_weights_are_compared_before_a_replica_may_answer(listener: Listener, site: Site) -> None:
    """A host with others is told to end for good, and loses its place."""
    starting, member = site.api(site.config(3, None, 1)), site.headless(site.config(3, 1, 2)).result(30)
    api = starting.result(30)
    api.watch(listener)
    until(lambda: listener.num_compared == 2)
    assert all(map(api.may_answer, range(3)))
    member.close()
    for _ in range(4):
        listener.notices.get(timeout=10)
    (site.folder / "model.safetensors").write_bytes(b"others")
    with pytest.raises(Rejected, match=r"has a model.safetensors, unlike the host with the API"):
        site.headless(site.config(3, 1, 2)).result(30)
    assert not api.may_answer(1)


def test_an_api_waits_for_the_hosts_whose_experts_it_uses(listener: Listener, site: Site) -> None:
    first, second = (site.api(site.config(2, start, 1, coupled=True)) for start in (0, 1))
    for each, replica in ((first.result(30), 0), (second.result(30), 1)):
        each.watch(listener)
        until(lambda each=each, replica=replica: each.may_answer(replica))  # type: ignore[misc]


def test_the_end_of_the_api_is_reported(site: Site) -> None:
    starting, member = site.api(site.config(2, None, 1)), site.headless(site.config(2, 1, 1)).result(30)
    starting.result(30).close("the engine is gone")
    until(lambda: member.ended is not None)
    assert str(member.ended) == "the engine is gone"


def test_peers_that_share_experts_end_together(listener: Listener, site: Site) -> None:
    """Each has an API of its own; the first leads."""
    first, second = (site.api(site.config(2, start, 1, coupled=True)) for start in (0, 1))
    leader, member = first.result(30), second.result(30)
    assert (leader.requests, leader.init_method, leader.responses) == (member.requests, member.init_method, ())
    leader.watch(listener)
    member.close()
    assert listener.notices.get(timeout=10) == (None, "replica 1 (127.0.0.1) has left")


def test_hosts_behind_an_api_that_share_experts_start_together_again(listener: Listener, site: Site) -> None:
    """One that was lost is waited for; nobody else may join."""
    starting = site.api(site.config(3, None, 1, coupled=True))
    joining = [site.headless(site.config(3, replica, 1, coupled=True)) for replica in (1, 2)]
    api, first, second = starting.result(30), *(each.result(30) for each in joining)
    assert isinstance(api, DPLeader)
    of_api, of_first = listener, Listener()
    api.watch(of_api)
    first.watch(of_first)
    assert {of_api.notices.get(timeout=10) for _ in range(2)} == {(r, api.requests[r]) for r in (1, 2)}
    second.close("the lights went out")
    assert of_api.notices.get(timeout=10) == (2, "replica 2 (127.0.0.1) has ended: the lights went out")
    api.stop_group()
    assert of_first.notices.get(timeout=10) == (None, "stop")
    again = site.headless(site.config(3, 2, 1, coupled=True))
    number, address = of_api.notices.get(timeout=10)
    assert number == 2
    assert not again.done()
    with pytest.raises(ConfigError, match="replicas 1 and 2 can join here, not 3"):
        site.headless(site.config(4, 3, 1, coupled=True, data_parallel_size=3)).result(30)
    api.start_group(api.requests | {2: address})
    assert of_first.notices.get(timeout=10) == (None, f"start with {api.requests | {2: address}}")
    assert again.result(30).requests == api.requests | {2: address}


def test_peers_that_share_experts_leave_once_all_would(listener: Listener, site: Site) -> None:
    first, second, third = (site.api(site.config(3, start, 1, coupled=True)) for start in range(3))
    leader, members = first.result(30), [second.result(30), third.result(30)]
    for each in (leader, *members):
        each.watch(listener)
        assert not each.can_shut_down
    for each in (members[0], leader):
        each.request_shutdown()
    assert not leader.can_shut_down
    members[1].request_shutdown()
    until(lambda: leader.can_shut_down)
    assert not any(member.can_shut_down for member in members)  # they hear of it by its end
    leader.close()
    until(lambda: all(member.can_shut_down for member in members))


def test_nobody_stays_for_one_that_is_lost(listener: Listener, site: Site) -> None:
    first, second, third = (site.api(site.config(3, start, 1, coupled=True)) for start in range(3))
    leader, members = first.result(30), [second.result(30), third.result(30)]
    leader.watch(listener)
    leader.request_shutdown()
    members[0].close()
    until(lambda: leader.can_shut_down)


def test_an_api_of_all_stays_for_nobody(site: Site) -> None:
    for coupled in (False, True):
        starting = site.api(site.config(2, None, 1, coupled=coupled))
        member = site.headless(site.config(2, 1, 1, coupled=coupled)).result(30)
        api = starting.result(30)
        api.request_shutdown()
        assert api.can_shut_down
        api.close()
        member.close()


def leave(api: DPLeader, replica: int, member: DPMember) -> None:
    """The leader knows of it: another may join with the same number."""
    member.close()
    until(lambda: not api._leader.is_joined(replica))


def test_peers_without_shared_experts_need_nobody(site: Site) -> None:
    alone = connect_hosts(site.config(2, 1, 1))
    assert not alone.requests
    assert alone.can_shut_down


def test_a_port_in_use_and_an_address_elsewhere_are_refused(site: Site) -> None:
    with socket.create_server(("0.0.0.0", site.port)), pytest.raises(ConfigError, match="--data-parallel-rpc-port"):
        connect_hosts(site.config(2, None, 1))
    with pytest.raises(ConfigError, match=r"no port can be had at 192.0.2.1: .*--data-parallel-address"):
        connect_hosts(site.config(2, None, 1, data_parallel_address="192.0.2.1"))


@pytest.mark.parametrize(
    ("start", "local", "coupled", "expected"),
    [
        (None, 4, False, ("alone", (0, 1, 2, 3))),
        (None, 4, True, ("alone", (0, 1, 2, 3))),
        (None, 2, False, ("leader", (0, 1, 2, 3))),
        (None, 0, False, ("leader", (0, 1, 2, 3))),
        (0, 2, False, ("alone", (0, 1))),
        (2, 2, False, ("alone", (2, 3))),
        (0, 2, True, ("leader", (0, 1))),
        (2, 2, True, ("follower", (2, 3))),
    ],
)
def test_roles(site: Site, start: int | None, local: int, coupled: bool, expected: tuple[str, tuple[int, ...]]) -> None:
    config = site.config(4, start, local, coupled=coupled)
    assert (role(config), tuple(config.parallel.api_replicas)) == expected
    assert role(config, is_headless=True) == "follower"
