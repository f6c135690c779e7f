"""The checks between hosts: `quire doctor --nnodes N` runs on each, and the others join node 0 as a server's hosts do.

node R                         node 0
Report ──────────────────────▶ compares versions, prints
◀──────── Listen … Listening ▶ each host listens on a few ports
◀────────── Reach … Reached ─▶ each host connects to the others' ports
◀────── AllReduce … Reduced ─▶ all devices of all hosts
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
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

_EPHEMERAL_PORTS = 3
"""gloo, NCCL and ZeroMQ listen on ports that the operating system assigns."""
_CONNECT_SECONDS = 3.0
_ACCEPT_SECONDS = 10.0
_REPORT_SECONDS = 2 * SECONDS
_ANSWER_SECONDS = 60.0
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


class Listen(msgspec.Struct, tag=True):
    """Asks a host to listen on ports of `numbers`, and on some that the operating system assigns."""

    secret: bytes
    """Hosts that connect send this first."""
    numbers: list[int]


class Listening(msgspec.Struct, tag=True):
    address: str
    assigned: list[int]
    numbers: list[int]
    """The ports of `Listen.numbers` that were free."""


class Target(msgspec.Struct):
    """A port of a host."""

    node: int
    address: str
    port: int


class Reach(msgspec.Struct, tag=True):
    """Asks a host to connect to these ports."""

    secret: bytes
    targets: list[Target]


class Reached(msgspec.Struct, tag=True):
    """For each port, in their order, why it was not reached; "": it was."""

    problems: list[str]


class AllReduce(msgspec.Struct, tag=True):
    """Asks a host to run these ranks."""

    tasks: list[RankTask]


class Reduced(msgspec.Struct, tag=True):
    checks: list[Check]


Request = Listen | Reach | AllReduce
Answer = Report | Listening | Reached | Reduced


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


class Prober:
    """Carries out node 0's requests on its own host."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._listeners: list[socket.socket] = []

    def answer(self, request: Request) -> Answer:
        match request:
            case Listen(secret, numbers):
                return self._listen(secret, numbers)
            case Reach(secret, targets):
                with ThreadPoolExecutor(max(1, len(targets))) as pool:
                    return Reached(list(pool.map(lambda target: _reach(target, secret), targets)))
            case AllReduce(tasks):
                for task in tasks:
                    task.token = self._cluster.token
                return Reduced(list(run(tasks, self._cluster.address)))

    def _listen(self, secret: bytes, numbers: Sequence[int]) -> Listening:
        own, found = address_towards(self._cluster.address), Listening("", [], [])
        found.address = own
        for number in (*[0] * _EPHEMERAL_PORTS, *numbers):
            try:
                listener = network.listen(own, number)
            except OSError:
                continue  # the host's own check of its ports says so
            self._listeners.append(listener)
            (found.numbers if number else found.assigned).append(int(listener.getsockname()[1]))
            threading.Thread(target=_serve, args=(listener, secret), daemon=True, name="doctor-port").start()
        return found

    def close(self) -> None:
        for listener in self._listeners:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # wakes its thread
            listener.close()


def _serve(listener: socket.socket, secret: bytes) -> None:
    """Answer all hosts that connect, each in a thread: a host that sends nothing keeps no other waiting."""
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        threading.Thread(target=_answer, args=(connection, secret), daemon=True, name="doctor-connection").start()


def _answer(connection: socket.socket, secret: bytes) -> None:
    """Answer a host that knows the secret."""
    with contextlib.suppress(OSError), connection:
        connection.settimeout(_ACCEPT_SECONDS)
        if hmac.compare_digest(connection.recv(len(secret), socket.MSG_WAITALL), secret):
            connection.sendall(b"\n")


def _reach(target: Target, secret: bytes) -> str:
    """Why a port cannot be reached; "" if it can."""
    try:
        with socket.create_connection((target.address, target.port), _CONNECT_SECONDS) as connection:
            connection.sendall(secret)
            connection.shutdown(socket.SHUT_WR)
            return "" if connection.recv(1) else "another program answers there"
    except OSError as error:
        return "timed out" if isinstance(error, TimeoutError) else (error.strerror or str(error)).lower()


def follow(cluster: Cluster, check: Callable[[], Report]) -> str:
    """Join node 0, check this host, and carry out node 0's requests until it ends; returns why it ended if it failed.

    Raises `ConfigError` if node 0 cannot be joined.
    """
    encode, prober = msgspec.msgpack.Encoder().encode, Prober(cluster)
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
            request = msgspec.msgpack.decode(follower.receive(None), type=Request)
            follower.send(encode(prober.answer(request)))
    except LinkEnded as end:
        reason = ""
        return end.reason
    finally:
        prober.close()
        follower.close(reason)


class Coordinator:
    """Node 0: lets the others join, and asks them."""

    def __init__(self, cluster: Cluster) -> None:
        """Raises `ConfigError` if the address is not this host's, or the port is in use."""
        self._cluster, self._own, self._prober = cluster, cluster.hello(), Prober(cluster)
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

    def _on_lost(self, number: int, reason: str) -> None:
        self._lost[number] = reason
        self._answers.put((number, None))

    def close(self) -> None:
        self._leader.close()
        self._prober.close()

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

    def _ask(self, requests: dict[int, Request], seconds: float = _ANSWER_SECONDS) -> dict[int, Answer]:
        """Ask several hosts at once; hosts that are lost or do not answer are not in the result."""
        for number, request in requests.items():
            if number:
                self._leader.send(number, self._encode(request))
        own = {0: self._prober.answer(requests[0])} if 0 in requests else {}
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
        secret = secrets.token_bytes(16)
        fixed = {0: list(self._cluster.fixed_ports)}
        answers = self._ask({node: Listen(secret, fixed.get(node, [])) for node in nodes})
        listening = {node: answer for node, answer in answers.items() if isinstance(answer, Listening)}
        targets = {
            node: [
                Target(other, there.address, port)
                for other, there in listening.items()
                if other != node
                for port in (*there.assigned, *there.numbers)
            ]
            for node in listening
        }
        reached = self._ask({node: Reach(secret, targets[node]) for node in listening})
        blocked = set[tuple[int, int]]()
        for node, answer in reached.items():
            assert isinstance(answer, Reached)
            for target, problem in zip(targets[node], answer.problems, strict=True):
                if not problem:
                    continue
                text = f"{self.names[node]} cannot reach it on {self.names[target.node]}: {problem}"
                name = f"port {target.port}"
                remedy = f"open it in the firewall of {target.address} for {listening[node].address}"
                if target.port in listening[target.node].numbers:
                    yield warning(name, text, f"{remedy}, if hosts or clients are to use it")
                elif (node, target.node) not in blocked:  # one of them stands for all
                    low, high = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
                    blocked.add((node, target.node))
                    remedy += f", like all from {low} to {high}, which the operating system assigns"
                    yield fault(name, text, remedy)
        if not blocked:
            count = sum(map(len, targets.values()))
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
        requests, first = dict[int, Request](), 0
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
