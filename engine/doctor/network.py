"""Network interfaces, names, ports, and NCCL's environment variables."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from quire.engine.cluster.network import interface_of, is_loopback, listen, source_address
from quire.engine.doctor.check import Check, fault, not_applicable, ok, warning

ROOT = Path("/")
_USUAL_MTU = 1500
_SLOWER = {
    "NCCL_P2P_DISABLE": "GPUs of a host then exchange data through its memory",
    "NCCL_SHM_DISABLE": "GPUs of a host then exchange data through the network",
    "NCCL_IB_DISABLE": "hosts then exchange data by TCP",
}
"""Variables that make NCCL avoid a transport."""


class Port(NamedTuple):
    """A port that `quire serve` would listen on."""

    purpose: str
    address: str
    number: int
    remedy: str
    is_needed: bool = True
    """Whether the checked use of this host needs it."""


def interfaces(root: Path = ROOT) -> dict[str, str]:
    """Network interfaces other than loopback: a description of each that is up; "" for the others."""
    found = {}
    for path in sorted((root / "sys/class/net").iterdir()):
        if path.name == "lo" or not (path / "operstate").exists():
            continue
        is_up = (path / "operstate").read_text().strip() in ("up", "unknown") and (path / "mtu").exists()
        found[path.name] = ", ".join(filter(None, (_speed(path), f"MTU {mtu(path.name, root)}"))) if is_up else ""
    return found


def mtu(interface: str, root: Path = ROOT) -> int:
    return int((root / f"sys/class/net/{interface}/mtu").read_text())


def _speed(path: Path) -> str:
    try:
        mbits = int((path / "speed").read_text())
    except (OSError, ValueError):  # virtual interfaces have none
        return ""
    return f"{mbits / 1000:g} Gbit/s" if mbits > 0 else ""


def links(root: Path = ROOT, used: str | None = None) -> Iterator[Check]:
    """`used` is the interface that reaches the other hosts, if there are to be some."""
    found = interfaces(root)
    up = {name: text for name, text in found.items() if text}
    text = "; ".join(f"{name} ({about})" for name, about in up.items()) or "none is up but loopback"
    if used is not None and used != "lo" and mtu(used, root) < _USUAL_MTU:
        remedy = f"raise it (ip link set {used} mtu 1500, or 9000 if all switches allow it): small packets cost time"
        yield warning("network interfaces", f"{text}; other hosts are reached through {used}", remedy)
    elif used is not None and up and used != "lo" and used not in up:
        yield fault("network interfaces", f"{used}, which reaches the other hosts, is down", f"ip link set {used} up")
    elif not up:
        yield not_applicable("network interfaces", text)
    else:
        yield ok("network interfaces", text)


def devices(root: Path = ROOT) -> list[str]:
    """Names of the InfiniBand and RoCE devices."""
    return sorted(path.name for path in root.glob("sys/class/infiniband/*"))


def communication_variables(
    environment: Mapping[str, str], names: Collection[str], hcas: Collection[str]
) -> Iterator[Check]:
    """NCCL's and gloo's variables. `names` are this host's interfaces, `hcas` its InfiniBand devices."""
    given = {name: value for name, value in environment.items() if name.startswith(("NCCL_", "GLOO_")) and value}
    is_right = True
    for name, known, what in (
        ("NCCL_SOCKET_IFNAME", names, "interface"),
        ("GLOO_SOCKET_IFNAME", names, "interface"),
        ("NCCL_IB_HCA", hcas, "InfiniBand device"),
    ):
        value = given.get(name, "")
        if value and not _selects(value, known, is_exact=name.startswith("GLOO")):
            is_right = False
            yield fault(
                name,
                f"{value} names no {what} of this host",
                f"use {' or '.join(known)}, or unset it" if known else "unset it",
            )
    for name, effect in _SLOWER.items():
        if given.get(name, "0") != "0":
            is_right = False
            yield warning(name, f"{given[name]}: {effect}", f"unset {name} unless you need it")
    if is_right:
        shown = ", ".join(f"{name}={given[name]}" for name in sorted(given))
        yield ok("NCCL and gloo variables", shown or "none is set")


def _selects(value: str, known: Collection[str], *, is_exact: bool) -> bool:
    """Whether a list as NCCL takes it (prefixes; = for whole names, ^ for all others) selects any of these names."""
    if is_exact:
        return all(name in known for name in value.split(","))
    is_negated, value = value.startswith("^"), value.removeprefix("^")
    is_whole, value = value.startswith("="), value.removeprefix("=")
    wanted = [name.partition(":")[0] for name in value.split(",") if name]  # NCCL_IB_HCA may name ports
    chosen = [name for name in known if any(name == each if is_whole else name.startswith(each) for each in wanted)]
    return bool(set(known) - set(chosen) if is_negated else chosen)


def names(
    nnodes: int,
    master: str,
    node: int,
    environment: Mapping[str, str] = os.environ,
    resolve: Callable[[str], Sequence[str]] | None = None,
    has_address: Callable[[str], bool] = lambda address: interface_of(address) is not None,
) -> Iterator[Check]:
    """The host's own name, its address for other hosts, and host 0's address."""
    resolve = resolve or _resolve
    own = socket.gethostname()
    try:
        addresses, problem = resolve(own), ""
    except OSError as error:
        addresses, problem = [], f"{own} cannot be resolved: {error.strerror or error}"
    text = problem or f"{own} is {', '.join(addresses)}"
    if nnodes > 1 and not problem and all(map(is_loopback, addresses)):
        problem = f"{text}, an address of each host's own"
    if problem:
        remedy = "add the name with this host's address to /etc/hosts: Ray, MPI and gloo look it up"
        yield warning("host name", problem, remedy)
    else:
        yield ok("host name", text)
    for name in ("QUIRE_HOST_IP", "VLLM_HOST_IP"):
        if address := environment.get(name):
            if not has_address(address):
                yield fault(name, f"no interface of this host has the address {address}", "set it to one (ip address)")
            else:
                yield ok(name, f"{address} is an address of this host")
            break
    else:
        yield not_applicable("QUIRE_HOST_IP", "not set: the interface that reaches host 0 is used")
    if nnodes == 1:
        return
    try:
        towards = source_address(master)
    except OSError as error:
        remedy = "check the address, the DNS and the routes (ip route get ADDRESS)"
        yield fault("--master-addr", f"{master} cannot be reached: {error.strerror or error}", remedy)
        return
    if is_loopback(towards) and node:
        remedy = "start every host with an address of host 0 that it can reach"
        yield warning("--master-addr", f"{master} is this host itself", remedy)
    else:
        yield ok("--master-addr", f"{master}, reached from {towards}")


def _resolve(name: str) -> list[str]:
    return list(dict.fromkeys(str(entry[4][0]) for entry in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)))


def ports(wanted: Sequence[Port]) -> Iterator[Check]:
    """Whether `quire serve` can listen on its ports."""
    for port in wanted:
        name = f"port {port.number}"
        try:
            listen(port.address, port.number).close()
        except OSError as error:
            in_use = error.errno == errno.EADDRINUSE
            reason = "another program listens there" if in_use else error.strerror or str(error)
            text = f"for {port.purpose}, at {port.address}: {reason}"
            remedy = f"{port.remedy}; ss -ltnp 'sport = :{port.number}' shows who it is" if in_use else port.remedy
            yield fault(name, text, remedy) if port.is_needed else warning(name, text, remedy)
        else:
            yield ok(name, f"free for {port.purpose}, at {port.address}")
