"""`quire doctor` on two hosts."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import pytest

from tests.e2e.serving import quire
from tests.fakes.namespaces import Host
from tests.fakes.namespaces import hosts as hosts

pytestmark = pytest.mark.slow

TOKEN = "a token for tests only"


def diagnosed(hosts: tuple[Host, Host]) -> tuple[dict[str, Any], tuple[int, int]]:
    """The output of node 0, and the exit codes of both."""
    first, second = hosts
    arguments = ("doctor", "--json", "--device", "cpu", "--nnodes", "2", "--master-addr", first.address)
    commands = [
        host.start(*quire(*arguments, "--node-rank", str(rank)), QUIRE_CLUSTER_TOKEN=TOKEN)
        for rank, host in enumerate((first, second))
    ]
    codes = (commands[0].wait(280), commands[1].wait(60))
    commands[0].join()
    text = commands[0].text
    return json.loads(text[text.index("\n{") :]), codes


def test_two_hosts(hosts: tuple[Host, Host]) -> None:
    result, codes = diagnosed(hosts)
    assert codes == (0, 0), result
    assert [host["name"] for host in result["hosts"]] == ["node 0 (10.77.0.1)", "node 1 (10.77.0.2)"]
    checks = {check["name"]: check for check in result["cluster"]}
    for name in ("hosts", "versions", "MTU", "ports between hosts", "all-reduce of all hosts"):
        assert checks[name]["status"] == "ok", checks[name]
    assert "2 processes by gloo" in checks["all-reduce of all hosts"]["found"]


def test_a_firewall_is_found(hosts: tuple[Host, Host]) -> None:
    """The second host takes no connections at ports that the operating system assigns."""
    rule = ("-A", "INPUT", "-i", "eth0", "-p", "tcp", "--syn", "--dport", "32768:60999", "-j", "DROP")
    subprocess.run(["ip", "netns", "exec", hosts[1].name, "iptables", *rule], check=True)
    result, (code, _) = diagnosed(hosts)
    assert (code, result["status"]) == (1, "fault")
    checks = {check["name"]: check for check in result["cluster"]}
    (blocked,) = (check for check in checks.values() if check["status"] == "fault")
    assert blocked["name"].startswith("port ")
    assert blocked["found"] == "node 0 (10.77.0.1) cannot reach it on node 1 (10.77.0.2): timed out"
    assert "open it in the firewall of 10.77.0.2 for 10.77.0.1, like all from 32768 to 60999" in blocked["remedy"]
    assert checks["all-reduce of all hosts"]["found"] == "not tried, as a port is blocked"
