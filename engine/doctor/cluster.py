"""The checks between hosts: `quire doctor --nnodes N` runs on each, and the others join node 0 as a server's hosts do.

node R                         node 0
Report ──────────────────────▶ compares versions, prints
◀───────────────────────────▶ each host connects to the others' ports (`Leader.find_blocked`)
◀────── AllReduce … Reduced ─▶ all devices of all hosts
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue

import msgspec

from quire.engine.cluster.control_plane import LinkEnded
from quire.engine.cluster.follower import Follower
from quire.engine.cluster.handshake import Hello
from quire.engine.cluster.leader import Leader
from quire.engine.cluster.network import address_towards, interface_of, tcp_url
from quire.engine.doctor import gpus, network, versions
from quire.engine.doctor.check import Check, fault, not_applicable, ok, warning
from quire.engine.doctor.ranks import SECONDS, Device, RankTask, run
from quire.engine.protocol.errors import ConfigError

_REPORT_SECONDS = 2 * SECONDS
_AGAIN = "read what quire doctor printed on that host (dmesg if it was killed), and start it again on every host"
"""Remedy for a host that was lost."""


class Report(msgspec.Struct, tag=True):
    """The findings of a host on its own."""

    checks: list[Check]
    versions: dict[str, str]
    device: Device
    devices: int
    """Number of its devices, and of its ranks in the all-reduce."""
    mtu: int
    """MTU of the interface that reaches node 0; 0: unknown."""


class AllReduce(msgspec.Struct, tag=True):
    """Asks a host to run these ranks."""

    tasks: list[RankTask]


class Reduced(msgspec.Struct, tag=True):
    checks: list[Check]


Answer = Report | Reduced


@dataclass(frozen=True)
class Cluster:
    """The hosts that are to be checked, and this host's place among them."""

    nnodes: int
    node: int
    address: str
    """Node 0's, --master-addr."""
    port: int
    token: str
    seconds: float
    """Timeout for the others to join, and for communication between ranks."""
    fixed_ports: tuple[int, ...]
    """Ports of node 0 that others may have to reach, beside `port`."""

    def hello(self) -> Hello:
        own = address_towards(self.address, self.seconds if self.node else 0.0)
        return Hello(name=f"node {self.node} ({own})", number=self.node, address=own)


def report(checks: list[Check], device: Device, devices: int, cluster: Cluster) -> Report:
    """This host's report to node 0. Raises `ConfigError` if there is no route to it."""
    interface = interface_of(address_towards(cluster.address))
    found = versions.collect() | {"driver": gpus.driver_version()[1] or "none"}
    return Report(checks, found, device, devices, network.mtu(interface) if interface else 0)


def follow(cluster: Cluster, check: Callable[[], Report]) -> str:
    """Join node 0, check this host, and carry out node 0's requests until it ends; returns why it ended if it failed.

    Raises `ConfigError` if node 0 cannot be joined.
    """
    encode = msgspec.msgpack.Encoder().encode
    try:
        follower = Follower(
            cluster.address,
            cluster.port,
            cluster.hello(),
            seconds=cluster.seconds,
            leader="node 0",
            token=cluster.token,
        )
    except LinkEnded as end:
        raise ConfigError(end.reason) from None
    reason = "it was stopped"
    try:
        follower.send(encode(check()))
        while True:
            request = msgspec.msgpack.decode(follower.receive(None), type=AllReduce)
            follower.send(encode(_all_reduce(request, cluster)))
    except LinkEnded as end:
        reason = ""
        return end.reason
    finally:
        follower.close(reason)


def _all_reduce(request: AllReduce, cluster: Cluster) -> Reduced:
    """Run this host's ranks."""
    for task in request.tasks:
        task.token = cluster.token
    return Reduced(list(run(request.tasks, cluster.address)))


