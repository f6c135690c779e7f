"""`quire doctor` on this machine."""

from __future__ import annotations

import json
import socket
import subprocess

import pytest

from quire.kernels import cpu
from tests.e2e.serving import quire

NAMES = {
    *("python", "packages", "processor", "CPU quota", "memory", "memory overcommit", "open files", "locked memory"),
    *("processes and threads", "shared memory", "model cache", "temporary folder", "network interfaces", "host name"),
    *("QUIRE_HOST_IP", "instruction set", "CPU kernels", "kernels on cpu", "all-reduce"),
}


@pytest.mark.slow
def test_the_checks_of_a_host_whose_port_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        command = quire("doctor", "--json", "--device", "cpu", "--port", str(port))
        done = subprocess.run(command, capture_output=True, text=True, timeout=250)
    result = json.loads(done.stdout)
    (host,) = result["hosts"]
    checks = {check["name"]: check for check in host["checks"]}
    assert not NAMES - checks.keys()
    assert {check["status"] for check in checks.values()} <= {"ok", "warning", "fault", "not applicable"}
    for check in checks.values():
        assert bool(check["remedy"]) == (check["status"] in ("warning", "fault")), check
    assert (done.returncode, result["status"]) == (1, "fault")
    assert checks[f"port {port}"]["status"] == "fault"
    assert "another program listens there" in checks[f"port {port}"]["found"]
    kernels = checks["kernels on cpu"]
    assert kernels["status"] == "ok"
    assert kernels["values"] == {"right": len(cpu.__all__) - 2, "wrong": 0}  # all but `load` and `CannotBuild`
    reduced = checks["all-reduce"]
    assert (reduced["status"], reduced["values"]["ranks"]) == ("ok", 2)
    assert "by shared memory" in reduced["found"]
