"""Whether hosts can connect to each other, at ports that the operating system assigns. `Leader.check_links` tries it
before weights are loaded, and for `quire doctor`.

leader                        each host
Listen ─────────────────────▶ listens on a few ports
◀────────────────── Listening
Reach ──────────────────────▶ connects to the others' ports
◀──────────────────── Reached
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import socket
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import msgspec

from quire.engine.cluster.network import address_of, listen

_EPHEMERAL_PORTS = 3
"""gloo, NCCL and ZeroMQ listen on ports that the operating system assigns."""
_CONNECT_SECONDS = 3.0
_ACCEPT_SECONDS = 10.0
_LISTEN_SECONDS = 60.0
"""Time for which the ports are open."""

Number = int | None
"""A follower's number; None: the leader itself."""


class Listen(msgspec.Struct, tag=True):
    """Asks a host to listen on ports of `numbers`, and on some that the operating system assigns."""

    secret: bytes
    """Hosts that connect send this first."""
    numbers: list[int] = []
    variable: str = ""
    """The environment variable with the interface that ranks use there, if it is set; "": the host's own address."""


class Listening(msgspec.Struct, tag=True):
    secret: bytes
    address: str
    assigned: list[int]
    numbers: list[int]
    """The ports of `Listen.numbers` that were free."""

    def is_for(self, request: Request) -> bool:
        """Return whether this is the answer to a request, not to an earlier one."""
        return isinstance(request, Listen) and request.secret == self.secret


class Target(msgspec.Struct):
    """A port of a host."""

    address: str
    port: int


class Reach(msgspec.Struct, tag=True):
    """Asks a host to connect to these ports."""

    secret: bytes
    targets: list[Target]


class Reached(msgspec.Struct, tag=True):
    """For each port, in their order, why it was not reached; "": it was."""

    secret: bytes
    problems: list[str]

    def is_for(self, request: Request) -> bool:
        """Return whether this is the answer to a request, not to an earlier one."""
        return isinstance(request, Reach) and request.secret == self.secret


Request = Listen | Reach
Answer = Listening | Reached


@dataclass(frozen=True)
class Blocked:
    """A port of a host that another host cannot reach."""

    name: str
    found: str
    remedy: str
    is_fixed: bool
    """Whether it was asked for; other ports are needed in any case."""

    def __str__(self) -> str:
        return f"{self.name}: {self.found}; {self.remedy}"


class Prober:
    """Carries out the leader's requests on its own host."""

    def __init__(self, address: str) -> None:
        """`address` is the host's own."""
        self._address = address
        self._listeners: list[socket.socket] = []

    def answer(self, request: Request) -> Answer:
        match request:
            case Listen(secret, numbers, variable):
                return self._listen(secret, numbers, address_of(os.environ.get(variable, "")) or self._address)
            case Reach(secret, targets):
                with ThreadPoolExecutor(max(1, len(targets))) as pool:
                    return Reached(secret, list(pool.map(lambda target: _reach(target, secret), targets)))

    def _listen(self, secret: bytes, numbers: Sequence[int], address: str) -> Listening:
        found = Listening(secret, address, [], [])
        for number in (*[0] * _EPHEMERAL_PORTS, *numbers):
            try:
                listener = listen(address, number)
            except OSError:
                continue  # the host's own check of its ports says so
            listener.settimeout(_LISTEN_SECONDS)
            self._listeners.append(listener)
            (found.numbers if number else found.assigned).append(int(listener.getsockname()[1]))
            threading.Thread(target=_serve, args=(listener, secret), daemon=True, name="probed-port").start()
        return found

    def close(self) -> None:
        """Stop listening."""
        for listener in self._listeners:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # wakes its thread
            listener.close()
        self._listeners.clear()


def _serve(listener: socket.socket, secret: bytes) -> None:
    """Answer all hosts that connect, each in a thread: a host that sends nothing keeps no other waiting."""
    with listener, contextlib.suppress(OSError):
        while True:
            connection, _ = listener.accept()
            threading.Thread(target=_answer, args=(connection, secret), daemon=True, name="probe").start()


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


def find_blocked(
    ask: Callable[[Mapping[Number, Request]], Mapping[Number, Answer]],
    names: Mapping[Number, str],
    links: Iterable[tuple[Number, Number]],
    *,
    address_flag: str,
    variable: str = "",
    fixed: Mapping[Number, list[int]] | None = None,
) -> tuple[list[Blocked], int]:
    """Let hosts connect to each other; returns the ports that are blocked, one for each pair of hosts and all of
    `fixed`, and the number of attempts.

    `ask` sends hosts a request and returns their answers; a host that does not answer is not tried. Each of `links` is
    a host that connects and a host that listens. `address_flag` is the flag that chooses the network, `variable` as in
    `Listen`.
    """
    secret, links, fixed = secrets.token_bytes(16), list(links), fixed or {}
    hosts = dict.fromkeys(host for link in links for host in link)
    answers = ask({host: Listen(secret, fixed.get(host, []), variable) for host in hosts})
    listening = {host: answer for host, answer in answers.items() if isinstance(answer, Listening)}
    targets: dict[Number, list[tuple[Number, Target]]] = {}
    for host, other in links:
        if host in listening and (there := listening.get(other)) is not None:
            ports = (*there.assigned, *there.numbers)
            targets.setdefault(host, []).extend((other, Target(there.address, port)) for port in ports)
    reached = ask({host: Reach(secret, [target for _, target in each]) for host, each in targets.items()})
    blocked, pairs = list[Blocked](), set[tuple[Number, Number]]()
    for host, answer in reached.items():
        assert isinstance(answer, Reached)
        for (other, target), problem in zip(targets[host], answer.problems, strict=True):
            is_fixed = target.port in listening[other].numbers
            if not problem or (not is_fixed and (host, other) in pairs):  # one stands for all that are assigned
                continue
            remedy = f"open it in the firewall of {target.address} for {listening[host].address}"
            if is_fixed:
                remedy += ", if hosts or clients are to use it"
            else:
                pairs.add((host, other))
                low, high = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
                network = ", ".join(filter(None, (address_flag, "QUIRE_HOST_IP", variable)))
                remedy += (
                    f", like all from {low} to {high}, which the operating system assigns, or use another network "
                    f"({network})"
                )
            found = f"{names[host]} cannot reach it on {names[other]}: {problem}"
            blocked.append(Blocked(f"port {target.port}", found, remedy, is_fixed))
    return blocked, sum(map(len, targets.values()))