class Coordinator:
    """Node 0: lets the others join, and asks them."""

    def __init__(self, cluster: Cluster) -> None:
        """Raises `ConfigError` if the address is not this host's, or the port is in use."""
        self._cluster, self._own = cluster, cluster.hello()
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder[Answer](Answer).decode
        self._answers: SimpleQueue[tuple[int, Answer | None]] = SimpleQueue()
        """Answers by node; None: the node is lost."""
        self._lost: dict[int, str] = {}
        self.names = {0: self._own.name}
        self._leader = Leader(
            self._own,
            cluster.address,
            cluster.port,
            range(1, cluster.nnodes),
            on_message=lambda number, body: self._answers.put((number, self._decode(body))),
            on_lost=self._on_lost,
            on_joined=lambda hello: self.names.__setitem__(hello.number, hello.name),
            token=cluster.token,
        )

    def _on_lost(self, number: int, end: LinkEnded) -> None:
        self._lost[number] = end.reason
        self._answers.put((number, None))

    def close(self) -> None:
        self._leader.close()

    def check(self, own: Report) -> Iterator[Check | tuple[str, Report]]:
        """Yield the name and the report of each other host, and then the checks between them."""
        problem = ""
        try:
            hellos = self._leader.wait(self._cluster.seconds)
            self.names |= {number: hello.name for number, hello in sorted(hellos.items())}
        except ConfigError as error:
            problem = str(error)
        others = [number for number in sorted(self.names) if number]
        reports = {0: own}
        for number, answer in self._receive(others, _REPORT_SECONDS).items():
            assert isinstance(answer, Report)
            reports[number] = answer
            yield self.names[number], answer
        if problem:
            remedy = "start quire doctor there with its --node-rank, and open the port of --master-port on node 0"
            yield fault("hosts", problem, remedy)
        else:
            yield ok("hosts", f"all {self._cluster.nnodes} have joined: {', '.join(self.names.values())}")
        if not others:
            return
        for number in others:
            if number not in reports:
                yield fault(self.names[number], self._lost[number], _AGAIN)
        nodes = sorted(reports)
        yield from self._compare(reports)
        is_open = True
        for found in self._ports(nodes):
            is_open &= found.status != "fault"
            yield found
        if is_open and len(nodes) == self._cluster.nnodes and not self._lost:
            yield from self._all_reduce(reports)
        else:
            reason = "a host is missing" if is_open else "a port is blocked"
            yield not_applicable("all-reduce of all hosts", f"not tried, as {reason}")

    def _ask(self, requests: dict[int, AllReduce], seconds: float) -> dict[int, Answer]:
        """Ask several hosts at once; hosts that are lost or do not answer are not in the result."""
        for number, request in requests.items():
            if number:
                self._leader.send(number, self._encode(request))
        own: dict[int, Answer] = {0: _all_reduce(requests[0], self._cluster)} if 0 in requests else {}
        return own | self._receive([number for number in requests if number], seconds)

    def _receive(self, numbers: Sequence[int], seconds: float) -> dict[int, Answer]:
        missing, found = set(numbers) - self._lost.keys(), dict[int, Answer]()
        deadline = time.monotonic() + seconds
        while missing:
            try:
                number, answer = self._answers.get(timeout=max(0.0, deadline - time.monotonic()))
            except Empty:
                for late in missing:
                    self._lost[late] = f"{self.names[late]} did not answer within {seconds:.0f} s"
                break
            if number in missing and answer is not None:
                found[number] = answer
            missing.discard(number)
        return dict(sorted(found.items()))

    def _compare(self, reports: dict[int, Report]) -> Iterator[Check]:
        """Compare the versions, and the MTUs of the interfaces between the hosts."""
        wrong = False
        for name in reports[0].versions:
            others = {node: report.versions.get(name, "none") for node, report in reports.items()}
            if name == "python":  # the last part may differ
                others = {node: version.rpartition(".")[0] for node, version in others.items()}
            if len(set(others.values())) > 1:
                wrong = True
                text = ", ".join(f"{version} on {self.names[node]}" for node, version in others.items())
                report = fault if name in versions.COMPARED else warning
                yield report(f"versions of {name}", text, "install the same on every host")
        if not wrong:
            yield ok("versions", f"the same on all hosts: {', '.join(map(' '.join, reports[0].versions.items()))}")
        mtus = {self.names[node]: report.mtu for node, report in reports.items() if report.mtu}
        text = ", ".join(f"{mtu} on {name}" for name, mtu in mtus.items())
        if len(set(mtus.values())) > 1:
            yield warning("MTU", text, "set the same on all hosts and switches: large packets may be lost")
        elif mtus:
            yield ok("MTU", text)

    def _ports(self, nodes: Sequence[int]) -> Iterator[Check]:
        """Whether each host reaches each other one."""

        def on_silent(number: int) -> None:
            self._lost.setdefault(number, f"{self.names[number]} did not try to reach the others")

        blocked, count = self._leader.find_blocked(
            itertools.permutations([node or None for node in nodes], 2),
            fixed={None: list(self._cluster.fixed_ports)},
            on_silent=on_silent,
        )
        for each in blocked:
            yield (warning if each.is_fixed else fault)(each.name, each.found, each.remedy)
        if all(each.is_fixed for each in blocked):
            yield ok("ports between hosts", f"{count} connections were made, from each host to each other one")

    def _all_reduce(self, reports: dict[int, Report]) -> Iterator[Check]:
        name = "all-reduce of all hosts"
        kinds = {report.device for report in reports.values()}
        if len(kinds) > 1:
            remedy = "use the same on all hosts (--device)"
            yield fault(name, "some hosts have GPUs, and others have none", remedy)
            return
        size = sum(report.devices for report in reports.values())
        url = tcp_url(self._cluster.address, self._leader.port)
        requests, first = dict[int, AllReduce](), 0
        for node, report in reports.items():
            requests[node] = AllReduce(
                [
                    RankTask(
                        rank=first + index,
                        size=size,
                        device=report.device,
                        index=index,
                        local_size=report.devices,
                        init_method=url,
                        seconds=self._cluster.seconds,
                        checks_kernels=False,
                        subject=name,
                    )
                    for index in range(report.devices)
                ]
            )
            first += report.devices
        answers = self._ask(requests, self._cluster.seconds + 2 * SECONDS)
        for node in reports:
            match answers.get(node):
                case Reduced(checks):
                    yield from checks
                case _:
                    yield fault(name, self._lost[node], _AGAIN)
