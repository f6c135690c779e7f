"""The checks between hosts, which are threads here; the measurements of their ranks are made up."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import msgspec
import pytest

from quire.engine.cluster.handshake import Hello
from quire.engine.cluster.leader import Leader
from quire.engine.cluster.reachability import Answer, Prober, Reached, Request
from quire.engine.core.launch import reserve_ports, socket_port
from quire.engine.doctor import cluster
from quire.engine.doctor.check import Check, ok
from quire.engine.doctor.cluster import Cluster, Coordinator, Report
from quire.engine.doctor.ranks import RankTask

VERSIONS = {"python": "3.12.1", "quire-llm": "1", "torch": "2.13", "triton": "3.9"}
OWN = Report([ok("memory", "enough")], VERSIONS, "cpu", 1, 1500)
ADDRESS = "127.0.0.1"


@pytest.fixture(autouse=True)
def no_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(tasks: Sequence[RankTask], towards: str) -> Iterator[Check]:
        for task in tasks:
            if task.rank == 0:
                yield ok(task.subject, f"{task.size} ranks", ranks=task.size)

    monkeypatch.setattr(cluster, "run", run)


@contextlib.contextmanager
def answering(
    coordinator: Coordinator, where: Cluster, nodes: Sequence[int], check: Callable[[], Report]
) -> Iterator[None]:
    """The other hosts, as threads."""
    there = [replace(where, node=node, port=coordinator._leader.port, seconds=60.0) for node in nodes]
    ends: list[str] = []
    threads = [threading.Thread(target=lambda each=each: ends.append(cluster.follow(each, check))) for each in there]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        coordinator.close()
        for thread in threads:
            thread.join()
        assert not any(ends)


def checked(
    nnodes: int = 2, nodes: Sequence[int] = (1,), seconds: float = 20.0, check: Callable[[], Report] = lambda: OWN
) -> tuple[dict[str, Report], dict[str, Check]]:
    """The other hosts' reports, and the checks between the hosts."""
    (fixed,) = reserve_ports(ADDRESS, 1)
    where = Cluster(nnodes, 0, ADDRESS, 0, "", seconds, (socket_port(fixed),))
    coordinator = Coordinator(where)
    reports, checks = dict[str, Report](), dict[str, Check]()
    with fixed, answering(coordinator, where, nodes, check):
        for found in coordinator.check(OWN):
            if isinstance(found, Check):
                checks[found.name] = found
            else:
                reports[found[0]] = found[1]
    return reports, checks


def test_hosts_that_are_alike() -> None:
    reports, checks = checked(3, (1, 2))
    assert reports == {"node 1 (127.0.0.1)": OWN, "node 2 (127.0.0.1)": OWN}
    assert {check.status for check in checks.values()} == {"ok"}, checks
    assert checks.keys() == {"hosts", "versions", "MTU", "ports between hosts", "all-reduce of all hosts"}
    assert checks["all-reduce of all hosts"].found == "3 ranks"
    assert checks["ports between hosts"].found.startswith("20 connections")  # 3 hosts × 2 others × 3, and 2 × 1


def test_what_differs_is_named() -> None:
    other = {"python": "3.12.9", "quire-llm": "1", "torch": "2.12", "triton": "none"}
    _, checks = checked(check=lambda: msgspec.structs.replace(OWN, versions=other, mtu=9000))
    assert checks["versions of torch"].status == "fault"
    assert checks["versions of torch"].found == "2.13 on node 0 (127.0.0.1), 2.12 on node 1 (127.0.0.1)"
    assert checks["versions of triton"].status == "warning"
    assert "versions of python" not in checks
    assert "versions" not in checks
    assert checks["MTU"].status == "warning"


def test_a_blocked_port_is_named_with_both_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = Prober.answer

    def block(prober: Prober, request: Request) -> Answer:
        found = answer(prober, request)
        is_node_1 = threading.current_thread().name == "cluster-probe"
        if is_node_1 and isinstance(found, Reached):
            return Reached(found.secret, ["timed out"] * len(found.problems))
        return found

    monkeypatch.setattr(Prober, "answer", block)
    _, checks = checked()
    (fault,) = (check for check in checks.values() if check.status == "fault")
    assert [check.status for check in checks.values() if check.name.startswith("port ")] == ["fault", "warning"]
    assert fault.found == "node 1 (127.0.0.1) cannot reach it on node 0 (127.0.0.1): timed out"
    assert "firewall of 127.0.0.1" in fault.remedy
    assert "ports between hosts" not in checks
    assert checks["all-reduce of all hosts"] == Check(
        "all-reduce of all hosts", "not applicable", "not tried, as a port is blocked"
    )


def test_a_host_that_does_not_come_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other one has joined before the time is over."""
    wait = Leader.wait

    def wait_from_then_on(leader: Leader, seconds: float) -> dict[int, Hello]:
        while not leader.is_joined(1):
            threading.Event().wait(0.01)
        return wait(leader, seconds)

    monkeypatch.setattr(Leader, "wait", wait_from_then_on)
    reports, checks = checked(3, (1,), seconds=0.1)
    assert list(reports) == ["node 1 (127.0.0.1)"]
    assert checks["hosts"].status == "fault"
    assert "node 2 did not join" in checks["hosts"].found
    assert checks["all-reduce of all hosts"].status == "not applicable"


def test_a_host_that_cannot_be_checked_is_named() -> None:
    class Broken(Exception):
        pass

    def broken() -> Report:
        raise Broken

    where = Cluster(2, 0, ADDRESS, 0, "", 20.0, ())
    coordinator = Coordinator(where)
    raised: list[bool] = []

    def follow() -> None:
        with pytest.raises(Broken):
            cluster.follow(replace(where, node=1, port=coordinator._leader.port), broken)
        raised.append(True)

    thread = threading.Thread(target=follow)
    thread.start()
    found = {check.name: check for check in coordinator.check(OWN) if isinstance(check, Check)}
    thread.join()
    coordinator.close()
    assert raised
    lost = found["node 1 (127.0.0.1)"]
    assert (lost.status, lost.found) == ("fault", "node 1 (127.0.0.1) has ended: it was stopped")
    assert "start it again on every host" in lost.remedy
