"""Hosts for tests: network namespaces joined by a cable or a switch, each with processes of its own.

Hosts have separate namespaces for shared memory and process numbers, too, so that nothing takes two of them for one
machine. Namespaces that a killed run has left are removed by the next run.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

_PREFIX = "quire-test-"
_CLONE_NEWNET = 0x40000000
"""sched.h"""


@dataclass
class Command:
    """A program that runs on a host; `lines` is its output so far, errors included."""

    process: subprocess.Popen[str]
    arguments: tuple[str, ...]
    lines: list[str] = field(default_factory=list)
    _news: threading.Condition = field(default_factory=threading.Condition)
    _is_over: bool = False

    def __post_init__(self) -> None:
        self.everybody: set[psutil.Process] = set()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._news:
                self.lines.append(line)
                self._news.notify_all()
        with self._news:
            self._is_over = True
            self._news.notify_all()

    @property
    def text(self) -> str:
        return "".join(self.lines)

    def wait_for(self, pattern: str, seconds: float = 120.0) -> re.Match[str]:
        """Wait until it has printed a line like this; raises `AssertionError` with its output if it does not."""
        found: list[re.Match[str]] = []

        def look() -> bool:
            found[:] = [match for line in self.lines if (match := re.search(pattern, line))]
            return bool(found) or self._is_over

        with self._news:
            self._news.wait_for(look, seconds)
        assert found, f"no line like {pattern!r} in:\n{self.text}"
        return found[0]

    def wait(self, seconds: float) -> int:
        """Wait until it has ended; returns its exit code."""
        return self.process.wait(seconds)

    def family(self) -> set[psutil.Process]:
        """It and every process that it has started, now or when it was asked for before."""
        with contextlib.suppress(psutil.NoSuchProcess):
            parent = psutil.Process(self.process.pid)
            self.everybody |= {parent, *parent.children(recursive=True)}
        return self.everybody

    def named(self, name: str) -> psutil.Process:
        """One of its processes: quire-core, quire-rank-0, …"""
        (process,) = (process for process in self.family() if process.is_running() and process.name() == name)
        return process

    def kill_all(self) -> None:
        """Kill it and all its processes, as in a power failure."""
        for process in self.family():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def join(self) -> None:
        self.process.wait()
        self._reader.join()
        assert self.process.stdout is not None
        self.process.stdout.close()


@dataclass
class Host:
    """A network namespace."""

    name: str
    address: str
    address6: str = ""
    """An IPv6 address, if there is IPv6 here."""
    commands: list[Command] = field(default_factory=list)

    def start(self, *command: str, **environment: str) -> Command:
        """Run a program on this host."""
        apart = ["unshare", "--pid", "--ipc", "--fork", "--kill-child", "--mount-proc"]
        process = subprocess.Popen(
            ["ip", "netns", "exec", self.name, *apart, *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, **environment},
        )
        self.commands.append(Command(process, command))
        return self.commands[-1]

    def set_link(self, is_up: bool) -> None:
        """Plug in the cable, or unplug it."""
        _ip("-n", self.name, "link", "set", "eth0", "up" if is_up else "down")

    def set_names(self, **addresses: str) -> None:
        """Set the addresses of host names for programs that are started from now on; a later call changes them for
        these, too."""
        hosts = Path(f"/etc/netns/{self.name}/hosts")  # ip-netns(8) mounts it over /etc/hosts
        hosts.parent.mkdir(parents=True, exist_ok=True)
        lines = [f"{address} {name}\n" for name, address in {"localhost": "127.0.0.1", **addresses}.items()]
        hosts.write_text("".join(lines))

    def inside(self) -> contextlib.AbstractContextManager[None]:
        """Within the block, sockets that this thread opens are on this host."""
        return inside(f"/var/run/netns/{self.name}")

    def close(self) -> None:
        for command in self.commands:
            command.family()
        for number in _ip("netns", "pids", self.name).split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(number), signal.SIGKILL)
        for command in self.commands:
            command.kill_all()
            command.join()
            print(f"--- on {self.name}: {' '.join(command.arguments)[:500]}")
            print(command.text)  # pytest shows it when the test fails
        deadline = time.monotonic() + 10
        while _ip("netns", "pids", self.name) and time.monotonic() < deadline:
            time.sleep(0.05)
        _ip("netns", "delete", self.name)
        shutil.rmtree(f"/etc/netns/{self.name}", ignore_errors=True)


@contextlib.contextmanager
def inside(network: str) -> Iterator[None]:
    """Within the block, sockets that this thread opens are in this network namespace, a path."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open("/proc/thread-self/ns/net") as home, open(network) as there:
        if libc.setns(there.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")
        try:
            yield
        finally:
            if libc.setns(home.fileno(), _CLONE_NEWNET):
                os._exit(70)  # nothing that follows could be right


@contextlib.contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Two hosts joined by a cable, at 10.77.0.1 and 10.77.0.2; both and all that runs there are gone afterwards.

    Fails the test where this may not be done.
    """
    with _hosts(2) as (first, second):
        _connect(first, "eth0", second, "eth0")
        _plug_in([first, second])
        yield first, second


@contextlib.contextmanager
def switched_hosts(count: int) -> Iterator[list[Host]]:
    """So many hosts at a switch, at 10.77.0.1 and so on; as `two_hosts`."""
    with _hosts(count + 1) as (*hosts, switch):
        _ip("-n", switch.name, "link", "add", "switch", "type", "bridge")
        _ip("-n", switch.name, "link", "set", "switch", "up")
        for number, host in enumerate(hosts):
            _connect(host, "eth0", switch, f"port{number}")
            _ip("-n", switch.name, "link", "set", f"port{number}", "up", "master", "switch")
        _plug_in(hosts)
        yield hosts


@contextlib.contextmanager
def _hosts(count: int) -> Iterator[list[Host]]:
    """Hosts that are not connected."""
    reason = _missing()
    if reason:
        pytest.fail(f"network namespaces cannot be made here, and several hosts are not tested: {reason}")
    _remove_leftovers()
    made: list[Host] = []
    try:
        for number in range(1, count + 1):
            has_ipv6 = Path("/proc/net/if_inet6").exists()
            address6 = f"fd77::{number}" if has_ipv6 else ""
            host = Host(f"{_PREFIX}{os.getpid()}-{number}", f"10.77.0.{number}", address6)
            _ip("netns", "add", host.name)
            made.append(host)
        with pytest.MonkeyPatch.context() as patch:
            # Ranks of one host that an earlier test ran in this process have had them set.
            for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
                patch.delenv(name, raising=False)
            yield made
    finally:
        for host in made:
            host.close()


def _connect(one: Host, interface: str, other: Host, other_interface: str) -> None:
    """Put a cable between two hosts."""
    ends = (interface, "netns", one.name, "type", "veth", "peer", "name", other_interface, "netns", other.name)
    _ip("link", "add", *ends)


def _plug_in(hosts: Sequence[Host]) -> None:
    """Give the interfaces of hosts their addresses, and turn them on."""
    for host in hosts:
        _ip("-n", host.name, "link", "set", "lo", "up")
        _ip("-n", host.name, "address", "add", f"{host.address}/24", "dev", "eth0")
        if host.address6:
            _ip("-n", host.name, "address", "add", f"{host.address6}/64", "dev", "eth0", "nodad")
        host.set_link(True)


@pytest.fixture
def hosts() -> Iterator[tuple[Host, Host]]:
    """Two hosts joined by a cable."""
    with two_hosts() as both:
        yield both


def _missing() -> str:
    """The reason why there can be no namespaces here; empty: nothing is missing."""
    for program, package in (("ip", "iproute2"), ("unshare", "util-linux")):
        if shutil.which(program) is None:
            return f"there is no `{program}`; install {package}"
    name = f"{_PREFIX}{os.getpid()}-0"
    tried = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if tried.returncode:
        return f"`ip netns add` says: {tried.stderr.strip()} (root, or CAP_NET_ADMIN and CAP_SYS_ADMIN, may do that)"
    _ip("netns", "delete", name)
    return ""


def _remove_leftovers() -> None:
    """Remove the namespaces of killed runs."""
    folder = Path("/var/run/netns")
    for path in folder.iterdir() if folder.is_dir() else []:
        found = re.fullmatch(rf"{_PREFIX}(\d+)-\d+", path.name)
        if found and not psutil.pid_exists(int(found[1])):
            with contextlib.suppress(subprocess.CalledProcessError):  # another run may be removing it
                Host(path.name, "").close()


def _ip(*arguments: str) -> str:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    if done.returncode:
        raise subprocess.CalledProcessError(done.returncode, ["ip", *arguments], stderr=done.stderr)
    return done.stdout
