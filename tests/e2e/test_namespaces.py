"""The hosts that other tests use are really separate."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

from quire.engine.cluster import network
from tests.fakes.namespaces import Host, _remove_leftovers
from tests.fakes.namespaces import hosts as hosts

pytestmark = pytest.mark.slow

_SERVE = """
import os, socket
server = socket.create_server(("", 7000))
print("boot", os.readlink("/proc/self/ns/pid"), "ready", flush=True)
while True:
    connection, _ = server.accept()
    connection.sendall(b"hello")
    connection.close()
"""


def test_hosts_reach_each_other_until_the_cable_is_out(hosts: tuple[Host, Host]) -> None:
    first, second = hosts
    server = second.start(sys.executable, "-c", _SERVE)
    assert server.wait_for(r"boot (\S+) ready")[1] != os.readlink("/proc/self/ns/pid")
    with first.inside():
        with socket.create_connection((second.address, 7000), timeout=5) as connection:
            assert connection.recv(5) == b"hello"
        with pytest.raises(OSError, match="refused"):
            socket.create_connection(("127.0.0.1", 7000), timeout=5)
    second.set_link(False)
    with first.inside(), pytest.raises(OSError, match="timed out"):
        socket.create_connection((second.address, 7000), timeout=0.5)
    assert len(server.family()) == 2
    server.kill_all()
    assert server.wait(5)


def test_an_interface_is_found_by_its_other_addresses(hosts: tuple[Host, Host]) -> None:
    first, _ = hosts
    with first.inside():
        name = network.interface_of(first.address)
        assert name is not None
        for added in (["10.9.9.1/24"], ["10.9.9.2/24"], ["10.9.8.1/24", "label", f"{name}:1"]):
            subprocess.run(["ip", "address", "add", *added, "dev", name], check=True)
            assert network.interface_of(added[0].removesuffix("/24")) == name
        assert network.interface_of("10.9.9.3") is None


def test_what_a_killed_run_has_left_is_removed() -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    name = f"quire-test-{ended.pid}-1"
    subprocess.run(["ip", "netns", "add", name], check=True)
    left = subprocess.Popen(["ip", "netns", "exec", name, "sleep", "60"])
    try:
        while (
            name
            not in subprocess.run(["ip", "netns", "identify", str(left.pid)], capture_output=True, text=True).stdout
        ):
            assert left.poll() is None
        _remove_leftovers()
        assert left.wait(5) == -9
        assert name not in subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    finally:
        left.kill()
