"""Addresses, network interfaces and ports of this host."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import logging
import os
import socket
import struct
import time
from array import array
from collections.abc import Iterator
from pathlib import Path

from quire.engine.protocol.errors import ConfigError

LOOPBACK = "127.0.0.1"
_SIOCGIFCONF, _IFREQ, _MAX_ADDRESSES = 0x8912, struct.Struct("@16s4x4s16x"), 1024
"""netdevice(7): the ioctl that lists every IPv4 address of the host with the interface's name."""

_TCP_RTO_MAX_MS, _RTO_MAX_MS = 44, 1000
"""linux/tcp.h: the option that sets the maximum interval of retransmissions, and the least value it takes."""
_UNANSWERED_MS = 900_000
"""Time after which Linux closes a connection that is cut: about its default, which shorter intervals would shorten."""

logger = logging.getLogger(__name__)


def source_address(host: str) -> str:
    """Return this host's address on the interface that reaches `host`; raises `OSError`."""
    family, kind, _, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(target)  # sends nothing
        return str(probe.getsockname()[0])


def address_towards(host: str, seconds: float = 0.0) -> str:
    """Return QUIRE_HOST_IP, or this host's address on the interface that reaches `host`.

    Name resolution is retried for `seconds`. Raises `ConfigError`.
    """
    if own := os.environ.get("QUIRE_HOST_IP"):
        return own
    deadline = time.monotonic() + seconds
    while True:
        try:
            return source_address(host)
        except OSError as error:
            if time.monotonic() >= deadline:
                raise ConfigError(
                    f"{host} cannot be reached from this host: {(error.strerror or str(error)).lower()}; check the "
                    "address, or give this host's own in QUIRE_HOST_IP"
                ) from None
        time.sleep(min(1.0, max(0.0, deadline - time.monotonic())))


def own_address() -> str:
    """Return QUIRE_HOST_IP, or the address with which this host reaches others; 127.0.0.1 if it reaches none."""
    for elsewhere in ("192.0.2.1", "2001:db8::1"):  # RFC 5737, RFC 3849: nobody's
        with contextlib.suppress(ConfigError):
            return address_towards(elsewhere)
    return LOOPBACK


def resolve_address(host: str) -> str:
    """Return the IP address of a host name; raises `ConfigError`."""
    try:
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except (OSError, UnicodeError) as error:  # one that IDNA cannot encode
        reason = (getattr(error, "strerror", None) or str(error)).lower()
        raise ConfigError(f"{host}: {reason}; expected the address or the name of a host") from None


def interface_of(address: str) -> str | None:
    """Return the network interface with this address (primary or alias); None if this host has no such address."""
    if ":" in address:
        target_hex = socket.inet_pton(socket.AF_INET6, address.partition("%")[0]).hex()
        table = Path("/proc/net/if_inet6")
        lines = (line.split() for line in table.read_text().splitlines()) if table.exists() else ()
        return next((fields[5] for fields in lines if fields[0] == target_hex), None)
    if address.startswith("127."):
        return "lo"
    return next((name for name, its in _ipv4_interfaces() if its == address), None)


def address_of(interface: str) -> str:
    """Return the first IPv4 address of an interface; "" if it has none."""
    return next((its for name, its in _ipv4_interfaces() if name == interface), "")


def _ipv4_interfaces() -> Iterator[tuple[str, str]]:
    """Yield every IPv4 address of this host, after the name of its interface."""
    found = array("B", bytes(_IFREQ.size * _MAX_ADDRESSES))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        start, length = found.buffer_info()
        answer = fcntl.ioctl(probe, _SIOCGIFCONF, struct.pack("iP", length, start))
    label: bytes
    for label, its in _IFREQ.iter_unpack(found.tobytes()[: struct.unpack("iP", answer)[0]]):
        # an alias is named interface:alias
        yield label.rstrip(b"\0").decode().partition(":")[0], socket.inet_ntoa(its)


def set_interfaces(address: str) -> None:
    """Let gloo and NCCL use the interface that reaches `address`, unless the user has set one.

    By default gloo uses the address of the host name, which is often 127.0.0.1. Raises `ConfigError` if this host has
    no such interface. Processes started later inherit the setting.
    """
    own = address_towards(address)
    interface = interface_of(own)
    if interface is None:
        raise ConfigError(f"QUIRE_HOST_IP={own}: no network interface of this host has that address")
    used = sorted({os.environ.setdefault(name, interface) for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")})
    if interface != "lo":
        logger.info("ranks exchange data by gloo or NCCL, which do not encrypt, on interface %s", ", ".join(used))


def is_local(address: str) -> bool:
    """Return whether a name or address is one of this host's. Raises `OSError` if it cannot be resolved."""
    for family, kind, _, _, target in socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM):
        with contextlib.suppress(OSError), socket.socket(family, kind) as probe:
            probe.bind(target)
            return True
    return False


def listen(address: str, port: int) -> socket.socket:
    """Listen as a server does; raises `OSError`."""
    family, kind, _, _, where = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(where)
        listener.listen()
    except OSError:
        listener.close()
        raise
    return listener


def limit_retransmission(fd: int) -> None:
    """Let data flow within a second after a cut of this TCP connection; without effect before Linux 6.15.

    By default the intervals of retransmissions double, so that after a cut of 10 s it takes up to 10 s more.
    """
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, _TCP_RTO_MAX_MS, _RTO_MAX_MS)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNANSWERED_MS)


def limit_all_retransmission() -> None:
    """Call `limit_retransmission` for all TCP connections of this process: gloo and NCCL have no such option."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                limit_retransmission(int(name))


def is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


def tcp_url(address: str, port: int) -> str:
    """Return the URL of a port, as ZMQ and torch.distributed take it."""
    return f"tcp://{f'[{address}]' if ':' in address else address}:{port}"
